"""Prints the newest Python of this machine that the main line of jax supports: 3.14, 3.13 or 3.12, of PATH or pyenv.

Prints nothing and ends with status 1 where there is none. With `--require`: what is installed there to try the library
with the newest releases of jax and its libraries, one requirement a line: the extras without bounds, and the tests'.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from build_requires import group, project

VERSIONS = ("3.14", "3.13", "3.12")
EXTRAS = ("aot", "bench", "models", "report", "cli", "serve", "train")


def interpreters(version: str) -> list[Path]:
    """Candidates for a version, those of PATH first: a shim of pyenv is one, though it may decline to run."""
    on_path = shutil.which(f"python{version}")
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    installed = sorted(root.glob(f"versions/{version}.*/bin/python3"), reverse=True)
    return [*([Path(on_path)] if on_path else []), *installed]


def newest() -> Path | None:
    """The first of them that runs and can make an environment."""
    for version in VERSIONS:
        for path in interpreters(version):
            code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
            ran = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
            if ran.stdout.strip() == version:
                return path
    return None


def requirements() -> list[str]:
    """Of the extras and of the group `newest`, without the library's own names and without upper bounds of jax."""
    table = project()
    extras = table["project"]["optional-dependencies"]
    names = ["jax", *(name for extra in EXTRAS for name in extras[extra]), *group(table["dependency-groups"], "newest")]
    return [name for name in dict.fromkeys(names) if not re.match(r"vishwamai\b", name)]


def main(arguments: list[str]) -> int:
    if arguments == ["--require"]:
        print(*requirements(), sep="\n")
        return 0
    path = newest()
    if path is None:
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
