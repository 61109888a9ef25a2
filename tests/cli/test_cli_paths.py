"""Where commands write: whatever path cannot be written is declined before any work, whichever command has it."""

import contextlib
import os
import threading
from pathlib import Path

import pytest

from vishwamai.cli import COMMANDS, command_parser, main, output
from vishwamai.cli.function import CommandError
from vishwamai.core import caches
from vishwamai.measure import machine_peaks

READ = {
    *(("generate", "directory"), ("generate", "draft_model"), ("generate", "chat")),
    *(
        ("serve", "directory"),
        ("serve", "draft_model"),
        ("serve", "encoder"),
        ("serve", "api_key_file"),
        ("serve", "adapter_folder"),
        ("serve", "ssl_certfile"),
        ("serve", "ssl_keyfile"),
        ("serve", "programs"),
        ("serve", "cache_dir"),  # written where that is possible: no start and no answer fails of it
    ),
    *(
        ("compile", "directory"),
        ("compile", "draft_model"),
    ),
    *(("evaluate", "directory"), ("evaluate", "text"), ("quantize", "directory"), ("quantize", "calibrate")),
    *(("calibrate", "use"), ("calibrate", "show"), ("doctor", "serve")),
}
"""Paths that are read."""

NEEDED = {"inspect": ["no.module:f"], "plan": ["none.yaml"], "train": ["none.yaml"]}
NEEDED["generate"] = ["none", "--prompt", "a"]
NEEDED["compile"] = ["none", "--target", "cpu"]
NEEDED["evaluate"] = ["none", "--text", "none"]
NEEDED["quantize"] = ["none", "--format", "int4"]
"""What a command wants next to the path, so that nothing else is wrong with the command line."""


PATHS = [(name, action) for name in COMMANDS for action in command_parser(name)._actions if action.type is Path]
KINDS = (output.File, output.Directory)
WRITTEN = [(name, a.option_strings[0], kind) for name, a in PATHS for kind in KINDS if isinstance(a, kind)]
WRITTEN.append(("tune", "--directory", output.Directory))  # which --check reads, so that the command tries it


def test_every_path_is_one_to_read_or_is_tried():
    paths = {(name, action.dest) for name, action in PATHS}
    assert paths - READ == {(name, option.removeprefix("--")) for name, option, _ in WRITTEN} and paths >= READ
    commands = {"bench", "calibrate", "compile", "doctor", "evaluate", "generate", "inspect", "plan", "quantize"}
    commands |= {"train", "tune"}
    assert {name for name, _, _ in WRITTEN} == commands


@pytest.mark.parametrize("command, option, kind", WRITTEN)
def test_a_path_is_declined_before_any_work(command, option, kind, monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    wrong = {
        str(tmp_path / "file" / "x"): "",
        "/proc/none" if kind is output.Directory else "/proc/x": "no file can be made in /proc: ",
        str(tmp_path / ("x" * 300)): " File name too long; choose another ",
        "gs://bucket/run": "training does with checkpoint.remote=gs://bucket/run)",
    }
    if kind is output.File:
        wrong |= {str(tmp_path): f"{tmp_path} is a directory", str(tmp_path / "no" / "x"): "/no does not exist"}
    else:
        wrong |= {str(tmp_path / "file"): f"the directory {tmp_path / 'file'} is a file"}
    for path, said in wrong.items():
        assert main([command, *NEEDED.get(command, ()), option, path]) == 2, path
        err = capsys.readouterr().err
        lines = [line for line in err.splitlines() if line != "... loading jax"]
        assert len(lines) == 1 and lines[0].startswith(f"vishwamai {command}: {option}: ") and said in lines[0], err


def test_tables_that_are_only_checked_need_not_be_writable(capsys):
    assert main(["tune", "--check", "--directory", "/proc"]) == 0 and "0 entries" in capsys.readouterr().out


def test_defaults_are_tried_too(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(machine_peaks, "measure_machine", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.html").mkdir()
    assert main(["bench", "--quick"]) == 2 and "--report: report.html is a directory" in capsys.readouterr().err
    (tmp_path / "calibration-cpu.json").mkdir()
    assert main(["calibrate", "--quick"]) == 2 and "--output: calibration-cpu.json is" in capsys.readouterr().err


@contextlib.contextmanager
def unprivileged():
    """Without root's rights, where the tests have them."""
    before = os.geteuid()
    os.seteuid(65534 if before == 0 else before)
    try:
        yield
    finally:
        os.seteuid(before)


def test_permissions(tmp_path):
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.name.startswith(("pytest-", "popen-")):  # pytest's own: closed to others
            parent.chmod(0o711)
    folder, closed, file = tmp_path / "folder", tmp_path / "closed", tmp_path / "open" / "file"
    for path, mode in ((folder, 0o555), (closed, 0o000), (file.parent, 0o777)):
        path.mkdir()
        path.chmod(mode)
    file.write_text("")
    file.chmod(0o444)
    with unprivileged():
        for path, said in (
            (folder / "x", f"--x: no file can be made in {folder}: Permission denied; choose another directory"),
            (closed / "x", f"--x: {closed / 'x'} cannot be written: Permission denied"),
            (file, f"--x: {file} may not be written; choose another file, or change its permissions"),
        ):
            with pytest.raises(CommandError, match=said):
                output.check_file(path, "--x")
        with pytest.raises(CommandError, match="no file can be made in .*folder: Permission denied"):
            output.check_directory(folder / "new" / "er", "--x")
        output.check_file(file.with_name("new"), "--x")
        output.check_directory(file.with_name("new") / "er", "--x")
    assert [path.name for path in file.parent.iterdir()] == ["file"]  # nothing stays of a try


def test_links_and_pipes_stay(tmp_path):
    """A link's file is written, and a pipe is not replaced by a file."""
    (tmp_path / "there").mkdir()
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(tmp_path / "there" / "x.json")
    os.mkfifo(pipe)
    heard = []
    thread = threading.Thread(target=lambda: heard.append(pipe.read_text()), daemon=True)
    thread.start()
    for path in (link, pipe, Path("/dev/null")):
        output.check_file(path, "--json")
        if path != Path("/dev/null"):
            caches.write(path, "text")
    thread.join(10)
    assert heard == ["text"] and pipe.is_fifo()
    assert link.is_symlink() and (tmp_path / "there" / "x.json").read_text() == "text"
