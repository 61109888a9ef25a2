"""The tables that the tuners write and `core.tuning` reads: `<directory>/<chip>/<op>.json`, sorted, one entry for a
spec.

An entry of a TPU holds the config, the estimate that it was chosen by, the heuristic's, the name of the case, and the
versions of the compiler: evidence that `recheck` makes again.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from vishwamai.aot.compile import libtpu
from vishwamai.core import caches, tuning
from vishwamai.core.cases import Case
from vishwamai.core.errors import KernelError
from vishwamai.core.hardware import TPUS
from vishwamai.ops.catalogue import operations

__all__ = ["TableEntry", "entries", "is_stored", "read", "shipped", "table_path", "write"]


@dataclasses.dataclass(frozen=True)
class TableEntry:
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
        operation = operations().get(self.op)
        cases = operation.cases if operation else ()
        match = next((case for case in cases if case.name == self.evidence["case"]), None)
        if match is None:
            raise KernelError(f"{self}: {self.op} has no such case any more; delete the entry.")
        return match

    def __str__(self) -> str:
        return f"{self.target} {self.op} {self.evidence['case']}"


def shipped() -> pathlib.Path:
    """Where the tables lie that come with the package."""
    return pathlib.Path(str(resources.files("vishwamai"))) / "data" / "tuning"


def table_path(directory: pathlib.Path, target: str, op: str) -> pathlib.Path:
    """Where the table of an op and a chip lies: `<directory>/<chip>/<op>.json`."""
    return directory / target / f"{op}.json"


def read(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """A table, `{implementation: {key: evidence}}`; empty where there is none yet, and where it is damaged
    (`core.tuning.read_own`).
    """
    return tuning.read_own(path)


def entries(directory: pathlib.Path) -> Iterator[TableEntry]:
    """Every entry of the tables of TPUs in a directory, by chip, op and key."""
    for path in sorted(directory.glob("*/*.json")):
        if path.parent.name not in TPUS:
            continue
        for implementation, table in read(path).items():
            for key, evidence in table.items():
                yield TableEntry(path.parent.name, path.stem, implementation, key, evidence)


def write(
    directory: pathlib.Path, target: str, op: str, implementation: str, key: str, evidence: Mapping[str, object]
) -> None:
    """Puts an entry into its table, in place of one for the same spec. Other processes may do so at the same time; a
    reader sees the table before or after.

    Raises:
        OSError: the table cannot be written; it is as it was.
    """
    path = table_path(directory, target, op)
    with caches.locked(path):
        table = read(path)
        table.setdefault(implementation, {})[key] = evidence
        caches.write(path, json.dumps(table, indent=1, sort_keys=True) + "\n")


def is_stored(directory: pathlib.Path, case: Case, target: str) -> bool:
    """Whether a table has this case already, found with the same compiler."""
    evidence = [e.evidence for e in entries(directory) if (e.target, e.op) == (target, case.op)]
    return any(entry.get("case") == case.name and entry.get("versions") == libtpu.versions() for entry in evidence)
