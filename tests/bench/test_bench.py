"""The benchmark: wrong numbers are never timed, samples are parts of the whole, peers mean the same, the report says
what was found.
"""

import dataclasses
import json
import random
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rotation
import vishwamai
from bench_settings import PEAKS, SETTINGS
from vishwamai import aot
from vishwamai.bench import contest, matrix, model, numbers, page, report, runner, schedules, targets
from vishwamai.bench.candidates import Contestant
from vishwamai.bench.gradient import gradient_case
from vishwamai.bench.subject import resized, subject
from vishwamai.cli import main
from vishwamai.core.cases import ArrayInit, Case
from vishwamai.core.config import kernel_config
from vishwamai.core.hardware import TPUS
from vishwamai.core.observe import record_plans
from vishwamai.core.op import Implementation, Op
from vishwamai.core.signature import array_specs
from vishwamai.measure import machine_peaks, timing
from vishwamai.measure.machine_peaks import MachinePeaks, measure_machine
from vishwamai.ops import catalogue
from vishwamai.ops.norm.reference import XLA
from vishwamai.ops.norm.spec import Operands, describe


def case_named(op, name):
    return next(c for c in catalogue.operations()[op].cases if c.name == name)


def test_a_candidate_does_not_pay_for_the_one_before():
    """Threads of a call are on the cores for 10 ms after it, and the first call after another candidate is slow."""
    now, busy, last = [0.0], {"one": 0.0, "two": 0.0}, [""]

    def candidate(name, other):
        def call():
            slower = 2.0 if now[0] < busy[other] else 1.0
            now[0] += 0.001 * slower + (0.004 if last[0] != name else 0.0)
            last[0], busy[name] = name, now[0] + 0.010

        return call

    def wait(seconds):
        now[0] += seconds

    calls = {"one": candidate("one", "two"), "two": candidate("two", "one")}
    clock = timing.sampler(lambda: now[0])
    found = timing.side_by_side(calls, rounds=4, sample=clock, sample_seconds=0.0, pause=wait)
    assert [round(s, 6) for t in found.values() for s in t.samples] == [0.001] * 8
    spoiled = timing.side_by_side(calls, rounds=4, sample=clock, sample_seconds=0.0, pause=lambda seconds: None)
    assert max(s for t in spoiled.values() for s in t.samples) > 0.0015


def test_the_slower_is_found_slower():
    found = timing.side_by_side({"fast": lambda: time.sleep(0.002), "slow": lambda: time.sleep(0.1)}, 0.3)
    assert found["fast"].median < found["slow"].median
    assert found["fast"].ratio(found["slow"]) > 2 and found["slow"].ratio(found["fast"]) < 0.5


def test_three_rounds_whatever_they_cost():
    found = timing.side_by_side({"a": lambda: time.sleep(0.01)}, budget=0.0)
    assert len(found["a"].samples) == 3


def test_short_calls_are_repeated():
    calls = [0]

    def call():
        calls[0] += 1

    found = timing.side_by_side({"a": call}, budget=0.05, rounds=4)
    assert found["a"].calls_per_sample > 10
    assert calls[0] == 1 + len(found["a"].samples) * found["a"].calls_per_sample


def test_spread_is_the_quartiles_distance():
    assert timing.Timing((1.0, 2.0, 3.0, 4.0, 5.0), 1).spread == pytest.approx(2 / 3)


SAMPLED = [
    ("norm", "layer residual bfloat16"),
    ("norm", "rms large mean"),
    ("gemm", "int8 scaled"),
    ("gemm", "several tiles bfloat16"),
    ("gemm", "whole epilogue"),
    ("gemm", "float8 mixed"),
    ("gemm", "transposed ab bfloat16"),
    ("attention", "causal top-left 63x100"),
    ("attention", "causal bottom-right 80x192"),
    ("attention", "window left of causal bf16"),
    ("attention", "GQA 6/2 bf16"),
    ("attention", "bshd"),
    ("attention", "segments causal GQA bf16"),
    ("attention", "bias by key"),
    ("attention", "mask by head"),
    ("attention", "sinks window bf16"),
]


