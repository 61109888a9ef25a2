"""Every case compiles ahead of time for every TPU generation, forward and backward, with the kernel in the program: no
device needed.

By default one case in twelve is compiled, each for one chip in rotation, so that every chip has its share; the whole
cross product is `long`.
"""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import contract
import rotation
import vishwamai
from vishwamai import aot
from vishwamai.aot.compile.libtpu import mesh_for
from vishwamai.core.errors import FallbackWarning, KernelError, UnsupportedError
from vishwamai.core.hardware import TPUS
from vishwamai.core.target import Target

pytestmark = pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install '.[aot]'")

CASES = [(op, case) for op in contract.OPERATIONS.values() for case in op.cases]
TARGETS = tuple(TPUS)


def once_each():
    """(op, case, chip): one chip a case."""
    return [(op, case, TARGETS[i % len(TARGETS)]) for i, (op, case) in enumerate(CASES)]


def everything():
    """(op, case, chip): all that `once_each` leaves out."""
    once = {(id(case), target) for _, case, target in once_each()}
    return [(op, case, target) for op, case in CASES for target in TARGETS if (id(case), target) not in once]


def parameters(triples, one_in=1):
    return [
        pytest.param(*t, id=f"{t[0].op.name}-{contract.label(t[1])}-{t[2]}", marks=rotation.one_in(one_in, i))
        for i, t in enumerate(triples)
    ]


def compile_and_check(operation, case, target):
    """Compiles outputs and gradients as the library chooses for the chip; the kernel is there unless it says why
    not.
    """
    kernels = [impl for impl in operation.op.implementations if impl.platform == "tpu"]
    if not kernels:  # then the op says what is as fast, or that there is none
        assert any(
            "XLA's own" in note or "no platform has a kernel" in note
            for note in operation.reference.notes(contract.case_spec(case), Target("tpu", TPUS[target]))
        )
    chip, spec = Target("tpu", TPUS[target]), contract.case_spec(case)
    reasons = [contract.declines(impl, case, chip) or impl.why_not_default(spec, chip) for impl in kernels]
    cotangents = contract.cotangents_for(case, contract.output_shapes(case))
    run = contract.value_and_gradients(case)
    with contract.x64(case), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        # The cotangents are constants: those of integer outputs have a type (float0) that no argument can have.
        program = aot.compile_for(lambda arrays: run(arrays, cotangents), case.shapes(), target=target)
    in_program = [kernel for kernel in program.kernels if kernel.pallas]
    assert bool(in_program) == (None in reasons), reasons
    assert program.memory.fits
    return in_program


def compile_or_name(operation, case, target):
    """`compile_and_check`, or the error that says that jaxlib cannot read the program that was compiled."""
    if (case.name, target) in operation.facts.unreadable:
        with pytest.raises(KernelError, match="the program compiled, but jaxlib cannot read its text back"):
            compile_and_check(operation, case, target)
    else:
        compile_and_check(operation, case, target)


@pytest.mark.turns(4)
@pytest.mark.parametrize("operation, case, target", parameters(once_each(), one_in=12))
def test_case_compiles(operation, case, target):
    compile_or_name(operation, case, target)


@pytest.mark.long
@pytest.mark.parametrize("operation, case, target", parameters(everything()))
def test_case_compiles_everywhere(operation, case, target):
    compile_or_name(operation, case, target)


TOPOLOGY = "v5e:2x2"


def attention_structs(kind, spec):
    """query, key, value of batch 4, heads 8 (kv 4), length 256, head_dim 128 on a mesh of 2 x 2."""
    mesh: Any = mesh_for(TOPOLOGY, {"x": 2, "y": 2})
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * 2)
    shapes = ((4, 8, 256, 128), (4, 4, 256, 128), (4, 4, 256, 128))
    return [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for s in shapes]


def attention_and_gradients(query, key, value):
    out, pull = jax.vjp(lambda *a: vishwamai.flash_attention(*a, causal=True), query, key, value)
    return out, pull(out)


def kernel_shapes(program):
    """Shapes of the 4-dimensional bfloat16 operands of every Pallas call in the program."""
    lines = [line for line in program.text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    assert lines
    return {
        tuple(map(int, dims.split(","))) for line in lines for dims in re.findall(r"bf16\[(\d+(?:,\d+){3})\]", line)
    }


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    "spec, batch, heads",
    [
        (P("x", "y"), 2, (4, 2)),
        (P(("x", "y")), 1, (8, 4)),
        (P("x", None, None, "y"), 2, (8, 4)),
    ],
    ids=str,
)
def test_explicit_axes_split_batch_and_heads_never_the_features(spec, batch, heads):
    """On a slice, a kernel gets its share of batch and heads and whole rows, whatever is sharded."""
    structs = attention_structs(AxisType.Explicit, spec)
    mesh: Any = structs[0].sharding.mesh
    with jax.set_mesh(mesh):
        program = aot.compile_for(attention_and_gradients, *structs, target=TOPOLOGY)
    shapes = kernel_shapes(program)
    assert {(batch, heads[0], 256, 128), (batch, heads[1], 256, 128)} <= shapes
    assert all(shape[0] == batch and shape[1] in heads for shape in shapes)
    assert ("all-gather" in program.text) == (len(spec) == 4)


@pytest.mark.long
def test_a_split_sequence_travels_beside_the_kernels():
    """The keys of the next hop are asked for before a kernel and awaited after it, forward and backward."""
    structs = attention_structs(AxisType.Explicit, P("x", None, "y"))
    mesh: Any = structs[0].sharding.mesh
    with jax.set_mesh(mesh):
        program = aot.compile_for(attention_and_gradients, *structs, target=TOPOLOGY)
    assert kernel_shapes(program) <= {(2, 8, 128, 128), (2, 4, 128, 128)}
    assert "all-gather" not in program.text
    under_way: set[str] = set()
    hidden = []
    for line in program.text.splitlines():
        name = line.split("=")[0].strip()
        if " collective-permute-start(" in line:
            under_way.add(name)
        elif done := re.search(r" collective-permute-done\((?:.* )?(%[\w.-]+)\)", line):
            under_way.discard(done[1])
        elif 'custom_call_target="tpu_custom_call"' in line:
            hidden.append(bool(under_way))
    assert any(hidden), "no transfer is under way while a kernel runs"


def test_shard_map_on_a_slice():
    structs = attention_structs(AxisType.Auto, P("x", "y"))
    specs = (P("x", "y"),) * 3
    sharded = jax.shard_map(
        attention_and_gradients, mesh=structs[0].sharding.mesh, in_specs=specs, out_specs=(P("x", "y"), specs)
    )
    assert (2, 4, 256, 128) in kernel_shapes(aot.compile_for(sharded, *structs, target=TOPOLOGY))


@pytest.mark.turns(3)
def test_automatic_axes_split_a_kernel_by_their_names():
    """Neither name is one of columns, so both axes split the batch, however the arrays lie."""
    structs = attention_structs(AxisType.Auto, P(None, "x"))
    program = aot.compile_for(attention_and_gradients, *structs, target=TOPOLOGY)
    assert {(1, 8, 256, 128), (1, 4, 256, 128)} <= kernel_shapes(program)


def test_a_kernel_of_ones_own_under_automatic_axes_is_an_error_that_explains_itself():
    def double(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...] * 2), out_shape=shape)(x)

    query = attention_structs(AxisType.Auto, P("x"))[0]
    with pytest.raises(UnsupportedError, match="shard_map"):
        aot.compile_for(double, query, target=TOPOLOGY)
