"""The offline tuner: its steps, its climb on made-up times, its tables, and one search by the real compiler."""

import dataclasses
import importlib
import json

import jax
import pytest

from vishwamai import aot
from vishwamai.aot import tuner
from vishwamai.aot import tuner_steps as steps
from vishwamai.aot.compile import tracing_for
from vishwamai.core import tuning
from vishwamai.core.errors import KernelError
from vishwamai.core.hardware import chip
from vishwamai.core.op import record_plans
from vishwamai.ops.norm.cases import CASES

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install 'vishwamai[aot]'")
CASE = next(case for case in CASES if case.name == "Llama 3 8B")


def case_module(op):
    return importlib.import_module(f"vishwamai.ops.{op}.cases")


@dataclasses.dataclass(frozen=True)
class Tiles:
    block: int = 256
    grad: tuple[int, int] | None = (128, 512)
    whole: int = 1 << 30
    native: bool = True
    kv_buffers: int = 2
    vmem_bytes: int = 10 << 20
    backward_block: int = 128
    backward_vmem_bytes: int = 4 << 20


def test_tiles_are_sizes_and_nothing_else():
    assert tuner.tiles(Tiles()) == {"block": 256, "grad.0": 128, "grad.1": 512, "backward_block": 128}
    assert tuner.tiles(Tiles(grad=None)) == {"block": 256, "backward_block": 128}


def test_neighbours_change_one_tile_or_two_against_one_another():
    found = list(tuner.neighbours(Tiles(), ["block", "grad.1"], chip("v5e")))
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
    assert all(t.block > 0 for t in tuner.neighbours(Tiles(block=1), ["block"], chip("v5e")))


def test_what_cuts_an_axis_otherwise_comes_first():
    """A budget of a few programs should go to tiles that need no more memory."""

    @dataclasses.dataclass(frozen=True)
    class Panels:
        block_q: int = 512
        panel_q: int = 2
        unroll: int = 4
        cores: int = 2

    found = [(t.block_q, t.panel_q, t.unroll) for t in tuner.neighbours(Panels(), tuner.tiles(Panels()), chip("v5e"))]
    assert found[:3] == [(1024, 1, 4), (256, 4, 4), (512, 2, 2)]


def test_tiles_that_would_leave_work_out_are_no_neighbours():
    rope, softmax = (importlib.import_module(f"vishwamai.ops.{op}.tpu") for op in ("rope", "softmax"))
    for config in (rope.RopeConfig(64, 64), softmax.SoftmaxConfig(8, 8)):
        found = list(tuner.neighbours(config, tuner.tiles(config), chip("v5e")))
        assert found
        for one in found:
            block, chunk, _ = dataclasses.astuple(one)
            assert block % chunk == 0
    with pytest.raises(KernelError, match="block_positions must be a multiple of chunk_positions"):
        rope.RopeConfig(64, 128)
    with pytest.raises(KernelError, match="block_rows one of chunk_rows"):
        softmax.SoftmaxConfig(64, 128)
    attention = importlib.import_module("vishwamai.ops.attention.tpu")
    tiles = (256, 256, 1, 1, 2, 2, 2, 1 << 20)
    attention.AttentionConfig(*tiles, *tiles, False)
    for wrong, words in (((256, 256, 1, 1, 1, 2, 2, 1 << 20), "unroll must be even"), ((64, *tiles[1:]), "64 x 256")):
        with pytest.raises(KernelError, match=words):
            attention.AttentionConfig(*tiles, *wrong, False)


def test_values_that_steer_a_kernel_are_given():
    case = next(c for c in case_module("paged_attention").CASES if c.name == "mixed bf16")
    given = tuner.arguments(case)
    assert given["kv_lens"].tolist() == [21, 5, 8, 9, 30]
    assert isinstance(given["query"], jax.ShapeDtypeStruct)


def test_memory_is_planned_for_the_larger_tile_of_its_own_pass():
    doubled = next(t for t in tuner.neighbours(Tiles(), ["block"], chip("v5e")) if t.block == 512)
    assert doubled.vmem_bytes == 20 << 20
    assert doubled.backward_vmem_bytes == 4 << 20
    halved = next(t for t in tuner.neighbours(Tiles(), ["block"], chip("v5e")) if t.block == 128)
    assert halved.vmem_bytes == 10 << 20
    backward = next(t for t in tuner.neighbours(Tiles(), ["backward_block"], chip("v5e")) if t.backward_block == 256)
    assert (backward.vmem_bytes, backward.backward_vmem_bytes) == (10 << 20, 8 << 20)
    small = next(t for t in tuner.neighbours(Tiles(), ["block"], chip("v4")) if t.block == 512)
    assert small.vmem_bytes == 12 << 20  # three quarters of all there is


@pytest.fixture
def made_up(monkeypatch):
    """Times without a compiler: fastest where a block has 1024 rows in chunks of 32; larger blocks are refused."""
    counted = []

    def evaluate(search, configs, backward):
        allowed = configs[: search.budget - search.compilations]
        search.compilations += len(allowed)
        counted.extend(allowed)
        trials = []
        for config in allowed:
            if config.block_rows > 1024:
                search.refused.append("too large")
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
    assert "too large" in outcome.refused
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
    """One program in which every kernel has other tiles tells three times; what is best of each is estimated together before it counts."""
    case = next(c for c in case_module("moe").CASES if c.name == "Qwen3 30B-A3B up")
    start = tuner.Search(case, "v6e", 1, 1).choice.config
    (rows, columns, *_), (_, wide, *_) = start.forward, start.grad_lhs
    tried = []

    def evaluate(search, configs, backward):
        assert backward
        configs = configs[: search.budget - search.compilations]
        search.compilations += len(configs)
        tried.extend(configs)
        trials = []
        for config in configs:
            parts = {
                "forward": 1.0 + (config.forward[0] != 2 * rows),
                "grad_lhs": 1.0 + (config.grad_lhs[1] != wide // 2),
                "grad_rhs": 2.0 + (config.grad_rhs != start.grad_rhs),
            }
            trials.append(tuner._Trial(config, sum(parts.values()), 0.5, parts))
        return trials

    monkeypatch.setattr(tuner.Search, "evaluate", evaluate)
    outcome = tuner.tune_case(case, "v6e", budget=6)
    assert (outcome.config["forward"][:2], outcome.config["grad_lhs"][1]) == ((2 * rows, columns), wide // 2)
    assert outcome.config["grad_rhs"] == start.grad_rhs
    assert (outcome.seconds, outcome.heuristic_seconds) == (4.0, 6.0)
    assert len(tried) == len(set(tried)) == outcome.compilations <= 6
    assert not tuner.Search(case, "v6e", 1, 1).split


def test_only_tuples_of_tiles_are_kernels_of_their_own():
    assert steps.kernels(Tiles()) == ()
    loss = importlib.import_module("vishwamai.ops.loss.tpu")
    config = loss.LossConfig(512, 1024, 256, 2048)
    assert "block_vocab" not in tuner.tiles(config)  # it is a plan of memory in HBM
    assert all(t.block_vocab == 2048 for t in tuner.neighbours(config, tuner.tiles(config), chip("v5e")))
    with pytest.raises(KernelError, match="768 words a step, 256 at once"):
        loss.LossConfig(512, 768, 256, 2048)


@needs_libtpu
@pytest.mark.parametrize("op", ["matmul", "attention"])
def test_every_operation_has_tiles_that_a_table_gives_back(op, monkeypatch, tmp_path):
    """Tuples, flags and both passes go through the table and come back as the config they were."""
    case = next(case for case in case_module(op).CASES if "model" in case.tags)
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
