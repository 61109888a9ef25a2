"""Lines and rows of files of strangers, read within a bound of memory.

A Parquet file of a few kilobytes may hold one long text that a million rows repeat: its dictionary is small, the rows
are not. So columns are read as dictionaries, and rows are measured before they become Python's objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

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


def open_parquet(path: Path, columns: list[str], most: int) -> Any:
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


def parts(batch: Any, most: int) -> Iterator[Any]:
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
