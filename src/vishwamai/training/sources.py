"""Documents from files: text, JSONL, Parquet, and directories that Hugging Face's `datasets` saved.

A record that cannot be read is counted and named in `Bad`; none is dropped silently.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import glob
import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vishwamai.core.errors import ConfigError
from vishwamai.training.config import DpoSection, SourceSection

Document = str | list[dict[str, Any]]
"""Plain text, or the messages of a chat (`role` and `content`)."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two answers of which people preferred one: each the text after the prompt, or a chat that ends with it."""

    prompt: str
    chosen: Document
    rejected: Document


Read = Callable[[Any, Path, int], "Document | Pair | Bad"]
"""A record of a file, its path, and its line or row, to what it holds."""

_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "datasets"}


@dataclasses.dataclass(frozen=True)
class Bad:
    """A record that could not be read: its file, its line or row (0 for the whole file), and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}" if self.line else f"{self.file}: {self.reason}"


def files(source: SourceSection) -> list[Path]:
    """The files of a source, sorted, without those that `exclude` names.

    Raises:
      ConfigError: a path matches no file.
    """
    found: set[Path] = set()
    for pattern in source.paths:
        path = pattern.replace("{stdlib}", sysconfig.get_path("stdlib"))
        matches = [Path(name) for name in glob.glob(path, recursive=True)]
        inside = [f for m in matches for f in ([m] if m.is_file() else m.rglob("*")) if f.is_file() and _is_data(f, m)]
        if not inside:
            raise ConfigError(f"config: data.sources.paths has {pattern!r}, which matches no file; check the path.")
        found.update(inside)
    kept = [f for f in found if not any(fnmatch.fnmatch(str(f), pattern) for pattern in source.exclude)]
    if not kept:
        raise ConfigError(f"config: data.sources.exclude {list(source.exclude)} leaves none of {len(found)} files.")
    return sorted(kept)


def documents(source: SourceSection) -> Iterator[Document | Bad]:
    """The documents of a source in the order of its files, with a `Bad` for each record that cannot be read."""

    def read(record: Any, path: Path, number: int) -> Document | Bad:
        return _document(record, source.column, path, number)

    yield from _records(source, [source.column], read)


def pairs(source: SourceSection, columns: DpoSection) -> Iterator[Pair | Bad]:
    """The pairs of answers of a source, which is JSONL, Parquet or a directory of `datasets`."""

    def read(record: Any, path: Path, number: int) -> Pair | Bad:
        return _pair(record, columns, path, number)

    yield from _records(source, [columns.prompt, columns.chosen, columns.rejected], read)


def _records(source: SourceSection, columns: list[str], take: Any) -> Iterator[Any]:
    for path in files(source):
        kind = _SUFFIXES.get(path.suffix, "text") if source.format == "auto" else source.format
        if kind == "text" and len(columns) > 1:
            yield Bad(str(path), 0, f"plain text has no columns {', '.join(columns)}; pass JSONL, Parquet or datasets")
            continue
        read = {"text": _text, "jsonl": _jsonl, "parquet": _parquet, "datasets": _arrow}[kind]
        try:
            yield from read(path, columns, take)
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
            yield Bad(str(path), 0, str(error).splitlines()[0])


def _is_data(path: Path, root: Path) -> bool:
    """Hidden files, and the JSON files that `datasets` writes next to its Arrow files, hold no documents."""
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return not hidden and not (path.name in ("state.json", "dataset_info.json", "dataset_dict.json") and path != root)


def _text(path: Path, columns: list[str], take: Read) -> Iterator[Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        yield Bad(str(path), 0, f"not UTF-8: byte {error.start}")
        return
    yield text if text.strip() else Bad(str(path), 0, "empty")


def _jsonl(path: Path, columns: list[str], take: Read) -> Iterator[Any]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                yield Bad(str(path), number, "empty line")
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                yield Bad(str(path), number, f"not JSON: {error}")
                continue
            yield take(record, path, number)


def _parquet(path: Path, columns: list[str], take: Read) -> Iterator[Any]:
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(path)
    names = [name for name in columns if name in table.schema_arrow.names]
    if not names:
        yield Bad(str(path), 0, f"no column {columns[0]!r}; it has {', '.join(table.schema_arrow.names)}")
        return
    row = 0
    for batch in table.iter_batches(columns=names):
        for record in batch.to_pylist():
            row += 1
            yield take(record, path, row)


def _arrow(path: Path, columns: list[str], take: Read) -> Iterator[Any]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as data:
        row = 0
        for batch in pyarrow.ipc.open_stream(data):
            names = [name for name in columns if name in batch.schema.names]
            if not names:
                yield Bad(str(path), 0, f"no column {columns[0]!r}; it has {', '.join(batch.schema.names)}")
                return
            for record in batch.select(names).to_pylist():
                row += 1
                yield take(record, path, row)


def _document(record: Any, column: str, path: Path, number: int) -> Document | Bad:
    if not isinstance(record, dict) or column not in record:
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        return Bad(str(path), number, f"no column {column!r}; it has {keys}")
    value = record[column]
    if _is_document(value):
        return value
    return Bad(str(path), number, f"column {column!r} holds neither text nor a list of messages")


def _is_document(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    )


def _pair(record: Any, columns: DpoSection, path: Path, number: int) -> Pair | Bad:
    for column in (columns.chosen, columns.rejected):
        found = _document(record, column, path, number)
        if isinstance(found, Bad):
            return found
    chosen, rejected = record[columns.chosen], record[columns.rejected]
    if isinstance(chosen, str) != isinstance(rejected, str):
        return Bad(str(path), number, f"columns {columns.chosen!r} and {columns.rejected!r} hold text and messages")
    prompt = record.get(columns.prompt) or ""
    if isinstance(chosen, str) and not (isinstance(prompt, str) and prompt):
        return Bad(str(path), number, f"no text in column {columns.prompt!r}, which comes before both answers")
    if not isinstance(chosen, str) and not all(a[-1]["role"] == "assistant" for a in (chosen, rejected)):
        return Bad(str(path), number, "the last message of an answer is not the assistant's")
    return Pair(prompt if isinstance(prompt, str) else "", chosen, rejected)
