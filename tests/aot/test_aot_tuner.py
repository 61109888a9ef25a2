"""The offline tuner: its steps, its climb on made-up times, its tables, and one search by the real compiler."""

import dataclasses
import importlib
import json

import jax
import numpy as np
import pytest

from vishwamai import aot
from vishwamai.aot.compile.compiled import tracing_for
from vishwamai.aot.tuning import tuner, variations
from vishwamai.core import tuning
from vishwamai.core.errors import KernelError
from vishwamai.core.hardware import TPUS
from vishwamai.core.observe import record_plans
from vishwamai.core.pallas import planned_vmem
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles, size, sizes
from vishwamai.ops.catalogue import operations
from vishwamai.ops.norm.cases import CASES

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install '.[aot]'")
CASE = next(case for case in CASES if case.name == "Llama 3 8B")


def cases_of(op):
    return operations()[op].cases


V5E = Target("tpu", TPUS["v5e"])


@dataclasses.dataclass(frozen=True)
class Blocks(Tiles):
    """Memory is planned as a byte for each element of the blocks of each pass."""

    block: int = size("rows", 256)
    grad: tuple[int, int] | None = sizes(("columns", "depth"), (128, 512))
    whole: int = size("depth", 1 << 30)
    native: bool = True
    kv_buffers: int = 2
    vmem_bytes: int = 0
    backward_block: int = size("rows", 128, of="backward")
    backward_vmem_bytes: int = 0

    def planned(self, spec, target):
        plan = self.block << 10, self.backward_block << 10
        return dataclasses.replace(self, vmem_bytes=plan[0], backward_vmem_bytes=plan[1])


def paths(config):
    return list(config.sizes())


def spec_of(op):
    """The spec of the operation's first case."""
    case = cases_of(op)[0]
    return record_plans(case.run, case.shapes())[0].spec


def test_tiles_are_sizes_and_nothing_else():
    found = {path: (value, what.of) for path, (what, value) in Blocks().sizes().items()}
    both = {"block": (256, "forward"), "backward_block": (128, "backward")}
    assert found == both | {"grad.0": (128, "forward"), "grad.1": (512, "forward")}
    assert set(Blocks(grad=None).sizes()) == set(both)
    assert variations.passes(Blocks()) == {"forward": ["block", "grad.0", "grad.1"], "backward": ["backward_block"]}


def test_neighbours_change_one_tile_or_two_against_one_another():
    found = list(variations.neighbours(Blocks(), ["block", "grad.1"], None, V5E))
    assert {(t.block, t.grad) for t in found} == {
        (512, (128, 512)),
        (128, (128, 512)),
        (256, (128, 1024)),
        (256, (128, 256)),
        (512, (128, 256)),
        (128, (128, 1024)),
    }
    assert all(t.whole == 1 << 30 and t.native and t.backward_block == 128 for t in found)
    # a tile never falls to nothing
    assert all(t.block > 0 for t in variations.neighbours(Blocks(block=1), ["block"], None, V5E))


def test_what_cuts_an_axis_otherwise_comes_first():
    """A budget of a few programs should go to tiles that need no more memory."""

    @dataclasses.dataclass(frozen=True)
    class Panels(Tiles):
        block_q: int = size("queries", 512)
        panel_q: int = size("queries", 2)
        unroll: int = size("unroll", 4)
        cores: int = 2

    found = [(t.block_q, t.panel_q, t.unroll) for t in variations.neighbours(Panels(), paths(Panels()), None, V5E)]
    assert found[:3] == [(1024, 1, 4), (256, 4, 4), (512, 2, 2)]


def test_tiles_that_would_leave_work_out_are_no_neighbours():
    rope, softmax = (importlib.import_module(f"vishwamai.ops.{op}.tpu") for op in ("rope", "softmax"))
    for op, config in (("rope", rope.RopeConfig(64, 64)), ("softmax", softmax.SoftmaxConfig(8, 8))):
        found = list(variations.neighbours(config, paths(config), spec_of(op), V5E))
        assert found
        for one in found:
            block, chunk, planned = dataclasses.astuple(one)
            assert block % chunk == 0 and planned > 0
    with pytest.raises(KernelError, match="block_positions must be a multiple of chunk_positions"):
        rope.RopeConfig(64, 128)
    with pytest.raises(KernelError, match="block_rows one of chunk_rows"):
        softmax.SoftmaxConfig(64, 128)
    attention = importlib.import_module("vishwamai.ops.attention.tpu_tiles")
    tiling = attention.Tiling(256, 256, 1, 1, 2)
    attention.AttentionConfig(tiling, tiling)
    for wrong, words in ({"unroll": 1}, "unroll must be even"), ({"block_q": 64}, "64 x 256"):
        with pytest.raises(KernelError, match=words):
            attention.AttentionConfig(tiling, dataclasses.replace(tiling, **wrong))


