"""`capibara.core.kernels.TPUv4Kernels`: what each option does, and figures that were measured."""

import dataclasses
import inspect
import pickle
import time

import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum
import pytest

import vishwamai
from capibara.core.kernels import TPUv4Kernels, measured, operations
from vishwamai.core.hardware import TPUS
from vishwamai.kernels import FallbackWarning, KernelError, ShapeError

pytestmark = pytest.mark.filterwarnings("ignore::vishwamai.FallbackWarning")


@pytest.fixture(scope="module")
def made():
    with pytest.warns(FallbackWarning, match="there is no TPU here, so it runs on cpu"):
        return TPUv4Kernels(precision="float32")


def random(*shape, seed=0, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.turns(4)
def test_methods_are_vishwamais_operations(made):
    q, k, v = random(3, 2, 4, 32, 16)
    padding = jnp.arange(32) < 27
    mask = jnp.broadcast_to(padding, (2, 1, 1, 32)).astype(jnp.int32)
    wanted = vishwamai.flash_attention(q, k, v, mask=padding, causal=True)
    np.testing.assert_allclose(made.flash_attention(q, k, v, mask, causal=True), wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(ShapeError, match="`attention_mask` has dtype float32"):
        made.flash_attention(q, k, v, padding.astype(jnp.float32))
    a, b = random(5, 16), random(5, 8, seed=1)
    close = 1e-5
    np.testing.assert_allclose(made.optimized_matmul(a, b, transpose_a=True), a.T @ b, rtol=close, atol=close)
    np.testing.assert_allclose(
        made.optimized_matmul(a, b.T, algorithm="xla", transpose_b=True, transpose_a=True),
        a.T @ b,
        rtol=close,
        atol=close,
    )
    with pytest.raises(KernelError, match="no implementation 'cublas'"):
        made.optimized_matmul(a, b, transpose_a=True, algorithm="cublas")
    x, weight, bias = random(6, 24), random(24), random(24, seed=1)
    wanted = vishwamai.layer_norm(x, weight, bias, eps=1e-5)
    for efficient in (True, False):
        got = made.fast_layer_norm(x, weight, bias, memory_efficient=efficient)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_einsum_and_its_frugal_path(made):
    a, b, c = random(2, 64), random(64, 2), random(2, 64)
    equation = "ij,jk,kl->il"
    for frugal in (False, True):
        got = made.einsum_optimize(equation, [a, b, c], memory_efficient=frugal)
        np.testing.assert_allclose(got, a @ b @ c, rtol=1e-4, atol=1e-4)
    equation, arrays = "i,j,k,ij,jk->", [random(9), random(9), random(9), random(9, 9), random(9, 9)]
    path = operations.frugal_path(equation, arrays, "optimal")
    cheapest, frugal = (
        opt_einsum.contract_path(equation, *arrays, optimize=order)[1].largest_intermediate
        for order in ("optimal", list(path))
    )
    assert cheapest == 81 and frugal == 9
    got = made.einsum_optimize(equation, arrays, memory_efficient=True)
    np.testing.assert_allclose(got, jnp.einsum(equation, *arrays), rtol=1e-3, atol=1e-3)
    for frugal in (False, True):
        with pytest.raises(KernelError, match="`optimize` is 'bogus'"):
            made.einsum_optimize(equation, arrays, "bogus", frugal)


def test_precision_of_the_object_and_of_a_call(made):
    a, b = random(16, 32), random(32, 8)
    rounded = vishwamai.gemm(a.astype("bfloat16"), b.astype("bfloat16"), out_dtype="float32")
    exact = vishwamai.gemm(a, b)
    narrow = TPUv4Kernels(precision="bfloat16")
    np.testing.assert_array_equal(narrow.optimized_matmul(a, b), rounded)
    np.testing.assert_array_equal(made.optimized_matmul(a, b, precision="bfloat16"), rounded)
    np.testing.assert_array_equal(narrow.optimized_matmul(a, b, precision="float32"), exact)
    with pytest.raises(KernelError, match="`precision` is 'int3'; pass one of bfloat16"):
        TPUv4Kernels(precision="int3")
    with pytest.raises(KernelError, match="`optimization_level` is 'extreme'"):
        TPUv4Kernels(optimization_level="extreme")
    assert TPUv4Kernels(optimization_level="conservative")._run.config.auto_optimize is False


def test_dropout_in_a_traced_function_needs_a_key(made):
    """The object's own key would be part of the program, and drop the same elements at every call."""
    x, (q, k, v) = random(4, 64), random(3, 1, 2, 16, 8)
    for call in (
        lambda x: made.fused_gelu_dropout(x, 0.5),
        lambda x: made.flash_attention(q * x[0, 0], k, v, dropout_rate=0.5),
    ):
        with pytest.raises(KernelError, match="`dropout_key` is None inside a traced function"):
            jax.jit(call)(x)
    keyed = jax.jit(lambda x, key: made.fused_gelu_dropout(x, 0.5, dropout_key=key))
    one, two = keyed(x, jax.random.key(1)), keyed(x, jax.random.key(2))
    assert not np.array_equal(one, two)


def test_layer_norms_have_one_eps(made):
    x = 1e-3 * random(4, 64)
    (batched,) = made.batch_operations("layer_norm", [x])
    np.testing.assert_allclose(batched, made.fast_layer_norm(x), rtol=1e-6)


def test_dropout_draws_from_the_object_or_the_caller():
    x = jnp.ones((64, 64))
    first, second = TPUv4Kernels(seed=3), TPUv4Kernels(seed=3)
    one, two = first.fused_gelu_dropout(x, 0.5), first.fused_gelu_dropout(x, 0.5)
    assert (one != two).any() and 0.4 < (one == 0).mean() < 0.6
    np.testing.assert_array_equal(one, second.fused_gelu_dropout(x, 0.5))
    key = jax.random.key(9)
    wanted = vishwamai.fused_gelu_dropout(x, 0.5, key=key)
    np.testing.assert_allclose(first.fused_gelu_dropout(x, 0.5, dropout_key=key), wanted, rtol=1e-6)
    np.testing.assert_allclose(first.fused_gelu_dropout(x, 0.5, training=False), vishwamai.gelu(x), rtol=1e-6)


def test_inplace_gives_the_memory_away(made):
    x = random(32, 128)
    wanted = vishwamai.gelu(x)
    pointer = x.unsafe_buffer_pointer()
    got = made.fused_gelu_dropout(x, training=False, inplace=True)
    assert x.is_deleted() and got.unsafe_buffer_pointer() == pointer
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    with pytest.raises(KernelError, match="donate in the outer program"):
        jax.jit(lambda x: made.fused_gelu_dropout(x, training=False, inplace=True))(got)
    with pytest.raises(KernelError, match="needs one program"):
        TPUv4Kernels(enable_xla_fusion=False).fused_gelu_dropout(got, inplace=True)


def test_batches(made):
    arrays = [random(4, 16, seed=i) for i in range(3)]
    weights = {"weight": random(16), "bias": random(16, seed=1)}
    wanted = [vishwamai.layer_norm(x, *weights.values(), eps=1e-5) for x in arrays]
    for parallel in (True, False):
        got = made.batch_operations("layer_norm", arrays, weights, parallel)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    ragged = [arrays[0], random(7, 16)]
    got = made.batch_operations("rms_norm", ragged, [{"eps": 1e-2}, {"eps": 1e-6}])
    np.testing.assert_allclose(got[0], vishwamai.rms_norm(ragged[0], eps=1e-2), rtol=1e-5)
    np.testing.assert_allclose(got[1], vishwamai.rms_norm(ragged[1]), rtol=1e-5)
    pairs = made.batch_operations("matmul", [(x, x) for x in arrays], {"transpose_b": True})
    np.testing.assert_allclose(pairs[2], arrays[2] @ arrays[2].T, rtol=1e-4, atol=1e-5)
    with pytest.raises(KernelError, match="`operation_type` is 'conv'"):
        made.batch_operations("conv", arrays)
    with pytest.raises(KernelError, match="2 `parameters` are given for 3 `inputs`"):
        made.batch_operations("gelu", arrays, [{}, {}])


@pytest.mark.turns(3)
def test_routing(made):
    tokens, router = random(2, 10, 16), random(16, 8)
    wanted = vishwamai.moe_routing(tokens, router, 8, 3)
    got = made.moe_routing_kernel(tokens, 8, 3, router_weights=router)
    np.testing.assert_array_equal(got.experts, wanted.experts)
    np.testing.assert_allclose(got.load_balance_loss, wanted.load_balance_loss, rtol=1e-5)
    logits = (tokens.reshape(-1, 16) @ router).reshape(2, 10, 8)
    plain = made.moe_routing_kernel(logits, 8, 3, load_balancing=False)
    np.testing.assert_array_equal(plain.experts, wanted.experts)
    assert plain.load_balance_loss is None and plain.z_loss is None
    with pytest.warns(UserWarning, match=r"a random router of seed 0 decides; pass router_weights of shape \(16, 8\)"):
        drawn = made.moe_routing_kernel(tokens, 8)
    router = jax.random.normal(jax.random.key(0), (16, 8)) / 4
    np.testing.assert_array_equal(drawn.experts, vishwamai.moe_routing(tokens, router, 8, 2).experts)


@pytest.mark.turns(4)
def test_sequence_parallel_is_the_same_attention(made):
    assert jax.device_count() == 8
    q, k, v = random(3, 1, 2, 64, 16)
    mask = jax.random.bernoulli(jax.random.key(5), 0.8, (1, 1, 64, 64))
    for options in ({}, {"causal": True}, {"causal": True, "attention_mask": mask}):
        wanted = made.flash_attention(q, k, v, **options)
        got = made.flash_attention(q, k, v, sequence_parallel=True, **options)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    assert len(got.sharding.device_set) == 8
    dropout = {"dropout_rate": 0.5, "dropout_key": jax.random.key(1)}
    dropped = [made.flash_attention(q, k, v, sequence_parallel=split, **dropout) for split in (True, False)]
    np.testing.assert_allclose(*dropped, rtol=1e-4, atol=1e-5)
    uneven = [made.flash_attention(q, k[:, :, :60], v[:, :, :60], sequence_parallel=split) for split in (True, False)]
    np.testing.assert_allclose(*uneven, rtol=1e-4, atol=1e-5)  # all keys on every device
    with pytest.raises(ShapeError, match="splits 60 query rows over 8 devices"):
        made.flash_attention(q[:, :, :60], k, v, sequence_parallel=True)


def test_under_transforms_nothing_is_measured():
    made = TPUv4Kernels(precision="float32")
    a = random(8, 8)
    got = jax.jit(jax.grad(lambda a: made.optimized_matmul(a, a).sum()))(a)
    np.testing.assert_allclose(got, jax.grad(lambda a: (a @ a).sum())(a), rtol=1e-4, atol=1e-4)
    with pytest.raises(KernelError, match="no call was measured yet"):
        made.get_tflops()


@pytest.mark.parametrize("fuse", [True, False])
def test_figures_are_measured(fuse):
    made = TPUv4Kernels(precision="float32", enable_xla_fusion=fuse)
    a = random(256, 256)
    made.optimized_matmul(a, a)
    start = time.perf_counter()
    made.optimized_matmul(a, a)
    outside = time.perf_counter() - start
    run = made._run.last
    assert run is not None and run.flops == 2 * 256**3 and 0 < run.seconds <= outside
    assert made.get_tflops() == pytest.approx(run.flops / run.seconds / 1e12)
    before = made.get_memory_usage()
    kept = jnp.ones((64, 1 << 20), jnp.float32) + 1
    kept.block_until_ready()
    assert made.get_memory_usage() - before > 0.2  # 268 MB more
    del kept


def test_a_figure_above_the_peak_is_an_error():
    v4 = TPUS["v4"]
    run = measured.Run("optimized_matmul", 1e-3, 0.2e12, 100, 100, "bfloat16", v4.device_kinds[0])
    assert run.tflops == pytest.approx(200.0)
    with pytest.raises(KernelError, match=r"350.0 TFLOP/s is above the 275.0 that one v4 device reaches"):
        assert dataclasses.replace(run, flops=0.35e12).tflops
    with pytest.raises(KernelError, match="counts no floating-point operations"):
        assert dataclasses.replace(run, flops=0.0).tflops


def test_benchmark(made):
    found = made.benchmark_kernels(["fast_layer_norm", "moe_routing_kernel"], repeats=3)
    assert list(found) == ["fast_layer_norm", "moe_routing_kernel"]
    for metrics in found.values():
        assert set(metrics) == {"throughput", "latency_ms", "memory_efficiency", "device"}
        assert metrics["device"] == "cpu" and 0 < metrics["memory_efficiency"] <= 1
        assert metrics["throughput"] > 0 and metrics["latency_ms"] > 0
    assert found["fast_layer_norm"]["throughput"] == pytest.approx(
        8 * 2048 * 1024 / (found["fast_layer_norm"]["latency_ms"] * 1e-3) / 1e12
    )
    with pytest.raises(KernelError, match="no kernel 'conv'; choose from flash_attention"):
        made.benchmark_kernels(["conv"])


def test_every_method_is_explained_in_both_languages():
    public = [f for name, f in inspect.getmembers(TPUv4Kernels, inspect.isfunction) if not name.startswith("_")]
    assert len(public) == 10
    for function in (TPUv4Kernels, *public):
        assert function.__doc__ is not None and "Español:" in function.__doc__, function


def test_an_object_is_pickled_with_its_options_and_its_random_keys():
    made, x = TPUv4Kernels(precision="float32", seed=3), random(8, 64)
    made.fused_gelu_dropout(x, 0.5)
    again = pickle.loads(pickle.dumps(made))
    np.testing.assert_array_equal(again.fused_gelu_dropout(x, 0.5), made.fused_gelu_dropout(x, 0.5))
    assert again._run.config == made._run.config
    with pytest.raises(KernelError, match="no call was measured yet"):
        pickle.loads(pickle.dumps(made)).get_tflops()


def test_lists_and_wrong_signs(made):
    q = random(1, 2, 4, 8)
    mask = np.tri(4, dtype=bool)
    np.testing.assert_allclose(made.flash_attention(q, q, q, mask.tolist()), made.flash_attention(q, q, q, mask))
    with pytest.raises(KernelError, match="moe_routing_kernel: `num_experts` is -3"):
        made.moe_routing_kernel(random(4, 8), -3, 1)
    with pytest.warns(FallbackWarning) as caught:
        TPUv4Kernels()
    assert caught[0].filename == __file__
