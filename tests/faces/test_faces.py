"""The faces: what the names promise is true. The examples of their pages run with those of the others: `make
examples`.
"""

import copy
import pickle
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vishwamai
from jax_inside import DEVICES_TAKEN
from vishwamai import aot, kernels
from vishwamai.core import config as config_module
from vishwamai.core import ffi
from vishwamai.core import op as op_module
from vishwamai.core.config import current_config, kernel_config, without_effect
from vishwamai.core.target import Target
from vishwamai.kernels import (
    DeviceError,
    FallbackWarning,
    KernelConfig,
    KernelError,
    PrecisionConfig,
    ShapeError,
    UnsupportedError,
    cpu_kernel,
    decorators,
    expert_kernel,
    gpu_kernel,
    sparse_kernel,
    tpu_kernel,
)

pytestmark = pytest.mark.filterwarnings("ignore::vishwamai.FallbackWarning")


def random(*shape, seed=0, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.fixture(autouse=True)
def fresh():
    """Each test sees its own warnings."""
    decorators._warn_once.cache_clear()
    op_module._warn_once.cache_clear()


@pytest.mark.turns(3)
def test_a_kernel_is_a_function_in_every_transform():
    @tpu_kernel
    def layer(x, w, *, activation="relu", names=("a", "b")):
        assert isinstance(activation, str) and names == ("a", "b")
        return {"y": vishwamai.gemm(vishwamai.rms_norm(x), w, activation=activation)}

    def plain(x, w):
        return vishwamai.gemm(vishwamai.rms_norm(x), w, activation="relu")

    x, w = random(6, 32), random(32, 8, seed=1)
    close: Any = dict(rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(layer(x, w)["y"], plain(x, w), **close)
    np.testing.assert_allclose(layer(x, w, activation="tanh")["y"], np.tanh(vishwamai.rms_norm(x) @ w), **close)
    got = jax.jit(jax.grad(lambda x: layer(x, w)["y"].sum()))(x)
    np.testing.assert_allclose(got, jax.grad(lambda x: plain(x, w).sum())(x), **close)
    xs = jnp.stack([x, 2 * x])
    np.testing.assert_allclose(jax.vmap(layer, (0, None))(xs, w)["y"], jax.vmap(plain, (0, None))(xs, w), **close)
    assert layer.__name__ == "layer" and layer.platform == "tpu"
    np.testing.assert_allclose(layer.lower(x, w).compile()(x, w)["y"], plain(x, w), **close)


@pytest.mark.turns(3)
def test_importing_costs_no_device_and_no_torch():
    code = (
        "import sys, vishwamai.kernels, vishwamai.kernels.tpu.tpu_custom_call, capibara.core.kernels\n"
        f"print({DEVICES_TAKEN}, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", "False"]


def test_methods_are_kernels_too():
    class Layer:
        def __init__(self, eps):
            self.eps = eps

        @cpu_kernel
        def normed(self, x):
            return vishwamai.rms_norm(x, eps=self.eps)

    x = random(4, 8)
    np.testing.assert_allclose(Layer(0.5).normed(x), vishwamai.rms_norm(x, eps=0.5), rtol=1e-6)
    assert Layer.normed.name == "normed"


def test_forms_of_the_decorators_are_the_same():
    config = KernelConfig(block_size=64, strict=True)
    forms = [
        cpu_kernel(current_config),
        cpu_kernel()(current_config),
        cpu_kernel(block_size=64, strict=True)(current_config),
        cpu_kernel(config=config)(current_config),
        cpu_kernel(config=config, block_size=32)(current_config),
        cpu_kernel(current_config, block_size=64),
    ]
    seen = [(form.config.block_size, form.config.strict) for form in forms]
    assert seen == [(None, False), (None, False), (64, True), (64, True), (32, True), (64, False)]
    with kernel_config(block_size=16):  # keywords go over the ambient configuration, `config=` replaces it
        assert forms[0].config.block_size == 16 and forms[3].config == config
    wrong: Any = "fast"
    for bad in (lambda: tpu_kernel(blocksize=3)(abs), lambda: tpu_kernel(wrong), lambda: tpu_kernel(abs, config=wrong)):
        with pytest.raises(KernelError):
            bad()


def test_the_operations_inside_read_the_configuration():
    seen = []

    @cpu_kernel(block_size=48, use_bfloat16=True)
    def kernel(x):
        seen.append(current_config())
        return vishwamai.gemm(x, x)

    x = random(64, 64)
    np.testing.assert_array_equal(
        kernel(x), vishwamai.gemm(x.astype("bfloat16"), x.astype("bfloat16"), out_dtype="float32")
    )
    assert seen[0].block_size == 48 and current_config().block_size is None
    call = kernel.explain(x, target="v5e").calls[0]
    assert call.runs == "pallas_tpu" and "bfloat16[1,64,64]" in str(call)


def test_the_platform_is_a_request_that_is_reported():
    x = random(4, 8)
    kernel = tpu_kernel(lambda x: vishwamai.rms_norm(x))
    with pytest.warns(FallbackWarning, match="there is no|JAX has no TPU here, so it runs on cpu"):
        kernel(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel(x)  # told once
        jax.jit(kernel)(x)
        cpu_kernel(lambda x: vishwamai.rms_norm(x))(x)
    with pytest.raises(DeviceError, match=r"no GPU here.*strict=True.*jaxlib with GPU"):
        gpu_kernel(lambda x: x, strict=True)(x)


def test_errors_arrive_with_their_cause():
    x = random(4, 8)

    def raised(function, *args, **options):
        with pytest.raises(kernels.VishwamaiError) as caught:
            cpu_kernel(function, **options)(*args)
        return caught.value

    error = raised(lambda x: x @ x, x)
    assert type(error) is KernelError and isinstance(error.__cause__, TypeError) and "dot_general" in str(error)
    error = raised(lambda x: jnp.reshape(x, (3, 3)), x)
    assert isinstance(error.__cause__, (TypeError, ValueError)) and isinstance(error, KernelError)
    error = raised(lambda x: vishwamai.gemm(x, x), x)
    assert type(error) is ShapeError and error.__cause__ is None and str(error).startswith("gemm:")
    error = raised(lambda x: 1 / 0, x)
    assert isinstance(error.__cause__, ZeroDivisionError)
    error = raised(lambda x, y: x, x)
    assert "missing 1 required positional argument: 'y'" in str(error)

    def unfinished(x):
        raise NotImplementedError("no complex numbers")

    error = raised(unfinished, x)
    assert type(error) is UnsupportedError and "no complex numbers" in str(error)

    def out_of_memory(x):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 12 GiB")

    error = raised(out_of_memory, x)
    assert type(error) is DeviceError and "jax.checkpoint" in str(error)


def test_torch_tensors_are_left_to_torch():
    torch = pytest.importorskip("torch")
    import vishwamai.torch as operations

    seen = []

    @gpu_kernel(precision="high", use_tensor_cores=True)
    def kernel(x, w, scale=2.0):
        seen.append(current_config().precision)
        return operations.gemm(x, w) * scale

    x, w = torch.randn(6, 16, requires_grad=True), torch.randn(16, 4)
    with pytest.warns(FallbackWarning, match="kernel: the tensors are on cpu, so it runs there and not on the GPU"):
        y = kernel(x, w)
    torch.testing.assert_close(y, (x @ w) * 2)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (2 * w.sum(1)).expand(6, 16))
    assert seen == [PrecisionConfig.HIGH]
    with pytest.raises(DeviceError, match="strict=True"):
        gpu_kernel(kernel.function, strict=True)(x, w)
    with pytest.raises(KernelError, match="torch tensors run on GPUs and CPUs"):
        tpu_kernel(kernel.function)(x, w)
    with pytest.raises(KernelError, match=r"torch tensor of shape \(6, 16\), of which there is nothing to trace"):
        kernel.check("v5e", x, w)
    with pytest.raises(ShapeError, match="gemm"):
        kernel(x, w.T)
    torch.testing.assert_close(kernels.gpu.gemm(x, w, block_size=64), x @ w)
    block = kernels.gpu.block_sparse(x, w[None], torch.tensor([[0, 0]]), shape=(16, 4))
    torch.testing.assert_close(block, x @ w)
    norm = torch.nn.functional.layer_norm(x, (16,), eps=1e-6)
    torch.testing.assert_close(kernels.gpu.layer_norm(x), norm)
    for call in (lambda: kernels.gpu.layer_norm(x, use_fused_ops=False),):
        with pytest.raises(UnsupportedError, match="for JAX arrays only"):
            call()


@pytest.mark.skipif(not aot.has_libtpu(), reason="compiles for TPUs by libtpu")
def test_check_asks_a_chip_that_is_not_here():
    @tpu_kernel
    def kernel(x, *, causal=True):
        return vishwamai.flash_attention(x, x, x, causal=causal)

    report = kernel.check("v5e", jax.ShapeDtypeStruct((1, 2, 256, 64), jnp.bfloat16), causal=False)
    assert report.fits and any("attention" in k.name for k in report.program.kernels)
    big = jax.ShapeDtypeStruct((200_000, 200_000), jnp.float32)
    assert not tpu_kernel(lambda x: x @ x).check("v5e", big).fits


@pytest.mark.turns(3)
def test_narrow_products():
    """float32 in, float32 out, and exactly the products of the rounded operands; gradients too."""
    q = random(1, 2, 40, 16)
    x = random(8, 16)
    rounded = x.astype(jnp.bfloat16)
    with kernel_config(use_bfloat16=True):
        narrow, attention = vishwamai.gemm(x, x.T), vishwamai.flash_attention(q, q, q)
        gradient = jax.grad(lambda x: vishwamai.gemm(x, x.T).sum())(x)
        text = str(vishwamai.explain(vishwamai.rms_norm, x))
    assert narrow.dtype == attention.dtype == gradient.dtype == jnp.float32
    np.testing.assert_array_equal(narrow, vishwamai.gemm(rounded, rounded.T, out_dtype="float32"))
    assert 0 < np.abs(narrow - x @ x.T).max() < 0.1
    assert 0 < np.abs(attention - vishwamai.flash_attention(q, q, q)).max() < 0.02
    assert "use_bfloat16 leaves x in float32" in text
    with kernel_config(use_fp16=True):
        half = vishwamai.gemm(x, x.T)
    np.testing.assert_array_equal(half, vishwamai.gemm(x.astype("float16"), x.T.astype("float16"), out_dtype="float32"))
    with kernel_config(use_fp16=True, target="v5e"), pytest.raises(UnsupportedError, match="no TPU multiplies float16"):
        jax.eval_shape(vishwamai.gemm, x, x.T)
    with pytest.raises(KernelError, match="both True"):
        KernelConfig(use_bfloat16=True, use_fp16=True)
    with pytest.raises(KernelError, match="neither float16 nor tensor cores"):
        tpu_kernel(use_fp16=True)
    with pytest.raises(KernelError, match="neither float16 nor tensor cores"):
        tpu_kernel(abs, config=KernelConfig(use_tensor_cores=True))


@pytest.mark.turns(4)
def test_narrow_products_of_every_kind():
    """Each operation with products computes, under `use_bfloat16`, what it computes of rounded operands, and returns
    float32.
    """
    x, w, up = random(8, 16), random(16, 32, seed=1), random(16, 32, seed=2)
    sizes, labels = jnp.array([3, 5]), jnp.array([1, 2, 3, 0, 5, 6, 31, 7])
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (lambda x, w: vishwamai.einsum("ij,jk->ki", x, w), (x, w)),
        (lambda x, w, up: vishwamai.gated_linear_unit(x, (w, up)), (x, w, up)),
        (lambda x, w: vishwamai.grouped_gemm(x, w, sizes), (x, jnp.stack([w, up]))),
        (lambda x, w: vishwamai.block_sparse_matmul(x, w, np.array([[0, 1], [1, 0]])), (x, random(2, 8, 8))),
        (lambda x, w: vishwamai.linear_cross_entropy(x, w, labels), (x, w.T)),
    ]
    for function, operands in calls:
        exact = function(*operands)
        with kernel_config(use_bfloat16=True):
            got = function(*operands)
            assert "float32" not in str(vishwamai.explain(function, *operands).calls[0].spec.operands[0])
        rounded = function(*(a.astype(jnp.bfloat16) for a in operands))
        assert got.dtype == exact.dtype == jnp.float32
        assert 0 < np.abs(got - exact).max() < 0.05 * np.abs(exact).max()
        np.testing.assert_allclose(got, rounded.astype(jnp.float32), rtol=2**-7, atol=2**-7)


@pytest.mark.turns(4)
def test_values_of_8_bits():
    """Products have the values of e4m3 under a scale of each operand, and gradients are those of these products."""
    x, w = random(8, 64), 1e-3 * random(64, 16, seed=1)

    def rounded(a):
        scale = 2.0 ** np.ceil(np.log2(np.abs(a).max() / 448))
        return np.asarray((a / scale).astype(jnp.float8_e4m3fn).astype(jnp.float32)) * scale

    with kernel_config(use_fp8=True):
        product = vishwamai.gemm(x, w)
        gradient = jax.grad(lambda w: vishwamai.gemm(x, w).sum())(w)
        attention = vishwamai.flash_attention(x[None, None], x[None, None], x[None, None])
        text = str(vishwamai.explain(vishwamai.rms_norm, x))
    assert product.dtype == jnp.float32 and "use_fp8 leaves x in float32" in text
    np.testing.assert_allclose(product, rounded(x) @ rounded(w), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, jnp.broadcast_to(rounded(x).sum(0)[:, None], w.shape), rtol=1e-2, atol=1e-2)
    exact = vishwamai.flash_attention(x[None, None], x[None, None], x[None, None])
    assert 0.003 < np.abs(attention - exact).max() < 0.3
    torch = pytest.importorskip("torch")
    import vishwamai.torch as operations

    a, b = (torch.tensor(np.asarray(t), requires_grad=True) for t in (x, w))
    with kernel_config(use_fp8=True):
        same = operations.gemm(a, b)
    np.testing.assert_allclose(same.detach(), product, rtol=1e-5, atol=1e-6)
    same.sum().backward()
    np.testing.assert_allclose(b.grad, gradient, rtol=1e-2, atol=1e-2)


def test_two_names_of_one_option():
    def runs():
        q = jax.ShapeDtypeStruct((1, 1, 32, 16), "float32")
        return vishwamai.explain(vishwamai.flash_attention, q, q, q).calls[0].runs

    blocked = runs()
    for name, other in (("use_flash", "use_efficient_attention"), ("use_efficient_attention", "use_flash")):
        no: Any = {name: False}
        yes: Any = {other: True}
        with kernel_config(**no):
            assert runs() == "xla"
            with kernel_config(**yes):
                assert runs() == blocked
    with pytest.raises(KernelError, match="one option"):
        KernelConfig(use_efficient_attention=True, use_flash=False)


def test_tensor_cores_on_a_gpu_and_elsewhere(monkeypatch):
    with kernel_config(use_tensor_cores=True):
        assert current_config().precision == PrecisionConfig.DEFAULT
        assert "has no effect: a cpu has no tensor cores" in str(vishwamai.explain(vishwamai.rms_norm, random(2, 4)))
        monkeypatch.setattr(config_module, "ambient_target", lambda: Target("cuda"))
        assert current_config().precision == PrecisionConfig.HIGH
        with kernel_config(precision="highest"):
            assert current_config().precision == PrecisionConfig.HIGHEST
    assert "matrix units" in without_effect(KernelConfig(use_tensor_cores=False), "tpu")[0]
    (decided,) = without_effect(KernelConfig(use_tensor_cores=True, precision=PrecisionConfig.HIGHEST), "cuda")
    assert "`precision` is" in decided
    assert not without_effect(KernelConfig(use_tensor_cores=True), "cuda")


def test_precision_by_any_name():
    names: Any = ("high", PrecisionConfig.HIGH, PrecisionConfig("high"), jax.lax.Precision.HIGH)
    for name in names:
        assert KernelConfig(precision=name).precision == PrecisionConfig.HIGH
    with pytest.raises(KernelError, match="'fast'"), kernel_config(precision="fast"):
        pass


def test_patterns_are_part_of_a_sparse_kernel():
    traced = []

    @sparse_kernel(platform="cpu", block_size=32)
    def kernel(dense, values, indices, block_size):
        traced.append(block_size)
        return kernels.cpu.block_sparse(dense, values, indices, block_size=block_size)

    dense, values = random(5, 64), random(2, 32, 32)
    for indices in ([[0, 1], [1, 0]], [[0, 1], [1, 0]], [[0, 0], [1, 1]]):
        matrix = np.zeros((64, 64), np.float32)
        for value, (i, j) in zip(np.asarray(values), indices):
            matrix[32 * i : 32 * i + 32, 32 * j : 32 * j + 32] = value
        np.testing.assert_allclose(kernel(dense, values, np.array(indices)), dense @ matrix, rtol=1e-4, atol=1e-4)
    assert traced == [32, 32]  # the second pattern equals the first one
    with pytest.raises(ShapeError, match=r"blocks of shape \(16, 32\), but `block_size` is 32"):
        kernel(dense, values[:, :16], np.array([[0, 1], [1, 0]]))
    kernel(random(5, 32), random(2, 16, 16), np.array([[0, 1], [1, 0]]), block_size=16)
    with pytest.raises(KernelError, match="`platform` is 'npu'"):
        sparse_kernel(abs, platform="npu")


def test_an_expert_kernel_knows_how_many_experts_there_are():
    @expert_kernel(platform="cpu", num_experts=4)
    def layer(rows, weights, sizes, num_experts):
        assert num_experts == 4
        return vishwamai.grouped_gemm(rows, weights, sizes)

    rows, sizes = random(12, 16), jnp.array([3, 0, 8, 1, 0, 0])
    got = layer(rows, random(4, 16, 8), sizes[:4])
    np.testing.assert_array_equal(got, vishwamai.grouped_gemm(rows, random(4, 16, 8), sizes[:4]))
    with pytest.raises(KernelError, match="`num_experts` is 4, but a grouped product has 6 groups; pass weights of 4"):
        layer(rows, random(6, 16, 8), sizes)
    with pytest.raises(KernelError, match="`num_experts` is 0"):
        expert_kernel(num_experts=0)


@pytest.mark.turns(3)
@pytest.mark.parametrize("module", [kernels.tpu, kernels.gpu, kernels.cpu], ids=["tpu", "gpu", "cpu"])
def test_operations_of_each_module(module):
    q, k, v = random(3, 1, 2, 24, 8)
    mask = jnp.arange(24) < 20
    wanted = vishwamai.flash_attention(q, k, v, mask=mask)
    np.testing.assert_array_equal(module.flash_attention(q, k, v, mask), wanted)
    plain = module.flash_attention(q, k, v, mask=mask, use_flash=False)
    np.testing.assert_array_equal(plain, vishwamai.flash_attention(q, k, v, mask=mask, implementation="xla"))
    x, w = random(10, 16), random(16, 4)
    np.testing.assert_array_equal(module.gemm(x, w, block_size=128), vishwamai.gemm(x, w, block_size=128))
    with pytest.raises(KernelError, match="`block_size` is 64 and `config` is 128; pass one of them"):
        module.gemm(x, w, block_size=64, config=128)
    scale, bias = random(16), random(16, seed=2)
    normed = vishwamai.layer_norm(x, scale, bias, implementation="xla")
    np.testing.assert_array_equal(module.layer_norm(x, scale, bias, use_fused_ops=False), normed)
    np.testing.assert_allclose(module.layer_norm(x, scale, bias), normed, rtol=1e-5, atol=1e-5)


@pytest.mark.turns(3)
def test_kernels_as_objects():
    x, w = random(2, 10, 16), random(16, 4)
    narrow = kernels.tpu.TPUGEMMKernel(block_size=128, use_bfloat16=True)(x, w)
    np.testing.assert_array_equal(narrow, kernels.tpu.gemm(x, w, use_bfloat16=True))
    assert np.abs(narrow - kernels.tpu.TPUGEMMKernel()(x, w)).max() > 0
    q = random(1, 2, 24, 8)
    attention = kernels.tpu.TPUAttentionKernel(use_flash=False, causal=True)
    wanted = vishwamai.flash_attention(q, q, q, causal=True, implementation="xla")
    np.testing.assert_array_equal(attention(q, q, q), wanted)
    norm = kernels.tpu.TPULayerNormKernel(eps=0.5)
    np.testing.assert_allclose(norm(x), vishwamai.layer_norm(x, eps=0.5), rtol=1e-6)
    with kernel_config(target="v5e"), pytest.raises(UnsupportedError, match="strict"):
        kernels.tpu.TPULayerNormKernel(strict=True)(x.astype("float16"))


@cpu_kernel(block_size=32)
def pickled_kernel(x, w):
    return vishwamai.gemm(x, w)


def plain_product(x, weights, sizes):
    return vishwamai.grouped_gemm(x, weights, sizes)


def product_of_blocks(dense, values, indices, block_size):
    return kernels.cpu.block_sparse(dense, values, indices, block_size=block_size)


def test_kernels_are_picklable():
    """By name where the module has the kernel under it, else by what it was made of: with the same configuration."""
    assert pickle.loads(pickle.dumps(pickled_kernel)) is pickled_kernel is copy.deepcopy(pickled_kernel)
    made = cpu_kernel(plain_product, use_bfloat16=True)
    experts = expert_kernel(plain_product, platform="cpu", num_experts=3)
    blocks = sparse_kernel(product_of_blocks, platform="cpu", block_size=32)
    arrays = random(5, 16), random(3, 16, 8), np.array([1, 0, 4])
    for kernel in (made, experts):
        again = pickle.loads(pickle.dumps(kernel))
        assert again is not kernel and again.config == kernel.config and again.platform == "cpu"
        np.testing.assert_array_equal(again(*arrays), kernel(*arrays))
    with pytest.raises(KernelError, match="`num_experts` is 3, but a grouped product has 2 groups"):
        pickle.loads(pickle.dumps(experts))(arrays[0], arrays[1][:2], arrays[2][:2])
    arrays = random(5, 64), random(2, 32, 32), np.array([[0, 1], [1, 0]])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(blocks))(*arrays), blocks(*arrays))


