"""Charts as inline SVG without scripts: curves and marks on two axes, bars, and shares over time.

A chart is as wide as its place, and its text keeps its size: positions are percentages, and curves are drawn in a
nested SVG that stretches. Colours are the stylesheet's variables `--c0` to `--c7` and `--soft`, so they follow the
reader's scheme. What a point or a bar is, is its `<title>`.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence

from vishwamai.reports import Markup

POINTS = 1200
"""A curve of more points is thinned to about as many; lowest and highest stay."""

_MARKS = {
    "circle": "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
    "square": "M-4.5 -4.5h9v9h-9z",
    "diamond": "M0 -6l6 6l-6 6l-6 -6z",
    "triangle": "M0 -6l5.5 10h-11z",
    "star": "M0 -7l2 4.6l5 .4l-3.8 3.3l1.2 4.9l-4.4 -2.6l-4.4 2.6l1.2 -4.9l-3.8 -3.3l5 -.4z",
}
MARKS = tuple(_MARKS)

_SWATCH = '<rect class="bar" x="-8" y="-6" width="16" height="12" rx="2"/>'


@dataclasses.dataclass(frozen=True)
class Curve:
    """Points that belong together.

    Attributes:
      name: text of the legend.
      points: `(x, y)`; a curve has a gap where one is not finite.
      colour: a variable of the stylesheet.
      marks: the shape of each point, of `MARKS`; without them a line joins the points.
      hollow: bool, True for hollow marks.
      dash: the line's pattern, as SVG's `stroke-dasharray`.
      notes: text for each point.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: str = "c0"
    marks: Sequence[str] = ()
    hollow: bool = False
    dash: str = ""
    notes: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class ChartSpan:
    """A stretch of time: from when to when, what is written in it, how full it is (0 to 1), what the reader is told."""

    begin: float
    end: float
    text: str = ""
    colour: str = "c1"
    share: float = 1.0
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Bar:
    """A bar: how long, what is written on its end, what the reader is told."""

    value: float
    text: str = ""
    colour: str = "c0"
    note: str = ""


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)


def _note(text: str) -> str:
    return f"<title>{_escaped(text)}</title>" if text else ""


def number(value: float) -> str:
    """
    >>> number(1200), number(0.25), number(3e-5), number(2.5e7)
    ('1,200', '0.25', '3e-05', '2.5e+07')
    """
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.6g}"


