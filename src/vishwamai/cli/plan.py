"""Says whether a training step, a served model or a function fits TPUs you do not have, and what makes it fit.

vishwamai plan examples/train_stdlib.yaml --target v5e:2x2 \\
    --search --price 1.2 --report plan.html
vishwamai plan models/Llama-3-8B --target v6e --batch 16 --length 4096
vishwamai plan mymodel.layers:block --target v5e --args 'bf16[8,4096]'

CONFIG is a training configuration (key=value changes it), a directory of a Hugging Face model, which is served, or a
function. Memory is found at three levels: analytic (formulas), probe (the compiler's total before it compiles) and
verified (the compiled program). The time of a step is by formulas, and of the chosen one by the compiled program.
docs/planning.md has their errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vishwamai import reports
from vishwamai.cli import function, model, model_options, options, output
from vishwamai.cli.console import tell
from vishwamai.cli.function import CommandError
from vishwamai.cli.progress import Countdown, Say
from vishwamai.core import logs
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.installing import install_line
from vishwamai.core.interrupt import interrupt_taken
from vishwamai.core.target import Target

if TYPE_CHECKING:
    from vishwamai.aot.compile.traced import Argument, Program
    from vishwamai.core.figures import Estimate
    from vishwamai.planning.memory.analytic import Breakdown
    from vishwamai.planning.memory.compiler import Compiler, ProgramMemory
    from vishwamai.planning.search.candidates import Candidate
    from vishwamai.planning.search.diagnosis import Diagnosis
    from vishwamai.planning.time.program_time import StepTime

NEEDED = {
    "all": ("rich", "flatbuffers"),
    "training": ("optax", "flax", "pydantic", "yaml"),
    "serving": ("flax",),
    "function": (),
}
"""Packages by what is planned."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help="CONFIG.yaml, a model's directory or ORG/NAME[@REVISION] of the Hub, or MODULE:FUNCTION",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of a training configuration")
    options.add_target(parser, '"v5e", "v5e:4x4", ...', metavar="SLICE")
    parser.add_argument("--search", action="store_true", help="try every mesh, remat and number of microbatches")
    parser.add_argument("--no-verify", action="store_true", help="do not compile what was chosen")
    model_options.add_optimization(parser)
    parser.add_argument("--no-time", action="store_true", help="find memory alone, and no time of a step")
    parser.add_argument("--price", type=float, metavar="USD", help="of a chip and hour: prints the cost of tokens")
    parser.add_argument(
        "--report",
        metavar="HTML",
        type=Path,
        action=output.File,
        help="write memory against time of all candidates as a page",
    )
    options.add_json(parser, "print JSON in place of the tables, or write it to PATH next to them")
    parser.add_argument("--args", metavar="ARGS", help="a function's arguments, as for `vishwamai check`")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="sequences that a model serves at once")
    parser.add_argument("--length", type=int, metavar="N", help="tokens of a sequence (default: at most 4096)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of a served model")


class Planned(NamedTuple):
    """What a plan prints and writes, and whether all of it fits; `status`: the exit status of an interrupted one."""

    json: dict[str, object]
    text: str
    fits: bool
    status: int | None = None


def run(arguments: argparse.Namespace) -> int:
    from vishwamai.aot.compile.libtpu import local_devices

    if not arguments.target:
        raise CommandError("plan needs a target: --target v5e:4x4.")
    targets = [Target.parse_tpu(target).name or target for target in arguments.target]
    kind = _kind(arguments)
    run_kind = {"training": _training, "serving": _serving, "function": _function}[kind]
    local_devices()  # jax looks for a TPU on its first use, and libtpu complains where there is none
    with Countdown() as progress:
        progress.say(f"{kind} {arguments.config} for {', '.join(targets)}")
        result = run_kind(arguments, targets, progress.say)
    if arguments.json is not None:
        options.write_json({"config": arguments.config, "kind": kind, **result.json}, arguments.json)
    if arguments.json != options.STDOUT:
        tell(result.text)
    if result.status is not None:
        logs.report(
            "plan",
            "interrupted; these are the results so far. The compiler's answers are kept, and the same command goes on "
            "from them.",
        )
        return result.status
    return 0 if result.fits else 1