def test_a_sparse_kernel_takes_the_indices_of_jax():
    kernel = sparse_kernel(product_of_blocks, platform="cpu", block_size=32)
    dense, values, indices = random(5, 64), random(2, 32, 32), np.array([[0, 1], [1, 0]])
    wanted = kernel(dense, values, indices)
    np.testing.assert_array_equal(kernel(dense, values, jnp.asarray(indices)), wanted)
    with pytest.raises(ShapeError, match="`indices` is traced"):
        jax.jit(kernel)(dense, values, jnp.asarray(indices))
    key = jax.random.key(0)  # neither integers nor floating
    assert sparse_kernel(lambda key: jax.random.normal(key, (3,)), platform="cpu")(key).shape == (3,)


@pytest.mark.parametrize("of_torch", [False, True])
def test_a_mask_is_bool_integers_or_what_is_added(of_torch):
    q, k, v = (random(1, 2, 9, 16, seed=i) for i in range(3))
    seen = np.asarray(jax.random.bernoulli(jax.random.key(3), 0.7, (9, 9))) | np.eye(9, dtype=bool)
    bias = np.asarray(random(9, 9, seed=4))
    convert: Any = jnp.asarray
    if of_torch:
        torch = pytest.importorskip("torch")
        convert = lambda x: torch.tensor(np.asarray(x))  # noqa: E731
    q, k, v = (convert(x) for x in (q, k, v))
    module = kernels.gpu if of_torch else kernels.tpu
    wanted = module.flash_attention(q, k, v, convert(seen))
    added = np.where(seen, 0.0, -np.inf).astype(np.float32)
    for mask in (seen.astype(np.int32), seen.astype(np.uint8), added):
        np.testing.assert_allclose(module.flash_attention(q, k, v, convert(mask)), wanted, rtol=1e-5, atol=1e-5)
    both = module.flash_attention(q, k, v, convert(added), bias=convert(bias))
    one = module.flash_attention(q, k, v, convert(seen), bias=convert(bias))
    np.testing.assert_allclose(both, one, rtol=1e-5, atol=1e-5)
    with pytest.raises(ShapeError, match="`mask` is int.* and has numbers other than 0 and 1; pass bool"):
        module.flash_attention(q, k, v, convert(seen.astype(np.int32) - 1))
    if not of_torch:
        known = convert(seen.astype(np.int32))  # not an argument of the program
        inside = jax.jit(lambda q: module.flash_attention(q, k, v, known))(q)
        np.testing.assert_allclose(inside, wanted, rtol=1e-5, atol=1e-5)


