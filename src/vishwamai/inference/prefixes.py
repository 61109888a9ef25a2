"""Prefixes that come back from outside of the device: which parts the pools lack, and the pages that they get.

A part is a page of one group of layers, or the states after it: layers that see all tokens, layers of one window, and
states have pools of their own, and each gives its pages up by itself. What is decided here are plain values, as in
`scheduler`.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vishwamai.inference.pages import PagePool
from vishwamai.inference.states import StatePool
from vishwamai.inference.windows import WindowPages

PAGES, STATES = "pages", "states"
"""The groups of layers that see all tokens, and of states."""


def window_group(window: int) -> str:
    """The group of layers with that window."""
    return f"window-{window}"


class Part(NamedTuple):
    """A page, or the states after it: its group, and the digest of the page."""

    group: str
    digest: bytes


class Restored(NamedTuple):
    """A part that came back, its page or slot on the device, and its bytes."""

    part: Part
    page: int
    data: np.ndarray


class Prefixes:
    """The pools of a scheduler, as groups.

    Args:
      pool: the pages of all tokens.
      windows: the pools of windows.
      states: the slots of states, or None.

    >>> from vishwamai.inference.pages import ROOT, chain
    >>> prefixes = Prefixes(PagePool(4), WindowPages({}, 1, 2), None)
    >>> digest = chain(ROOT, [5, 6])
    >>> parts = {Part(PAGES, digest): np.zeros(8, np.uint8)}
    >>> prefixes.lacking([digest, b"never seen"], 0, parts)
    (1, [Part(group='pages', digest=b'...')])
    >>> count, restored = prefixes.restore([digest], 0, parts)
    >>> count, restored[0].page, prefixes.pools[PAGES].knows(digest)
    (1, 0, True)
    """

    def __init__(self, pool: PagePool, windows: WindowPages, states: StatePool | None):
        self._windows, self._states = windows, states
        self.pools = {PAGES: pool, **{window_group(window): pages for window, pages in windows.pools.items()}}
        if states is not None:
            self.pools[STATES] = states.slots
        for pages in self.pools.values():
            pages.evicted = []

    def lacking(self, digests: Sequence[bytes], count: int, stored: Container[Part]) -> tuple[int, list[Part]]:
        """How many leading pages of a prefix a sequence can go on after with the parts of `stored`, and those of them
        that the pools lack.

        Args:
          digests: digests of the full pages of the prefix.
          count: leading pages after which it can go on now.
          stored: parts that may come back.
        """
        has = functools.cache(stored.__contains__)  # asked for again by each length below; a store may be on disk
        pages, longest = self.pools[PAGES], 0
        while longest < len(digests) and (pages.knows(digests[longest]) or has(Part(PAGES, digests[longest]))):
            longest += 1
        for most in range(longest, count, -1):  # from the longest: windows and states may lack a part of it
            if all(self.pools[part.group].knows(part.digest) or has(part) for part in self._parts(digests[:most])):
                parts = self._parts(digests[:most])
                return most, [part for part in parts if not self.pools[part.group].knows(part.digest)]
        return count, []

    def restore(
        self, digests: Sequence[bytes], count: int, parts: Mapping[Part, np.ndarray]
    ) -> tuple[int, list[Restored]]:
        """Gives pages to the parts of a prefix that came back, which its sequence then shares; there must be room for
        all pages of the prefix.

        Args:
          digests, count: arguments of `lacking`.
          parts: bytes of the parts.

        Returns:
          The leading pages after which the sequence can go on, and where the parts belong.
        """
        most, lacking = self.lacking(digests, count, parts)
        if not lacking:
            return count, []
        prefix = digests[:most]
        present = [part for part in self._parts(prefix) if self.pools[part.group].knows(part.digest)]
        # What is there already must not give way to the rest.
        holds = [(self.pools[part.group], self.pools[part.group].share([part.digest])) for part in present]
        restored: list[Restored] = []
        for group, pool in self.pools.items():
            group_parts = [part for part in lacking if part.group == group]
            if group == STATES or not group_parts:
                continue
            # pages and states are evicted as one: the pool alone would leave states without their pages
            if group == PAGES and self._states is not None:
                self._states.make_pages(len(group_parts))
            pages = pool.take(len(group_parts))
            assert pages is not None, f"no room for {len(group_parts)} pages of the group {group}"
            for part, page in zip(group_parts, pages):
                pool.publish(page, part.digest)
                restored.append(Restored(part, page, parts[part]))
            holds.append((pool, pages))
        state = Part(STATES, prefix[-1])
        if self._states is not None and state in lacking:
            # after the pages, which the state's tree refers to
            slot = self._states.restore(prefix, self.pools[PAGES].cached(prefix))
            if slot is None:
                most, restored = count, []
            else:
                restored.append(Restored(state, slot, parts[state]))
        for pool, pages in holds:  # idle again, but known: the sequence shares them like any prefix
            pool.release(pages)
        if self._states is not None:
            self._states.release(None, prefix)  # without their state, pages of a prefix are blank
        return most, restored

    def _parts(self, digests: Sequence[bytes]) -> Iterator[Part]:
        """All that a sequence needs to go on after a prefix; first what is most often absent."""
        if self._states is not None:
            yield Part(STATES, digests[-1])
        for window in self._windows.pools:
            first = self._windows.first_page(window, len(digests) * self._windows.page_size)
            yield from (Part(window_group(window), digest) for digest in digests[first:])
        yield from (Part(PAGES, digest) for digest in digests)
