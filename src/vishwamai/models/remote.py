"""Directories elsewhere, such as `gs://bucket/run` and `s3://bucket/run`: copied to and from local ones.

`etils.epath` opens them, by the package of fsspec for the scheme (gcsfs, s3fs), whose variables and credentials hold.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from vishwamai.core.errors import DeviceError
from vishwamai.core.installing import install_line

if TYPE_CHECKING:
    from etils import epath

_ADDRESS = re.compile(r"(?P<scheme>gs|s3|az|hdfs):/{1,2}(?P<rest>[^/].*)")
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/+")


def address(path: str | os.PathLike[str]) -> str | None:
    """The address that a path names; None for a local one.

    >>> address("gs://bucket/run"), address(Path("s3://bucket/run")), address("runs/a")
    ('gs://bucket/run', 's3://bucket/run', None)
    """
    match = _ADDRESS.fullmatch(os.fspath(path))  # `Path` makes one slash of two
    return None if match is None else f"{match['scheme']}://{match['rest']}"


def why_not_local(path: str | os.PathLike[str]) -> str | None:
    """Why no file can be written at a path: it is an address, which `Path` would make directories of.

    >>> why_not_local("gs://bucket/run")
    'gs://bucket/run is an address, but files are written to local paths; pass one, and copy it (training does with checkpoint.remote=gs://bucket/run)'
    >>> why_not_local("runs/a")
    """
    place = address(path)
    text = place or os.fspath(path)
    if _URL.match(text) is None or Path(Path(text).parts[0]).is_dir():
        return None
    copies = "" if place is None else f" (training does with checkpoint.remote={place})"
    return f"{text} is an address, but files are written to local paths; pass one, and copy it{copies}"


def remote_path(place: str) -> epath.Path:
    """The directory of an address.

    Raises:
      DeviceError: the package for its scheme is missing.
    """
    try:
        from etils import epath

        path = epath.Path(place)
        path.exists()
        return path
    except ImportError as error:
        raise DeviceError(
            f"{place}: a package for this scheme is missing ({error}); {install_line('train')}, and gcsfs or s3fs."
        ) from error
    except Exception as error:  # each scheme's client has errors of its own
        raise DeviceError(f"{place} cannot be reached: {_first_line(error)}") from error


def send(folder: Path, target: epath.Path, last: str) -> None:
    """Copies the files of a directory; `last` names the file whose presence says that all are there.

    Raises:
      DeviceError: a file could not be copied.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    files.sort(key=lambda path: path.relative_to(folder).as_posix() == last)
    try:
        for file in files:
            place = target / file.relative_to(folder).as_posix()
            place.parent.mkdir(parents=True, exist_ok=True)
            with file.open("rb") as source, place.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 24)
    except Exception as error:
        raise DeviceError(f"{target}: {file.name} could not be copied there: {_first_line(error)}") from error


def receive(source: epath.Path, folder: Path) -> None:
    """Copies the files of a remote directory into a local one.

    Raises:
      DeviceError: a file could not be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for path in source.iterdir():
            if path.is_dir():
                receive(path, folder / path.name)
                continue
            with path.open("rb") as remote, (folder / path.name).open("wb") as copy:
                shutil.copyfileobj(remote, copy, 1 << 24)
    except DeviceError:
        raise
    except Exception as error:
        raise DeviceError(f"{source} could not be read: {_first_line(error)}") from error


@functools.cache
def fetched(place: str) -> Path:
    """A local copy of a remote model, which goes when the process ends; TMPDIR says where it is.

    Raises:
      DeviceError: it is not there, or cannot be read.
    """
    source = remote_path(place)
    if not source.exists():
        raise DeviceError(f"{place}: there is no such directory; check the address and the credentials.")
    root = Path(tempfile.mkdtemp(prefix="vishwamai-remote-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    folder = root / source.name
    if source.is_dir():
        receive(source, folder)
    else:
        folder.write_bytes(source.read_bytes())
    return folder


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
