"""What an install promises: few imports, no device taken, one version, and archives that hold what they must."""

import ast
import email
import email.message
import functools
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import unittest.mock
import zipfile
from pathlib import Path

import pytest

from jax_inside import DEVICES_TAKEN

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

import project_links  # noqa: E402
from cross_wheel import FILES  # noqa: E402

from vishwamai.core import installing  # noqa: E402


def in_fresh_process(code: str, **environment: str) -> str:
    """What `code` prints in a new interpreter with this one's packages."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.turns(3)
def test_an_ambient_implementation_is_known_before_any_operation_is_used():
    code = "import vishwamai as v\nwith v.kernel_config(implementation='xla_chunked'): print(v.current_config())"
    assert "xla_chunked" in in_fresh_process(code)


TOP_LEVELS = (
    "import json, sys; print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules} - sys.stdlib_module_names)))"
)


HEAVY = {"jax", "numpy", "torch", "transformers", "triton", "jax._src.pallas", "vishwamai.core.op", "vishwamai.ops"}


@functools.cache
def imported() -> list[str]:
    """What a process says that imported us: what is heavy in `sys.modules` after the import, after the command's, after
    the use of one operation; the packages it holds that has used every name; whether a device is taken, and whether
    one is after jax has been asked for it.
    """
    heavy = f"print(sorted(set({sorted(HEAVY)}) & set(sys.modules)))"
    taken = f"print({DEVICES_TAKEN})"
    use = f"from vishwamai import *; {TOP_LEVELS}; {taken}; import jax; jax.devices(); {taken}"
    other = "print('vishwamai.ops.norm' in sys.modules, 'vishwamai.ops.attention' in sys.modules)"
    return in_fresh_process(
        f"import sys, vishwamai; {heavy}; import vishwamai.cli; {heavy}; vishwamai.rms_norm; {other}; {use}"
    ).splitlines()


@pytest.mark.turns(3)
def test_kernels_are_loaded_when_they_are_used():
    bare, command, one_used = imported()[:3]
    assert bare == command == "[]"
    assert one_used == "True False"


def test_the_names_of_the_package():
    """One table for the interpreter, one for type checkers, one for `import *`: they agree."""
    import vishwamai

    tree = ast.parse(Path(vishwamai.__file__).read_text())
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen == vishwamai._HOMES
    assert sorted(seen) == sorted(vishwamai.__all__)
    assert {*vishwamai.__all__, "core", "ops", "__version__"} <= set(dir(vishwamai))
    for name, module in vishwamai._HOMES.items():
        assert getattr(vishwamai, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="module 'vishwamai' has no attribute 'rms_nrom'"):
        getattr(vishwamai, "rms_nrom")  # noqa: B009 - a type checker would decline the attribute


@pytest.mark.turns(2)
def test_import_needs_jax_and_numpy_only():
    with_jax = set(
        json.loads(in_fresh_process(f"import jax, jax.numpy, jax.experimental.pallas.tpu, numpy; {TOP_LEVELS}"))
    )
    with_us = set(json.loads(imported()[3]))
    assert with_us - with_jax == {"vishwamai"}
    # libtpu is no proof either way: where it is installed, `import jax` itself imports it.
    assert not with_us & {"torch", "triton", "rich", "transformers", "jinja2"}


@pytest.mark.turns(3)
def test_torch_s_package_imports_an_operation_when_it_is_used(tmp_path):
    """And `torch.export.load`, which looks operators up by their names, has those of a program without any import of
    an operation.
    """
    path = str(tmp_path / "program.pt2")
    modules = "import sys; print([n for n in sys.modules if n.startswith(('vishwamai.ops', 'jax'))])"
    save = (
        "class Norm(torch.nn.Module):\n    forward = lambda self, x: vishwamai.torch.rms_norm(x)\n"
        f"torch.export.save(torch.export.export(Norm(), (torch.ones(2, 8),)), {path!r})"
    )
    load = f"print(torch.export.load({path!r}).module()(torch.ones(2, 8)).sum().item())"
    names = (
        "import vishwamai.torch.softmax; t = vishwamai.torch;"
        "print(callable(t.softmax), callable(t.einsum), t.softmax.__module__);"
        "print(sorted(t._HOMES) == t.__all__, hasattr(t, 'none'), all(getattr(t, n).__name__ == n for n in t.__all__))"
    )
    before = f"import torch, vishwamai.torch; {modules}\n"
    assert in_fresh_process(before + save) == "[]\n"
    first = "import torch, vishwamai.torch; print(vishwamai.torch.gemm(torch.ones(2, 3), torch.ones(3, 1)).shape)"
    assert in_fresh_process(first) == "torch.Size([2, 1])\n"
    loaded, *rest = in_fresh_process(before + load + "\n" + names).splitlines()
    assert loaded == "[]" and float(rest[0]) == pytest.approx(16, rel=1e-3)
    assert rest[1:] == ["True True vishwamai.torch.softmax", "True False True"]


def test_the_names_of_torch_s_package_are_those_of_its_types():
    text = (ROOT / "src/vishwamai/torch/__init__.py").read_text()
    (guarded,) = (node for node in ast.parse(text).body if isinstance(node, ast.If))
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    names = {alias.name: node.module for node in imports for alias in node.names}
    (homes,) = re.findall(r"_MODULES = \{(.*?)\n\}", text, re.S)
    listed = {n: f"vishwamai.torch.{m}" for m, line in re.findall(r'"(\w+)": "([^"]+)"', homes) for n in line.split()}
    assert names == listed


def test_import_initialises_no_device():
    assert imported()[4:] == ["False", "True"]  # the second: the probe itself can say True


def test_version_agrees_with_metadata():
    import vishwamai

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert vishwamai.__version__ == importlib.metadata.version(installing.NAME) == declared
    project = tomllib.loads((ROOT / "capibara/pyproject.toml").read_text())["project"]
    assert project["version"] == declared and project["dependencies"] == [f"{installing.NAME}=={declared}"]


def test_hard_dependencies_are_jax_and_numpy():
    requirements = [r for r in importlib.metadata.requires(installing.NAME) or [] if "extra ==" not in r]
    assert sorted(re.split(r"[^\w-]", r)[0] for r in requirements) == ["jax", "numpy"]


def test_the_benchmark_is_installed_without_libtpu():
    """Which is as large as all else, and has a licence of its own; README names both."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def required(extra: str) -> set[str]:
        inner = [
            name for r in extras[extra] if (m := re.match(rf"{installing.NAME}\[(.*)\]", r)) for name in m[1].split(",")
        ]
        return {re.split(r"[^\w-]", r)[0] for r in extras[extra]}.union(*map(required, inner))

    assert "libtpu" not in required("bench") and {"rich", "jinja2", "tokenizers"} <= required("bench")
    assert "libtpu" in required("aot")
    assert "libtpu: Google Cloud Platform Terms of Service" in (ROOT / "README.md").read_text()


