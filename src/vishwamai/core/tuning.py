"""Configs found by measurement or by the compiler's schedule, looked up by (chip, op, implementation, spec).

The order is: what the caller asked for, the ambient block size, the user's own table, the shipped table, the heuristic. The tables are JSON:
`{"<implementation>": {"<spec key>": {"config": {...}, ...evidence}}}` in `data/tuning/<chip>/<op>.json` of the package, and in the directory named by
`VISHWAMAI_TUNING_DIR` (default: `vishwamai/tuning` in the user's cache directory).
"""

from __future__ import annotations

import functools
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

from vishwamai.core.errors import KernelError
from vishwamai.core.hardware import Chip


def user_directory() -> Path:
    """Where the user's own tables live."""
    named = os.environ.get("VISHWAMAI_TUNING_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vishwamai" / "tuning"


def _read(path: Any) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise KernelError(
            f"tuning table {path} is not JSON ({error}); delete it or write it again with `vishwamai tune`."
        ) from error


@functools.cache
def _tables(chip: str, op: str, user: Path) -> tuple[dict[str, Any], ...]:
    shipped = resources.files("vishwamai") / "data" / "tuning" / chip / f"{op}.json"
    return _read(user / chip / f"{op}.json"), _read(shipped)


def reload() -> None:
    """Forgets the tables that were read, so that files written since are seen."""
    _tables.cache_clear()


def lookup(op: str, implementation: str, chip: Chip | None, spec: Any, config_type: type) -> Any | None:
    """The tuned config for a spec, or None where no table has it.

    A spec takes part by a method `tuning_key() -> str`; one without it is never looked up.

    Raises:
      KernelError: a table is damaged, or an entry does not fit `config_type`.
    """
    key_of = getattr(spec, "tuning_key", None)
    if chip is None or key_of is None:
        return None
    key = key_of()
    for table in _tables(chip.name, op, user_directory()):
        entry = table.get(implementation, {}).get(key)
        if entry is not None:
            try:
                fields = {k: tuple(v) if isinstance(v, list) else v for k, v in entry["config"].items()}
                return config_type(**fields)
            except (TypeError, KeyError) as error:
                raise KernelError(
                    f"tuning table of {op} on {chip.name}: entry {key!r} does not fit {config_type.__name__} ({error}); tune it again."
                ) from error
    return None
