"""Our engine as one contestant of a comparison of serving engines, and alone.

    python benchmarks/serve.py DIR --format bf16 --prompt 512 --steps 32     # tokens/s: a prompt, decoding 1, 8 and 32
    python benchmarks/serve.py DIR --format int8 --arrivals                  # time between tokens while prompts arrive
    python benchmarks/serve.py DIR --arrivals --mixed-tokens 24              # the same with small pieces of prompts
    python benchmarks/serve.py DIR --ready --no-keep-packed                  # time until the first request may come
    python benchmarks/serve.py DIR --adapters 8                              # 32 sequences with 8 LoRA adapters or none
    python benchmarks/serve.py DIR --turns 10                                # tokens that a conversation computes

DIR is a directory as Hugging Face writes it; weights may be random, for only the time is meant. `compare.py` runs
several formats and engines in turns. As a module this has what a driver of several engines needs to run it next to
others on the same weights and prompts, each in a process of its own: `FORMATS`, and `load(folder, format, threads,
max_sequences, max_tokens)`, whose result has `prefill`, `decode` and `reset`. `--contestant` names another such module,
of `engines/`. A step of decoding goes through the scheduler and the sampler, as in serving.

Next to the rates of our engine stand two shares.

- "programs": the time of the compiled programs alone over the engine's time. The programs of all steps, the draw of the
  tokens included, are called once more with the same inputs, one after the other, and waited for at the end. What is
  missing to 1 is what the host adds: the scheduler, the tables of a step, detokenization, and waiting for one another.
- "bandwidth" of one sequence: bytes that a token needs (the weights without an embedding table that is read by rows,
  and the keys and values of all tokens before it) over the time of a token, as a share of the bytes/s that
  `vishwamai.measure` finds for copies. There is none for experts and for layers with a window, which read a part.

"ready_s" counts from the start of the process, and "memory_gib" is the most that it had resident.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # other contestants run where this package is not
    from vishwamai.inference import Engine, Request
    from vishwamai.inference.load import Load

FORMATS = ("bf16", "f32", "int8", "int4", "fp8")
_OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "f32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
    "int4": {"dtype": "bfloat16", "quantize": "int4"},
    "fp8": {"dtype": "bfloat16", "quantize": "fp8"},
}
COUNTS = (1, 8, 32)
"""Sequences that decode at once."""


class DrivenEngine:
    """An engine that is driven one step at a time: each sequence is a request that is never at its end."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.bytes = 0
        self.read_bytes: Callable[[float], float] | None = None
        """Bytes that a token needs after so many others."""
        self._requests: dict[int, Request] = {}
        self._sampled: dict[int, list[int]] = {}

    def start(self, sequence: int, tokens: Sequence[int], room: int | None = None) -> None:
        """Hands a prompt in, for `room` tokens, or as many as there can be."""
        from vishwamai.inference import Request, Sampling

        room = room or self.engine.limits.max_length - len(tokens)
        tokens_of_sequence = self._sampled[sequence] = []
        request = Request(
            tuple(tokens),
            Sampling(max_new_tokens=room, ignore_eos=True),
            lambda delta: tokens_of_sequence.extend(delta.token_ids),
        )
        self._requests[sequence] = request
        self.engine.submit(request)

    def advance(self, sequences: Sequence[int], count: int) -> None:
        """Steps until each of the sequences has so many tokens."""
        while any(len(self._sampled[s]) < count for s in sequences):
            self.engine.step()

    def prefill(self, sequence: int, tokens: Sequence[int]) -> np.ndarray:
        """The first token of a prompt, as logits: 1 for it and 0 for the others (the engine keeps no logits)."""
        self.start(sequence, tokens)
        self.advance([sequence], 1)
        logits = np.zeros(self.engine.programs.vocab, np.float32)
        logits[self._sampled[sequence][0]] = 1
        return logits

    def decode(self, tokens: dict[int, int]) -> dict[int, int]:
        """One more token of each; `tokens`, which it drew itself, name the sequences."""
        count = min(len(self._sampled[s]) for s in tokens) + 1
        self.advance(list(tokens), count)
        return {s: self._sampled[s][count - 1] for s in tokens}

    def loss(self, tokens: Sequence[int]) -> float:
        """Mean negative log probability of the tokens after the first, in nats, by the same weights and pages."""
        from vishwamai.inference.evaluation import Passes, evaluate

        engine = self.engine
        passes = Passes(engine.model, len(tokens), tokenizer=engine.tokenizer, optimization=engine.optimization)
        return evaluate(passes, [tokens], context=len(tokens), stride=len(tokens)).loss

    def reset(self) -> None:
        """Ends all sequences, and forgets their prefixes."""
        for request in self._requests.values():
            self.engine.cancel(request)
        while not self.engine.idle:
            self.engine.step()
        self.engine.scheduler.forget_prefixes()
        self._requests.clear()


