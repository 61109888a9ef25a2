"""What is block-sparse on GPUs, beyond the contract: only live blocks are visited, lists that the device makes, torch's
own machinery.

Run as they are, the tensors on the CPU are served by what serves JAX there; under TRITON_INTERPRET=1 (`make test-gpu`)
by the Triton kernels, interpreted.
"""

import contextlib
import re
from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import contract  # noqa: E402
import vishwamai.torch as vt  # noqa: E402
from triton_kernels import triton_serves  # noqa: E402
from vishwamai.aot.compile.gpu import inspect_launch, launches  # noqa: E402
from vishwamai.core.cases import ArrayInit, Case  # noqa: E402
from vishwamai.core.errors import ShapeError  # noqa: E402
from vishwamai.ops.attention import block_sparse_attention  # noqa: E402
from vishwamai.ops.attention.gpu_tiles import AttentionGpuConfig  # noqa: E402
from vishwamai.ops.sparse import block_sparse_matmul  # noqa: E402
from vishwamai.ops.sparse.patterns import bigbird  # noqa: E402

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning")]
counts = pytest.mark.skipif(not contract.INTERPRETED, reason="counts the products of the interpreted kernels")
only_triton = pytest.mark.skipif(not contract.TRITON, reason="needs a process of its own: make test-gpu")


@pytest.fixture(autouse=True)
def kernels():
    with triton_serves() if contract.TRITON else contextlib.nullcontext():
        yield


