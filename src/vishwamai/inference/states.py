"""Which slots of the pools of states belong to whom, and a prefix cache of states, which is one with that of the pages.

A layer with a state cannot go on after a prefix from the prefix's pages alone: it needs the state at the prefix's end.
States are kept at some ends of full pages (`Scheduler` chooses them), by the digest of the last page. A step reads a
state from one slot and writes it to another where the first is kept, so keeping one copies nothing.

Pages and states are evicted as one: a page is worth keeping only while a kept state needs it, and the pages that the
least used state alone needs become blank with it. For that the kept states are the leaves and joints of a tree of
pages, as in SGLang's radix tree (Zheng et al., 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

from vishwamai.inference.limits import Limits
from vishwamai.inference.pages import PagePool


class StatePool:
    """The slots of one pool of states, by index, and what they have to do with pages.

    Args:
      num_states: int, number of slots.
      pages: the pages of the same sequences.

    Attributes:
      slots: a pool of pages whose pages are the slots: each has one digest, that of the state's last page.
      reused: int, sequences that went on from a kept state.
      evicted: int, kept states that gave way to others or to pages.

    >>> from vishwamai.inference.pages import ROOT, chain
    >>> pages = PagePool(4)
    >>> states, digest = StatePool(2, pages), chain(ROOT, [5, 6])
    >>> _, slot = states.advance(None)
    >>> states.keep(slot, [digest], pages.take(1))
    True
    >>> states.usable([digest, chain(digest, [7, 8])], 2)
    1
    """

    def __init__(self, num_states: int, pages: PagePool):
        self.num_states, self._pages = num_states, pages
        self.slots = PagePool(num_states, pages.shared)
        self._parents: dict[bytes, bytes | None] = {}  # of each page that a kept state needs: the page before it
        self._needs: dict[bytes, int] = {}  # of each page: its kept state, and the pages after it that are needed
        self.reused = self.evicted = 0

    @property
    def available(self) -> int:
        """Slots that nobody holds."""
        return self.slots.available

    @property
    def idle(self) -> int:
        """Slots of kept states that nobody holds."""
        return self.slots.idle

    def usable(self, digests: Sequence[bytes], most: int) -> int:
        """How many leading pages of a prefix, at most `most`, end with a kept state."""
        return next((count for count in range(most, 0, -1) if self.slots.knows(digests[count - 1])), 0)  # the longest

    def marks(
        self, digests: Sequence[bytes], length: int, cached: int, limits: Limits, shared: int = 0
    ) -> tuple[int, ...]:
        """Lengths of a prompt, in rising order, after which its states are to be kept: its last full page, for the next
        turn of the conversation; the last full page of its shared beginning; the page up to which an earlier prompt is
        the same, for the next one that begins so; and every `limits.state_pages` pages.

        Args:
          digests: digests of the full pages of the prompt.
          length: tokens of the prompt.
          cached: pages of the prompt that are computed.
          limits: sizes of pages.
          shared: tokens with which other prompts are expected to begin.
        """
        if not self._pages.shared:
            return ()
        last = (length - 1) // limits.page_size  # the last token is computed in any case: its logits are needed
        common = len(self._pages.cached(digests[:last]))
        counts = {last, common, min(shared // limits.page_size, last)}
        counts |= {*range(limits.state_pages, last, limits.state_pages)}
        return tuple(limits.page_size * count for count in sorted(counts) if count > cached)

    def share(self, digests: Sequence[bytes]) -> int | None:
        """The slot of the kept state after those pages, which has one holder more; None for no pages."""
        if not digests:
            return None
        self.reused += 1
        return self.slots.share(digests[-1:])[0]

    def advance(self, slot: int | None, checkpoint: bool = False) -> tuple[int, int]:
        """The slots from which a sequence's next step reads its state, and to which it writes it: of those the sequence
        holds the second from then on. A step reads all states before it writes any, so the first may be anyone's.

        Args:
          slot: the slot that the sequence holds; None at its start.
          checkpoint: flag, the sequence holds the first from then on, too. There must be an available slot.
        """
        if checkpoint:
            # the kept state is read, and must not be written: the next one goes to a slot of its own
            free = self._take()
            assert slot is not None and free is not None
            return slot, free
        if slot is not None and not self.slots.published(slot) and self.slots.holders(slot) == 1:  # written in place
            return slot, slot
        free = self._take()
        if free is None:  # every slot is held, this one by nobody else: fewer sequences run than there are slots
            assert slot is not None and self.slots.holders(slot) == 1
            self._drop(self.slots.published(slot))
            self.slots.unpublish(slot)
            return slot, slot
        if slot is None:
            return free, free
        self.slots.release([slot])
        return slot, free

    def keep(self, slot: int, digests: Sequence[bytes], pages: Sequence[int]) -> bool:
        """Keeps the state of a held slot after full pages of those digests; False where one is kept already."""
        if not self.slots.shared or self.slots.knows(digests[-1]) or self.slots.published(slot):
            return False
        self.slots.publish(slot, digests[-1])
        for place in range(len(digests) - 1, -1, -1):
            digest = digests[place]
            # counts references from later pages, too: a joint of the tree outlives one leaf
            self._needs[digest] = self._needs.get(digest, 0) + 1
            if digest in self._parents:  # the pages before it are counted by an earlier state
                break
            # the way back to the root, along which `_drop` counts down
            self._parents[digest] = digests[place - 1] if place else None
            self._pages.publish(pages[place], digest)
        return True

    def restore(self, digests: Sequence[bytes], pages: Sequence[int]) -> int | None:
        """A slot for the state after full pages, which comes back from elsewhere with them; None where all are held.

        Args:
          digests: digests of the pages.
          pages: pages, which are held and known by those digests.
        """
        slot = self._take()
        if slot is not None:
            self.keep(slot, digests, pages)
            self.slots.release([slot])
        return slot

    def forget(self, digest: bytes, evicts: bool = False) -> None:
        """Keeps a state no longer, unless a sequence is about to read it; `evicts`: it gives way to others."""
        if self.slots.drop(digest, evicts):
            self._drop(digest, evicts)

    def forget_all(self) -> None:
        """Keeps no state that nobody is about to read."""
        while (digest := self.slots.oldest) is not None:
            self.forget(digest)

    def release(self, slot: int | None, digests: Sequence[bytes] = ()) -> None:
        """A sequence gives up its state and, just before, pages of those digests: the ones that no kept state needs are
        blank.
        """
        if slot is not None:
            self.slots.release([slot])
        for digest in reversed(digests):  # leaves first, as `PagePool.release` orders them
            if digest not in self._needs:
                self._pages.drop(digest)

    def make_pages(self, count: int) -> None:
        """Makes so many pages blank, as far as kept states hold idle ones; the least used go first."""
        while self._pages.blank < count and self._evict():  # a state may free no page: others may need all of its pages
            pass

    def _take(self) -> int | None:
        if self.slots.blank == 0:
            self._evict()
        slots = self.slots.take(1)
        return None if slots is None else slots[0]

    def _evict(self) -> bool:
        digest = self.slots.oldest
        if digest is None:
            return False
        self.evicted += 1
        self.forget(digest, evicts=True)
        return True

    def _drop(self, digest: bytes | None, evicts: bool = False) -> None:
        """A state is kept no longer: neither are the pages that it alone needed."""
        while digest is not None:
            self._needs[digest] -= 1
            if self._needs[digest]:  # another state goes through this page
                break
            del self._needs[digest]
            self._pages.drop(digest, evicts)
            digest = self._parents.pop(digest)
