"""Machine code of the Triton kernels, without a GPU: nothing spills on Hopper, tensor cores and wide loads are used;
AMD compiles; JAX lowers for CUDA.
"""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import contract
import rotation
import vishwamai
from vishwamai.aot.compile.gpu import inspect_launch, launches
from vishwamai.aot.compile.gpu_survey import candidates, is_served
from vishwamai.core import gpu
from vishwamai.core.cases import ArrayInit, Case
from vishwamai.core.errors import DeviceError, UnsupportedError
from vishwamai.core.triton_launch import compiled
from vishwamai.ops.moe.cases import quantized_grouped_gemm

pytestmark = [
    pytest.mark.skipif(contract.INTERPRETED, reason="a process with the interpreter cannot compile"),
    pytest.mark.skipif(gpu.why_not() is not None, reason=str(gpu.why_not())),
]


# By default one case of each kind of code, and one in five of those that show the same of other operations; the rest
# is `long`.
ALWAYS = {("norm", "Llama 3 8B"), ("gemm", "Llama 3 8B gate"), ("gemm", "BERT base up float32")}
ROTATING = (
    ("norm", "Qwen 3 8B head norm"),
    ("norm", "8192 x 8192"),
    ("softmax", "8192 x 8192"),
    ("gemm", "Llama 3 8B gate fp8"),
    ("linear_cross_entropy", "Llama 3 8B"),
    ("grouped_gemm", "Qwen3 30B-A3B up"),
    ("block_sparse_matmul", "a 4096 x 4096 weight with a quarter of its blocks, 512 tokens"),
)


def marks(case):
    key = (case.op, case.name)
    if key in ROTATING:
        return rotation.one_in(5, ROTATING.index(key))
    return () if key in ALWAYS else pytest.mark.long


def parameters():
    return [pytest.param(case, id=f"{case.op}-{contract.label(case)}", marks=marks(case)) for case in candidates()]


def rows_of_product(launch):
    """Rows of the tiles that a kernel multiplies; None for one that multiplies none."""
    constants = dict(launch.launch.constants)
    return constants.get("BLOCK_M", constants.get("BLOCK_T"))


@pytest.mark.turns(6)
@pytest.mark.parametrize("case", parameters())
def test_hopper_code(case):
    """No spills; a product on large tiles uses wgmma and the copy engine; memory is read 16 bytes at a time."""
    if not is_served(case):
        with pytest.raises(UnsupportedError, match="implementation 'triton' cannot serve this call"):
            launches(case)
        return
    recorded = launches(case)
    assert recorded
    for launch in recorded:
        code = inspect_launch(launch)
        assert code.spill == 0, code
        assert code.programs >= 1, code
        rows = rows_of_product(launch)
        if rows is not None:
            assert code.tma > 0
            assert code.wgmma > 0 if rows >= 64 else code.mma > 0
        if case.op in ("norm", "rope", "softmax") and case.name != "BERT base logits":  # rows of 61,044 bytes
            # All but the rows of a parameter, which are spread over threads that hold other rows too.
            assert code.wide >= code.loads + code.copies - 1 >= 0


def wide_norm(features):
    """RMS norm of rows of `features`, as wide as those of Llama 3 405B."""
    arrays = {"x": ArrayInit((4096, features), "bfloat16"), "scale": ArrayInit((features,), "bfloat16")}
    return Case(f"wide {features}", "norm", vishwamai.rms_norm, arrays)


@pytest.mark.turns(3)
def test_the_widest_rows_stay_in_registers():
    codes = [inspect_launch(launch) for launch in launches(wide_norm(16384))]
    assert [code.spill for code in codes] == [0] * 3
    wider = jax.ShapeDtypeStruct((8, 32768), jnp.bfloat16)
    with pytest.raises(vishwamai.UnsupportedError, match="rows of 32768 features do not fit the registers"):
        jax.eval_shape(lambda x: vishwamai.rms_norm(x, implementation="triton"), wider)


