"""Gets the final bundles of a program out of libtpu, and keeps them on disk.

The function is traced and exported here, compiled in a process of its own (`vishwamai.aot.worker`), and what the analysis needs of the dump is
kept under the fingerprint of program, target and versions, compressed; the next call with the same program reads it from there.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax import export

from vishwamai.aot import known, libtpu
from vishwamai.aot.compile import in_words, place, tracing_for
from vishwamai.aot.diagnose import Problem, as_error
from vishwamai.aot.simulate import Source
from vishwamai.core.errors import DeviceError, KernelError, VishwamaiError
from vishwamai.core.hardware import Chip

FORMAT = 3
"""Counts up when the layout of the cache changes."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A traced program, ready to be compiled.

    Attributes:
        blob: the serialised export of the function over flat arguments; `target`: what for.
        known: scalar operands of kernels that are known ahead, by kernel, call and operand.
        io_bytes: bytes of arguments and results together, on one device.
        fingerprint: of program, target and versions.
    """

    blob: bytes
    target: str
    known: Mapping[str, Sequence[Mapping[int, np.ndarray]]]
    io_bytes: int
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class Dump:
    """What the compiler made of a job: the text of every program, and what the executable takes (as `Compiled` names it).

    `twins`: a fingerprint by instruction; those with the same one share one program's code.
    """

    chip: Chip
    sources: Mapping[str, Source]
    memory: Mapping[str, int]
    cost: Mapping[str, float | None]
    kernels: Sequence[Mapping[str, Any]]
    twins: Mapping[str, str]
    warning: str | None


def cache_directory() -> pathlib.Path:
    """Where dumps are kept: `VISHWAMAI_AOT_CACHE`, or `vishwamai/aot` in the user's cache directory."""
    named = os.environ.get("VISHWAMAI_AOT_CACHE")
    if named:
        return pathlib.Path(named)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "vishwamai" / "aot"


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


_EXPORTING = threading.Lock()


@contextmanager
def _exact_export() -> Iterator[None]:
    """Exports the program as jit would lower it, and the same program always as the same bytes.

    An export otherwise keeps to older forms for older compilers; and the places in the source that every operation carries hold the whole stack
    of callers, of which only the innermost says anything here.
    """
    wanted = {"jax_export_ignore_forward_compatibility": True, "jax_traceback_in_locations_limit": 1}
    with _EXPORTING:
        before = {name: getattr(jax.config, name) for name in wanted}
        try:
            for name, value in wanted.items():
                jax.config.update(name, value)
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)


def _bytes(shape: Any, sharding: Any) -> int:
    dims = sharding.shard_shape(shape.shape) if sharding is not None else shape.shape
    return int(np.prod(dims)) * getattr(shape.dtype, "itemsize", 4)


def prepare(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], target: str) -> Job:
    """Traces `fn(*args, **kwargs)` for `target` and exports it.

    Raises:
        whatever `fn` raises while it is traced; DeviceError where libtpu or flatbuffers is missing; UnsupportedError where Pallas cannot lower a
        kernel.
    """
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    arrays = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

    def flat(*values: Any) -> tuple[Any, ...]:
        filled = list(leaves)
        for index, value in zip(arrays, values):
            filled[index] = value
        positional, named = jax.tree.unflatten(tree, filled)
        return tuple(jax.tree.leaves(fn(*positional, **named)))

    flat.__name__ = getattr(fn, "__name__", "program").replace("<lambda>", "program")
    placed = place([leaves[i] for i in arrays], target)
    many = len(libtpu.devices_for(target)) > 1
    shapes = placed if many else [jax.ShapeDtypeStruct(s.shape, s.dtype, weak_type=s.weak_type) for s in placed]
    versions = libtpu.versions()
    with tracing_for(target), in_words(libtpu.parse_target(target)[0]):
        traced = jax.jit(flat).trace(*shapes)
        values = {
            position: np.asarray(leaves[index])
            for position, index in enumerate(arrays)
            if isinstance(leaves[index], (np.ndarray, jax.Array)) and np.issubdtype(leaves[index].dtype, np.integer)
        }
        scalars = known.scalar_operands(traced.jaxpr, values)
        with _exact_export():
            exported = export.export(jax.jit(flat), platforms=["tpu"])(*shapes)
    try:
        blob = bytes(exported.serialize())
    except ImportError as error:
        raise DeviceError(
            f'inspecting a schedule needs flatbuffers: pip install "vishwamai[aot]" ({error}).'
        ) from error
    total = sum(_bytes(s, s.sharding) for s in placed) + sum(_bytes(s, None) for s in exported.out_avals)
    digest = hashlib.sha256(exported.mlir_module_serialized)
    digest.update(json.dumps([FORMAT, target, versions], sort_keys=True).encode())
    return Job(blob, target, scalars, total, digest.hexdigest()[:32])


def _flags(directory: pathlib.Path) -> str:
    return " ".join(
        (
            f"--xla_jf_dump_to={directory}",
            "--xla_jf_dump_hlo_text=true",
            "--xla_jf_dump_llo_text=true",
            "--xla_jf_dump_llo_html=false",
            "--xla_jf_emit_annotations=true",
            "--xla_jf_dump_llo_pass_label_regex=.*final.*",
        )
    )


_BUNDLES = re.compile(r"(\d+)-(.*)-\d+-final_bundles\.txt")


