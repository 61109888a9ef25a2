"""Measures the benchmark's cases and a layer on the device of this machine, for a `Calibration`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.aot.compile import libtpu
from vishwamai.bench import machine, schedules
from vishwamai.bench.runner import BenchSettings, CaseMeasurement, PeakMeter, Step, run
from vishwamai.core.hardware import TpuChip, tpu_for
from vishwamai.measure.flops import program_flops
from vishwamai.measure.machine_peaks import measure_machine
from vishwamai.measure.measurement import measure
from vishwamai.ops.catalogue import specs_of
from vishwamai.planning.time.calibration import Calibration, Row

_VERSIONS = ("vishwamai", "jax", "jaxlib", "libtpu", "numpy")


def calibrate(
    cases: Sequence[Step],
    settings: BenchSettings,
    layer: bool = True,
    report: Callable[[str, float | None], None] = lambda text, left: None,
) -> Iterator[Calibration]:
    """Runs the steps, each checked against float64 and timed, and a decoder's layer. After each it gives what is there.

    On a TPU every row has an estimate: that of the kernel's schedule, where one ships for the case and it runs in its
    full size, else the roofline. On other devices rows are measured alone.

    Args:
      cases: cases to run, of `bench.runner.steps`. settings: durations. layer: True to measure a layer.
      report: called before each, with a line of text and the seconds that are left, where known.
    """
    device, chip = libtpu.local_devices()[0], _chip_here()
    report("measuring this machine's peaks", None)
    meter = PeakMeter(measure_machine(quick=True), True)
    start = time.monotonic()

    def on_case(done: int, total: int, name: str) -> None:
        if done < total:
            spent = time.monotonic() - start
            report(f"{done + 1} of {total}: {name}", spent / done * (total - done) if done else None)

    installed = machine.versions()
    versions = {name: installed.get(name) for name in _VERSIONS}
    kind = machine.cpu().name if device.platform == "cpu" else device.device_kind
    calibration = Calibration(kind, None if chip is None else chip.name, versions, ())
    for step, measurements in run(cases, meter, settings, on_case):
        rows = [
            _row(step, measurement, chip)
            for measurement in measurements
            if measurement.framework == "vishwamai" and measurement.default
        ]
        calibration = dataclasses.replace(calibration, rows=(*calibration.rows, *rows))
        yield calibration
    if layer:
        report("a layer", None)
        yield dataclasses.replace(calibration, rows=(*calibration.rows, _layer(chip)))


def _chip_here() -> TpuChip | None:
    return tpu_for(libtpu.local_devices()[0].device_kind)


def name_here() -> str:
    """The chip that is measured here: a TPU's name, else the platform's."""
    chip = _chip_here()
    return jax.devices()[0].platform if chip is None else chip.name


def _row(step: Step, measurement: CaseMeasurement, chip: TpuChip | None) -> Row:
    name, implementation = f"{measurement.op}: {measurement.case}", measurement.implementation or ""
    if measurement.timing is None:
        return Row(
            name,
            implementation,
            measurement.gradients,
            None,
            note=measurement.note or "its numbers are wrong: not timed",
        )
    note = measurement.note
    estimate, level, bound = None, "", ""
    if chip is not None:
        estimate, bound = _roofline(chip, measurement.flops, measurement.bytes_moved, measurement.dtype)
        level = "analytic"
        stored = schedules.stored(measurement.op, measurement.case, chip.name)
        per_device = measurement.flops == specs_of(step.operation, step.case)[0].flops
        if stored is not None and stored.seconds is not None and not measurement.gradients:
            if not per_device:
                note = "run in a smaller size, so its schedule does not compare"
            elif stored.implementation != implementation:
                note = f"the schedule is that of {stored.implementation}, so it does not compare"
            else:
                estimate, level = stored.seconds, "verified"
    timing = measurement.timing
    return Row(name, implementation, measurement.gradients, timing.median, timing.spread, estimate, level, bound, note)


def _roofline(chip: TpuChip, flops: float, nbytes: float, dtype: str) -> tuple[float, str]:
    """Seconds at the least, and what bounds them."""
    compute, memory = flops / chip.peak_per_device(dtype), nbytes / chip.hbm_bandwidth_per_device
    return max(compute, memory), "compute" if compute >= memory else "memory"


def _layer(chip: TpuChip | None) -> Row:
    """A decoder's layer of Llama 3 8B on a TPU, a small one elsewhere: a forward pass of 2048 or 256 tokens."""
    from flax import nnx

    from vishwamai.models import Decoder, ModelConfig

    width, tokens = (4096, 2048) if chip is not None else (256, 256)
    config = ModelConfig.from_dict(
        {
            "model_type": "llama",
            "vocab_size": 1024,
            "hidden_size": width,
            "intermediate_size": width * 7 // 2,
            "num_hidden_layers": 1,
            "num_attention_heads": width // 128,
            "num_key_value_heads": max(1, width // 512),
            "max_position_embeddings": tokens,
        }
    )
    dtype = jnp.bfloat16 if chip is not None else jnp.float32
    graph, state = nnx.split(Decoder(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0)))
    batch = jnp.asarray(np.random.default_rng(0).integers(0, 1024, (1, tokens)), jnp.int32)

    def forward(state: object, batch: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(batch)

    measurement = measure(forward, state, batch, repeats=20)
    estimate, level, bound = None, "", ""
    if chip is not None:
        flops = program_flops(forward, state, batch).total
        estimate, bound = _roofline(chip, flops, measurement.useful, str(jnp.dtype(dtype)))
        level = "analytic"
    name = f"a layer of width {width}, {tokens} tokens"
    return Row(name, "", False, measurement.seconds, 0.0, estimate, level, bound)
