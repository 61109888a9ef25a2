"""Lines and rows of files of strangers, read within a bound of memory.

A Parquet file of a few kilobytes may hold one long text that a million rows repeat: its dictionary is small, the rows
are not. So columns are read as dictionaries, and rows are measured before they become Python's objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pyarrow.parquet

_VALUES = 1 << 26
"""Values of a column that a group of rows may have; an index of four bytes is decoded for each."""


class _Lines(Protocol):
    def readline(self, size: int, /) -> bytes: ...


def limit(most: int) -> str:
    """A bound as errors name it."""
    return f"{most >> 20} MiB; raise data.sources.max_record_mib if the file is right"


def lines(file: _Lines, most: int) -> Iterator[bytes | None]:
    """The lines of a file; None in place of one that is longer than `most` bytes.

    >>> import io
    >>> list(lines(io.BytesIO(b"short\\n a longer line\\nlast"), 8))
    [b'short\\n', None, b'last']
    """
    while line := file.readline(most + 1):
        if len(line) <= most:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(1 << 20)
        yield None


def open_parquet(path: Path, columns: list[str], most: int) -> pyarrow.parquet.ParquetFile:
    """A file of Parquet whose texts come as dictionaries.

    Args:
      path: file of Parquet.
      columns: names of the columns to read.
      most: bytes that a column of a group of rows may take before its dictionary is applied.

    Raises:
      ValueError: the file is damaged, or exceeds the bound.
    """
    import pyarrow.parquet

    about = pyarrow.parquet.read_metadata(path)
    leaves = [about.schema.column(i) for i in range(about.num_columns)]
    chosen = [i for i, leaf in enumerate(leaves) if leaf.path.split(".")[0] in columns]
    for group in range(about.num_row_groups):
        for i in chosen:
            chunk = about.row_group(group).column(i)
            wide = chunk.num_values * max(leaves[i].length, 0)  # of a fixed length, of which there is no dictionary
            if max(chunk.total_uncompressed_size, wide) > max(most, _GROUP) or chunk.num_values > _VALUES:
                raise ValueError(f"column {leaves[i].path!r} takes more than {limit(most)}; its group of rows is large")
    texts = [leaves[i].path for i in chosen if leaves[i].physical_type == "BYTE_ARRAY"]
    return pyarrow.parquet.ParquetFile(path, read_dictionary=texts)


_GROUP = 1 << 30
"""Bytes of a column that a group of rows may take in any case: published files have hundreds of MiB."""


def arrow_batches(path: Path, most: int) -> Iterator[pyarrow.RecordBatch]:
    """The batches of a file of Arrow, whose offsets are checked before a value is read.

    Args:
      path: file of Arrow's stream format, or of its file format, which holds a stream behind its mark.
      most: bytes that a batch may take when its buffers are decompressed.

    Raises:
      ValueError: the file is damaged, or exceeds the bound.
    """
    import pyarrow

    with pyarrow.memory_map(str(path)) as data:
        begin = 8 if data.read(6) == b"ARROW1" else 0
        data.seek(begin)
        for message in pyarrow.ipc.MessageReader.open_stream(data):
            if message.type in ("record batch", "dictionary"):
                total = _decompressed(message)
                if total > max(most, _GROUP):
                    raise ValueError(f"a batch of {total} bytes takes more than {limit(max(most, _GROUP))}")
        data.seek(begin)
        for batch in pyarrow.ipc.open_stream(data):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                _check(name, column)
            yield batch


def _decompressed(message: Any) -> int:
    """Bytes of a message's buffers: of a compressed one its first eight bytes say how many (Arrow's Message.fbs)."""
    from flatbuffers import encode, number_types
    from flatbuffers.table import Table

    content, long = message.metadata.to_pybytes(), number_types.Int64Flags
    root = Table(content, encode.Get(number_types.UOffsetTFlags.packer_type, content, 0))

    def union(table: Table, field: int) -> Table:
        value = Table(content, 0)
        table.Union(value, table.Offset(field))
        return value

    batch = union(root, 8)
    if message.type == "dictionary":  # of an id (4), and the batch of its values (6)
        batch = Table(content, batch.Indirect(batch.Offset(6) + batch.Pos))
    place = batch.Offset(8)
    if not place or not batch.Offset(10) or message.body is None:  # no buffers, or not compressed
        return 0 if message.body is None else message.body.size
    first, total = batch.Vector(place), 0
    for i in range(batch.VectorLen(place)):
        start, length = (encode.Get(long.packer_type, content, first + 16 * i + 8 * j) for j in range(2))
        if length >= 8:
            size = int.from_bytes(message.body.slice(start, 8).to_pybytes(), "little", signed=True)
            total += length if size < 0 else size  # -1: not compressed
    return total


def _check(name: str, column: pyarrow.Array) -> None:
    """Declines offsets that leave a column's buffers, and types whose rows may share bytes, so that a small file has
    large rows.

    Raises:
      ValueError: the column has either.
    """
    import pyarrow

    kinds = [column.type]
    for kind in kinds:
        if str(kind).startswith(("string_view", "binary_view", "list_view", "large_list_view", "run_end")):
            raise ValueError(f"column {name!r} has the type {kind}, which is not read; write plain strings and lists")
        kinds += [kind.field(i).type for i in range(kind.num_fields)]
    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        # Offsets are looked at first. A text alone may be another encoding, which makes one row unreadable.
        if len(kinds) > 1 or "UTF8" not in str(error):
            raise ValueError(f"column {name!r} is damaged: {error}") from error


def parts(batch: pyarrow.RecordBatch, most: int) -> Iterator[pyarrow.RecordBatch | None]:
    """A batch of pyarrow in parts of at most `most` bytes; None in place of a row that is larger."""
    if size(batch) <= most:
        yield batch
    elif len(batch) == 1:
        yield None
    else:
        half = len(batch) // 2
        yield from parts(batch.slice(0, half), most)
        yield from parts(batch.slice(half), most)


def size(values: Any) -> int:
    """Bytes that the values of a batch or an array of pyarrow take once each of them is an object."""
    import pyarrow
    import pyarrow.compute

    if isinstance(values, pyarrow.RecordBatch):
        return sum(size(column) for column in values.columns)
    kind = values.type
    if pyarrow.types.is_dictionary(kind):
        lengths = pyarrow.compute.call_function("binary_length", [values.dictionary]).take(values.indices)
        return len(values) * _OBJECT + (pyarrow.compute.call_function("sum", [lengths]).as_py() or 0)
    if pyarrow.types.is_struct(kind):
        return len(values) * _OBJECT + sum(size(field) for field in values.flatten())
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return len(values) * _OBJECT + size(values.flatten())
    return len(values) * _OBJECT + values.nbytes


_OBJECT = 64
"""Bytes of a Python object, about."""
