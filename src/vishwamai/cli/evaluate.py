"""Perplexity of a model on a text, in the form that serve would serve: packed weights, 8-bit pages and all.

  vishwamai evaluate DIR --text FILE
  vishwamai evaluate DIR --text FILE --quantize int8 --against float32
  vishwamai evaluate model.gguf --text one.txt --text two.txt --json

The perplexity is that of the tokens after the first of each text. A longer text is cut into windows of --context
tokens, --stride apart, and each token is scored once. With --against, the mean KL divergence from that model and the
share of equal most likely tokens are computed, too.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vishwamai.cli import binding, model, model_options, options
from vishwamai.cli.function import CommandError
from vishwamai.cli.progress import Countdown, count_report

if TYPE_CHECKING:
    from vishwamai.inference import Load
    from vishwamai.models.config import ModelConfig
    from vishwamai.models.tokenizer import Tokenizer

_CONTEXT = 2048
_DTYPES = ("float32", "bfloat16", "float16")


def configure(parser: argparse.ArgumentParser) -> None:
    model_options.add_form_options(parser)
    parser.add_argument(
        "--text",
        action="append",
        required=True,
        type=Path,
        metavar="FILE",
        help="text in UTF-8, or - for standard input; may be given more than once",
    )
    parser.add_argument(
        "--context", type=int, metavar="TOKENS", help=f"of a window ({_CONTEXT}, or fewer as the model holds them)"
    )
    parser.add_argument(
        "--stride", type=int, metavar="TOKENS", help="between the beginnings of two windows (half of --context)"
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="read only the first N tokens of each text")
    parser.add_argument(
        "--against",
        metavar="DTYPE|MODEL",
        help="the model to compare with: the same one in float32, bfloat16 or float16, without --quantize and "
        "--kv-dtype; or another directory, which is read in float32",
    )
    options.add_json(parser, "print one JSON object in place of text, or write it to PATH")


def run(arguments: argparse.Namespace) -> int:
    binding.bind(arguments)
    model.require_packages()
    texts = [read_text(path, "--text") for path in arguments.text]
    arguments.directory, name = model.fetch(arguments.directory)
    from vishwamai.models import read_config, read_tokenizer
    from vishwamai.models.gguf import model_directory

    directory = model_directory(arguments.directory, weights=True)
    if not directory.is_dir():
        raise CommandError(f"{directory}: expected a directory with config.json and safetensors files, or a GGUF file.")
    config = read_config(directory)
    tokenizer = read_tokenizer(directory)
    ids = [_tokens(tokenizer, text, path, arguments.max_tokens) for path, text in zip(arguments.text, texts)]
    begin = _begin(tokenizer)
    context, stride = _window(arguments, config, max(map(len, ids)), len(begin))
    planned = _plan(arguments, arguments.directory, context)
    compared = _plan_reference(arguments, context, planned)
    model.keep_programs()
    started = time.monotonic()
    from vishwamai.inference.evaluation import evaluate

    passes = _passes(arguments, planned, context)
    reference = None if compared is None else _passes(arguments, compared, context)
    with Countdown() as progress:
        result = evaluate(
            passes,
            ids,
            context=context,
            stride=stride,
            begin=begin,
            reference=reference,
            on_tokens=count_report(progress, "compiling", "{} of {} tokens"),
        )
    values: dict[str, object] = {
        "model": name,
        "perplexity": result.perplexity,
        "tokens": result.tokens,
        "loss": result.loss,
        "context": context,
        "stride": stride,
        "dtype": planned.dtype,
        "quantize": planned.quantize,
        "kv_dtype": planned.kv_dtype,
        "seconds": round(time.monotonic() - started, 3),
    }
    if compared is not None:
        values["against"] = {
            "model": arguments.against if compared.directory != planned.directory else name,
            "dtype": compared.dtype,
            "perplexity": result.reference_perplexity,
            "kl": result.kl,
            "top1_agreement": result.agreement,
        }
    if arguments.json != options.STDOUT:
        print(_summary(values))
    if arguments.json is not None:
        options.write_json(values, arguments.json, indent=None)
    return 0


def read_text(path: Path, option: str) -> str:
    """The text of a file in UTF-8, or of standard input for "-"; `option` gave the path."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise CommandError(f"{option} {path}: {error.strerror}; pass a text file, or - for standard input.") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(f"{option} {path}: the file is not UTF-8 ({error}); pass a text file.") from error


