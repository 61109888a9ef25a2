"""Decoding with LoRA adapters in one batch next to the base model: tokens per second of both, in turns in one process.

The adapters are random, of every product of every layer, and written as the library peft writes them. Sequence i has
adapter `i % count`. The base is an engine without places for adapters.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vishwamai.inference import Engine
    from vishwamai.models import ModelConfig


def write_random(folder: Path, config: ModelConfig, rank: int, seed: int) -> None:
    """Writes an adapter of random numbers, whose product is about a tenth of the weight's."""
    from vishwamai.models.adapter_files import write_adapter
    from vishwamai.models.adapters import TARGETS

    random = np.random.default_rng(seed)
    matrices = {}
    for layer, kind in enumerate(config.layers):
        for name, parameter in kind.parameters(config).items():
            if name in TARGETS:
                into, out = parameter.shape
                down, up = random.normal(size=(into, rank)), random.normal(size=(rank, out))
                matrices[layer, name] = down.astype(np.float32) / into**0.5, 0.1 * up.astype(np.float32) / rank**0.5
    folder.mkdir()
    write_adapter(folder, config, matrices, alpha=rank, base=None)


def decode_rate(engine: Engine, prompts: Sequence[Sequence[int]], steps: int, names: Sequence[str | None]) -> float:
    """Tokens per second of decoding all sequences at once, from the first step that has them all."""
    from vishwamai.inference import Request, Sampling

    counts = [0] * len(prompts)

    def sink(i: int) -> Any:
        def add(delta: Any) -> None:
            counts[i] += len(delta.token_ids)

        return add

    options = Sampling(max_new_tokens=engine.limits.max_length - len(prompts[0]), ignore_eos=True)
    requests = [Request(tuple(prompt), options, sink(i)) for i, prompt in enumerate(prompts)]
    for request, name in zip(requests, names):
        if name is not None and engine.adapters is not None:
            request.adapter = engine.adapters.take(name, 1)
        engine.submit(request)
    while min(counts) < 2:
        engine.step()
    start, first = sum(counts), time.perf_counter()
    while sum(counts) < start + steps * len(prompts):
        engine.step()
    rate = (sum(counts) - start) / (time.perf_counter() - first)
    for request in requests:
        engine.cancel(request)
    while not engine.idle:
        engine.step()
    for request in requests:
        if request.adapter is not None and engine.adapters is not None:
            engine.adapters.release(request.adapter, 1)
    engine.scheduler.forget_prefixes()
    return rate


def compare(
    folder: str,
    options: Mapping[str, Any],
    *,
    count: int,
    rank: int,
    sequences: int,
    prompt: int,
    steps: int,
    rounds: int,
) -> dict[str, Any]:
    """Rates of the base and of `count` adapters, and the median of the ratios of `rounds`.

    Args:
      folder: directory of the model.
      options: arguments of `plan_load`.
      count, rank: number of adapters, and their rank.
      sequences, prompt, steps: sequences of the batch, tokens of each prompt, and steps of a round.
    """
    from vishwamai.inference import plan_load
    from vishwamai.models.adapters import AdapterSizes

    sizes: dict[str, Any] = {
        "max_sequences": sequences,
        "max_tokens": 512 + sequences,
        "max_length": prompt + 4 * steps + 16,
    }
    base = plan_load(folder, **options, **sizes).engine(compile="lazy")
    adapted = plan_load(folder, **options, **sizes, adapters=AdapterSizes(count, rank)).engine(compile="lazy")
    names = [f"random-{i}" for i in range(count)]
    with tempfile.TemporaryDirectory() as place:
        for i, name in enumerate(names):
            write_random(Path(place, name), base.model.config, rank, seed=i)
            adapted.load_adapter(name, Path(place, name))
    random = np.random.default_rng(1)
    prompts = random.integers(0, base.model.config.vocab_size, (sequences, prompt)).tolist()
    turns = {"base": (base, [None] * sequences), "adapters": (adapted, [names[i % count] for i in range(sequences)])}
    rates: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name in (*turns,) if number % 2 else (*reversed(turns),):
            engine, chosen = turns[name]
            rate = decode_rate(engine, prompts, steps, chosen)
            if number:  # the first touches the pages for the first time
                rates[name].append(rate)
    ratios = [adapters / plain for plain, adapters in zip(rates["base"], rates["adapters"])]
    return {
        **{f"decode {sequences}, {name}": statistics.median(values) for name, values in rates.items()},
        "adapters / base": statistics.median(ratios),
        "ratios": ratios,
    }
