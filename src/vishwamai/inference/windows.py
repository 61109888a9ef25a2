"""The pages of layers with a window: a running sequence holds those that its next tokens see, and no others.

A page that no later token sees is released at the next step. Like any page it may stay *idle* (`pages`): a later prompt
that begins with the same tokens takes it up again. For that, each window needs the pages of its last tokens before the
place where the prompt goes on, and no earlier ones, as in vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from vishwamai.inference.pages import PagePool


@dataclasses.dataclass
class Span:
    """Pages number `first`, `first + 1`, ... of one sequence."""

    first: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)


class WindowPages:
    """A pool of pages for each window, and which of them a sequence needs.

    A pool has a ring for each sequence that may run, so `advance` always finds pages: none is preempted for a window.

    Args:
      rings: most pages that a sequence holds at once, by window (`vishwamai.models.pages.window_rings`).
      sequences: most sequences that hold pages at once.
      page_size: tokens of a page.
      shared: argument of `PagePool`.

    >>> windows = WindowPages({3: 3}, sequences=1, page_size=2)
    >>> spans = windows.share([])
    >>> windows.advance(spans, start=0, end=6), spans[3].first, len(spans[3].pages)
    (None, 0, 3)
    >>> windows.advance(spans, start=6, end=7), spans[3].first, len(spans[3].pages)  # token 6 sees 4 and 5
    (None, 2, 2)
    """

    def __init__(self, rings: Mapping[int, int], sequences: int, page_size: int, shared: bool = True):
        self.page_size = page_size
        self.pools = {window: PagePool(sequences * ring, shared) for window, ring in rings.items()}

    def usable(self, digests: Sequence[bytes]) -> int:
        """How many leading pages of a known prefix a sequence can go on after: most for which every window is known."""
        longest, runs = 0, dict.fromkeys(self.pools, 0)
        for count, digest in enumerate(digests, 1):
            for window, pool in self.pools.items():
                runs[window] = runs[window] + 1 if pool.knows(digest) else 0  # known pages in a row, up to this one
            # Each window sees the pages from `first_page` on: all of those must be known.
            if all(run >= count - self.first_page(window, count * self.page_size) for window, run in runs.items()):
                longest = count
        return longest

    def share(self, digests: Sequence[bytes]) -> dict[int, Span]:
        """What a sequence holds, by window, that goes on after a prefix of `usable` pages."""
        firsts = {window: self.first_page(window, len(digests) * self.page_size) for window in self.pools}
        return {window: Span(first, self.pools[window].share(digests[first:])) for window, first in firsts.items()}

    def advance(self, spans: Mapping[int, Span], start: int, end: int) -> None:
        """Releases the pages that tokens from `start` on do not see, and takes those of tokens before `end`."""
        for window, span in spans.items():
            pool, first = self.pools[window], self.first_page(window, start)
            if first > span.first:  # pages behind the window: no token from `start` on sees them
                pool.release(span.pages[: first - span.first])
                del span.pages[: first - span.first]
                span.first = first
            # Up to the page of token end - 1.
            more = pool.take(max(0, -(-end // self.page_size) - first - len(span.pages)))
            assert more is not None, f"a ring of window {window} is too short for tokens {start} to {end}"
            span.pages += more  # never None: the pool has a ring for each sequence that runs

    def publish(self, spans: Mapping[int, Span], page: int, digest: bytes) -> None:
        """Makes page number `page` of a sequence known, where it still holds that."""
        for window, span in spans.items():
            if span.first <= page < span.first + len(span.pages):
                self.pools[window].publish(span.pages[page - span.first], digest)

    def release(self, spans: Mapping[int, Span]) -> None:
        """Releases all that a sequence holds."""
        for window, span in spans.items():
            self.pools[window].release(span.pages)

    def first_page(self, window: int, position: int) -> int:
        """The first page that the token at `position` sees."""
        return max(0, position - window + 1) // self.page_size