def test_a_gradient_is_not_fused_with_the_mean_that_it_is_compared_with():
    """Of one feature dx is g - mean(g) = 0, divided by sqrt(eps): g = dy * scale has to be the same number in both, so
    it is rounded once, and no other instruction takes scale.
    """
    (case,) = (case for case in contract.OPERATIONS["norm"].cases if case.name == "layer one feature")
    (backward,) = (launch for launch in launches(case) if launch.launch.kernel.name == "backward")
    how = dataclasses.replace(backward.launch, grid=())
    instructions = arithmetic(compiled(how.kernel, backward.types, how).asm["ptx"])
    readers = collections.Counter(source for _, _, *sources in instructions for source in set(sources))
    rounded = [sources for name, _, *sources in instructions if name == "fma" and sources[2] == "0f00000000"]
    (factors,) = rounded
    assert 1 in map(readers.__getitem__, factors[:2]), instructions


def arithmetic(ptx):
    """(name, destination, sources ...) of every float32 instruction."""
    found = re.findall(r"^\s+(add|sub|mul|fma|neg)(?:\.rn)?\.f32\s+(.*?);", ptx, re.MULTILINE)
    return [(name, *operands.split(", ")) for name, operands in found]


@pytest.mark.turns(4)
@pytest.mark.parametrize("function", [vishwamai.softmax, vishwamai.log_softmax])
def test_rows_of_a_large_vocab_are_walked_in_tiles(function):
    """Llama 3's 128256, forward and backward: nothing spills, for AMD too, and all loads are wide."""
    case = Case("vocab", "softmax", function, {"x": ArrayInit((512, 128256), "bfloat16")})
    recorded = launches(case)
    assert [launch.launch.kernel.name for launch in recorded] == ["forward_in_tiles", "backward_in_tiles"]
    for launch in recorded:
        code = inspect_launch(launch)
        assert code.spill == 0 and code.wide == code.loads > 0
        assert inspect_launch(launch, "gfx942").spill == 0


@pytest.mark.turns(6)
@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.long)])
def test_slopes_of_alibi_spill_nothing(causal):
    """Forward and backward keep to the registers on Hopper, and compile for the MI300."""
    arrays = {name: ArrayInit((1, 8, 1024, 128), "bfloat16") for name in ("query", "key", "value")}
    options = {"causal": causal, "alibi_slopes": np.linspace(0.5, 0.01, 8).astype(np.float32)}
    recorded = launches(Case("alibi", "attention", vishwamai.flash_attention, arrays, options))
    names = [launch.launch.kernel.name for launch in recorded]
    assert names[-3:] == ["delta", "key_gradients", "query_gradients"] and set(names[:-3]) == {"forward"}
    for launch in recorded:
        assert [name for name, _ in launch.types].count("terms.slopes_ptr") == (launch.launch.kernel.name != "delta")
        code = inspect_launch(launch)
        assert code.spill == 0, code
    forward = dataclasses.replace(recorded[0], launch=dataclasses.replace(recorded[0].launch, stages=2))
    assert inspect_launch(forward, "gfx942").mma > 0


