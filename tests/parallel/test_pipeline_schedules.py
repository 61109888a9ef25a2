"""Pipeline schedules as data: the published ones run and cost what is published, and a broken one is named."""

import collections
import dataclasses
import re

import pytest

from vishwamai.parallel import (
    Action,
    ActionTimes,
    PipelineScheduler,
    Schedule,
    ScheduleError,
    check_schedules,
    simulate,
    with_transfers,
)
from vishwamai.parallel.pipeline.generators import GENERATORS

# Bubble share, and peak activations, at 8 stages and 16 microbatches with "F", "I" and "W" of one time.
# The shares by hand: of GPipe and 1F1B 7 (F + I + W) waits beside 16 (F + I + W) of work; interleaved the same waits of
# half a stage; ZB-H1 7 (F + I - W); ZB-V the 7 forward passes of half a stage before the last stage can begin.
FIGURES = {
    "gpipe": (21 / 69, 16),
    "1f1b": (21 / 69, 8),
    "interleaved_1f1b": (21 / 117, 11.5),
    "zb_h1": (7 / 55, 8),
    "zb_v": (7 / 103, 8),
    "dualpipe_v": (13 / 109, 8.5),
}


def schedules(kind, num_stages=8, batch_size=16, **options):
    return PipelineScheduler(kind, **options).schedule_microbatches(num_stages, batch_size)


@pytest.mark.parametrize("kind", GENERATORS)
def test_bubbles_and_memory(kind):
    share, peak = FIGURES[kind]
    ran = simulate(schedules(kind))
    assert ran.bubble_share == pytest.approx(share, abs=1e-12)
    assert max(ran.peak_activations) == peak


def test_the_figures_that_were_promised():
    share = {kind: simulate(schedules(kind)).bubble_share for kind in FIGURES}
    assert round(share["gpipe"], 3) == 0.304 and round(share["interleaved_1f1b"], 3) == 0.179
    assert round(share["zb_v"], 3) <= 0.068
    peak = {kind: max(simulate(schedules(kind)).peak_activations) for kind in ("zb_v", "1f1b")}
    assert peak["zb_v"] <= peak["1f1b"]


@pytest.mark.parametrize("kind", GENERATORS)
def test_every_size_runs(kind):
    """Any number of stages and microbatches gives a complete schedule, or an error that names what to take."""
    served = 0
    for stages in (1, 2, 3, 5, 8):
        for batch in (1, 2, 3, 6, 8, 10, 15, 16):
            try:
                made = schedules(kind, stages, batch)
            except ScheduleError as error:
                assert re.search(rf"{batch} microbatches (are|for)", str(error)), error
                continue
            served += 1
            ran = simulate(made, ActionTimes(1.0, 1.5, 0.5, transfer=0.25))
            parts = sum(len(one.parts) for one in made)
            counts = collections.Counter(span.action for spans in ran.spans for span in spans)
            assert len(counts) == 3 * parts * batch and set(counts.values()) == {1}
            for spans in ran.spans:
                assert all(a.end <= b.begin + 1e-9 for a, b in zip(spans, spans[1:], strict=False))
    assert served >= 9


def test_a_clock_by_hand():
    """Two stages, one microbatch, with transfers: every action begins when its input has arrived."""
    ran = simulate(schedules("1f1b", 2, 1), ActionTimes(2.0, 3.0, 1.0, transfer=0.5))
    at = {str(span.action): (span.begin, span.end) for spans in ran.spans for span in spans}
    # 1F1B sends the gradient after the weight gradient.
    assert at == {
        "0F0": (0, 2),
        "1F0": (2.5, 4.5),
        "1I0": (4.5, 7.5),
        "1W0": (7.5, 8.5),
        "0I0": (9, 12),
        "0W0": (12, 13),
    }
    assert ran.duration == 13 and ran.bubble_share == pytest.approx(1 - 12 / 26)
    apart = simulate(schedules("zb_h1", 2, 1), ActionTimes(2.0, 3.0, 1.0, transfer=0.5))
    assert apart.duration == 12


def test_microbatches_of_several_rows():
    made = schedules("1f1b", 4, 32, microbatch_size=4)
    assert made == schedules("1f1b", 4, 8)
    assert [one.stage for one in made] == [0, 1, 2, 3]


def test_a_timeline_is_one_page():
    page = simulate(schedules("zb_v", 4, 8)).html()
    assert page.startswith("<!DOCTYPE html>") and "<script" not in page
    assert page.count('<rect class="cell"') == 4 * 2 * 8 * 3
    assert page.count(">stage ") == 4


def test_text_and_back():
    for one in schedules("dualpipe_v", 4, 8):
        assert Schedule.parse(one.stage, one.parts, str(one).partition(": ")[2]) == one


