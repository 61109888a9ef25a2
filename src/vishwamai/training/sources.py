"""Documents from files: text, JSON, JSONL, CSV, Parquet, all but the last also in gzip, and directories that Hugging
Face's `datasets` saved.

A record that cannot be read is counted and named in `Bad`; none is dropped silently. What a file says of its sizes is
checked before memory is taken for them (`bounded`).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import glob
import itertools
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vishwamai.core.errors import ConfigError
from vishwamai.training import hub_data, rows_of_chats
from vishwamai.training.config import DpoSection, SourceSection
from vishwamai.training.readers import READERS, Unreadable, present, rows
from vishwamai.training.rows_of_chats import Chat, Completion, Document, messages_of

__all__ = ["Bad", "Chat", "Completion", "Document", "Pair", "Place", "check_source", "documents", "files", "pairs"]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two answers of which people preferred one: each the text after the prompt, or a chat that ends with it."""

    prompt: str
    chosen: str | Chat
    rejected: str | Chat


Place = tuple[str, int]
"""A file, and a line or row of it; 0 for the whole file."""

Read = Callable[[object, Place], "Document | Pair | Bad"]
"""A record of a file and its place, to its content."""

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "datasets",
}
"""Formats by suffix, under `format: auto`. Any other suffix is text, except `_UNREAD`."""

_UNREAD = frozenset(
    (
        ".xls .xlsx .ods .zip .tar .tgz .zst .bz2 .xz .7z .avro .orc .feather .h5 .hdf5 .npy .npz .pkl .pt "
        ".bin .safetensors .gguf .db .sqlite .sqlite3 .msgpack .tfrecord .png .jpg .jpeg .gif .webp .pdf .docx .mp3 "
        ".wav .mp4"
    ).split()
)
"""Suffixes of data that is not text in lines or paragraphs."""


