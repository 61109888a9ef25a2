"""The HTML pages that commands write: one template and one stylesheet that all share, and charts as inline SVG.

A page is one file that loads nothing: no script, no font, no image. It follows the reader's light or dark scheme and
is readable at a width of 400 px. A package keeps its own template next to its code, which extends `reports/base.html`
and has the macros of `reports/parts.html`; `charts` draws.

Jinja2 (the extra `report`) is loaded when a page is rendered.
"""

from __future__ import annotations

import functools
from typing import Any

from vishwamai.core.errors import UnsupportedError
from vishwamai.core.installing import install_line

NEEDED = "jinja2"
"""The package that `render` needs."""


def install_hint() -> str:
    """The package that pages need, and the line that installs it."""
    return f"an HTML page needs the package {NEEDED}: {install_line('report')}"


class Markup(str):
    """Text that is HTML already: templates take it as it is, and escape all other text."""

    def __html__(self) -> Markup:
        return self


@functools.cache
def _environment() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise UnsupportedError(f"{install_hint()}.") from error
    loader = jinja2.PackageLoader("vishwamai", "")
    return jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def render(template: str, **values: object) -> str:
    """The text of a page.

    Args:
      template: a file of the package, by its path below `vishwamai/`: "bench/report.html".
      values: values by the names of the template. Strings are escaped, except for `Markup`.

    Raises:
      UnsupportedError: Jinja2 is not installed.

    >>> from vishwamai.reports import charts
    >>> curve = charts.Curve("loss", [(0, 4.0), (1, 3.0), (2, 2.5)])
    >>> text = render("reports/base.html", title="A <run>", content=charts.lines([curve], x="step"))
    >>> "<h1>A &lt;run&gt;</h1>" in text, "<polyline" in text, "http" in text
    (True, True, False)
    """
    return _environment().get_template(template).render(**values)
