"""The benchmark's command and what it says of a busy machine: shares and ratios that are held back, interruptions."""

import dataclasses
import io
import json
import os
import signal

import jax
import numpy as np
import pytest
from rich.console import Console

from vishwamai.aot.compile import libtpu
from vishwamai.bench import budget, machine, model, report, runner, schedules, targets
from vishwamai.bench.machine import Usage
from vishwamai.bench.numbers import Numbers
from vishwamai.bench.subject import subject
from vishwamai.cli import bench, bench_tables, main, progress
from vishwamai.core.cases import ArrayInit, Case
from vishwamai.core.interrupt import insistent_interrupt, interrupt_taken
from vishwamai.measure import machine_peaks
from vishwamai.measure.machine_peaks import MachinePeaks
from vishwamai.measure.timing import Timing
from vishwamai.models import minilm
from vishwamai.ops import catalogue
from vishwamai.ops.norm import rms_norm

PEAKS = MachinePeaks({"float32": {"jax": 1e9}, "bfloat16": {"jax": 1e9}}, {"jax": 1e9}, "made up for a test")
CALM = runner.BenchSettings(seconds=0.0, spread=float("inf"), others=float("inf"))


def measured(seconds=1.0, **fields):
    """Of 1 GFLOP and 4 GB, which takes four seconds at the peak."""
    blank = runner.CaseMeasurement(
        "norm", "a case", "vishwamai xla", "vishwamai", "xla", True, "float32", 10**9, 4 * 10**9
    )
    numbers = Numbers(True, 0.0, 1.0, "the whole result")
    return dataclasses.replace(blank, numbers=numbers, timing=Timing((seconds,) * 3, 1), **fields)


def test_a_share_above_the_peak_is_held_back():
    right, over = measured(5.0).against(PEAKS), measured(3.0).against(PEAKS)
    assert right.share == pytest.approx(0.8) and not right.overshot and report.share(right) == "80%"
    assert over.share is None and over.overshot and report.share(over) == "held back"
    (said,) = report.banners([right, over], {"torch": "2"})
    assert said.startswith("1 timing was above the measured peak") and "norm: a case" in said
    assert measured(3.0).against(dataclasses.replace(PEAKS, bandwidth={"jax": 2e9})).share == pytest.approx(2 / 3)


def test_what_fits_the_caches_is_held_against_copies_that_fit(monkeypatch):
    monkeypatch.setattr(machine_peaks, "_copies", lambda nbytes: {"jax": None})
    monkeypatch.setattr(machine_peaks, "_best", lambda calls, work, *rest, **how: dict.fromkeys(calls, 1e11))
    found = machine_peaks.measure_cached(PEAKS, 5 << 20)
    assert found.cached == {4 << 20: 1e11} and found.bandwidth_for(5 << 20) == 1e11
    assert found.bandwidth_for(9 << 20) == found.bandwidth_for(3 << 20) == 1e9
    assert machine_peaks.measure_cached(PEAKS, 1 << 30) is PEAKS
    assert machine_peaks.measure_cached(found, 7 << 20) is found


def test_the_peaks_are_the_best_of_all_measurements(monkeypatch):
    rates = iter((3.0, 1.0, 2.0))
    monkeypatch.setattr(machine_peaks, "_products", lambda size, dtype, only=None: {only: None})
    monkeypatch.setattr(machine_peaks, "_copies", lambda nbytes: {"jax": None})
    monkeypatch.setattr(machine_peaks, "_best", lambda calls, *rest, **how: dict.fromkeys(calls, next(rates) * 1e9))
    meter = runner.PeakMeter(PEAKS, quick=True)
    meter.again()
    assert meter.best.peak("float32") == 3e9 and meter.best.peak("bfloat16") == 1e9 and meter.best.best_bandwidth == 2e9
    runner.PeakMeter(PEAKS).again()  # measures nothing


def toy_rows(**settings):
    case = Case("rows", "norm", rms_norm, {"x": ArrayInit((8, 32))})
    operation = catalogue.operations()["norm"]
    rows = runner.run_case(operation, case, PEAKS, dataclasses.replace(CALM, **settings), 0.0)
    return next(m for m in rows if m.default)


