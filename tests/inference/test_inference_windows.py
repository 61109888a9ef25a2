"""Layers with a window keep few pages: the same tokens, with less memory, and prompts that begin alike share them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vishwamai.core.errors import DeviceError
from vishwamai.inference import Engine, Limits, Sampling, plan_load
from vishwamai.models import Decoder, ModelConfig, PagedBatch, page_shapes, save_pretrained
from vishwamai.models.pages import ring_table, window_rings
from vishwamai.planning.memory.analytic import serving_memory
from vishwamai.planning.serving import Serving, kv_bytes_per_token

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,
    "eos_token_id": None,
}
MISTRAL = {**SIZES, "model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 6}
GEMMA = {**SIZES, "model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window": 6, "query_pre_attn_scalar": 16}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
LIMITS = Limits(max_sequences=2, max_tokens=8, mixed_tokens=8, max_length=64, page_size=4)
RING = 4  # pages: the first of 8 new tokens sees 5 before it, so 13 tokens, which begin anywhere in a page
KEEPING = dataclasses.replace(LIMITS, max_tokens=40)  # a ring would be longer than half a sequence: all pages are kept
PROMPTS = [list(range(1, 1 + count)) for count in (37, 5, 20)]


def decoder(values):
    return Decoder(ModelConfig.from_dict(values), rngs=nnx.Rngs(0))


@pytest.mark.turns(6)
@pytest.mark.parametrize("stacked", [False, True])
def test_a_step_over_rings_is_a_step_over_pages(stacked):
    """Chunks of 8 tokens of two sequences: hidden states, and no key outside of the ring is read (it is NaN there)."""
    config = ModelConfig.from_dict(GEMMA)
    model = Decoder(config, rngs=nnx.Rngs(0), stacked=stacked)
    assert window_rings(config, page_size=4, length=64, tokens=8) == {6: RING}
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 48, (2, 32)))
    expected = model(tokens)
    table = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)

    @jax.jit
    def step(model, pages, tokens, kv_lens):
        windows = {6: ring_table(jnp.array([1, 0]), RING, 8)}
        batch = PagedBatch(kv_lens, table, jnp.array([0, 8, 16]), 8, windows=windows)
        return model.step(tokens, pages, batch)

    shapes = page_shapes(
        config, num_pages=16, page_size=4, dtype=jnp.float32, stacked=stacked, window_pages={6: 2 * RING}
    )
    pages = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
    assert sorted({page.shape[0] // (2 if stacked else 1) for page in pages}) == [2 * RING, 16]
    for start in range(0, 32, 8):
        chunk = tokens[:, start : start + 8].reshape(-1)
        hidden, pages = step(model, pages, chunk, jnp.full(2, start + 8, jnp.int32))
        np.testing.assert_allclose(hidden.reshape(2, 8, -1), expected[:, start : start + 8], rtol=2e-4, atol=2e-5)


@pytest.mark.turns(6)
@pytest.mark.parametrize("values", [GEMMA, pytest.param(MISTRAL, marks=pytest.mark.long)])
def test_tokens_are_those_over_all_pages(values):
    model = decoder(values)
    options = [Sampling(max_new_tokens=24), Sampling(max_new_tokens=24, temperature=1.0, seed=2, n=2), Sampling()]
    keeping, ringed = (Engine(model, limits=limits, num_pages=18) for limits in (KEEPING, LIMITS))
    expected, answers = (engine.generate(PROMPTS, options) for engine in (keeping, ringed))
    assert [a.token_ids for a in answers] == [e.token_ids for e in expected]
    assert len(expected[-1].token_ids) == 44 and ringed.statistics.preemptions > 0
    windows = ({18}, {2 * RING, 18} if values is GEMMA else {2 * RING})
    assert tuple({pool.shape[0] for pool in engine.programs.pages} for engine in (keeping, ringed)) == windows
    again = [engine.generate([PROMPTS[0]], Sampling(max_new_tokens=2))[0] for engine in (keeping, ringed)]
    assert again[0].token_ids == again[1].token_ids
    assert again[0].cached > 0 == again[1].cached  # rings hold no prefix for others


@pytest.mark.long
def test_guesses_and_a_draft_with_a_window_of_its_own():
    model, draft = decoder(GEMMA), decoder({**MISTRAL, "sliding_window": 3})
    options = Sampling(max_new_tokens=24, temperature=0.5, seed=1)
    prompts = [[5, 6, 7, 8] * 5, PROMPTS[1]]
    expected = Engine(model, limits=KEEPING).generate(prompts, options)
    for guesser in (None, draft, model):
        engine = Engine(model, limits=LIMITS, drafts=3, draft=guesser)
        assert [a.token_ids for a in engine.generate(prompts, options)] == [a.token_ids for a in expected]
        assert engine.statistics.guesses
    assert engine.statistics.accepted_share == 1  # the model itself


def test_the_memory_plan_counts_rings(tmp_path):
    model = decoder(GEMMA)
    save_pretrained(model, tmp_path)
    sizes: dict[str, Any] = {"dtype": "float32", "max_sequences": 2, "max_tokens": 8, "max_length": 64, "page_size": 4}
    planned = plan_load(tmp_path, **sizes)
    page = 4 * 2 * 16 * 4  # bytes of a page of one layer
    assert planned.pages == (2 * 32 + 2 * 2 * RING) * page
    assert "layers with a window keep at most 16 tokens (window 6) of each sequence" in str(planned)
    fixed = planned.total - 2 * 32 * page
    assert plan_load(tmp_path, memory=fixed + 2 * 20 * page, **sizes).num_pages == 20
    with pytest.raises(DeviceError, match="does not fit"):
        plan_load(tmp_path, memory=fixed + 2 * 15 * page, **sizes)


def test_vishwamai_plan_counts_rings():
    config = ModelConfig.from_dict(GEMMA)
    serving = Serving(config, 3, 64, "float32", "float32", page_size=4, max_tokens=8)
    page = 4 * 2 * 16 * 4
    assert kv_bytes_per_token(serving) == 2 * page // 4  # of the two layers without a window
    assert serving_memory(serving, "v5e").parts["kv"].value == (2 * 3 * 16 + 2 * 3 * RING) * page
