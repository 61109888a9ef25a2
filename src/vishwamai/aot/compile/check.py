"""Does a function compile for a chip, does it fit, and if not, what to change: an answer in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from vishwamai.aot.compile.compiled import Compiled, compile_for
from vishwamai.aot.compile.diagnose import CompilerProblem, find_problem
from vishwamai.core.arguments import checked
from vishwamai.core.errors import KernelError, VishwamaiError
from vishwamai.core.hardware import TpuChip
from vishwamai.core.numbers import human
from vishwamai.core.target import Target

__all__ = ["Report", "check"]


@dataclasses.dataclass(frozen=True)
class Report:
    """What `check` found.

    Attributes:
        chip: the chip asked about; `target`: as it was asked.
        program: the compiled program, None where the compiler rejected.
        problems: reasons against compilation, each with its fix.
    """

    chip: TpuChip
    target: str
    program: Compiled | None
    problems: tuple[CompilerProblem, ...]

    @property
    def compiles(self) -> bool:
        """Whether the compiler made a program."""
        return self.program is not None

    @property
    def fits(self) -> bool:
        """Whether it compiles and its memory fits the device."""
        return self.program is not None and not self.problems

    def __str__(self) -> str:
        lines = [
            (
                f"{self.target}: "
                f"{'compiles and fits' if self.fits else 'does not fit' if self.compiles else 'does not compile'}"
            )
        ]
        if self.program is not None:
            lines.append(f"  memory   {self.program.memory}")
            try:
                kernels = self.program.kernels
            except KernelError as error:
                kernels = ()
                lines.append(f"  VMEM     {error}")
            if kernels:
                most, scoped = human(self.chip.vmem_bytes), human(self.chip.vmem_scoped_bytes)
                lines.append(f"  VMEM     of {most} per core, {scoped} unless a kernel asks:")
            for kernel in sorted(kernels, key=lambda k: -k.vmem)[:10]:
                lines.append(f"           {human(kernel.vmem):>10}  {kernel.name}{'' if kernel.pallas else '  (XLA)'}")
        for problem in self.problems:
            lines.append("  problem  " + str(problem).replace("\n", "\n           "))
        return "\n".join(lines)


@checked
def check(fn: Callable[..., object], *args: object, target: str = "v5e", **kwargs: Any) -> Report:
    """Compiles `fn(*args, **kwargs)` for `target` and says in words whether it fits.

    A crash of libtpu, a failed check of its C++ code, ends the process that calls this. The command `vishwamai check`
    compiles in a process of its own, and says that the compiler crashed.

    Args: as `vishwamai.aot.compile_for`.

    Returns:
        A `Report`; `print` it. A program that the compiler rejects is a report too, not an exception.

    Raises:
        DeviceError: libtpu is missing or the target unknown.
        ShapeError, and whatever else `fn` raises while it is traced: those are not about the chip.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> big = jax.ShapeDtypeStruct((200_000, 200_000), jnp.float32)
        >>> print(check(lambda a: a @ a, big, target="v5e"))  # doctest: +SKIP
        v5e: does not compile
          problem  the program needs 298.0 GiB of HBM, but one v5e device has 15.8 GiB.
        ...
    """
    chip = Target.parse_chip(target)
    try:
        program = compile_for(fn, *args, target=target, **kwargs)
    except VishwamaiError as error:
        problem = find_problem(error)
        if problem is None:
            raise
        return Report(chip, target, None, (problem,))
    problems = []
    memory = program.memory
    if not memory.fits:
        problems.append(
            CompilerProblem(
                kind="hbm",
                summary=f"arguments, outputs and temporaries together need {human(memory.total)}, "
                f"but one device has {human(memory.limit)}.",
                fix="shard over more chips, donate arguments that are overwritten (jax.jit(..., donate_argnums=...)), "
                "or use a narrower dtype.",
                used=memory.total,
                limit=memory.limit,
            )
        )
    return Report(chip, target, program, tuple(problems))
