"""Configs found by measurement or by the compiler's schedule, looked up by (chip or GPU architecture, op,
implementation, spec).

The order is: what the caller asked for, the ambient block size, the user's own table, the shipped table, the heuristic.
The tables are JSON: `{"<implementation>": {"<spec key>": {"config": {...}, ...evidence}}}` in
`data/tuning/<chip>/<op>.json` of the package, and in the directory named by `VISHWAMAI_TUNING_DIR` (default:
`vishwamai/tuning` in the user's cache directory, see `core.caches`). A table of the user's that is damaged or does not
fit is left out, with a warning; one that ships is an error. `<chip>` is "v5e", or the architecture of a GPU, "sm_90":
tables of GPUs are measured by `vishwamai.torch.tune`, and none ships.
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

from vishwamai.core import caches
from vishwamai.core.config import cuda_architecture
from vishwamai.core.errors import DeviceError, KernelError
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles


def user_directory() -> Path | None:
    """Where the user's own tables live; None where the user has no home directory."""
    return caches.cache_directory("tuning")


def writable_directory(named: Path | None) -> Path:
    """Where a search puts its tables: the directory that was named, else the user's own. It is made, and tried.

    Raises:
      DeviceError: there is none, or it cannot be written.
    """
    place = named or user_directory()
    if place is None:
        raise DeviceError(f"tune: {caches.no_directory('tuning')}, or pass `directory`.")
    try:
        place.mkdir(parents=True, exist_ok=True)
        caches.try_directory(place)
    except OSError as error:
        raise DeviceError(
            f"tune: no table can be written: {error}; {caches.OTHER_DIRECTORY['tuning']}, or pass `directory`."
        ) from error
    return place


def parse(text: str) -> dict[str, dict[str, Any]]:
    """A table of a JSON text.

    Raises:
      ValueError: it is not JSON, or not of a table's form.
    """
    table = json.loads(text)
    if not (isinstance(table, dict) and all(isinstance(entries, dict) for entries in table.values())):
        raise ValueError("not an object of objects")
    return table


def _read(path: Any) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        return {}
    try:
        return parse(path.read_text())
    except ValueError as error:
        raise KernelError(f"tuning table {path} is not a table ({error}); install vishwamai again.") from error


def read_own(path: Any) -> dict[str, dict[str, Any]]:
    """A table that users keep: empty where there is none, where it cannot be read, and where it is damaged; it is then
    set aside, with a warning.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        caches.warn_once(f"tuning table {path} cannot be read ({error}); it is left out.")
    except (ValueError, RecursionError) as error:
        caches.set_aside(path, error)
    return {}


@functools.cache
def _tables(chip: str, op: str, user: Path | None) -> tuple[dict[str, Any], ...]:
    shipped = resources.files("vishwamai") / "data" / "tuning" / chip / f"{op}.json"
    return {} if user is None else read_own(user / chip / f"{op}.json"), _read(shipped)


_GENERATION = [0]


def generation() -> int:
    """Changes whenever `lookup` may answer otherwise than before: part of the key of what is remembered of its
    answers.
    """
    return _GENERATION[0]


def reload() -> None:
    """Forgets the tables that were read, so that files written since are seen."""
    _tables.cache_clear()
    _folders.cache_clear()
    _GENERATION[0] += 1


@functools.cache
def _folders(user: Path | None) -> frozenset[str]:
    shipped = resources.files("vishwamai") / "data" / "tuning"
    bundled = {path.name for path in shipped.iterdir()} if shipped.is_dir() else set()
    try:
        user_folders = () if user is None else os.listdir(user)
    except (FileNotFoundError, NotADirectoryError):
        user_folders = ()
    except OSError as error:
        caches.warn_once(f"tuning tables in {user} cannot be read ({error}); they are left out.")
        user_folders = ()
    return frozenset(bundled.union(user_folders))


def table_of(target: Target) -> str | None:
    """The folder with a target's tables: "v5e", or the architecture of a GPU, "sm_90"; None where there can be none."""
    if target.platform in ("cuda", "rocm"):
        return target.gpu.architecture if target.gpu else cuda_architecture()
    return target.tpu.name if target.tpu else None


_TRIALS: dict[tuple[str, str, str], Any] = {}


@contextlib.contextmanager
def trial(op: str, implementation: str, key: str, config: object) -> Iterator[None]:
    """Within the block, whatever the tables hold, specs with this key get `config`, in all threads: how a search times
    one.
    """
    _TRIALS[op, implementation, key] = config
    _GENERATION[0] += 1
    try:
        yield
    finally:
        del _TRIALS[op, implementation, key]
        _GENERATION[0] += 1


def key_of(spec: object, platform: str) -> str | None:
    """What a spec is looked up by on a platform: on a GPU its `gpu_tuning_key()` comes before its `tuning_key()`; None
    if it has neither.
    """
    names = ("gpu_tuning_key", "tuning_key") if platform in ("cuda", "rocm") else ("tuning_key",)
    method = next((attribute for name in names if (attribute := getattr(spec, name, None)) is not None), None)
    return None if method is None else method()


def as_config(op: str, chip: str, key: str, entry: Mapping[str, Any], config_type: type[Tiles]) -> Any:
    """The config that an entry of a table holds.

    Raises:
      KernelError: it does not fit `config_type`.
    """
    try:
        return config_type.from_json(entry["config"])
    except (TypeError, KeyError) as error:
        raise KernelError(
            f"tuning table of {op} on {chip}: entry {key!r} does not fit {config_type.__name__} ({error}); tune it "
            "again."
        ) from error


def lookup(op: str, implementation: str, target: Target, spec: object, config_type: type) -> Any | None:
    """The tuned config for a spec on a target, or None where no table has it.

    A spec takes part by a method `tuning_key() -> str`; one without it is never looked up. On GPUs, whose kernels serve
    many lengths with one config, `gpu_tuning_key` comes before it.

    Raises:
      KernelError: a table that ships is damaged, or an entry of it does not fit `config_type`. Of the user's own, that
        is a `CacheWarning`.
    """
    name = table_of(target)
    if name is None:
        return None
    user = user_directory()
    if not (_TRIALS or name in _folders(user)):
        return None
    key = key_of(spec, target.platform)
    if key is None:
        return None
    if target.platform in ("cuda", "rocm") and (op, implementation, key) in _TRIALS:
        return _TRIALS[op, implementation, key]
    local, shipped = (table.get(implementation, {}).get(key) for table in _tables(name, op, user))
    if local is not None:
        try:
            return as_config(op, name, key, local, config_type)
        except KernelError as error:
            caches.warn_once(f"{error} Until then it is left out.")
    return None if shipped is None else as_config(op, name, key, shipped, config_type)