@pytest.mark.turns(6)
@pytest.mark.parametrize(
    "format, block_size",
    [("mxfp4", 32), *(pytest.param(*each, marks=pytest.mark.long) for each in (("int4", 128), ("fp8_e4m3", 128)))],
)
@pytest.mark.parametrize("rows", [256, 8192])
def test_quantized_experts_spill_nothing(format, block_size, rows):
    """Of a model of 32 experts, decoding and prefill: dequantized in registers, multiplied by the tensor cores."""
    kind = ("int8", "integers") if format == "mxfp4" else ("float32", "positive")
    arrays = {
        "lhs": ArrayInit((rows, 2880), "bfloat16"),
        "weight": ArrayInit((32, 2880, 5760), "int8", "integers"),
        "scales": ArrayInit((32, -(-2880 // block_size), 5760), *kind),
    }
    options = {"group_sizes": np.full(32, rows // 32, np.int32), "format": format, "block_size": block_size}
    recorded = launches(Case("quantized", "grouped_gemm", quantized_grouped_gemm, arrays, options))
    assert [launch.launch.kernel.name for launch in recorded] == ["rows_product"] * 2
    for launch in recorded:
        code = inspect_launch(launch)
        assert code.spill == 0 and code.tma > 0
        assert code.wgmma > 0 if rows == 8192 else code.mma > 0
        fewer = dataclasses.replace(launch, launch=dataclasses.replace(launch.launch, stages=2))
        assert inspect_launch(fewer, "gfx942").mma > 0


@pytest.mark.turns(6)
def test_some_of_the_groups_compile():
    """16 of 128 experts, whose first row is an operand, forward and backward: nothing spills, for AMD too."""
    arrays = {"lhs": ArrayInit((8192, 2048), "bfloat16"), "rhs": ArrayInit((16, 2048, 768), "bfloat16")}
    options = {"group_sizes": np.full(128, 64, np.int32), "group_offset": 32}
    recorded = launches(Case("some", "grouped_gemm", vishwamai.grouped_gemm, arrays, options))
    assert [launch.launch.kernel.name for launch in recorded] == ["rows_product"] * 2 + ["weights_product"]
    for launch in recorded:
        assert "first_ptr" in dict(launch.types)
        code = inspect_launch(launch)
        assert code.spill == 0 and code.mma + code.wgmma > 0
        fewer = dataclasses.replace(launch, launch=dataclasses.replace(launch.launch, stages=2))
        assert inspect_launch(fewer, "gfx942").mma > 0


def odd_case():
    """A product whose rows are not multiples of 16 bytes."""
    arrays = {"a": ArrayInit((200, 301), "bfloat16"), "b": ArrayInit((301, 333), "bfloat16")}
    return Case("odd", "gemm", vishwamai.gemm, arrays)


@pytest.mark.turns(4)
def test_rows_that_the_copy_engine_cannot_take():
    """Masked loads instead, tensor cores all the same."""
    codes = [inspect_launch(launch) for launch in launches(odd_case())]
    assert [code.tma for code in codes] == [0] * len(codes)
    assert all(code.wgmma and not code.spill for code in codes)


def model_case(op, name):
    (case,) = (case for case in candidates() if (case.op, case.name) == (op, name))
    return case


@pytest.mark.turns(6)
@pytest.mark.parametrize("amd", ["gfx942", "gfx90a"])
def test_products_of_float32_compile_for_amd(amd):
    """AMD's matrix units have other forms of them than NVIDIA's; in a named tuple of constants, too."""
    arrays = {name: ArrayInit((1, 2, 100, 64), "float32") for name in ("query", "key", "value")}
    for launch in launches(Case("float32", "attention", vishwamai.flash_attention, arrays)):
        assert (inspect_launch(launch, amd).mma > 0) == (launch.launch.kernel.name != "delta")


@pytest.mark.turns(5)
@pytest.mark.parametrize(
    "op, name",
    [
        ("norm", "Llama 3 8B"),
        pytest.param("gemm", "Llama 3 8B gate", marks=rotation.one_in(2, 0)),
        pytest.param("rope", "GPT-J 6B", marks=rotation.one_in(2, 1)),
        ("gemm", "BERT base up float32"),
        pytest.param("gated_linear_unit", "Qwen 3 30B-A3B expert", marks=pytest.mark.long),
        pytest.param("linear_cross_entropy", "GPT-2 small", marks=pytest.mark.long),
        pytest.param("grouped_gemm", "Qwen3 30B-A3B up", marks=pytest.mark.long),
        pytest.param(
            "block_sparse_matmul",
            "a 4096 x 4096 weight with a quarter of its blocks, 512 tokens",
            marks=pytest.mark.long,
        ),
    ],
)
def test_amd_compiles(op, name):
    """For the MI300: matrix instructions, nothing spilled."""
    case = model_case(op, name)
    for launch in launches(case):
        how = launch.launch
        # An MI300 has 64 KiB of shared memory, where a Hopper multiprocessor has 227.
        launch = dataclasses.replace(launch, launch=dataclasses.replace(how, stages=min(2, how.stages)))
        code = inspect_launch(launch, "gfx942")
        assert code.registers > 0 and code.spill == 0
        assert (code.mma > 0) == (rows_of_product(launch) is not None)


@pytest.mark.turns(4)
def test_the_reader_notices_a_spill():
    """A row of 4096 on one warp does not fit the registers of the backward pass, and the code says so: the test above
    can fail.
    """
    case = model_case("norm", "Llama 3 8B")
    backward = next(launch for launch in launches(case) if launch.launch.kernel.name == "backward")
    narrow = dataclasses.replace(backward, launch=dataclasses.replace(backward.launch, warps=1))
    assert inspect_launch(narrow).spill > 0


X = jax.ShapeDtypeStruct((8, 64, 256), jnp.bfloat16)
W = jax.ShapeDtypeStruct((256,), jnp.bfloat16)
B = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)


def model(x, w, b):
    return vishwamai.gemm(vishwamai.rms_norm(x, w), b, activation="silu")


def value_and_gradients(x, w, b):
    y, pull = jax.vjp(model, x, w, b)
    return y, pull(y)


def calls(text):
    """(kernel, its operand types) of every call of a Triton kernel in a StableHLO module."""
    return re.findall(
        r'custom_call @__gpu\$xla\.gpu\.ptx\(.*? name = "(\w+)".*?\} : \((.*?)\) ->',
        re.sub(r'kernel_data = ".*?[^\\]"', "", text, flags=re.S),
    )


def lowered(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.turns(4)
def test_lowers_for_cuda_with_gradients():
    names = [name for name, _ in calls(lowered(value_and_gradients, X, W, B))]
    assert {"forward", "backward", "sum_rows", "matmul"} <= set(names) and names.count("matmul") == 3


def test_a_kernel_for_torch_is_not_chosen_for_jax_arrays():
    """XLA's fusion rotates, unless the kernel is asked for by name; then, with gradients, it runs twice, and the
    tables' gradients are XLA's.
    """

    def rotate(x, implementation=None):
        y, pull = jax.vjp(lambda x: vishwamai.apply_rope(x, implementation=implementation), x)
        return pull(y)

    heads = jax.ShapeDtypeStruct((2, 4, 64, 128), jnp.bfloat16)
    assert not calls(lowered(rotate, heads))
    asked = lowered(functools.partial(rotate, implementation="triton"), heads)
    assert [name for name, _ in calls(asked)] == ["turn", "turn"]


def test_one_traced_program_serves_other_platforms_too():
    """The same trace lowers for a CPU without a word of PTX in it."""
    traced = jax.jit(model).trace(X, W, B)
    assert calls(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert "ptx" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_vmap_is_folded_into_one_launch():
    text = lowered(jax.vmap(lambda x, w: vishwamai.layer_norm(x, w), (0, None)), X, W)
    ((name, operands),) = calls(text)
    assert name == "forward" and operands.startswith("tensor<8x64x256xbf16>, tensor<1x256xbf16>")


def test_shard_map_gives_each_device_its_part():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(lambda x, w: vishwamai.rms_norm(x, w), mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    ((_, operands),) = calls(lowered(sharded, X, W))
    assert operands.startswith("tensor<1x64x256xbf16>")


def test_automatic_partitioning_is_asked():
    """Under automatic mesh axes the kernel stands behind our rule in the program for CUDA, as it does for the CPU."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("x")))
    w = jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=NamedSharding(mesh, P()))
    text = jax.jit(vishwamai.rms_norm).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert "CustomSPMDPartitioning" in text


def test_export_for_cuda():
    check = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.ptx")
    exported = jax.export.export(jax.jit(value_and_gradients), platforms=["cuda"], disabled_checks=[check])(X, W, B)
    back = jax.export.deserialize(exported.serialize())
    assert back.platforms == ("cuda",) and calls(back.mlir_module())


def test_a_kernel_on_the_cpu_is_an_error_in_words():
    with pytest.raises(
        NotImplementedError, match="'triton' is for cuda, and this program is compiled for another platform"
    ):
        vishwamai.rms_norm(jnp.ones((4, 8)), implementation="triton")


def test_without_triton_the_reason_names_the_fix(monkeypatch):
    from vishwamai.core import triton_launch

    monkeypatch.setattr(triton_launch, "why_not", lambda: "triton is not installed: pip install '.[gpu]'.")
    with pytest.raises(vishwamai.UnsupportedError, match=r"triton is not installed: pip install '\.\[gpu\]'"):
        jax.eval_shape(lambda x: vishwamai.rms_norm(x, implementation="triton"), X)
    triton_launch.compiled.cache_clear()
    with pytest.raises(DeviceError, match="pip install"):
        triton_launch.compiled(gpu.TritonKernel("m", "k"), (), gpu.Launch(gpu.TritonKernel("m", "k"), (), ()), 90)