@dataclasses.dataclass(frozen=True)
class Bad:
    """A record that could not be read: its file, its line or row (0 for the whole file), and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}" if self.line else f"{self.file}: {self.reason}"


def check_source(source: SourceSection) -> None:
    """Whether a source can be opened.

    Raises:
      ConfigError: a path matches no file, the Hub has no such dataset, or the source names both or neither.
      DeviceError: the Hub cannot be reached.
    """
    if bool(source.paths) == (source.dataset is not None):
        raise ConfigError("config: a source of data.sources has either paths or dataset; set one of them.")
    if source.dataset is None:
        files(source)
    else:
        hub_data.open_dataset(source)


def source_name(source: SourceSection) -> str:
    """The paths or the dataset of a source, as errors name it."""
    return str(list(source.paths)) if source.dataset is None else source.dataset


def files(source: SourceSection) -> list[Path]:
    """The files of a source, sorted, without those that `exclude` names.

    Raises:
      ConfigError: a path matches no file.
    """
    roots: dict[Path, Path | None] = {}  # a file, and the directory that the source names; None: Python's own
    named: set[Path] = set()  # by itself, not by its directory
    for pattern in source.paths:
        path = pattern.replace("{stdlib}", sysconfig.get_path("stdlib"))
        matches = [Path(name) for name in glob.glob(path, recursive=True)]
        inside = [f for m in matches for f in ([m] if m.is_file() else m.rglob("*")) if f.is_file() and _is_data(f, m)]
        if not inside:
            raise ConfigError(f"config: data.sources.paths has {pattern!r}, which matches no file; check the path.")
        roots |= dict.fromkeys(inside, _root(path) if path == pattern else None)
        named.update(m for m in matches if m.is_file())
    chosen = [f for f in roots if not any(fnmatch.fnmatch(str(f), pattern) for pattern in source.exclude)]
    if not chosen:
        raise ConfigError(f"config: data.sources.exclude {list(source.exclude)} leaves none of {len(roots)} files.")
    for file in chosen if not source.follow_links else ():
        root = roots[file]
        if root not in (None, file) and not file.resolve().is_relative_to(root.resolve()):
            raise ConfigError(
                f"config: {file} is a link to {file.resolve()}, outside of {root}, which data.sources.paths names; "
                "exclude it, name the file itself, or set data.sources.follow_links=true."
            )
    unread = [f for f in named.intersection(chosen) if source.format == "auto" and _format(f) is None]
    if unread:
        raise ConfigError(f"config: data.sources.paths has {min(unread)}, {_not_read(min(unread))}.")
    return sorted(chosen)


def _root(pattern: str) -> Path:
    """The directory that a pattern names before its first wildcard; the file that a pattern without one names."""
    path = Path(pattern)
    if os.path.exists(pattern):
        return path
    return next(parent for parent in path.parents if not glob.has_magic(str(parent)))


def _format(path: Path) -> str | None:
    """The format of a file by its suffix, without that of gzip; None where it is not read."""
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    return None if suffix.lower() in _UNREAD else _SUFFIXES.get(suffix.lower(), "text")


def _not_read(path: Path) -> str:
    return (
        f"which format=auto does not read by its suffix: it reads text, {', '.join(_SUFFIXES)}, and .gz of all but the "
        "last two; convert the file, exclude it, or set format"
    )


def documents(source: SourceSection) -> Iterator[Document | Bad]:
    """The documents of a source in the order of its files, with a `Bad` for each record that cannot be read."""
    yield from (record for _, record in placed_documents(source))


def placed_documents(source: SourceSection) -> Iterator[tuple[Place, Document | Bad]]:
    """The same with their places."""
    columns = [source.column]
    if source.column == rows_of_chats.TEXT:
        columns += rows_of_chats.COLUMNS
    yield from _records(source, columns, functools.partial(_document, column=source.column, tools=source.tools))


def pairs(source: SourceSection, columns: DpoSection) -> Iterator[Pair | Bad]:
    """The pairs of answers of a source, with a `Bad` for each record that cannot be read."""
    yield from (record for _, record in placed_pairs(source, columns))


def placed_pairs(source: SourceSection, columns: DpoSection) -> Iterator[tuple[Place, Pair | Bad]]:
    """The same with their places; the source is JSON, JSONL, Parquet or of `datasets`."""
    names = [columns.prompt, columns.chosen, columns.rejected]
    yield from _records(source, names, functools.partial(_pair, columns=columns, tools=source.tools))


def _records(source: SourceSection, columns: list[str], take: Read) -> Iterator[tuple[Place, Any]]:
    records = _file_records(source, columns, take) if source.dataset is None else _hub_records(source, columns, take)
    return itertools.islice(records, source.max_records)


def _hub_records(source: SourceSection, columns: list[str], take: Read) -> Iterator[tuple[Place, Any]]:
    """The rows of a dataset of the Hub, numbered from 1, within the bounds of local files."""
    count = 0
    for batch in hub_data.batches(source):
        names = present(columns, source.tools, batch.schema.names)
        if isinstance(names, Unreadable):
            yield (str(source.dataset), 0), Bad(str(source.dataset), 0, names.reason)
            return
        for number, record in enumerate(rows(batch.select(names), source.max_record_mib << 20), count + 1):
            place = str(source.dataset), number
            yield place, Bad(*place, record.reason) if isinstance(record, Unreadable) else take(record, place)
        count += len(batch)


def _file_records(source: SourceSection, columns: list[str], take: Read) -> Iterator[tuple[Place, Any]]:
    for path in files(source):
        kind = _format(path) if source.format == "auto" else source.format
        if kind is None:
            yield (str(path), 0), Bad(str(path), 0, _not_read(path))
            continue
        if kind == "text" and columns[0] != source.column:
            reason = f"plain text has no columns {', '.join(columns)}; pass JSON, JSONL, Parquet or datasets"
            yield (str(path), 0), Bad(str(path), 0, reason)
            continue
        number = 0
        try:
            for number, record in READERS[kind](path, columns, source.tools, source.max_record_mib << 20):
                place = str(path), number
                content = Bad(*place, record.reason) if isinstance(record, Unreadable) else record
                yield place, content if isinstance(content, Bad) or kind == "text" else take(content, place)
        # pyarrow's errors are ValueErrors, a MemoryError and a KeyError among them.
        except (OSError, ValueError, EOFError, LookupError, MemoryError, RecursionError, zlib.error) as error:
            yield (str(path), 0), Bad(str(path), 0, f"{str(error).splitlines()[0]}, after record {number}")


def _is_data(path: Path, root: Path) -> bool:
    """Hidden files, and the JSON files that `datasets` writes next to its Arrow files, hold no documents."""
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return not hidden and not (path.name in ("state.json", "dataset_info.json", "dataset_dict.json") and path != root)


def _document(record: object, place: Place, column: str, tools: str) -> Document | Bad:
    if isinstance(record, dict) and column == rows_of_chats.TEXT and column not in record:
        offered = _offered(record, place, tools)
        document = offered if isinstance(offered, Bad) else rows_of_chats.document(record, offered)
        if document is not None:
            return document
    return _content(record, place, column, tools)


def _content(record: object, place: Place, column: str, tools: str) -> str | Chat | Bad:
    """The text or the chat of a column."""
    if not isinstance(record, dict) or column not in record:
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        return Bad(*place, f"no column {column!r}; it has {keys}")
    value = record[column]
    if isinstance(value, str) and value.strip():
        return value
    messages = messages_of(value)
    if messages is None:
        return Bad(*place, f"column {column!r} holds neither text nor a list of messages")
    offered = _offered(record, place, tools)
    return offered if isinstance(offered, Bad) else Chat(messages, offered)


def _offered(record: Mapping[str, object], place: Place, tools: str) -> list[dict[str, Any]] | None | Bad:
    """The tools of a row, if it has some."""
    try:
        return _tools(record.get(tools))
    except ValueError as error:
        return Bad(*place, f"column {tools!r} holds {error}; pass a list of JSON Schemas, or its JSON text")


def _tools(value: object) -> list[dict[str, object]] | None:
    """The tools of a row: a list, or its JSON text, which Parquet holds where schemas differ between rows.

    Raises:
      ValueError: it is neither; the text says what it is.
    """
    try:
        tools = json.loads(value) if isinstance(value, str) and value.strip() else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"text that is not JSON ({error})") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{type(tools).__name__} and not a list of objects")
    return tools


def _pair(record: Any, place: Place, columns: DpoSection, tools: str) -> Pair | Bad:
    answers: list[str | Chat] = []
    for column in (columns.chosen, columns.rejected):
        content = _content(record, place, column, tools)
        if isinstance(content, Bad):
            return content
        answers.append(content)
    assert isinstance(record, dict), "`_document` declines another record"
    chosen, rejected = answers
    prompt = record.get(columns.prompt) or ""
    if not isinstance(prompt, str):
        prompt = messages_of(prompt)
        if prompt is None:
            return Bad(*place, f"column {columns.prompt!r} holds neither text nor a list of messages")
    if isinstance(chosen, str) != isinstance(rejected, str):
        return Bad(*place, f"columns {columns.chosen!r} and {columns.rejected!r} hold text and messages")
    if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
        if not prompt:  # both may begin with it, as in HH-RLHF
            begin, mark, _ = os.path.commonprefix([chosen, rejected]).rpartition("Assistant:")
            prompt = begin + mark
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        if not prompt:
            return Bad(*place, f"no text in column {columns.prompt!r}, which comes before both answers")
        return Pair(prompt, chosen, rejected)
    chats = [_conversation(prompt, answer) for answer in answers]
    if any(chat.messages[0]["role"] == "assistant" for chat in chats):
        return Bad(*place, f"no message in column {columns.prompt!r}, and none before the answers")
    if not all(chat.messages[-1]["role"] == "assistant" for chat in chats):
        return Bad(*place, "the last message of an answer is not the assistant's")
    return Pair("", *chats)


def _conversation(prompt: str | list[dict[str, Any]], answer: str | Chat) -> Chat:
    """A prompt and an answer as one chat. An answer that is a whole chat, as in UltraFeedback, holds its prompt."""
    chat = Chat([{"role": "assistant", "content": answer}]) if isinstance(answer, str) else answer
    turns = chat.messages
    if isinstance(prompt, str):
        before = [{"role": "user", "content": prompt}] if prompt and turns[0]["role"] == "assistant" else []
    else:
        before = [] if turns[: len(prompt)] == prompt else prompt
    return dataclasses.replace(chat, messages=[*before, *turns])
