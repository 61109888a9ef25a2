"""Where files are kept between runs, and how: the one place that knows the user's cache directory.

There are four caches: `tuning` (tables of configs, which users measure and keep), `aot` (what the TPU compiler
answered), `jax` (compiled programs of `generate` and `serve`) and `weights` (weights packed for a CPU). None is
needed. Without a home directory there is no cache; one that cannot be read or written costs a warning and time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from vishwamai.core import callers
from vishwamai.core.errors import CacheWarning, ConfigError, DeviceError

CACHES = {
    "tuning": "VISHWAMAI_TUNING_DIR",
    "aot": "VISHWAMAI_AOT_CACHE",
    "jax": None,
    "weights": "VISHWAMAI_WEIGHTS_CACHE",
}
"""The caches, with the environment variable that names another directory for one."""

OTHER_DIRECTORY = {
    cache: f"{variable or 'XDG_CACHE_HOME'} names another directory" for cache, variable in CACHES.items()
}
"""What an error or a warning says of a directory that cannot be written."""

LIMIT_MIB = 4096
"""How large `aot` and `jax` may each become, where `VISHWAMAI_CACHE_MIB` says nothing else."""

_TEMPORARY = ".vishwamai-"
_ABANDONED_S = 24 * 3600  # a temporary that is older than this has lost its process


def cache_directory(cache: str) -> Path | None:
    """Where a cache is: what its environment variable names, else its folder in `$XDG_CACHE_HOME/vishwamai` or
    `~/.cache/vishwamai`. The directory need not exist.

    Args:
      cache: one of `CACHES`.

    Returns:
      None where the user has no home directory (a container's user that /etc/passwd lacks) and no variable names one.

    >>> import os, unittest.mock
    >>> with unittest.mock.patch.dict(os.environ, VISHWAMAI_AOT_CACHE="/data/aot"):
    ...     print(cache_directory("aot"))
    /data/aot
    """
    variable = CACHES[cache]
    named = os.environ.get(variable) if variable else None
    return _directory(cache, named, os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"))


@functools.cache
def _directory(cache: str, named: str | None, caches: str | None, home: str | None) -> Path | None:
    if named:
        return Path(named)
    if caches and os.path.isabs(caches):  # a relative one is to be ignored, by the XDG Base Directory Specification
        return Path(caches, "vishwamai", cache)
    root = home or os.path.expanduser("~")  # without HOME the user's entry of /etc/passwd, "~" where there is none
    return Path(root, ".cache", "vishwamai", cache) if os.path.isabs(root) else None


def no_directory(cache: str) -> str:
    """Why a cache has no directory, and what gives it one."""
    variable = CACHES[cache] or "XDG_CACHE_HOME"
    return f"there is no home directory to keep the {cache} cache in; set {variable} to a directory that can be written"


@functools.cache
def warn_once(text: str) -> None:
    """Gives a `CacheWarning` the first time that this process has this text to say."""
    callers.warn(text, CacheWarning)


def write(path: Path, content: str | bytes) -> None:
    """Writes a file whole: a reader sees the old content or the new, and an interrupted or failed write leaves the old.
    A link stays, and its file is written. A device or a pipe, such as /dev/stdout, is written as it is.

    Raises:
      OSError: the file, which it names, cannot be written; nothing is left of it.
    """
    content = content.encode() if isinstance(content, str) else content
    if is_special(path):
        path.write_bytes(content)
        return
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # a failed write has none, others the temporary's
        raise


@contextlib.contextmanager
def writing(path: Path, caller: str, failures: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Of what fails inside for want of room, or in a directory for reading only, makes an error with the path and the
    reason.

    Args:
      path: file to write.
      caller: name that the error's text begins with.
      failures: exception types that the writing library raises.

    Raises:
      DeviceError: one of `failures` was raised inside.
    """
    try:
        yield
    except failures as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        raise DeviceError(
            f"{caller}: {path} could not be written: {reason}. Make room, or choose another directory."
        ) from error


def crc32(path: Path) -> int:
    """The CRC-32 of a file."""
    total = 0
    with path.open("rb") as content:
        while piece := content.read(1 << 24):
            total = zlib.crc32(piece, total)
    return total


def sealed(text: str) -> str:
    """A text below the line of its digest, which `opened` checks."""
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def opened(text: str) -> str:
    """The text that was sealed.

    Raises:
      ValueError: it is not as it was written.

    >>> opened(sealed("an answer"))
    'an answer'
    """
    _, _, content = text.partition("\n")
    if sealed(content) != text:
        raise ValueError("it is not as it was written")
    return content


def is_special(path: Path) -> bool:
    """Whether the path is that of a device or a pipe, which must not be replaced by a file."""
    return path.exists() and not path.is_file() and not path.is_dir()


def try_directory(path: Path) -> None:
    """Makes a file in a directory and removes it.

    Raises:
      OSError: none can be made.
    """
    with tempfile.TemporaryFile(dir=path):
        pass


@contextlib.contextmanager
def temporary_directory(parent: Path) -> Iterator[Path]:
    """A directory that the block fills and may move to another name in `parent`, which is made where it is missing.

    Raises:
      OSError: it cannot be made.
    """
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=_TEMPORARY) as name:
        yield Path(name)