@pytest.mark.parametrize(("op", "name"), rotation.in_turn(2, SAMPLED))
def test_a_sample_is_a_part_of_the_whole(op, name):
    case = case_named(op, name)
    arrays = case.make()
    sample = subject(op).sample(case, arrays)
    right = numbers.truth(sample)
    whole = numbers.as_tuple(jax.jit(lambda a: case.run(a, implementation="xla"))(arrays))
    found = numbers.check(whole, sample, right)
    assert found.right, found.detail
    # One unit in the last place of every element is within the contract, a hundredth of the largest is not (and
    # integers are exact).
    for i, out in enumerate(whole):
        scale = np.abs(out.astype(np.float64)[np.isfinite(out.astype(np.float64))]).max()
        spoiled = (*whole[:i], (out.astype(np.float64) + 0.1 * scale).astype(out.dtype), *whole[i + 1 :])
        assert not numbers.check(spoiled, sample, right).right


def test_big_results_are_sampled():
    llama = case_named("attention", "Llama 3 8B, 1024 tokens")
    sample = subject("attention").sample(llama, llama.make())
    assert sample.arrays["query"].shape == (1, 4, 64, 128) and sample.arrays["key"].shape == (1, 1, 1024, 128)
    assert sample.arrays["mask"].shape == (1, 1, 64, 1024) and sample.words == "64 of 1024 query rows of 4 of 32 heads"


def test_a_mask_that_is_one_off_is_wrong():
    case = case_named("attention", "window")
    arrays = case.make()
    sample = subject("attention").sample(case, arrays)
    right = numbers.truth(sample)
    other = dataclasses.replace(case, options={"window": (20, 6)})
    assert not numbers.check(numbers.as_tuple(other.run(arrays)), sample, right).right


def test_a_nan_is_wrong():
    case = case_named("norm", "rms plain")
    sample = subject("norm").sample(case, case.make())
    right = numbers.truth(sample)
    y = np.array(right.outputs[0])
    assert numbers.check((y,), sample, right).right
    y[3, 5] = np.nan
    found = numbers.check((y,), sample, right)
    assert not found.right and found.error == np.inf
    assert not numbers.check((y, y), sample, right).right


PEERED = [
    ("norm", "layer residual float32", {"jax.numpy", "torch layer_norm"}),
    ("norm", "rms residual bfloat16", {"jax.numpy", "torch rms_norm"}),
    ("gemm", "gelu float32", {"jnp.matmul", "torch matmul"}),
    ("gemm", "silu bfloat16", {"jnp.matmul", "torch matmul"}),
    ("gemm", "transposed ab float32", {"jnp.matmul", "torch matmul"}),
    ("gemm", "int8 scaled", {"jnp.matmul"}),
    ("gemm", "float8_e4m3fn", {"jnp.matmul"}),
    ("attention", "causal f32", {"jax.nn.dot_product_attention", "torch scaled_dot_product_attention"}),
    ("attention", "window", {"jax.nn.dot_product_attention", "torch scaled_dot_product_attention"}),
    ("attention", "bshd", {"jax.nn.dot_product_attention", "torch scaled_dot_product_attention"}),
    ("attention", "mask by key bf16", {"jax.nn.dot_product_attention", "torch scaled_dot_product_attention"}),
    ("attention", "GQA 6/2 bf16", {"jax.nn.dot_product_attention", "torch scaled_dot_product_attention"}),
    ("attention", "value dim 128 of 192 bf16", {"torch scaled_dot_product_attention"}),
    ("attention", "softcap", set()),
    ("attention", "sinks", set()),
    ("attention", "causal bottom-right 80x192", set()),
]


@pytest.mark.parametrize(("op", "name", "expected"), rotation.in_turn(2, PEERED))
def test_peers_mean_the_same(op, name, expected):
    if any(peer.startswith("torch") for peer in expected):
        pytest.importorskip("torch")
    operation, case = catalogue.operations()[op], case_named(op, name)
    found = list(runner.run_case(operation, case, PEAKS, SETTINGS, 0.0))
    peers = {m.candidate: m for m in found if m.framework != "vishwamai"}
    assert set(peers) == expected
    for m in found:
        if m.numbers is not None:
            assert m.numbers.right, (m.candidate, m.numbers.detail)
            assert m.timing is not None and m.timing.median > 0
    ours = next(m for m in found if m.default)
    assert set(ours.ratios) == expected