@pytest.mark.turns(3)
def test_command_names_the_missing_package():
    """Without rich the command ends with the line that installs it, not with a traceback."""
    code = "import sys; sys.modules['rich'] = None; from vishwamai.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "matrix", "--ops", "rope"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode not in (0, None)
    assert "pip install '.[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_wheels_name_the_python_that_does_not_run(tmp_path):
    """A shim of pyenv is on the path, and fails; another name may not be there at all."""
    shim = tmp_path / "python9.9"
    shim.write_text("#!/bin/sh\necho 'python9.9: command not found in this version' >&2\nexit 127\n")
    shim.chmod(0o755)
    for python, said in ((shim, "not found in this version"), (tmp_path / "none", "No such file")):
        command = [sys.executable, str(ROOT / "tools" / "wheels.py"), "--out", str(tmp_path), "--python", str(python)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert re.search(rf"wheels: '{python}' does not run: .*{said}[\s\S]*make wheels PYTHONS=", done.stderr)


def call_backend(folder: Path, call: str, status: int = 0, /, **environment: str) -> str:
    """Calls a hook of the build backend that `folder`'s pyproject.toml names, as pip does, in a new process that must
    end with `status`; what it prints.
    """
    system = tomllib.loads((folder / "pyproject.toml").read_text())["build-system"]
    path = system.get("backend-path", [])
    code = f"import sys; sys.path[:0] = {path!r}; import {system['build-backend']} as b; b.{call}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == status, printed
    return printed


REPOSITORY = "https://github.com/someone/some-name"


def metadata(folder: Path, out: Path, **environment: str) -> email.message.Message:
    """What a build of the distribution in `folder` would say of it."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    call_backend(folder, f"prepare_metadata_for_build_wheel({str(out)!r})", **environment)
    (about,) = out.glob("*.dist-info/METADATA")
    return email.message_from_string(about.read_text(encoding="utf-8"))


@pytest.mark.parametrize("folder", [ROOT, ROOT / "capibara"], ids=["vishwamai", "capibara"])
def test_the_metadata_lead_to_the_repository_where_its_address_is_known(folder: Path, tmp_path: Path):
    said = metadata(folder, tmp_path / "with", VISHWAMAI_REPOSITORY="git@github.com:someone/some-name.git")
    urls = dict(url.split(", ") for url in said.get_all("Project-URL", ()))
    page = str(said.get_payload())
    assert urls["Source"] == REPOSITORY and set(urls) == {"Source", "Documentation", "Changelog"}
    assert not project_links.RELATIVE.search(page)
    paths = re.findall(rf"{REPOSITORY}/(?:blob|raw)/HEAD/([^)#\s]+)", "\n".join([*urls.values(), page]))
    assert len(paths) >= (20 if folder == ROOT else 2) and all((ROOT / path).is_file() for path in paths)

    said = metadata(folder, tmp_path / "without", VISHWAMAI_REPOSITORY="")
    page = str(said.get_payload())
    assert "Project-URL" not in said and not project_links.RELATIVE.search(page) and "![" not in page
    if folder == ROOT:
        assert "Performance (`docs/performance.md`) has" in page and "\n`docs/support.md` lists" in page


def test_a_wrong_address_is_an_error(tmp_path: Path):
    printed = call_backend(
        ROOT, f"prepare_metadata_for_build_wheel({str(tmp_path)!r})", 1, VISHWAMAI_REPOSITORY="/srv/x"
    )
    assert "VISHWAMAI_REPOSITORY is '/srv/x'; set it to the repository's address" in printed


@pytest.mark.parametrize(
    ("remote", "found"),
    [
        ("https://user:secret@github.com/someone/some-name.git", REPOSITORY),
        ("ssh://git@github.com:22/someone/some-name", REPOSITORY),
        ("git@github.com:someone/some-name.git", REPOSITORY),
        ("/srv/some-name", None),
        ("file:///srv/some/name.git", None),
        ("../some-name", None),
        ("host:some/name", None),  # a name of ~/.ssh/config
        ("https://git.example.com/someone/some-name", None),  # a server that may be a company's own
        ("", None),
    ],
)
def test_the_address_is_that_of_the_clone(remote: str, found: str | None, tmp_path: Path, monkeypatch):
    monkeypatch.delenv("VISHWAMAI_REPOSITORY", raising=False)
    part = tmp_path / "part"
    part.mkdir()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    if remote:
        subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", remote], check=True)
    assert project_links.repository(tmp_path, ".") == project_links.repository(part, "part") == found
    assert project_links.repository(part, ".") is None  # sources that were unpacked in a clone of something else


def test_an_unpacked_archive_keeps_the_address(tmp_path: Path):
    """Capibara's, whose provider is a link to another directory of the repository."""
    call_backend(ROOT / "capibara", f"build_sdist({str(tmp_path)!r})", VISHWAMAI_REPOSITORY=REPOSITORY)
    (archive,) = tmp_path.glob("*.tar.gz")
    folder = unpacked(archive)
    assert (folder / "project_links.py").is_file() and not (folder / "project_links.py").is_symlink()
    environment = {name: value for name, value in os.environ.items() if name != "VISHWAMAI_REPOSITORY"}
    with unittest.mock.patch.dict(os.environ, environment, clear=True):
        said = metadata(folder, tmp_path / "again")
    assert f"Source, {REPOSITORY}" in said.get_all("Project-URL", ())


def without_compiler(folder: Path) -> dict[str, str]:
    """An environment that has CMake and Ninja but no C++ compiler."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("cmake", "ninja", "uname", "sh"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    return {"PATH": str(tools), "CC": "", "CXX": ""}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    call_backend(ROOT, f"build_sdist({str(folder)!r})")
    (archive,) = folder.glob(f"{FILES}-*.tar.gz")
    return unpacked(archive)


def unpacked(archive: Path) -> Path:
    """The folder that a source archive holds, next to it."""
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):  # from Python 3.11.4 on
            tar.extractall(archive.parent, filter="data")
        else:
            tar.extractall(archive.parent)
    return archive.parent / archive.name.removesuffix(".tar.gz")


def sources(*patterns: str) -> list[str]:
    return sorted(
        str(p.relative_to(ROOT)) for pattern in patterns for p in ROOT.glob(pattern) if "__pycache__" not in p.parts
    )


def test_sdist_holds_what_builds_and_proves_it(sdist: Path):
    wanted = sources(
        "src/**/*.py",
        "src/**/*.cc",
        "src/**/*.h",
        "src/**/*.md",
        "src/vishwamai/data/**/*.*",
        "tests/**/*.py",
        "tools/*.py",
    )
    wanted += [
        "pyproject.toml",
        "CMakeLists.txt",
        "Makefile",
        "LICENSE",
        "README.md",
        "conftest.py",
        "src/vishwamai/py.typed",
    ]
    assert not [name for name in wanted if not (sdist / name).is_file()]
    assert not (sdist / ".venv").exists() and not (sdist / "build").exists()


def test_python_versions_of_the_classifiers_are_those_of_the_readme():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    versions = [c.rsplit(" ", 1)[1] for c in declared if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", c)]
    tried = re.findall(r"^\| (3\.\d+)\.\d+ \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert versions == tried and versions


@pytest.mark.turns(3)
def test_a_failed_native_build(sdist: Path, tmp_path: Path):
    """The metadata comes without a compiler and without a build. The wheel without the native module has the same, and
    the build says what is missing; or it is an error, where the module is required.
    """
    shutil.rmtree(sdist / "build", ignore_errors=True)
    environment = without_compiler(tmp_path)
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    printed = call_backend(sdist, f"prepare_metadata_for_build_wheel({str(prepared)!r})", **environment)
    assert "WITHOUT" not in printed and not (sdist / "build").exists()
    (info,) = prepared.glob(f"{FILES}-*.dist-info")
    assert "Requires-Dist: jax" in (info / "METADATA").read_text()

    build = f"build_wheel({str(tmp_path)!r}, None, {str(info)!r})"
    printed = call_backend(sdist, build, 1, VISHWAMAI_NATIVE="require", **environment)
    assert "CMAKE_CXX_COMPILER" in printed
    assert not list(tmp_path.glob("*.whl"))

    printed = call_backend(sdist, build, VISHWAMAI_NATIVE="", **environment)
    assert "vishwamai: installed WITHOUT the native CPU kernels" in printed
    (wheel,) = tmp_path.glob(f"{FILES}-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in ("METADATA", "entry_points.txt"):
            assert archive.read(f"{info.name}/{name}") == (info / name).read_bytes()
        assert not [name for name in archive.namelist() if name.endswith((".so", ".cc", ".h"))]


def wheel_from(sdist: Path, target: Path, **environment: str) -> Path:
    shutil.rmtree(sdist / "build", ignore_errors=True)  # CMake would remember the compiler of an earlier build
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(target),
        str(sdist),
    ]
    subprocess.run(command, check=True, env=os.environ | environment, timeout=900)
    (wheel,) = target.glob(f"{FILES}-*.whl")
    return wheel


@pytest.mark.long
def test_wheel_from_sdist_holds_the_package(sdist: Path, tmp_path: Path):
    """With a compiler: every module, the data and py.typed, the native module if there are sources for one, and no
    C++.
    """
    names = zipfile.ZipFile(wheel_from(sdist, tmp_path, VISHWAMAI_NATIVE="require")).namelist()
    wanted = sources("src/*/**/*.py", "src/vishwamai/data/**/*.*", "src/**/*.html", "src/**/*.css")
    wanted = [name.removeprefix("src/") for name in wanted]
    tops = {name.partition("/")[0].partition("-")[0] for name in names}
    assert tops == {"vishwamai", FILES}  # no package of Capibara's
    assert not set(wanted + ["vishwamai/py.typed"]) - set(names)
    assert not [name for name in names if name.endswith((".cc", ".h"))]
    native = [name for name in names if name.startswith("vishwamai/core/_cpu.")]
    assert len(native) == bool(sources("src/vishwamai/core/cpp/*.cc", "src/vishwamai/ops/*/cpu*.cc"))


@pytest.mark.long
def test_install_without_a_compiler(sdist: Path, tmp_path: Path):
    """With no compiler on the PATH the wheel is pure, and it imports."""
    wheel = wheel_from(sdist, tmp_path, VISHWAMAI_NATIVE="", **without_compiler(tmp_path))
    assert wheel.name.endswith("-py3-none-any.whl")
    unpacked = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(unpacked)
    # -S would hide jax too; the editable install's finder is what must step aside.
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in type(f).__module__]\n"
        f"sys.path.insert(0, {str(unpacked)!r})\nimport vishwamai; print(vishwamai.__file__)"
    )
    assert Path(in_fresh_process(code).strip()).is_relative_to(unpacked)
