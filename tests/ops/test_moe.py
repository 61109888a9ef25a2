"""Mixture of experts: the grouped product beyond the contract suite, routing, dispatch, and the layer on one and on
eight devices.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import contract
import rotation
from ragged import gathered_ragged_all_to_all
from vishwamai import grouped_gemm, moe_combine, moe_dispatch, moe_layer, moe_routing, pack_weight, quantize
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.ops.moe import tpu_visits as visits
from vishwamai.ops.moe.tpu_tiles import GroupedConfig, GroupedTile

ROUTING_OPTIONS = ("num_experts", "top_k", "scoring", "num_groups", "top_groups", "scale", "jitter")
routed = jax.jit(moe_routing, static_argnames=ROUTING_OPTIONS)


def draw(*shape, seed=0, scale=1.0) -> Any:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def by_group(lhs, rhs, sizes):
    """The definition, a group at a time, in float64."""
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    start = 0
    for matrix, size in zip(rhs.astype(np.float64), sizes, strict=True):
        out[start : start + size] = lhs[start : start + size].astype(np.float64) @ matrix
        start += size
    return out


@functools.cache
def with_gradients(product):
    def run(lhs, rhs, sizes, cotangent):
        out, pull = jax.vjp(lambda a, b: product(a, b, sizes), lhs, rhs)
        return out, *pull(cotangent)

    return jax.jit(run)


@pytest.mark.parametrize("sizes", [[3, 0, 20, 7], [0, 0, 0, 0], [40, 0, 0, 0], [0, 0, 0, 40], [1, 1, 1, 1]], ids=str)
def test_meaning_is_that_of_ragged_dot(sizes):
    """Values and both gradients, empty groups and rows without one; the default path takes the explicit backward
    pass.
    """
    lhs, rhs, sizes = draw(40, 12), draw(4, 12, 9, seed=1), np.array(sizes, np.int32)
    cotangent = draw(40, 9, seed=2)
    ours = with_gradients(grouped_gemm)(lhs, rhs, sizes, cotangent)
    theirs = with_gradients(jax.lax.ragged_dot)(lhs, rhs, sizes, cotangent)
    np.testing.assert_allclose(ours[0], by_group(lhs, rhs, sizes), atol=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


SMALL, DEEP = GroupedTile(128, 128, 128, 64, 16, 64), GroupedTile(256, 128, 512, 128, 32, 128)
TILES, WHOLE_DEPTH = GroupedConfig(SMALL, SMALL, SMALL), GroupedConfig(DEEP, DEEP, DEEP)
AHEAD = GroupedTile(256, 128, 512, 128, 32, 128, matrix_buffers=3)
TWO_AHEAD = GroupedConfig(AHEAD, AHEAD, DEEP)


@functools.cache
def of_any_size(implementation, config, width=256):
    """Result and gradients of groups that begin and end anywhere in a tile, share one, span several, or are empty; two
    batch entries of different sizes.
    """
    lhs, rhs = draw(2, 300, width), draw(2, 6, width, width, seed=1)
    sizes = jnp.array([[100, 0, 77, 1, 20, 60], [0, 290, 0, 3, 7, 0]], jnp.int32)
    cotangent = draw(2, 300, width, seed=2)

    @jax.jit
    def run(lhs, rhs):
        out, pull = jax.vjp(
            lambda *a: grouped_gemm(a[0], a[1], sizes, implementation=implementation, config=config), lhs, rhs
        )
        return out, pull(cotangent)

    return jax.block_until_ready(run(lhs, rhs))


@pytest.mark.turns(6)
@pytest.mark.parametrize(
    ("config", "width"),
    [(TILES, 256), (WHOLE_DEPTH, 256), (TWO_AHEAD, 256), (TWO_AHEAD, 200), (WHOLE_DEPTH, 120)],
    ids=["tiles", "whole depth", "two matrices ahead", "a depth that no register divides", "one piece of the depth"],
)
def test_kernel_with_groups_of_any_size(config, width):
    """Blocks of the depth, or the matrices copied ahead."""
    with contract.simulated_tpu():
        got = of_any_size("pallas_tpu", config, width)
    contract.close(got, of_any_size("xla", None, width), 1e-5)


@pytest.mark.turns(3)
def test_kernel_keeps_garbage_of_other_groups_out():
    """NaN in a group's rows stays in its rows, its own matrix' gradient, and nowhere else, though groups share
    tiles.
    """
    lhs, rhs = draw(64, 128), draw(3, 128, 128, seed=1)
    sizes = jnp.array([20, 21, 10], jnp.int32)
    lhs[20:41] = np.nan
    with contract.simulated_tpu():

        @jax.jit
        def run(a, b):
            out, pull = jax.vjp(lambda *x: grouped_gemm(x[0], x[1], sizes, implementation="pallas_tpu"), a, b)
            return out, pull(a)

        out, (_, d_rhs) = jax.block_until_ready(run(lhs, rhs))
        finite = np.isfinite(np.asarray(out)).all(axis=1)
    assert (finite == ~((np.arange(64) >= 20) & (np.arange(64) < 41))).all()
    assert [bool(np.isfinite(np.asarray(g)).all()) for g in d_rhs] == [True, False, True]


@pytest.mark.parametrize("every_group", [False, True])
def test_visits_cover_every_row_once(every_group):
    """Over random sizes: each row of a group is computed once with its group, and each tile is visited in one run."""
    rng = np.random.default_rng(0)
    for groups, m, block in ((5, 150, 32), (7, 64, 16), (1, 20, 32)):
        plan = jax.jit(functools.partial(visits.plan, m=m, block_m=block, every_group=every_group))
        for i in range(20):
            check_visits(plan, rng, groups, m, block, every_group, i % 2 == 1)


def check_visits(plan, rng, groups, m, block, every_group, offset):
    """`offset`: rows of other groups come first."""
    sizes = rng.multinomial(rng.integers(0, m + 1), np.ones(groups + 1) / (groups + 1))[:groups].astype(np.int32)
    first = int(rng.integers(0, m - sizes.sum() + 1)) if offset else 0
    found = plan(sizes[None], np.array([first], np.int32) if offset else None)
    group, tile, start, stop, following = (np.asarray(x)[: int(found.count[0])] for x in found[:5])
    owner = np.full(m + block, -1)
    for g, t, a, b in zip(group, tile, start, stop, strict=True):
        assert (owner[t * block + a : t * block + b] == -1).all()
        owner[t * block + a : t * block + b] = g
    last = first + sizes.sum()
    np.testing.assert_array_equal(owner[first:last], np.repeat(np.arange(groups), sizes))
    assert (owner[:first] == -1).all() and (owner[last:] == -1).all()
    assert (np.diff(group) >= 0).all() and (np.diff(tile) >= 0).all()
    if every_group:
        assert set(group) == set(range(groups))
    else:
        assert set(tile) == set(range(-(-m // block)))
        later = [group[i:][group[i:] != g] for i, g in enumerate(group)]
        np.testing.assert_array_equal(following, [x[0] if len(x) else -1 for x in later])


@pytest.mark.turns(3)
def test_parts_of_the_groups_add_up():
    """Each device has two of the groups' matrices and all rows; offsets are traced."""
    lhs, rhs, sizes = draw(40, 8), draw(16, 8, 5, seed=1), np.arange(16, dtype=np.int32) % 4
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Explicit,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("x"), P()), out_specs=P())
    def part(lhs, rhs, sizes):
        offset = 2 * jax.lax.axis_index("x")
        return jax.lax.psum(grouped_gemm(lhs, rhs, sizes, group_offset=offset), "x")

    def total(lhs, rhs):
        out = part(lhs, jax.sharding.reshard(rhs, P("x")), sizes)
        return out.sum(), out

    with jax.set_mesh(mesh):
        (d_lhs, d_rhs), out = jax.jit(jax.grad(total, (0, 1), has_aux=True))(lhs, rhs)
    np.testing.assert_allclose(out, by_group(lhs, rhs, sizes), atol=1e-5)
    expected = jax.grad(lambda lhs, rhs: jax.lax.ragged_dot(lhs, rhs, jnp.asarray(sizes)).sum(), (0, 1))(lhs, rhs)
    np.testing.assert_allclose(d_lhs, expected[0], atol=1e-5)
    np.testing.assert_allclose(d_rhs, expected[1], atol=1e-5)