def test_a_peer_that_means_something_else_gets_no_speed():
    """Here the mask and the causal mask leave a row without keys, where jax.nn gives the mean of the values and we give
    0.
    """
    operation, case = catalogue.operations()["attention"], case_named("attention", "mask by head")
    found = list(runner.run_case(operation, case, PEAKS, SETTINGS, 0.0))
    other = next(m for m in found if m.framework == "jax")
    assert other.numbers is not None and not other.numbers.right and other.timing is None
    ours = next(m for m in found if m.default)
    assert ours.timing is not None and other.candidate not in ours.ratios


GRADIENTS = [
    ("norm", "layer residual float32"),
    ("norm", "rms residual bfloat16"),
    ("gemm", "gelu float32"),
    ("gemm", "transposed ab float32"),
    ("attention", "GQA 6/2 bf16"),
    ("attention", "bshd"),
    ("attention", "mask by key bf16"),
    ("attention", "bias full"),
]


@pytest.mark.parametrize(("op", "name"), rotation.in_turn(2, GRADIENTS))
def test_gradients_are_checked_and_timed(op, name):
    operation, case = catalogue.operations()[op], case_named(op, name)
    found = list(runner.run_case(operation, case, PEAKS, SETTINGS, 0.0, gradients=True))
    assert {"vishwamai", "jax"} <= {m.framework for m in found}
    for m in found:
        if m.numbers is not None:
            assert m.numbers.right, (m.candidate, m.numbers.detail)
            assert m.timing is not None and m.gradients and m.case.endswith("forward and backward")
    forward = next(iter(runner.run_case(operation, case, PEAKS, SETTINGS, 0.0)))
    assert found[0].flops >= 3 * forward.flops and found[0].bytes_moved > 2 * forward.bytes_moved


def test_a_case_without_gradients_is_left_out():
    operation, case = catalogue.operations()["gemm"], case_named("gemm", "int8")
    assert list(runner.run_case(operation, case, PEAKS, SETTINGS, 0.0, gradients=True)) == []


def _wrong_forward(spec, config, operands, residuals):
    outputs, saved = XLA.forward(spec, config, operands, residuals)
    return outputs._replace(y=outputs.y.at[0, 0, 0].add(0.1)), saved


BROKEN = Implementation("broken_cpu", "cpu", _wrong_forward, XLA.backward)


def _raising_forward(spec, config, operands, residuals):
    raise RuntimeError("the kernel has a fault\nand more")


RAISING = Implementation("raising_cpu", "cpu", _raising_forward, XLA.backward)
SHY = Implementation("shy_cpu", "cpu", XLA.forward, XLA.backward, lambda spec, chip: "it never wants to.")
TOY = Op("toy", (SHY, BROKEN, RAISING, XLA), split="groups rows")


def toy(x, *, config=None, implementation=None):
    spec = describe(array_specs(Operands(x, None, None, None)), "rms", 1e-6)
    return TOY(spec, Operands(x[None], None, None, None), config=config, implementation=implementation).y[0]


TOY_CASES = (Case("a toy", "toy", toy, {"x": ArrayInit((16, 64))}, tags=frozenset({"model", "contract"})),)


@pytest.fixture
def toy_only(monkeypatch):
    found = {"toy": dataclasses.replace(catalogue.operations()["norm"], op=TOY, cases=TOY_CASES)}
    monkeypatch.setattr(catalogue, "operations", lambda: found)
    monkeypatch.setattr(machine_peaks, "measure_machine", lambda quick: PEAKS)
    monkeypatch.setattr(runner, "measure_again", lambda best, quick: best)
    monkeypatch.setattr(runner, "measure_cached", lambda best, nbytes: best)
    return found["toy"]


