"""The lines that install: on every page, in every error, and what the extras bring."""

import functools
import http.server
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
from packaging.dependency_groups import resolve_dependency_groups
from packaging.requirements import Requirement

from vishwamai import cli
from vishwamai.cli import plan, serve, train
from vishwamai.core import installing
from vishwamai.core.installing import extras, install_line, lacking

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("src/vishwamai/**/README.md"),
]
SOURCES = [
    p for folder in ("src", "examples", "benchmarks", "tools", "capibara") for p in ROOT.glob(f"{folder}/**/*.py")
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _declared(extra):
    """The distributions of an extra by the parser of the `packaging` project."""
    names = []
    for text in PROJECT["project"]["optional-dependencies"][extra]:
        requirement = Requirement(text)
        if requirement.name == installing.NAME:
            names += [name for inner in sorted(requirement.extras) for name in _declared(inner)]
        elif requirement.marker is None or requirement.marker.evaluate():
            names.append(requirement.name)
    return set(names)


def test_every_line_installs_what_there_is():
    """Extras exist, and no line takes the name on PyPI, which belongs to others."""
    seen = 0
    for path in (*PAGES, *SOURCES):
        text = path.read_text(encoding="utf-8")
        for line in re.findall(r"pip install [^`\n]*", text):
            assert not re.search(r"[\"']?vishwamai(\[[\w,]*\])?[\"']?( |$)", line), f"{path}: {line}"
            for names in re.findall(r"\.\[([\w,]+)\]", line):
                seen += 1
                assert set(names.split(",")) <= set(extras()), f"{path}: {line}"
        for names in re.findall(r"(?:install_line|lacking)\(([\"'\w, ]+)\)", text):
            named = re.findall(r"[\"'](\w+)[\"']", names)
            assert set(named) <= set(extras()), f"{path}: {names}"
    assert seen > 15


def test_the_name_is_that_of_the_project():
    assert installing.NAME == PROJECT["project"]["name"]
    other = tomllib.loads((ROOT / "capibara/pyproject.toml").read_text())["project"]
    assert [Requirement(text).name for text in other["dependencies"]] == [installing.NAME]


def lines_of_pages():
    """The words after `pip install` of each line of a page or of a program's text that installs from a clone."""
    for path in (*PAGES, *SOURCES, *ROOT.glob("tests/**/*.py"), ROOT / "deploy/Containerfile"):
        for line in re.findall(r"pip install ([^`\n]*)", path.read_text(encoding="utf-8")):
            yield from re.findall(r"""(?<=')\.\[[\w,]+\](?=')""", line)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@pytest.mark.long
def test_pip_takes_every_line(tmp_path):
    """By a real pip, as far as the metadata: from a clone, from elsewhere, and by the name with an address of git."""
    folder = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    shutil.copy(ROOT / "pyproject.toml", folder)  # as it is here, committed or not
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", "-C", str(folder), *who, "commit", "-qam", "now", "--allow-empty"], check=True)
    lines = sorted(set(lines_of_pages()))
    assert len(lines) > 5
    extras_in_one = ",".join(PROJECT["project"]["optional-dependencies"])
    cases = [(folder, line) for line in [*lines, f"{folder}[serve]"]]
    options = ["--dry-run", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run(["git", "-C", str(folder), "update-server-info"], check=True)
    handler = functools.partial(Quiet, directory=str(folder / ".git"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"git+http://127.0.0.1:{server.server_address[1]}/"
        cases.append((tmp_path, f"{installing.NAME}[{extras_in_one}] @ {address}"))
        command = [sys.executable, "-m", "pip", "install", *options, ""]
        for place, line in cases:
            command[-1] = line
            done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
            assert done.returncode == 0, (line, done.stderr)
            assert f"Would install {installing.NAME}-" in done.stdout.replace("_", "-"), (line, done.stdout)
        command[-1] = f"vishwamai[serve] @ {address}"  # the name of another project
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode != 0 and installing.NAME in done.stdout + done.stderr
        server.shutdown()


def test_extras_are_those_of_the_project():
    for extra in PROJECT["project"]["optional-dependencies"]:
        assert set(extras()[extra]) == _declared(extra), extra
    assert set(installing.COMMANDS.values()) <= set(extras()) and set(installing.COMMANDS) <= set(cli.COMMANDS)


def test_tools_of_developers_are_no_extra():
    """They are groups (PEP 735), which tools/build_requires.py reads as the `packaging` project's resolver does."""
    groups = PROJECT["dependency-groups"]
    assert {"dev", "docs"} <= set(groups) and not {"dev", "docs"} & set(extras())
    command = [sys.executable, ROOT / "tools/build_requires.py", "--group", "dev"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert sorted(str(Requirement(line)) for line in lines) == sorted(resolve_dependency_groups(groups, "dev"))
    assert {"pytest", "mkdocs"} <= {Requirement(line).name for line in lines}


def test_the_line_works_from_where_the_user_is(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert install_line("serve") == "pip install '.[serve]'"
    monkeypatch.chdir(tmp_path)
    assert install_line("serve", "aot") == f"pip install '{ROOT}[serve,aot]'"
    monkeypatch.setattr(installing, "_is_clone", lambda folder: False)
    for origin, line in (
        ({}, "in a clone of this repository, pip install '.[serve]'"),
        ({"url": tmp_path.as_uri(), "dir_info": {}}, f"pip install '{tmp_path}[serve]'"),
        ({"url": tmp_path.as_uri(), "vcs_info": {"vcs": "git"}}, f"pip install '{tmp_path}[serve]'"),
        ({"url": "file:///gone", "vcs_info": {"vcs": "git"}}, "in a clone of this repository, pip install '.[serve]'"),
        (
            {"url": "https://example.org/a/b.git", "vcs_info": {"vcs": "git"}},
            "pip install 'vishwamai-jax[serve] @ git+https://example.org/a/b.git'",
        ),
        ({"url": "https://example.org/v.whl"}, "pip install 'vishwamai-jax[serve] @ https://example.org/v.whl'"),
        ({"url": "file:///gone/v.whl"}, "in a clone of this repository, pip install '.[serve]'"),
    ):
        monkeypatch.setattr(installing, "_origin", lambda origin=origin: origin)
        assert install_line("serve") == line
        if not line.startswith("in a clone"):
            Requirement(line.split("'")[1]) if "@" in line else None


@pytest.mark.parametrize(
    "needed, extra",
    [
        (train._NEEDED, "train"),
        (serve._NEEDED, "serve"),
        (sum(plan.NEEDED.values(), ()), "aot"),
        (("libtpu", "flatbuffers", "rich", "jinja2"), "aot"),
    ],
)
def test_extras_bring_what_their_commands_need(needed, extra):
    """By the import names that the installed distributions have."""
    homes = importlib.metadata.packages_distributions()
    brought = {name.lower().replace("_", "-") for name in extras()[extra]}
    for package in needed:
        assert {home.lower().replace("_", "-") for home in homes.get(package, ())} & brought, package


def test_the_packages_that_an_extra_lacks(monkeypatch):
    monkeypatch.setattr(installing, "_installed", lambda name: name not in ("optax", "flax"))
    monkeypatch.chdir(ROOT)
    assert set(lacking("train")) == {"flax", "optax"} and lacking("torch") == ()
    monkeypatch.setattr(installing, "_installed", lambda name: True)
    assert lacking("train") == ()


@pytest.mark.parametrize(
    "package, arguments",
    [
        ("jinja2", ["inspect", "json:dumps", "--report", "x.html"]),
        ("flax", ["serve", "."]),
        ("optax", ["plan", str(ROOT / "examples/train_stdlib.yaml"), "--target", "v5e"]),
        ("grain", ["train"]),
    ],
)
def test_packages_are_checked_before_work(package, arguments, capsys, monkeypatch, tmp_path):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else real(name, *rest))
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert package in error and f"pip install '{ROOT}[" in error