class Recorded:
    """The programs that an engine calls in a block, to call them again without the engine.

    The pages and the history go from call to call as in the engine. A second call of a step writes there what the first
    did.
    """

    def __init__(self, engine: Engine):
        self._programs = engine.programs
        self._calls: list[Callable[[], Any]] = []

    def __enter__(self) -> Recorded:
        for name in ("place", "step"):
            setattr(self._programs, name, functools.partial(self._record, getattr(self._programs, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("place", "step"):
            delattr(self._programs, name)

    def _record(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._calls.append(functools.partial(function, *arguments))
        return self._calls[-1]()

    def seconds(self, last: int | None = None) -> float:
        """Of the calls one after the other; `last`: where they end, as an index."""
        import jax

        jax.block_until_ready((self._programs.pages, self._programs.history))
        began = time.perf_counter()
        for call in self._calls[:last]:
            call()
        jax.block_until_ready((self._programs.pages, self._programs.history))
        return time.perf_counter() - began


def load(
    folder: str,
    format: str,
    threads: int,
    max_sequences: int,
    max_tokens: int,
    mixed_tokens: int | None = None,
    keep_packed: bool = True,
) -> DrivenEngine:
    """The engine on a directory; `threads` are those of the process (`taskset`)."""
    from vishwamai.cli.model import keep_programs
    from vishwamai.inference import plan_load

    del threads
    keep_programs()
    planned = plan_load(
        folder,
        **_OPTIONS[format],
        max_sequences=max_sequences,
        max_tokens=512 + max_sequences,
        mixed_tokens=mixed_tokens,
        max_length=max_tokens,
        keep_packed=keep_packed,
    )
    driven = DrivenEngine(planned.engine())
    driven.bytes = planned.weights
    driven.read_bytes = _read_bytes(planned)
    return driven


def _read_bytes(planned: Load) -> Callable[[float], float] | None:
    """Bytes that a token needs of weights, and of keys and values after so many tokens."""
    from vishwamai.inference.memory import rings_of

    config = planned.config
    if config.experts is not None or rings_of(config, planned.limits):
        return None
    itemsize = 4 if planned.dtype == "float32" else 2
    rows = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size * itemsize
    token_bytes = planned.pages / (planned.num_pages * planned.limits.page_size)
    return lambda tokens: planned.weights - rows + token_bytes * tokens


def rates(driven: Any, prompt: int, steps: int, vocab: int, most: int = max(COUNTS)) -> dict[str, float]:
    """Tokens per second: of a prompt, and of decoding 1, 8 and 32 sequences (their sum); of our engine the shares."""
    prompts = np.random.default_rng(1).integers(0, vocab, (most, prompt)).tolist()
    speeds: dict[str, float] = {}
    for count in (1, *COUNTS):  # the first is not counted: it touches the pages for the first time
        if count > most:
            break
        tokens = {}
        for i in range(count):
            seconds, share, logits = _timed(driven, functools.partial(driven.prefill, i, prompts[i]), last=-1)
            tokens[i] = int(logits.argmax())
        if count == 1:
            speeds["prefill"] = prompt / seconds
            if share is not None:
                speeds["programs, prefill"] = share

        def decode(tokens: dict[int, int]) -> None:
            for _ in range(steps):
                tokens = driven.decode(tokens)

        tokens = driven.decode(tokens)
        seconds, share, _ = _timed(driven, functools.partial(decode, tokens))
        speeds[f"decode {count}"] = count * steps / seconds
        if share is not None:
            speeds[f"programs, decode {count}"] = share
        driven.reset()
    return speeds


def _timed(driven: Any, run: Callable[[], Any], last: int | None = None) -> tuple[float, float | None, Any]:
    """Seconds of a block, the programs' share of them if the engine is ours, and the block's result.

    `last`: where the steps end whose results the block waits for, as an index of its calls.
    """
    if not isinstance(driven, DrivenEngine):
        began = time.perf_counter()
        result = run()
        return time.perf_counter() - began, None, result
    with Recorded(driven.engine) as recorded:
        began = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - began
    return seconds, recorded.seconds(last) / seconds, result


def bandwidth(driven: DrivenEngine, tokens: float, rate: float) -> float | None:
    """The share of the memory's bandwidth that one sequence reads, of so many tokens in the mean."""
    from vishwamai.measure.machine_peaks import local_peaks

    if driven.read_bytes is None:
        return None
    nbytes = driven.read_bytes(tokens)
    peak = local_peaks().bandwidth(min(int(nbytes), 1 << 28))  # a larger copy is no faster, and takes memory
    return None if peak is None else nbytes * rate / peak


def check(driven: Any, tokens: Sequence[int], prompts: Sequence[Sequence[int]], new: int) -> dict[str, Any]:
    """What shows that a contestant computes the model: the loss of a text, and `new` tokens after each prompt."""
    answers = []
    for prompt in prompts:
        following = [int(driven.prefill(0, prompt).argmax())]
        while len(following) < new:
            following.append(driven.decode({0: following[-1]})[0])
        answers.append(following)
        driven.reset()
    return {"loss": driven.loss(tokens), "answers": answers}


def since_start() -> float:
    """Seconds since this process started, to a hundredth."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def gaps(driven: DrivenEngine, prompt: int, vocab: int, arrivals: bool) -> dict[str, float]:
    """Seconds between tokens of 4 sequences, undisturbed or while prompts of 2048 tokens arrive, for 8 tokens each."""
    random = np.random.default_rng(2)
    for i in range(4):
        driven.prefill(i, random.integers(0, vocab, prompt).tolist())
    times = []
    for step in range(200):
        if arrivals and step % 20 == 0:
            driven.start(4 + step, random.integers(0, vocab, 2048).tolist(), room=8)
        have = min(len(driven._sampled[i]) for i in range(4))
        began = time.perf_counter()
        driven.advance(range(4), have + 1)
        times.append(time.perf_counter() - began)
    driven.reset()
    return {"median": statistics.median(times), "p99": float(np.quantile(times, 0.99))}


def _others(options: argparse.Namespace) -> str:
    """The text of `--adapters` or `--turns`."""
    from vishwamai.cli.model import keep_programs

    keep_programs()
    if options.turns:
        from engines import turns

        return turns.table(options.directory, options.turns)
    from engines import adapters

    settings = {**_OPTIONS[options.format], "keep_packed": not options.no_keep_packed}
    counts = {name: getattr(options, name) for name in ("rank", "sequences", "prompt", "steps", "rounds")}
    return json.dumps(adapters.compare(options.directory, settings, count=options.adapters, **counts), indent=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--format", default="bf16", help=f"one of the contestant's; of ours: {', '.join(FORMATS)}")
    parser.add_argument("--contestant", help="a module like this one: engines.llama, engines.torch_transformers")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=max(COUNTS), help="most that decode at once")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of another contestant")
    parser.add_argument("--arrivals", action="store_true", help="time between tokens while prompts of 2048 arrive")
    parser.add_argument("--ready", action="store_true", help="end when the engine is ready")
    parser.add_argument("--setting", help="of another contestant: one of its SETTINGS")
    parser.add_argument("--check", metavar="JSON", help='a file with "tokens", "prompts" and "new": loss and answers')
    parser.add_argument("--mixed-tokens", type=int, help="tokens of a step that decodes too, as in `vishwamai serve`")
    parser.add_argument("--adapters", metavar="N", type=int, help="random LoRA adapters in one batch next to the base")
    parser.add_argument("--rank", type=int, default=16, help="rank of each of them")
    parser.add_argument("--rounds", type=int, default=5, help="turns of the base and of the adapters")
    parser.add_argument("--turns", metavar="N", type=int, help="tokens computed in each turn of a conversation")
    parser.add_argument("--no-keep-packed", action="store_true", help="read and pack the weights anew")
    options = parser.parse_args()
    if options.adapters or options.turns:
        print(_others(options))
        return
    # What arrives leaves again after its eight tokens: eight prompts at once are more than there are.
    sequences, length = options.sequences, options.prompt + 4 * options.steps
    if options.arrivals:
        sequences, length = 12, 2048 + 8
    checked: dict[str, Any] = {}
    if options.check:
        with open(options.check) as file:
            checked = json.load(file)
        longest = max(map(len, checked["prompts"])) + checked["new"]
        sequences, length = 1, max(longest, len(checked["tokens"]))
    settings: dict[str, Any] = {}
    if options.contestant is None:
        settings = {"mixed_tokens": options.mixed_tokens, "keep_packed": not options.no_keep_packed}
    elif options.setting is not None:
        settings = {"setting": options.setting}
    loads = load if options.contestant is None else importlib.import_module(options.contestant).load
    driven = loads(options.directory, options.format, options.threads, sequences, length, **settings)
    figures: dict[str, Any] = {"format": options.format, "ready_s": since_start()}
    with open(os.path.join(options.directory, "config.json")) as file:
        vocab = json.load(file)["vocab_size"]
    if options.arrivals:
        figures |= {name: gaps(driven, options.prompt, vocab, disturbed) for name, disturbed in _MODES.items()}
    elif options.check:
        figures |= check(driven, **checked)
    elif not options.ready:
        figures |= rates(driven, options.prompt, options.steps, vocab, sequences)
    figures["memory_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if isinstance(driven, DrivenEngine) and "decode 1" in figures:
        figures["bandwidth"] = bandwidth(driven, options.prompt + options.steps / 2, figures["decode 1"])
    print(json.dumps(figures, indent=1))


_MODES = {"undisturbed": False, "while prompts arrive": True}

if __name__ == "__main__":
    main()
