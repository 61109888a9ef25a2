"""The tuning tables that ship: every entry is found for the case it was searched for, and the heuristic, which serves all other shapes, is close to them."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest

import vishwamai
from vishwamai import aot
from vishwamai.aot.compile import tracing_for
from vishwamai.aot.tuner import _Search
from vishwamai.core import tuning
from vishwamai.core.op import record_plans

TABLES = sorted((Path(vishwamai.__file__).parent / "data" / "tuning").glob("*/*.json"))
ENTRIES = [
    pytest.param(
        path.parent.name, path.stem, implementation, key, entry, id=f"{path.parent.name}-{path.stem}-{entry['case']}"
    )
    for path in TABLES
    for implementation, entries in json.loads(path.read_text()).items()
    for key, entry in entries.items()
]
needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install 'vishwamai[aot]'")


def case_of(op, name):
    return next(case for case in importlib.import_module(f"vishwamai.ops.{op}.cases").CASES if case.name == name)


def test_tables_are_there():
    assert {path.parent.name for path in TABLES} == {"v4", "v5e", "v5p", "v6e", "tpu7x"}
    assert {path.stem for path in TABLES} >= {"norm", "matmul"}


@pytest.fixture(autouse=True)
def shipped_only(monkeypatch, tmp_path):
    monkeypatch.setenv("VISHWAMAI_TUNING_DIR", str(tmp_path))
    tuning.reload()
    yield
    tuning.reload()


@pytest.mark.parametrize("target, op, implementation, key, entry", ENTRIES)
def test_an_entry_serves_its_case(target, op, implementation, key, entry):
    with tracing_for(target):
        plan = next(
            plan
            for plan in record_plans(case_of(op, entry["case"]).run, case_of(op, entry["case"]).shapes())
            if plan.op.name == op
        )
    choice = next(choice for choice in plan.choices if choice.platform == "tpu")
    assert plan.spec.tuning_key() == key
    assert choice.implementation.name == implementation
    found = json.loads(json.dumps(dataclasses.asdict(choice.config)))  # lists for tuples, as in the table
    assert {name: found[name] for name in entry["config"]} == entry["config"]


@pytest.mark.parametrize("target, op, implementation, key, entry", ENTRIES)
def test_the_heuristic_is_within_a_tenth(target, op, implementation, key, entry):
    assert entry["estimate_us"] <= entry["heuristic_us"] <= 1.10 * entry["estimate_us"]


@needs_libtpu
@pytest.mark.long
@pytest.mark.parametrize("target", ["v5e", "v5p", "tpu7x"])
def test_the_heuristic_still_takes_what_the_table_says(target):
    """The evidence is of this code: the heuristic's time for one case, estimated again."""
    (entry,) = (
        entry
        for entries in json.loads(next(p for p in TABLES if p.parts[-2:] == (target, "norm.json")).read_text()).values()
        for entry in entries.values()
        if entry["case"] == "BERT base"
    )
    if entry["versions"] != aot.versions():
        pytest.skip(f"the table was searched with {entry['versions']}")
    search = _Search(case_of("norm", "BERT base"), target, budget=1, workers=1)
    (trial,) = search.evaluate([search.choice.config], backward=True)
    assert trial.seconds * 1e6 == pytest.approx(entry["heuristic_us"], rel=0.02)