@pytest.mark.turns(3)
def test_a_ratio_needs_steady_timings_and_a_quiet_machine(monkeypatch):
    calm = toy_rows()
    assert (
        "jax.numpy" in calm.ratios
        and calm.withheld == ""
        and calm.best_peer == min(calm.ratios.items(), key=lambda one: one[1])
    )
    unsteady = toy_rows(spread=-1.0)
    assert (
        unsteady.ratios == {} and unsteady.withheld.startswith("spread ") and report.best_peer(unsteady) == "held back"
    )
    monkeypatch.setattr(Usage, "others", lambda self: 1.5 * machine.cpu().cores)
    busy = toy_rows(others=0.5)
    assert busy.ratios == {} and busy.withheld.startswith("others used ")
    assert "BUSY MACHINE: the ratios of 1 of 1 cases" in report.banners([busy], {"torch": "2"})[0]
    assert "0 wins, 0 losses, 1 held back" in report.score([busy])


def test_wins_and_losses_against_the_best_peer():
    rows = [
        measured(case="fast", ratios={"jax.nn": 3.0, "torch": 2.0}),
        measured(case="slow", ratios={"jax.nn": 1.5, "torch": 0.5}),
        measured(case="other", ratios={"torch": 0.1}, default=False),
    ]
    found = report.standings(rows)
    assert [(one.case, one.peer, one.ratio) for one in found] == [("slow", "torch", 0.5), ("fast", "torch", 2.0)]
    assert report.score(rows) == "against the best peer: 1 wins, 1 losses"
    peer = measured(framework="jax", default=False)
    assert any("jax alone" in said for said in report.banners([peer], {"torch": None}))


def test_others_are_those_that_are_not_this_process(monkeypatch):
    times = iter(((0.0, 0.0, 0.0), (10.0, 18.0, 5.0), (10.0, 3.0, 5.0)))
    monkeypatch.setattr(machine, "_cpu_seconds", lambda: next(times))
    usage = Usage()
    assert usage.others() == pytest.approx(1.3) and usage.others() == 0.0
    monkeypatch.setattr(machine, "_cpu_seconds", lambda: None)
    assert Usage().complaint(0.5) == ""


def test_every_operation_is_in_the_benchmark_with_its_backward_pass():
    found = catalogue.operations()
    steps = runner.steps(list(found.values()), runner.BenchSettings())
    assert {step.operation.name for step in steps if not step.gradients} == set(found)
    backward = {step.operation.name for step in steps if step.gradients}
    assert backward == {name for name, op in found.items() if any(map(runner.has_gradient, op.tagged("model")))}
    assert {"paged_attention"}.isdisjoint(backward) and {"attention", "gemm", "norm"} <= backward
    names = [step.operation.name for step in steps]
    assert set(names[: 2 * len(found)]) >= set(found) and names[0] in names[len(found) :]  # by turns
    everything = runner.steps(list(found.values()), runner.BenchSettings.all())
    assert {step.key for step in steps} < {step.key for step in everything}


def test_steps_of_decoding_are_cut_to_fewer_sequences():
    (name, case) = next((c.name, c) for c in catalogue.operations()["paged_attention"].tagged("model"))
    small = subject("paged_attention").smaller(case, 0.1)
    assert small is not None and small.name == f"{name}, cut to 4 of 64 sequences"
    assert jax.eval_shape(lambda arrays: small.run(arrays), small.shapes()).shape == (
        4,
        *case.arrays["query"].shape[1:],
    )
    assert small.arrays["page_indices"].make(np.random.default_rng(0)).max() < small.arrays["kv_pages"].shape[0]


