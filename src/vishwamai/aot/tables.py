"""The tables that the tuner writes and `core.tuning` reads: `<directory>/<chip>/<op>.json`, sorted, one entry for a spec.

An entry holds the config, the estimate that it was chosen by, the heuristic's, the name of the case, and the versions of the compiler: evidence that
`recheck` makes again.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from vishwamai.aot import libtpu
from vishwamai.core.cases import Case
from vishwamai.core.errors import KernelError
from vishwamai.core.hardware import CHIPS

__all__ = ["Entry", "entries", "known", "shipped", "table_path", "write"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of a table.

    Attributes:
        target: the chip; `op`, `implementation`, `key`: where it stands; `evidence`: what it holds.
    """

    target: str
    op: str
    implementation: str
    key: str
    evidence: Mapping[str, Any]

    @property
    def case(self) -> Case:
        """The case that it was searched for.

        Raises:
            KernelError: the operation has no such case any more.
        """
        cases = importlib.import_module(f"vishwamai.ops.{self.op}.cases").CASES
        found = next((case for case in cases if case.name == self.evidence["case"]), None)
        if found is None:
            raise KernelError(f"{self}: {self.op} has no such case any more; delete the entry.")
        return found

    def __str__(self) -> str:
        return f"{self.target} {self.op} {self.evidence['case']}"


def shipped() -> pathlib.Path:
    """Where the tables lie that come with the package."""
    return pathlib.Path(str(resources.files("vishwamai"))) / "data" / "tuning"


def table_path(directory: pathlib.Path, target: str, op: str) -> pathlib.Path:
    """Where the table of an op and a chip lies: `<directory>/<chip>/<op>.json`."""
    return directory / target / f"{op}.json"


def entries(directory: pathlib.Path) -> Iterator[Entry]:
    """Every entry of the tables of TPUs in a directory, by chip, op and key."""
    for path in sorted(directory.glob("*/*.json")):
        if path.parent.name not in CHIPS:
            continue
        for implementation, table in json.loads(path.read_text()).items():
            for key, evidence in table.items():
                yield Entry(path.parent.name, path.stem, implementation, key, evidence)


def write(
    directory: pathlib.Path, target: str, op: str, implementation: str, key: str, evidence: Mapping[str, Any]
) -> None:
    """Puts an entry into its table, in place of one for the same spec; a reader sees the old table or the new one."""
    path = table_path(directory, target, op)
    table = json.loads(path.read_text()) if path.exists() else {}
    table.setdefault(implementation, {})[key] = evidence
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".fresh")
    fresh.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    fresh.replace(path)


def known(directory: pathlib.Path, case: Case, target: str) -> bool:
    """Whether a table has this case already, found with the same compiler."""
    found = [e.evidence for e in entries(directory) if (e.target, e.op) == (target, case.op)]
    return any(entry.get("case") == case.name and entry.get("versions") == libtpu.versions() for entry in found)
