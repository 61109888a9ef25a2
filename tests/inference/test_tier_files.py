"""Files of pages on a disk: damage, full disks, directories that cannot be written, and a bound on their size."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from vishwamai.core import caches
from vishwamai.inference.prefixes import Part
from vishwamai.inference.tier_files import TierFiles

PART = Part("pages", b"\x01" * 16)
DATA = np.random.default_rng(0).integers(0, 256, 3000).astype(np.uint8)


def stored(root: Path, most: int | None = None) -> TierFiles:
    files = TierFiles(root, "a", most)
    assert files.write(PART, DATA) and PART in files
    return files


def path_of(root: Path) -> Path:
    (path,) = root.glob("prefix-a/*")
    return path


def test_damaged_files_are_removed_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = stored(tmp_path)
    path = path_of(tmp_path)
    content = path.read_bytes()
    other = safetensors.numpy.save({"bytes": DATA, "digest": np.zeros(32, np.uint8)})
    flips = [i for first in (0, 8, 60, len(content) - DATA.nbytes, len(content) - 40) for i in (first, first + 7)]
    damages = [b"", content[:4], content[:100], content[:-1], content + b"x" * 5000, other, DATA.tobytes()]
    damages += [bytes((*content[:i], content[i] ^ 1, *content[i + 1 :])) for i in flips]
    damages += [safetensors.numpy.save({"bytes": DATA}), safetensors.numpy.save({"bytes": DATA[:5], "digest": DATA})]
    for damage in damages:
        path.write_bytes(damage)
        caplog.clear()
        assert files.read(PART, DATA.nbytes) is None and not path.exists(), damage[:120]
        assert [record.getMessage() for record in caplog.records] == [f"{path} is damaged and is removed"]
        assert files.read(PART, DATA.nbytes) is None and len(caplog.records) == 1
    assert files.write(PART, DATA)
    np.testing.assert_array_equal(files.read(PART, DATA.nbytes), DATA)
    os.rename(path, path.with_name(f"pages-{'02' * 16}.safetensors"))  # a file of another page
    assert files.read(Part("pages", b"\x02" * 16), DATA.nbytes) is None


def test_only_their_user_reads_and_writes_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mask = os.umask(0o002)
    try:
        files = stored(tmp_path / "new")
    finally:
        os.umask(mask)
    folder, path = tmp_path / "new" / "prefix-a", path_of(tmp_path / "new")
    assert [os.stat(entry).st_mode & 0o777 for entry in (folder.parent, folder, path)] == [0o700, 0o700, 0o600]
    path.chmod(0o666)  # others may have written it
    assert files.read(PART, DATA.nbytes) is None and path.exists()
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert files.read(PART, DATA.nbytes) is None
    assert len(caplog.records) == 1  # more of the kind are not news


def test_a_disk_that_cannot_be_written_costs_the_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = stored(tmp_path)

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    part = Part("pages", b"\x03" * 16)
    with monkeypatch.context() as patch:
        patch.setattr(caches, "write", full)
        assert not files.write(part, DATA) and not files.write(part, DATA)
    assert len(caplog.records) == 1 and "No space left on device" in caplog.text
    assert files.read(part, DATA.nbytes) is None and files.write(part, DATA)
    (tmp_path / "file").write_text("")
    caplog.clear()
    nowhere = TierFiles(tmp_path / "file" / "x", "a", None)
    assert not nowhere.write(PART, DATA) and PART not in nowhere and nowhere.read(PART, 3000) is None
    assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.WARNING


def test_a_removed_directory_is_made_again(tmp_path: Path) -> None:
    files = stored(tmp_path)
    path_of(tmp_path).unlink()
    (tmp_path / "prefix-a").rmdir()
    assert PART not in files and files.write(PART, DATA) and PART in files
    assert (tmp_path / "prefix-a").stat().st_mode & 0o777 == 0o700


def test_the_least_used_files_go_first_and_all_engines_share_the_bound(tmp_path: Path) -> None:
    most = 40_000
    stranger, files = stored(tmp_path, most), TierFiles(tmp_path, "b", most)
    os.utime(path_of(tmp_path), (1, 1))
    (tmp_path / "prefix-notes").mkdir()
    (tmp_path / "prefix-notes" / "mine.safetensors").write_bytes(bytes(most))  # of somebody else
    parts = [Part("pages", bytes([i]) * 16) for i in range(30)]
    for i, part in enumerate(parts):
        assert files.write(part, DATA)
        path = tmp_path / "prefix-b" / f"pages-{part.digest.hex()}.safetensors"
        os.utime(path, (100 + i, 100 + i))
        np.testing.assert_array_equal(files.read(parts[0], DATA.nbytes), DATA)  # in use all the time
        assert sum(entry.stat().st_size for entry in tmp_path.glob("prefix-?/*")) <= most
    left = [part for part in parts if part in files]
    assert PART not in stranger and left == [parts[0], *parts[31 - len(left) :]] and len(left) > 8
    assert (tmp_path / "prefix-notes" / "mine.safetensors").stat().st_size == most
    assert not TierFiles(tmp_path, "c", 100).write(PART, DATA)  # larger than all may be