@pytest.fixture
def small_norm(monkeypatch):
    """A benchmark of two cases, whose machine is never measured."""
    cases = tuple(
        Case(n, "norm", rms_norm, {"x": ArrayInit((8, 32))}, tags=frozenset({"model"})) for n in ("one", "two")
    )
    found = {"norm": dataclasses.replace(catalogue.operations()["norm"], cases=cases)}
    monkeypatch.setattr(catalogue, "operations", lambda: found)
    monkeypatch.setattr(machine_peaks, "measure_machine", lambda quick: PEAKS)
    monkeypatch.setattr(runner, "measure_again", lambda best, quick: best)
    monkeypatch.setattr(runner, "measure_cached", lambda best, nbytes: best)
    monkeypatch.setattr(bench, "_settings", lambda arguments: ("small", CALM))


@pytest.mark.turns(3)
def test_an_interrupted_run_keeps_what_it_has_and_goes_on(small_norm, monkeypatch, capsys, tmp_path):
    real, called = runner.run_case, []

    def run_case(operation, case, *rest):
        called.append((case.name, rest[-1]))
        if len(called) == 2:
            raise KeyboardInterrupt
        yield from real(operation, case, *rest)

    monkeypatch.setattr(runner, "run_case", run_case)
    where = ["--json", str(tmp_path / "r.json"), "--report", str(tmp_path / "r.html")]
    command = ["bench", "--no-model", "--target", "none", *where]
    assert main(command) == 130
    assert "interrupted after 1 of 3 cases; the same command with --resume goes on" in capsys.readouterr().err
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["done"] == [["norm", "one", False]] and saved["planned"] == 3 and saved["measurements"]
    assert "1 of 3 cases were run" in (tmp_path / "r.html").read_text()
    assert main([*command, "--resume"]) == 0
    assert called == [("one", False), ("one", True), ("one", True), ("two", False)]
    after = json.loads((tmp_path / "r.json").read_text())
    assert len(after["done"]) == 3 and after["measurements"][: len(saved["measurements"])] == saved["measurements"]
    said = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("norm: ") for line in said) == 2  # in a pipe, one line for each case
    assert list(tmp_path.iterdir()) and not list(tmp_path.glob(".*"))