def without(schedule, text):
    return dataclasses.replace(schedule, actions=tuple(a for a in schedule.actions if str(a) != text))


def plus(schedule, text):
    return dataclasses.replace(schedule, actions=(*schedule.actions, *Schedule.parse(0, [0], text).actions))


GOOD = ("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1")
BROKEN = {
    "circle": (
        ("0F0 0I0 0F1 0W0 0I1 0W1", "1F1 1I1 1W1 1F0 1I0 1W0"),
        "0RECV_B0 (stage 0) waits for 1SEND_B0 (stage 1)",
    ),
    "weights first": (("0F0 0F1 0W0 0I0 0I1 0W1", GOOD[1]), "0W0 (stage 0) waits for 0I0 (stage 0), which waits for 0"),
    "missing": (("0F0 0F1 0I0 0W0 0I1", GOOD[1]), "stage 0 lacks 0W1. Add them."),
    "twice": (("0F0 0F1 0I0 0W0 0I1 0W1 0W1", GOOD[1]), "stage 0 has 0W1 2 times; keep one."),
    "another stage's": ((GOOD[0] + " 1W1", "1F0 1I0 1W0 1F1 1I1"), "stage 0 has 1W1, but part 1 is on stage 1"),
    "no such part": ((GOOD[0] + " 2F0", GOOD[1]), "stage 0 has 2F0, but there is no part 2"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_schedule_is_named(name):
    texts, message = BROKEN[name]
    plain = [Schedule.parse(i, [i], text) for i, text in enumerate(texts)]
    with pytest.raises(ScheduleError, match=re.escape(message)):
        check_schedules(with_transfers(plain))
    with pytest.raises(ScheduleError, match=re.escape(message)):
        simulate(with_transfers(plain))


def test_transfers_are_checked():
    plain = [Schedule.parse(i, [i], text) for i, text in enumerate(GOOD)]
    good = with_transfers(plain)
    check_schedules(good)
    with pytest.raises(ScheduleError, match=r"stage 0 lacks .*`with_transfers\(schedules\)` adds"):
        check_schedules(plain)
    with pytest.raises(ScheduleError, match="stage 1 lacks 1RECV_F1"):
        check_schedules([good[0], without(good[1], "1RECV_F1")])
    with pytest.raises(ScheduleError, match="stage 0 has 0SEND_B0, but no other stage needs this transfer"):
        check_schedules([plus(good[0], "0SEND_B0"), good[1]])
    late = [without(good[0], "0SEND_F1"), good[1]]
    with pytest.raises(ScheduleError, match="wait for one another in a circle.*0SEND_F1"):
        # The send of the second activation after all backward actions, one of which needs what it brings.
        check_schedules([plus(late[0], "0SEND_F1"), late[1]])


def test_a_memory_bound():
    made = schedules("gpipe", 2, 4)
    check_schedules(made, max_activations=4)
    with pytest.raises(ScheduleError, match="stage 0 holds 4 activations after 0F3, but `max_activations` is 3"):
        check_schedules(made, max_activations=3)
    with pytest.raises(ScheduleError, match="`max_activations` is 7"):
        schedules("zb_v", max_activations=7)
    schedules("zb_v", max_activations=8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PipelineScheduler("2f2b"), "there is no kind '2f2b'; pass one of gpipe, 1f1b"),
        (lambda: PipelineScheduler("1f1b", microbatch_size=0), "`microbatch_size` is 0; pass a number from 1"),
        (lambda: schedules("1f1b", 0, 4), "`num_stages` is 0"),
        (lambda: schedules("1f1b", 2, 5, microbatch_size=2), "`batch_size` 5 is not a multiple .* pass 6"),
        (lambda: schedules("interleaved_1f1b", 4, 6), "6 microbatches are not a multiple of 4 stages; pass 8"),
        (lambda: schedules("dualpipe_v", 4, 6), "pass at least 8"),
        (lambda: Schedule.parse(0, [0], "0F0 0G0"), "'0G0' is not an action"),
        (lambda: Action("F", -1, 0), "part -1"),
        (lambda: check_schedules([]), "pass a list with one `Schedule` for each stage"),
        (lambda: check_schedules([Schedule(1, (0,), ())]), r"the stages are \[1\]"),
        (lambda: check_schedules([Schedule(0, (0,), ()), Schedule(1, (0,), ())]), "part 0 is on the stages 0 and 1"),
        (lambda: check_schedules([Schedule(0, (0, 2), ())]), r"the parts are \[0, 2\]"),
        (lambda: simulate([Schedule(0, (0,), ())]), "there are no actions"),
        (lambda: simulate(schedules("1f1b", 2, 2), lambda action: -1.0), "gives -1.0 for 0F0; give a time from 0"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ScheduleError, match=message):
        call()
