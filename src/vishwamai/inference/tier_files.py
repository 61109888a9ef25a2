"""Files of pages and states on a disk, which several servers may share and any of them may remove.

`DIRECTORY/prefix-<fingerprint>/<group>-<digest>.safetensors` has the bytes of one page and a digest of them with their
name. The fingerprint is of all that decides what the bytes mean, so files of another model are never read. A file is
written whole or not at all, and one that is not as it was written is removed. The least used files of the directory go
first. Nothing here raises: a disk that is full or cannot be written costs the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
from pathlib import Path

import numpy as np
import safetensors.numpy

from vishwamai.core import caches
from vishwamai.inference.prefixes import Part

_LOG = logging.getLogger(__name__)
_NAMES = re.compile(r"(pages|states|window-\d+)-[0-9a-f]{32}\.safetensors|\.vishwamai-\d+-[0-9a-f]+")
"""The files of pages, and those that are being written; others in the directory are left alone."""

_HEADER = 1024
"""More bytes than a file has besides those of its page."""


class TierFiles:
    """The files of one engine. One thread writes; any thread may read.

    Args:
      root: directory of all engines' files.
      fingerprint: text that names this engine's folder.
      most: bytes that the files of `root` may take; None: half of the room that the disk has for them.

    Attributes:
      bytes: size of all files of `root` when they were last counted, with those that were written since.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     files, part = TierFiles(Path(folder), "a", 1 << 20), Part("pages", b"12")
    ...     files.write(part, np.arange(4, dtype=np.uint8)), part in files, files.read(part, 4).tolist()
    (True, True, [0, 1, 2, 3])
    """

    def __init__(self, root: Path, fingerprint: str, most: int | None):
        self._root, self._folder = root, root / f"prefix-{fingerprint}"
        self._room = self.bytes = 0
        self._warned = False
        self._most = 0
        try:
            for folder in (root, self._folder):
                caches.private_directory(folder)
            self.bytes = sum(size for _, size, _ in self._files())
            self._most = (shutil.disk_usage(root).free + self.bytes) // 2 if most is None else most
        except OSError as error:
            self._warn(f"prefixes cannot be written to {root}: {error}")

    def __contains__(self, part: Part) -> bool:
        return os.path.exists(self._path(part))

    def read(self, part: Part, size: int) -> np.ndarray | None:
        """The bytes of a part, `size` of them; None where there is no such file, or it is damaged."""
        path = self._path(part)
        try:
            with caches.open_private(path) as file:
                content = file.read(size + _HEADER + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"{path} cannot be read: {error}")
            return None
        data = _data(content, path.name, size)
        with contextlib.suppress(OSError):  # of a directory for reading only
            if data is None:
                _LOG.warning("%s is damaged and is removed", path)
                path.unlink()
            else:
                os.utime(path)
        return data

    def write(self, part: Part, data: np.ndarray) -> bool:
        """Writes a part, and removes the least used files for it; False where it cannot be written."""
        path, size = self._path(part), data.nbytes + _HEADER
        try:
            if size > self._room:
                self._trim(size)
            if size > self._room:
                return False
            caches.private_directory(self._folder)  # somebody may have removed it
            content = safetensors.numpy.save({"bytes": data, "digest": _digest(path.name, data)})
            caches.write(path, content)
            path.chmod(0o600)
        except OSError as error:
            self._warn(f"prefixes cannot be written to {self._root}: {error}")
            return False
        self._room -= size
        self.bytes += len(content)
        return True

    def _path(self, part: Part) -> Path:
        return self._folder / f"{part.group}-{part.digest.hex()}.safetensors"

    def _trim(self, size: int) -> None:
        """Removes the least used files until so many bytes can be written, and some more."""
        room = max(size, self._most // 16)  # other servers write too, and are seen when the files are counted next
        files = sorted(self._files())
        total = sum(nbytes for _, nbytes, _ in files)
        for _, nbytes, path in files:
            if total + room <= self._most:
                break
            path.unlink(missing_ok=True)
            total -= nbytes
        self.bytes, self._room = total, min(room, self._most - total)

    def _files(self) -> list[tuple[int, int, Path]]:
        """The time of the last use, the size and the path of each file, of all engines."""
        files = []
        for folder in self._root.glob("prefix-*"):
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    if not _NAMES.fullmatch(entry.name):
                        continue
                    with contextlib.suppress(FileNotFoundError):  # another server removed it
                        state = entry.stat(follow_symlinks=False)
                        files.append((state.st_mtime_ns, state.st_size, Path(entry.path)))
        return files

    def _warn(self, text: str) -> None:
        if not self._warned:  # a full disk declines each file
            _LOG.warning("%s; answers go on without", text)
        self._warned = True


def _digest(name: str, data: np.ndarray) -> np.ndarray:
    digest = hashlib.sha256(name.encode())
    digest.update(np.ascontiguousarray(data).data)
    return np.frombuffer(digest.digest(), np.uint8)


def _data(content: bytes, name: str, size: int) -> np.ndarray | None:
    """The bytes of a file's content; None where it is not as it was written."""
    try:
        arrays = safetensors.numpy.load(content)
        data, digest = arrays["bytes"], arrays["digest"]
    except Exception:  # whatever a damaged header leads to
        return None
    fits = data.shape == (size,) and data.dtype == np.uint8
    return data if fits and np.array_equal(digest, _digest(name, data)) else None