def _tokens(tokenizer: Tokenizer, text: str, path: Path, most: int | None) -> list[int]:
    if most is not None and most < 2:
        raise CommandError(f"--max-tokens is {most}; pass at least 2, for the first token is not predicted.")
    ids = tokenizer.encode(text)[:most]
    if len(ids) < 2:
        raise CommandError(f"--text {path}: fewer than 2 tokens, and the first is not predicted; pass a longer text.")
    return ids


def _begin(tokenizer: Tokenizer) -> list[int]:
    """The ids that the tokenizer puts before a text."""
    plain, full = tokenizer.encode("a", add_special=False), tokenizer.encode("a")
    return next((full[:i] for i in range(len(full)) if full[i : i + len(plain)] == plain), [])


def _window(arguments: argparse.Namespace, config: ModelConfig, longest: int, lead: int) -> tuple[int, int]:
    """(context, stride), checked; a text that is shorter than the context is one window."""
    context = min(_CONTEXT, config.max_positions) if arguments.context is None else arguments.context
    if not lead + 2 <= context <= config.max_positions:
        raise CommandError(
            f"--context is {context}; pass {lead + 2} to {config.max_positions}, the positions of the model."
        )
    context = min(context, longest) if arguments.stride is None else context
    stride = max(1, context // 2) if arguments.stride is None else arguments.stride
    if not 1 <= stride <= context - lead:
        raise CommandError(f"--stride is {stride}; pass 1 to {context - lead}, which --context allows.")
    if arguments.step_tokens < 1 or arguments.page_size < 1:
        raise CommandError("--step-tokens and --page-size are at least 1.")
    return context, stride


def _plan(arguments: argparse.Namespace, directory: Path, context: int, **changes: Any) -> Load:
    from vishwamai.inference import plan_load

    settings: dict[str, Any] = {
        "dtype": arguments.dtype,
        "quantize": arguments.quantize,
        "kv_dtype": arguments.kv_dtype,
        "memory": arguments.memory,
        "keep_packed": arguments.keep_packed,
        "optimization": model_options.optimization(arguments),
    }
    sizes = {"max_sequences": 1, "max_tokens": arguments.step_tokens, "page_size": arguments.page_size}
    load = plan_load(directory, max_length=context, **sizes, **{**settings, **changes})
    model.say(f"loading {load}")
    return load


def _plan_reference(arguments: argparse.Namespace, context: int, planned: Load) -> Load | None:
    if arguments.against is None:
        return None
    same = arguments.against in _DTYPES
    directory = arguments.directory if same else model.fetch(Path(arguments.against))[0]
    budget = planned.memory or (None if planned.available is None else int(0.9 * planned.available))
    plain = {"dtype": arguments.against if same else "float32", "quantize": None, "kv_dtype": None}
    memory = None if budget is None else max(1, budget - planned.total)
    return _plan(arguments, directory, context, **plain, memory=memory, keep_packed=False, optimization=None)


def _passes(arguments: argparse.Namespace, planned: Load, context: int) -> Any:
    from vishwamai.inference.evaluation import Passes

    return Passes(
        planned.decoder(model.say),
        context,
        planned.kv_dtype,
        arguments.page_size,
        arguments.step_tokens,
        planned.tokenizer,
        planned.optimization.of_kernels,
    )


def _summary(values: dict[str, Any]) -> str:
    weights = values["dtype"] if values["quantize"] is None else f"{values['quantize']} and {values['dtype']}"
    lines = [
        f"perplexity  {values['perplexity']:.4f} of {values['tokens']} tokens",
        f"form        weights in {weights}, keys and values in {values['kv_dtype']}",
        f"windows     of {values['context']} tokens, {values['stride']} apart",
    ]
    if (against := values.get("against")) is not None:
        change = 100 * (values["perplexity"] / against["perplexity"] - 1)
        same = 100 * against["top1_agreement"]
        lines += [
            f"against     {against['model']} in {against['dtype']}",
            f"            perplexity {against['perplexity']:.4f} ({change:+.2f} %), KL {against['kl']:.6f} nats",
            f"            {same:.2f} % of the likeliest tokens agree",
        ]
    return "\n".join(lines)
