"""The schedules of the benchmark's cases on TPUs you do not have, as data: the table of a report reads them and
compiles nothing.

`tools/bench_schedules.py` makes them, one file for each chip in `data/schedules`, with the version of libtpu whose
compiler made the schedules. A test compiles some of them again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from vishwamai.bench.targets import TargetRow
from vishwamai.core.cases import Case
from vishwamai.ops.catalogue import Operation

_KEYS = ("op", "case", "target")


def directory() -> Path:
    """Where the files are."""
    return Path(str(resources.files("vishwamai") / "data" / "schedules"))


@functools.cache
def _table(target: str) -> Mapping[str, Any]:
    path = directory() / f"{target}.json"
    return json.loads(path.read_text()) if path.exists() else {"libtpu": "", "rows": {}}


def libtpu(target: str) -> str:
    """Version of the libtpu that made the schedules of a chip; empty where there are none."""
    return _table(target)["libtpu"]


def stored(op: str, case: str, target: str) -> TargetRow | None:
    """The row of a case of an operation on a chip; None where no schedule of it is stored.

    >>> stored("gemm", "no such case", "v5e") is None
    True
    """
    row = _table(target)["rows"].get(f"{op}: {case}")
    return None if row is None else TargetRow(op, case, target, **row)


def rows(cases: Sequence[tuple[Operation, Case]], targets: Sequence[str]) -> list[TargetRow]:
    """The stored rows of the cases, in their order; a case without one on a chip is left out there."""
    candidates = (stored(operation.name, case.name, target) for operation, case in cases for target in targets)
    return [row for row in candidates if row is not None]


def write(target: str, version: str, new_rows: Sequence[TargetRow], into: Path) -> None:
    """Writes the file of a chip; rows of an earlier file of the same libtpu stay where they are not made anew."""
    path = into / f"{target}.json"
    before = json.loads(path.read_text()) if path.exists() else {"libtpu": version, "rows": {}}
    merged = before["rows"] if before["libtpu"] == version else {}
    for row in new_rows:
        merged[f"{row.op}: {row.case}"] = {
            name: value for name, value in dataclasses.asdict(row).items() if name not in (*_KEYS, "compile_seconds")
        }
    into.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"libtpu": version, "rows": dict(sorted(merged.items()))}, indent=1) + "\n")
