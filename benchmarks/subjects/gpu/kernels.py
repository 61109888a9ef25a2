"""The Triton kernels on torch tensors side by side with torch's own on a GPU: first the numbers, then the time.

    python benchmarks/gpu.py kernels                     # on an H100 or H200; --ops norm,attention chooses
    python benchmarks/gpu.py kernels --graph --minutes 3 # measures the cases that are ready after half of that time
    python benchmarks/gpu.py kernels --tune              # times tiles instead, and writes the tables of later calls
    TRITON_INTERPRET=1 python benchmarks/gpu.py kernels --dry # small cases on a CPU, interpreted

The cases are the operations' own of real models, forward, and forward with backward; the peers are the benchmark's
(`vishwamai.bench.subjects`) and those below, which exist on GPUs only. Every round calls the contestants in a new
random order, each after a write that empties the L2 cache, timed by CUDA events; the result is the median. Before all
that, processes of their own make the arrays of every case, compute their truth and compile our kernels. A contestant
whose numbers are outside the contract's tolerance (a peer: eight times that) is named and not timed. Shares are of what
this GPU was seen to do in the same run: copying, or cuBLAS's bfloat16 product, whichever bounds the case.

`vishwamai bench` measures the same kernels in JAX programs, compared with XLA.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import json
import math
import multiprocessing
import os
import pathlib
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

# JAX computes the truth in float64, on the GPU where it can, by kernels that nobody tunes, and gives the memory back.
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")

import torch

import vishwamai.torch as vt
from vishwamai.bench import numbers
from vishwamai.bench.candidates import Contestant, theirs
from vishwamai.bench.gradient import gradient_case, work
from vishwamai.bench.numbers import Numbers, Truth
from vishwamai.bench.ratios import PEERS
from vishwamai.bench.subject import Arrays, Peer, Sample, subject, to_torch, torch_peer
from vishwamai.core.cases import Case
from vishwamai.measure.gpu_timing import gpu_sampler
from vishwamai.measure.timing import Call, Sampler, sampler, side_by_side
from vishwamai.ops.catalogue import Operation, chosen, operations, specs_of
from vishwamai.torch.tuner import Timer, gpu_timer

OURS = "vishwamai.torch"
SHARED_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


def triton_serves() -> contextlib.AbstractContextManager[None]:
    """Triton's interpreter, as the tests run it."""
    sys.path.append(str(pathlib.Path(__file__).parents[3] / "tests"))
    return importlib.import_module("triton_kernels").triton_serves()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A case, perhaps with its gradients, and who computes it.

    Attributes:
      case: the operation's case.
      run: the same, or the case of its gradients.
      contestants: ours first.
    """

    operation: Operation
    case: Case
    run: Case
    contestants: list[Contestant]

    @property
    def gradients(self) -> bool:
        return self.run is not self.case

    def work(self) -> tuple[float, float]:
        """(FLOP, bytes) of a call."""
        spec = specs_of(self.operation, self.case)[0]
        return work(self.run, spec) if self.gradients else (spec.flops, spec.bytes_moved)


@dataclasses.dataclass
class Row:
    """What came out for one contestant; `ms` None where it was not timed, and `note` says why."""

    op: str
    case: str
    contestant: str
    error: float | None = None
    ms: float | None = None
    tflops: float | None = None
    tbs: float | None = None
    share: float | None = None
    note: str = ""


def _attention(case: Case, peers: list[Peer]) -> Iterator[Peer]:
    """torch's attention by each of its backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def by(backend: Any, peer: Peer) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with sdpa_kernel(backend):
                return peer.call(*arguments)

        return run

    for peer in peers:
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
            yield dataclasses.replace(peer, name=f"torch {name}", call=by(backend, peer))


