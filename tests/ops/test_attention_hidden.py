"""What hidden keys hold does not matter: infinity and NaN in keys and values that no query may see."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import contract
import rotation
from vishwamai import block_sparse_attention, flash_attention

pytestmark = pytest.mark.interpreter

EVERYWHERE = ("xla", "xla_chunked", "native_cpu", "pallas_tpu", "triton")
NOT_TRITON = EVERYWHERE[:-1]
BY_TILE = EVERYWHERE[:3]

IMPLEMENTATIONS = {impl.name: impl for op, impl in contract.pairs() if op.name == "attention"}


def batch_mask(hidden: np.ndarray, *rows: int) -> np.ndarray:
    """`[2, 1, *rows, keys]`: hides the keys `hidden` of the second batch element."""
    shown = np.stack([np.zeros_like(hidden), hidden]) == 0
    return np.broadcast_to(shown[:, None, None], (2, 1, *rows, hidden.size)).copy()


def blocks() -> np.ndarray:
    shown = np.ones((3, 4), bool)
    shown[:, 2] = False
    return shown


COLUMNS = np.arange(100)
TAIL, HEAD, HOLE = COLUMNS >= 70, COLUMNS < 33, (COLUMNS >= 40) & (COLUMNS < 52)
OWN, OTHER = np.zeros((2, 45), np.int32), np.where(TAIL, 7, 0)[None].repeat(2, 0).astype(np.int32)

# name: (hidden keys of the second batch element, options, implementations that promise it)
CASES: dict[str, tuple[np.ndarray, dict[str, Any], tuple[str, ...]]] = {
    "lengths": (TAIL, {"kv_lens": np.array([100, 70])}, EVERYWHERE),
    "starts": (HEAD, {"kv_starts": np.array([0, 33])}, EVERYWHERE),
    "lengths and causal": (TAIL, {"kv_lens": np.array([100, 70]), "causal": True, "q_offset": 55}, EVERYWHERE),
    "lengths, softcap, sinks": (TAIL, {"kv_lens": np.array([100, 70]), "softcap": 2.0, "sinks": 1}, EVERYWHERE),
    "causal tail": (COLUMNS >= 45, {"causal": True}, EVERYWHERE),
    "window's left": (COLUMNS < 35, {"window": (15, None), "q_offset": 50}, NOT_TRITON),
    "positions": (COLUMNS > 60, {"causal": True, "q_offset": np.array([99, 16])}, EVERYWHERE),
    "segments": (TAIL, {"segment_ids": (OWN, OTHER)}, NOT_TRITON),
    "mask by key": (HOLE, {"mask": batch_mask(HOLE, 1)}, NOT_TRITON),
    "mask and bias": (HOLE, {"mask": batch_mask(HOLE, 1), "bias": (1, 2, 45, 100)}, NOT_TRITON),
    "mask and dropout": (HOLE, {"mask": batch_mask(HOLE, 1), "dropout_rate": 0.2}, NOT_TRITON),
    "mask of pairs": (HOLE, {"mask": batch_mask(HOLE, 45)}, BY_TILE),
    "block mask": (
        (COLUMNS >= 50) & (COLUMNS < 75),
        {"block_mask": blocks(), "block_size": (15, 25)},
        NOT_TRITON,
    ),
}


def operands(q_len: int, dtype: str) -> list[Any]:
    rng = np.random.default_rng(0)
    shapes = (2, 2, q_len, 32), (2, 1, 100, 32), (2, 1, 100, 48)
    return [rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes]


def poisoned(hidden: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
    """Copies whose hidden keys, of the second batch element, are NaN, inf and -inf."""
    found = [x.copy() for x in arrays]
    for x in found:
        bad = np.resize(np.array([np.nan, np.inf, -np.inf]), (x.shape[1], hidden.sum(), x.shape[3]))
        x[1][:, hidden] = bad.astype(x.dtype)
    return found


def runs(impl: Any, calls: list[tuple[Any, ...]], options: dict[str, Any]) -> list[Any]:
    """((out, logsumexp), gradients of query, key, value and bias) of every (q, k, v), by one program."""
    options = dict(options, return_lse=True, implementation=impl.name)
    rng = np.random.default_rng(1)
    bias = rng.standard_normal(options.pop("bias")).astype(np.float32) if "bias" in options else None
    if "sinks" in options:
        options["sinks"] = jnp.zeros(2)
    if "dropout_rate" in options:
        options["dropout_key"] = jax.random.key(0)
    call: Any = block_sparse_attention if "block_mask" in options else flash_attention

    def both(q: Any, k: Any, v: Any, bias: Any) -> Any:
        results, pull = jax.vjp(lambda q, k, v, bias: call(q, k, v, bias=bias, **options), q, k, v, bias)
        out, lse = results
        return results, pull((jnp.ones_like(out), jnp.where(lse == -jnp.inf, 0, 1.0).astype(lse.dtype)))

    contract.skip_unless_built(impl)
    program = jax.jit(both)
    found = []
    for call_of in calls:
        with contract.running(impl):
            found.append(jax.tree.map(np.asarray, jax.block_until_ready(program(*call_of, bias))))
    return found


def promises() -> list[Any]:
    found = []
    for at, (name, (_, _, where)) in enumerate(CASES.items()):
        for impl in where:
            if impl in IMPLEMENTATIONS:
                slow = IMPLEMENTATIONS[impl].platform in ("tpu", "cuda")
                marks = rotation.one_in(12 if slow else 4, at)
                found.append(
                    pytest.param(name, IMPLEMENTATIONS[impl], id=f"{name}-{impl}".replace(" ", "_"), marks=marks)
                )
    return found


@pytest.mark.turns(4)
@pytest.mark.parametrize("name, impl", promises())
def test_hidden_keys_may_hold_anything(name: str, impl: Any) -> None:
    """The result, and every gradient, is that of finite hidden keys; their own gradients are exactly 0."""
    hidden, options, _ = CASES[name]
    q, k, v = operands(45, "bfloat16" if name in ("lengths", "causal tail") else "float32")
    clean, got = runs(impl, [(q, k, v), (q, *poisoned(hidden, k, v))], options)
    for ours, expected in zip(jax.tree.leaves(got), jax.tree.leaves(clean), strict=True):
        assert np.isfinite(ours.astype(np.float64)).all()
        contract.close(ours, expected, 1e-5)
    for gradient in got[1][1:3]:
        assert (gradient[1][:, hidden] == 0).all() and (gradient != 0).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("q_len", [45, 3])
def test_the_cpu_keeps_a_key_from_every_row_that_does_not_see_it(q_len: int, dtype: str) -> None:
    """Also where other rows see it, in blocks and in decoding."""
    if "native_cpu" not in IMPLEMENTATIONS:
        pytest.skip("another platform's process")
    q, k, v = operands(q_len, dtype)
    at = 99 - q_len // 2
    options = {"causal": True, "causal_align": "bottom_right"}
    bad = [x.copy() for x in (k, v)]
    bad[0][1, :, at], bad[1][1, :, at, 5] = np.nan, np.inf
    impl = IMPLEMENTATIONS["native_cpu"]
    clean, by_key, by_value = runs(impl, [(q, k, v), (q, bad[0], v), (q, k, bad[1])], options)
    first = at - (100 - q_len)  # the first row that sees it
    for got in (by_key, by_value):
        for ours, expected in zip((got[0][0], got[1][0]), (clean[0][0], clean[1][0]), strict=True):
            contract.close(ours[1, :, :first], expected[1, :, :first], 1e-5)
            contract.close(ours[0], expected[0], 1e-5)
    assert np.isnan(by_key[0][0][1, :, first:].astype(np.float32)).all()
    assert np.isinf(by_value[0][0][1, :, first:, 5].astype(np.float32)).all()
    contract.close(np.delete(by_value[0][0], 5, -1), np.delete(clean[0][0], 5, -1), 1e-5)


def test_a_cache_of_garbage_after_its_length() -> None:
    """Decoding by the CPU's kernel: one query of each head, most of the cache never written."""
    if "native_cpu" not in IMPLEMENTATIONS:
        pytest.skip("another platform's process")
    q, k, v = operands(1, "bfloat16")
    clean, got = runs(
        IMPLEMENTATIONS["native_cpu"], [(q, k, v), (q, *poisoned(TAIL, k, v))], {"kv_lens": np.array([100, 70])}
    )
    for ours, expected in zip(jax.tree.leaves(got), jax.tree.leaves(clean), strict=True):
        contract.close(ours, expected, 1e-5)
