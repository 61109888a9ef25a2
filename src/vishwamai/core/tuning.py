"""Configs found by measurement or by the compiler's schedule, looked up by (chip or GPU architecture, op, implementation, spec).

The order is: what the caller asked for, the ambient block size, the user's own table, the shipped table, the heuristic. The tables are JSON:
`{"<implementation>": {"<spec key>": {"config": {...}, ...evidence}}}` in `data/tuning/<chip>/<op>.json` of the package, and in the directory named by
`VISHWAMAI_TUNING_DIR` (default: `vishwamai/tuning` in the user's cache directory). `<chip>` is "v5e", or the architecture of a GPU, "sm_90": tables of
GPUs are measured by `vishwamai.torch.tune`, and none ships.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping
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


_GENERATION = [0]


def generation() -> int:
    """Changes whenever `lookup` may answer otherwise than before: part of the key of what is remembered of its answers."""
    return _GENERATION[0]


def reload() -> None:
    """Forgets the tables that were read, so that files written since are seen."""
    _tables.cache_clear()
    _has_gpus.cache_clear()
    _GENERATION[0] += 1


@functools.cache
def _has_gpus(user: Path) -> bool:
    shipped = resources.files("vishwamai") / "data" / "tuning"
    folders = [path for place in (user, shipped) if place.is_dir() for path in place.iterdir()]
    return any(path.name.startswith(("sm_", "gfx")) for path in folders)


def has_gpus() -> bool:
    """Whether there is a table of any GPU: where there is none, nobody need ask which GPU this is."""
    return bool(_TRIALS) or _has_gpus(user_directory())


_TRIALS: dict[tuple[str, str, str], Any] = {}


@contextlib.contextmanager
def trial(op: str, implementation: str, key: str, config: Any) -> Iterator[None]:
    """Within the block, whatever the tables hold, specs with this key get `config`, in all threads: how a search times one."""
    _TRIALS[op, implementation, key] = config
    _GENERATION[0] += 1
    try:
        yield
    finally:
        del _TRIALS[op, implementation, key]
        _GENERATION[0] += 1


def key_of(spec: Any, gpu: bool) -> str | None:
    """What a spec is looked up by: its `gpu_tuning_key()` or `tuning_key()`; None if it has neither."""
    names = ("gpu_tuning_key", "tuning_key") if gpu else ("tuning_key",)
    method = next((found for name in names if (found := getattr(spec, name, None)) is not None), None)
    return None if method is None else method()


def as_config(op: str, chip: str, key: str, entry: Mapping[str, Any], config_type: type) -> Any:
    """The config that an entry of a table holds.

    Raises:
      KernelError: it does not fit `config_type`.
    """
    try:
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in entry["config"].items()}
        return config_type(**fields)
    except (TypeError, KeyError) as error:
        raise KernelError(
            f"tuning table of {op} on {chip}: entry {key!r} does not fit {config_type.__name__} ({error}); tune it again."
        ) from error


def lookup(op: str, implementation: str, chip: Chip | str | None, spec: Any, config_type: type) -> Any | None:
    """The tuned config for a spec, or None where no table has it.

    A spec takes part by a method `tuning_key() -> str`; one without it is never looked up. On GPUs, whose kernels serve many lengths with one config,
    `gpu_tuning_key` comes before it.

    Args:
      chip: a TPU, the name of a GPU's architecture ("sm_90", "gfx942"), or None.

    Raises:
      KernelError: a table is damaged, or an entry does not fit `config_type`.
    """
    key = None if chip is None else key_of(spec, isinstance(chip, str))
    if key is None:
        return None
    if isinstance(chip, str) and (op, implementation, key) in _TRIALS:
        return _TRIALS[op, implementation, key]
    assert chip is not None
    name = chip if isinstance(chip, str) else chip.name
    for table in _tables(name, op, user_directory()):
        entry = table.get(implementation, {}).get(key)
        if entry is not None:
            return as_config(op, name, key, entry, config_type)
    return None
