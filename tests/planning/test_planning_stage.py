"""`planning.stage_times`: the three programs of a part, timed for a TPU, as times of a schedule's actions."""

import jax
import jax.numpy as jnp
import pytest

from vishwamai import aot, planning
from vishwamai.core.errors import DeviceError, ShapeError
from vishwamai.core.hardware import TPUS
from vishwamai.parallel import ActionTimes, PipelineScheduler, simulate

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")
ROWS, WIDTH = 2048, 2048


def part(weights, x):
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


WEIGHTS = {"up": shape(WIDTH, 2 * WIDTH), "down": shape(2 * WIDTH, WIDTH)}


@needs_libtpu
@pytest.mark.long
def test_the_times_of_a_compiled_part():
    """Every action has two products of the same size, so each takes at least their time at the peak."""
    times = planning.stage_times(part, WEIGHTS, shape(ROWS, WIDTH))
    chip = TPUS["v5e"]
    products = 2 * 2 * ROWS * WIDTH * 2 * WIDTH / chip.peak_bf16
    for seconds in (times.forward, times.input_gradient, times.weight_gradient):
        assert products <= seconds < 3 * products
    assert times.transfer == pytest.approx(2 * ROWS * WIDTH / chip.ici_bandwidth)
    # All three together are the part with its gradients, which one program computes with less reading and writing.
    whole = planning.step_time(
        lambda w, x, dy: jax.vjp(part, w, x)[1](dy), WEIGHTS, shape(ROWS, WIDTH), shape(ROWS, WIDTH), target="v5e"
    )
    together = times.forward + times.input_gradient + times.weight_gradient
    assert 0.9 * whole.step.value < together < 1.5 * whole.step.value
    schedules = PipelineScheduler("1f1b").schedule_microbatches(num_stages=4, batch_size=8)
    free = ActionTimes(times.forward, times.input_gradient, times.weight_gradient)
    assert simulate(schedules, free).bubble_share == pytest.approx(3 / 11)  # (stages - 1) / (stages - 1 + microbatches)
    assert simulate(schedules, times).duration > simulate(schedules, free).duration > 8 * together


@needs_libtpu
@pytest.mark.long
def test_a_part_that_does_not_fit_is_named():
    vast = {"up": shape(1 << 17, 1 << 16), "down": shape(1 << 16, 1 << 17)}
    with pytest.raises(DeviceError, match="stage_times: the program of forward needs .* but v5e has 15.8 GiB"):
        planning.stage_times(part, vast, shape(8, 1 << 17))


@pytest.mark.parametrize(
    ("given", "target", "text"),
    [
        (
            (part, WEIGHTS, shape(8, WIDTH)),
            "v5e:2x2",
            "`target` is 'v5e:2x2'; pass a chip, 'v5e': a stage is one device",
        ),
        ((part, {"up": 3}, shape(8, 8)), "v5e", r"`params\['up'\]` is 3, of type int; pass an array"),
        ((part, WEIGHTS, None), "v5e", "`x` is None; pass an array"),
        ((lambda w, x: x @ w["up"], WEIGHTS, shape(8, WIDTH)), "v5e", "every part must give one array of the shape"),
    ],
)
def test_wrong_calls_are_named(given, target, text):
    with pytest.raises(ShapeError, match=text):
        planning.stage_times(*given, target=target)