def read_sources(directory: pathlib.Path) -> dict[str, Source]:
    """The programs of a dump directory; of programs that were compiled twice, the last."""
    found: dict[str, Source] = {}
    for file in sorted(directory.glob("*final_bundles.txt*")):
        match = _BUNDLES.match(file.name)
        if match is None or "schedule-analysis" in file.name:
            continue
        stamp, name = match[1], match[2]
        units = [
            f
            for f in directory.iterdir()
            if f.name.startswith(f"{stamp}-{name}-") and "per-bundle-utilization" in f.name
        ]
        found[name] = Source(_text(file), _text(units[0]) if units else "")
    return found


def _text(file: pathlib.Path) -> str:
    data = file.read_bytes()
    return (gzip.decompress(data) if file.suffix == ".gz" else data).decode(errors="replace")


def _keep(work: pathlib.Path, entry: pathlib.Path) -> None:
    """Moves what the analysis reads of a finished job into the cache, compressed, all at once."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=entry.parent) as temporary:
        fresh = pathlib.Path(temporary) / "entry"
        fresh.mkdir()
        for file in work.iterdir():
            wanted = _BUNDLES.match(file.name) or "per-bundle-utilization" in file.name
            if wanted and "schedule-analysis" not in file.name:
                (fresh / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes(), 5))
        shutil.copy(work / "result.json", fresh)
        if not entry.exists():
            fresh.rename(entry)


def _load(entry: pathlib.Path, job: Job) -> Dump:
    found, _ = libtpu.parse_target(job.target)
    result = json.loads((entry / "result.json").read_text())
    if "refused" in result:
        problem = result["problem"] and Problem(
            **result["problem"] | {"allocations": tuple(result["problem"]["allocations"])}
        )
        raise as_error(problem, result["refused"])
    sources = read_sources(entry)
    if not sources:
        raise DeviceError(
            f"libtpu {libtpu.versions()['libtpu']} wrote no bundles for {job.target}; 0.0.51 is known to."
        )
    return Dump(
        found,
        sources,
        result.get("memory", {}),
        result.get("cost", {}),
        result.get("kernels", ()),
        result.get("twins", {}),
        result.get("warning"),
    )


def _compile(jobs: Sequence[Job], entries_at: Sequence[pathlib.Path], timeout: float) -> dict[str, str]:
    """Compiles jobs in one worker, and goes on in a new one where libtpu ends the process.

    Returns:
        by fingerprint, what a job's process said before it ended. That is not kept: it need not happen again.
    """
    crashed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="vishwamai-aot-") as temporary:
        root = pathlib.Path(temporary)
        pending = list(range(len(jobs)))
        for index in pending:
            (root / f"job{index}").mkdir()
            (root / f"job{index}.blob").write_bytes(jobs[index].blob)
        while pending:
            said = _run_worker(root, [(i, jobs[i].target) for i in pending], timeout)
            results = {i: root / f"job{i}" / "result.json" for i in pending}
            done = [i for i in pending if results[i].exists()]
            for index in done:
                result = json.loads(results[index].read_text())
                if "crashed" in result:
                    crashed[jobs[index].fingerprint] = result["crashed"]
                else:
                    _keep(root / f"job{index}", entries_at[index])
            pending = [i for i in pending if i not in done]
            if pending:  # the first one left is what the worker died of
                crashed[jobs[pending.pop(0)].fingerprint] = said
    return crashed


def _run_worker(root: pathlib.Path, jobs: Sequence[tuple[int, str]], timeout: float) -> str:
    dump_directory = root / "dump"
    shutil.rmtree(dump_directory, ignore_errors=True)
    dump_directory.mkdir()
    entries = [
        {"blob": str(root / f"job{i}.blob"), "target": target, "out": str(root / f"job{i}")} for i, target in jobs
    ]
    (root / "jobs.json").write_text(json.dumps({"dump": str(dump_directory), "jobs": entries}))
    source = str(pathlib.Path(__file__).parents[2])
    environment = (
        os.environ
        | libtpu.environment()
        | {
            "LIBTPU_INIT_ARGS": f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {_flags(root / 'dump')}".strip(),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
    )
    command = [sys.executable, "-m", "vishwamai.aot.worker", str(root / "jobs.json")]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"the compiler took longer than {timeout:.0f} s"
    telling = [line for line in ended.stderr.splitlines() if re.search(r"Check fail|F\d{4}|Error|error|SIG", line)]
    return (
        f"the compiler's process ended with {ended.returncode}: "
        + "\n".join(telling or ended.stderr.splitlines())[-1500:]
    )


def dump_many(jobs: Sequence[Job], timeout: float = 900.0, workers: int = 1) -> Iterator[Dump | VishwamaiError]:
    """The dumps of several jobs, in order, by up to `workers` compiler processes; a job that is refused gives its exception instead."""
    kept = [cache_directory() / job.fingerprint for job in jobs]
    missing = [i for i, entry in enumerate(kept) if not (entry / "result.json").exists()]
    parts = [part for part in (missing[start::workers] for start in range(workers)) if part]
    with ThreadPoolExecutor(max(1, len(parts))) as pool:
        compiling = [pool.submit(_compile, [jobs[i] for i in part], [kept[i] for i in part], timeout) for part in parts]
    crashed: dict[str, str] = {}
    for done in compiling:
        crashed |= done.result()  # raises what the thread raised
    for job, entry in zip(jobs, kept):
        if job.fingerprint in crashed:
            yield KernelError(f"compiling for {job.target} failed: {crashed[job.fingerprint]}")
            continue
        try:
            yield _load(entry, job)
        except VishwamaiError as error:
            yield error


def dump(job: Job, timeout: float = 900.0) -> Dump:
    """The dump of one job.

    Raises:
        DeviceError, UnsupportedError, KernelError: the compiler refuses, in the words of `compile_for`.
    """
    (result,) = dump_many([job], timeout)
    if isinstance(result, Exception):
        raise result
    return result
