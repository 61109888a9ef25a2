"""From a YAML file and `key=value` overrides to a `TrainConfig`, and back to YAML with every key's doc.

PyYAML reads the file and pydantic checks it, so a wrong value is an error before anything is computed.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from vishwamai.core.errors import ConfigError
from vishwamai.parallel.optimization import Optimization
from vishwamai.training.config import OPTIMIZED, TrainConfig


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers: PyYAML follows version 1.1, in which 1e-5 is a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)$"), list("-+.0123456789")
)


def load_yaml(text: str) -> Any:
    """The value that a YAML text stands for.

    >>> load_yaml("[1e-5, 1, one]")
    [1e-05, 1, 'one']
    """
    return yaml.load(text, _Loader)


def read_config(path: str | Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration in a YAML file, changed by overrides.

    Args:
      path: the file; None starts from the defaults.
      overrides: `section.key=value`, with the value in YAML: `optimizer.learning_rate=3e-4`, `steps=10`,
        `data.sources.0.weight=2`.

    Raises:
      ConfigError: the file is missing or not YAML, a key is unknown (the text names the nearest known one), or a value
        has another type than its key.

    >>> read_config(None, ["optimizer.learning_rate=3e-4"]).optimizer.learning_rate
    0.0003
    """
    values: Any = {}
    if path is not None:
        try:
            values = load_yaml(Path(path).read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"config: {path} cannot be read: {error}. Pass the path of a YAML file.") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"config: {path} is not YAML: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"config: {path} holds {type(values).__name__}; expected sections such as `optimizer:`.")
    for override in overrides:
        _override(values, override)
    return from_dict(values)


def from_dict(values: Mapping[str, object]) -> TrainConfig:
    """The configuration that nested dictionaries describe.

    Raises:
      ConfigError: as `read_config`.

    >>> from_dict({"optimizer": {"learning_rat": 0.1}})
    Traceback (most recent call last):
    ...
    vishwamai.core.errors.ConfigError: config: unknown key optimizer.learning_rat; did you mean optimizer.learning_rate?
    """
    try:
        config = pydantic.TypeAdapter(TrainConfig).validate_python(values)
    except pydantic.ValidationError as error:
        raise ConfigError("config: " + "\n  ".join(_problem(detail) for detail in error.errors())) from None
    # `TrainConfig` cannot tell a default that was written from one that was not.
    config.optimization.settings("training", {name: values[name] for name in OPTIMIZED if name in values})
    return config


def to_dict(config: TrainConfig) -> dict[str, object]:
    """The configuration as nested dictionaries and lists, which YAML and JSON can hold."""
    return pydantic.TypeAdapter(TrainConfig).dump_python(config, mode="json")


