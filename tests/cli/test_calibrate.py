"""`vishwamai calibrate`: what was measured next to what was estimated, from a recorded file and on this machine."""

import dataclasses
import json

import pytest

from vishwamai.bench import schedules
from vishwamai.bench.runner import BenchSettings, CaseMeasurement, Step, steps
from vishwamai.cli import main
from vishwamai.core.errors import ConfigError
from vishwamai.core.figures import Estimate
from vishwamai.core.hardware import TPUS
from vishwamai.measure.timing import Timing
from vishwamai.ops import catalogue
from vishwamai.planning import ProgramMemory
from vishwamai.planning.time import calibration, program_time
from vishwamai.planning.time.calibrate import _roofline, _row, calibrate
from vishwamai.planning.time.calibration import Calibration, Row


def recorded(chip: str | None = "v5e", ratio=1.25):
    """A file as a TPU would write it: kernels that take `ratio` times their schedule, and a roofline."""
    kernels = [
        Row(f"gemm: case {i}", "pallas_tpu", False, ratio * 1e-3 * i, 0.01, 1e-3 * i, "verified", bound)
        for i, bound in enumerate(("compute", "memory", "compute", "compute"), 1)
    ]
    others = (
        Row("activation: BERT base", "xla", False, 2e-4, 0.02, 6e-5, "analytic", "memory"),
        Row("gemm: small", "pallas_tpu", False, 9e-3, 0.0, 1e-3, "verified", "compute", "run in a smaller size"),
        Row("rope: wrong", "pallas_tpu", False, None, note="its numbers are wrong: not timed"),
    )
    return Calibration("TPU v5 lite", chip, {"jax": "0.10.2", "libtpu": "0.0.51"}, (*kernels, *others))


def test_a_recorded_file_gives_the_table_and_the_factor(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("VISHWAMAI_TUNING_DIR", str(tmp_path / "own"))
    path = tmp_path / "sent.json"
    path.write_text(recorded().text())
    assert calibration.parse(path.read_text(), "sent") == recorded()
    assert recorded().factor == pytest.approx(1.25) and len(recorded().ratios("compute")) == 3
    assert main(["calibrate", "--show", str(path)]) == 0
    out = capsys.readouterr().out
    assert "factor of kernels on v5e: 1.250" in out and "its numbers are wrong" in out
    assert max(map(len, out.splitlines())) <= 80
    assert calibration.in_use("v5e") is None
    assert main(["calibrate", "--use", str(path)]) == 0
    assert str(tmp_path / "own") in capsys.readouterr().out
    assert calibration.in_use("v5e") == recorded() and calibration.in_use("v6e") is None


def test_a_factor_corrects_the_kernels_of_a_step(monkeypatch, tmp_path):
    monkeypatch.setenv("VISHWAMAI_TUNING_DIR", str(tmp_path))
    plain = {"exposed": {"kernels": 0.4, "fusions": 0.1}, "hidden": {}, "rows": [], "missing": [], "uncertain": []}
    memory = ProgramMemory("v5e:2x2", Estimate(1, "verified"), 2)
    before = program_time._read("v5e:2x2", memory, plain)
    (tmp_path / "sent.json").write_text(recorded(ratio=1.5).text())
    calibration.use(tmp_path / "sent.json")
    after = program_time._read("v5e:2x2", memory, plain)
    assert before.step.value == pytest.approx(0.5) and before.kernel_factor is None
    assert after.step.value == pytest.approx(0.7) and after.kernel_factor == pytest.approx(1.5)
    assert after.parts["fusions"] == before.parts["fusions"] and "multiplied with 1.500" in str(after)


@pytest.mark.parametrize(
    "text, words",
    [
        ("nothing", "is not a calibration"),
        ("[]", "is not a calibration"),
        (json.dumps({"format": 99}), "has format 99"),
        (recorded(chip="v99").text(), "chip 'v99' is unknown"),
        (recorded(ratio=-1.0).text(), "not positive seconds"),
        (recorded(chip=None).text(), "a correction needs a TPU and 3 kernels"),
        (dataclasses.replace(recorded(), rows=recorded().rows[:2]).text(), "has 2 kernels with an estimate"),
    ],
)
def test_files_that_cannot_be_used(capsys, monkeypatch, tmp_path, text, words):
    monkeypatch.setenv("VISHWAMAI_TUNING_DIR", str(tmp_path / "own"))
    path = tmp_path / "sent.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        calibration.use(path)
    assert main(["calibrate", "--use", str(path)]) == 2 and words in capsys.readouterr().err
    assert not (tmp_path / "own").exists()


def test_the_roofline_says_what_bounds():
    chip = TPUS["v5e"]
    assert _roofline(chip, chip.peak_bf16, 1.0, "bfloat16") == (1.0, "compute")
    assert _roofline(chip, 1.0, 2 * chip.hbm_bandwidth, "bfloat16") == (2.0, "memory")


@pytest.mark.long
def test_this_machine_is_measured_without_an_estimate(tmp_path):
    settings = dataclasses.replace(BenchSettings.quick(), seconds=1.0, call_seconds=0.01)
    wanted = steps(catalogue.chosen(["norm"]), settings)
    *_, found = calibrate(wanted, settings)
    assert found.chip is None and found.factor is None and len(found.rows) == len(wanted) + 1
    assert all(row.seconds and row.estimate is None for row in found.rows)
    assert any("no estimate" in line for line in calibration.table(found))
    assert calibration.parse(found.text(), "here") == found


def test_an_interrupt_keeps_the_rows(capsys, monkeypatch, tmp_path):
    def interrupted(*args, **kwargs):
        yield recorded()
        raise KeyboardInterrupt

    monkeypatch.setattr("vishwamai.planning.time.calibrate.calibrate", interrupted)
    path = tmp_path / "found.json"
    assert main(["calibrate", "--quick", "--output", str(path)]) == 130
    printed = capsys.readouterr()
    assert f"written to {path}" in printed.out and "interrupted; the file has the rows above" in printed.err
    assert calibration.parse(path.read_text(), "here") == recorded()


def test_a_tpu_compares_with_the_shipped_schedules():
    chip = TPUS["v5e"]
    shipped = schedules._table("v5e")["rows"]
    (operation,) = catalogue.chosen(["gemm"])
    case, stored = next((c, s) for c in operation.cases if (s := shipped.get(f"gemm: {c.name}")) and s["seconds"])
    spec = catalogue.specs_of(operation, case)[0]
    ran = CaseMeasurement(
        "gemm", case.name, "", "vishwamai", stored["implementation"], True, "bfloat16", spec.flops, spec.bytes_moved
    )
    ran = dataclasses.replace(ran, timing=Timing((2 * stored["seconds"],) * 4, 1))

    def row(**changes):
        found = dataclasses.replace(ran, **changes)
        return _row(Step(operation, case, found.gradients), found, chip)

    assert row().level == "verified" and row().ratio == pytest.approx(2.0) and not row().note
    smaller, other, untimed = row(flops=spec.flops // 2), row(implementation="xla"), row(timing=None)
    assert smaller.level == other.level == row(gradients=True).level == "analytic"
    assert "smaller size" in smaller.note and "schedule is that of" in other.note and untimed.seconds is None
    assert _row(Step(operation, case, False), ran, None).estimate is None
