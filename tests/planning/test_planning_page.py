"""The page of a plan: the memory of a device has a line, and the axis is for what fits."""

import re

from plans import training
from vishwamai.core.figures import Estimate
from vishwamai.planning.search.candidates import Candidate
from vishwamai.planning.search.page import write_page
from vishwamai.planning.search.plan import Plan

GIB = 2**30


def test_the_chart_is_of_what_fits_next_to_the_memory_of_a_device(tmp_path):
    config = training()

    def candidate(gib, seconds):
        return Candidate(
            config, "v5e", 16 * GIB, Estimate(gib * GIB, "analytic", "B"), formula=Estimate(seconds, "analytic", "s")
        )

    candidates = (candidate(8, 2.0), candidate(18, 1.0), candidate(400, 0.9), candidate(500, 0.8))
    plan = Plan("v5e", 16 * GIB, candidates, candidates[0], 0, 0, 4)
    write_page([plan], tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    figure = page[page.index("<figure>") : page.index("</figure>")]
    assert "what a device holds: 16.00 GiB" in figure and "stroke-dasharray" in figure
    assert "too large (2 more are further right)" in figure
    assert figure.count("<title>data=") == 2 and not re.search(r">[2-9]00<", figure)  # neither 400 nor 500 GiB
    assert page.count("<tr>") == 1 + len(candidates)  # the table has all
