"""The operations on torch tensors: values and gradients against torch's own, opcheck, torch.compile, errors.

Run as they are, the tensors on the CPU are served by the native kernels; under TRITON_INTERPRET=1 (`make test-gpu`) by the Triton kernels, interpreted.
"""

import contextlib
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import contract  # noqa: E402
import vishwamai.torch as vt  # noqa: E402
from vishwamai.core.errors import DeviceError, FallbackWarning, ShapeError, UnsupportedError  # noqa: E402
from vishwamai.torch import bridge  # noqa: E402
from vishwamai.torch.interpret import from_numpy, interpreted, to_numpy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning")


@pytest.fixture(autouse=True)
def kernels():
    with interpreted() if contract.INTERPRETED else contextlib.nullcontext():
        yield


def tensors(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def agree(function, reference, args, tolerance=2e-5):
    """Outputs and gradients of two functions of the tensors, in tensors' dtypes, to `tolerance` of the largest entry."""
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


# --- norm ------------------------------------------------------------------------------------------------------------------------------------------


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
    return [(x, scale, offset, residual, "layer", 1e-5), (x.detach(), None, None, None, "rms", 1e-6)]


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
@pytest.mark.skipif(contract.INTERPRETED, reason="the same graph")
def test_compile_by_inductor():
    compiled("inductor", False)


def test_norm_errors():
    (x,) = tensors((3, 16))
    with pytest.raises(ShapeError, match=r"layer_norm: `scale` has shape \(5,\)"):
        vt.layer_norm(x, torch.ones(5))
    with pytest.raises(DeviceError, match="meta"):
        bridge.platform_of(x.to("meta"))


@pytest.mark.skipif(not contract.INTERPRETED, reason="the CPU serves it")
def test_what_no_kernel_serves_on_a_gpu_is_refused_in_words():
    with pytest.raises(UnsupportedError, match=r"norm: no kernel serves torch tensors on a GPU.*float64"):
        vt.rms_norm(torch.ones(2, 4, dtype=torch.float64))


# --- The bridge ------------------------------------------------------------------------------------------------------------------------------------

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
    if contract.INTERPRETED:
        pytest.skip("the CPU's own implementations")
    from vishwamai.core import ffi

    monkeypatch.setattr(ffi, "_load", lambda: (None, "not built"))
    bridge._choose.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        test_norm("layer")
    bridge._choose.cache_clear()
