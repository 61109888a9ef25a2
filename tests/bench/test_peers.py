"""Where a framework's own function means the same, it gives the same: torch and jax.nn, over random shapes and options,
values and gradients.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vishwamai

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[torch]'")
functional = torch.nn.functional


def arrays(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def ours_and_gradients(function, inputs, cotangent):
    y, pull = jax.vjp(function, *map(jnp.asarray, inputs))
    return [np.asarray(x) for x in (y, *pull(jnp.asarray(cotangent)))]


def torch_and_gradients(function, inputs, cotangent):
    leaves = [torch.tensor(x, requires_grad=True) for x in inputs]
    y = function(*leaves)
    y.backward(torch.tensor(cotangent))
    return [x.detach().numpy() for x in (y, *(leaf.grad for leaf in leaves))]


def agree(ours, theirs, tolerance=2e-5):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(b).max())))


ATTENTION = {
    "full": {},
    "causal": {"causal": True},
    "causal, more keys": {"causal": True, "keys": 90},
    "causal, fewer keys": {"causal": True, "keys": 40},
    "bool mask": {"mask": "bool"},
    "bias": {"mask": "float"},
    "scale": {"scale": 0.3},
    "grouped heads": {"kv_heads": 2},
    "one kv head": {"kv_heads": 1, "causal": True},
}


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", ATTENTION)
def test_torch_scaled_dot_product_attention(name):
    """`causal` with unequal lengths stands top left in torch too; a bool mask is True = attend there too."""
    options = dict(ATTENTION[name])
    length, keys, heads, kv_heads = 63, options.pop("keys", 63), 4, options.pop("kv_heads", 4)
    inputs = arrays(1, (2, heads, length, 48), (2, kv_heads, keys, 48), (2, kv_heads, keys, 40))
    (cotangent,) = arrays(2, (2, heads, length, 40))
    rng = np.random.default_rng(3)
    kind = options.pop("mask", None)
    mask: Any = rng.random((2, 1, length, keys)) < 0.7 if kind == "bool" else None
    if mask is not None:
        mask[..., 0] = True  # where a row sees nothing torch's kernels do not agree among themselves
    bias: Any = arrays(4, (1, heads, length, keys))[0] if kind == "float" else None
    given = mask if bias is None else bias
    theirs = torch_and_gradients(
        lambda q, k, v: functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if given is None else torch.tensor(given),
            is_causal=options.get("causal", False),
            scale=options.get("scale"),
            enable_gqa=kv_heads != heads,
        ),
        inputs,
        cotangent,
    )
    ours = ours_and_gradients(
        lambda q, k, v: vishwamai.flash_attention(q, k, v, bias=bias, mask=mask, **options), inputs, cotangent
    )
    agree(ours, theirs)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (9, 4)}, {"causal": True, "window": (5, 0)}], ids=str
)
def test_jax_nn_dot_product_attention(options):
    """jax.nn's layout is [batch, seq, heads, dim], and its local window is (left, right) inclusive."""
    inputs = arrays(1, (2, 50, 4, 32), (2, 50, 2, 32), (2, 50, 2, 32))
    (cotangent,) = arrays(2, (2, 50, 4, 32))
    renamed = {"is_causal": options.get("causal", False), "local_window_size": options.get("window")}
    theirs = ours_and_gradients(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **renamed), inputs, cotangent)
    ours = ours_and_gradients(
        lambda q, k, v: vishwamai.flash_attention(q, k, v, layout="bshd", **options), inputs, cotangent
    )
    agree(ours, theirs)


@pytest.mark.parametrize("shape", [(5, 63), (2, 3, 100), (7, 1024)], ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_torch_layer_norm(shape, affine):
    inputs = arrays(1, shape, *([shape[-1:]] * 2 if affine else []))
    (cotangent,) = arrays(2, shape)
    theirs = torch_and_gradients(lambda x, *p: functional.layer_norm(x, shape[-1:], *p, eps=1e-5), inputs, cotangent)
    agree(ours_and_gradients(lambda x, *p: vishwamai.layer_norm(x, *p, eps=1e-5), inputs, cotangent), theirs)


@pytest.mark.parametrize("shape", [(5, 63), (2, 3, 100), (7, 1024)], ids=str)
def test_torch_rms_norm(shape):
    inputs = arrays(1, shape, shape[-1:])
    (cotangent,) = arrays(2, shape)
    theirs = torch_and_gradients(lambda x, w: functional.rms_norm(x, shape[-1:], w, eps=1e-5), inputs, cotangent)
    agree(ours_and_gradients(lambda x, w: vishwamai.rms_norm(x, w, eps=1e-5), inputs, cotangent), theirs)


ACTIVATIONS = {
    None: lambda x: x,
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_linear(activation):
    """A linear layer with torch's [out, in] weights is `transpose_b`."""
    inputs = arrays(1, (3, 17, 63), (100, 63), (100,))
    inputs[1] /= 8
    (cotangent,) = arrays(2, (3, 17, 100))
    theirs = torch_and_gradients(lambda x, w, b: ACTIVATIONS[activation](functional.linear(x, w, b)), inputs, cotangent)
    ours = ours_and_gradients(
        lambda x, w, b: vishwamai.gemm(x, w, bias=b, transpose_b=True, activation=activation), inputs, cotangent
    )
    agree(ours, theirs)


@pytest.mark.parametrize(
    "shapes", [((5, 17, 20), (5, 20, 9)), ((2, 1, 7, 20), (3, 20, 9)), ((7, 20), (4, 20, 9))], ids=str
)
def test_torch_matmul(shapes):
    inputs = arrays(1, *shapes)
    cotangent = arrays(2, np.matmul(*inputs).shape)[0]
    agree(ours_and_gradients(vishwamai.gemm, inputs, cotangent), torch_and_gradients(torch.matmul, inputs, cotangent))