def test_values_that_steer_a_kernel_are_given():
    case = next(c for c in cases_of("paged_attention") if c.name == "mixed bf16")
    given = tuner.arguments(case)
    assert np.asarray(given["kv_lens"]).tolist() == [21, 5, 8, 9, 30]
    assert isinstance(given["query"], jax.ShapeDtypeStruct)


def test_memory_is_planned_by_the_config():
    (halved, doubled) = variations.neighbours(Blocks(), ["block"], None, V5E)
    assert (halved.vmem_bytes, doubled.vmem_bytes) == (128 << 10, 512 << 10)
    assert planned_vmem(20 << 20, 10 << 20, Target("tpu", TPUS["v4"])) == 12 << 20  # three quarters of all there is
    assert planned_vmem(20 << 20, 14 << 20, Target("tpu", TPUS["v4"])) == 14 << 20  # what the heuristic dared already
    assert planned_vmem(2 << 20, 10 << 20, V5E) == 2 << 20


@pytest.mark.parametrize("op", sorted(operations()))
@pytest.mark.parametrize("target", ["v5e", "tpu7x"])
def test_a_heuristics_config_plans_its_own_tiles(op, target):
    """A config plans memory for its own tiles, those of the ambient block size too, and JSON brings it back."""
    case = cases_of(op)[0]
    with tracing_for(target):
        plan = record_plans(case.run, case.shapes())[0]
    choice = next(choice for choice in plan.choices if choice.platform in ("tpu", None))
    config = choice.config
    if config is None:
        return
    assert type(config).from_json(json.loads(json.dumps(dataclasses.asdict(config)))) == config
    aim = Target("tpu", TPUS[target])
    assert config.planned(plan.spec, aim).sizes() == config.sizes()
    for block_size in (64, 200):
        other = config.with_block_size(block_size)
        planned = other.planned(plan.spec, aim)
        assert planned.sizes() == other.sizes()
        assert all(value >= 0 for value in dataclasses.astuple(planned) if isinstance(value, int))


@pytest.fixture
def made_up(monkeypatch):
    """Times without a compiler: fastest where a block has 1024 rows in chunks of 32; larger blocks are rejected."""
    counted = []

    def evaluate(search, configs, backward):
        allowed = configs[: search.budget - search.compilations]
        search.compilations += len(allowed)
        counted.extend(allowed)
        trials = []
        for config in allowed:
            if config.block_rows > 1024:
                search.rejected.append("too large")
                continue
            seconds = 1e-4 * (1 + abs(config.block_rows - 1024) / 1024 + abs(config.chunk_rows - 32) / 32)
            trials.append(tuner._Trial(config, seconds, 5e-5 / seconds))
        return trials

    monkeypatch.setattr(tuner.Search, "evaluate", evaluate)
    return counted


@needs_libtpu
def test_the_climb_finds_the_fastest_and_keeps_to_its_budget(made_up):
    outcome = tuner.tune_case(CASE, "v5e", budget=40)
    assert (outcome.config["block_rows"], outcome.config["chunk_rows"]) == (1024, 32)
    assert outcome.changed
    assert outcome.seconds == pytest.approx(1e-4)
    assert outcome.heuristic_seconds > outcome.seconds
    assert "too large" in outcome.rejected
    assert len(made_up) == len(set(made_up)) == outcome.compilations <= 40
    made_up.clear()
    assert tuner.tune_case(CASE, "v5e", budget=3).compilations == 3 == len(made_up)


@needs_libtpu
def test_tables_are_written_found_again_and_used(made_up, tmp_path, monkeypatch):
    told = []
    first = tuner.tune([CASE], ["v5e", "v6e"], directory=tmp_path, progress=lambda *what: told.append(what))
    assert [outcome.target for outcome in first if isinstance(outcome, tuner.Outcome)] == ["v5e", "v6e"]
    assert [what[:2] for what in told] == [(1, 2), (2, 2)]
    table = json.loads((tmp_path / "v5e" / "norm.json").read_text())
    (entry,) = table["pallas_tpu"].values()
    assert entry["config"]["block_rows"] == 1024
    assert entry["versions"] == aot.versions()
    assert tuner.tune([CASE], ["v5e", "v6e"], directory=tmp_path) == []  # an interrupted run goes on where it was
    assert len(tuner.tune([CASE], ["v5e"], directory=tmp_path, again=True)) == 1
    entry["versions"]["libtpu"] = "0.0.1"
    (tmp_path / "v5e" / "norm.json").write_text(json.dumps(table))
    assert len(tuner.tune([CASE], ["v5e"], directory=tmp_path)) == 1  # found by another compiler: search again
    monkeypatch.setenv("VISHWAMAI_TUNING_DIR", str(tmp_path))
    tuning.reload()
    with tracing_for("v5e"):
        (plan,) = record_plans(CASE.run, CASE.shapes())
    assert plan.choices[0].config.block_rows == 1024
    tuning.reload()


