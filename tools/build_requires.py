"""Prints what must be installed before `pip install --no-build-isolation`, one requirement a line.

Without an argument: `build-system.requires` of pyproject.toml. With `--backend`: what the build backend asks for
besides on this machine, which is CMake and Ninja where the system has none that serves. With `--group NAME`: a group of
`dependency-groups` with those that it includes (PEP 735), which pip reads itself from 25.1 on.
"""

import sys
import tomllib
from pathlib import Path


def group(groups: dict[str, list], name: str) -> list[str]:
    """The requirements of a group, and of those that it includes.

    >>> group({"dev": ["pytest", {"include-group": "docs"}], "docs": ["mkdocs"]}, "dev")
    ['pytest', 'mkdocs']
    """
    return [
        requirement
        for entry in groups[name]
        for requirement in ([entry] if isinstance(entry, str) else group(groups, entry["include-group"]))
    ]


def project() -> dict:
    """pyproject.toml."""
    return tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())


def main(arguments: list[str]) -> None:
    if arguments == ["--backend"]:
        from build_backend import get_requires_for_build_wheel

        requirements = get_requires_for_build_wheel()
    elif arguments[:1] == ["--group"]:
        requirements = group(project()["dependency-groups"], arguments[1])
    else:
        requirements = project()["build-system"]["requires"]
    print(*requirements, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
