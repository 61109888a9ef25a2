"""The tools that do what a stranger does: what they paste, and that they see what an interrupted command does wrong."""

import random
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

import cross_wheel  # noqa: E402
import first_hour  # noqa: E402
import interrupts  # noqa: E402
import wheels  # noqa: E402
from interrupts import Command, Failed  # noqa: E402

PAGE = """
```python
import json
x = json.loads("3")
```
```python
import no_such_package
y = x + 1
```
```python
>>> x
3
```
<!--- skip: next -->
```python
1 / 0
```
```sh
exit 1
```
```python
print(y)
```
"""


def paste(tmp_path, text):
    (tmp_path / "page.md").write_text(text)
    command = [sys.executable, str(ROOT / "tools" / "paste.py"), str(tmp_path / "page.md")]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_blocks_are_pasted_and_what_is_left_out_is_named(tmp_path):
    done = paste(tmp_path, PAGE)
    assert done.returncode == 0, done.stderr
    said = "page.md: 2 of 4 blocks; left out: block 2 needs no_such_package; block 4 needs y of a block left out"
    assert done.stdout.strip() == said


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [(("\n3\n", "\n4\n"), 1, "block 3 prints something else"), (('"3"', '"x"'), 1, "JSON")],
)
def test_a_block_that_does_not_hold_is_an_error(tmp_path, changed, status, said):
    done = paste(tmp_path, PAGE.replace(*changed))
    assert done.returncode == status and said in done.stderr


def test_a_wheel_for_arm_needs_the_cross_compiler(tmp_path, monkeypatch, capsys):
    """Which the message names; and its tags are those of the Python it serves."""
    assert cross_wheel.tags((3, 11)) == ("cp311", "cp311", ".cpython-311-aarch64-linux-gnu.so")
    assert cross_wheel.tags((3, 12)) == cross_wheel.tags((3, 14)) == ("cp312", "abi3", ".abi3.so")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["cross_wheel.py", "--out", str(tmp_path), "--python", sys.executable])
    assert cross_wheel.main() == 1 and not list(tmp_path.iterdir())
    assert "there is no aarch64-linux-gnu-g++ (apt-get install g++-aarch64-linux-gnu)" in capsys.readouterr().err


def test_the_jax_of_each_python_is_that_of_the_readme(tmp_path):
    (tmp_path / "versions.txt").write_text("jax==0.10.2\njaxlib==0.10.2\njaxtyping==0.3.11\nnumpy==2.4.6\n")
    assert wheels.without_jax(tmp_path / "versions.txt") == "jaxtyping==0.3.11\nnumpy==2.4.6\n"
    assert wheels.tried_with()[3, 11] == jax.__version__
    assert all((ROOT / "tests" / path).is_file() for path in wheels.CORE)
    classified = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    versions = {tuple(map(int, c.rpartition(" ")[2].split("."))) for c in classified if ":: 3." in c}
    assert set(wheels.tried_with()) == versions


def test_every_page_with_blocks_is_pasted_or_left_out_with_a_reason():
    asked = {page.name for page in first_hour.pages()}
    shown = {p.name for p in (ROOT / "docs").glob("*.md") if "\n```python\n" in p.read_text(encoding="utf-8")}
    assert asked == {"README.md"} | shown - set(first_hour.LEFT_OUT) and set(first_hour.LEFT_OUT) <= shown
    assert {page.name for page in first_hour.BARE} <= asked


WELL = """
import signal, sys, time
def stop(number, frame):
    sys.exit(128 + number)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
{more}
print("begun", flush=True)
time.sleep({seconds})
print("the end", flush=True)
"""


def command(tmp_path, seconds=30, more="", readable=interrupts.read_all_json):
    script = tmp_path / "command.py"
    script.write_text(WELL.format(seconds=seconds, more=more))
    return Command("toy", [sys.executable, str(script)], (), "", readable, "the end")


def test_an_interrupted_command_that_does_as_documented(tmp_path):
    done = [interrupts.interrupt(command(tmp_path), tmp_path / "in", {}, random.Random(seed), 0.3) for seed in range(4)]
    assert {line.rpartition(" ")[2] for line in done} == {"130", "143"}
    assert "ended before" in interrupts.interrupt(command(tmp_path, 0), tmp_path / "in", {}, random.Random(0), 9)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("signal.signal(signal.SIGINT, lambda *_: sys.exit(3)); signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))",
         "it ended with status 3"),
        ("print('Traceback (most recent call last)')", "it printed 'Traceback'"),
        ("import subprocess; subprocess.Popen(['sleep', '60'])", "it left processes"),
        ("open('r.json', 'w').write('{')", "Expecting property name"),
        ("open('.vishwamai-1', 'w')", "temporaries are left"),
    ],
    ids=["status", "traceback", "children", "damaged", "temporaries"],
)  # fmt: skip
def test_what_an_interrupted_command_does_wrong_is_seen(tmp_path, monkeypatch, more, said):
    monkeypatch.setattr(interrupts, "PATIENCE", 0.5)
    with pytest.raises((Failed, ValueError), match=said):
        interrupts.interrupt(
            command(tmp_path, more=more), tmp_path / "in", {"PATH": "/bin:/usr/bin"}, random.Random(0), 0.3
        )


@pytest.mark.turns(3)
def test_a_command_that_hangs_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(interrupts, "LONGEST", 1.0)
    deaf = "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, lambda *_: time.sleep(30))"
    with pytest.raises(Failed, match="it did not end within 1 s"):
        interrupts.interrupt(command(tmp_path, more=deaf), tmp_path / "in", {}, random.Random(0), 0.3)


def test_a_full_disk_is_one(tmp_path):
    place = first_hour.Environment(Path(sys.executable).parent, tmp_path / "there")
    write = "import pathlib; pathlib.Path('x').write_text('y')"
    place.run("no home directory", place.python, "-c", write)
    with pytest.raises(Failed, match="File too large"):
        place.run("a full disk", place.python, "-c", write)


def test_a_python_behind_a_shim_is_found(tmp_path, monkeypatch, capsys):
    """One that fails, as pyenv's does where no version is chosen, and the one behind it."""
    shim, behind = tmp_path / "python9.9", tmp_path / "versions" / "9.9.1" / "bin" / "python9.9"
    behind.parent.mkdir(parents=True)
    for path, status in ((shim, 127), (behind, 0)):
        path.write_text(f"#!/bin/sh\nexit {status}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert wheels.that_runs(str(shim)) == str(behind) and wheels.one_of([str(shim), "no-such"], 5) == str(behind)
    monkeypatch.setattr(sys, "argv", ["wheels.py", "--out", str(tmp_path), "--one", "--python", "no-such"])
    assert wheels.main() == 0 and capsys.readouterr().out == "wheels: NOT CHECKED, none of no-such runs here\n"