def test_resume_needs_the_same_run(small_norm, monkeypatch, capsys, tmp_path):
    path = tmp_path / "r.json"
    where = ["--json", str(path), "--report", str(tmp_path / "r.html")]
    command = ["bench", "--no-model", "--target", "none", *where, "--resume"]
    assert main(command) == 2 and "there is no" in capsys.readouterr().err
    path.write_text("{}")
    assert main(command) == 2 and "is not a report to go on with" in capsys.readouterr().err
    assert main(command[:-1]) == 0
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "selection": "all", "versions": {}}))
    capsys.readouterr()
    assert main(command) == 2
    assert "was measured with other selection and versions" in capsys.readouterr().err


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only where a test says so."""
    now = [1000.0]
    monkeypatch.setattr(budget.time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(("seconds", "cases", "model_runs"), [(1.0, 41, True), (6.0, 37, True), (50.0, 3, False)])
def test_a_run_keeps_to_five_minutes(small_norm, clock, monkeypatch, tmp_path, seconds, cases, model_runs):
    """On a machine of any speed: what does not fit is not begun, and is counted."""

    def takes(seconds, result=None):
        clock[0] += seconds
        return result

    operation = catalogue.operations()["norm"]
    many = tuple(dataclasses.replace(operation.cases[0], name=f"case {i}") for i in range(40))
    found = {"norm": dataclasses.replace(operation, cases=many)}
    monkeypatch.setattr(catalogue, "operations", lambda: found)
    monkeypatch.setattr(bench, "_settings", lambda arguments: ("small", runner.BenchSettings(cases_per_op=None)))
    monkeypatch.setattr(machine_peaks, "measure_machine", lambda quick: takes(1.2 * seconds, PEAKS))
    monkeypatch.setattr(runner, "run_case", lambda *rest: takes(seconds, [measured(case=rest[1].name)]))
    monkeypatch.setattr(schedules, "rows", lambda cases, targets: [])
    monkeypatch.setattr(libtpu, "has_libtpu", lambda: True)

    def compile_case(operation, case, chip):
        return takes(
            seconds,
            targets.TargetRow(operation.name, case.name, chip, "pallas_tpu", 1e-3, None, True, 1, 1, True),
        )

    monkeypatch.setattr(targets, "compile_case", compile_case)
    monkeypatch.setattr(minilm, "why_not", lambda: None)
    monkeypatch.setattr(model, "run", lambda seconds: takes(45.0, model.ModelResult((), ())))
    start = clock[0]
    where = ["--json", str(tmp_path / "r.json"), "--report", str(tmp_path / "r.html")]
    assert main(["bench", "--target", "v5e", *where]) == 0
    saved = json.loads((tmp_path / "r.json").read_text())
    assert clock[0] - start <= 285.0 and (saved["model"] is not None) == model_runs
    assert len(saved["done"]) == cases and saved["planned"] == 41 and 0 < len(saved["targets"]) < 40
    notes = "\n".join(saved["notes"])
    assert (f"{41 - cases} of 41 cases were not begun: " in notes) == (cases < 41)
    assert f"{40 - len(saved['targets'])} of 40 programs" in notes


def test_the_model_is_left_out_where_its_time_was_used(clock):
    whole, notes = budget.Budget(285.0), []
    clock[0] += 241.0
    steps = progress.Steps()
    assert bench._model(runner.BenchSettings(), whole, False, steps, notes) is None
    assert notes == [
        "all-MiniLM-L6-v2 was not run: it is given 45 seconds, and less was left of the run's 285; --all has no bound."
    ]


def test_tune_that_is_interrupted_says_what_it_has(monkeypatch, capsys, tmp_path):
    from vishwamai.aot.tuning import tuner

    def tune(cases, targets, **how):
        how["progress"](1, 5, "the first")
        raise KeyboardInterrupt

    monkeypatch.setattr(tuner, "tune", tune)
    assert main(["tune", "--ops", "norm", "--target", "v5e", "--directory", str(tmp_path / "new")]) == 130
    said = capsys.readouterr()
    assert "interrupted after 1 of " in said.err and "the first" in said.out and "... tuning v5e norm: " in said.err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_interrupts_and_what_follows_has_time(number, status):
    with insistent_interrupt():
        with pytest.raises(KeyboardInterrupt) as stop:
            os.kill(os.getpid(), number)
        assert interrupt_taken(stop.value) == status
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def lines_of(*shown):
    written = io.StringIO()
    Console(width=1000, file=written, force_terminal=False).print(*shown, sep="\n")
    return written.getvalue().splitlines()


def test_eighty_columns_are_enough():
    long = "vishwamai a name of an implementation that nobody can read at once"
    rows = [
        measured(123.456e-6, candidate=long, case="a case " * 20, ratios={"torch scaled_dot_product_attention": 1.0}),
        measured(9.99, candidate=long, framework="jax", default=False).against(PEAKS),
    ]
    block = lines_of(bench_tables._block(rows, PEAKS, head=True))
    standing = lines_of(*bench_tables.standing_lines(rows))
    chips = ["v4", "v5e", "v5p", "v6e", "tpu7x"]
    made = [
        targets.TargetRow("norm", "case " * 30, chip, "pallas_tpu", 1e-3, None, True, 1, 1, True, 1.23e-3, "schedule")
        for chip in chips
    ]
    table = lines_of(*bench_tables.target_lines(made, chips, True))
    assert max(map(len, [*block, *standing, *table])) <= 79
    assert sum("1.23 ms 81%" in line for line in table) == 1 and table[-1].count("81%") == 5
    assert "\n" not in bench_tables.case_line(rows, PEAKS)
    (line,) = [x for x in lines_of(*bench_tables.target_lines(made, chips, False)) if x.startswith("norm")]
    assert line.count("81%") == 5


def test_progress_is_told_on_standard_error_of_a_pipe(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.Steps() as steps:
        told = steps.on_case("timing")
        for done in range(4):
            told(done, 4, f"case {done}")
            clock[0] += 7.0
        told(4, 4, "done")
    said = capsys.readouterr()
    assert said.out == "" and said.err.splitlines() == ["... timing case 0", "... timing 3/4 case 2, 14 s left"]
