"""The grouped product in Triton and for torch tensors, beyond the contract: tiles, sizes that do not add up, torch's
own machinery.

Run as they are, the tensors on the CPU are served by the native kernels; under TRITON_INTERPRET=1 (`make test-gpu`) by
the Triton kernels, interpreted.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import contract  # noqa: E402
import rotation  # noqa: E402
import vishwamai.torch as vt  # noqa: E402
from triton_kernels import from_numpy, to_numpy, triton_serves  # noqa: E402
from vishwamai.core.cases import qtensor_of_bytes  # noqa: E402
from vishwamai.core.errors import ShapeError, UnsupportedError  # noqa: E402
from vishwamai.core.qtensor import FORMATS, QTensor, bits  # noqa: E402
from vishwamai.ops.moe import grouped_gemm  # noqa: E402
from vishwamai.ops.moe.gpu import GroupedGpuConfig  # noqa: E402

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning")]
only_triton = pytest.mark.skipif(not contract.TRITON, reason="needs a process of its own: make test-gpu")


@pytest.fixture(autouse=True)
def kernels():
    with triton_serves() if contract.TRITON else contextlib.nullcontext():
        yield


def tensors(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def by_loops(lhs, rhs, sizes):
    """The definition, a product for each group; sizes beyond the rows there are count as cut off."""
    if lhs.dim() > 2:
        rhs = rhs if rhs.dim() > 3 else [rhs] * len(lhs)
        sizes = sizes if sizes.dim() > 1 else [sizes] * len(lhs)
        return torch.stack([by_loops(x, w, n) for x, w, n in zip(lhs, rhs, sizes, strict=True)])
    ends = [min(int(n), len(lhs)) for n in sizes.cumsum(0)]
    parts = [lhs[a:b] @ w for a, b, w in zip([0, *ends], ends, rhs, strict=False)]
    return torch.cat([*parts, lhs[ends[-1] :, :1] * torch.zeros(rhs.shape[-1])])


def agree(function, reference, args, tolerance=2e-5):
    got, want = function(*args), reference(*args)
    assert got.dtype == want.dtype and got.shape == want.shape
    weight = torch.linspace(-1, 1, got.numel()).reshape(got.shape).to(got.dtype)
    pairs = zip(
        (got, *torch.autograd.grad(got, args, weight)), (want, *torch.autograd.grad(want, args, weight)), strict=True
    )
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype and (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


# name: (lhs, rhs, sizes)
CALLS = {
    "ragged": ((37, 20), (4, 20, 24), [5, 0, 19, 8]),
    "more than there are": ((20, 16), (3, 16, 8), [5, 30, 7]),
    "shared by a batch": ((2, 20, 16), (2, 16, 8), [[3, 17], [12, 0]]),
    "a batch of both": ((2, 9, 16), (2, 2, 16, 8), [4, 3]),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=rotation.one_in(4, i)) for i, name in enumerate(CALLS)])
def test_values_and_gradients(name):
    lhs, rhs, sizes = CALLS[name]
    sizes = torch.tensor(sizes)
    args = tensors(lhs, rhs)
    if name == "more than there are" and not contract.TRITON:  # whose values a GPU's host does not read
        with pytest.raises(ShapeError, match="adds up to 42, but `lhs` has 20 rows"):
            vt.grouped_gemm(args[0], args[1], sizes)
        return
    agree(lambda x, w: vt.grouped_gemm(x, w, sizes), lambda x, w: by_loops(x, w, sizes), args)


def test_an_empty_group_and_rows_without_one_have_gradients_of_zero():
    lhs, rhs = tensors((12, 16), (3, 16, 8))
    out = vt.grouped_gemm(lhs, rhs, torch.tensor([4, 0, 5]))
    of_lhs, of_rhs = torch.autograd.grad(out.sum(), (lhs, rhs))
    assert (out[9:] == 0).all() and (of_lhs[9:] == 0).all() and (of_rhs[1] == 0).all()
    assert (of_rhs[0] != 0).all() and (of_lhs[:9] != 0).all()


# Those that tensors hold: torch has no numbers of 4 bits. The Triton kernels decline what they decline in JAX.
DECLINED = contract.OPERATIONS["grouped_gemm"].facts.declines["triton"] if contract.TRITON else ()
CONTRACT = [
    case
    for case in contract.OPERATIONS["grouped_gemm"].cases
    if case.name not in DECLINED and bits(FORMATS[case.options.get("format", "int8")].dtype) == 8
]


@pytest.mark.parametrize("case", rotation.in_turn(4, CONTRACT), ids=contract.label)
def test_contract_of_tensors(case):
    """The contract's own cases, of tensors: out_dtype, quantized matrices, `group_offset`; forward and gradients."""
    given, options = case.make(), {k: v for k, v in case.options.items() if k not in ("format", "block_size", "config")}
    leaves = {k: from_numpy(x).requires_grad_(k in case.differentiable) for k, x in given.items()}
    if (dtype := options.get("out_dtype")) is not None:
        options["out_dtype"] = getattr(torch, dtype)
    if "format" in case.options:
        format, block = case.options["format"], case.options["block_size"]
        held = qtensor_of_bytes(given["weight"], given["scales"], format, -2, block)
        made: Any = vt.QTensor  # of tensors, where the fields' types are JAX's
        rhs = made(*(from_numpy(np.asarray(x)) for x in (held.values, held.scales)), held.format, -2, block)
    else:
        rhs = leaves["rhs"]
    out = vt.grouped_gemm(leaves["lhs"], rhs, torch.tensor(options.pop("group_sizes")), **options)
    (cotangent,) = jax.tree.leaves(contract.cotangents_for(case, contract.output_shapes(case)))
    names = case.differentiable
    found = torch.autograd.grad(out, [leaves[k] for k in names], from_numpy(cotangent), materialize_grads=True)
    gradients = {k: to_numpy(g, given[k].dtype) for k, g in zip(names, found, strict=True)}
    got = to_numpy(out.detach(), cotangent.dtype), gradients
    contract.check_all(got, contract.truth(case), contract.by_reference(case))


