"""An operation is its folder, one export and its oracle: the toy operation reaches every suite and tool, and none of
them names it.

The suites themselves run on it like on any other operation: `pytest -k soft_clip`.
"""

import json
import pathlib
import subprocess

import numpy as np
import pytest

import contract
import draws
import test_lowering
import test_transforms
from bench_settings import PEAKS, SETTINGS
from toy_ops.soft_clip import SOFT_CLIP, soft_clip
from vishwamai import aot
from vishwamai.aot.compile import gpu_survey
from vishwamai.aot.compile.compiled import tracing_for
from vishwamai.aot.tuning import tuner
from vishwamai.bench import runner
from vishwamai.cli import main
from vishwamai.core import tuning
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.explain import explain
from vishwamai.core.observe import record_plans
from vishwamai.ops import catalogue

OPERATION = catalogue.operations()[SOFT_CLIP.name]


def test_no_suite_and_no_tool_names_it():
    """What mentions it is its folder, its oracle, the tests of the toy operation, and the page that points at it."""
    root = pathlib.Path(__file__).parents[2]
    found = subprocess.run(["git", "grep", "--name-only", SOFT_CLIP.name], cwd=root, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("not a checkout of git")
    own = ("tests/toy_ops/soft_clip/", "tests/oracle_soft_clip.py", "tests/ops/test_toy_operation.py")
    own += ("tests/gpu/test_gpu_toy_operation.py", "CONTRIBUTING.md")
    assert [name for name in found.stdout.split() if not name.startswith(own)] == []


def test_the_suites_have_it():
    """Numbers, the poisoned row and what is declined; transforms, programs for TPUs, random calls."""
    ours = {impl.name for op, impl in contract.pairs() if op is SOFT_CLIP}
    assert ours == ({"triton"} if contract.TRITON else {"pallas_tpu", "xla"})
    assert {p.values[1].name for p in contract.triples() if p.values[0] is SOFT_CLIP} == ours
    assert SOFT_CLIP in [p.values[0] for p in test_transforms.CHOSEN]
    assert SOFT_CLIP in [operation.op for operation, _ in test_lowering.CASES]
    assert SOFT_CLIP.name in draws.DRAWS


def test_explain_has_it():
    x = np.ones((4, 40), np.float32)
    (call,) = explain(lambda x: soft_clip(x, 2.0), x, target="v5e").calls
    assert (call.op, call.runs) == (SOFT_CLIP.name, "pallas_tpu")


def test_the_benchmark_has_it():
    (model,) = OPERATION.tagged("model")
    assert (OPERATION, model) in runner.planned(catalogue.chosen(None), runner.BenchSettings())
    found = {m.implementation: m for m in runner.run_case(OPERATION, OPERATION.cases[0], PEAKS, SETTINGS, 0.0)}
    assert found["xla"].numbers.right and found["xla"].timing is not None


def test_the_support_matrix_has_it(capsys):
    assert main(["matrix", "--markdown", "--ops", SOFT_CLIP.name]) == 0
    printed = capsys.readouterr().out
    assert f"| {SOFT_CLIP.name} | pallas_tpu | triton | xla |" in printed
    assert "| float64 | no" in printed.partition(f"| {SOFT_CLIP.name} |")[2]


def test_gpu_code_has_it():
    assert OPERATION.tagged("model")[0] in list(gpu_survey.candidates())


@pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install '.[aot]'")
def test_the_tuner_has_it(capsys, monkeypatch, tmp_path):
    """`vishwamai tune` searches its tiles, writes its table, and the next call reads it."""
    tried = []

    def evaluate(search, configs, backward):
        configs = configs[: search.budget - search.compilations]
        search.compilations += len(configs)
        tried.extend(configs)
        return [tuner._Trial(config, 1.0 / len(tried), 0.5) for config in configs]

    monkeypatch.setattr(tuner.Search, "evaluate", evaluate)
    assert main(["tune", "--cases", "Gemma 2 9B logits", "--target", "v5e", "--directory", str(tmp_path)]) == 0
    table = json.loads((tmp_path / "v5e" / f"{SOFT_CLIP.name}.json").read_text())
    ((key, entry),) = table["pallas_tpu"].items()
    monkeypatch.setenv("VISHWAMAI_TUNING_DIR", str(tmp_path))
    tuning.reload()
    (case,) = OPERATION.tagged("model")
    with tracing_for("v5e"):
        (plan,) = record_plans(case.run, case.shapes())
    tuning.reload()
    assert plan.spec.tuning_key() == key
    assert plan.choices[0].config.block_rows == entry["config"]["block_rows"]
    assert plan.choices[0].config in tried


def test_an_operation_without_cases_is_an_error(tmp_path, monkeypatch):
    folder = tmp_path / "own_ops" / "clip"
    folder.mkdir(parents=True)
    (tmp_path / "own_ops" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("from toy_ops.soft_clip import SOFT_CLIP\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(catalogue, "PACKAGES", ["own_ops"])
    with pytest.raises(UnsupportedError, match="own_ops.clip exports soft_clip and has no cases.py; write one"):
        catalogue.operations.__wrapped__()
