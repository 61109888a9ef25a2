"""JAX programs for CUDA of every operation that has Triton kernels: jit, grad, vmap, shard_map and export keep them,
whatever operation comes to it.

The operations are the registry's, the calls those of test_transforms.py. By default the compiler is played by a
stand-in that checks how it is called; what it makes of the kernels is the matter of test_gpu_code.py, and of the `long`
test here.
"""

import dataclasses
import functools
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import contract
import rotation
from vishwamai.aot.compile.gpu import launches
from vishwamai.aot.compile.gpu_survey import candidates
from vishwamai.core import gpu, triton_call
from vishwamai.core.target import Target
from vishwamai.core.triton_launch import KernelParameters, compiled

pytestmark = [
    pytest.mark.skipif(contract.INTERPRETED, reason="a process with the interpreter lowers no kernel"),
    pytest.mark.skipif(gpu.why_not() is not None, reason=str(gpu.why_not())),
    pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning"),
]
TRITON = {
    name: impl
    for name, operation in contract.OPERATIONS.items()
    for impl in operation.op.implementations
    if impl.platform == "cuda"
}
assert TRITON
CHECK = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.ptx")


@pytest.fixture
def stand_in(monkeypatch):
    """A compiler that asks for what the real one asks for, and makes a kernel of nothing."""

    def compiled(kernel, pointers, launch, target):
        names = {name for name, _ in pointers} | {name for name, _ in launch.constants}
        assert (
            names <= KernelParameters.of(kernel, launch.bundles).names
            and target == 90
            and all(t.startswith("*") for _, t in pointers)
        )
        parameters = ", ".join(".param .u64 p" for _ in range(len(pointers) + 2))
        ptx = f".visible .entry {kernel.name}({parameters}) .reqntid {32 * launch.warps}"
        metadata = types.SimpleNamespace(num_ctas=1, name=kernel.name, shared=0, global_scratch_size=0)
        return types.SimpleNamespace(asm={"ptx": ptx}, metadata=metadata)

    monkeypatch.setattr(triton_call, "compiled", compiled)
    jax.clear_caches()
    yield
    jax.clear_caches()


def asked(name):
    """By name where XLA's own code is what JAX arrays get."""
    reason = TRITON[name].why_not_default(None, Target("cuda"))
    return {"implementation": TRITON[name].name} if reason else {}


def calls(text):
    """(kernel, elements of all its operands) of every call of a Triton kernel in a StableHLO module."""
    found = re.findall(
        r'custom_call @__gpu\$xla\.gpu\.ptx\(.*? name = "(\w+)".*?\} : \((.*?)\) ->',
        re.sub(r'kernel_data = ".*?[^\\]"', "", text, flags=re.S),
    )
    sizes = ([dims.split("x")[:-1] for dims in re.findall(r"tensor<([^>]*)>", operands)] for _, operands in found)
    return [
        (kernel, sum(int(np.prod([int(n) for n in dims], initial=1)) for dims in shapes))
        for (kernel, _), shapes in zip(found, sizes, strict=True)
    ]


def lowered(function, *args):
    return calls(jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text())


@functools.cache
def setting(name):
    """(case, its shapes, its values and gradients as a function)."""
    case = contract.OPERATIONS[name].facts.small
    assert contract.declines(TRITON[name], case) is None
    cotangents = contract.cotangents_for(case, contract.output_shapes(case))
    run = contract.value_and_gradients(case, **asked(name))
    return case, case.shapes(), lambda arrays: run(arrays, cotangents)


@pytest.mark.parametrize("name", [pytest.param(n, marks=rotation.one_in(3, i)) for i, n in enumerate(TRITON)])
def test_programs_for_cuda(name, stand_in):
    """One trace has the kernels for CUDA and none for the CPU; mapped, the same kernels run as often, on more; on eight
    devices each has its part.
    """
    case, shapes, run = setting(name)
    traced = jax.jit(run).trace(shapes)
    plain = calls(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert len(plain) > len(lowered(lambda a: case.run(a, **asked(name)), shapes)) or not case.differentiable
    assert plain
    if not asked(name):
        assert "ptx" not in traced.lower(lowering_platforms=("cpu",)).as_text()

    # An axis that is mapped is folded into the call, forward and backward.
    mapped = {n: jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for n, x in shapes.items()}
    folded = lowered(jax.vmap(run), mapped)
    assert [kernel for kernel, _ in folded] == [kernel for kernel, _ in plain]
    assert sum(size for _, size in folded) > 2 * sum(size for _, size in plain)

    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    batched = contract.OPERATIONS[name].facts.batched
    specs: dict[str, Any] = {n: P("x") if n in batched else P() for n in shapes}
    sharded = jax.shard_map(
        lambda a: case.run(a, **asked(name)), mesh=mesh, in_specs=(specs,), out_specs=P("x"), check_vma=False
    )

    def gradients(arrays):
        floats = {n: arrays[n] for n in case.differentiable}
        rest = {n: x for n, x in arrays.items() if n not in floats}
        outputs, pull = jax.vjp(lambda f: sharded({**rest, **f}), floats)
        return outputs, pull(jax.tree.map(jnp.ones_like, outputs))

    parts = lowered(gradients if case.differentiable else sharded, shapes)
    assert {kernel for kernel, _ in parts} == {kernel for kernel, _ in plain}
    assert sum(size for _, size in parts) < sum(size for _, size in plain)

    exported = jax.export.export(jax.jit(run), platforms=["cuda"], disabled_checks=[CHECK])(shapes)
    back = jax.export.deserialize(exported.serialize())
    assert back.platforms == ("cuda",) and calls(back.mlir_module()) == plain


@pytest.mark.long
@pytest.mark.parametrize("name", TRITON)
def test_programs_with_their_kernels(name):
    """The same by the real compiler: what an exported program holds is PTX that ends in the kernel's name."""
    _, shapes, run = setting(name)
    exported = jax.export.export(jax.jit(run), platforms=["cuda"], disabled_checks=[CHECK])(shapes)
    text = jax.export.deserialize(exported.serialize()).mlir_module()
    assert calls(text) and all(f".entry {kernel}(" in text for kernel, _ in calls(text))


@pytest.mark.long
@pytest.mark.parametrize("model, instruction", [("fp8", "f32.e4m3.e4m3"), ("int8", "s32.s8.s8")])
def test_narrow_factors_are_multiplied_as_they_are(model, instruction):
    """Two factors of 8 bits go to the tensor cores as such, in the product with its scales; the gradients' products mix
    dtypes and are bfloat16's.
    """
    (case,) = (c for c in candidates() if c.op == "gemm" and c.name == f"Llama 3 8B gate {model}")
    _, forward = launches(case, backward=False)  # behind the launch that transposes the columns
    how = dataclasses.replace(forward.launch, grid=())
    ptx = compiled(how.kernel, forward.types, how, 90).asm["ptx"]
    assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.\w+\.(\w+\.\w+\.\w+)", ptx)) == {instruction}