@pytest.mark.turns(3)
def test_what_group_offset_and_quantized_weights_demand():
    lhs, sizes = jnp.ones((4, 32)), jnp.array([1, 0, 3])
    weights = jnp.ones((2, 32, 8))
    with pytest.raises(
        ShapeError, match="`group_offset` is 2, but `rhs` has the weights of 2 of 3 groups; pass 0 to 1"
    ):
        grouped_gemm(lhs, weights, sizes, group_offset=2)
    with pytest.raises(ShapeError, match="pass one integer"):
        grouped_gemm(lhs, weights, sizes, group_offset=jnp.array([1]))
    with pytest.raises(ShapeError, match="quantize it with axis=-2"):
        grouped_gemm(lhs, quantize(weights, "int8", axis=-1), sizes[:2])
    with pytest.raises(UnsupportedError, match="grouped_gemm: `rhs` is a QTensor.*have no gradient"):
        q = quantize(weights, "fp8", axis=-2)
        jax.grad(lambda q: grouped_gemm(lhs, q, sizes[:2]).sum())(q)


@pytest.mark.turns(4)
@pytest.mark.parametrize("pack", [False, True], ids=["QTensor", "packed"])
def test_layer_of_quantized_experts(pack):
    """The layer of the dequantized experts; packed ones round the rows too."""
    tokens, router = jnp.asarray(draw(20, 32)), jnp.asarray(draw(32, 3, seed=1))
    shapes = ((3, 32, 16), (3, 32, 16), (3, 16, 32))
    weights = [quantize(draw(*s, seed=i, scale=0.2), "int8", axis=-2, block_size=16) for i, s in enumerate(shapes)]
    given = [pack_weight(w) if pack else w for w in weights]
    out = jax.jit(lambda *w: moe_layer(tokens, router, *w).out)(*given)
    expected = jax.jit(lambda *w: moe_layer(tokens, router, *w).out)(*(w.dequantize() for w in weights))
    np.testing.assert_allclose(out, expected, atol=0.05 if pack else 1e-5)


