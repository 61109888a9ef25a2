"""Names known vulnerabilities of the packages of an environment: `python tools/audit.py`, with its own Python.

pip-audit gets an environment of its own, `build/audit`. Where it cannot be installed, or no database of vulnerabilities
knows any of the packages (a mirror of PyPI without one), that is said and is no failure.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

PLACE = Path("build/audit")


def audited(requirements: str) -> list[dict[str, Any]] | None:
    """What pip-audit says of each package, `name==version` a line; None where it says nothing."""
    program = PLACE / "bin" / "pip-audit"
    if not program.exists():
        venv.create(PLACE, with_pip=True)
        install = [PLACE / "bin" / "python", "-m", "pip", "install", "-q", "pip-audit>=2.9"]
        if subprocess.run(install, check=False).returncode:
            return None
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(requirements)
        file.flush()
        command = [program, "-r", file.name, "--no-deps", "--disable-pip", "--format", "json", "--progress-spinner=off"]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=600)
    try:
        return json.loads(answer.stdout)["dependencies"]
    except (ValueError, KeyError):
        return None


def report(entries: list[dict[str, Any]] | None) -> tuple[int, str]:
    """The exit status and what is printed.

    >>> report(None)
    (0, 'audit: NOT CHECKED, no database of vulnerabilities can be reached')
    >>> report([{"name": "a", "version": "1", "vulns": []}, {"name": "b", "skip_reason": "unknown"}])
    (0, 'audit: 1 packages without known vulnerabilities, 1 not checked: b')
    >>> report([{"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}])
    (1, 'audit: a 1 has X-1, fixed in 2')
    """
    checked = [entry for entry in entries or () if "vulns" in entry]
    if not checked:
        return 0, "audit: NOT CHECKED, no database of vulnerabilities can be reached"
    faults = [
        f"audit: {entry['name']} {entry['version']} has {fault['id']}, fixed in {' or '.join(fault['fix_versions'])}"
        for entry in checked
        for fault in entry["vulns"]
    ]
    if faults:
        return 1, "\n".join(faults)
    rest = [entry["name"] for entry in entries or () if "vulns" not in entry]
    names = f", {len(rest)} not checked: {', '.join(rest)}" if rest else ""
    return 0, f"audit: {len(checked)} packages without known vulnerabilities{names}"


def main() -> int:
    freeze = [sys.executable, "-m", "pip", "freeze", "--exclude-editable"]
    lines = subprocess.run(freeze, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    status, text = report(audited("\n".join(line for line in lines if "==" in line)))
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
