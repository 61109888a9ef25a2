"""The charts of the report."""

from __future__ import annotations

from collections.abc import Sequence

from vishwamai.bench import report
from vishwamai.bench.model import ModelResult
from vishwamai.bench.runner import CaseMeasurement
from vishwamai.measure.machine_peaks import MachinePeaks
from vishwamai.reports import Markup, charts

# Variables of the stylesheet.
_OURS = ("c0", "c1", "c2", "c3")
_PEERS = {"jax": "c4", "torch": "c5"}
_CEILINGS = {"float32": "2 3", "bfloat16": "7 4", "int8": "9 3 2 3"}


def colours(measurements: Sequence[CaseMeasurement]) -> dict[str, str]:
    """A colour for each candidate: ours from one family, the frameworks' one each."""
    ours = list(dict.fromkeys(m.candidate for m in measurements if m.framework == "vishwamai"))
    palette = {name: _OURS[i % len(_OURS)] for i, name in enumerate(ours)}
    return palette | {m.candidate: _PEERS[m.framework] for m in measurements if m.framework != "vishwamai"}


def _label(m: CaseMeasurement) -> str:
    """What the legend calls a candidate: peers are one entry for each framework."""
    return m.candidate if m.framework == "vishwamai" else f"{m.framework}'s own"


def _note(m: CaseMeasurement) -> str:
    assert m.timing is not None
    share = "" if m.overshot else f", {report.share(m)} of the peak"
    return (
        f"{m.op}: {m.case}\n{m.candidate}\n{report.seconds(m.timing.median)} (spread {m.timing.spread:.0%})\n"
        f"{report.rate(m.flops_per_second)} GFLOP/s, {report.rate(m.bytes_per_second)} GB/s{share}"
    )


def roofline(measurements: Sequence[CaseMeasurement], peaks: MachinePeaks) -> Markup:
    """FLOP/s over FLOP per byte, both logarithmic, under the ceilings that were measured."""
    intensities = [m.flops / m.bytes_moved for m in measurements]
    bandwidth = peaks.best_bandwidth
    knees = [peaks.peak(dtype) / bandwidth for dtype in peaks.flops]
    low, high = min(*intensities, *knees) / 3, max(*intensities, *knees) * 3
    slope = [(x, x * bandwidth / 1e9) for x in (low, max(knees))]
    curves = [charts.Curve(f"memory {report.rate(bandwidth)} GB/s", slope, "soft")]
    for dtype in peaks.flops:
        peak = peaks.peak(dtype)
        points = [(peak / bandwidth, peak / 1e9), (high, peak / 1e9)]
        dash = _CEILINGS.get(dtype, "12 4")
        curves.append(charts.Curve(f"{dtype} {report.rate(peak)} GFLOP/s", points, "soft", dash=dash))
    palette = colours(measurements)
    shapes = dict(zip(dict.fromkeys(m.op for m in measurements), charts.MARKS))
    for label in dict.fromkeys(map(_label, measurements)):
        mine = [m for m in measurements if _label(m) == label]
        curves.append(
            charts.Curve(
                label,
                [(m.flops / m.bytes_moved, (m.flops_per_second or 0) / 1e9) for m in mine],
                palette[mine[0].candidate],
                marks=[shapes.get(m.op, "circle") for m in mine],
                hollow=mine[0].framework != "vishwamai",
                notes=[_note(m) for m in mine],
            )
        )
    unit = f"GFLOP/s ({', '.join(f'{shape} = {op}' for op, shape in shapes.items())})"
    return charts.lines(curves, x="FLOP per byte of memory traffic", y=unit, log=True, height=420)


def bars(measurements: Sequence[CaseMeasurement]) -> Markup | None:
    """How many times as fast as the best peer each of our implementations is, a group of bars for each case; None
    where no case has a peer.
    """
    ours = [m for m in measurements if m.framework == "vishwamai" and m.best_peer is not None]
    if not ours:
        return None
    palette = colours(measurements)
    groups = [
        (
            case,
            [
                charts.Bar(min(m.ratios.values()), report.best_peer(m), palette[m.candidate], _note(m))
                for m in ours
                if m.case == case
            ],
        )
        for case in dict.fromkeys(m.case for m in ours)
    ]
    legend = [(name, palette[name]) for name in dict.fromkeys(m.candidate for m in ours)]
    return charts.bars(groups, x="times as fast as the best peer (line: 1x)", legend=legend, reference=1.0)


def model_bars(result: ModelResult) -> Markup:
    """Sentences per second of the real model, a group of bars for each batch size."""
    palette = {"vishwamai": _OURS[0], "jax.nn": _PEERS["jax"], "torch": _PEERS["torch"]}
    groups = [
        (
            f"batch {speed.batch}, {speed.tokens} tokens",
            [
                charts.Bar(value, f"{value:.0f}", palette[name], f"{name}: {value:.0f} sentences/s")
                for name, value in speed.sentences_per_second.items()
            ],
        )
        for speed in result.speeds
    ]
    legend = [(name, palette[name]) for name in result.speeds[0].timings]
    return charts.bars(groups, x="sentences per second", legend=legend)