def test_a_check_in_a_program_is_the_error_of_the_eager_call():
    @cpu_kernel(checks=True)
    def loss(x, w, labels):
        return vishwamai.linear_cross_entropy(x, w, labels)

    arrays = jnp.ones((4, 16)), jnp.ones((8, 16)), jnp.array([1, 2, 3, 99])
    with pytest.raises(ShapeError) as eager:
        vishwamai.linear_cross_entropy(*arrays)
    for call in (loss, jax.grad(lambda x, w, labels: loss(x, w, labels).sum())):
        with pytest.raises(ShapeError) as caught, loss.named_errors():
            jax.block_until_ready(call(*arrays))
        assert str(caught.value) == str(eager.value) and isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


def test_an_out_of_memory_is_a_device_error_wherever_it_is_waited_for():
    kernel = cpu_kernel(lambda x: jnp.zeros((1 << 46,), jnp.int8) + x)
    with pytest.raises(DeviceError, match="make the batch smaller"), kernel.named_errors():
        jax.block_until_ready(kernel(jnp.int8(1)))
    with pytest.raises(DeviceError, match="make the batch smaller"), kernel.named_errors():
        jax.block_until_ready(jax.jit(kernel.function)(jnp.int8(1)))


def test_an_implementation_of_another_platform_says_so():
    x = random(8, 16)
    with pytest.raises(UnsupportedError, match="an implementation of another platform.*leave `implementation` out"):
        tpu_kernel(vishwamai.gemm, implementation="pallas_tpu")(x, x.T)


