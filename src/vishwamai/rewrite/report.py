"""What became of a program: `XlaReport`."""

from __future__ import annotations

import dataclasses

from jax.extend.core import ClosedJaxpr

from vishwamai.core.explain import CallExplanation


@dataclasses.dataclass(frozen=True)
class Finding:
    """One place of a program where an operation was found, or nearly.

    Attributes:
      operation: its public name, or several where it could be either.
      where: the line that wrote it, and the inner programs that it is in.
      replaced: the program calls the operation there now.
      reason: the recognised operation, or the reason why the place is unchanged.
      plan: which implementation runs there and why the others do not; None where nothing was replaced.
    """

    operation: str
    where: str
    replaced: bool
    reason: str
    plan: CallExplanation | None = dataclasses.field(default=None, repr=False)

    def __str__(self) -> str:
        runs = f" -> {self.plan.runs}" if self.plan is not None else ""
        return f"{'replaced' if self.replaced else 'kept'}  {self.operation}{runs} at {self.where}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class XlaReport:
    """A program before and after `optimize_xla_compilation`. Printing it gives a line for each finding.

    Attributes:
      program: the rewritten program.
      findings: operations found, replaced or not.
      dead: equations removed that nothing read. repeated: equations of a value that an earlier one has. casts: casts
        that undid a widening one. recognised: equations that a call of an operation made needless.
      before: equations of the program as given, inner programs included. after: of the rewritten one; the inside of
        our operations is not counted.
    """

    program: ClosedJaxpr = dataclasses.field(repr=False)
    findings: tuple[Finding, ...]
    dead: int
    repeated: int
    casts: int
    recognised: int
    before: int
    after: int

    def __str__(self) -> str:
        head = (
            f"{self.before} equations, {self.after} after: {self.dead} dead, {self.repeated} repeated, {self.casts} "
            f"casts, {self.recognised} replaced by calls"
        )
        return "\n".join([head, *map(str, self.findings)])