def private_directory(path: Path) -> None:
    """Makes a directory that its user alone may read and write, with its parents; one that exists is checked.

    Raises:
      OSError: it cannot be made, is a link, belongs to another user, or may be written by others.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    _check_private(path, os.lstat(path), directory=True)


def open_private(path: Path) -> BinaryIO:
    """Opens a file for reading that nobody but this user could have written.

    Raises:
      OSError: it cannot be read; or it or its directory is a link, of another user, or may be written by others.
    """
    _check_private(path.parent, os.lstat(path.parent), directory=True)
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")  # a pipe would block
    try:
        _check_private(path, os.fstat(file.fileno()), directory=False)
    except BaseException:
        file.close()
        raise
    return file


def _check_private(path: Path, state: os.stat_result, directory: bool) -> None:
    kind = "directory" if directory else "file"
    if not (stat.S_ISDIR if directory else stat.S_ISREG)(state.st_mode):
        raise NotADirectoryError(f"{path} is not a {kind} of its own; remove it")
    if state.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to another user; choose another directory for caches")
    if state.st_mode & 0o022:
        raise PermissionError(f"{path} may be written by other users; remove it, or run `chmod go-w` on it")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file, `<name>.lock` next to it, so that two processes do not read, change and write it at
    once. The lock ends with its process.

    Raises:
      OSError: the lock cannot be made.
    """
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f"{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def set_aside(path: Path, problem: object) -> None:
    """Renames a damaged file to `<name>.damaged`, with a warning, so that the next write begins anew."""
    damaged = path.with_name(f"{path.name}.damaged")
    try:
        os.replace(path, damaged)
    except OSError as error:
        warn_once(f"{path} is damaged ({problem}), and cannot be renamed ({error}); it is left out. Delete it.")
    else:
        warn_once(f"{path} is damaged ({problem}); it is now {damaged.name}, and is left out.")


@dataclasses.dataclass(frozen=True)
class CachedFile:
    """One thing in a cache: a file, or a directory with what belongs together.

    Attributes:
      path: file or directory of the entry.
      bytes: its size.
      used: when it was last written or read, in seconds since the epoch.
    """

    path: Path
    bytes: int
    used: float

    def remove(self) -> None:
        """Removes it; what another process removed before is not an error.

        Raises:
          OSError: it cannot be removed.
        """
        if self.path.is_dir():
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)


# What each cache holds, by the names of its entries: a directory that a variable names may hold files of others.
_ENTRIES = {
    "tuning": re.compile(r"(v\d+[a-z]?|tpu\w+|sm_\w+|gfx\w+)/\w+\.json(\.lock|\.damaged)?"),
    "aot": re.compile(r"[0-9a-f]{16,64}|plans/[0-9a-f]{16,64}-\w+\.json"),
    "jax": re.compile(r".+-(cache|atime)"),
    "weights": re.compile(r"[0-9a-f]{64}"),
}


def entries(cache: str) -> list[CachedFile]:
    """What is in a cache, the longest unused first; other files in its directory are not in it."""
    root = cache_directory(cache)
    if root is None or not os.path.isdir(root):
        return []
    files = []
    first = _listed(root)
    for path in (*first, *itertools.chain.from_iterable(_listed(path) for path in first if path.is_dir())):
        temporary = path.name.startswith(_TEMPORARY)
        if not (temporary or _ENTRIES[cache].fullmatch(path.relative_to(root).as_posix())):
            continue
        with contextlib.suppress(OSError):  # another process removed it meanwhile
            states = [file.stat() for file in (path, *(path.rglob("*") if path.is_dir() else ()))]
            used = max(max(state.st_mtime, state.st_atime) for state in states)
            if not temporary or time.time() - used > _ABANDONED_S:
                files.append(CachedFile(path, sum(state.st_size for state in states), used))
    return sorted(files, key=lambda entry: entry.used)


def _listed(folder: Path) -> list[Path]:
    """What is in a directory; nothing where another process removed it meanwhile."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def limit() -> int:
    """How large `aot` and `jax` may each become, in bytes: `VISHWAMAI_CACHE_MIB`, by default `LIMIT_MIB`.

    Raises:
      ConfigError: the variable is not a positive whole number.
    """
    text = os.environ.get("VISHWAMAI_CACHE_MIB", str(LIMIT_MIB))
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigError(f"VISHWAMAI_CACHE_MIB is {text!r}; set it to a positive number of MiB, or unset it.")
    return int(text) << 20


def trim(cache: str, most: int | None = None) -> None:
    """Removes what was not used for longest until a cache has at most `most` bytes (default: `limit()`)."""
    most = limit() if most is None else most
    files = entries(cache)
    size = sum(entry.bytes for entry in files)
    for entry in files:
        if size <= most:
            return
        with contextlib.suppress(OSError):  # read-only: it cannot grow either
            entry.remove()
            size -= entry.bytes
