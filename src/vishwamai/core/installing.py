"""The extras of the package: what each brings, what is missing, and the line that installs it where the user is.

The distribution is called `vishwamai-jax`, as `vishwamai` on PyPI belongs to another project. It is not published there
yet, so lines install it from where it came from.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import re
import sys
import urllib.parse
from pathlib import Path

NAME = "vishwamai-jax"
"""Name of the distribution, as in pyproject.toml."""

COMMANDS = {
    "generate": "serve",
    "serve": "serve",
    "evaluate": "serve",
    "quantize": "serve",
    "train": "train",
    "plan": "aot",
    "check": "aot",
    "inspect": "aot",
    "tune": "aot",
    "bench": "bench",
    "calibrate": "models",
}
"""The extra that brings all that a command needs."""


def install_line(*extras: str) -> str:
    """The command that adds extras: of the clone in the working directory, else of where the package came from.

    >>> install_line("serve", "aot").endswith("[serve,aot]'")
    True
    """
    names = f"[{','.join(extras)}]" if extras else ""
    if _is_clone(Path.cwd()):
        return f"pip install '.{names}'"
    clone = Path(__file__).resolve().parents[3]
    if _is_clone(clone):
        return f"pip install '{clone}{names}'"
    origin = _origin()
    url = origin.get("url", "")
    local = Path(urllib.parse.unquote(urllib.parse.urlparse(url).path)) if url.startswith("file:") else None
    if local is not None and local.exists():  # also a clone: pip does not take a name with git+file:
        return f"pip install '{local}{names}'"
    if "vcs_info" in origin and local is None:
        return f"pip install '{NAME}{names} @ {origin['vcs_info']['vcs']}+{url}'"
    if url and not url.startswith("file:"):
        return f"pip install '{NAME}{names} @ {url}'"
    return f"in a clone of this repository, pip install '.{names}'"


def _is_clone(folder: Path) -> bool:
    project = folder / "pyproject.toml"
    try:
        return f'name = "{NAME}"\n' in project.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _origin() -> dict:
    """What pip has written down about where the package came from (PEP 610)."""
    try:
        text = importlib.metadata.distribution(NAME).read_text("direct_url.json")
        return json.loads(text) if text else {}
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return {}


@functools.cache
def extras() -> dict[str, tuple[str, ...]]:
    """The distributions that each extra brings on this machine, and the distributions of the extras that it names."""
    direct: dict[str, list[str]] = {}
    for requirement in _requirements():
        marked = re.search(r"extra == ['\"]([\w.-]+)['\"]", requirement)
        if marked and _on_this_machine(requirement):
            direct.setdefault(marked[1], []).append(requirement.partition(";")[0].strip())

    def expanded(extra: str) -> list[str]:
        names: list[str] = []
        for requirement in direct.get(extra, ()):
            nested = re.match(rf"{NAME}\[([\w,. -]+)\]", requirement)
            match = re.match(r"[\w.-]+", requirement)
            if nested:
                names += [name for inner in nested[1].split(",") for name in expanded(inner.strip())]
            elif match:
                names.append(match[0])
        return list(dict.fromkeys(names))

    return {extra: tuple(expanded(extra)) for extra in direct}


def _requirements() -> list[str]:
    """Of the source beside this file, which may be newer than what was installed; else of the installed metadata."""
    project = Path(__file__).resolve().parents[3] / "pyproject.toml"
    if _is_clone(project.parent):
        import tomllib

        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
        return [
            f"{requirement}{' and' if ';' in requirement else ';'} extra == '{extra}'"
            for extra, requirements in table.items()
            for requirement in requirements
        ]
    try:
        return importlib.metadata.requires(NAME) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _on_this_machine(requirement: str) -> bool:
    """Whether the platform of a requirement's marker is this one."""
    facts = {"sys_platform": sys.platform, "platform_machine": platform.machine(), "os_name": os.name}
    conditions = re.findall(r"(sys_platform|platform_machine|os_name)\s*==\s*['\"]([^'\"]+)['\"]", requirement)
    return all(facts[name] == value for name, value in conditions)


def lacking(extra: str) -> tuple[str, ...]:
    """The distributions of an extra that are not installed."""
    return tuple(name for name in extras().get(extra, ()) if not _installed(name))


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
