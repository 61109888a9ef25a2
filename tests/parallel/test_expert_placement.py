"""Experts change their devices between steps by the measured load, and the results stay those of one device."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from vishwamai import moe_layer
from vishwamai.core.errors import ShapeError
from vishwamai.core.hardware import TPUS
from vishwamai.parallel import AxisLinks, ExpertPlacement, estimate_collective, move_experts, place_experts

EXPERTS, DEVICES, FEATURES, HIDDEN = 8, 4, 16, 24


def _normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.turns(4)
def test_steps_follow_the_load_and_stay_exact():
    """Two experts of the first device get most tokens. After each step experts move, with their moments."""
    mesh = jax.make_mesh((DEVICES,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    split = NamedSharding(mesh, P("expert"))
    router = _normal(0, FEATURES, EXPERTS).at[:, 0].add(1.0).at[:, 1].add(0.7)
    shapes = ((FEATURES, HIDDEN), (FEATURES, HIDDEN), (HIDDEN, FEATURES))
    weights = [_normal(i, EXPERTS, *shape) for i, shape in enumerate(shapes, 1)]
    whole = jax.jit(lambda tokens: moe_layer(tokens, router, *weights))
    state = {"weights": jax.device_put(weights, split), "moments": jax.device_put([w + 1 for w in weights], split)}

    @jax.jit
    def step(tokens, weights, places):
        def local(tokens, places, *weights):
            out = moe_layer(tokens, router, *weights, expert_axis="expert", expert_places=places)
            return out.out, out.routing.expert_counts

        specs = (P("expert"), P(), *[P("expert")] * 3)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P("expert"), P()), check_vma=False)
        return mapped(tokens, places, *weights)

    placement, fullest = ExpertPlacement(tuple(range(EXPERTS)), DEVICES), []
    for seed in range(2):
        tokens = _normal(10 + seed, 64, FEATURES) + 0.3
        out, counts = step(tokens, state["weights"], placement.places)
        want = whole(tokens)
        np.testing.assert_allclose(out, want.out, rtol=1e-5, atol=1e-4)
        np.testing.assert_array_equal(counts, want.routing.expert_counts)
        fullest.append(placement.loads(counts).max() / counts.sum() * DEVICES)
        change = place_experts(counts, placement, expert_bytes=3 * 2 * FEATURES * HIDDEN * 4)
        state = move_experts(state, placement, change.placement)
        placement = change.placement
        for array, w in zip(state["weights"], weights, strict=True):
            assert array.sharding == split
            np.testing.assert_array_equal(array, np.asarray(w)[list(placement.order)])
        np.testing.assert_array_equal(state["moments"][0], state["weights"][0] + 1)
    assert fullest[0] > 1.5 and fullest[1] < 0.7 * fullest[0] and change.moves < EXPERTS


def test_the_balance_is_near_the_best_there_is():
    """Next to every way to lay eight experts on four devices."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        counts = rng.pareto(1.5, EXPERTS)
        result = place_experts(counts, DEVICES)

        def pairs(rest):
            if not rest:
                yield 0.0
            for partner in rest[1:]:
                left = [e for e in rest[1:] if e != partner]
                yield from (max(load, counts[rest[0]] + counts[partner]) for load in pairs(left))  # noqa: B023

        best = min(pairs(list(range(EXPERTS)))) / (counts.sum() / DEVICES)
        assert best - 1e-9 <= result.after <= 1.1 * best
        assert result.after <= result.before


def test_an_even_load_moves_nothing_and_the_cost_is_that_of_the_links():
    even = place_experts(np.ones(16), 4, expert_bytes=2**20)
    assert even.moves == 0 and even.pays_after(1.0) == float("inf")
    links = AxisLinks(TPUS["v5e"], (4,), (False,))
    change = place_experts([8, 8, 8, 8, 1, 1, 1, 1], 4, expert_bytes=2**20, links=links)
    assert change.bytes == change.moves * 2**20
    assert change.seconds == estimate_collective("all_to_all", change.bytes, links)
    assert change.pays_after(1e-3) == pytest.approx(change.seconds / ((change.before - change.after) * 1e-3))


def test_arrays_split_along_two_axes_move_too():
    mesh = jax.make_mesh((2, 2), ("expert", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    x = _normal(0, 4, 6, 8)
    old, new = ExpertPlacement((0, 1, 2, 3), 2), ExpertPlacement((3, 1, 0, 2), 2)
    for spec in itertools.chain([P("expert", None, "tensor"), P("expert"), P(None, "tensor"), P()]):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        array = move_experts(placed, old, new)
        np.testing.assert_array_equal(array, x[jnp.array([3, 1, 0, 2])])
        assert array.sharding.is_equivalent_to(placed.sharding, 3)
        np.testing.assert_array_equal(move_experts(array, new, old), x)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: ExpertPlacement((0, 0), 1), "`order` is .*; pass each of 0 ... 1 once"),
        (lambda: ExpertPlacement((0, 1, 2), 2), "`devices` is 2; pass a number that divides 3"),
        (lambda: place_experts([1, -1], 2), "pass a number of zero or more"),
        (lambda: place_experts([1, 1, 1], ExpertPlacement((0, 1), 2)), "`counts` has 3 experts"),
        (lambda: move_experts(jnp.ones(3), *[ExpertPlacement((0, 1), 2)] * 2), "first axis has the 2 experts"),
        (
            lambda: moe_layer(
                jnp.ones((4, 8)), jnp.ones((8, 2)), *[jnp.ones((2, 8, 8))] * 3, expert_places=jnp.array([0, 0])
            ),
            "`expert_places` is .*; pass each place once",
        ),
    ],
)
def test_errors(call, words):
    with pytest.raises(ShapeError, match=words):
        call()
