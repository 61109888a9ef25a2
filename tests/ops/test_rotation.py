"""Tests rotate: every case has its day, larger shares contain smaller ones, and a run can be repeated."""

import os
import subprocess
import sys

import pytest

import contract
import rotation

NAMES = list(contract.OPERATIONS)


@pytest.mark.parametrize("name", NAMES)
def test_every_case_has_its_day(monkeypatch, name):
    """Within four days; a case that runs for the slow implementations runs for the others too."""
    cases = contract.OPERATIONS[name].cases
    seen = set()
    for seed in range(20260101, 20260105):
        monkeypatch.setattr(rotation, "SEED", seed)
        half, quarter = rotation.share(cases, (), 2), rotation.share(cases, (), 4)
        assert len(quarter) <= len(cases) / 4 + 2
        assert len(quarter - half) <= 1  # one with gradients may be added to each
        seen |= quarter
    assert seen == {case.name for case in cases}


def test_one_of_so_many_runs_by_default(monkeypatch):
    chosen = []
    for seed in range(3 * rotation.RARITY):
        monkeypatch.setattr(rotation, "SEED", seed)
        chosen.append([i for i in range(9) if pytest.mark.long not in rotation.one_in(3, i)])
    assert sorted(sum(chosen, [])) == list(range(9))


def test_parameters_in_turn(monkeypatch):
    monkeypatch.setattr(rotation, "SEED", 1)
    given = rotation.in_turn(2, ["a", ("b", 2)])
    assert [one.values for one in given] == [("a",), ("b", 2)]
    assert [{mark.name for mark in one.marks} for one in given] == [{"rotating", "long"}, {"rotating"}]


@pytest.mark.turns(5)
def test_a_seed_repeats_a_run():
    """Another process with the seed of the header chooses the same cases; another seed chooses others."""

    def chosen(seed: int) -> str:
        program = (
            "import contract; [print(op.name, impl.name, sorted(contract.by_default(op, impl)))"
            " for op, impl in contract.pairs()]"
        )
        given = os.environ | {rotation.VARIABLE: str(seed)}
        return subprocess.run(
            [sys.executable, "-c", program],
            env=given,
            cwd=os.path.dirname(rotation.__file__),
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert f"{rotation.VARIABLE}={rotation.SEED}" in rotation.header()
    assert chosen(1) == chosen(1) != chosen(2)


@pytest.mark.turns(3)
@pytest.mark.parametrize("number", range(9))
def test_each_case_takes_its_turn(monkeypatch, request, number):
    """A case with `turns(3)` runs by default under one of six seeds in a row, today's among them if it is here."""

    def is_default(seed: int) -> bool:
        item = pytest.Function.from_parent(request.node.parent, name=request.node.name, callobj=lambda: None)
        item.add_marker(pytest.mark.turns(3))
        monkeypatch.setattr(rotation, "SEED", seed)
        rotation.turns(item)
        assert item.get_closest_marker("rotating")
        return item.get_closest_marker("long") is None

    today = rotation.SEED
    assert [is_default(today + days) for days in range(3 * rotation.RARITY)].count(True) == 1
    assert is_default(today) == (request.node.get_closest_marker("long") is None)
