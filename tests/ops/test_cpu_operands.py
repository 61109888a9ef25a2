"""The native CPU kernels on operands that the contract's cases do not have: padding over whole panels of keys,
parameters of other types than the rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vishwamai
from vishwamai.core import ffi

if ffi.why_not() is not None:
    pytest.skip("the native CPU kernels are not built", allow_module_level=True)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_padding_over_whole_panels(dtype, tolerance):
    """Sequences of 0, 33 and 300 keys among 300: hidden panels are skipped, a sequence without keys gives 0."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((3, 2, 300, 40)), dtype) for _ in range(3))
    mask = jnp.arange(300) < jnp.array([0, 33, 300])[:, None, None, None]
    out, reference = (
        np.asarray(vishwamai.flash_attention(q, k, v, mask=mask, implementation=how), np.float32)
        for how in ("native_cpu", "xla")
    )
    assert (out[0] == 0).all()
    np.testing.assert_allclose(out, reference, atol=tolerance)
    hidden = jnp.where(mask.swapaxes(2, 3), k, jnp.nan)  # in some panel that is not skipped, for the second sequence
    again = vishwamai.flash_attention(q, hidden, v, mask=mask, implementation="native_cpu")
    np.testing.assert_array_equal(np.asarray(again, np.float32), out)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("bfloat16", 4e-2)])
@pytest.mark.parametrize("masked", ("mask", "mask and bias", "segments"))
def test_gradients_skip_what_is_hidden(dtype, tolerance, masked):
    """Keys that padding or segments hide from all queries of a panel are skipped by the backward pass: gradients as the
    reference's, 0 where hidden.
    """
    rng = np.random.default_rng(0)
    q, k, v, w = (jnp.asarray(rng.standard_normal((3, 2, 300, 40)), dtype) for _ in range(4))
    shown = jnp.arange(300) < jnp.array([0, 33, 300])[:, None]
    how: dict[str, Any] = {"mask": shown[:, None, None]}
    if masked == "segments":  # two sequences in a row and padding; all of the second batch's is one segment
        ends = jnp.array([[90, 200], [300, 300], [1, 299]])
        ids = (jnp.arange(300) >= ends[:, :1]).astype(jnp.int32) + (jnp.arange(300) >= ends[:, 1:])
        how = {"segment_ids": (ids, ids)}
    bias = jnp.asarray(rng.standard_normal((1, 2, 300, 300)), jnp.float32) if masked == "mask and bias" else None

    def gradients(implementation):
        def attention(q, k, v, bias):
            return vishwamai.flash_attention(q, k, v, bias, **how, implementation=implementation)

        out, pull = jax.vjp(attention, q, k, v, bias)
        return [x for x in (out, *pull(w)) if x is not None]

    ours = gradients("native_cpu")
    if "mask" in how:
        for gradient in ours[2:4]:  # of keys and values
            assert (np.asarray(gradient, np.float32)[~np.broadcast_to(shown[:, None], (3, 2, 300))] == 0).all()
    for got, reference in zip(ours, gradients("xla"), strict=True):
        got, reference = np.asarray(got, np.float32), np.asarray(reference, np.float32)
        np.testing.assert_allclose(got, reference, atol=tolerance * max(1, np.abs(reference).max()))


def test_norm_parameters_of_other_types():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((5, 37)), jnp.float32)
    scale, offset = (
        jnp.asarray(rng.standard_normal(37), jnp.float16),
        jnp.asarray(rng.standard_normal(37), jnp.bfloat16),
    )

    def pulled(how):
        y, pull = jax.vjp(lambda *a: vishwamai.layer_norm(*a, implementation=how), x, scale, offset)
        return y, *pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    for ours, reference in zip(pulled("native_cpu"), pulled("xla"), strict=True):
        assert ours.dtype == reference.dtype
        np.testing.assert_allclose(
            np.asarray(ours, np.float32),
            np.asarray(reference, np.float32),
            rtol=1e-2 if ours.ndim == 1 else 1e-5,
            atol=1e-5,
        )
