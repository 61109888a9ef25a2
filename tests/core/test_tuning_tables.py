"""The tuning tables that ship: every entry is found for the case it was searched for, and the heuristic, which serves
all other shapes, is close to them.
"""

import dataclasses
import functools
import json

import pytest

from vishwamai import aot
from vishwamai.aot.compile.compiled import tracing_for
from vishwamai.aot.tuning import tables
from vishwamai.aot.tuning.recheck import STALE, Recheck, recheck
from vishwamai.aot.tuning.tuner import Search
from vishwamai.core import tuning
from vishwamai.core.errors import KernelError
from vishwamai.core.hardware import TPUS
from vishwamai.core.observe import record_plans
from vishwamai.core.target import Target

ALL = list(tables.entries(tables.shipped()))
ENTRIES = [pytest.param(entry, id=str(entry)) for entry in ALL]
needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install '.[aot]'")


def test_tables_are_there():
    assert {entry.target for entry in ALL} == set(TPUS)
    assert {entry.op for entry in ALL} >= {
        "attention",
        "gated_linear_unit",
        "linear_cross_entropy",
        "gemm",
        "grouped_gemm",
        "norm",
        "paged_attention",
        "rope",
        "softmax",
    }
    assert {(entry.target, entry.op) for entry in ALL} >= {
        (target, op) for target in TPUS for op in ("norm", "gemm", "attention")
    }


@pytest.fixture(autouse=True)
def shipped_only(monkeypatch, tmp_path):
    monkeypatch.setenv("VISHWAMAI_TUNING_DIR", str(tmp_path))
    tuning.reload()
    yield
    tuning.reload()


def as_in_a_table(config):
    return json.loads(json.dumps(dataclasses.asdict(config)))  # lists for tuples


@functools.cache
def search_of(entry_id):
    """Traced once for all tests: what serves the case, with the heuristic's tiles."""
    entry = next(entry for entry in ALL if str(entry) == entry_id)
    return Search(entry.case, entry.target, budget=2, workers=1)


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_serves_its_case(entry):
    search = search_of(str(entry))
    assert search.plan.spec.tuning_key() == entry.key
    assert search.choice.implementation.name == entry.implementation
    kind = type(search.choice.config)
    found = as_in_a_table(
        tuning.lookup(entry.op, entry.implementation, Target("tpu", search.chip), search.plan.spec, kind)
    )
    assert {name: found[name] for name in entry.evidence["config"]} == entry.evidence["config"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_heuristic_is_within_a_tenth(entry):
    """And it is the one that was estimated: what a heuristic that changed since is worth, nobody knows."""
    evidence = entry.evidence
    assert evidence["estimate_us"] <= evidence["heuristic_us"] <= STALE * evidence["estimate_us"]
    if evidence["estimate_us"] < evidence["heuristic_us"] and "heuristic" not in evidence:
        return  # searched before tables held what the heuristic has otherwise
    config = search_of(str(entry)).choice.config
    then = dict(evidence["config"]) | evidence.get("heuristic", {})
    known = {path for path in config.sizes() if path.partition(".")[0] in then}  # a table may be older than a field

    def of(tiles):
        return {path: value for path, (_, value) in tiles.sizes().items() if path in known}

    assert of(config) == of(type(config).from_json(then)), f"{entry}: search it again, `vishwamai tune --again`"


def test_a_table_is_used_without_being_asked_for():
    entry = next(entry for entry in ALL if entry.op == "norm")
    with tracing_for(entry.target):
        (plan,) = record_plans(entry.case.run, entry.case.shapes())
    assert as_in_a_table(plan.choices[0].config) == entry.evidence["config"]


# Of every operation one entry, each on another chip: the cheapest there, which compile soonest.
SAMPLE = [
    min((e for e in ALL if (e.op, e.target) == (op, target)), key=lambda e: e.evidence["estimate_us"])
    for i, op in enumerate(sorted({e.op for e in ALL}))
    for target in [sorted({e.target for e in ALL if e.op == op})[i % len({e.target for e in ALL if e.op == op})]]
]


@needs_libtpu
@pytest.mark.long
@pytest.mark.parametrize("entry", [pytest.param(entry, id=str(entry)) for entry in SAMPLE])
def test_an_entry_is_not_stale(entry):
    assert recheck(entry).complaint is None


@pytest.mark.parametrize(
    "now, heuristic, complaint",
    [
        (100.0, 100.0, None),
        (109.0, 109.5, None),
        (112.0, 130.0, "112.0 us now, 100.0 us when it was searched"),
        (90.0, 95.0, "90.0 us now"),
        (105.0, 100.0, "and the heuristic takes 100.0 us"),
        (100.0, 112.0, "100.0 us are possible"),
    ],
)
def test_what_makes_an_entry_stale(now, heuristic, complaint):
    entry = dataclasses.replace(ALL[0], evidence=dict(ALL[0].evidence) | {"estimate_us": 100.0})
    found = Recheck(entry, now * 1e-6, heuristic * 1e-6).complaint
    if complaint is None:
        assert found is None
    else:
        assert found is not None and complaint in found and str(entry) in found


@needs_libtpu
def test_an_entry_that_serves_nothing_any_more_says_so():
    entry = next(e for e in ALL if e.op == "norm")
    with pytest.raises(KernelError, match="no such case any more"):
        recheck(dataclasses.replace(entry, evidence=dict(entry.evidence) | {"case": "Llama 0"}))
    with pytest.raises(KernelError, match="now asks for"):
        recheck(dataclasses.replace(entry, key="another"))
    with pytest.raises(KernelError, match="does not fit"):
        recheck(dataclasses.replace(entry, evidence=dict(entry.evidence) | {"config": {"rows": 3}}))
