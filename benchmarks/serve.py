"""Our engine as one contestant of a comparison of serving engines, and alone.

    python benchmarks/serve.py DIR --format bf16 --prompt 512 --steps 32     # tokens/s: a prompt, decoding 1, 8 and 32
    python benchmarks/serve.py DIR --format int8 --arrivals                  # time between tokens while prompts arrive
    python benchmarks/serve.py DIR --arrivals --mixed-tokens 24              # the same with small pieces of prompts

DIR is a directory as Hugging Face writes it; weights may be random, for only the time is meant. As a module it has what
a driver of several engines needs to run it next to others on the same weights and prompts, each in a process of its
own: `FORMATS`, and `load(folder, format, threads, max_sequences, max_tokens)`, whose result has `prefill`, `decode` and
`reset`. A step of decoding goes through the scheduler and the sampler, as in serving.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from vishwamai.inference import Engine, Request, Sampling, plan_load

FORMATS = ("bf16", "f32", "int8", "int4", "fp8")
_OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "f32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
    "int4": {"dtype": "bfloat16", "quantize": "int4"},
    "fp8": {"dtype": "bfloat16", "quantize": "fp8"},
}


class DrivenEngine:
    """An engine that is driven one step at a time: each sequence is a request that is never at its end."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.bytes = 0
        self._requests: dict[int, Request] = {}
        self._drawn: dict[int, list[int]] = {}

    def start(self, sequence: int, tokens: Sequence[int], room: int | None = None) -> None:
        """Hands a prompt in, for `room` tokens, or as many as there can be."""
        room = room or self.engine.limits.max_length - len(tokens)
        drawn = self._drawn[sequence] = []
        request = Request(
            tuple(tokens),
            Sampling(max_new_tokens=room, ignore_eos=True),
            lambda delta: drawn.extend(delta.token_ids),
        )
        self._requests[sequence] = request
        self.engine.submit(request)

    def advance(self, sequences: Sequence[int], count: int) -> None:
        """Steps until each of the sequences has so many tokens."""
        while any(len(self._drawn[s]) < count for s in sequences):
            self.engine.step()

    def prefill(self, sequence: int, tokens: Sequence[int]) -> np.ndarray:
        """The first token of a prompt, as logits: 1 for it and 0 for the others (the engine keeps no logits)."""
        self.start(sequence, tokens)
        self.advance([sequence], 1)
        logits = np.zeros(self.engine.programs.vocab, np.float32)
        logits[self._drawn[sequence][0]] = 1
        return logits

    def decode(self, tokens: dict[int, int]) -> dict[int, int]:
        """One more token of each; `tokens`, which it drew itself, name the sequences."""
        count = min(len(self._drawn[s]) for s in tokens) + 1
        self.advance(list(tokens), count)
        return {s: self._drawn[s][count - 1] for s in tokens}

    def reset(self) -> None:
        """Ends all sequences, and forgets their prefixes."""
        for request in self._requests.values():
            self.engine.cancel(request)
        while not self.engine.idle:
            self.engine.step()
        self.engine.scheduler.pool.forget()
        self._requests.clear()


def load(
    folder: str, format: str, threads: int, max_sequences: int, max_tokens: int, mixed_tokens: int | None = None
) -> DrivenEngine:
    """The engine on a directory; `threads` are those of the process (`taskset`)."""
    del threads
    planned = plan_load(
        folder,
        **_OPTIONS[format],
        max_sequences=max_sequences,
        max_tokens=512 + max_sequences,
        mixed_tokens=mixed_tokens,
        max_length=max_tokens,
        keep_packed=True,
    )
    made = DrivenEngine(planned.engine())
    made.bytes = planned.weights
    return made


def rates(made: DrivenEngine, prompt: int, steps: int, vocab: int) -> dict[str, float]:
    """Tokens per second: of a prompt, and of decoding 1, 8 and 32 sequences (their sum)."""
    prompts = np.random.default_rng(1).integers(0, vocab, (32, prompt)).tolist()
    found: dict[str, float] = {}
    for count in (1, 1, 8, 32):  # the first is not counted: it touches the pages for the first time
        if count > made.engine.limits.max_sequences:
            break
        began = time.perf_counter()
        for i in range(count):
            made.prefill(i, prompts[i])
        if count == 1:
            found["prefill"] = prompt / (time.perf_counter() - began)
        have = min(len(made._drawn[i]) for i in range(count))
        began = time.perf_counter()
        made.advance(range(count), have + steps)
        found[f"decode {count}"] = count * steps / (time.perf_counter() - began)
        made.reset()
    return found


def gaps(made: DrivenEngine, prompt: int, vocab: int, arrivals: bool) -> dict[str, float]:
    """Seconds between tokens of 4 sequences, undisturbed or while prompts of 2048 tokens arrive, for 8 tokens each."""
    random = np.random.default_rng(2)
    for i in range(4):
        made.prefill(i, random.integers(0, vocab, prompt).tolist())
    times = []
    for step in range(200):
        if arrivals and step % 20 == 0:
            made.start(4 + step, random.integers(0, vocab, 2048).tolist(), room=8)
        have = min(len(made._drawn[i]) for i in range(4))
        began = time.perf_counter()
        made.advance(range(4), have + 1)
        times.append(time.perf_counter() - began)
    made.reset()
    return {"median": statistics.median(times), "p99": float(np.quantile(times, 0.99))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--format", choices=FORMATS, default="bf16")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--arrivals", action="store_true", help="time between tokens while prompts of 2048 arrive")
    parser.add_argument("--mixed-tokens", type=int, help="tokens of a step that decodes too, as in `vishwamai serve`")
    options = parser.parse_args()
    began = time.perf_counter()
    # What arrives leaves again after its eight tokens: eight prompts at once are more than there are.
    sequences, length = (12, 2048 + 8) if options.arrivals else (32, options.prompt + 4 * options.steps)
    made = load(options.directory, options.format, 0, sequences, length, options.mixed_tokens)
    vocab = made.engine.programs.vocab
    found: dict[str, Any] = {"format": options.format, "ready_s": time.perf_counter() - began}
    if options.arrivals:
        found |= {name: gaps(made, options.prompt, vocab, disturbed) for name, disturbed in _MODES.items()}
    else:
        found |= rates(made, options.prompt, options.steps, vocab)
    print(json.dumps(found, indent=1))


_MODES = {"undisturbed": False, "while prompts arrive": True}

if __name__ == "__main__":
    main()