def _kind(arguments: argparse.Namespace) -> str:
    """What CONFIG is; the options must suit it.

    Raises:
      CommandError: it is nothing that can be planned, or a package is missing.
    """
    from vishwamai.models.hub import HubModel

    text, path = arguments.config, Path(arguments.config)
    if path.is_dir() or HubModel.parse(text) is not None:
        kind = "serving"
    elif path.suffix in (".yaml", ".yml"):
        kind = "training"
    elif ":" in text:
        kind = "function"
    else:
        raise CommandError(
            f"{text!r} is not a CONFIG: pass a training configuration (.yaml), a directory with config.json, ORG/NAME "
            "of the Hub, or MODULE:FUNCTION."
        )
    if arguments.overrides and kind != "training":
        raise CommandError(f"{arguments.overrides[0]!r} changes a training configuration, but {text} is another thing.")
    if arguments.search and kind != "training":
        raise CommandError(f"--search is for training configurations; {text} has nothing to search.")
    if arguments.args is not None and kind != "function":
        raise CommandError(f"--args is for functions; {text} has no arguments.")
    if arguments.report is not None and kind != "training":
        raise CommandError(f"--report is for training configurations; {text} has no candidates to show.")
    if arguments.report is not None and importlib.util.find_spec(reports.NEEDED) is None:
        raise CommandError(f"{reports.install_hint()}.")
    if arguments.price is not None and not 0 < arguments.price < float("inf"):
        raise CommandError(f"--price is {arguments.price}; pass USD of a chip and hour, such as 1.2.")
    missing = [name for name in (*NEEDED["all"], *NEEDED[kind]) if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"plan needs {', '.join(missing)}: {install_line('aot')}.")
    return kind


def _bytes(estimate: Estimate | None) -> int | None:
    return None if estimate is None else int(estimate.value)


def _training(arguments: argparse.Namespace, targets: list[str], say: Say) -> Planned:
    from vishwamai.cli.plan_training import as_dict, table
    from vishwamai.core.target import devices_of
    from vishwamai.planning.memory.compiler import Compiler
    from vishwamai.planning.search.advice import explain_training
    from vishwamai.planning.search.plan import NOT_TRIED, Plan, plan_of_tried, plan_training
    from vishwamai.training.config_file import read_config

    keys = model_options.optimization(arguments)
    overrides = [f"optimization.{name}={json.dumps(value)}" for name, value in keys.explicit.items()]
    config = read_config(arguments.config, [*arguments.overrides, *overrides])
    for target in targets:
        model.say_optimization(config.optimization, "training", devices_of(target))
    plans: list[Plan] = []
    tried: list[Candidate] = []
    reasons, status = [], None
    try:
        with Compiler() as compiler:
            for target in targets:
                tried.clear()
                plans.append(
                    plan_training(
                        config,
                        target,
                        search=arguments.search,
                        verify=not arguments.no_verify,
                        time=not arguments.no_time,
                        compiler=compiler,
                        report=_of_all(say, len(targets) - len(plans)),
                        on_tried=tried.append,
                    )
                )
            reasons = [
                explain_training(min(plan.candidates, key=_needs).config, plan.target, compiler, say)
                for plan in plans
                if plan.chosen is None
            ]
    except KeyboardInterrupt as stop:
        status = interrupt_taken(stop)
        if tried and tried[0].target not in {plan.target for plan in plans}:
            plans.append(plan_of_tried(tried))
        if not plans:
            raise
    not_tried = NOT_TRIED if arguments.search else ("other settings than the configuration's: pass --search",)
    lines = [line for plan in plans for line in table(plan, arguments.price)]
    lines += ["not tried:", *(f"  {text}" for text in not_tried), *map(str, reasons)]
    if arguments.report is not None:
        from vishwamai.planning.search.page import write_page

        write_page(plans, arguments.report, arguments.price)
        say(f"{arguments.report} has the page")
    fits = all(plan.chosen is not None for plan in plans)
    result = {
        "plans": [as_dict(plan, arguments.price) for plan in plans],
        "not_tried": list(not_tried),
        "too_large": [_diagnosis(reason) for reason in reasons],
    }
    return Planned(result, "\n".join(lines), fits, status)


