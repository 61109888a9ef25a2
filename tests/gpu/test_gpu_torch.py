"""The operations on torch tensors: values and gradients against torch's own, opcheck, torch.compile, errors.

Run as they are, the tensors on the CPU are served by the native kernels; under TRITON_INTERPRET=1 (`make test-gpu`) by
the Triton kernels, interpreted.
"""

import contextlib
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import contract  # noqa: E402
import vishwamai  # noqa: E402
import vishwamai.torch as vt  # noqa: E402
from triton_kernels import from_numpy, to_numpy, triton_serves  # noqa: E402
from vishwamai.core import gpu  # noqa: E402
from vishwamai.core.errors import DeviceError, FallbackWarning, ShapeError, UnsupportedError  # noqa: E402
from vishwamai.torch import bridge  # noqa: E402

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning")]


@pytest.fixture(autouse=True)
def kernels():
    with triton_serves() if contract.TRITON else contextlib.nullcontext():
        yield


def tensors(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def agree(function, reference, args, tolerance=2e-5):
    """Outputs and gradients of two functions of the tensors, in tensors' dtypes, to `tolerance` of the largest
    entry.
    """
    outputs, expected = function(*args), reference(*args)
    for got, want in zip(outputs, expected, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert (got - want).abs().max() <= tolerance * want.abs().max()
    weights = [torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype) for y in outputs]
    for got, want in zip(
        torch.autograd.grad(outputs, args, weights), torch.autograd.grad(expected, args, weights), strict=True
    ):
        assert got.dtype == want.dtype
        assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norm(kind):
    x, residual, scale, offset = tensors((2, 7, 48), (2, 7, 48), (48,), (48,))

    def ours(x, residual, scale, offset):
        return getattr(vt, f"{kind}_norm")(x, scale, offset, eps=1e-5, residual=residual)

    def theirs(x, residual, scale, offset):
        s = x + residual
        if kind == "layer":
            return torch.nn.functional.layer_norm(s, (48,), scale, offset, 1e-5), s
        return torch.nn.functional.rms_norm(s, (48,), scale, 1e-5) + offset, s

    agree(ours, theirs, (x, residual, scale, offset))


def test_norm_without_parameters_and_of_a_view():
    (x,) = tensors((48, 2, 9))
    agree(
        lambda x: (vt.layer_norm(x.transpose(0, 2), eps=1e-5),),
        lambda x: (torch.nn.functional.layer_norm(x.transpose(0, 2), (48,), eps=1e-5),),
        (x,),
    )


def test_a_sum_that_nobody_uses():
    x, residual = tensors((3, 16), (3, 16))
    y, _ = vt.rms_norm(x, residual=residual)
    first = torch.autograd.grad(y.sum(), (x, residual))
    assert torch.equal(*first)
    _, total = vt.rms_norm(x, residual=residual)
    assert torch.equal(torch.autograd.grad(total.sum(), x)[0], torch.ones_like(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norm_in_16_bits(dtype):
    (x,) = tensors((5, 100), dtype=dtype)
    y = vt.rms_norm(x, eps=1e-6)
    want = torch.nn.functional.rms_norm(x.double(), (100,), eps=1e-6)
    assert y.dtype == dtype and (y - want).abs().max() <= torch.finfo(dtype).eps * want.abs().max()


def norm_arguments():
    x, residual, scale, offset = tensors((3, 16), (3, 16), (16,), (16,))
    return [(x, residual, scale, offset, "layer", 1e-5), (x.detach(), None, None, None, "rms", 1e-6)]


@pytest.mark.parametrize("arguments", norm_arguments(), ids=["layer", "rms"])
def test_norm_opcheck(arguments):
    assert set(torch.library.opcheck(torch.ops.vishwamai.norm.default, arguments).values()) == {"SUCCESS"}


def compiled(backend, dynamic):
    def model(x, scale, residual):
        y, total = vt.rms_norm(x * 2.0, scale, residual=residual)
        return y.sin() + total

    args = tensors((4, 32), (32,), (4, 32))
    fast = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
    agree(lambda *a: (fast(*a),), lambda *a: (model(*a),), args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_in_one_graph(dynamic):
    compiled("aot_eager", dynamic)


@pytest.mark.long
@pytest.mark.skipif(contract.TRITON, reason="the same graph")
def test_compile_by_inductor():
    compiled("inductor", False)


def test_norm_errors():
    (x,) = tensors((3, 16))
    with pytest.raises(ShapeError, match=r"layer_norm: `scale` has shape \(5,\)"):
        vt.layer_norm(x, torch.ones(5))
    with pytest.raises(DeviceError, match="meta"):
        bridge.platform_of(x.to("meta"))


@pytest.mark.skipif(not contract.TRITON, reason="the CPU serves it")
def test_what_no_kernel_serves_on_a_gpu_is_declined_with_a_reason():
    with pytest.raises(UnsupportedError, match=r"norm: no kernel serves torch tensors on a GPU.*float64"):
        vt.rms_norm(torch.ones(2, 4, dtype=torch.float64))


@pytest.mark.skipif(not contract.TRITON, reason="the CPU has no such rule")
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("rows, transposed", [(63, 0), (64, 1)])
def test_8_bit_columns_are_transposed_first(dtype, rows, transposed):
    """The tensor cores take 8 bits with K contiguous; `b` is turned once where there are rows enough to pay for it."""
    a, b = (torch.randint(-9, 9, shape).to(getattr(torch, dtype)) for shape in ((rows, 48), (48, 100)))
    for turned in (False, True):
        with gpu.recorded() as launches:
            got = vt.gemm(a, b.T.contiguous() if turned else b, transpose_b=turned, out_dtype=torch.float32)
        assert torch.equal(got.double(), a.double() @ b.double())
        assert len(launches) == 1 + (0 if turned else transposed)


ACTIVATIONS = {
    None: lambda z: z,
    "relu": torch.relu,
    "relu2": lambda z: torch.relu(z) ** 2,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gemm(activation):
    """Every activation with every vector of the epilogue."""
    a, b, bias, scale_a, scale_b = tensors((9, 20), (20, 24), (24,), (9,), (24,))

    def ours(a, b, bias, scale_a, scale_b):
        return (vt.gemm(a, b, bias=bias, scale_a=scale_a, scale_b=scale_b, activation=activation),)

    def theirs(a, b, bias, scale_a, scale_b):
        return (ACTIVATIONS[activation]((a @ b) * scale_a[:, None] * scale_b + bias),)

    agree(ours, theirs, (a, b, bias, scale_a, scale_b))


# shapes of a, b, bias, scale_a, then transposes: batch axes that are shared, folded into rows, broadcast in part.
BATCHES = {
    "rows of a": ((2, 3, 5, 16), (16, 24), (24,), (2, 3, 5), False, False),
    "shared rows": ((2, 3, 5, 16), (16, 24), (24,), (5,), False, False),
    "rows shared in part": ((2, 3, 5, 16), (16, 24), (24,), (3, 1), False, False),
    "both": ((2, 5, 16), (2, 16, 24), (2, 24), (), False, False),
    "shared a": ((5, 16), (3, 16, 24), (24,), (1,), False, False),
    "in part": ((2, 3, 5, 16), (2, 1, 16, 24), (24,), (3, 5), False, False),
    "in part, of both": ((2, 1, 5, 16), (1, 3, 16, 24), (24,), (2, 1, 5), False, False),
    "transposed": ((16, 5), (3, 24, 16), (3, 24), (5,), True, True),
    "transposed a": ((2, 16, 5), (16, 24), (24,), (2, 1), True, False),
}


@pytest.mark.parametrize("name", BATCHES)
def test_gemm_batches(name):
    *shapes, transpose_a, transpose_b = BATCHES[name]
    args = tensors(*shapes)

    def ours(a, b, bias, scale):
        how = {"transpose_a": transpose_a, "transpose_b": transpose_b}
        return (vt.gemm(a, b, bias=bias, scale_a=scale, activation="silu", **how),)

    def theirs(a, b, bias, scale):
        a, b = (a.mT if transpose_a else a), (b.mT if transpose_b else b)
        scale = scale[..., None] if scale.dim() else scale
        return (torch.nn.functional.silu((a @ b) * scale + bias[..., None, :]),)

    agree(ours, theirs, args)


def test_gemm_of_integers_and_8_bit_floats():
    a, b = torch.randint(-127, 128, (7, 32), dtype=torch.int8), torch.randint(-127, 128, (32, 16), dtype=torch.int8)
    assert torch.equal(vt.gemm(a, b), (a.int() @ b.int()))
    scale = torch.rand(16, requires_grad=True)
    (got,) = torch.autograd.grad(vt.gemm(a, b, scale_b=scale).sum(), scale)
    assert torch.allclose(got, (a.float() @ b.float()).sum(0))
    x, y = (torch.randn(s).to(torch.float8_e4m3fn) for s in ((16, 32), (32, 16)))
    want = x.double() @ y.double()
    got = vt.gemm(x, y, out_dtype=torch.float32)
    assert got.dtype == torch.float32 and (got - want).abs().max() < 1e-5 * want.abs().max()


def gemm_arguments():
    a, b, bias, scale = tensors((3, 5, 16), (16, 24), (24,), (24,))
    return [
        (a, b, bias, None, scale, "gelu", False, False, "default", None, True),
        (a.detach(), b.detach(), None, None, None, "relu", False, False, "high", "bfloat16", False),
    ]


@pytest.mark.parametrize("arguments", gemm_arguments(), ids=["gelu", "relu"])
def test_gemm_opcheck(arguments):
    assert set(torch.library.opcheck(torch.ops.vishwamai.gemm.default, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize("dynamic", [False, True])
def test_gemm_compiles_in_one_graph(dynamic):
    def model(x, scale, weight, bias):
        return vt.gemm(vt.rms_norm(x, scale), weight, bias=bias, activation="silu") * 2

    args = tensors((4, 6, 16), (16,), (16, 24), (24,))
    fast = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    agree(lambda *a: (fast(*a),), lambda *a: (model(*a),), args)


def test_gemm_errors():
    with pytest.raises(ShapeError, match=r"gemm: `b` has shape \(4, 5\), but `a` has k = 3"):
        vt.gemm(torch.ones(2, 3), torch.ones(4, 5))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_softmax(name, axis):
    args = tensors((3, 5, 24))
    agree(
        lambda x: (getattr(vt, name)(x, axis=axis),),
        lambda x: (getattr(torch.nn.functional, name)(x, dim=axis),),
        args,
    )


@pytest.mark.parametrize("log", [False, True])
def test_softmax_opcheck(log):
    (x,) = tensors((3, 8))
    assert set(torch.library.opcheck(torch.ops.vishwamai.softmax.default, (x, log, False)).values()) == {"SUCCESS"}


def test_softmax_errors():
    with pytest.raises(ShapeError, match="log_softmax: `axis` is 2"):
        vt.log_softmax(torch.ones(2, 3), axis=2)


def turned(x, cos, sin, interleaved, rotary):
    """The rotation in torch, of `[..., seq, features]`."""
    y = x[..., :rotary]
    a, b = (y[..., 0::2], y[..., 1::2]) if interleaved else y.chunk(2, -1)
    halves = a * cos - b * sin, b * cos + a * sin
    y = torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
    return torch.cat([y, x[..., rotary:]], -1)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("interleaved, rotary", [(False, 24), (True, 24), (False, 12), (True, 12)])
def test_rope(layout, interleaved, rotary):
    """Queries and keys that are views of one tensor, whatever the layout: their strides are not those of contiguous
    ones.
    """
    length = 9
    (packed,) = tensors((2, length, 5, 24))
    positions = torch.randint(0, 1000, (2, length), generator=torch.Generator().manual_seed(1))
    inverse = 10000.0 ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    angles = (positions[:, None, :, None] * inverse).float()

    def ours(packed):
        q, k = packed[:, :, :3], packed[:, :, 3:]
        if layout == "bhsd":
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        return vt.apply_rope((q, k), positions, rotary_dim=rotary, interleaved=interleaved, layout=layout)

    def theirs(packed):
        x = turned(packed.transpose(1, 2), angles.cos(), angles.sin(), interleaved, rotary)
        q, k = x[:, :3], x[:, 3:]
        return (q, k) if layout == "bhsd" else (q.transpose(1, 2), k.transpose(1, 2))

    agree(ours, theirs, (packed,))


@pytest.mark.parametrize("scaling", [None, "longrope", "dynamic", "mrope"])
def test_rope_tables_are_those_of_jax(scaling):
    import jax.numpy as jnp

    from vishwamai.ops.rope.scaling import LongRopeScaling, MRopeScaling, NtkScaling, RopeScaling
    from vishwamai.ops.rope.tables import tables

    scalings = {
        None: lambda: RopeScaling(),
        "longrope": lambda: LongRopeScaling((1.0,) * 8, (4.0,) * 8, 32, 64),
        "dynamic": lambda: NtkScaling(2.0, 32),
        "mrope": lambda: MRopeScaling((2, 3, 3)),
    }
    chosen = scalings[scaling]()
    positions = np.random.default_rng(0).integers(0, 100000, (3, 2, 7) if scaling == "mrope" else (2, 7))
    want = tables(jnp.asarray(positions, jnp.int32), 16, 10000.0, chosen, jnp.float32)
    got = vt.rope_tables(torch.from_numpy(positions), 16, scaling=chosen)
    for ours, theirs in zip(got, want, strict=True):
        tolerance = 0.05 if scaling == "dynamic" else 1e-6  # dynamic frequencies are float32, times positions to 100000
        np.testing.assert_allclose(ours.numpy(), np.asarray(theirs), atol=tolerance)


def test_rope_opcheck():
    query, key = tensors((1, 2, 5, 8), (1, 1, 5, 8))
    cos, sin = vt.rope_tables(5, 8)
    for arguments in ((query, key, cos, sin, False, "bhsd"), (query, None, cos[:, :, :2], sin[:, :, :2], True, "bhsd")):
        assert set(torch.library.opcheck(torch.ops.vishwamai.rope.default, arguments).values()) == {"SUCCESS"}


def test_rope_and_softmax_compile_in_one_graph():
    tables = vt.rope_tables(6, 8)

    def model(query, key):
        query, key = vt.apply_rope((query, key), tables=tables)
        return vt.softmax(query @ key.mT)

    args = tensors((1, 2, 6, 8), (1, 2, 6, 8))
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    agree(lambda *a: (fast(*a),), lambda *a: (model(*a),), args)


def test_rope_errors():
    (x,) = tensors((1, 2, 5, 8))
    with pytest.raises(ShapeError, match="`positions` has shape"):
        vt.apply_rope(x, torch.arange(4))
    with pytest.raises(ShapeError, match="cos of `tables` has shape"):
        vt.apply_rope(x, tables=vt.rope_tables(4, 8))
    with pytest.raises(ShapeError, match="`tables` bring positions"):
        vt.apply_rope(x, torch.arange(5), tables=vt.rope_tables(5, 8))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_dropout(approximate):
    """Values and gradients under the mask that JAX forms from the same seeds: the same bits, on elements far from 0
    too.
    """
    import jax
    import jax.numpy as jnp

    from vishwamai.core import dropout

    key, rate = jax.random.key(3), 0.25
    seeds = np.asarray(dropout.seeds(key, 1, 1)[0, 0])
    ones = jnp.full((3, 7, 40), 5.0)
    kept = torch.from_numpy(np.array(vishwamai.fused_gelu_dropout(ones, rate, key=key) != 0))
    assert 0.6 < kept.float().mean() < 0.9
    args = tensors((3, 7, 40))
    gelu = torch.nn.functional.gelu
    for seed in (torch.from_numpy(seeds.astype(np.int64)), torch.from_numpy(seeds.view(np.int32).copy())):
        agree(
            lambda x, seed=seed: (vt.fused_gelu_dropout(x, rate, seed=seed, approximate=approximate == "tanh"),),
            lambda x: (torch.where(kept, gelu(x, approximate=approximate) / (1 - rate), 0.0),),
            args,
        )
    agree(
        lambda x: (vt.fused_gelu_dropout(x, rate, deterministic=True, approximate=approximate == "tanh"),),
        lambda x: (gelu(x, approximate=approximate),),
        args,
    )


def test_gelu_dropout_draws_from_torch():
    x = torch.full((16, 64), 5.0)
    torch.manual_seed(0)
    first, second = (vt.fused_gelu_dropout(x, 0.5) for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(first, vt.fused_gelu_dropout(x, 0.5)) and not torch.equal(first, second)
    fast = torch.compile(lambda x: vt.fused_gelu_dropout(x, 0.5) * 2, fullgraph=True, backend="aot_eager")
    assert 0.4 < (fast(x) == 0).float().mean() < 0.6


def test_gelu_dropout_opcheck():
    (x,) = tensors((3, 8))
    numbers = (torch.arange(n, dtype=torch.int32) for n in x.shape)
    dropped = (x, *numbers, torch.tensor([[1, -2]], dtype=torch.int32), "gelu", 0.5)
    for arguments in (dropped, (x, None, None, None, "silu", 0.0)):
        assert set(torch.library.opcheck(torch.ops.vishwamai.activation.default, arguments).values()) == {"SUCCESS"}


def test_gelu_dropout_errors():
    with pytest.raises(ShapeError, match="`rate` is 1.5"):
        vt.fused_gelu_dropout(torch.ones(3), 1.5)
    with pytest.raises(ShapeError, match="`seed` has shape"):
        vt.fused_gelu_dropout(torch.ones(3), 0.5, seed=torch.ones(3))


DTYPES = ["float32", "float64", "bfloat16", "float16", "int8", "int32", "int64", "bool", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), ()], ids=str)
def test_dlpack_and_back(dtype, shape):
    """Every dtype crosses to JAX and back with its bits, sharing memory where it has any."""
    import jax

    x = torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape).to(getattr(torch, dtype))
    with jax.enable_x64(True):
        array = bridge.to_jax(x)
        assert array.dtype.name == dtype and array.shape == shape
        back = bridge.to_torch(array)
    assert back.dtype == x.dtype and torch.equal(back.to(torch.float64), x.to(torch.float64))
    if x.numel():
        assert to_numpy(from_numpy(np.asarray(array)), array.dtype).tobytes() == np.asarray(array).tobytes()


def test_a_reference_serves_where_the_native_kernels_are_missing(monkeypatch):
    """Without the C++ module the plain JAX implementation runs, residual and all, and warns."""
    if contract.TRITON:
        pytest.skip("the CPU's own implementations")
    from vishwamai.core import ffi

    monkeypatch.setattr(ffi, "_load", lambda: (None, "not built"))
    bridge._choose.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        test_norm("layer")
    bridge._choose.cache_clear()
