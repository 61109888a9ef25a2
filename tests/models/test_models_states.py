"""Layers with a state in serving steps: ragged tokens of several sequences, over states in slots."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models_families import TINY
from vishwamai import UnsupportedError
from vishwamai.models import Decoder, ModelConfig, PagedBatch, page_shapes

LENGTHS = (90, 5, 1, 17)
STEPS = ((70, 2, 1, 1), (1, 1, 0, 3), (19, 2, 0, 13))
"""New tokens of each sequence: long and short prompts, single tokens, and none."""


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("family", "stacked"), [("qwen3_5_text", True), ("qwen3_next", False), ("lfm2", True), ("nemotron_h", False)]
)
def test_steps_over_slots_are_the_whole_sequences(family: str, stacked: bool) -> None:
    config = ModelConfig.from_dict(TINY[family].config().to_dict())
    model = Decoder(config, rngs=nnx.Rngs(0), stacked=stacked)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(3, 100, length) for length in LENGTHS]
    shapes = page_shapes(config, num_pages=32, page_size=4, dtype=jnp.float32, stacked=stacked, num_states=9)
    pools: Any = jax.tree.map(lambda x: jnp.full(x.shape, 7.0, x.dtype), shapes)  # what earlier sequences left
    pages = np.split(rng.permutation(32)[:31], np.cumsum([23, 2, 1]))
    start, slots = np.zeros(4, int), rng.permutation(9)[:4]
    outputs: list[list[Any]] = [[] for _ in LENGTHS]
    step = jax.jit(lambda model, tokens, pools, batch: model.step(tokens, pools, batch))
    for counts in STEPS:
        live = [i for i, count in enumerate(counts) if count]
        fed = np.concatenate([sequences[i][start[i] : start[i] + counts[i]] for i in live])
        tokens = np.pad(fed, (0, 80 - len(fed))).astype(np.int32)  # new each step: JAX may read it after the call
        kv_lens, ends, table = np.zeros(4, np.int32), np.full(5, len(fed), np.int32), np.zeros((4, 23), np.int32)
        states = np.zeros((2, 4), np.int32)
        ends[: len(live) + 1] = np.cumsum([0, *(counts[i] for i in live)])
        free = [slot for slot in range(9) if slot not in slots]
        for row, i in enumerate(live):
            kv_lens[row] = start[i] + counts[i]
            table[row, : len(pages[i])] = pages[i]
            states[:, row] = slots[i], free[row] if i % 2 else slots[i]  # into another slot, or in place
            slots[i] = states[1, row]
        batch = PagedBatch(jnp.asarray(kv_lens), jnp.asarray(table), jnp.asarray(ends), 80, states=jnp.asarray(states))
        hidden, pools = step(model, jnp.asarray(tokens), pools, batch)
        for row, i in enumerate(live):
            outputs[i].append(hidden[ends[row] : ends[row + 1]])
            start[i] += counts[i]
    for sequence, output, end in zip(sequences, outputs, start):
        whole = model(jnp.asarray(sequence[None], jnp.int32))[0, :end]
        np.testing.assert_allclose(np.concatenate(output), whole, atol=1e-4)


def test_states_without_slots_are_declined() -> None:
    with pytest.raises(UnsupportedError, match="layers of type 'conv' have a state of one size"):
        page_shapes(ModelConfig.from_dict(TINY["lfm2"].config().to_dict()), num_pages=1, page_size=4, dtype=jnp.float32)