def test_wrong_numbers_get_no_speed(toy_only):
    forward, backward = runner.steps([toy_only], SETTINGS)
    assert (forward.gradients, backward.gradients) == (False, True)
    ((step, rows),) = runner.run([forward], runner.PeakMeter(PEAKS), SETTINGS)
    assert step is forward
    found = {m.implementation: m for m in rows}
    broken, shy, right = found["broken_cpu"], found["shy_cpu"], found["xla"]
    assert broken.numbers is not None and not broken.numbers.right and broken.timing is None and broken.default
    assert "output 0, the whole result: largest error 0.1" in broken.numbers.detail
    assert shy.numbers is None and shy.timing is None and shy.note == "it never wants to."
    assert right.numbers is not None and right.numbers.right and right.timing is not None
    fault = found["raising_cpu"]
    assert fault.timing is None and fault.numbers is not None and not fault.numbers.right
    assert fault.numbers.detail == "it raised RuntimeError: the kernel has a fault"


@pytest.mark.turns(4)
def test_the_command_rejects_a_speed_and_fails(toy_only, capsys, tmp_path):
    where = ["--json", str(tmp_path / "r.json"), "--report", str(tmp_path / "r.html")]
    status = main(["bench", "--no-model", "--targets", "none", *where])
    said = capsys.readouterr()
    assert status == 1
    assert "WRONG: toy, a toy, vishwamai broken_cpu: output 0" in said.err and "not timed" in said.out
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["schema"] == report.SCHEMA and saved["right"] is False
    rows = {m["implementation"]: m for m in saved["measurements"] if not m["gradients"]}
    assert rows["broken_cpu"]["timing"] is None and rows["broken_cpu"]["flops_per_second"] is None
    assert rows["xla"]["timing"]["median"] > 0 and len(rows["xla"]["timing"]["samples"]) >= 3
    html = (tmp_path / "r.html").read_text()
    assert "Some numbers are wrong" in html and "withheld" in html and "a toy" in html


def test_the_matrix_shows_a_declined_case(toy_only):
    rows = {row.feature: row.cells for row in matrix.matrix()}
    assert rows["float32"]["shy_cpu"].mark == "no" and rows["float32"]["xla"].mark == "yes"
    assert rows["float32"]["shy_cpu"].reasons == ("it never wants to.",)


def test_a_case_is_cut_to_what_the_machine_can_do():
    slow = MachinePeaks({"float32": {"jax": 1e9}, "bfloat16": {"jax": 1e9}}, {"jax": 1e10}, "made up")
    for op, name, array, axis in (("norm", "Llama 3 8B", "x", 0), ("gemm", "Llama 3 8B qkv", "a", 0)):
        operation, case = catalogue.operations()[op], case_named(op, name)
        small = runner.fitted(operation, case, subject(op), slow, runner.BenchSettings(call_seconds=0.001))
        assert small.arrays[array].shape[axis] < case.arrays[array].shape[axis] and "cut to" in small.name
        assert runner.fitted(operation, case, subject(op), slow, runner.BenchSettings(call_seconds=1e9)) is case
    gemma = case_named("attention", "Gemma 3 12B, 2048 tokens, window 1024")
    small = subject("attention").smaller(gemma, 1e-9)
    assert small is None or small.arrays["query"].shape[2] >= 2 * 1023


def test_experts_are_cut_too():
    mixtral = case_named("gemm", "Mixtral 8x7B experts")
    small = subject("gemm").smaller(mixtral, 0.01)
    assert small is not None and small.arrays["a"].shape == (2, 64, 4096) and small.arrays["b"].shape[0] == 2
    assert "2 of 8 experts, 64 of 512 tokens" in small.name


@pytest.mark.turns(4)
def test_groups_of_experts_are_sampled_and_cut():
    """The gradients of Qwen3's 128 experts by XLA's own differentiation took minutes for a call."""
    qwen = case_named("grouped_gemm", "Qwen3 30B-A3B up")
    small = subject("grouped_gemm").smaller(qwen, 0.1)
    assert small is not None and small.arrays["rhs"].shape == (8, 2048, 768) and "cut to 8 of 128 groups" in small.name
    assert small.arrays["lhs"].shape[0] == small.options["group_sizes"].sum() < 8192
    sizes = np.array([5, 0, 3, 9, 2, 4], np.int32)
    arrays = {"lhs": ArrayInit((23, 16), "float32"), "rhs": ArrayInit((6, 16, 8), "float32")}
    case = dataclasses.replace(qwen, arrays=arrays, options={"group_sizes": sizes})
    gradients = gradient_case(case)
    assert gradients is not None
    for whole, sample in ((case, subject("grouped_gemm").sample), (gradients, subject("grouped_gemm").gradient_sample)):
        made = whole.make()
        part = sample(whole, made)
        assert part.words == "4 of 6 groups" and part.arrays["lhs"].shape == (17, 16)
        outputs = numbers.as_tuple(whole.run(made, implementation="xla"))
        truth = numbers.truth(part, whole is gradients)
        found = numbers.check(outputs, part, truth)
        assert found.right, found.detail
        assert not numbers.check(tuple(y + 0.1 for y in outputs), part, truth).right


