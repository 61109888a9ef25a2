"""Memory that goes back to the system."""

import ctypes
import gc
import os
import signal

import pytest
import uvicorn

from vishwamai.cli import main, serve
from vishwamai.core import host_memory


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.turns(3)
@pytest.mark.skipif(host_memory._malloc_trim() is None, reason="the C library has no malloc_trim")
def test_what_lies_between_used_pieces_goes_back():
    many = [bytes(2000) for _ in range(60_000)]
    kept = many[::100]
    del many
    before = resident()
    host_memory.give_back()
    assert before - resident() > 60e6 and len(kept) == 600


def test_a_library_without_it_changes_nothing(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    host_memory._malloc_trim.cache_clear()
    try:
        host_memory.give_back()
        assert host_memory._malloc_trim() is None
    finally:
        host_memory._malloc_trim.cache_clear()


def test_collections_leave_out_what_existed_before(monkeypatch):
    """`serve` runs so: a collection of all objects holds every answer up."""
    earlier: list[object] = []

    def visited() -> bool:
        return any(entry is earlier for entry in gc.get_objects())

    counts = []
    monkeypatch.setattr(serve, "_models", lambda _: (None, None, ("name",), {}))
    monkeypatch.setattr(uvicorn.Server, "run", lambda _: counts.append((gc.get_freeze_count() > 10_000, visited())))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["serve", "anything", "--port", "0"]) == 0
    assert counts == [(True, False)] and visited()