def json_schema() -> dict[str, object]:
    """The JSON Schema (2020-12) of the YAML file, with the doc of each key, for editors that check and complete it."""
    schema = pydantic.TypeAdapter(TrainConfig).json_schema()
    for section, table in [(TrainConfig, schema), *((kind, schema["$defs"][kind.__name__]) for kind in _sections())]:
        for field in dataclasses.fields(section):
            table["properties"][field.name]["description"] = field.metadata["doc"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _sections(section: Any = TrainConfig) -> Iterator[Any]:
    """The dataclasses of the sections, and of the entries of lists."""
    hints = typing.get_type_hints(section)
    for name, hint in hints.items():
        inner = hint if dataclasses.is_dataclass(hint) else _item_type(section, name)
        if inner is not None and inner is not Optimization:
            yield inner
            yield from _sections(inner)


def describe(config: TrainConfig) -> str:
    """YAML of the configuration with the doc of each key as a comment; `read_config` reads it back.

    >>> print(describe(from_dict({})).splitlines()[-1])
    seed: 0  # seed of parameters and data order
    """
    return "\n".join(_lines(config, "")) + "\n"


def _lines(section: Any, indent: str) -> Iterator[str]:
    for field in dataclasses.fields(section):
        value, doc = getattr(section, field.name), field.metadata["doc"]
        item = _item_type(type(section), field.name)
        if dataclasses.is_dataclass(value):
            yield f"{indent}{field.name}:  # {doc}"
            yield from _lines(value, indent + "  ")
        elif item is not None:
            yield f"{indent}{field.name}:  # {doc}" if value else f"{indent}{field.name}: []  # {doc}"
            for entry in value:
                first, *rest = _lines(entry, indent + "    ")
                yield f"{indent}  - {first.strip()}"
                yield from rest
            if not value:
                yield f"{indent}  # each entry has these keys:"
                for entry_field in dataclasses.fields(item):
                    default = "" if entry_field.default is dataclasses.MISSING else f" {_flow(entry_field.default)}"
                    yield f"{indent}  #   {entry_field.name}:{default}  # {entry_field.metadata['doc']}"
        else:
            yield f"{indent}{field.name}: {_flow(value)}  # {doc}"


def _flow(value: Any) -> str:
    value = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()


def _item_type(section: type, name: str) -> Any:
    """The dataclass of a list's entries, or None if the key is no list of sections."""
    for part in typing.get_args(typing.get_type_hints(section)[name]):
        if dataclasses.is_dataclass(part):
            return part
    return None


def _override(values: Mapping[str, object], text: str) -> None:
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise ConfigError(f"config: the override {text!r} is not of the form section.key=value.")
    try:
        parsed = load_yaml(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"config: the value of the override {text!r} is not YAML: {error}") from error
    *parents, last = path.split(".")
    place: Any = values
    for name in parents:
        if isinstance(place, list):
            place = place[_entry(place, name, text)]
            continue
        if place.get(name) is None:
            place[name] = {}
        place = place[name]
        if not isinstance(place, dict | list):
            raise ConfigError(f"config: the override {text!r} goes into {name}, which holds {place!r} and no keys.")
    if isinstance(place, list):
        place[_entry(place, last, text)] = parsed
    else:
        place[last] = parsed


def _entry(entries: list[Any], name: str, text: str) -> int:
    if not name.isdigit() or int(name) >= len(entries):
        raise ConfigError(
            f"config: the override {text!r} names entry {name!r} of a list; pass 0 to {len(entries) - 1}."
            if entries
            else f"config: the override {text!r} names entry {name!r} of an empty list."
        )
    return int(name)


def _problem(detail: Any) -> str:
    path = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "unexpected_keyword_argument":
        near = nearest(path, detail["loc"][:-1])
        return f"unknown key {path}; " + (f"did you mean {near}?" if near else "see `vishwamai train --print-config`.")
    if detail["type"] == "value_error":  # raised by a section itself
        return str(detail["ctx"]["error"])
    if detail["type"] == "missing":
        return f"the key {path} is missing; see `vishwamai train --print-config`."
    return f"{path} is {detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}."


def nearest(path: str, section: Sequence[int | str] = ()) -> str | None:
    """The known key that is written most like `path`: first among those of its section, then among all."""
    paths = list(_paths(TrainConfig, ""))
    section_path = ".".join(str(part) for part in section if not isinstance(part, int))
    plain = ".".join(part for part in path.split(".") if not part.isdigit())
    siblings = [k for k in paths if k.rpartition(".")[0] == section_path]
    last = {k.rpartition(".")[2]: k for k in siblings}
    close = difflib.get_close_matches(plain.rpartition(".")[2], last, n=1, cutoff=0.6)
    if close:
        return last[close[0]]
    ends = {k.rpartition(".")[2]: k for k in paths}
    exact = ends.get(plain.rpartition(".")[2])
    return exact or next(iter(difflib.get_close_matches(plain, paths, n=1, cutoff=0.5)), None)


def _paths(section: Any, prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        yield prefix + field.name
        inner = hints[field.name] if dataclasses.is_dataclass(hints[field.name]) else _item_type(section, field.name)
        if inner is not None:
            yield from _paths(inner, f"{prefix}{field.name}.")