@pytest.mark.turns(4)
def test_a_candidate_that_is_far_slower_is_not_timed():
    """It is checked by one call, and what says so stands in place of its speed."""
    calls = {"fast": 0, "slow": 0}

    def candidate(name, seconds):
        def call():
            calls[name] += 1
            time.sleep(seconds)
            return 1.0

        return Contestant(name, "jax", None, False, lambda arrays: (call, lambda result: (result,), None))

    able = [candidate("slow", 0.3), candidate("fast", 0.0)]
    right = numbers.Numbers(True, 0.0, 1.0, "all of it")

    def outcomes(slowest):
        return contest.contest(able, {}, lambda one, outputs: right, lambda c: timing.side_by_side(c, 0.0), slowest)

    slow, fast = outcomes(0.1)
    assert slow.timing is None and slow.numbers is right and calls["slow"] == 1 and fast.timing is not None
    assert re.fullmatch(r"one call takes 0\.3\d* s, and the fastest candidate's \S+ s", slow.note)
    assert all(outcome.timing is not None for outcome in outcomes(10.0))  # slow, and still affordable


def test_an_operation_that_nobody_knows_is_served():
    assert subject("no_such_op").peers(TOY_CASES[0]) == []
    assert resized(TOY_CASES[0], {"x": {0: 4}}, "cut").arrays["x"].shape == (4, 64)


def test_a_case_compiles_for_a_tpu_that_is_not_here():
    pytest.importorskip("libtpu")
    operation, case = catalogue.operations()["norm"], case_named("norm", "BERT base")
    row = targets.compile_case(operation, case, "v6e")
    assert row.compiles and row.fits and row.implementation == "pallas_tpu"
    assert row.vmem and row.hbm and row.hbm > 3 * 4096 * 768 * 2
    assert row.seconds is None and row.estimate == ""  # XLA's cost model repeats the kernel's own cost estimate
    assert "MiB" in report.target_words(row)[0]


@pytest.mark.turns(3)
def test_a_program_whose_text_cannot_be_read_keeps_its_memory():
    pytest.importorskip("libtpu")
    row = targets.compile_case(catalogue.operations()["softmax"], case_named("softmax", "BERT base logits"), "tpu7x")
    assert row.compiles and row.fits and row.hbm and row.hbm > 2 * 4096 * 30522 * 4
    if row.problem:
        assert "cannot read its text back" in row.problem and row.vmem is None
    else:  # a jaxlib that reads asynchronous SparseCore copies
        assert row.vmem


def test_compiling_ends_with_its_time(monkeypatch):
    made = []
    monkeypatch.setattr(targets, "compile_case", lambda operation, case, target: made.append(target) or target)
    norm = catalogue.operations()["norm"]
    programs = [(norm, case, chip) for case in norm.tagged("model")[:3] for chip in ("v5e", "v6e")]
    assert list(targets.run(programs, seconds=1e9)) == ["v5e", "v6e"] * 3
    assert list(targets.run(programs, seconds=-1.0)) == []


@pytest.mark.long
def test_the_schedule_times_a_kernel():
    pytest.importorskip("libtpu")
    cases = [(catalogue.operations()["norm"], case_named("norm", "Qwen 3 8B head norm"))]
    rows = list(targets.run([(*cases[0], "v5e")]))
    (found,) = targets.scheduled(rows, cases)
    assert rows[0].estimate == "" and found.estimate == "schedule"
    assert found.seconds and found.seconds >= 0.5 * found.roofline and found.vmem == rows[0].vmem


