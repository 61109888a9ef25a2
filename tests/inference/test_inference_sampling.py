"""Sampling on the device, against plain numpy on sorted probabilities."""

import collections
import functools
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from vishwamai.core.errors import ShapeError
from vishwamai.inference import logits as logits_module
from vishwamai.inference import sampling
from vishwamai.inference.limits import Limits
from vishwamai.inference.sampling import Sampling, all_allowed, empty_rows, sample, set_row

VOCAB = 70
DRAW = jax.jit(sample)


def draw(logits, options, history=(), prompt_length=0, position=None, allowed=None, seeds=None, slots=2):
    """The `Sampled` of the same options on every row."""
    count, vocab = logits.shape
    rows = empty_rows(count, slots, vocab)
    told = np.zeros((slots, 16), np.int32)
    told[0, : len(history)] = history
    for i in range(count):
        set_row(rows, i, options)
    rows.slot[:], rows.prompt_length[:] = 0, prompt_length
    rows.position[:] = len(history) if position is None else position
    rows.seed[:] = (options.seed or 0) if seeds is None else seeds
    return DRAW(jnp.asarray(logits), rows, jnp.asarray(told), all_allowed(count, vocab) if allowed is None else allowed)


def support(logits, options):
    """The tokens that may be drawn, and their probabilities, by sorting."""
    x = logits.astype(np.float64) / options.temperature
    order = np.argsort(-x, kind="stable")
    keep = np.zeros(len(x), bool)
    keep[order[: options.top_k or len(x)]] = True
    p = np.where(keep, np.exp(x - x.max()), 0)
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    keep[order[before >= options.top_p]] = False
    keep &= p >= options.min_p * p.max()
    p = np.where(keep, p, 0)
    return p / p.sum()