def _of_all(say: Say, targets: int) -> Say:
    """Reports of the first of some targets, with the time that is left for all of them: each takes as long."""
    start = time.monotonic()

    def report(text: str, left: float | None = None) -> None:
        say(text, None if left is None else left + (targets - 1) * (time.monotonic() - start + left))

    return report


def _needs(candidate: Candidate) -> tuple[bool, float]:
    """What a candidate needs, those that were probed first."""
    return candidate.probe is None, candidate.best.value


def _diagnosis(diagnosis: Diagnosis) -> dict[str, object]:
    return {
        "target": diagnosis.peak.target,
        "total_bytes": _bytes(diagnosis.peak.total),
        "limit_bytes": diagnosis.peak.limit,
        "by_use_bytes": diagnosis.peak.by_use,
        "arrays": [dataclasses.asdict(item) for item in diagnosis.peak.arrays],
        "changes": [
            {
                "change": item.words,
                "changes_numbers": item.rounds,
                "saving_bytes": _bytes(item.saving),
                "cost_s": None if item.cost is None else item.cost.value,
                "probe_bytes": _bytes(item.probe),
                "fits": item.fits,
                "declined": item.declined,
            }
            for item in diagnosis.changes
        ],
        "not_probed": list(diagnosis.hints),
    }


