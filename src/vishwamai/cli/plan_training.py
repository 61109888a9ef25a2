"""What `vishwamai plan` says of a training step: the table of candidates, and the same as plain values."""

from __future__ import annotations

import textwrap

from vishwamai.core.figures import Estimate
from vishwamai.planning.memory.analytic import described
from vishwamai.planning.search.candidates import Candidate, front
from vishwamai.planning.search.plan import Plan
from vishwamai.planning.time.published import PublishedRange, published_range

_SHOWN = 12
_MESH = {"data": 4, "fsdp": 4, "expert": 3, "sequence": 3, "tensor": 3}
"""Columns of the mesh's sizes, and how wide they are."""


def table(plan: Plan, price: float | None = None) -> list[str]:
    """Rows of at most 80 columns; `price`: USD for a chip and hour."""
    best = front(plan.candidates)
    lines = [
        f"{plan.target}: HBM of one device in GiB, of {plan.limit / 2**30:.2f}{_stages(plan)}",
        "  data fsdp exp seq ten remat      micro analytic  probe verified      ms",
    ]
    for index, entry in enumerate(plan.candidates[:_SHOWN]):
        mark = "fits" if entry is plan.chosen else "error" if entry.declined else "" if entry.fits else "large"
        mesh = " ".join(f"{vars(entry.config.mesh)[axis]:>{width}}" for axis, width in _MESH.items())
        milliseconds = "-" if entry.step is None else f"{entry.step.value * 1e3:.4g}"
        lines.append(
            f"{'*' if index in best else ' '}{_moments(entry)}{mesh} {entry.config.remat[:10]:<10} "
            f"{entry.config.microbatches:>5} {_gib(entry.analytic):>8} {_gib(entry.probe):>6} "
            f"{_gib(entry.verified):>8} {milliseconds:>7} {mark}".rstrip()
        )
    if plan.count > _SHOWN:
        lines.append(f"  ... and {plan.count - _SHOWN} more")
    if len(plan.candidates) > 1:
        lines.append("  * by formulas, no other that fits takes less memory and less time")
    timed = [candidate for candidate in plan.candidates[:_SHOWN] if candidate.step is not None]
    for candidate in timed[:1]:
        lines += _wrapped(f"ms: {published(candidate).comparison(plan.target)}")
    if any(_moments(entry).strip() for entry in plan.candidates[:_SHOWN]):
        lines.append("  b, 8: the optimizer's moments in bfloat16, in 8 bits, which changes numbers")
    lines.append(
        f"  chosen: {plan.chosen.name}" if plan.chosen is not None else "  nothing that was tried fits this target"
    )
    lines.append(
        "  interrupted: other candidates were not tried"
        if plan.interrupted
        else f"  too large by formulas: {plan.pruned}; not probed: {plan.unprobed}"
    )
    lines += [f"  {entry.name}: {entry.declined}" for entry in plan.candidates if entry.declined]
    return lines + ([] if plan.chosen is None else _time(plan.chosen, price))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 80, initial_indent="  ", subsequent_indent="    ")


def _stages(plan: Plan) -> str:
    """The stages, which all candidates have."""
    config = plan.candidates[0].config
    size, schedule = config.mesh.pipeline, config.pipeline.schedule
    return f"; mesh.pipeline={size}, {schedule}" if size > 1 else ""


def _moments(candidate: Candidate) -> str:
    """A letter for the optimizer's moments, where they are not float32."""
    return {"bfloat16": "b", "int8": "8"}.get(candidate.config.optimizer.moment_dtype, " ")


def _time(chosen: Candidate, price: float | None) -> list[str]:
    """What is known of the time of the chosen one."""
    speed = chosen.speed
    if speed is None:
        return []
    lines = [
        f"  step {speed.step}: {speed.tokens_per_chip.value:.0f} tokens/s a chip",
        *_wrapped(published(chosen).describe(speed.step, chosen.target)),
        f"  MFU {speed.mfu.value:.1%} of {speed.peak / 1e12:.0f} TFLOP/s a chip, its peak of {speed.dtype}",
    ]
    if price is not None:
        lines.append(f"  {speed.cost(price).value:.4g} USD per million tokens, at {price:g} USD a chip-hour")
    if chosen.time is not None:
        lines += [f"  {line}" for line in str(chosen.time).splitlines()[1:]]
    return lines


def published(candidate: Candidate) -> PublishedRange:
    """What published steps took of estimates for its chip and kind of model."""
    return published_range(candidate.target, described(candidate.config).experts is not None)


def as_dict(plan: Plan, price: float | None = None) -> dict[str, object]:
    """The plan as plain values, for JSON."""
    best = front(plan.candidates)
    candidates = [_candidate(candidate, index in best, price) for index, candidate in enumerate(plan.candidates)]
    chosen = None if plan.chosen is None else candidates[plan.candidates.index(plan.chosen)]
    return {
        "target": plan.target,
        "limit_bytes": plan.limit,
        "chosen": chosen,
        "count": plan.count,
        "too_large_by_formulas": plan.pruned,
        "interrupted": plan.interrupted,
        "candidates": candidates,
    }


def _candidate(candidate: Candidate, on_front: bool, price: float | None) -> dict[str, object]:
    speed = candidate.speed
    values = {
        "mesh": vars(candidate.config.mesh),
        "remat": candidate.config.remat,
        "microbatches": candidate.config.microbatches,
        "moment_dtype": candidate.config.optimizer.moment_dtype,
        "analytic_bytes": _bytes(candidate.analytic),
        "probe_bytes": _bytes(candidate.probe),
        "verified_bytes": _bytes(candidate.verified),
        "step_seconds": None if speed is None else speed.step.value,
        "step_level": None if speed is None else speed.step.level,
        "step_seconds_by_published_steps": None if speed is None else published(candidate).of(speed.step),
        "tokens_per_second_per_chip": None if speed is None else speed.tokens_per_chip.value,
        "mfu": None if speed is None else speed.mfu.value,
        "usd_per_million_tokens": None if speed is None or price is None else speed.cost(price).value,
        "on_front": on_front,
        "fits": candidate.fits,
        "declined": candidate.declined,
    }
    if candidate.time is not None:
        values["step_parts"] = {name: part.value for name, part in candidate.time.parts.items()}
        values["step_missing"] = list(candidate.time.missing)
    return values


def _gib(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.value / 2**30:.2f}"


def _bytes(estimate: Estimate | None) -> int | None:
    return None if estimate is None else int(estimate.value)