@pytest.mark.turns(3)
@given(
    seed=st.integers(0, 99),
    top_k=st.sampled_from([0, 1, 3, VOCAB]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
)
def test_draws_have_the_distribution_of_the_options(seed, top_k, top_p, min_p):
    logits = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 2
    options = Sampling(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    p = support(logits, options)
    count = 2000
    drawn = np.asarray(draw(np.tile(logits, (count, 1)), options, seeds=np.arange(count)).tokens)
    found = np.bincount(drawn, minlength=VOCAB) / count
    assert set(drawn) <= set(np.flatnonzero(p))
    assert np.abs(found - p).max() < 5 * np.sqrt(0.25 / count)


def test_penalties_and_bias():
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, :4] = 4, 3, 2, 1
    told = [3, 0, 0, 1]  # the prompt is 3, the answer so far 0 0 1

    def best(**options):
        return int(draw(logits, Sampling(**options), told, prompt_length=1).tokens[0])

    assert best() == 0
    assert best(presence_penalty=1.5) == 0  # 2.5, 1.5, 2, 1
    assert best(frequency_penalty=1.5) == 2  # 1, 1.5, 2, 1
    assert best(repetition_penalty=3.0) == 2  # 4/3, 1, 2, 1/3: the prompt counts as well
    assert best(logit_bias={0: -10.0, 1: -10.0, 2: -10.0}) == 3


def test_a_grammar_forbids_tokens():
    logits = np.arange(2 * VOCAB, dtype=np.float32).reshape(2, VOCAB)
    allowed = np.zeros((2, 3), np.int32)
    allowed[0, 1], allowed[1, 2] = 1 << 5, -(2**31)  # bit 31: a token past the vocab, so nothing but 64
    allowed[1, 2] |= 1
    for options in (Sampling(), Sampling(temperature=2.0)):
        assert draw(logits, options, allowed=allowed).tokens.tolist() == [37, 64]


def test_a_seed_draws_the_same_whatever_else_is_in_the_batch():
    logits = np.random.default_rng(0).normal(size=(6, VOCAB)).astype(np.float32)
    options = Sampling(temperature=1.0, top_p=0.9, seed=11)
    alone = [int(draw(logits[i : i + 1], options, position=i).tokens[0]) for i in range(6)]
    rows = empty_rows(6, 2, VOCAB)
    for i in range(6):
        set_row(rows, i, options if i % 2 else Sampling(temperature=0.5, presence_penalty=1.0, logprobs=2))
        rows.seed[i], rows.position[i] = 11, i
    together = DRAW(jnp.asarray(logits), rows, jnp.zeros((2, 16), jnp.int32), all_allowed(6, VOCAB)).tokens
    assert [int(t) for t in together[1::2]] == alone[1::2]
    assert len({int(draw(logits[:1], options, position=p).tokens[0]) for p in range(20)}) > 3


def test_logprobs_are_the_models_own():
    logits = np.random.default_rng(1).normal(size=(2, VOCAB)).astype(np.float32)
    got = draw(logits, Sampling(temperature=0.1, logit_bias={5: 50.0}, logprobs=4))
    expected = jax.nn.log_softmax(logits, axis=1)
    assert got.tokens.tolist() == [5, 5]
    np.testing.assert_allclose(got.logprobs, expected[:, 5], rtol=1e-5)
    np.testing.assert_array_equal(got.top_tokens[:, :4], np.argsort(-logits, axis=1)[:, :4])


def test_a_row_costs_a_cpu_what_it_needs(monkeypatch):
    """The noise, the thresholds and the log probabilities are computed of the rows that need them, and the tokens are
    those of all rows at once.
    """
    turns: collections.Counter[str] = collections.Counter()

    def count(module, name):
        function = getattr(module, name)

        def counted(*args):
            jax.debug.callback(functools.partial(turns.update, [name]))
            return function(*args)

        monkeypatch.setattr(module, name, counted)

    for module, name in (
        (sampling, "_noise"),
        (logits_module, "_largest"),
        (sampling, "_logprobs"),
        (sampling, "penalized"),
    ):
        count(module, name)
    rows = empty_rows(16, 16, VOCAB)
    rows.slot[:], rows.position[:], rows.seed[:] = np.arange(16), 8, np.arange(16)
    needs = (
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, top_k=5),
        Sampling(temperature=0.5, top_k=9, top_p=0.7),
        Sampling(logprobs=3),
        Sampling(presence_penalty=0.5),
        Sampling(logit_bias={3: 1.0}),
    )
    for row, options in enumerate(needs):
        set_row(rows, row, options)
    logits = np.random.default_rng(0).normal(size=(16, VOCAB)).astype(np.float32)
    history, allowed = jnp.ones((16, 16), jnp.int32), all_allowed(16, VOCAB)
    got = jax.jit(lambda *of: sample(*of))(logits, rows, history, allowed)
    jax.effects_barrier()
    if jax.default_backend() == "cpu":
        assert turns == {"_noise": 3, "_largest": 3, "_logprobs": 1, "penalized": 1}
    at_once = sampling._sampled(
        jnp.asarray(logits), jax.tree.map(jnp.asarray, rows), history, jnp.asarray(allowed), None
    )
    np.testing.assert_array_equal(got.tokens, at_once.tokens)
    np.testing.assert_allclose(got.logprobs[3], at_once.logprobs[3], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"top_p": 0.0}, "`top_p` is 0.0"),
        ({"temperature": float("nan")}, "`temperature` is nan"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "names 301 tokens"),
        ({"stop": ("",)}, "empty text"),
        ({"n": 0}, "`n` is 0"),
    ],
)
def test_options_outside_their_range_are_named(options, named):
    with pytest.raises(ShapeError, match=named):
        Sampling(**options)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (Sampling, {"temperature": "hot"}, "Sampling: `temperature` is 'hot', of type str; pass a number"),
    (Sampling, {"top_k": 1.5}, "Sampling: `top_k` is 1.5, of type float; pass an integer"),
    (Sampling, {"logit_bias": {"a": 1}}, "`logit_bias` has 'a', of type str; pass token ids"),
    (Sampling, {"logit_bias": {3: "much"}}, "`logit_bias` of token 3 is much; pass a number"),
    (Limits, {"max_sequences": "x"}, "Limits: `max_sequences` is 'x', of type str; pass an integer"),
    (Limits, {"aging": None}, "Limits: `aging` is None; pass a number"),
]


@pytest.mark.parametrize("kind, options, text", WRONG)
def test_options_of_another_type(kind, options, text):
    with pytest.raises(ShapeError, match=text):
        kind(**options)
