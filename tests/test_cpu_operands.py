"""The native CPU kernels on operands that the contract's cases do not have: padding over whole panels of keys, parameters of other types than the rows."""

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
