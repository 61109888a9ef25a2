"""Which pages of the key and value pools belong to whom: reference counts, and a prefix cache, oldest out first.

A page is *blank* (holds nothing worth keeping), *held* (by one sequence or, if its prefix is shared, by several) or
*idle* (held by none, but its keys and values may serve a later prompt that begins with the same tokens). A full page is
known by a digest of its tokens and of all tokens before it. Nothing here touches a device. Kwon et al., "Efficient
Memory Management for Large Language Model Serving with PagedAttention" (2023); the chain of digests as in vLLM.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

ROOT = b""
"""The digest before the first page."""

TURNED = b"turned"
"""The same for sequences past the length where keys are rotated otherwise."""


def chain(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a page: of its tokens and, through the digest of the page before, of all earlier ones.

    >>> chain(ROOT, [1, 2]) == chain(ROOT, [1, 2]), chain(chain(ROOT, [1]), [2]) == chain(chain(ROOT, [0]), [2])
    (True, False)
    """
    # 16 bytes: a collision would serve another prompt's keys
    return hashlib.blake2b(previous + array("q", tokens).tobytes(), digest_size=16).digest()


class PagePool:
    """The pages of one pool, by index.

    Args:
      num_pages: how many there are.
      shared: bool, True where later prompts may reuse the prefixes of earlier ones (`publish`).

    Attributes:
      evicted: pages whose prefixes gave way to others, each with its digest, the first one first; None where nobody
        keeps them elsewhere (`page_tiers`).

    >>> pool = PagePool(2)
    >>> held = pool.take(2)
    >>> pool.publish(held[0], chain(ROOT, [5, 6])), pool.release(held)
    (None, None)
    >>> pool.share([chain(ROOT, [5, 6]), b"never seen"]) == held[:1], pool.available
    (True, 1)
    """

    def __init__(self, num_pages: int, shared: bool = True):
        self.num_pages, self.shared = num_pages, shared
        self._holders = [0] * num_pages  # number of sequences that hold each page
        self._blank = list(reversed(range(num_pages)))  # a stack: page 0 is taken first
        self._idle: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self._page_of: dict[bytes, int] = {}  # published pages: inverse of `_digest_of`
        self._digest_of: dict[int, bytes] = {}
        self.evicted: list[tuple[int, bytes]] | None = None

    @property
    def available(self) -> int:
        """How many pages `take` can give: blank and idle ones."""
        return len(self._blank) + len(self._idle)

    @property
    def idle(self) -> int:
        """How many pages nobody holds that still have a prefix."""
        return len(self._idle)

    @property
    def blank(self) -> int:
        """How many pages hold nothing worth keeping."""
        return len(self._blank)

    @property
    def oldest(self) -> bytes | None:
        """The digest of the page that has been idle for longest; None where none is."""
        return next((self._digest_of[page] for page in self._idle), None)

    def idle_pages(self) -> list[tuple[int, bytes]]:
        """The pages that nobody holds and that still have a prefix, with their digests; the longest unused first."""
        return [(page, self._digest_of[page]) for page in self._idle]

    def holders(self, page: int) -> int:
        """How many sequences hold `page`."""
        return self._holders[page]

    def take(self, count: int) -> list[int] | None:
        """`count` pages for one holder, blank ones first, then the longest unused; None if there are fewer."""
        if count > self.available:  # all or none: a sequence with a part of its pages could not run
            return None
        pages = []
        for _ in range(count):
            if self._blank:
                page = self._blank.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._record(page)
                self.unpublish(page)  # its keys are about to be overwritten
            self._holders[page] = 1
            pages.append(page)
        return pages

    def knows(self, digest: bytes) -> bool:
        """Whether a page is known by that digest."""
        return digest in self._page_of

    def cached(self, digests: Iterable[bytes]) -> list[int]:
        """The pages of the longest known prefix of a chain of digests, without taking hold of them."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def share(self, digests: Iterable[bytes]) -> list[int]:
        """`cached`, with one more holder for each page."""
        pages = self.cached(digests)
        for page in pages:
            self._idle.pop(page, None)  # a held page cannot be evicted
            self._holders[page] += 1
        return pages

    def publish(self, page: int, digest: bytes) -> None:
        """Makes a held page, now full, known by its digest; where another page has that digest, nothing changes."""
        # Two sequences may compute the same page at once: the first one stays known, the other becomes blank at its
        # end.
        if self.shared and page not in self._digest_of and digest not in self._page_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def published(self, page: int) -> bytes | None:
        """The digest by which a page is known, or None."""
        return self._digest_of.get(page)

    def unpublish(self, page: int) -> None:
        """Makes a held page known by no digest."""
        del self._page_of[self._digest_of.pop(page)]

    def drop(self, digest: bytes, evicts: bool = False) -> bool:
        """Makes the page of that digest blank, where it is idle; `evicts`: it gives way to others."""
        page = self._page_of.get(digest)
        if page not in self._idle:  # unknown, or held by a sequence that still reads it
            return False
        del self._idle[page]
        if evicts:
            self._record(page)
        self.unpublish(page)
        self._blank.append(page)
        return True

    def _record(self, page: int) -> None:
        if self.evicted is not None:
            self.evicted.append((page, self._digest_of[page]))

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each page; a sequence's last pages become the oldest, for a prefix ends without them."""
        # the last page first: it becomes the oldest, and is evicted before those that it follows
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was released more often than it was taken"
            if self._holders[page] == 0:
                if page in self._digest_of:
                    self._idle[page] = None
                else:
                    self._blank.append(page)

    def forget(self) -> None:
        """Makes every idle page blank: no later prompt finds an earlier one's prefix."""
        while (digest := self.oldest) is not None:
            self.drop(digest)