@needs_libtpu
def test_kernels_are_stepped_abreast_and_each_keeps_what_serves_it(monkeypatch):
    """One program in which every kernel has other tiles tells three times; what is best of each is estimated together
    before it counts.
    """
    case = next(c for c in cases_of("grouped_gemm") if c.name == "Qwen3 30B-A3B up")
    start = tuner.Search(case, "v6e", 1, 1).choice.config
    rows, columns, wide = start.forward.rows, start.forward.columns, start.grad_lhs.columns
    tried = []

    def evaluate(search, configs, backward):
        assert backward
        configs = configs[: search.budget - search.compilations]
        search.compilations += len(configs)
        tried.extend(configs)
        trials = []
        for config in configs:
            parts = {
                "forward": 1.0 + (config.forward.rows != 2 * rows),
                "grad_lhs": 1.0 + (config.grad_lhs.columns != wide // 2),
                "grad_rhs": 2.0 + (config.grad_rhs != start.grad_rhs),
            }
            trials.append(tuner._Trial(config, sum(parts.values()), 0.5, parts))
        return trials

    monkeypatch.setattr(tuner.Search, "evaluate", evaluate)
    outcome = tuner.tune_case(case, "v6e", budget=6)
    found = type(start).from_json(outcome.config)
    assert (found.forward.block[:2], found.grad_lhs.columns) == ((2 * rows, columns), wide // 2)
    assert found.grad_rhs == start.grad_rhs
    assert (outcome.seconds, outcome.heuristic_seconds) == (4.0, 6.0)
    assert len(tried) == len(set(tried)) == outcome.compilations <= 6
    assert list(tuner.Search(case, "v6e", 1, 1).passes) == ["forward"]


def test_only_parts_of_one_pass_are_kernels_of_their_own():
    assert variations.kernels(Blocks()) == ()
    loss = importlib.import_module("vishwamai.ops.loss.tpu")
    config = loss.LossConfig(512, 1024, 256, 2048)
    assert "block_vocab" not in config.sizes()  # it is a plan of memory in HBM
    found = variations.neighbours(config, paths(config), spec_of("linear_cross_entropy"), V5E)
    assert all(t.block_vocab == 2048 for t in found)
    with pytest.raises(KernelError, match="768 vocab entries a step, 256 at once"):
        loss.LossConfig(512, 768, 256, 2048)


@needs_libtpu
@pytest.mark.parametrize("op", ["gemm", "attention"])
def test_every_operation_has_tiles_that_a_table_gives_back(op, monkeypatch, tmp_path):
    """Tuples, flags and both passes go through the table and come back as the config they were."""
    case = next(case for case in cases_of(op) if "model" in case.tags)
    tried = []

    def evaluate(search, configs, backward):
        configs = configs[: search.budget - search.compilations]
        search.compilations += len(configs)
        tried.extend(configs)
        return [tuner._Trial(config, 1.0 / len(tried), 0.5) for config in configs]

    monkeypatch.setattr(tuner.Search, "evaluate", evaluate)
    (outcome,) = tuner.tune([case], ["v5p"], directory=tmp_path, budget=6)  # enough for both passes
    assert isinstance(outcome, tuner.Outcome)
    assert outcome.compilations <= 6
    assert outcome.changed
    monkeypatch.setenv("VISHWAMAI_TUNING_DIR", str(tmp_path))
    tuning.reload()
    with tracing_for("v5p"):
        (plan,) = record_plans(case.run, case.shapes())
    tuning.reload()
    assert dataclasses.asdict(plan.choices[0].config) == outcome.config
    assert hash(plan.choices[0].config) in {hash(config) for config in tried}


@needs_libtpu
def test_what_cannot_be_tuned_says_so(tmp_path):
    other = dataclasses.replace(CASE, call=lambda x, **_: x + 1, options={})
    (error,) = tuner.tune([other], ["v5e"], directory=tmp_path)
    assert isinstance(error, KernelError)
    assert "calls no norm" in str(error)
    assert not list(tmp_path.iterdir())


@needs_libtpu
@pytest.mark.long
def test_search_by_the_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path / "cache"))
    (outcome,) = tuner.tune([CASE], ["v5e"], directory=tmp_path, budget=6, workers=2)
    assert isinstance(outcome, tuner.Outcome)
    assert outcome.seconds <= outcome.heuristic_seconds
    assert outcome.compilations <= 6
    assert 0 < outcome.efficiency < 1