@pytest.mark.parametrize("of_torch", [False, True])
def test_a_floating_mask_of_zeros_and_ones_is_named(of_torch):
    q, mask = random(1, 2, 9, 16), np.tri(9, dtype=np.float32)
    convert: Any = pytest.importorskip("torch").tensor if of_torch else jnp.asarray
    module = kernels.gpu if of_torch else kernels.tpu
    q = convert(np.asarray(q))
    with pytest.warns(UserWarning, match="zeros and ones alone.*pass `mask != 0`") as caught:
        module.flash_attention(q, q, q, convert(mask))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.flash_attention(q, q, q, convert(mask) != 0)
        module.flash_attention(q, q, q, convert(np.where(mask, 0.0, -np.inf).astype(np.float32)))
        module.flash_attention(q, q, q, convert(0 * mask))


def test_numbers_of_the_wrong_sign_are_errors_at_once():
    for call, words in (
        (lambda: kernels.tpu.TPUGEMMKernel(block_size=-1), "TPUGEMMKernel: `block_size` is -1"),
        (lambda: kernels.tpu.TPUAttentionKernel(block_size=0), "TPUAttentionKernel: `block_size` is 0"),
        (lambda: kernels.tpu.TPULayerNormKernel(eps=-1), "TPULayerNormKernel: `eps` is -1"),
        (lambda: kernels.tpu.TPUGEMMKernel(precision="fast"), "'fast'"),
        (lambda: kernels.profile_kernel(repeats=0).__enter__(), "profile_kernel: `repeats` is 0"),
    ):
        with pytest.raises(KernelError, match=words):
            call()


def test_warnings_point_at_the_line_of_the_caller():
    with pytest.warns(FallbackWarning) as caught:
        tpu_kernel(lambda x: x + 1)(random(2))
    assert caught[0].filename == __file__


@pytest.fixture
def without_the_native_module(monkeypatch):
    missing = "the native CPU kernels are not built: install a compiler."
    monkeypatch.setattr(ffi, "_load", lambda: (None, missing))
    config_module._local_target.cache_clear()
    yield missing
    config_module._local_target.cache_clear()


def test_the_missing_module_is_said_once_for_all_operations(without_the_native_module):
    x = random(8, 16)
    with pytest.warns(FallbackWarning) as caught:
        vishwamai.gemm(x, x.T)
        vishwamai.rms_norm(x)
        vishwamai.softmax(x)
    assert [str(w.message) for w in caught] == [
        f"{without_the_native_module} Until then XLA runs in their place, slower."
    ]
    with pytest.raises(UnsupportedError, match="gemm: 'native_cpu' declined.*not built"), kernel_config(strict=True):
        vishwamai.gemm(x, x.T)
