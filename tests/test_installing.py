"""The lines that install: on every page, in every error, and what the extras bring."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.dependency_groups import resolve_dependency_groups
from packaging.requirements import Requirement

from vishwamai import cli
from vishwamai.cli import plan, serve, train
from vishwamai.core import installing
from vishwamai.core.installing import extras, install_line, lacking

ROOT = Path(__file__).parents[1]
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
        if requirement.name == "vishwamai":
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
        (
            {"url": "https://example.org/a/b.git", "vcs_info": {"vcs": "git"}},
            "pip install 'vishwamai[serve] @ git+https://example.org/a/b.git'",
        ),
        ({"url": "https://example.org/v.whl"}, "pip install 'vishwamai[serve] @ https://example.org/v.whl'"),
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
