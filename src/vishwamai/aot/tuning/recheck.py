"""Estimates the entries of tuning tables again, so that a kernel or a compiler that changed since leaves none behind
that is silently slow.
"""

from __future__ import annotations

import dataclasses

from vishwamai.aot.tuning import tables
from vishwamai.aot.tuning.tuner import MARGIN, Search
from vishwamai.core import tuning
from vishwamai.core.errors import KernelError

__all__ = ["Recheck", "recheck"]

STALE = 1.10
"""An entry whose time is off by more than this factor, or to which the heuristic does not come so near, has to be
searched again.
"""


@dataclasses.dataclass(frozen=True)
class Recheck:
    """What an entry of a table is worth to the kernels as they are now.

    Attributes:
        entry: checked entry of the table.
        seconds, heuristic_seconds: estimates of its config and of the heuristic's, made again.
    """

    entry: tables.TableEntry
    seconds: float
    heuristic_seconds: float

    @property
    def complaint(self) -> str | None:
        """Why the entry should be searched again, in words; None if it stands."""
        now, then = self.seconds * 1e6, self.entry.evidence["estimate_us"]
        if max(now, then) > STALE * min(now, then):
            return (
                f"{self.entry}: {now:.1f} us now, {then:.1f} us when it was searched; the kernel or the compiler "
                "changed."
            )
        if self.seconds > self.heuristic_seconds / MARGIN:
            return f"{self.entry}: {now:.1f} us, and the heuristic takes {self.heuristic_seconds * 1e6:.1f} us."
        if self.heuristic_seconds > STALE * self.seconds:
            return (
                f"{self.entry}: the heuristic takes {self.heuristic_seconds * 1e6:.1f} us now, {now:.1f} us are "
                "possible."
            )
        return None


def recheck(entry: tables.TableEntry, workers: int = 1) -> Recheck:
    """Estimates an entry's config and the heuristic's again, by the kernels and the compiler that are installed.

    Raises:
        DeviceError: libtpu is missing.
        KernelError: the case is gone, asks for another key or implementation, or the config does not fit or compile any
          more.
    """
    search = Search(entry.case, entry.target, budget=2, workers=workers)
    served = search.plan.spec.tuning_key(), search.choice.implementation.name
    if served != (entry.key, entry.implementation):
        raise KernelError(f"{entry}: the case now asks for {served[0]!r} of {served[1]}; delete the entry.")
    config = tuning.as_config(entry.op, entry.target, entry.key, entry.evidence, type(search.choice.config))
    configs = list(dict.fromkeys([config, search.choice.config]))
    trials = search.evaluate(configs, bool(entry.case.differentiable))
    if len(trials) != len(configs):
        raise KernelError(f"{entry} does not compile any more: {'; '.join(search.rejected)}")
    return Recheck(entry, trials[0].seconds, trials[-1].seconds)
