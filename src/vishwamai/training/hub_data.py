"""Rows of datasets of the Hugging Face Hub, through the library `datasets`.

Its cache, its token and its variables hold (`HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE`). Rows come as batches of Arrow, so
that no column is decoded that is not read, and so that each row is measured before it becomes Python's objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from vishwamai.core.errors import ConfigError, DeviceError
from vishwamai.core.installing import install_line
from vishwamai.training.config import SourceSection

if TYPE_CHECKING:
    import pyarrow
    from datasets import IterableDataset

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w.-][\w./-]*))?")
_ROWS = 256  # of a batch, which one text of the bound may fill


def open_dataset(source: SourceSection) -> IterableDataset:
    """The rows that a source names.

    Raises:
      ConfigError: the name is not one, or there is no such dataset, subset or split.
      DeviceError: the package `datasets` is missing, or the Hub cannot be reached.
    """
    match = _NAME.fullmatch(source.dataset or "")
    if match is None:
        raise ConfigError(f"config: data.sources.dataset is {source.dataset!r}; pass ORG/NAME or ORG/NAME@REVISION.")
    try:
        import datasets
        import datasets.exceptions
    except ImportError as error:
        raise DeviceError(f"{source.dataset}: the Hub's data need datasets: {install_line('data')}.") from error
    try:
        return datasets.load_dataset(  # pyright: ignore[reportReturnType] # one split, and what the two kinds share
            match["repo"],
            name=source.subset,
            revision=match["revision"],
            split=source.split,
            streaming=source.streaming,
        )
    except datasets.exceptions.DatasetNotFoundError as error:
        raise ConfigError(
            f"config: data.sources.dataset: the Hub has no {source.dataset}, or shows it to its owner only (`hf auth "
            "login`, or HF_TOKEN); check the name."
        ) from error
    except ValueError as error:  # a subset or a split that is missing; the text lists those there are
        raise ConfigError(f"config: data.sources.dataset={source.dataset}: {_first_line(error)}") from error
    except Exception as error:  # its HTTP library, and so the class of a broken connection, differs between releases
        raise DeviceError(
            f"{source.dataset}: the Hub cannot be reached ({_first_line(error)}), and the cache does not have the "
            f"dataset. On a machine with network, run `hf download --repo-type dataset {match['repo']} --local-dir "
            "data`; copy the folder data to this machine, and set data.sources.paths=[data] in place of dataset."
        ) from error


def batches(source: SourceSection) -> Iterator[pyarrow.RecordBatch]:
    """The rows of a source in order.

    Raises:
      VishwamaiError: as `open_dataset`; and DeviceError where the Hub breaks off.
    """
    rows = open_dataset(source).with_format("arrow")
    count = 0
    stream = cast("Iterator[pyarrow.Table]", rows.iter(batch_size=_ROWS))
    while True:
        try:
            table = next(stream, None)
        except (ConfigError, DeviceError):
            raise
        except Exception as error:
            raise DeviceError(
                f"{source.dataset}: the rows break off after {count} ({_first_line(error)}); the same command tries "
                "again, and data.sources.streaming=false keeps the files that have arrived."
            ) from error
        if table is None:
            return
        count += len(table)
        yield from table.to_batches()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