def test_a_row_without_a_time_says_why(monkeypatch):
    """XLA's own operations, a schedule with guesses, a failure; chips that say the same share a line."""
    case = case_named("norm", "Qwen 3 8B head norm")
    kernel = targets.TargetRow("norm", case.name, "v4", "pallas_tpu", 1e-3, compiles=True, vmem=1 << 20, fits=True)
    own = dataclasses.replace(kernel, implementation="xla", vmem=None)
    rows = [own, dataclasses.replace(own, target="v5e"), kernel, dataclasses.replace(kernel, target="v5p")]
    guessed = object.__new__(targets.inspection.KernelSchedule)
    monkeypatch.setattr(type(guessed), "guessed", ("copy: of unknown size", "branch: unknown"))
    made = [guessed, targets.KernelError("no schedule.\nMore of it.")]
    monkeypatch.setattr(targets.inspection, "inspect_many", lambda programs, workers: made)
    found = targets.scheduled(rows, [(catalogue.operations()["norm"], case)])
    assert all(row.seconds is None and row.estimate == "" for row in found)
    assert report.target_problems(found) == [
        f"norm: {case.name}, v4, v5e: not timed: XLA's own operations, without a kernel whose schedule is followed",
        f"norm: {case.name}, v4: not timed: copy: of unknown size",
        f"norm: {case.name}, v5p: not timed: no schedule.",
    ]


def stored_rows():
    """Every stored row with its operation and case, which must be there."""
    found = []
    for path in sorted(schedules.directory().glob("*.json")):
        for key in json.loads(path.read_text())["rows"]:
            op, _, name = key.partition(": ")
            row = schedules.stored(op, name, path.stem)
            assert row is not None
            found.append((row, catalogue.operations()[op], case_named(op, name)))
    return found


def test_stored_schedules_are_of_cases_that_there_are():
    found = stored_rows()
    assert found
    for row, _, case in found:
        assert "model" in case.tags, (row.op, row.case)
        assert row.target in TPUS and schedules.libtpu(row.target)
        assert row.seconds is None or row.seconds >= 0.9 * row.roofline, row
        assert row.seconds is None or not row.problem, row
    for row, operation, case in random.Random(rotation.SEED).sample(found, 12):  # others every day
        with kernel_config(target=row.target):
            (plan, *_) = (p for p in record_plans(case.run, case.shapes()) if p.op.name == operation.name)
        assert plan.choice("tpu").implementation.name == row.implementation, (row.op, row.case)


@pytest.mark.long
def test_stored_schedules_are_what_the_compiler_makes():
    """A few of them, others every day, where the libtpu is the one that made them."""
    pytest.importorskip("libtpu")
    version = str(aot.versions()["libtpu"])
    timed = [entry for entry in stored_rows() if entry[0].seconds and schedules.libtpu(entry[0].target) == version]
    if not timed:
        pytest.skip(f"there are no schedules by libtpu {version}; tools/bench_schedules.py makes them")
    for row, operation, case in random.Random(rotation.SEED).sample(timed, min(2, len(timed))):
        made = targets.scheduled([targets.compile_case(operation, case, row.target)], [(operation, case)], 1)[0]
        assert dataclasses.replace(made, compile_seconds=None, seconds=row.seconds) == row
        # A mean over random routings, of which another NumPy or CPU rounds the last cycles otherwise.
        assert made.seconds == pytest.approx(row.seconds, rel=1e-4)


def test_a_stored_schedule_is_written_and_read(tmp_path, monkeypatch):
    monkeypatch.setattr(schedules, "directory", lambda: tmp_path)
    schedules._table.cache_clear()
    one = targets.TargetRow("norm", "a", "v5e", "pallas_tpu", 1e-3, 2.0, True, 1 << 20, 1 << 21, True, 2e-3, "schedule")
    other = dataclasses.replace(one, case="b", seconds=None, estimate="", problem="why")
    schedules.write("v5e", "1.0", [one], tmp_path)
    schedules.write("v5e", "1.0", [other], tmp_path)
    assert schedules.stored("norm", "a", "v5e") == dataclasses.replace(one, compile_seconds=None)
    assert schedules.stored("norm", "b", "v5e") == dataclasses.replace(other, compile_seconds=None)
    assert (
        schedules.libtpu("v5e") == "1.0"
        and schedules.libtpu("v4") == ""
        and schedules.stored("norm", "a", "v4") is None
    )
    schedules.write("v5e", "2.0", [one], tmp_path)  # another libtpu: none of the old ones stays
    schedules._table.cache_clear()
    assert schedules.stored("norm", "b", "v5e") is None and report.target_words(None) == ("not known", "yellow")
    schedules._table.cache_clear()


