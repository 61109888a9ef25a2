"""Values that contradict a call: an error at once where they are known, in the program where checks are asked for."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from vishwamai import (
    ShapeError,
    block_sparse_matmul,
    grouped_gemm,
    kernel_config,
    moe_dispatch,
    moe_routing,
    ragged_paged_attention,
    update_pages,
)


@pytest.fixture(autouse=True)
def nothing_is_left_for_the_interpreters_end():
    """JAX waits there for the last program with a callback of each device, and prints the error of one that failed."""
    yield
    jax.effects_barrier()


def fails_in_program(call, match, wrong, right):
    """With checks, the jitted call raises for the wrong arguments, and goes on to serve the right ones; its result."""
    with kernel_config(checks=True):
        run = jax.jit(call)
        with pytest.raises(Exception, match=match):
            jax.block_until_ready(run(*wrong))
        return jax.block_until_ready(run(*right))


ROWS, EXPERTS = jnp.ones((6, 4)), jnp.ones((3, 4, 5))

TABLES = {"kv_lens": [6, 3], "page_indices": [[5, 2], [7, 0]], "cu_q_lens": [0, 1, 4], "num_seqs": [2]}


def arrays(**changed):
    return {name: jnp.asarray(x, jnp.int32) for name, x in {**TABLES, **changed}.items()}


def attend(tables, max_q_len=None):
    return ragged_paged_attention(jnp.ones((4, 2, 16)), jnp.ones((8, 4, 2, 16)), **tables, max_q_len=max_q_len)


def update(tables):
    return update_pages(jnp.ones((8, 4, 2, 16)), jnp.ones((4, 1, 16)), jnp.ones((4, 1, 16)), **tables)


BAD_TABLES = [
    ({"num_seqs": [3]}, "`num_seqs` is 3, but `page_indices` has 2 rows"),
    ({"num_seqs": [-1]}, "`num_seqs` is -1"),
    ({"cu_q_lens": [1, 2, 4]}, r"`cu_q_lens` has 1 at \[0\].* from 0 on"),
    ({"cu_q_lens": [0, 3, 2]}, r"`cu_q_lens` has 2 at \[2\].* never decrease"),
    ({"cu_q_lens": [0, 1, 5]}, "`cu_q_lens` ends with 5 .* there are 4 tokens"),
    ({"kv_lens": [9, 3]}, r"`kv_lens` has 9 at \[0\]; pass a length to 8"),
    ({"kv_lens": [6, 2]}, r"`kv_lens` has 2 at \[1\]; pass a length from 3, its new tokens, to 8"),
    ({"kv_lens": [-1, 3]}, r"`kv_lens` has -1 at \[0\]"),
    ({"page_indices": [[5, 8], [7, 0]]}, r"`page_indices` has 8 at \[0, 1\].* from 0 to 7"),
    ({"page_indices": [[-1, 2], [7, 0]]}, r"`page_indices` has -1 at \[0, 0\]"),
]


@pytest.mark.turns(3)
@pytest.mark.parametrize("changed, text", BAD_TABLES)
@pytest.mark.parametrize("call", [attend, update])
def test_tables(call, changed, text):
    tables = arrays(**changed)
    with pytest.raises(ShapeError, match=text):
        call(tables)
    jax.block_until_ready(jax.jit(call)(tables))  # unchecked: no promise but to end
    fails_in_program(call, text, (tables,), (arrays(),))


@pytest.mark.parametrize("changed, text", BAD_TABLES)
@pytest.mark.parametrize("call", ["ragged_paged_attention", "update_pages"])
def test_tables_of_torch(call, changed, text):
    torch = pytest.importorskip("torch")
    vt = pytest.importorskip("vishwamai.torch")
    pages = torch.ones(8, 4, 2, 16)
    rows: dict[str, tuple[Any, ...]] = {"ragged_paged_attention": (torch.ones(4, 2, 16), pages)}
    rows["update_pages"] = (pages, torch.ones(4, 1, 16), torch.ones(4, 1, 16))
    run = getattr(vt, call)
    tables = {name: torch.tensor(x, dtype=torch.int32) for name, x in {**TABLES, **changed}.items()}
    with pytest.raises(ShapeError, match=text):
        run(*rows[call], **tables)
    if "num_seqs" not in changed:  # all sequences count
        with pytest.raises(ShapeError, match=text):
            run(*rows[call], **{**tables, "num_seqs": None})
    assert (pages == 1).all()
    run(*rows[call], **{name: torch.tensor(x, dtype=torch.int32) for name, x in TABLES.items()})


def test_numbers_in_tensors():
    torch = pytest.importorskip("torch")
    vt = pytest.importorskip("vishwamai.torch")
    rows, experts = torch.ones(6, 4), torch.ones(3, 4, 5)
    for sizes, text in (([2, -1, 3], r"holds -1 at \[1\]"), ([2, 2, 3], "adds up to 7, but `lhs` has 6 rows")):
        with pytest.raises(ShapeError, match=text):
            vt.grouped_gemm(rows, experts, torch.tensor(sizes))
    assert (vt.grouped_gemm(rows, experts, torch.tensor([1, 2, 3])) == 4).all()
    with pytest.raises(ShapeError, match=r"`labels` holds 9 at \[1\] \(of 2 such\), but the vocab is 8"):
        vt.linear_cross_entropy(torch.ones(3, 4), torch.ones(8, 4), torch.tensor([-100, 9, -1]))
    routing = vt.moe_routing(rows, torch.ones(4, 3))
    with pytest.raises(ShapeError, match="`routing.experts` holds 4"):
        vt.moe_dispatch(rows, routing._replace(experts=routing.experts + 4))


def test_the_promise_of_max_q_len():
    with pytest.raises(ShapeError, match="`max_q_len` is 2, but sequence 1 has 3 tokens"):
        attend(arrays(), max_q_len=2)
    attend(arrays(), max_q_len=3)


@pytest.mark.turns(3)
def test_what_is_never_read_may_hold_anything():
    garbage = {"kv_lens": [3, -7], "page_indices": [[5, -99], [99, 99]], "cu_q_lens": [0, 1, -5], "num_seqs": [1]}
    with kernel_config(checks=True):
        for call in (attend, update, jax.jit(attend), jax.jit(update)):
            jax.block_until_ready(call(arrays(**garbage)))
        jax.block_until_ready(attend(arrays(num_seqs=[0], cu_q_lens=[7, 7, 7])))


@pytest.mark.parametrize(
    "sizes, text", [([2, -1, 3], r"`group_sizes` holds -1 at \[1\]"), ([2, 2, 3], "adds up to 7, but `lhs` has 6 rows")]
)
def test_group_sizes(sizes, text):
    sizes = jnp.array(sizes)
    with pytest.raises(ShapeError, match=text):
        grouped_gemm(ROWS, EXPERTS, sizes)
    fails_in_program(grouped_gemm, text, (ROWS, EXPERTS, sizes), (ROWS, EXPERTS, jnp.array([1, 2, 3])))
    jax.block_until_ready(jax.jit(grouped_gemm)(ROWS, EXPERTS, sizes))


@pytest.mark.turns(3)
def test_experts_of_a_dispatch():
    tokens = jnp.ones((2, 4))
    right = moe_routing(tokens, jnp.ones((4, 3)), top_k=2)

    def dispatch(experts):
        return moe_dispatch(tokens, right._replace(experts=experts))

    wrong = jnp.array([[0, 1], [7, 2]], jnp.int32)
    text = r"`routing.experts` holds 7 at \[1, 0\], but there are 3 experts; pass numbers from 0 to 2"
    with pytest.raises(ShapeError, match=text):
        dispatch(wrong)
    assert fails_in_program(dispatch, text, (wrong,), (right.experts,)).group_sizes.sum() == 4
    jax.block_until_ready(jax.jit(dispatch)(wrong))


@pytest.mark.parametrize(
    "wrong, text",
    [([[0, 1], [2, 0]], "the block row 2, but there are 2; pass 0 to 1"), ([[0, -1], [1, 0]], "the block column -1")],
)
def test_traced_places_of_blocks(wrong, text):
    dense, values = jnp.ones((3, 4)), jnp.ones((2, 2, 2))

    def product(indices):
        return block_sparse_matmul(dense, values, indices, shape=(4, 4))

    wrong, right = jnp.array(wrong), jnp.array([[0, 1], [1, 0]])
    assert (fails_in_program(product, text, (wrong,), (right,)) == 2).all()
    jax.block_until_ready(jax.jit(product)(wrong))  # clipped


def loss(sizes):
    return jnp.sum(grouped_gemm(ROWS, EXPERTS, sizes))


@pytest.mark.turns(6)
@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("transform", ["scan", "vmap", "grad", "remat", "shard_map"])
def test_checks_compose(transform, wrong, checks):
    """The check is a callback of the program, which every transform takes."""
    right = jnp.array([[1, 2, 3], [2, 2, 2]])
    sizes = jnp.array([[1, 2, 3], [2, 2, 3]]) if wrong else right

    if transform == "scan":
        run = lambda s: jax.lax.scan(lambda c, s: (c + loss(s), None), 0.0, s)[0]  # noqa: E731
    elif transform == "vmap":
        run = jax.vmap(loss)
    elif transform == "grad":
        run = lambda s: jax.grad(lambda x: jnp.sum(grouped_gemm(x, EXPERTS, s[1])))(ROWS)  # noqa: E731
    elif transform == "remat":
        run = lambda s: jax.grad(jax.checkpoint(lambda x: jnp.sum(grouped_gemm(x, EXPERTS, s[1]))))(ROWS)  # noqa: E731
    else:
        mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        run = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(lambda s: loss(s[0])[None])
    if wrong and checks:
        assert np.isfinite(fails_in_program(run, "adds up to 7", (sizes,), (right,))).all()
    else:
        with kernel_config(checks=checks):
            assert np.isfinite(jax.jit(run)(sizes)).all()
    text = jax.jit(run).lower(sizes).as_text()
    assert "callback" not in text  # without checks nothing of them is in the program
