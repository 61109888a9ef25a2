"""One log for all commands: its options, its two formats, and the exit codes that its page documents."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from vishwamai.cli import COMMANDS, command_parser, main, model, progress
from vishwamai.core import interrupt, logs
from vishwamai.core.progress import write

ROOT = Path(__file__).parents[2]


def test_every_command_has_the_options_of_the_log():
    for name in COMMANDS:
        actions = {action.dest: action for action in command_parser(name)._actions}
        assert tuple(actions["log_level"].choices or ()) == logs.LEVELS and actions["log_level"].default == "info", name
        assert tuple(actions["log_format"].choices or ()) == logs.FORMATS, name


def test_the_formats_of_progress_and_errors(capsys, monkeypatch):
    words = ["explain", "no_such_module:f", "--args", "f32[8]"]
    assert main(words) == 2
    text = capsys.readouterr().err
    assert text.startswith("vishwamai explain: there is no module 'no_such_module' here")
    assert main([*words, "--log-format", "json"]) == 2
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert line["level"] == "error" and line["logger"] == "vishwamai.command"
    assert f"vishwamai explain: {line['message']}\n" == text
    for level, lines in (("info", 2), ("warning", 1), ("error", 1)):
        assert main(["inspect", *words[1:], "--log-level", level, "--log-format", "json"]) == 2
        records = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        assert len(records) == lines and records[-1]["level"] == "error"
        assert lines == 1 or (records[0]["message"], records[0]["level"]) == ("loading jax", "info")


def test_all_ways_to_say_something_are_records(capsys):
    with logs.configured():
        progress.say("one")
        model.say("two")
        model.warn("three")
        write("four", time.monotonic())
        logging.getLogger("vishwamai.server.requests").info("five")
        lines = capsys.readouterr().err.splitlines()
        assert lines[:3] == ["... one", "two", "WARNING: three"] and re.fullmatch(r"\[ *0 s\] four", lines[3])
        assert re.fullmatch(r"\d{4}-\d\d-\d\d .* INFO five", lines[4])
        logs.configure(form="json")
        progress.say("one")
        model.warn("three")
        write("four", time.monotonic())
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("six", stacklevel=1)
        records = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        assert [record["message"] for record in records[:3]] == ["one", "three", "four"]
        assert [record["level"] for record in records] == ["info", "warning", "info", "warning"]
        assert records[3]["logger"] == "py.warnings" and "UserWarning: six" in records[3]["message"]
        assert not logs.shows_bars()


def test_settings_of_the_caller_hold_again(capsys):
    logger = logging.getLogger("vishwamai")
    before = logger.handlers[:], logger.level, logger.propagate
    assert main(["completion", "bash", "--log-level", "error"]) == 0
    progress.say("a part of a command that a program calls")
    assert capsys.readouterr().err == "... a part of a command that a program calls\n"
    assert (logger.handlers[:], logger.level, logger.propagate) == before


def test_the_old_option_of_the_server_is_the_format():
    parser = command_parser("serve")
    assert parser.parse_args(["model", "--log-json"]).log_format == "json" and "--log-json" not in parser.format_help()
    for name in ("deploy/kubernetes.yaml", "deploy/vishwamai.service"):
        assert re.search(r"--log-format[= ]json", (ROOT / name).read_text()), name


@pytest.mark.parametrize(
    "kind, status, text", [(KeyboardInterrupt, 130, "interrupted"), (interrupt.Terminated, 143, "terminated")]
)
def test_a_stopped_command_has_its_exit_code(kind, status, text, monkeypatch, capsys):
    def stop(arguments):
        raise kind

    monkeypatch.setattr("vishwamai.cli.completion.run", stop)
    assert main(["completion", "bash", "--log-format", "json"]) == status
    assert json.loads(capsys.readouterr().err)["message"] == text
    assert f"| {status} |" in (ROOT / "docs/logging.md").read_text()


def test_a_signal_ends_a_process_with_the_exit_code(tmp_path):
    """A real process, which says by a file that it works."""
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        ready = tmp_path / f"{status}"
        (tmp_path / "work.py").write_text(
            f"import pathlib, time\npathlib.Path({str(ready)!r}).touch()\nwhile True:\n    time.sleep(0.01)\n"
        )
        words = [sys.executable, "-m", "vishwamai", "explain", "work:f", "--log-format", "json"]
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        with subprocess.Popen(
            words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE, text=True
        ) as process:
            while not ready.exists():
                assert process.poll() is None
                time.sleep(0.02)
            process.send_signal(number)
            error = process.communicate()[1]
        assert process.returncode == status, error
        assert json.loads(error.splitlines()[-1])["level"] == "error"