def test_what_the_compiler_rejects_is_told(monkeypatch):
    def reject(*args, **kwargs):
        raise vishwamai.DeviceError("no room for it.")

    monkeypatch.setattr(targets, "compile_for", reject)
    row = targets.compile_case(catalogue.operations()["norm"], case_named("norm", "BERT base"), "v6e")
    assert not row.compiles and row.problem == "no room for it." and report.target_words(row)[0] == "does not compile"


@pytest.mark.turns(3)
def test_peaks_are_the_best_of_what_was_measured(monkeypatch):
    monkeypatch.setattr(machine_peaks, "_QUICK_SIZE", 128)
    monkeypatch.setattr(machine_peaks, "_QUICK_BYTES", 1 << 20)
    found = measure_machine(quick=True, dtypes=("float32",))
    assert found.peak("float32") == max(found.flops["float32"].values()) > 1e7
    assert found.best_bandwidth == max(found.bandwidth.values()) > 1e7
    assert found.seconds("float32", found.peak("float32"), 0.0) == pytest.approx(1.0)
    assert PEAKS.peak("float8_e5m2") == PEAKS.peak("bfloat16") and PEAKS.peak("float64") == PEAKS.peak("float32")


def test_the_page_holds_everything(tmp_path):
    operation, case = catalogue.operations()["norm"], case_named("norm", "layer residual float32")
    speed = model.ModelSpeed(
        1, 32, {"vishwamai": timing.Timing((0.1, 0.1, 0.1), 1), "jax.nn": timing.Timing((0.2,) * 3, 1)}
    )
    made = report.BenchReport(
        created=report.now(),
        command="vishwamai bench <test>",
        versions={"jax": jax.__version__},
        cpu=report.machine.cpu(),
        devices=("cpu: cpu",),
        load=0.5,
        peaks=PEAKS,
        measurements=tuple(runner.run_case(operation, case, PEAKS, SETTINGS, 0.0)),
        targets=(
            targets.TargetRow(
                "norm", case.name, "v5e", "pallas_tpu", 9e-4, 1.0, True, 1 << 20, 1 << 30, True, 1e-3, "schedule"
            ),
            targets.TargetRow("norm", case.name, "v6e", "xla", 9e-4, 1.0, problem="no <room>."),
        ),
        model=model.ModelResult((model.Agreement("someone", 3, 0.99999, 1e-7),), (speed,)),
        notes=("a note",),
    )
    text = page.render(made)
    assert len(text) < 100_000
    assert text.count("<figure>") == 3 and "<script" not in text and "http" not in text and "None" not in text
    for said in (
        case.name,
        "1.0 MiB, 1 ms (90%)",
        "no &lt;room&gt;.",
        "0.9999900",
        "a note",
        "vishwamai bench &lt;test&gt;",
    ):
        assert said in text
    report.write_json(made, tmp_path / "r.json")
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["right"] is True and saved["model"]["speeds"][0]["timings"]["vishwamai"]["median"] == 0.1
    assert saved["peaks"]["flops"]["float32"] == {"jax": 1e11}


def test_a_model_that_differs_is_wrong():
    ours = np.eye(4, dtype=np.float32)
    near = model._agreement("x", ours, ours + 1e-6)
    far = model._agreement("x", ours, np.roll(ours, 1, axis=0))
    assert near.right and near.error == pytest.approx(1e-6, rel=0.1) and not far.right
    assert not model.ModelResult((near, far), ()).right


def test_every_operation_is_found():
    found = catalogue.operations()
    assert {"attention", "gemm", "norm"} <= set(found)
    for operation in found.values():
        assert any("model" in case.tags for case in operation.cases)
        assert jnp.dtype(next(iter(operation.cases[0].arrays.values())).dtype)