@pytest.mark.turns(3)
def test_vmap_of_sizes_and_second_order():
    lhs, rhs, sizes = draw(30, 8), draw(3, 8, 5, seed=1), np.array([[10, 0, 20], [0, 7, 2]], np.int32)
    got = jax.jit(jax.vmap(lambda s: grouped_gemm(lhs, rhs, s)))(sizes)
    for out, one in zip(got, sizes, strict=True):
        np.testing.assert_allclose(out, by_group(lhs, rhs, one), atol=1e-5)

    def norm(a, b):
        return jnp.sum(jnp.sin(grouped_gemm(a, b, sizes[0])))

    def plain(a, b):
        return jnp.sum(jnp.sin(jax.lax.ragged_dot(a, b, sizes[0])))

    ours, theirs = (
        jax.jit(jax.grad(lambda a, b, f=f: jnp.sum(jax.grad(f)(a, b) ** 2), 1))(lhs, rhs) for f in (norm, plain)
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    forward = jax.jvp(lambda a: grouped_gemm(a, rhs, sizes[0], implementation="xla"), (lhs,), (lhs,))[1]
    np.testing.assert_allclose(forward, by_group(lhs, rhs, sizes[0]), atol=1e-5)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (
            (np.ones((4, 3)), np.ones((2, 5, 6)), np.ones(2, int)),
            r"`rhs` has shape \(2, 5, 6\), but `lhs` has k = 3 in its last axis; pass `rhs` of shape \(groups, 3, n\)",
        ),
        ((np.ones((4, 6)), np.ones((2, 5, 6)), np.ones(2, int)), r"`lhs` has k = 6 .* pass `rhs.swapaxes\(-1, -2\)`"),
        (
            (np.ones((4, 5)), np.ones((2, 5, 6)), np.ones(3, int)),
            r"`group_sizes` has shape \(3,\).* has 2 groups.* pass .* \(2,\)",
        ),
        ((np.ones((4, 5)), np.ones((2, 5, 6)), np.ones(2)), r"`group_sizes` has dtype float32; pass integers"),
        ((np.ones((4, 5), np.int32), np.ones((2, 5, 6)), np.ones(2, int)), r"`lhs` has dtype int32"),
        ((np.ones((4, 5)), np.ones((2, 5, 6), jnp.bfloat16), np.ones(2, int)), r"rhs.astype\(float32\)"),
        (
            (np.ones((3, 4, 5)), np.ones((2, 2, 5, 6)), np.ones(2, int)),
            r"`rhs` has shape \(2, 2, 5, 6\), but `lhs` has the batch axes \(3,\); pass .* \(3, groups, 5, n\), or",
        ),
    ],
)
def test_errors_of_grouped_gemm(arguments, text):
    with pytest.raises(ShapeError, match=f"grouped_gemm: .*{text}"):
        grouped_gemm(*arguments)