def _serving(arguments: argparse.Namespace, targets: list[str], say: Say) -> Planned:
    from vishwamai.core.target import devices_of
    from vishwamai.models import read_config
    from vishwamai.planning.memory.analytic import serving_memory
    from vishwamai.planning.memory.compiler import Compiler
    from vishwamai.planning.serving import Serving, kv_bytes_per_token, trace_serving

    config = read_config(model.fetch(Path(arguments.config), weights=False)[0])
    length = min(4096, config.max_positions) if arguments.length is None else arguments.length
    keys = model_options.optimization(arguments)
    for target in targets:
        if keys.over(devices_of(target), 1, "the served model"):
            raise UnsupportedError(
                f"plan: use_pjit=true splits a served model over the {devices_of(target)} devices of {target}, which "
                "is not planned so far; name a chip, or leave use_pjit out."
            )
    model.say_optimization(keys, "serving", 1)
    chosen = keys.settings("serving", {})
    serving = Serving(
        config,
        arguments.batch,
        length,
        arguments.dtype,
        chosen.get("kv_dtype") or arguments.dtype,
        quantize=chosen.get("quantize"),
        optimization=keys.of_kernels,
    )
    token_bytes = kv_bytes_per_token(serving)
    lines, data, fits = [], [], True
    with Compiler() as compiler:
        for target in targets:
            formula = serving_memory(serving, target)
            say(f"{target}: probing a decoding step of {arguments.batch} sequences of {length} tokens")
            program = trace_serving(serving, target)
            report, timed = _compiled(arguments, compiler, program, say)
            fixed = (
                report.total.value - token_bytes * serving.batch_size * serving.pages_per_sequence * serving.page_size
            )
            tokens = max(0, int((report.limit - fixed) // token_bytes)) if token_bytes else None
            lines += [
                f"{target}: one device, {arguments.batch} sequences of {length} tokens",
                *(f"  {name:<12} {part}" for name, part in formula.parts.items() if part.value),
                f"  total        {report.total} of {report.limit / 2**30:.2f} GiB: "
                f"{'fits' if report.fits else 'does not fit'}",
                f"  keys and values of {'any number of' if tokens is None else tokens} tokens fit next to the rest",
                *_decoding(arguments, target, config.experts is not None, formula, timed),
            ]
            data.append(
                {
                    "target": target,
                    "limit_bytes": report.limit,
                    "total_bytes": _bytes(report.total),
                    "level": report.total.level,
                    "kv_capacity_tokens": tokens,
                    "batch": arguments.batch,
                    "step_seconds": None if timed is None else timed.step.value,
                    "fits": report.fits,
                    "parts": {name: dataclasses.asdict(part) for name, part in formula.parts.items()},
                }
            )
            fits &= report.fits
    not_tried = (
        "more than one device for a model",
        "weights in int8 and int4, and pages in int8",
        "prompts' steps",
    )
    lines += ["not tried:", *(f"  {text}" for text in not_tried)]
    return Planned({"plans": data, "not_tried": list(not_tried)}, "\n".join(lines), fits)


def _compiled(
    arguments: argparse.Namespace, compiler: Compiler, program: Program, say: Say
) -> tuple[ProgramMemory, StepTime | None]:
    """The memory of a program, and its time; None where it does not fit or was not asked for."""
    from vishwamai.planning.time.program_time import time_program

    report = compiler.probe(program)
    if not report.fits or arguments.no_verify:
        return report, None
    say(f"{program.target}: compiling it ({report.total})")
    return (compiler.verify(program), None) if arguments.no_time else time_program(compiler, program)


def _decoding(
    arguments: argparse.Namespace, target: str, experts: bool, formula: Breakdown, timed: StepTime | None
) -> list[str]:
    """Lines about the time of a decoding step, which gives every sequence one token."""
    from vishwamai.core.figures import Estimate, cost_of_tokens
    from vishwamai.planning.time.published import published_range

    chip = Target.parse_chip(target)
    read = sum(formula.parts[name].value for name in ("parameters", "kv", "states"))
    least = read / chip.hbm_bandwidth_per_device
    lines = [f"  a token takes at least {least * 1e3:.4g} ms (analytic: weights and pages read once)"]
    step = Estimate(least, "analytic", "s")
    if timed is not None:
        lines += [f"  {line}" for line in str(timed).splitlines()]
        step = max(step, timed.step, key=lambda estimate: estimate.value)
    rate = arguments.batch / step.value
    lines.append(f"  {step.value * 1e3:.4g} ms a token, {rate:.0f} tokens/s for {arguments.batch} sequences")
    lines += _wrapped(f"{published_range(target, experts).describe(step, target)}; no serving step was compared", 4)
    if arguments.price is not None:
        cost = cost_of_tokens(arguments.price, step, arguments.batch, 1 / chip.devices)
        lines.append(f"  {cost.value:.4g} USD per million tokens, at {arguments.price:g} USD a chip-hour")
    return lines


def _function(arguments: argparse.Namespace, targets: list[str], say: Say) -> Planned:
    from vishwamai.aot.compile.traced import trace
    from vishwamai.planning.memory.compiler import Compiler
    from vishwamai.planning.search.diagnosis import explain_program

    call = function.load_call(arguments.config, arguments.args)
    reasons = []
    keys = model_options.optimization(arguments)
    model.say_optimization(keys, "function", None)
    lines, data, fits = [], [], True
    with Compiler() as compiler:
        for target in targets:
            say(f"{target}: probing {call.name}")
            with keys.kernels():
                program = trace(call.function, *call.args, target=target, **call.kwargs)
            report, timed = _compiled(arguments, compiler, program, say)
            lines += [str(report), *([] if timed is None else _timed(timed, target))]
            lines += [f"  {part.nbytes / 2**20:10.1f} MiB  argument {part.path}" for part in _largest(program)]
            data.append(
                {
                    "target": target,
                    "limit_bytes": report.limit,
                    "total_bytes": _bytes(report.total),
                    "level": report.total.level,
                    "step_seconds": None if timed is None else timed.step.value,
                    "fits": report.fits,
                }
            )
            if not report.fits:
                say(f"{target}: reading the contents of the memory at the peak, and probing changes")
                with keys.kernels():
                    reasons.append(explain_program(compiler, program, call.function, call.args, call.kwargs))
                lines.append(str(reasons[-1]))
            fits &= report.fits
    too_large = [_diagnosis(reason) for reason in reasons]
    return Planned({"plans": data, "not_tried": [], "too_large": too_large}, "\n".join(lines), fits)


def _timed(timed: StepTime, target: str) -> list[str]:
    """The time of a function, and how far such estimates were from published steps."""
    from vishwamai.planning.time.published import published_range

    return [*str(timed).splitlines(), *_wrapped(published_range(target, False).describe(timed.step, target), 2)]


def _wrapped(text: str, indent: int) -> list[str]:
    """Lines of at most 80 columns."""
    return textwrap.wrap(text, 80, initial_indent=" " * indent, subsequent_indent=" " * indent)


def _largest(program: Program) -> list[Argument]:
    return sorted(program.arguments, key=lambda argument: -argument.nbytes)[:5]