@pytest.mark.parametrize(
    ("out_dtype", "turned"), [("float32", False), pytest.param(None, True, marks=pytest.mark.long)]
)
def test_opcheck(out_dtype, turned):
    lhs, rhs = tensors((8, 16), (2, 12, 16) if turned else (2, 16, 12))
    first = None if out_dtype is None else torch.tensor(1, dtype=torch.int32)
    arguments = (lhs, rhs, torch.tensor([3, 4]), None, first, out_dtype, 0, turned)
    assert set(torch.library.opcheck(torch.ops.vishwamai.grouped_gemm.default, arguments).values()) == {"SUCCESS"}


@only_triton
def test_compiles_in_one_graph_with_sizes_that_it_computes():
    chosen = torch.tensor([0, 0, 2, 2, 2, 1])

    def model(product):
        return lambda lhs, rhs: product(lhs * 2, rhs, (chosen[:, None] == torch.arange(3)).sum(0)).sin()

    fast = torch.compile(model(vt.grouped_gemm), fullgraph=True, backend="aot_eager")
    agree(fast, model(by_loops), tensors((8, 16), (3, 16, 8)))


@pytest.mark.turns(4)
def test_an_offset_compiles_in_one_graph_as_a_number_and_as_a_tensor():
    sizes = torch.tensor([3, 0, 4, 1])

    def model(lhs, rhs, offset):
        return vt.grouped_gemm(lhs * 2, rhs, sizes, group_offset=offset).sin()

    torch._dynamo.reset()
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    args = tensors((8, 16), (2, 16, 8))
    for offset in (0, 1, torch.tensor(2)):
        agree(lambda x, w, o=offset: fast(x, w, o), lambda x, w, o=offset: model(x, w, o), args, tolerance=0)


def test_a_mapped_offset():
    """Each element has other groups; a tensor out of range is clamped."""
    lhs, rhs = (x.detach() for x in tensors((8, 16), (2, 16, 8)))
    sizes = torch.tensor([3, 0, 4, 1])
    whole = [torch.cat([torch.zeros(o, 16, 8), rhs, torch.zeros(2 - o, 16, 8)]) for o in range(3)]
    got = torch.vmap(lambda o: vt.grouped_gemm(lhs, rhs, sizes, group_offset=o))(torch.tensor([0, 2, 1, 9, -3]))
    for out, at in zip(got, (0, 2, 1, 2, 0), strict=True):
        assert (out - by_loops(lhs, whole[at], sizes)).abs().max() < 1e-5


@pytest.mark.long
def test_vmap_is_the_elements_one_by_one():
    lhs, rhs = (x.detach() for x in tensors((3, 9, 16), (2, 16, 8)))
    sizes = torch.tensor([[1, 8], [0, 4], [9, 0]])
    got = torch.vmap(vt.grouped_gemm, (0, None, 0))(lhs, rhs, sizes)
    assert (got - by_loops(lhs, rhs, sizes)).abs().max() < 1e-5


