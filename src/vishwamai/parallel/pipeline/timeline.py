"""The timeline of a schedule as a page of HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vishwamai import reports
from vishwamai.reports import charts

if TYPE_CHECKING:
    from vishwamai.parallel.pipeline.actions import Action
    from vishwamai.parallel.pipeline.simulate import Timeline

_KINDS = {"F": ("forward", "c1"), "I": ("input gradient", "c4"), "W": ("weight gradient", "c0")}
_BOX = 18  # pixels that a microbatch's number needs


def page(ran: Timeline) -> str:
    """The whole page; it needs Jinja2.

    Raises:
      UnsupportedError: Jinja2 is not installed.
    """
    rows = [
        (
            f"stage {stage}",
            [
                charts.ChartSpan(
                    span.begin,
                    span.end,
                    str(span.action.microbatch),
                    _KINDS[span.action.kind][1],
                    note=_note(span.action, span.begin, span.end),
                )
                for span in stage_spans
            ],
        )
        for stage, stage_spans in enumerate(ran.spans)
    ]
    shortest = min(
        (span.end - span.begin for stage_spans in ran.spans for span in stage_spans if span.end > span.begin), default=1
    )
    least = min(int(_BOX * ran.duration / shortest), 12_000)
    facts = [
        (f"{ran.bubble_share:.1%}", "bubble"),
        (f"{ran.duration:g}", "duration"),
        (str(len(ran.spans)), "stages"),
        (f"{max(ran.peak_activations):g}", "peak activations"),
    ]
    chart = charts.spans(rows, x="time", legend=list(_KINDS.values()), least=least)
    return reports.render("parallel/pipeline/timeline.html", title="Pipeline timeline", facts=facts, chart=chart)


def _note(action: Action, begin: float, end: float) -> str:
    kind = _KINDS[action.kind][0]
    return f"{action}: {kind} of microbatch {action.microbatch}, part {action.part}, {begin:g} to {end:g}"