@dataclasses.dataclass(frozen=True)
class _Axis:
    """From a value to its place, and the values with a line."""

    low: float
    high: float
    log: bool

    @classmethod
    def over(cls, values: Sequence[float], log: bool, zero: bool = False) -> _Axis:
        finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
        low, high = min(finite), max(finite)
        if log:
            return cls(low / 1.3, high * 1.3, True)
        low = min(low, 0.0) if zero else low
        room = (high - low or abs(high) or 1.0) * 0.04
        return cls(low if zero and low == 0 else low - room, high + room, False)

    def share(self, value: float) -> float:
        """Where a value is, in percent of the axis."""
        position, low, high = (math.log(v) if self.log else v for v in (value, self.low, self.high))
        return 100 * (position - low) / (high - low)

    def shows(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self.log)

    def ticks(self, count: int = 5) -> list[float]:
        if self.log:
            tens = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            if len(tens) >= 2:
                step = math.ceil(len(tens) / (count + 2))
                return [10.0**k for k in tens][::step]
        step = (self.high - self.low) / count
        size = 10 ** math.floor(math.log10(step))
        step = next(m * size for m in (1, 2, 5, 10) if m * size >= step * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        multiples = [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [v for v in multiples if v > 0] if self.log else multiples


def _legend(curves: Sequence[tuple[str, str, str]]) -> str:
    """Entries of (name, colour, the drawing of it)."""
    entries = (
        f'<span><svg viewBox="-11 -6 22 12" style="--c:var(--{colour})">{drawing}</svg>{_escaped(name)}</span>'
        for name, colour, drawing in curves
    )
    return f'<div class="legend">{"".join(entries)}</div>'


def _figure(legend: str, unit: str, plot: str, height: int, left: int, below: int, least: int = 0) -> Markup:
    """The plot with its margins in pixels; one that needs `least` pixels scrolls in a narrower place."""
    above = f"<figcaption>{_escaped(unit)}</figcaption>" if unit else ""
    padding = f"padding:8px 14px {below}px {left}px"
    around = ('<div class="scroll">', "</div>", f";min-width:{least}px") if least else ("", "", "")
    return Markup(
        f'<figure>{legend}{above}{around[0]}<div style="{padding}{around[2]}"><svg class="plot" width="100%" '
        f'height="{height}" role="img">{plot}</svg></div>{around[1]}</figure>'
    )


def _x_axis(axis: _Axis, title: str) -> str:
    lines = (
        f'<line class="grid" x1="{x:.2f}%" x2="{x:.2f}%" y1="0" y2="100%"/>'
        f'<svg x="{x:.2f}%" y="100%" overflow="visible"><text y="16" text-anchor="middle">{number(value)}</text></svg>'
        for value in axis.ticks()
        for x in [axis.share(value)]
    )
    name = f'<svg x="100%" y="100%" overflow="visible"><text y="34" text-anchor="end">{_escaped(title)}</text></svg>'
    return "".join(lines) + (name if title else "")


def _y_axis(axis: _Axis) -> str:
    return "".join(
        f'<line class="grid" x1="0" x2="100%" y1="{top:.2f}%" y2="{top:.2f}%"/>'
        f'<text x="-8" y="{top:.2f}%" dy="4" text-anchor="end">{number(value)}</text>'
        for value in axis.ticks()
        for top in [100 - axis.share(value)]
    )


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """About `POINTS` of the points: of each stretch the first, the lowest, the highest and the last."""
    if len(points) <= POINTS:
        return list(points)
    size = math.ceil(len(points) / (POINTS // 4))
    thinned: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        part = range(start, min(start + size, len(points)))
        finite = [i for i in part if math.isfinite(points[i][1])]
        gaps = {i for i in part if not math.isfinite(points[i][1])}
        ends = {min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])} if finite else set()
        thinned += [points[i] for i in sorted({part[0], part[-1], *ends, *list(gaps)[:1]})]
    return thinned


def _line(curve: Curve, x: _Axis, y: _Axis) -> str:
    pieces: list[list[str]] = [[]]
    for abscissa, value in _thinned(curve.points):
        if x.shows(abscissa) and y.shows(value):
            pieces[-1].append(f"{10 * x.share(abscissa):.1f},{1000 - 10 * y.share(value):.1f}")
        elif pieces[-1]:
            pieces.append([])
    dash = f' stroke-dasharray="{curve.dash}"' if curve.dash else ""
    # A piece of one point is drawn as a dot by its round cap.
    segments = (piece if len(piece) > 1 else piece * 2 for piece in pieces if piece)
    lines = "".join(
        f'<polyline class="curve" stroke-linecap="round"{dash} points="{" ".join(piece)}"/>' for piece in segments
    )
    return (
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%" overflow="visible" '
        f'style="--c:var(--{curve.colour})">{_note(curve.name)}{lines}</svg>'
    )


def _mark(shape: str, hollow: bool) -> str:
    return f'<path class="mark{" hollow" if hollow else ""}" d="{_MARKS[shape]}"/>'


def _marks(curve: Curve, x: _Axis, y: _Axis) -> str:
    notes = curve.notes or [curve.name] * len(curve.points)
    return (
        f'<g style="--c:var(--{curve.colour})">'
        + "".join(
            f'<svg x="{x.share(abscissa):.2f}%" y="{100 - y.share(value):.2f}%" overflow="visible"><g>{_note(note)}'
            f"{_mark(shape, curve.hollow)}</g></svg>"
            for (abscissa, value), shape, note in zip(curve.points, curve.marks, notes, strict=True)
            if x.shows(abscissa) and y.shows(value)
        )
        + "</g>"
    )


def lines(
    curves: Sequence[Curve], *, x: str = "", y: str = "", log: bool = False, zero: bool = False, height: int = 260
) -> Markup:
    """Curves and marks on two axes.

    Args:
      curves: drawn in this order; points that are not finite (with `log`: not positive) are left out.
      x, y: titles of the axes, with units.
      log: both axes are logarithmic.
      zero: the vertical axis begins at zero at the latest.
      height: height of the plot in pixels.
    """
    points = [point for curve in curves for point in curve.points]
    across, up = _Axis.over([p[0] for p in points], log), _Axis.over([p[1] for p in points], log, zero)
    shapes = "".join(_marks(c, across, up) if c.marks else _line(c, across, up) for c in curves)
    entries = [
        (
            c.name,
            c.colour,
            _mark(c.marks[0], c.hollow)
            if c.marks
            else f'<line class="curve" x1="-11" x2="11" stroke-dasharray="{c.dash or "none"}"/>',
        )
        for c in curves
        if c.points
    ]
    legend = _legend(entries) if len(entries) > 1 else ""
    return _figure(legend, y, _y_axis(up) + _x_axis(across, x) + shapes, height, 58, 42 if x else 24)


def bars(
    groups: Sequence[tuple[str, Sequence[Bar]]],
    *,
    x: str = "",
    legend: Sequence[tuple[str, str]] = (),
    reference: float | None = None,
) -> Markup:
    """Horizontal bars in groups, each group under its name, from zero.

    Args:
      groups: (name, its bars).
      x: title of the bars' length, with its unit.
      legend: (name, colour).
      reference: a value with a line of its own.
    """
    finite = [bar.value for _, group in groups for bar in group if math.isfinite(bar.value)]
    axis = _Axis(0.0, max([*finite, 1.2 * (reference or 0.0), 1e-12]) * 1.02, False)
    shapes, top = [], 0
    for name, group in groups:
        shapes.append(f'<text class="on" x="0" y="{top + 13}">{_escaped(name)}</text>')
        top += 19
        for bar in group:
            width = axis.share(bar.value) if math.isfinite(bar.value) else 0.0
            # The text is next to a short bar, and inside the end of a long one.
            inside = width > 55
            place = 'text-anchor="end" dx="-6" style="fill:var(--paper)"' if inside else 'class="on" dx="6"'
            shapes.append(
                f'<g style="--c:var(--{bar.colour})">{_note(bar.note)}<rect class="bar" y="{top}" width="{width:.2f}%" '
                f'height="17" rx="2"/><text x="{width:.2f}%" y="{top + 13}" {place}>{_escaped(bar.text)}</text></g>'
            )
            top += 20
        top += 9
    line = ""
    if reference is not None:
        limit = axis.share(reference)
        line = f'<line class="limit" x1="{limit:.2f}%" x2="{limit:.2f}%" y1="0" y2="100%"/>'
    entries = [(name, colour, _SWATCH) for name, colour in legend]
    return _figure(_legend(entries) if entries else "", "", _x_axis(axis, x) + line + "".join(shapes), top, 4, 42)


def spans(
    rows: Sequence[tuple[str, Sequence[ChartSpan]]],
    *,
    x: str,
    legend: Sequence[tuple[str, str]] = (),
    least: int = 0,
    lowest: float = 0.0,
) -> Markup:
    """What each row does over time.

    Args:
      rows: (name, its spans).
      x: the unit of time.
      legend: (name, colour).
      least: pixels that the texts in the spans need; a narrower place scrolls.
      lowest: first moment of the axis.
    """
    last = max([span.end for _, row in rows for span in row], default=lowest)
    axis = _Axis(lowest, last if last > lowest else lowest + 1.0, False)
    size, shapes = 24, []
    for r, (name, row) in enumerate(rows):
        top = r * size
        shapes.append(f'<text x="-8" y="{top + 16}" text-anchor="end">{_escaped(name)}</text>')
        for span in row:
            begin, end = axis.share(span.begin), axis.share(span.end)
            text = f'<text class="inside" x="{begin:.3f}%" dx="3" y="{top + 15}">{_escaped(span.text)}</text>'
            shapes.append(
                f'<g style="--c:var(--{span.colour})">{_note(span.note)}<rect class="cell" x="{begin:.3f}%" y="{top}" '
                f'width="{end - begin:.3f}%" height="{size - 2}" fill-opacity="{min(max(span.share, 0.0), 1.0):.2f}"/>'
                f"{text if span.text else ''}</g>"
            )
    keys = _legend([(name, colour, _SWATCH) for name, colour in legend]) if legend else ""
    return _figure(keys, "", _x_axis(axis, x) + "".join(shapes), len(rows) * size, 78, 42, least)


def shares(
    rows: Sequence[str], edges: Sequence[float], values: Sequence[Sequence[float]], notes: Sequence[str], *, x: str
) -> Markup:
    """A table of shares, from 0 (empty) to 1 (full), whose columns are as wide as they are long in time.

    Args:
      rows: names of the rows.
      edges: bounds of the columns, one more than there are columns.
      values: `[row][column]`, each a share.
      notes: text for each column.
      x: the unit of the edges.
    """
    cells = [
        (
            name,
            [
                ChartSpan(begin, end, share=share, note=f"{name} {share:.0%}: {note}")
                for share, note, begin, end in zip(of, notes, edges, edges[1:], strict=False)
            ],
        )
        for name, of in zip(rows, values, strict=True)
    ]
    return spans(cells, x=x, lowest=edges[0])
