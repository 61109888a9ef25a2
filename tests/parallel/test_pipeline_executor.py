"""The executor: loss and gradients of every schedule are those of the model on one device."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import rotation
from vishwamai.core.errors import ScheduleError, ShapeError, UnsupportedError
from vishwamai.parallel import (
    PipelineScheduler,
    Schedule,
    copy_to_shards,
    pipelined_loss,
    place_parts,
    sum_of_shards,
    with_transfers,
)
from vishwamai.parallel.pipeline.generators import GENERATORS
from vishwamai.parallel.pipeline.split import split_part
from vishwamai.parallel.pipeline.ticks import COLUMNS, ticks_of

WIDTH, HIDDEN = 8, 16


def part(p, x):
    x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["scale"]


def loss(head, y, targets):
    return jnp.mean((y @ head - targets["wanted"]) ** 2)


def model(parts, rows):
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "up": 0.3 * jax.random.normal(keys[0], (parts, WIDTH, HIDDEN)),
        "down": 0.3 * jax.random.normal(keys[1], (parts, HIDDEN, WIDTH)),
        "scale": 1 + 0.1 * jnp.arange(parts * WIDTH).reshape(parts, WIDTH) / WIDTH,
    }
    head = jax.random.normal(keys[2], (WIDTH,))
    inputs = jax.random.normal(keys[3], (rows, WIDTH))
    return params, head, inputs, {"wanted": jax.random.normal(keys[4], (rows,))}


def unpipelined(params, head, x, targets):
    x, _ = jax.lax.scan(lambda x, p: (part(p, x), None), x, params)
    return loss(head, x, targets)


def mesh_of(kind=AxisType.Auto, **axes):
    count = int(np.prod(list(axes.values())))
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=jax.devices()[:count]
    )


def check(schedules, mesh, rows, own_part=part, **options):
    arguments = model(sum(len(one.parts) for one in schedules), rows)
    run = pipelined_loss(own_part, loss, schedules, mesh, **options)

    def pipelined(params, head, inputs, targets):
        return run(place_parts(params, schedules), head, inputs, targets)

    gradients = functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    got = jax.jit(gradients(pipelined))(*arguments)
    with jax.enable_x64(True):
        expected = jax.jit(gradients(unpipelined))(*jax.tree.map(lambda x: np.asarray(x, np.float64), arguments))
    for path, theirs in jax.tree_util.tree_leaves_with_path(expected):
        ours = functools.reduce(lambda tree, key: tree[getattr(key, "idx", getattr(key, "key", None))], path, got)
        theirs = np.asarray(theirs)
        # A gradient is a sum of terms as large as the array's largest: two float32 programs differ by their rounding.
        np.testing.assert_allclose(
            ours, theirs, rtol=0, atol=3e-6 * np.abs(theirs).max(), err_msg=jax.tree_util.keystr(path)
        )


CASES = [(kind, stages) for stages in (2, 4, 8) for kind in GENERATORS]


@pytest.mark.parametrize(
    ("kind", "stages"), [pytest.param(*case, marks=rotation.one_in(9, i)) for i, case in enumerate(CASES)]
)
def test_every_schedule_is_the_unpipelined_model(kind, stages):
    rows = 2 * 2 * stages
    schedules = PipelineScheduler(kind, microbatch_size=2).schedule_microbatches(stages, rows)
    check(schedules, mesh_of(stage=stages), rows)


@pytest.mark.long
def test_on_explicit_axes():
    schedules = PipelineScheduler("zb_v").schedule_microbatches(2, 4)
    check(schedules, mesh_of(AxisType.Explicit, stage=2), 4)


@pytest.mark.long
def test_one_stage():
    check(PipelineScheduler("zb_h1").schedule_microbatches(1, 3), mesh_of(stage=1), 3)


def test_a_schedule_of_ones_own():
    """Stage 0 has the second half; weight gradients come last; the second microbatch overtakes the first."""
    texts = {0: ([1], "1F1 1F0 1I1 1I0 1W0 1W1"), 1: ([0], "0F1 0F0 0I1 0I0 0W1 0W0")}
    plain = [Schedule.parse(stage, parts, text) for stage, (parts, text) in texts.items()]
    check(with_transfers(plain), mesh_of(stage=2), 4)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=rotation.one_in(3, i)) for i, kind in enumerate(("1f1b", "zb_v", "zb_h1"))]
)
def test_with_fsdp_and_tensor_parallelism_in_a_stage(kind):
    """Rows over "fsdp", whose parameters are gathered; the hidden layer over "tensor"."""
    specs = {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp"), "scale": P()}

    def split_over_devices(p, x):
        up = jax.lax.all_gather(p["up"], "fsdp", axis=0, tiled=True)
        down = jax.lax.all_gather(p["down"], "fsdp", axis=1, tiled=True)
        hidden = jax.nn.gelu(copy_to_shards(x, "tensor") @ up)
        x = x + sum_of_shards(hidden @ down, "tensor")
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["scale"]

    schedules = PipelineScheduler(kind, microbatch_size=4).schedule_microbatches(2, 16)
    mesh = mesh_of(stage=2, fsdp=2, tensor=2)
    check(schedules, mesh, 16, split_over_devices, batch_axes=("fsdp",), param_specs=specs)


@pytest.mark.turns(3)
def test_gradients_apart():
    """The input gradient has one product of a layer, and the weight gradient the other: nothing is computed twice."""
    params, _, x, _ = model(1, 4)
    params = jax.tree.map(lambda leaf: leaf[0], params)
    split = split_part(part, params, x)
    y, kept = jax.eval_shape(split.forward, params, x)
    _, between = jax.eval_shape(split.input_gradient, params, kept, y)

    @jax.jit
    def by_split(params, x):
        y, kept = split.forward(params, x)
        dx, between = split.input_gradient(params, kept, jnp.cos(y))
        return y, split.weight_gradient(params, kept, between), dx

    @jax.jit
    def by_jax(params, x):
        y, pull = jax.vjp(part, params, x)
        return (y, *pull(jnp.cos(y)))

    for ours, theirs in zip(jax.tree.leaves(by_split(params, x)), jax.tree.leaves(by_jax(params, x))):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)

    # What a part sees passes by, and changes no gradient.
    seeing = split_part(lambda params, x: (part(params, x), {"rows": jnp.sum(x, 1)}), params, x, sees=True)
    (y, seen), kept = seeing.forward(params, x)
    np.testing.assert_array_equal(seen["rows"], jnp.sum(x, 1))
    dx, between = seeing.input_gradient(params, kept, jnp.cos(y))
    theirs = by_jax(params, x)
    np.testing.assert_allclose(dx, theirs[2], rtol=1e-6, atol=1e-6)
    found = seeing.weight_gradient(params, kept, between)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found, theirs[1])

    def products(function, *arguments):
        return str(jax.make_jaxpr(function)(*arguments)).count("dot_general")

    assert products(split.forward, params, x) == 2
    assert products(split.input_gradient, params, kept, y) == 2
    assert products(split.weight_gradient, params, kept, between) == 2
    # No parameter is kept for every microbatch.
    assert all(kind.shape[0] == 4 for kind in split.residuals)


def test_bfloat16_gradients_add_up_in_float32():
    """Of 64 microbatches of gradient 1/64 + 1/8192 each, a bfloat16 sum would lose the second term."""
    schedules = PipelineScheduler("1f1b").schedule_microbatches(2, 64)
    run = pipelined_loss(
        lambda w, x: x + w, lambda _, y, target: jnp.sum(y.astype(jnp.float32)), schedules, mesh_of(stage=2)
    )
    weights = place_parts(jnp.zeros((2, 1), jnp.bfloat16), schedules)
    factor = jnp.asarray(1 + 1 / 128, jnp.bfloat16)
    found = jax.jit(jax.grad(lambda w: run(w, (), jnp.ones((64, 1), jnp.bfloat16), ()) * factor.astype(jnp.float32)))(
        weights
    )
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found, np.float32), float(factor))


@pytest.mark.parametrize("kind", GENERATORS)
def test_slots(kind):
    """No slot is written while what is in it is still to be read, by a walk through the table; and there are no more
    slots for activations than the simulator says.
    """
    schedules = PipelineScheduler(kind).schedule_microbatches(4, 8)
    ticks = ticks_of(schedules)
    assert ticks.residuals <= {"gpipe": 8, "interleaved_1f1b": 11, "dualpipe_v": 9, "zb_v": 8}.get(kind, 4)
    column = {name: i for i, name in enumerate(COLUMNS)}
    inside: list[dict] = [{} for _ in range(4)]  # slot -> value
    computed = 0
    for rows in ticks.table:
        for stage, row in enumerate(rows):
            cell = {name: int(row[i]) for name, i in column.items()}
            if cell["kind"] == 0 or cell["kind"] == 3:
                continue
            computed += 1
            forward, where, m = cell["kind"] == 1, schedules[stage].parts[cell["chunk"]], cell["microbatch"]
            if forward and where:
                assert inside[stage][cell["read"]] == ("F", where - 1, m)
            if not forward:
                wanted = ("F", where, m) if cell["last"] else ("I", where + 1, m)
                assert inside[stage][cell["read"]] == wanted
            if cell["write"] < ticks.values:
                inside[stage][cell["write"]] = ("F" if forward else "I", where, m)
        arriving = []  # all are sent before any is written
        for way, step in (("up", 1), ("down", -1)):
            send, receive = column[f"send_{way}"], column[f"recv_{way}"]
            for stage in range(4):
                slot, source = int(rows[stage][receive]), (stage - step) % 4
                if slot < ticks.values:
                    arriving.append((stage, slot, inside[source][int(rows[source][send])]))
        for stage, slot, value in arriving:
            inside[stage][slot] = value
    assert computed == 2 * 8 * sum(len(one.parts) for one in schedules)


def _two(**options):
    schedules = PipelineScheduler("1f1b").schedule_microbatches(2, 4)
    return schedules, pipelined_loss(part, loss, schedules, mesh_of(stage=2), **options)


def _call(rows=4, params=None, **changes):
    schedules, run = _two()
    given, head, inputs, targets = model(2, rows)
    return run(place_parts(given, schedules) if params is None else params(given), head, inputs, targets)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pipelined_loss(part, loss, _two()[0], mesh_of(stage=4)), ShapeError, "give `axis` 'stage' 2 devices"),
        (lambda: pipelined_loss(part, loss, _two()[0], mesh_of(pipe=2)), ShapeError, r"the axes \{'pipe': 2\}"),
        (lambda: pipelined_loss(part, cast(Any, 3), _two()[0], mesh_of(stage=2)), ShapeError, "`loss` is 3"),
        (lambda: _two(batch_axes=("data",)), ShapeError, r"`batch_axes` has \['data'\]"),
        (lambda: _call(rows=6), ShapeError, "6 rows do not divide into 4 microbatches on 1 shards; pass a multiple"),
        (lambda: _call(params=lambda given: given["scale"][0]), ShapeError, r"what `place_parts` gives, \[2 stages"),
        (lambda: place_parts(jnp.ones((3, 4)), _two()[0]), ShapeError, r"pass an array \[2, ...\], one entry"),
        (lambda: split_part(jnp.matmul, jnp.ones((2, 3)), jnp.ones((3, 4))), ShapeError, r"gives float32\[2, 4\]"),
        (lambda: split_part(lambda w, x: x, jnp.ones(3, int), jnp.ones(3)), ShapeError, "pass floating arrays"),
        (lambda: pipelined_loss(part, loss, [_two()[0][0]], mesh_of(stage=1)), ScheduleError, "has 0SEND_F0"),
        (
            lambda: ticks_of(
                with_transfers(
                    [Schedule.parse(s, [p], f"{p}F0 {p}I0 {p}W0") for s, p in enumerate([0, 3, 1, 2])],
                )
            ),
            UnsupportedError,
            "from stage 0 to stage 2, but values travel between neighbours",
        ),
        (
            lambda: ticks_of(
                with_transfers(
                    [Schedule.parse(0, [0, 2], "0F0 2F0 2I0 0I0 0W0 2W0"), Schedule.parse(1, [1], "1F0 1I0 1W0")]
                )
            ),
            UnsupportedError,
            r"the stages hold \[2, 1\] parts",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()