def _gemm(case: Case, peers: list[Peer]) -> Iterator[Peer]:
    """torch's products of 8-bit numbers with scales for rows and columns."""
    arrays = case.arrays
    if set(arrays) != {"a", "b", "scale_a", "scale_b"} or any(len(arrays[name].shape) != 2 for name in "ab"):
        return

    def prepare(arrays: Arrays) -> tuple[Any, ...]:
        a, b, scale_a, scale_b = (to_torch(arrays[name]) for name in ("a", "b", "scale_a", "scale_b"))
        return a, b.T.contiguous().T, scale_a[:, None], scale_b[None]  # cuBLAS reads columns of b

    def int8(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
        product = torch._int_mm(a, b)  # pyright: ignore[reportPrivateImportUsage]
        return (product * scale_a * scale_b).bfloat16()

    def fp8(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
        scaled = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
        return scaled(a, b, scale_a, scale_b, out_dtype=torch.bfloat16)

    narrow = {"int8": ("torch._int_mm, scaled", int8), "float8_e4m3fn": ("torch._scaled_mm", fp8)}
    if arrays["a"].dtype in narrow:
        name, call = narrow[arrays["a"].dtype]
        yield Peer(name, "torch", prepare, call)


def _grouped(case: Case, peers: list[Peer]) -> Iterator[Peer]:
    if hasattr(torch, "_grouped_mm") and peers:
        ends = torch.from_numpy(case.options["group_sizes"]).cumsum(0).int()

        def prepare(arrays: Arrays) -> tuple[Any, ...]:
            return to_torch(arrays["lhs"]), to_torch(arrays["rhs"]), ends

        def call(lhs: Any, rhs: Any, ends: Any) -> Any:
            return torch._grouped_mm(lhs, rhs, offs=ends)  # pyright: ignore[reportPrivateImportUsage]

        yield Peer("torch._grouped_mm", "torch", prepare, call)


def _sparse(case: Case, peers: list[Peer]) -> Iterator[Peer]:
    block = tuple(case.arrays["values"].shape[1:])

    def call(x: Any, weight: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():  # torch's inference mode takes no sparse tensors
            return torch.nn.functional.linear(x.clone(), weight)

    for dense in peers:

        def prepare(arrays: Arrays, dense: Peer = dense) -> tuple[Any, ...]:
            x, weight = dense.prepare(arrays)
            return x, weight.T.contiguous().to_sparse_bsr(block[::-1])

        yield Peer("torch, BSR", "torch", prepare, call)


def _norm(case: Case, peers: list[Peer]) -> Iterator[Peer]:
    if importlib.util.find_spec("liger_kernel") and set(case.arrays) == {"x", "scale"}:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]

        eps = case.options.get("eps", 1e-6)
        yield torch_peer("Liger", case, lambda x, w: LigerRMSNormFunction.apply(x, w, eps, 0.0, "none", False))


def _loss(case: Case, peers: list[Peer]) -> Iterator[Peer]:
    if importlib.util.find_spec("liger_kernel") and peers:
        from liger_kernel.ops.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
            LigerFusedLinearCrossEntropyFunction,
        )

        yield torch_peer("Liger", case, lambda x, w, y: LigerFusedLinearCrossEntropyFunction.apply(x, w, y.long())[0])


ON_GPUS: dict[str, Callable[[Case, list[Peer]], Iterable[Peer]]] = {
    "attention": _attention,
    "gemm": _gemm,
    "grouped_gemm": _grouped,
    "block_sparse_matmul": _sparse,
    "norm": _norm,
    "linear_cross_entropy": _loss,
}
"""Peers that exist on GPUs only: of a case, and of the peers that torch has anywhere."""


def _entries(case: Case) -> int:
    """How large a case is; 0 where an array is empty, or of a dtype that no kernel for GPUs has."""
    sizes = (0 if init.dtype == "float64" else math.prod(init.shape) for init in case.arrays.values())
    return math.prod(sizes)


def comparisons(operation: Operation, dry: bool) -> Iterator[Comparison]:
    """The cases of real models that `vishwamai.torch` computes; dry, the smallest of all that has a peer."""
    about, device = subject(operation.name), "cpu" if dry else "cuda"
    small = sorted((case for case in operation.tagged("contract") if _entries(case)), key=_entries)
    for case in small if dry else operation.tagged("model"):
        ours, peers = about.in_torch(case), [p for p in about.peers(case) if p.framework == "torch"]
        if ours is None or (dry and not peers):
            continue
        more = [] if dry else list(ON_GPUS.get(operation.name, lambda case, peers: ())(case, peers))
        for run in filter(None, (case, gradient_case(case))):
            needed = set() if run is case else set(case.differentiable)
            able = [p for p in (ours, *peers, *more) if needed <= set(p.arguments)]
            yield Comparison(operation, case, run, [theirs(p, case, run is not case, device) for p in able])
        if dry:
            return


Key = tuple[str, str, bool]
"""A comparison among the operations' own: operation, case, whether its gradients."""


def key_of(this: Comparison) -> Key:
    """What finds the comparison again in another process."""
    return this.operation.name, this.case.name, this.gradients


_LARGE = 60_000_000
"""Entries of a case whose truth takes much of the GPU's memory."""
_FEW = 3
"""So many processes at once have a large case on the GPU."""
_few: Any = contextlib.nullcontext()


def _begin(few: Any) -> None:
    global _few
    _few = few
    torch.set_num_threads(2)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A comparison that is ready to be timed.

    Attributes:
      path: a file with its arrays.
      verdicts: result of the check of every contestant; None where its numbers are random.
    """

    path: str
    verdicts: dict[str, Numbers | None]


def _verdict(contestant: Contestant, arrays: Arrays, part: Sample, right: Truth) -> Numbers | None:
    """Whether a contestant's numbers are right; None where they are random."""
    try:
        call, outputs, _ = contestant.build(arrays)
        result = outputs(call())
    except Exception as error:  # it counts as wrong, with what it raised
        return numbers.raised(error)
    return numbers.check(result, part, right, 1.0 if contestant.name == OURS else PEERS) if contestant.checked else None


def _prepare(key: Key, directory: str) -> Prepared:
    (operation,) = chosen([key[0]])
    (this,) = (comparison for comparison in comparisons(operation, dry=False) if key_of(comparison) == key)
    ready = prepared(this, directory)
    torch.cuda.empty_cache()
    return ready


def prepared(this: Comparison, directory: str) -> Prepared:
    """Makes a comparison's arrays, computes their truth, and calls every contestant once, which compiles kernels."""
    about, arrays = subject(this.operation.name), this.run.make()
    with _few if sum(x.size for x in arrays.values()) > _LARGE else contextlib.nullcontext():
        part = about.gradient_sample(this.run, arrays) if this.gradients else about.sample(this.run, arrays)
        unit = this.operation.facts.coarser.get(this.case.name, {}).get("triton", 0.0)
        right = numbers.truth(part, this.gradients, unit)
        verdicts = {contestant.name: _verdict(contestant, arrays, part, right) for contestant in this.contestants}
    path = os.path.join(directory, f"{os.getpid()}-{time.monotonic_ns()}")
    with open(path, "wb") as file:
        pickle.dump(arrays, file, protocol=5)
    return Prepared(path, verdicts)


def prepare(keys: list[Key], directory: str, workers: int, seconds: float | None = None) -> dict[Key, Prepared]:
    """The comparisons of these keys, by processes of their own; those that failed, which is said, or are not ready
    after `seconds` are left out.
    """
    context = multiprocessing.get_context("spawn")
    results: dict[Key, Prepared] = {}
    start = time.monotonic()
    pool = ProcessPoolExecutor(workers, context, _begin, (context.Semaphore(_FEW),))
    running = {pool.submit(_prepare, key, directory): key for key in keys}
    try:
        for i, done in enumerate(as_completed(running, seconds), 1):
            if (error := done.exception()) is None:
                results[running[done]] = done.result()
            took, problem = time.monotonic() - start, "" if error is None else f"; {running[done]}: {error}"
            print(f"{i} of {len(keys)} cases are ready after {took:.0f} s{problem}", file=sys.stderr, flush=True)
    except TimeoutError:
        for process in list(pool._processes.values()):  # else the GPU that is measured works on
            process.terminate()
    pool.shutdown(cancel_futures=True)
    return results


def captured(call: Call) -> Call:
    """What replays the call, captured in a CUDA graph."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # compiles, and places constants on the device
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # which gives back what memory is free
        call()
    return functools.partial(_replay, graph, call)


def _replay(graph: torch.cuda.CUDAGraph, call: Call) -> None:
    """`call` owns the operands, which the graph does not keep."""
    del call
    graph.replay()


def measure(
    this: Comparison,
    ready: Prepared,
    rounds: int,
    sample: Sampler,
    ceilings: tuple[float, float],
    graph: bool = False,
) -> list[Row]:
    """Times the contestants whose numbers are right.

    Args:
      ready: prepared comparison; its file is deleted. ceilings: FLOP and bytes a second. graph: time replays of a CUDA
        graph.
    """
    with open(ready.path, "rb") as file:
        arrays = pickle.load(file)
    os.remove(ready.path)
    rows: list[Row] = []
    calls: dict[str, Call] = {}
    for contestant in this.contestants:
        row, verdict = Row(this.operation.name, this.run.name, contestant.name), ready.verdicts[contestant.name]
        rows.append(row)
        if verdict is not None:
            row.error, row.note = verdict.error, "" if verdict.right else verdict.detail
        if not row.note:
            call, _, _ = contestant.build(arrays)
            try:
                calls[contestant.name] = captured(call) if graph else call
                calls[contestant.name]()
            except RuntimeError as error:  # torch's, of what cannot be captured
                if not graph:
                    raise
                calls.pop(contestant.name, None)
                row.note = numbers.raised(error).detail
    flops, nbytes = this.work()
    timings = side_by_side(calls, rounds=rounds, sample=sample, sample_seconds=0.0) if calls else {}
    for row in rows:
        if row.contestant in timings:
            seconds = timings[row.contestant].median
            row.ms, row.tflops, row.tbs = seconds * 1e3, flops / seconds * 1e-12, nbytes / seconds * 1e-12
            row.share = max(flops / ceilings[0], nbytes / ceilings[1]) / seconds
    return rows


def ceilings(rounds: int, sample: Sampler, dry: bool) -> tuple[float, float]:
    """(FLOP/s of cuBLAS's bfloat16 product, bytes/s of a copy)."""
    device = "cpu" if dry else "cuda"
    x = torch.randn(1 << (16 if dry else 29), device=device).bfloat16()
    y = torch.empty_like(x)
    n = 128 if dry else 8192
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    calls: dict[str, Call] = {"copy": lambda: y.copy_(x), "product": lambda: a @ b}
    for call in calls.values():
        call()
    timings = side_by_side(calls, rounds=rounds, sample=sample, sample_seconds=0.0)
    return 2 * n**3 / timings["product"].median, 4 * x.numel() / timings["copy"].median


def tune(this: Comparison, timer: Timer, budget: int, directory: pathlib.Path | None) -> None:
    """Searches the tiles of ours in a case, writes them to the user's table (or to `directory`), and says what came of
    it.
    """
    run, _, _ = this.contestants[0].build(this.run.make())
    passes = "backward" if this.gradients else "forward"
    for result in vt.tune(run, budget=budget, passes=passes, timer=timer, directory=directory):
        ms, before = result.seconds * 1e3, result.heuristic_seconds * 1e3
        print(
            f"| {result.op} | {this.run.name} | {before:.4f} | {ms:.4f} | {result.trials} | {result.config} |",
            flush=True,
        )


def show(row: Row) -> str:
    """One line of the table.

    >>> show(Row("gemm", "square", "ours", 1e-3, 2.0, 500.0, 0.5, 0.9))
    '| gemm | square | ours | 1.0e-03 | 2.0000 | 500.00 | 0.50 | 90.0 % |'
    """
    head = f"| {row.op} | {row.case} | {row.contestant} | {'' if row.error is None else f'{row.error:.1e}'} |"
    if row.ms is None:
        return f"{head} {row.note} | | | |"
    return f"{head} {row.ms:.4f} | {row.tflops:.2f} | {row.tbs:.2f} | {100 * (row.share or 0):.1f} % |"


def on_gpus(names: list[str] | None) -> list[Operation]:
    """The operations of these names (None for all) that have a Triton kernel; the others are named in a line."""
    operations = chosen(names)
    missing = [operation.name for operation in operations if not operation.has_kernel("cuda")]
    if missing:
        print(f"without a Triton kernel, not measured: {', '.join(missing)}\n")
    return [operation for operation in operations if operation.name not in missing]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=lambda text: text.split(","), help=f"of {', '.join(operations())}; default: all")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dry", action="store_true", help="small cases on the CPU, in Triton's interpreter")
    parser.add_argument("--json", help="also write the rows here")
    parser.add_argument("--graph", action="store_true", help="time replays of CUDA graphs: the GPU without the host")
    parser.add_argument("--minutes", type=float, help="prepare cases for half of so many minutes, and measure those")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="that prepare cases")
    parser.add_argument(
        "--tune", action="store_true", help="time tiles instead of peers, and write the user's tuning tables"
    )
    parser.add_argument("--budget", type=int, default=40, help="tiles to time for each kernel, with --tune")
    options = parser.parse_args(arguments)
    if not options.dry and not torch.cuda.is_available():
        print("no GPU here: nothing was measured (--dry runs the code on the CPU)", file=sys.stderr)
        return 1
    torch.backends.cuda.matmul.allow_tf32 = False
    rounds = 1 if options.dry else options.rounds
    sample = sampler() if options.dry else gpu_sampler()
    rows: list[Row] = []
    with triton_serves() if options.dry else contextlib.nullcontext():
        place = "dry: the times mean nothing" if options.dry else torch.cuda.get_device_name()
        print(f"{place}, torch {torch.__version__}")
        served = on_gpus(options.ops)
        if options.tune:
            # Times of the interpreter mean nothing, so they go where no call looks.
            scratch = pathlib.Path(tempfile.mkdtemp()) if options.dry else None
            timer = (lambda run: sample(run, 1)) if options.dry else gpu_timer(options.rounds)
            print("| operation | case | ms before | ms after | trials | tiles |\n|---|---|--:|--:|--:|---|")
            for operation in served:
                for this in comparisons(operation, options.dry):
                    tune(this, timer, options.budget, scratch)
            return 0
        limits = ceilings(rounds, sample, options.dry)
        print(f"ceilings: cuBLAS bfloat16 {limits[0] * 1e-12:.1f} TFLOP/s, copy {limits[1] * 1e-12:.2f} TB/s\n")
        print("| operation | case | contestant | error | ms | TFLOP/s | TB/s | of the ceiling |")
        print("|---|---|---|--:|--:|--:|--:|--:|")
        everything = [this for operation in served for this in comparisons(operation, options.dry)]
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
            if options.dry:
                ready = {key_of(this): prepared(this, directory) for this in everything}
            else:
                seconds = None if options.minutes is None else 30 * options.minutes
                ready = prepare([key_of(this) for this in everything], directory, options.workers, seconds)
            for this in everything:
                if key_of(this) not in ready:
                    rows.append(Row(this.operation.name, this.run.name, OURS, note="not prepared"))
                    continue
                for row in measure(this, ready[key_of(this)], rounds, sample, limits, options.graph):
                    rows.append(row)
                    print(show(row), flush=True)
                if options.json:  # at once: whoever ends the run keeps what it has
                    with open(options.json, "w") as file:
                        json.dump([dataclasses.asdict(row) for row in rows], file, indent=1)
    return 1 if any(row.ms is None and row.contestant == OURS for row in rows) else 0
