"""`vishwamai.kernels.tpu`: kernels and operations of one's own, the tiled layout, shardings."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import vishwamai
from vishwamai import aot
from vishwamai.core.errors import DeviceError, KernelError, ShapeError, UnsupportedError
from vishwamai.core.sharding import out_struct
from vishwamai.kernels.tpu import from_tiled_layout, to_tiled_layout, validate_sharding
from vishwamai.kernels.tpu.tpu_custom_call import compile_tpu_kernel, register_tpu_op, tpu_custom_call

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="compiles for TPUs by libtpu")


def body(x_ref, w_ref, y_ref):
    y_ref[...] = jnp.tanh(x_ref[...]) * w_ref[...]


BODY: Any = dict(
    grid=(4,),
    in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0)), pl.BlockSpec((1, 128), lambda i: (0, 0))],
    out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
)
DECLARED = ("tanh_scale", body, [(32, 128), (1, 128)], [(32, 128)], [jnp.float32] * 2, [jnp.float32])


def random(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.turns(3)
def test_a_pallas_body_is_compiled_and_called_by_name():
    kernel = compile_tpu_kernel(*DECLARED, **BODY)
    x, w = random(32, 128), random(1, 128, seed=1)
    wanted = np.tanh(x) * w
    np.testing.assert_allclose(kernel(x, w), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda x: kernel(x, w) + 1)(x), wanted + 1, rtol=1e-5, atol=1e-6)
    (got,) = tpu_custom_call("tanh_scale", [jax.ShapeDtypeStruct((32, 128), jnp.float32)], [x, w])
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(
        ShapeError, match=r"tanh_scale: result 0 is float32\[32,128\], but float32\[32,64\] is declared"
    ):
        tpu_custom_call("tanh_scale", [jax.ShapeDtypeStruct((32, 64), jnp.float32)], [x, w])
    with pytest.raises(KernelError, match="nothing is called 'tanh'.*There are:.*tanh_scale"):
        tpu_custom_call("tanh", [], [x])


@needs_libtpu
@pytest.mark.parametrize("target", ["v4", "tpu7x"])
def test_compiled_for_a_chip_that_is_not_here(target):
    kernel = compile_tpu_kernel(*DECLARED, target=target, **BODY)
    assert "tpu_custom_call" in kernel.program.text and kernel.program.memory.fits
    with pytest.raises(DeviceError, match=f"compiled for {target}, which is not here"):
        kernel(random(32, 128), random(1, 128))


def test_declarations_are_checked():
    shapes = [(8, 16), (16, 4)]
    floats = ["float32", "float32"]
    kernel = compile_tpu_kernel("product", lambda x, y: x @ y, shapes, [(8, 4)], floats, ["float32"])
    x, y = random(8, 16), random(16, 4)
    np.testing.assert_allclose(kernel(x, y), x @ y, rtol=1e-5)
    with pytest.raises(ShapeError, match=r"operand 1 is float32\[4,16\], but float32\[16,4\] is declared"):
        kernel(x, y.T)
    with pytest.raises(ShapeError, match=r"output 0 is float32\[8,4\], but bfloat16\[8,4\] is declared"):
        compile_tpu_kernel("product", lambda x, y: x @ y, shapes, [(8, 4)], floats, ["bfloat16"])
    with pytest.raises(ShapeError, match="there are 1 outputs, but 2 are declared"):
        compile_tpu_kernel("product", lambda x, y: x @ y, shapes, [(8, 4)] * 2, floats, floats)
    with pytest.raises(ShapeError, match="2 input_shapes and 1 input_dtypes"):
        compile_tpu_kernel("product", lambda x, y: x @ y, shapes, [(8, 4)], ["float32"], ["float32"])
    with pytest.raises(KernelError, match="takes 1 positional parameters.*pass `pallas=True`"):
        compile_tpu_kernel("product", lambda x: x, shapes, [(8, 4)], floats, ["float32"])
    with pytest.raises(KernelError, match="grid are options of Pallas"):
        compile_tpu_kernel("product", lambda x, y: x @ y, shapes, [(8, 4)], floats, ["float32"], grid=(2,))
    with pytest.raises(KernelError, match="product: TypeError: dot_general") as caught:
        compile_tpu_kernel("product", lambda x, y: x @ y, [(8, 16), (8, 16)], [(8, 4)], floats, ["float32"])
    assert isinstance(caught.value.__cause__, TypeError)


def row_scale(x, s, *, power=1):
    return jnp.tanh(x) * s**power


def kernel_scale(x, s, *, power=1):
    def scale(x_ref, s_ref, y_ref):
        y_ref[...] = jnp.tanh(x_ref[...]) * s_ref[...] ** power

    shape = out_struct(x.shape, x.dtype, x, s)
    return pl.pallas_call(scale, out_shape=shape, name="kernel_scale")(x, s[None])


def scale_gradient(operands, y, dy, *, power=1):
    x, s = operands
    t = jnp.tanh(x)
    return dy * (1 - t * t) * s**power, (dy * t).sum(0) * power * s ** (power - 1)


def make(**options):
    return register_tpu_op(
        "row_scale",
        {"tpu": kernel_scale, "default": row_scale},
        abstract=lambda x, s, power=1: x,
        sharding="b d, d -> b d",
        split="b",
        **options,
    )


@pytest.mark.turns(3)
@pytest.mark.parametrize("options", [{}, {"gradient": scale_gradient}], ids=["differentiated", "own gradient"])
def test_an_operation_has_what_the_librarys_have(options):
    op = make(**options)
    x, s = random(8, 128), random(128, seed=1)
    weight = random(8, 128, seed=2)

    def loss(f, x, s):
        return (f(x, s, power=2) * weight).sum()

    np.testing.assert_allclose(op(x, s, power=2), row_scale(x, s, power=2), rtol=1e-5, atol=1e-6)
    wanted = jax.grad(lambda x, s: loss(row_scale, x, s), (0, 1))(x, s)
    gradient = jax.jit(jax.grad(lambda x, s: loss(op, x, s), (0, 1)))
    for got, want in zip(gradient(x, s), wanted):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    xs = jnp.stack([x, 2 * x, 3 * x])
    np.testing.assert_allclose(
        jax.vmap(op, (0, None))(xs, s), jax.vmap(row_scale, (0, None))(xs, s), rtol=1e-5, atol=1e-6
    )
    mapped = jax.vmap(gradient, (0, None))(xs, s)
    for got, want in zip(mapped, jax.vmap(jax.grad(lambda x, s: loss(row_scale, x, s), (0, 1)), (0, None))(xs, s)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    found = vishwamai.explain(op, x, s, target="v5e").calls[0]
    assert found.runs == "row_scale_tpu"
    assert vishwamai.explain(op, x, s).calls[0].runs == "xla"
    (by_name,) = tpu_custom_call("row_scale", [jax.ShapeDtypeStruct(x.shape, x.dtype)], [x, s])
    np.testing.assert_allclose(by_name, row_scale(x, s), rtol=1e-5, atol=1e-6)


@needs_libtpu
def test_its_kernel_compiles_for_a_tpu_forward_and_mapped():
    op = make(gradient=scale_gradient)
    x, s = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 128), (128,)))
    mapped = jax.ShapeDtypeStruct((3, 8, 128), jnp.float32)
    assert "kernel_scale" in aot.compile_for(op, x, s, target="v5e").text
    assert "kernel_scale" in aot.compile_for(jax.vmap(op, (0, None)), mapped, s, target="v5e").text


def test_batching_of_ones_own_is_used():
    seen = []

    def batching(function, x):
        seen.append(x.shape)
        return jnp.stack([function(row) for row in x])

    op = register_tpu_op("halved", {"default": lambda x: x / 2}, batching=batching)
    np.testing.assert_array_equal(jax.vmap(op)(jnp.ones((3, 4))), np.full((3, 4), 0.5))
    assert (3, 4) in seen


def test_shardings_follow_the_rule():
    op = make(gradient=scale_gradient)
    x, s = random(8, 128), random(128, seed=1)
    explicit = jax.make_mesh((4,), ("data",))
    automatic = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    for mesh in (explicit, automatic):
        for spec in (jax.P("data"), jax.P(None, "data")):  # rows may be split; features are gathered
            placed = jax.device_put(x, jax.NamedSharding(mesh, spec))
            got = jax.jit(op)(placed, jax.device_put(s, jax.NamedSharding(mesh, jax.P())))
            np.testing.assert_allclose(got, row_scale(x, s), rtol=1e-5, atol=1e-6)
    placed = jax.device_put(x, jax.NamedSharding(explicit, jax.P("data")))
    assert op(placed, jax.device_put(s, jax.NamedSharding(explicit, jax.P()))).sharding.spec[0] == "data"


def test_its_errors_say_what_to_do():
    op = make()
    with pytest.raises(ShapeError, match="row_scale: 1 arrays are given, but it takes 2: x, s"):
        op(random(8, 128))
    with pytest.raises(KernelError, match="row_scale: ValueError: Incompatible shapes"):
        op(random(8, 128), random(64))
    with pytest.raises(KernelError, match="no 'default'"):
        register_tpu_op("nothing", {"tpu": kernel_scale})
    with pytest.raises(KernelError, match="no platform 'npu'"):
        register_tpu_op("nothing", {"npu": row_scale, "default": row_scale})
    with pytest.raises(KernelError, match="has 1 operands, but the operation takes 2"):
        register_tpu_op("nothing", {"default": row_scale}, sharding="b d -> b d")
    for rule, split, words in (
        ("b b, d -> b d", "b", "has 'b b'; write a name for each axis"),
        ("b-1 d, d -> b d", "d", "has 'b-1 d'"),
        ("b d, d -> b e", "b", "has 'e' in a result alone"),
        ("b d, d -> b d", "bt", "has no factor 't'; pass letters of b, d"),
        (None, "b", "there is no `sharding` whose factors"),
    ):
        with pytest.raises(KernelError, match=words):
            register_tpu_op("nothing", {"default": row_scale}, sharding=rule, split=split)
    with pytest.raises(UnsupportedError, match="row_scale: there is no implementation 'pallas'"):
        op(random(8, 128), random(128), implementation="pallas")
    wrong = register_tpu_op("wrong", {"default": lambda x: x[0]}, abstract=lambda x: x)
    with pytest.raises(ShapeError, match=r"wrong: the default implementation returns float32\[\].*says float32\[4\]"):
        wrong(jnp.ones(4))
    short = register_tpu_op("short", {"default": lambda x, y: x + y}, gradient=lambda operands, y, dy: (dy,))
    with pytest.raises(ShapeError, match="short: its gradient returns 1 arrays for 2 operands"):
        jax.grad(lambda x: short(x, x).sum())(jnp.ones(3))


def test_tiled_layout_is_the_documented_one():
    x = jnp.arange(2 * 200 * 300 * 3, dtype=jnp.float32).reshape(2, 200, 300, 3)
    tiled = to_tiled_layout(x)
    assert tiled.shape == (2, 2, 3, 128, 128, 3)
    for b, h, w, c in ((0, 0, 0, 0), (1, 199, 299, 2), (1, 130, 5, 1)):
        assert tiled[b, h // 128, w // 128, h % 128, w % 128, c] == x[b, h, w, c]
    assert (tiled[:, 1, :, 72:] == 0).all() and (tiled[:, :, 2, :, 44:] == 0).all()
    np.testing.assert_array_equal(from_tiled_layout(tiled, 200, 300), x)
    assert from_tiled_layout(tiled).shape == (2, 256, 384, 3)
    with pytest.raises(ShapeError, match="`height` is 300, but the tiles hold 256"):
        from_tiled_layout(tiled, 300, 300)
    with pytest.raises(ShapeError, match="pass four axes"):
        to_tiled_layout(x[0])
    with pytest.raises(ShapeError, match="square tiles"):
        from_tiled_layout(tiled[:, :, :, :64])


def test_validate_sharding():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    spec = jax.P("data", "model")
    x = jax.device_put(jnp.ones((8, 6)), jax.NamedSharding(mesh, spec))
    assert validate_sharding(x, mesh, spec) is None
    assert (
        validate_sharding(jax.device_put(x, jax.NamedSharding(mesh, jax.P("data"))), mesh, jax.P("data", None)) is None
    )
    assert validate_sharding(x, mesh) is None
    with pytest.raises(ShapeError, match="not on the mesh .*'other'"):
        validate_sharding(x, jax.make_mesh((8,), ("other",)))
    with pytest.raises(ShapeError, match="lies as .*not as .*jax.device_put"):
        validate_sharding(x, mesh, jax.P("model"))
    with pytest.raises(ShapeError, match="6 elements .* does not divide over the 4 devices"):
        validate_sharding(x, mesh, jax.P(None, "data"))
    with pytest.raises(KernelError, match="splits by 'expert', but the mesh has the axes data, model"):
        validate_sharding(x, mesh, jax.P("expert"))
    with pytest.raises(ShapeError, match="has 3 entries"):
        validate_sharding(x, mesh, jax.P("data", None, None))
    jax.jit(lambda x: validate_sharding(x, mesh, spec) or x)(x)  # on explicit axes a type carries its sharding
    with pytest.raises(ShapeError, match="reshard"):
        jax.jit(lambda x: validate_sharding(x, mesh, jax.P("data")) or x)(x)


def test_the_gradient_of_a_pallas_body_names_register_tpu_op():
    kernel = compile_tpu_kernel(*DECLARED, **BODY)
    x, w = random(32, 128), random(1, 128, seed=1)
    for derivative in (jax.grad(lambda x: kernel(x, w).sum()), lambda x: jax.jvp(lambda x: kernel(x, w), (x,), (x,))):
        with pytest.raises(UnsupportedError, match="tanh_scale: a Pallas body has no derivative .* register_tpu_op"):
            derivative(x)
    np.testing.assert_allclose(jax.jit(kernel)(x, w), np.tanh(x) * w, rtol=1e-5, atol=1e-6)
    # What does not depend on the argument is a constant of the derivative.
    np.testing.assert_array_equal(jax.grad(lambda s: (s * kernel(x, w)).sum())(2.0), kernel(x, w).sum())
