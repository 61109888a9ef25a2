"""The parameter grid of JAX's own tests of `jax.nn.dot_product_attention`, on `vishwamai.nnx.dot_product_attention`.

Results and gradients may be twice as far from JAX's in float64 as JAX's in the same dtype are.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import contract
import rotation
from vishwamai import nnx

pytestmark = pytest.mark.skipif(contract.TRITON, reason="the kernels of the CPU")
IMPLEMENTATIONS = {impl.name: impl for op, impl in contract.pairs() if op.name == "attention"}
ON_CPU = ("xla", "xla_chunked", "native_cpu")


def drawn_arrays(dtype, *shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def check(implementation, arrays, cotangent, mapped=None, rows=None, **options):
    """Results and gradients of ours and of JAX's, of which `rows` count.

    Args:
      mapped: the axes of `arrays` to map over, where each call has one batch element.
      rows: bool `[batch, q_len]`: False where a query sees nothing, which gives 0 here and a mean of values there.
    """
    contract.skip_unless_built(IMPLEMENTATIONS[implementation])
    dtype, lse = cotangent.dtype, options.get("return_residual")
    counts = np.ones(cotangent.shape[:2], bool) if rows is None else rows
    cotangent = cotangent * counts[..., None, None].astype(dtype)

    def run(attend, wide, **how) -> Any:
        def call(*arrays):
            out = attend(*arrays, **options, **how)
            return out if lse else (out,)

        call = call if mapped is None else jax.vmap(call, mapped)
        given = [x.astype(wide) for x in arrays]
        outs, pull = jax.vjp(jax.jit(call), *given)
        return [x * counts.reshape(counts.shape + (1,) * (x.ndim - 2)) for x in outs], pull(
            (cotangent.astype(wide), *(jnp.zeros_like(x) for x in outs[1:]))
        )

    def named(outs, gradients):
        return tuple(np.asarray(x) for x in outs), {str(i): np.asarray(x) for i, x in enumerate(gradients)}

    ours = named(*run(nnx.dot_product_attention, dtype, implementation=implementation))
    # On CPUs JAX has no products of float16: there its result is that of float32, rounded.
    half = dtype == jnp.float16
    theirs = named(*run(jax.nn.dot_product_attention, jnp.float32 if half else dtype, implementation="xla"))
    theirs = jax.tree.map(lambda x, like: x.astype(like.dtype), theirs, ours)
    with jax.enable_x64(True):
        true = named(*run(jax.nn.dot_product_attention, jnp.float64, implementation="xla"))
    contract.check_all(ours, true, theirs)
    if rows is not None:
        out = nnx.dot_product_attention(*arrays, **options, implementation=implementation)
        assert not np.asarray(out, np.float32)[~rows].any()


@pytest.mark.parametrize(
    ("dtype", "groups", "mapped", "implementation"),
    rotation.drawn(list(itertools.product(("bfloat16", "float16"), (1, 2, 4), (False, True), ON_CPU)), 18),
)
def test_dot_product_attention(dtype, groups, mapped, implementation):
    whole, kv = (2, 128, 4, 32), (2, 128, 4 // groups, 32)
    *arrays, cotangent = drawn_arrays(dtype, whole, kv, kv, whole)
    check(implementation, arrays, cotangent, mapped=(0, 0, 0) if mapped else None)


MODES = (
    *("bias", "causal", "padding", "custom", "causal padding", "custom padding", "bias causal"),
    *("causal sliding_window", "causal custom", "sliding_window", "one sliding_window", "causal residual"),
)


@pytest.mark.parametrize(
    ("mode", "dtype", "implementation"),
    rotation.drawn(list(itertools.product(MODES, ("bfloat16", "float32"), ON_CPU)), 24),
)
def test_masks(mode, dtype, implementation):
    shape = (2, 128, 4, 32)
    *arrays, cotangent, bias = drawn_arrays(dtype, *(shape,) * 4, (1, 4, 128, 128))
    modes, rows = mode.split(), None
    options: dict[str, Any] = {"is_causal": "causal" in modes}
    if "bias" in modes:
        arrays.append(bias)
    if "custom" in modes:
        options["mask"] = np.tri(128, dtype=bool)[None, None]
    if "padding" in modes:
        options["query_seq_lengths"], options["key_value_seq_lengths"] = jnp.array([64, 32]), jnp.array([32, 64])
        rows = np.arange(128) < np.array([[64], [32]])
    if "sliding_window" in modes:
        options["local_window_size"] = 5 if "one" in modes else (3, 2) if "causal" in modes else (3, 0)
    if "residual" in modes:
        options["return_residual"] = True
    check(implementation, arrays, cotangent, rows=rows, **options)


@pytest.mark.parametrize(
    ("batch", "mapped", "implementation"),
    rotation.drawn(list(itertools.product((1, 16), (False, True), ON_CPU)), 6),
)
def test_bias_gradient(batch, mapped, implementation):
    """Of a bias for each batch element too, which JAX's cuDNN kernel declines."""
    shape = (batch, 128, 4, 32)
    x, cotangent, bias = drawn_arrays("bfloat16", shape, shape, (batch, 4, 128, 128))
    mask = jnp.ones((1, 1, 128), bool)
    axes = (0, 0, 0, 0) if mapped else None
    check(implementation, (x, x, x, bias), cotangent, mapped=axes, mask=mask)
