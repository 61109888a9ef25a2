"""The HTML pages that commands write: their template, and the charts as inline SVG."""

import builtins
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from vishwamai.core.errors import UnsupportedError
from vishwamai.reports import Markup, _environment, charts, render

pytest.importorskip("jinja2")


def parsed(chart: str) -> ElementTree.Element:
    """A chart is well-formed XML as well, so that any parser takes it."""
    return ElementTree.fromstring(chart)


def polylines(chart: str) -> list[list[tuple[float, float]]]:
    found = (line.get("points", "") for line in parsed(chart).iter("polyline"))
    return [[(float(x), float(y)) for x, y in (p.split(",") for p in points.split())] for points in found]


def test_text_is_escaped_and_nothing_is_loaded():
    curve = charts.Curve("<b> & 'c'", [(0, 1), (1, 2)], marks=["circle", "star"], notes=['"one"', "<two>"])
    page = render("reports/base.html", title="<script>", content=charts.lines([curve, curve], x="<x>", y="<y>"))
    assert "<script" not in page and "<two>" not in page and "&lt;two&gt;" in page
    assert not re.search(r"https?:|src=|@import|url\(", page)
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page


def test_a_curve_is_where_its_points_are():
    """The ends of the data are 4% from the ends of the axes; halves are in the middle."""
    (line,) = polylines(charts.lines([charts.Curve("a", [(0.0, 10.0), (5.0, 15.0), (10.0, 20.0)])]))
    low, high = 1000 * 0.04 / 1.08, 1000 * 1.04 / 1.08
    assert sum(line, ()) == pytest.approx((low, high, 500.0, 500.0, high, low), abs=0.1)
    (line,) = polylines(charts.lines([charts.Curve("a", [(1, 1), (10, 10), (100, 100)])], log=True))
    assert line[1] == pytest.approx((500, 500), abs=0.1) and line[0][0] < 100 and line[0][1] > 900


def test_a_gap_where_a_value_is_not_finite():
    points = [(0, 1.0), (1, 2.0), (2, math.nan), (3, 1.0), (4, math.inf), (5, 1.5), (6, 1.0)]
    assert [len(line) for line in polylines(charts.lines([charts.Curve("a", points)]))] == [2, 2, 2]
    empty = charts.lines([charts.Curve("a", [(0, math.nan)])])
    assert polylines(empty) == [] and parsed(empty) is not None


def test_a_long_curve_keeps_its_spikes_and_gaps():
    points = [(float(i), 1.0) for i in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    points[77_777] = (77_777.0, math.nan)
    found = polylines(charts.lines([charts.Curve("a", points)]))
    assert len(found) == 2 and sum(map(len, found)) < 2 * charts.POINTS
    assert min(y for line in found for _, y in line) < 100 < max(y for line in found for _, y in line)


def test_bars_are_as_long_as_their_values():
    groups = [("one", [charts.Bar(2.0, "2x"), charts.Bar(1.0, "1x")]), ("two", [charts.Bar(math.nan, "none")])]
    made = charts.bars(groups, x="times", reference=1.0)
    widths = [float(r.get("width", "").rstrip("%")) for r in parsed(made).iter("rect")]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.02) and widths[2] == 0 and max(widths) < 100
    (limit,) = (line for line in parsed(made).iter("line") if line.get("class") == "limit")
    assert float(limit.get("x1", "").rstrip("%")) == pytest.approx(widths[1])


def test_shares_over_time():
    made = charts.shares(["MXU", "VPU"], [0.0, 1.0, 4.0], [[0.5, 1.0], [0.0, 2.0]], ["a", "b"], x="us")
    cells = [(c.get("width"), c.get("fill-opacity")) for c in parsed(made).iter("rect")]
    assert cells == [("25.000%", "0.50"), ("75.000%", "1.00"), ("25.000%", "0.00"), ("75.000%", "1.00")]


@pytest.mark.parametrize("low, high", [(0, 1), (-3, 7), (1e-9, 3e-9), (99.5, 100), (5, 5), (0, 0), (2e5, 3e11)])
@pytest.mark.parametrize("log", [False, True])
def test_ticks_are_few_and_inside(low, high, log):
    axis = charts._Axis.over([low, high], log)
    found = axis.ticks()
    assert 1 <= len(found) <= 9 and all(-1e-6 <= axis.share(v) <= 100 + 1e-6 for v in found)
    assert len({charts.number(v) for v in found}) == len(found)


def test_markup_is_not_escaped_twice():
    page = render("reports/base.html", title="t", content=Markup("<p>a &amp; b</p>"))
    assert "<p>a &amp; b</p>" in page


def test_without_jinja2_the_command_that_installs_it_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "jinja2":
            raise ImportError("No module named 'jinja2'")
        return real(name, *rest)

    _environment.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError, match=r"pip install '\.\[report\]'"):
        render("reports/base.html", title="t", content="")