def test_errors():
    with pytest.raises(ShapeError, match="`group_sizes` has dtype float32"):
        vt.grouped_gemm(torch.ones(2, 3), torch.ones(1, 3, 4), torch.ones(1))
    lhs, rhs, sizes = torch.ones(4, 32), torch.ones(2, 32, 8), torch.tensor([1, 0, 3])
    with pytest.raises(ShapeError, match="`group_offset` is 2, but `rhs` has .* 2 of 3 groups; pass 0 to 1"):
        vt.grouped_gemm(lhs, rhs, sizes, group_offset=2)
    word: Any = "one"
    with pytest.raises(ShapeError, match="`group_offset` is 'one', of type str; pass an integer"):
        vt.grouped_gemm(lhs, rhs, sizes, group_offset=word)
    with pytest.raises(ShapeError, match=r"`group_offset` is int64 of shape \(1,\); pass one integer"):
        vt.grouped_gemm(lhs, rhs, sizes, group_offset=torch.tensor([1]))
    with pytest.raises(ShapeError, match=r"`rhs` \(2, 32, 8\) and `group_sizes` \(1,\); with `group_offset` pass"):
        vt.grouped_gemm(lhs, rhs, sizes[:1], group_offset=0)


@only_triton
def test_tiles_and_programs_change_nothing_but_speed():
    """Tiles of unlike edges, one so wide that it is stored by halves; the same bits however many programs share the
    work.
    """
    (case,) = (case for case in contract.OPERATIONS["grouped_gemm"].cases if case.name == "groups of any size float32")
    (triton,) = (impl for impl in contract.OPERATIONS["grouped_gemm"].op.implementations if impl.platform == "cuda")
    one, five = (
        contract.evaluate(
            case,
            triton,
            config=GroupedGpuConfig(16, 32, 32, 4, 2, 64, 16, 16, 4, 3, 32, 256, 16, 8, 3, 2, programs),
        )
        for programs in (1, 5)
    )
    contract.check_all(one, contract.truth(case), contract.by_reference(case))
    np.testing.assert_array_equal(one[0], five[0])
    for name in one[1]:
        np.testing.assert_array_equal(one[1][name], five[1][name])


@only_triton
def test_many_small_groups():
    """More groups than rows: most are empty, and the walk finds each row's own."""
    rng = np.random.default_rng(0)
    lhs, rhs = rng.standard_normal((20, 16)).astype("float32"), rng.standard_normal((70, 16, 16)).astype("float32")
    owner = np.sort(rng.choice(70, 18))
    sizes = np.bincount(owner, minlength=70).astype(np.int32)
    got = np.asarray(grouped_gemm(*map(jnp.asarray, (lhs, rhs, sizes)), implementation="triton"))
    np.testing.assert_allclose(got[:18], np.einsum("mk,mkn->mn", lhs[:18], rhs[owner]), rtol=1e-4, atol=1e-4)
    assert (got[18:] == 0).all()


@pytest.mark.parametrize(
    "format, block_size",
    [("int8", None), ("fp8", 16), pytest.param("mxfp8", None, marks=pytest.mark.long)],
)
def test_a_quantized_rhs(format, block_size):
    """The product of the dequantized matrices, and the gradient of the rows."""
    lhs, rhs = tensors((20, 64), (3, 64, 24))
    q = vt.quantize(rhs, format, axis=-2, block_size=block_size)
    sizes = torch.tensor([5, 0, 9])
    weights = vt.dequantize(q)
    agree(lambda x: vt.grouped_gemm(x, q, sizes), lambda x: by_loops(x, weights, sizes), [lhs])


def test_what_the_kernels_decline():
    odd = [jax.ShapeDtypeStruct(s, d) for s, d in (((8, 16), "float32"), ((2, 16, 7), "int4"), ((2, 1, 7), "float32"))]

    def of_odd_rows(x, values, scales):
        rhs = QTensor(values, scales, "int4", -2, None)
        return grouped_gemm(x, rhs, jnp.array([3, 5], jnp.int32), implementation="triton")

    with pytest.raises(UnsupportedError, match="rows of 7 numbers of 4 bits"):
        jax.eval_shape(of_odd_rows, *odd)
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((8, 16), (5000, 16, 8))]
    with pytest.raises(UnsupportedError, match="5,000 groups"):
        jax.eval_shape(lambda x, w: grouped_gemm(x, w, jnp.zeros(5000, jnp.int32), implementation="triton"), *shapes)