def test_routing_of_softmax_scores():
    tokens, router = draw(50, 6), draw(6, 8, seed=1)
    routing = jax.device_get(routed(tokens, router, num_experts=8, top_k=3))
    logits = tokens.astype(np.float64) @ router
    scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    experts = np.argsort(-scores, axis=1)[:, :3]
    np.testing.assert_array_equal(routing.experts, experts)
    best = np.take_along_axis(scores, experts, 1)
    np.testing.assert_allclose(routing.weights, best / best.sum(1, keepdims=True), rtol=1e-5)
    counts = np.bincount(experts.ravel(), minlength=8)
    np.testing.assert_array_equal(routing.expert_counts, counts)
    np.testing.assert_allclose(routing.load_balance_loss, 8 * np.sum(counts / 150 * scores.mean(0)), rtol=1e-5)
    np.testing.assert_allclose(routing.z_loss, np.mean(np.log(np.exp(logits).sum(1)) ** 2), rtol=1e-5)


def test_routing_as_deepseek_v3():
    """Sigmoid scores; the bias and the groups decide who is chosen, and the weights are the scores without the bias."""
    tokens, router, bias = draw(40, 6), draw(6, 8, seed=1), draw(8, seed=2)
    options = {"scoring": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5}
    routing = jax.device_get(routed(tokens, router, top_k=2, bias=bias, **options))
    scores = 1 / (1 + np.exp(-(tokens.astype(np.float64) @ router)))
    for token in range(40):
        biased = scores[token] + bias
        groups = np.argsort(-biased.reshape(4, 2).sum(1))[:2]
        allowed = [e for e in range(8) if e // 2 in groups]
        experts = sorted(allowed, key=lambda e: -biased[e])[:2]
        assert routing.experts[token].tolist() == experts
        np.testing.assert_allclose(
            routing.weights[token], 2.5 * scores[token, experts] / scores[token, experts].sum(), rtol=1e-5
        )
    gradient = jax.grad(lambda b: routed(tokens, router, scoring="sigmoid", bias=b).weights[:, 0].sum())(bias)
    assert (gradient == 0).all()
    assert routed(tokens, router, top_k=1, bias=np.where(np.arange(8) == 5, 9.0, 0.0)).expert_counts[5] == 40


def test_losses_grow_with_imbalance_and_reach_the_router():
    tokens = draw(64, 6) + 3.0
    even = routed(tokens, np.zeros((6, 4), np.float32), top_k=4)
    np.testing.assert_allclose(even.load_balance_loss, 1.0, rtol=1e-6)
    skewed = np.zeros((6, 4), np.float32)
    skewed[:, 1] = 5.0
    np.testing.assert_allclose(routed(tokens, skewed, top_k=1).load_balance_loss, 4.0, rtol=1e-3)
    for loss in ("load_balance_loss", "z_loss"):
        gradient = jax.grad(lambda w, loss=loss: getattr(routed(tokens, w, top_k=1), loss))(0.1 * skewed)
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 1e-4


def test_jitter_is_a_function_of_the_key():
    tokens, router = draw(64, 6), draw(6, 4, seed=1)
    once, again, other = (routed(tokens, router, jitter=0.3, key=jax.random.key(seed)).weights for seed in (0, 0, 1))
    np.testing.assert_array_equal(once, again)
    assert np.abs(once - other).max() > 1e-3


@pytest.mark.parametrize(
    "options, text",
    [
        ({"num_experts": 5}, "`num_experts` is 5.* 4 columns"),
        ({"top_k": 5}, "`top_k` is 5; pass a number from 1 to the 4"),
        ({"scoring": "relu"}, "`scoring` is 'relu'; pass one of softmax, sigmoid"),
        ({"jitter": 0.1}, "`key` is None"),
        ({"num_groups": 3}, "does not divide 4"),
        ({"bias": np.ones(3)}, r"`bias` has shape \(3,\)"),
        ({"top_k": 3, "num_groups": 2, "top_groups": 1}, "hold at least `top_k` = 3"),
    ],
)
def test_errors_of_routing(options, text):
    with pytest.raises(ShapeError, match=f"moe_routing: .*{text}"):
        moe_routing(jnp.ones((3, 6)), jnp.ones((6, 4)), **options)


@pytest.mark.parametrize("capacity_factor", [None, 0.5, 1.0, 4.0])
def test_dispatch_and_back(capacity_factor):
    """Each expert's rows are its tokens, first choices first; combining returns what was kept, weighted; `dropped`
    counts the rest.
    """
    tokens = draw(30, 5)
    routing = jax.device_get(routed(tokens, draw(5, 4, seed=1), top_k=2))
    dispatch = jax.device_get(
        jax.jit(functools.partial(moe_dispatch, capacity_factor=capacity_factor))(tokens, routing)
    )
    capacity = 60 if capacity_factor is None else int(np.ceil(capacity_factor * 60 / 4))
    expected, kept, start = np.zeros((30, 5)), 0, 0
    for expert in range(4):
        choices = [(t, rank) for rank in range(2) for t in range(30) if routing.experts[t, rank] == expert]
        rows = dispatch.rows[start : start + int(dispatch.group_sizes[expert])]
        np.testing.assert_array_equal(rows[: len(choices)], tokens[[t for t, _ in choices[:capacity]]])
        assert not np.asarray(rows[len(choices) :]).any()
        for t, rank in choices[:capacity]:
            expected[t] += float(routing.weights[t, rank]) * tokens[t]
        kept += len(choices[:capacity])
        start += int(dispatch.group_sizes[expert])
    assert start == dispatch.rows.shape[0] and int(dispatch.dropped) == 60 - kept
    np.testing.assert_allclose(moe_combine(dispatch.rows, dispatch, routing), expected, atol=1e-5)


@pytest.mark.turns(3)
@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_no_tokens(capacity_factor):
    """They are dispatched to no rows, or to rows of zeros, and come back as none."""
    tokens = jnp.zeros((0, 5))
    routing = moe_routing(tokens, draw(5, 4))
    dispatch = moe_dispatch(tokens, routing, capacity_factor=capacity_factor)
    rows = 0 if capacity_factor is None else 4
    np.testing.assert_array_equal(dispatch.rows, np.zeros((rows, 5)))
    np.testing.assert_array_equal(dispatch.choice, np.zeros(rows))
    assert moe_combine(dispatch.rows, dispatch, routing).shape == (0, 5)
    weights = draw(4, 5, 6), draw(4, 5, 6), draw(4, 6, 5)
    assert moe_layer(tokens, draw(5, 4), *weights, capacity_factor=capacity_factor).out.shape == (0, 5)


@pytest.mark.parametrize("capacity_factor", [None, 0.5])
def test_gradient_of_dispatch_and_combine(capacity_factor):
    """The gathers written for the gradients give what JAX makes of the definition by one-hot products."""
    tokens, router, weight = draw(20, 5), draw(5, 4, seed=1), draw(5, seed=2)

    def ours(x, w):
        routing = moe_routing(x, w, top_k=2)
        dispatch = moe_dispatch(x, routing, capacity_factor=capacity_factor)
        return jnp.sum(jnp.sin(moe_combine(jnp.tanh(dispatch.rows * weight), dispatch, routing)))

    dispatch = jax.jit(functools.partial(moe_dispatch, capacity_factor=capacity_factor))(
        tokens, routed(tokens, router, top_k=2)
    )
    kept = dispatch.place < dispatch.rows.shape[0]

    def plain(x, w):
        each = jnp.tanh(x * weight)[:, None] * kept[:, :, None]
        return jnp.sum(jnp.sin((each * moe_routing(x, w, top_k=2).weights[:, :, None]).sum(1)))

    for a, b in zip(*(jax.jit(jax.grad(f, (0, 1)))(tokens, router) for f in (ours, plain)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def parameters(features=6, hidden=10, experts=8):
    gate, up = draw(experts, features, hidden, seed=2), draw(experts, features, hidden, seed=3)
    return draw(features, experts, seed=1), gate, up, draw(experts, hidden, features, seed=4)


def one_token_at_a_time(tokens, router, gate, up, down, top_k):
    routing = jax.device_get(routed(tokens, router, top_k=top_k))
    out = np.zeros(tokens.shape)
    for t, x in enumerate(tokens.astype(np.float64)):
        for weight, e in zip(routing.weights[t], routing.experts[t], strict=True):
            pre = x @ gate[e]
            out[t] += float(weight) * ((pre / (1 + np.exp(-pre)) * (x @ up[e])) @ down[e])
    return out


@pytest.mark.turns(4)
def test_layer_is_the_sum_over_experts():
    tokens, weights = draw(24, 6), parameters()
    layer = jax.jit(moe_layer, static_argnames=("top_k", "capacity_factor"))
    result = layer(tokens, *weights, top_k=3)
    np.testing.assert_allclose(result.out, one_token_at_a_time(tokens, *weights, 3), atol=1e-4)
    assert int(result.dropped) == 0 and int(result.routing.expert_counts.sum()) == 72
    ample = layer(tokens.reshape(4, 6, 6), *weights, top_k=3, capacity_factor=8.0)
    np.testing.assert_allclose(ample.out.reshape(24, 6), result.out, atol=1e-4)
    assert int(layer(tokens, *weights, top_k=3, capacity_factor=0.5).dropped) > 0


def weighted_one_token_at_a_time(tokens, router, gate, up, down, routing):
    """The weights multiply what the experts read."""
    out = np.zeros(tokens.shape)
    for t, x in enumerate(tokens.astype(np.float64)):
        for weight, e in zip(routing.weights[t], routing.experts[t], strict=True):
            scaled = float(weight) * x
            pre = scaled @ gate[e]
            out[t] += (pre / (1 + np.exp(-pre)) * (scaled @ up[e])) @ down[e]
    return out


def test_a_layer_weights_inputs_and_reads_tokens_of_the_router():
    torch = pytest.importorskip("torch")
    import vishwamai.torch as vt

    tokens, weights, scored = draw(24, 6), parameters(), draw(24, 6, seed=9)
    factors = np.abs(draw(8, seed=5)) + 0.5
    options = {"top_k": 3, "scoring": "sigmoid", "normalize": False}
    routing = jax.device_get(moe_routing(scored, weights[0], expert_scale=factors, **options))
    plain = jax.device_get(moe_routing(scored, weights[0], **options))
    np.testing.assert_allclose(routing.weights, plain.weights * factors[plain.experts], rtol=1e-6)
    result = moe_layer(tokens, *weights, router_tokens=scored, weight_inputs=True, expert_scale=factors, **options)
    np.testing.assert_allclose(result.out, weighted_one_token_at_a_time(tokens, *weights, routing), atol=1e-4)
    of_torch = {"router_tokens": torch.tensor(scored), "expert_scale": torch.tensor(factors), "weight_inputs": True}
    arrays = (torch.tensor(x) for x in (tokens, *weights))
    np.testing.assert_allclose(vt.moe_layer(*arrays, **of_torch, **options).out, result.out, atol=1e-5)
    with pytest.raises(ShapeError, match=r"`router_tokens` has shape \(3, 6\)"):
        moe_layer(tokens, *weights, router_tokens=scored[:3])


def test_sparsemixer_routes_as_transformers_does():
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.models.phimoe.modeling_phimoe").sparsemixer
    import vishwamai.torch as vt

    tokens, router = draw(64, 6), draw(6, 8, seed=3)
    options = {"scoring": "sparsemixer", "normalize": False, "margin": 0.6}

    def mixed(router):
        return jnp.sum(moe_routing(tokens, router, **options).weights * draw(64, 2, seed=4))

    wide = torch.tensor(router, requires_grad=True)
    weights, experts = theirs(torch.tensor(tokens) @ wide, 0.3, False)
    for routing in (
        moe_routing(tokens, router, **options),
        vt.moe_routing(torch.tensor(tokens), wide.detach(), **options),
    ):
        np.testing.assert_array_equal(np.asarray(routing.experts), experts)
        np.testing.assert_allclose(routing.weights, weights.detach(), atol=1e-6)
    (weights * torch.tensor(draw(64, 2, seed=4))).sum().backward()
    np.testing.assert_allclose(jax.grad(mixed)(router), wide.grad, atol=1e-5)
    for extra, text in (({"bias": jnp.zeros(8)}, "leave out `bias`"), ({"margin": -1.0}, "`margin` is -1.0")):
        with pytest.raises(ShapeError, match=text):
            moe_routing(tokens, router, **{**options, **extra})


EXCHANGES = {
    "one axis": ((8,), ("x",), "x", {}),
    "two axes": ((2, 4), ("slice", "x"), ("slice", "x"), {}),
    "ragged": ((8,), ("x",), "x", {"exchange": "ragged"}),
    "pieces": ((4,), ("x",), "x", {"overlap": True}),
    "weighted inputs": ((8,), ("x",), "x", {"weight_inputs": True}),
    "capacity": ((8,), ("x",), "x", {"capacity_factor": 8.0}),
    "two axes, capacity": ((4, 2), ("slice", "x"), ("slice", "x"), {"capacity_factor": 8.0}),
    "capacity, pieces": ((4,), ("x",), "x", {"capacity_factor": 8.0, "overlap": True}),
    "two axes, pieces": ((2, 4), ("slice", "x"), ("slice", "x"), {"overlap": True}),
    "two axes, capacity, pieces": ((4, 2), ("slice", "x"), ("slice", "x"), {"capacity_factor": 8.0, "overlap": True}),
}


def sharded(shape, names, axis, options, top_k=2):
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    split = P(tuple(names))

    def local(tokens, router, gate, up, down):
        result = moe_layer(tokens, router, gate, up, down, top_k=top_k, expert_axis=axis, **options)
        return result.out, result.routing[2:], result.dropped

    return jax.shard_map(local, mesh=mesh, in_specs=(split, P(), split, split, split), out_specs=(split, P(), P()))


def with_every_gradient(layer):
    """(a scalar of the layer's results, those results) and the gradients of the scalar, in one program."""

    def loss(*arrays):
        results = layer(*arrays)
        out, (balance, z, _), _ = results
        return jnp.sum(jnp.sin(out)) + 0.1 * balance + 0.01 * z, results

    return jax.jit(jax.value_and_grad(loss, tuple(range(5)), has_aux=True))(draw(40, 6), *parameters())


@functools.cache
def on_one_device(weight_inputs=False):
    def one(*arrays):
        result = moe_layer(*arrays, top_k=2, weight_inputs=weight_inputs)
        return result.out, result.routing[2:], result.dropped

    return with_every_gradient(one)


@pytest.mark.parametrize("name", rotation.in_turn(2, EXCHANGES))
def test_expert_parallel_is_one_device(name, monkeypatch):
    """Values, losses, counts and every gradient on eight devices are those of one with all tokens and experts."""
    shape, names, axis, options = EXCHANGES[name]
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", gathered_ragged_all_to_all)
    ((_, results), gradients) = with_every_gradient(sharded(shape, names, axis, options))
    ((_, expected), expected_gradients) = on_one_device("weight_inputs" in options)
    contract.close(results, expected, 1e-5)
    contract.close(gradients, expected_gradients, 1e-5)


@pytest.mark.turns(3)
@pytest.mark.parametrize("exchange", ["dense", "ragged"])
def test_a_small_buffer_drops_and_says_so(exchange, monkeypatch):
    """With room for a share of the rows, what is beyond is counted, and what arrived is right."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", gathered_ragged_all_to_all)
    tokens, weights = draw(64, 6), parameters()
    out, _, dropped = jax.jit(sharded((8,), ("x",), "x", {"exchange": exchange, "exchange_factor": 1.0}, 1))(
        tokens, *weights
    )
    whole = jax.jit(functools.partial(moe_layer, top_k=1))(tokens, *weights).out
    missing = ~np.asarray(out).any(axis=1)
    assert 0 < missing.sum() == int(dropped) < 64
    np.testing.assert_allclose(out[~missing], whole[~missing], atol=1e-4)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"up": np.ones((8, 5, 10), np.float32)}, r"`up` has shape \(8, 5, 10\)"),
        ({"gate": np.ones((8, 6, 11), np.float32)}, "`gate` is"),
        ({"down": np.ones((8, 6, 10), np.float32)}, r"pass `down` of shape \(8, 10, 6\)"),
        ({"router_weights": np.ones((6, 9), np.float32)}, "score 9 experts, but there are 8"),
        ({"activation": "swish"}, "pass one of silu"),
        ({"exchange": "ragged"}, "`expert_axis` is None"),
    ],
)
def test_errors_of_the_layer(change, text):
    router, gate, up, down = parameters()
    arguments = dict(tokens=draw(4, 6), router_weights=router, gate=gate, up=up, down=down) | change
    with pytest.raises(ShapeError, match=f"moe_layer: .*{text}"):
        moe_layer(**arguments)


@pytest.mark.turns(3)
def test_groups_scored_by_their_best_expert():
    """DeepSeek-V2's choice: a group with one outstanding expert is kept, though another has the better pair."""
    tokens = jnp.array([[3.0, -9.0, 2.0, 2.0]])
    how = {"router_weights": jnp.eye(4), "top_k": 1, "num_groups": 2, "top_groups": 1, "scoring": "sigmoid"}
    tokens = jnp.array([[3.0, -9.0, 2.0, 2.0]])
    assert moe_routing(tokens, **how, group_score="max").experts.tolist() == [[0]]
    assert moe_routing(tokens, **how).experts.tolist() == [[2]]
    with pytest.raises(ShapeError, match="`group_score` is 'mean'; pass one of top2, max"):
        moe_routing(tokens, **how, group_score="mean")


@pytest.mark.turns(3)
@pytest.mark.parametrize("implementation", ["xla", None])
def test_layer_of_gpt_oss(implementation):
    """The router's bias, the experts' biases and the clamped unit, as transformers computes them."""
    torch = pytest.importorskip("torch", reason="torch is an optional dependency")
    config_of = pytest.importorskip("transformers", reason="transformers is an optional dependency").GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = config_of(hidden_size=12, intermediate_size=20, num_local_experts=5, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    theirs = GptOssMLP(config).float()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
    x = torch.randn(2, 7, 12)
    want = theirs(x)[0].detach().numpy()
    router, experts = (
        {name: jnp.asarray(p.detach().numpy()) for name, p in m.named_parameters()}
        for m in (theirs.router, theirs.experts)
    )

    def layer(x, biases):
        gate_up = experts["gate_up_proj"]
        return moe_layer(
            x, router["weight"].T, gate_up[..., ::2], gate_up[..., 1::2], experts["down_proj"], biases=biases,
            logit_bias=router["bias"], activation="swigluoai", limit=7.0, implementation=implementation,
        ).out  # fmt: skip

    biases = (experts["gate_up_proj_bias"][:, ::2], experts["gate_up_proj_bias"][:, 1::2], experts["down_proj_bias"])
    got = jax.jit(layer)(jnp.asarray(x.numpy()), biases)
    np.testing.assert_allclose(got, want.reshape(got.shape), rtol=1e-4, atol=1e-4)
    gradients = jax.jit(jax.grad(lambda b: jnp.sum(jnp.square(layer(jnp.asarray(x.numpy()), b)))))(biases)
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in gradients)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"biases": (None, None)}, r"`biases` is tuple of 2 entries; pass \(gate, up, down\)"),
        ({"biases": (None, jnp.zeros(3), None)}, r"the bias of `up` has shape \(3,\); pass \(8, 10\)"),
        ({"activation": "swigluoai", "limit": 0.0}, "`activation` is 'swigluoai' with limit 0.0"),
        ({"logit_bias": jnp.zeros(3)}, r"`logit_bias` has shape \(3,\)"),
    ],
)
def test_errors_of_biases(options, text):
    with pytest.raises(ShapeError, match=text):
        moe_layer(draw(5, 6), *parameters(), **options)
