"""benchmarks/compare.py: its page by made-up figures, what it declines, and a run with a real peer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import world
from benchmark_files import loaded

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MACHINE = {"name": "a processor", "cores": 2, "flags": ["avx2"]}


@pytest.fixture(scope="module")
def compare():
    with loaded("compare") as module:
        yield module


def _facts(**changes):
    facts = {"machine": MACHINE, "threads": 2, "model": "small", "prompt": 8, "steps": 4, "versions": {}, "skipped": {}}
    return {**facts, "wrong": {}, "others_before": 0.01, "quiet": 0.05, **changes}


def test_a_cell_has_the_better_setting_of_the_peer_and_the_ratio_of_the_rounds(compare):
    reference, ours = compare.Row("reference", "f32", "f32"), compare.Row("ours", "int8", "int8")
    flash, plain = (compare.Row("llama.cpp", "int8", "q8_0", setting) for setting in ("flash", "no-flash"))
    results = {row: {"loss": loss} for row, loss in ((reference, 1.0), (ours, 1.1), (flash, 1.2), (plain, 1.2))}
    figures = {
        ours: [{"prefill": 30.0, "decode 1": 20.0}, {"prefill": 50.0, "decode 1": 24.0}, {"prefill": 40.0}],
        flash: [{"prefill": 20.0, "decode 1": 5.0}, {"prefill": 20.0, "decode 1": 5.0}, {"prefill": 10.0}],
        plain: [{"prefill": 10.0, "decode 1": 10.0}, {"prefill": 10.0, "decode 1": 8.0}, {"error": "killed"}],
    }
    text = compare.page(_facts(skipped={"vllm": "no wheel"}), results, figures)
    lines = text.splitlines()
    assert "| ours, int8 | 3.004 | 40.0 (30.0 to 50.0) | 22.0 (20.0 to 24.0) |  |  |  |  |" in lines
    peer = "| llama.cpp, q8_0 | 3.320 | 20.0 (10.0 to 20.0), flash | 9.0 (8.0 to 10.0), no-flash |  |  |  |  |"
    assert peer in lines
    assert "| ours / llama.cpp | | **2.50** | **2.50** |  |  | | |" in lines
    assert "- skipped: vllm: no wheel" in lines and "- failed: llama.cpp q8_0 no-flash: killed" in lines
    assert "was quiet" in text and "not quiet" not in text
    assert "not quiet: other processes used up to 1.50 of 2" in compare.page(
        _facts(others_before=1.5), results, figures
    )


def test_wrong_numbers_have_no_speed(compare):
    reference = {"loss": 2.0, "answers": [[1, 2], [3, 4]]}
    for result, words in (
        ({"loss": 2.1, "answers": [[1, 9], [3, 9]]}, ""),
        ({"loss": 2.1, "answers": [[1, 9], [5, 9]]}, ""),
        ({"loss": 2.1, "answers": [[2, 9], [5, 9]]}, "0% of its answers begin as the reference's"),
        ({"loss": 2.8, "answers": reference["answers"]}, "its loss is 2.800 nats, the reference's 2.000"),
        ({"loss": float("nan"), "answers": reference["answers"]}, "its loss is nan"),
        ({"error": "no such file"}, "failed: no such file"),
    ):
        complaint = compare.complaint(result, reference)
        assert complaint.startswith(words) and bool(complaint) == bool(words), result


def test_rounds_take_turns_and_leave_out_what_failed(compare):
    rows = [compare.Row("ours", "bf16", "bf16"), compare.Row("peer", "bf16", "bf16", "a")]
    figures, calls = {row: [] for row in rows}, []

    def run(row):
        calls.append(row.engine)
        return {"error": "killed"} if row.engine == "peer" else {"prefill": 1.0}

    assert list(compare.measure(figures, run, 3, until=float("inf"))) == [0, 1, 2]
    assert calls == ["ours", "peer", "ours", "ours"]
    calls.clear()
    figures = {row: [] for row in rows}
    assert list(compare.measure(figures, run, 3, until=0.0)) == [0] and calls == ["ours", "peer"]


def test_a_peer_without_a_wheel_is_named(compare, monkeypatch, tmp_path):
    def fail(command, **_):
        raise subprocess.CalledProcessError(1, command, stderr="WARNING\nERROR: No matching distribution found")

    monkeypatch.setattr(compare.subprocess, "run", fail)
    arguments = {"python": ["transformers=here"], "only": [""], "gguf": None, "directory": tmp_path, "out": tmp_path}
    pythons, skipped = compare.interpreters(compare.argparse.Namespace(**arguments))
    assert pythons == {"transformers": "here"} and "pass --gguf" in skipped["llama.cpp"]
    pythons, skipped = compare.interpreters(compare.argparse.Namespace(**{**arguments, "gguf": tmp_path / "a.gguf"}))
    only = {**arguments, "only": ["llama.cpp", "bf16"], "gguf": tmp_path / "a.gguf"}
    assert compare.interpreters(compare.argparse.Namespace(**only))[0] == {}  # the interpreter is of a peer left out
    assert skipped["ik_llama.cpp"] == (
        "ik-llama-cpp-python==0.1.5 has no wheel that installs here (ERROR: No matching distribution found)"
    )


def test_words_that_name_no_peer_are_declined(compare, monkeypatch, capsys):
    for words, complaint in (
        (["--only", "vllm,bf16"], "--only: vllm is not among llama.cpp, ik_llama.cpp, transformers, bf16, int8, int4"),
        (["--python", "torch=python3"], "--python torch=python3 is not PEER=PYTHON with one of llama.cpp,"),
        ([], "none has no config.json; `make world` fetches SmolLM2"),
    ):
        monkeypatch.setattr(sys, "argv", ["compare.py", "none", *words])
        with pytest.raises(SystemExit) as stop:
            compare.main()
        assert stop.value.code == 2 and complaint in capsys.readouterr().err


def test_gaps_between_tokens_are_measured_step_by_step():
    """Of an engine that gives each sequence a token a step."""
    with loaded("serve") as serve:

        class Steps(serve.DrivenEngine):
            def start(self, sequence, tokens, room=None):
                self._sampled[sequence] = [0]

            def advance(self, sequences, count):
                for sequence in sequences:
                    assert len(self._sampled[sequence]) == count - 1
                    self._sampled[sequence].append(0)

            def prefill(self, sequence, tokens):
                self.start(sequence, tokens)

            def reset(self):
                self._sampled.clear()

        for arrivals in (False, True):
            times = serve.gaps(Steps(None), 4, 16, arrivals)
            assert 0 <= times["median"] <= times["p99"]


@pytest.mark.long  # several processes, each with an engine
def test_a_run_with_transformers_as_the_peer(tmp_path):
    pytest.importorskip("transformers")
    words = [world.tiny("llama2", max_position_embeddings=128), "--only", "transformers,bf16", "--rounds", "1"]
    words += ["--python", f"transformers={sys.executable}", "--prompt", "8", "--steps", "1", "--sequences", "1"]
    words += ["--check-tokens", "32", "--out", tmp_path]
    command = [sys.executable, BENCHMARKS / "compare.py", *words]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (tmp_path / "compare.md").read_text().strip()
    record = json.loads((tmp_path / "compare.json").read_text())
    losses = {row["row"]["engine"]: row["check"]["loss"] for row in record["rows"]}
    assert losses["ours"] == pytest.approx(losses["reference"], rel=1e-2)
    assert losses["transformers"] == pytest.approx(losses["reference"], rel=1e-2)
    rates = {row["row"]["engine"]: row["rounds"][0] for row in record["rows"] if row["rounds"]}
    assert set(rates) == {"ours", "transformers"} and all(figures["decode 1"] > 0 for figures in rates.values())
    assert record["versions"]["transformers"].keys() == {"torch", "transformers"} and not record["wrong"]
    assert "| ours / transformers | | **" in done.stdout
