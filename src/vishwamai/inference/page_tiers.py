"""Prefixes outside of the device: pages and states that gave way go to host memory and to a disk, and come back.

The engine's thread decides and sends copies off; two threads wait for the copies, write and read. What cannot be
written in time is dropped, so no step waits for a disk. A request whose prefix is stored waits until it was read, while
others go on; its pages are restored before its first step, and what was computed for them is not computed again.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

import vishwamai
from vishwamai.core import ffi
from vishwamai.core.arguments import checked
from vishwamai.core.config import current_config
from vishwamai.core.errors import ShapeError
from vishwamai.inference.kept_programs import source_of_cpu, versions
from vishwamai.inference.page_copies import PageCopies
from vishwamai.inference.prefixes import Part
from vishwamai.inference.tier_files import TierFiles

if TYPE_CHECKING:
    from vishwamai.inference.prefixes import Restored
    from vishwamai.inference.programs import Programs
    from vishwamai.inference.scheduler import Scheduler
    from vishwamai.inference.streams import Stream

_LOG = logging.getLogger(__name__)

PENDING = 256 << 20
"""Bytes of copies that may wait to be written; more are dropped."""

READERS = 4
"""Requests whose prefixes are read, or wait with what was read, at once: a bound of the host memory for them."""

_WAIT = 0.02
"""Seconds for which an engine that has nothing else to do waits for a prefix before it looks for requests again."""


@checked
@dataclasses.dataclass(frozen=True)
class CacheTiers:
    """Where prefixes go that give way to others on the device.

    Args:
      directory: a directory for files of them, which outlive the process; None: no files.
      directory_bytes: size that the files may have; None: half of the room that the disk has for them.
      host_bytes: host memory for them; on a CPU, pages of the pools are host memory already.

    >>> CacheTiers(host_bytes=1 << 30)
    CacheTiers(directory=None, directory_bytes=None, host_bytes=1073741824)
    """

    directory: str | Path | None = None
    directory_bytes: int | None = None
    host_bytes: int = 0

    def __post_init__(self) -> None:
        for field in ("directory_bytes", "host_bytes"):
            if (getattr(self, field) or 0) < 0:
                raise ShapeError(f"CacheTiers: `{field}` is {getattr(self, field)}; pass a number of bytes.")
        if self.directory is None and (not self.host_bytes or self.directory_bytes is not None):
            raise ShapeError("CacheTiers: there is no `directory`; pass one, or `host_bytes` alone.")


@dataclasses.dataclass
class TierCounts:
    """What a tier did: parts that it gave back, their bytes, and the bytes that it took."""

    hits: int = 0
    read: int = 0
    stored: int = 0


class PageTiers:
    """The tiers of one engine, whose thread calls it.

    Args:
      options: sizes and places.
      programs: whose pools they serve.
      numerics: text of all that decides the bytes of a page besides the weights and the pools.

    Attributes:
      counts: numbers of each tier, by its name: "host" or "disk".
      dropped: pages and states that were not written because others were.
    """

    def __init__(self, options: CacheTiers, programs: Programs, numerics: str):
        self._copies = PageCopies(programs)
        self._most = options.host_bytes
        self._host: OrderedDict[Part, np.ndarray] = OrderedDict()  # the longest unused first
        self._files = None
        if options.directory is not None:
            name = _fingerprint(programs, self._copies, numerics)
            self._files = TierFiles(Path(options.directory), name, options.directory_bytes)
        self._lock = threading.Lock()  # of what follows, and of `_host`
        self._pending = self._host_bytes = self.dropped = 0
        self.counts = {"host": TierCounts(), "disk": TierCounts()}
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "prefix-writer")
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "prefix-reader")
        self._readings: dict[Stream, concurrent.futures.Future[dict[Part, np.ndarray]]] = {}

    @property
    def bytes(self) -> dict[str, int]:
        """Size of what is stored, by tier."""
        return {"host": self._host_bytes, "disk": 0 if self._files is None else self._files.bytes}

    def __contains__(self, part: Part) -> bool:
        return part in self._host or (self._files is not None and part in self._files)

    def seek(self, scheduler: Scheduler) -> None:
        """Begins to read what is stored of waiting streams' prefixes, and makes those ready for which it was read."""
        for stream, reading in list(self._readings.items()):
            if stream.finished or stream.slot is not None:
                del self._readings[stream]
            elif reading.done() and not stream.ready:
                stream.parts, stream.ready = reading.result(), True
        for stream in scheduler.waiting:
            if stream.ready or stream in self._readings:
                continue
            if (leader := stream.leader) is not None and not leader.finished:
                stream.ready = leader.ready or leader.slot is not None  # which reads for both
                continue
            if len(self._readings) >= READERS:
                break
            parts = scheduler.lacking(stream, self)
            if parts:
                self._readings[stream] = self._reader.submit(self._read, parts)
            else:
                stream.ready = True

    def forget(self, stream: Stream) -> None:
        """Drops what was read for a stream that has ended."""
        stream.parts = {}
        reading = self._readings.pop(stream, None)
        if reading is not None:
            reading.cancel()

    def wait(self) -> None:
        """Waits until a prefix was read, for a moment at most."""
        readings = [reading for stream, reading in self._readings.items() if not stream.ready]
        if readings:
            concurrent.futures.wait(readings, _WAIT, concurrent.futures.FIRST_COMPLETED)

    def exchange(self, scheduler: Scheduler, restored: Sequence[Restored]) -> None:
        """Copies off the device what gave way in a plan, and then to it what comes back, before the plan's step."""
        assert scheduler.prefixes is not None
        back = {entry.part for entry in restored}
        evicted = {group: pool.evicted or [] for group, pool in scheduler.prefixes.pools.items()}
        for pool in scheduler.prefixes.pools.values():
            pool.evicted = []
        for group, entries in evicted.items():
            # What comes back in this plan, and gives way in it again, is not on the device yet.
            self._save(group, [(page, digest) for page, digest in entries if Part(group, digest) not in back])
        for group in evicted:
            entries = [(entry.page, entry.data) for entry in restored if entry.part.group == group]
            self._copies.put(group, entries)

    def flush(self, scheduler: Scheduler) -> None:
        """Stores all prefixes that no answer holds, and waits until they are written."""
        assert scheduler.prefixes is not None
        for group, pool in scheduler.prefixes.pools.items():
            self._save(group, pool.idle_pages(), wait=True)

    def _save(self, group: str, entries: Sequence[tuple[int, bytes]], wait: bool = False) -> None:
        count = self._copies.batch(group)
        size = max(1, count * self._copies.size(group))  # of the copies of a batch, filled up
        entries = [(page, digest) for page, digest in entries if Part(group, digest) not in self]
        if not wait:
            with self._lock:
                room = count * max((PENDING - self._pending) // size, 0 if self._pending else 1)
            self.dropped += max(0, len(entries) - room)
            entries = entries[max(0, len(entries) - room) :]  # the last are the first of their prefixes
        for first in range(0, len(entries), count):
            batch = entries[first : first + count]
            copies = self._copies.take(group, [page for page, _ in batch])
            with self._lock:
                self._pending += size
            parts = [Part(group, digest) for _, digest in batch]
            writing = self._writer.submit(self._write, parts, copies, size)
            if wait:
                writing.result()
        if wait:
            self._writer.submit(int).result()  # after all that was handed in before

    # What the two threads do.

    def _write(self, parts: Sequence[Part], copies: Sequence[jax.Array], size: int) -> None:
        try:
            for i, part in enumerate(parts):
                data = self._copies.data(copies, i)
                if self._most and data.nbytes <= self._most:
                    self._keep(part, data)
                if self._files is not None and self._files.write(part, data):
                    self.counts["disk"].stored += data.nbytes
        except Exception as error:  # a step that failed leaves nothing to copy
            _LOG.warning("prefixes are not stored: %s", error)
        finally:
            with self._lock:
                self._pending -= size

    def _keep(self, part: Part, data: np.ndarray) -> None:
        """Stores a part in host memory."""
        with self._lock:
            if part not in self._host:
                self._host_bytes += data.nbytes
                self.counts["host"].stored += data.nbytes
            self._host[part] = data
            self._host.move_to_end(part)
            while self._host_bytes > self._most:
                self._host_bytes -= self._host.popitem(last=False)[1].nbytes

    def _read(self, parts: Sequence[Part]) -> dict[Part, np.ndarray]:
        contents: dict[Part, np.ndarray] = {}
        try:
            for part in reversed(parts):  # the first pages of a prefix become those used last: the rest needs them
                tier, data = self._find(part)
                if data is not None:
                    contents[part] = data
                    self.counts[tier].hits += 1
                    self.counts[tier].read += data.nbytes
        except Exception as error:  # what was not read is computed
            _LOG.warning("prefixes are not read: %s", error)
        return contents

    def _find(self, part: Part) -> tuple[str, np.ndarray | None]:
        """The first tier that has a part, and its bytes."""
        with self._lock:
            data = self._host.get(part)
            if data is not None:
                self._host.move_to_end(part)
                return "host", data
        return "disk", None if self._files is None else self._files.read(part, self._copies.size(part.group))


def _fingerprint(programs: Programs, copies: PageCopies, numerics: str) -> str:
    """A digest of all that decides the bytes of a page, but its tokens: weights, shapes, scales, kernels, versions."""
    models = (programs.model, programs.draft)
    leaves = jax.tree.leaves_with_path((models, copies.scales))
    device = next(iter(programs.history.devices()))
    facts = (
        vishwamai.__version__,
        versions(),
        source_of_cpu(),
        (device.platform, device.device_kind, ffi.isa() if ffi.why_not() is None else None),
        (os.environ.get("XLA_FLAGS"), jax.config.values["jax_default_matmul_precision"], current_config(), numerics),
        (copies.layout, programs.limits.page_size, programs.sizes),
        None if programs.mesh is None else dict(programs.mesh.shape),  # parts of sums, and their order
        [None if model is None else repr(model.config) for model in models],
        [(jax.tree_util.keystr(path), leaf.shape, leaf.dtype.name) for path, leaf in leaves],
    )
    digest = hashlib.sha256(repr(facts).encode())
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # of a GPU's arrays, so many are on the host at once
        for part in pool.map(_digest, (leaf for _, leaf in leaves)):
            digest.update(part)
    return digest.hexdigest()[:32]


def _digest(array: jax.Array) -> bytes:
    digest = hashlib.sha256()
    for shard in array.addressable_shards:  # in the order of the mesh's devices
        if shard.replica_id == 0:
            # A view of its own: what JAX keeps of an array on the host goes with it.
            data = np.ascontiguousarray(np.asarray(shard.data))
            digest.update(data.reshape(-1).view(np.uint8).data)
    return digest.digest()
