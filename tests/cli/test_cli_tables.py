"""What the commands show on a terminal of 80 columns, and in a pipe."""

import contextlib
import dataclasses
import importlib.util
import os
import pty
import re
import sys
import threading

import pytest

from test_calibrate import recorded
from vishwamai.aot.tuning import tuner
from vishwamai.cli import COMMANDS, command_parser, console, main
from vishwamai.training import run as training
from vishwamai.training.records import Record

WIDE = "a word " * 30


@contextlib.contextmanager
def terminal(columns):
    """Standard output is a terminal of so many columns; gives the list to which the lines go that it shows."""
    master, slave = pty.openpty()
    shown, lines = [], []

    def read():
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while part := os.read(master, 1 << 16):
                shown.append(part)

    thread = threading.Thread(target=read)
    thread.start()
    before = sys.stdout
    console.console.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch, open(slave, "w", encoding="utf-8") as sys.stdout:
            patch.setenv("COLUMNS", str(columns))
            patch.setenv("TERM", "xterm")
            yield lines
    finally:
        sys.stdout = before
        console.console.cache_clear()
        thread.join()
        os.close(master)
        text = b"".join(shown).decode()
        lines += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07", "", text).replace("\r", "\n").split("\n")


def shown_at(columns, *words):
    """(exit status, the lines) of a command on a terminal."""
    with terminal(columns) as lines:
        status = main(words)
    return status, [line.rstrip() for line in lines if line.strip()]


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    """What takes long, made up: a step of training with every figure, and a search of tiles."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path / "aot"))
    full = Record(123456, 12.3456, 10**9, 1234567.8, 1234.567, 1.23e-4, 12, 99 << 30, 1e5, 1e5)
    full = dataclasses.replace(full, evaluation_loss=11.2345, mfu=0.456, accuracy=0.99)
    monkeypatch.setattr(training, "train", lambda *how: iter([full]))
    monkeypatch.setattr(training, "finish", lambda *how: WIDE)

    def tune(cases, targets, progress, **how):
        progress(1, 1, f"v5e norm: {WIDE}")
        return []

    monkeypatch.setattr(tuner, "tune", tune)
    noted = dataclasses.replace(recorded().rows[0], name=WIDE, note=WIDE)
    (tmp_path / "sent.json").write_text(dataclasses.replace(recorded(), rows=(noted,)).text())
    (tmp_path / "run.yaml").write_text(
        "model: {config: {model_type: llama, vocab_size: 256, hidden_size: 64, intermediate_size: 128,"
        " num_hidden_layers: 1, num_attention_heads: 2}}\ndata: {sources: [{paths: [x]}], sequence_length: 64}\n"
    )


ROWS = "bf16[8192,4096], bf16[4096]"
QUERY = ", ".join(["bf16[1,8,300,64]"] * 3)
HALF = ["vishwamai:silu", "--args", "f16[8]", "--target", "v5e"]

TABLES = {
    "bench": None,  # tests/bench/test_bench_command.py, where its measurements are made up
    "doctor": [[]],
    "check": [["vishwamai:rms_norm", "--args", ROWS]],
    "inspect": [["vishwamai:rms_norm", "--args", ROWS]],
    "tune": [["--ops", "norm", "--target", "v5e", "--cases", "8B"]],
    "explain": [
        ["vishwamai:flash_attention", "--args", QUERY],
        ["vishwamai:silu", "--args", "f16[8]", "--target", "v5e"],
    ],
    "matrix": [["--ops", "linear_cross_entropy,norm"]],
    "train": [["run.yaml", "steps=123457", "--output", "run"]],
    "plan": [["vishwamai:rms_norm", "--args", ROWS, "--target", "v5e"]],  # of training: test_planning_search.py
    "calibrate": [["--show", "sent.json"]],
    "cache": [[]],
    "completion": None,  # a script
    "generate": None,  # an answer of a model, and no table
    "serve": None,
    "quantize": None,
    "compile": None,
    "evaluate": None,  # a few lines on a model
}
NEED_LIBTPU = {"check", "inspect", "plan"}


def test_every_command_has_its_case():
    assert set(TABLES) == set(COMMANDS)


@pytest.mark.turns(4)
@pytest.mark.parametrize("command, words", [(name, words) for name, all_of in TABLES.items() for words in all_of or ()])
def test_eighty_columns_are_enough(command, words, made_up, capfd):
    if command in NEED_LIBTPU and importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu: pip install '.[aot]'")
    status, narrow = shown_at(80, command, *words)
    assert status == 0 and narrow and max(map(len, narrow)) <= 80, max(narrow, key=len)
    if command in ("doctor", "explain", "calibrate", "cache"):  # the quick ones
        assert " ".join(narrow).split() == " ".join(shown_at(300, command, *words)[1]).split()
    noise = [line for line in capfd.readouterr().err.splitlines() if not re.match(r"\.\.\. |\[ *\d+ s\] ", line)]
    assert not noise


@pytest.mark.parametrize("command", COMMANDS)
def test_eighty_columns_are_enough_for_help(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = command_parser(command).format_help().splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)


def test_cells_of_a_training_run_stay_whole(made_up):
    """On 80 columns, where one that is broken would be read as another number."""
    _, lines = shown_at(80, "train", "run.yaml", "steps=123457", "--output", "run")
    text = "\n".join(lines)
    for cell in ("123456/123457", "12.3456", "1,234,568", "1234.567", "1.23e-04", "99.00 GiB", "45.6%", "11.2345"):
        assert cell in text, text


def test_in_a_pipe_lines_stay_whole(made_up, capsys):
    assert main(["tune", *TABLES["tune"][0]]) == 0
    assert f"v5e norm: {WIDE}" in capsys.readouterr().out.splitlines()
    assert main(["calibrate", *TABLES["calibrate"][0]]) == 0
    assert f"      {WIDE}" in capsys.readouterr().out.splitlines()
    assert main(["train", *TABLES["train"][0]]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert "loss 12.3456" in line and "held-out loss 11.2345" in line