def tensors(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def made_dense(values, indices, shape):
    """The sparse matrix; blocks at one place add up."""
    _, rows, columns = values.shape
    whole = torch.zeros(shape[0] // rows, shape[1] // columns, rows, columns, dtype=values.dtype)
    whole = whole.index_put((indices[:, 0], indices[:, 1]), values, accumulate=True)
    return whole.transpose(1, 2).reshape(shape)


def agree(function, reference, args, tolerance=2e-5):
    got, want = function(*args), reference(*args)
    assert got.dtype == want.dtype and got.shape == want.shape
    weight = torch.linspace(-1, 1, got.numel()).reshape(got.shape).to(got.dtype)
    pairs = zip(
        (got, *torch.autograd.grad(got, args, weight)), (want, *torch.autograd.grad(want, args, weight)), strict=True
    )
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype and (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


PLACES = torch.tensor([[1, 0], [0, 2], [1, 0], [0, 0]])  # unsorted, one place twice, a column without blocks
SHAPE = (48, 48)  # of blocks of 24 x 16


@pytest.mark.parametrize("transpose", [True, pytest.param(False, marks=pytest.mark.long)])
def test_values_and_gradients(transpose):
    dense, values = tensors((2, 5, 48), (4, 24, 16))

    def theirs(dense, values):
        matrix = made_dense(values, PLACES, SHAPE)
        return dense @ (matrix.T if transpose else matrix)

    agree(lambda d, v: vt.block_sparse_matmul(d, v, PLACES, shape=SHAPE, transpose=transpose), theirs, (dense, values))


def test_rows_of_blocks_and_indices_out_of_range():
    dense, values = (x.detach() for x in tensors((3, 48), (4, 24, 16)))
    starts, columns = torch.tensor([0, 3, 4]), torch.tensor([2, 0, 1, 1])
    places = torch.tensor([[0, 2], [0, 0], [0, 1], [1, 1]])
    want = dense @ made_dense(values, places, SHAPE)
    for indices in ((starts, columns), places, places + torch.tensor([[0, 5], [-3, -1], [0, 0], [7, 0]])):
        assert (vt.block_sparse_matmul(dense, values, indices, shape=SHAPE) - want).abs().max() < 1e-5


def test_opcheck():
    dense, values = tensors((3, 48), (4, 24, 16))
    arguments = (dense, values, PLACES, *SHAPE, False, "default")
    assert set(torch.library.opcheck(torch.ops.vishwamai.block_sparse_matmul.default, arguments).values()) == {
        "SUCCESS"
    }


@only_triton
def test_compiles_in_one_graph():
    starts, columns = torch.tensor([0, 3, 4]), torch.tensor([2, 0, 1, 1])
    places = torch.tensor([[0, 2], [0, 0], [0, 1], [1, 1]])

    def model(dense, values):
        return vt.block_sparse_matmul(dense * 2, values, (starts, columns), shape=SHAPE).sin()

    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    agree(fast, lambda d, v: (d * 2 @ made_dense(v, places, SHAPE)).sin(), tensors((3, 48), (4, 24, 16)))


@pytest.mark.long
def test_vmap():
    dense, values = (x.detach() for x in tensors((3, 5, 48), (4, 24, 16)))
    got = torch.vmap(lambda d: vt.block_sparse_matmul(d, values, PLACES, shape=SHAPE), 1, 1)(dense)
    assert (got - dense @ made_dense(values, PLACES, SHAPE)).abs().max() < 1e-5


def test_errors():
    with pytest.raises(ShapeError, match=r"`indices` has shape \(3, 2\).*`values` has 4 blocks"):
        vt.block_sparse_matmul(
            torch.ones(2, 48), torch.ones(4, 24, 16), torch.zeros(3, 2, dtype=torch.long), shape=SHAPE
        )
    with pytest.raises(ShapeError, match="pass 48 features"):
        vt.block_sparse_matmul(torch.ones(2, 40), torch.ones(4, 24, 16), PLACES, shape=SHAPE)


@contextlib.contextmanager
def counted_products():
    """Counts the interpreter's products of tiles."""
    import triton_inside

    triton_inside.correct()
    builder: Any = triton_inside.interpreter_builder
    original, seen = builder.create_dot, []

    def create_dot(self, *args):
        seen.append(args[0].data.shape)
        return original(self, *args)

    builder.create_dot = create_dot
    try:
        yield seen
    finally:
        builder.create_dot = original


def products_of(function, *args):
    """Products of tiles in the forward pass, and in both."""

    def both(*args):
        outputs, pull = jax.vjp(function, *args)
        return pull(outputs)

    with counted_products() as seen:
        jax.block_until_ready(jax.jit(function)(*args))
        forward = len(seen)
        jax.block_until_ready(jax.jit(both)(*args))
    return forward, len(seen) - 2 * forward


@counts
def test_a_product_visits_the_blocks_that_are_there():
    """One product a block and tile of rows: of 16 blocks there are 5, and one column has none."""
    places = np.array([[0, 3], [3, 0], [1, 1], [1, 0], [0, 3]])
    dense, values = np.ones((20, 64), np.float32), np.ones((5, 16, 16), np.float32)

    def product(dense, values):
        return block_sparse_matmul(dense, values, places, shape=(64, 64), implementation="triton")

    forward, backward = products_of(product, dense, values)
    assert forward == 5  # 20 rows are one tile
    assert backward == 5 + 5  # the dense operand's gradient, and one product for each block's own


@counts
@pytest.mark.parametrize("causal, live", [(False, 7), (True, 5)])
def test_attention_visits_the_tiles_that_are_there(causal, live):
    """Two products a tile in the forward pass, and seven in the backward one: four for the keys, three for the queries;
    heads have their own tiles.
    """
    mask = np.zeros((2, 3, 3), bool)
    mask[0, [0, 1, 2], [0, 1, 0]] = True  # one key block is seen by no query
    mask[1, [0, 1, 1, 2], [2, 0, 2, 1]] = True  # two of these are above the diagonal
    x = np.ones((1, 2, 192, 16), np.float32)
    config = AttentionGpuConfig(64, 64, 4, 1, 64, 64, 4, 1)

    def attend(q, k, v):
        return block_sparse_attention(
            q, k, v, block_mask=mask, block_size=64, causal=causal, implementation="triton", config=config
        )

    forward, backward = products_of(attend, x, x, x)
    assert forward == 2 * live and backward == 7 * live


not_interpreted = pytest.mark.skipif(contract.INTERPRETED, reason="a process with the interpreter cannot compile")


def near(query, key):
    """The last 300 positions and every seventh: most blocks of 64 are there in part."""
    return (key <= query) & ((query - key < 300) | (key % 7 == 0))


MASKS = {
    "BigBird 128 of 128": (128, 128, 4096, bigbird(32, 3, 1, 4), False),
    "BigBird 128 of 128 causal": (128, 128, 4096, bigbird(32, 3, 1, 4), True),
    "BigBird 64 of 64 causal": (64, 64, 4096, bigbird(64, 3, 1, 4), True),
    "function 64 of 128": (128, 64, 1024, near, False),
    "BigBird 64 of 256 causal": (256, 64, 4096, bigbird(64, 3, 1, 4), True),
    "BigBird 128 of 256 causal": (256, 128, 4096, bigbird(32, 3, 1, 4), True),
}


def masked_case(name):
    dim, block, length, mask, causal = MASKS[name]
    arrays = {
        x: ArrayInit((1, heads, length, dim), "bfloat16") for x, heads in (("query", 8), ("key", 4), ("value", 4))
    }
    return Case(
        name,
        "attention",
        block_sparse_attention,
        arrays,
        {"block_mask": mask, "block_size": block, "causal": causal},
    )


@pytest.mark.long
@not_interpreted
@pytest.mark.parametrize("name", MASKS)
def test_hopper_code_under_a_block_mask(name):
    """Nothing spills, products are by warp groups, keys come by the copy engine though their places are read from a
    list.
    """
    for launch in launches(masked_case(name)):
        code = inspect_launch(launch)
        assert code.spill == 0, code
        if code.kernel != "delta":
            assert code.wgmma + code.mma > 0 and code.tma > 0, code
        if code.kernel == "forward":
            assert code.wgmma > 0, code


@pytest.mark.long
@not_interpreted
def test_a_block_mask_is_a_constant_of_programs_for_cuda():
    """Jitted, mapped and exported; the lists go to the kernels of both passes, and no mask of [q_len, kv_len] is
    made.
    """
    case = masked_case("BigBird 64 of 64 causal")

    def gradients(arrays):
        return jax.vjp(lambda a: case.run(a, implementation="triton"), arrays)[1](arrays["query"])

    shapes = case.shapes()
    mapped = {name: jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for name, x in shapes.items()}
    for function, given in ((gradients, shapes), (jax.vmap(gradients), mapped)):
        text = jax.jit(function).trace(given).lower(lowering_platforms=("cuda",)).as_text()
        names = re.findall(r'name = "(\w+)"', re.sub(r'kernel_data = ".*?[^\\]"', "", text, flags=re.S))
        assert names == ["forward", "delta", "key_gradients", "query_gradients"]
        tables = [int(n) for n in re.findall(r"stablehlo.constant dense.*tensor<(\d+)xi32>", text)]
        assert 2 <= len(tables) <= 3 and max(tables) < 64 * 64
        assert "4096x4096" not in text
    check = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.ptx")
    exported = jax.export.export(jax.jit(gradients), platforms=["cuda"], disabled_checks=[check])(shapes)
    assert jax.export.deserialize(exported.serialize()).platforms == ("cuda",)
