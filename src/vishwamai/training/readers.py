"""The readers of a source's file formats: each gives the numbered records of one file, without interpreting them.

A record that cannot be read becomes an `Unreadable` with its reason; what makes the whole file unreadable is raised.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vishwamai.training import bounded

if TYPE_CHECKING:
    import pyarrow


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """In place of a record that cannot be read."""

    reason: str


def _content(path: Path, most: int) -> bytes:
    """What a file holds, which a file of gzip multiplies."""
    if path.suffix != ".gz":
        return path.read_bytes()
    with gzip.open(path, "rb") as lines:
        content = lines.read(most + 1)
    if len(content) > most:
        raise ValueError(f"its content takes more than {bounded.limit(most)}")
    return content


def _text(path: Path, columns: list[str], tools: str, most: int) -> Iterator[tuple[int, object]]:
    try:
        text = _content(path, most).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        yield 0, Unreadable(f"not UTF-8: byte {error.start}")
        return
    yield 0, text if text.strip() else Unreadable("empty")


def _json(path: Path, columns: list[str], tools: str, most: int) -> Iterator[tuple[int, object]]:
    """The records of an array, numbered from 1; a file that holds an object in each line is read as lines."""
    try:
        records = json.loads(_content(path, most))
    except ValueError as error:
        if "Extra data" not in str(error):
            raise ValueError(f"not JSON: {error}") from error
        yield from _jsonl(path, columns, tools, most)
        return
    if isinstance(records, dict) and not any(name in records for name in columns):
        yield 0, Unreadable("an object and not an array of records; pass a list, or JSONL")
        return
    yield from enumerate(records if isinstance(records, list) else [records], 1)


def _jsonl(path: Path, columns: list[str], tools: str, most: int) -> Iterator[tuple[int, object]]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(bounded.lines(lines, most), 1):
            if line is None:
                yield number, Unreadable(f"the line takes more than {bounded.limit(most)}")
                continue
            if not line.strip():
                yield number, Unreadable("empty line")
                continue
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield number, Unreadable(f"not JSON: {error}")


def _csv(path: Path, columns: list[str], tools: str, most: int) -> Iterator[tuple[int, object]]:
    """The rows behind the first, which names the columns; tabs divide them in a file of `.tsv`."""
    csv.field_size_limit(most)
    divider = "\t" if Path(path.stem if path.suffix == ".gz" else path).suffix.lower() == ".tsv" else ","
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as content:
        lines = csv.reader(_decoded(content, most), delimiter=divider)
        try:
            names = next(lines, [])
            for number, cells in enumerate(lines, 1):
                if len(cells) == len(names):
                    yield number, dict(zip(names, cells, strict=True))
                elif cells:
                    yield number, Unreadable(f"{len(cells)} cells, but the first row names {len(names)} columns")
        except csv.Error as error:
            raise ValueError(str(error)) from error


def _decoded(content: Any, most: int) -> Iterator[str]:
    """The lines of a file as texts, without the mark of UTF-8 at its beginning."""
    for number, line in enumerate(bounded.lines(content, most)):
        if line is None:
            raise ValueError(f"a line takes more than {bounded.limit(most)}")
        yield line.decode("utf-8" if number else "utf-8-sig")


def _parquet(path: Path, columns: list[str], tools: str, most: int) -> Iterator[tuple[int, object]]:
    table = bounded.open_parquet(path, [*columns, tools], most)
    names = present(columns, tools, table.schema_arrow.names)
    if isinstance(names, Unreadable):
        yield 0, names
        return
    yield from enumerate((row for batch in table.iter_batches(columns=names) for row in rows(batch, most)), 1)


def _arrow(path: Path, columns: list[str], tools: str, most: int) -> Iterator[tuple[int, object]]:
    count = 0
    for batch in bounded.arrow_batches(path, most):
        names = present(columns, tools, batch.schema.names)
        if isinstance(names, Unreadable):
            yield 0, names
            return
        yield from enumerate(rows(batch.select(names), most), count + 1)
        count += len(batch)


def present(columns: list[str], tools: str, names: list[str]) -> list[str] | Unreadable:
    """The columns to read of a table with these names."""
    if not any(name in names for name in columns):
        return Unreadable(f"no column {columns[0]!r}; it has {', '.join(names)}")
    return [name for name in dict.fromkeys([*columns, tools]) if name in names]


def rows(batch: object, most: int) -> Iterator[Any]:
    """The rows of a batch of pyarrow; a text that is not UTF-8 makes one row unreadable, not the batch."""
    for part in bounded.parts(batch, most):
        if part is None:
            yield Unreadable(f"the record takes more than {bounded.limit(most)}")
            continue
        try:
            yield from part.to_pylist()
        except UnicodeDecodeError:
            yield from (_row(part, index) for index in range(len(part)))


def _row(batch: pyarrow.RecordBatch, index: int) -> dict[str, object] | Unreadable:
    try:
        return {name: batch.column(name)[index].as_py() for name in batch.schema.names}
    except UnicodeDecodeError as error:
        return Unreadable(f"not UTF-8: byte {error.start} of a column")


READERS = {"text": _text, "json": _json, "jsonl": _jsonl, "csv": _csv, "parquet": _parquet, "datasets": _arrow}
"""The reader of each format: of a path, the columns, the column of tools and the most bytes of a record."""
