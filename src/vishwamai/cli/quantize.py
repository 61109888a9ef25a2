"""Writes a model whose products are rounded to few bits, in the form of compressed-tensors.

  vishwamai quantize DIR --format int4 -o OUT
  vishwamai quantize DIR --format int4 --calibrate FILE -o OUT
  vishwamai serve OUT --quantize keep

transformers reads OUT, and so does every command here; vLLM documents the form. With --calibrate, a text goes through
the model first, and the rounding lessens the errors of the inputs that are large there. The embedding and the head stay
as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vishwamai.cli import evaluate, model, output
from vishwamai.cli.function import CommandError
from vishwamai.cli.progress import Countdown, count_report

if TYPE_CHECKING:
    from vishwamai.models.importance import Place

_ROW = 512  # tokens of the calibration text that are computed at once


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        metavar="MODEL",
        type=Path,
        help="a directory as Hugging Face writes it, a GGUF file, or a name of the Hub, ORG/NAME[@REVISION]",
    )
    parser.add_argument("--format", choices=("int8", "int4", "fp8"), required=True, help="of the weights of products")
    parser.add_argument(
        "--output", "-o", type=Path, action=output.Directory, required=True, metavar="OUT", help="the new directory"
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="text in UTF-8, or - for standard input, by which errors of the weights are weighed (alike)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=16384, metavar="N", help="of the calibration text that are read (16384)"
    )


def run(arguments: argparse.Namespace) -> int:
    model.require_packages()
    text = None if arguments.calibrate is None else evaluate.read_text(arguments.calibrate, "--calibrate")
    if text is not None and arguments.format == "fp8":
        raise CommandError("fp8 has one scale for each output, which no text changes; leave --calibrate out.")
    if arguments.max_tokens < 1:
        raise CommandError(f"--max-tokens is {arguments.max_tokens}; pass at least 1.")
    arguments.directory, _ = model.fetch(arguments.directory)
    if arguments.output.resolve() == arguments.directory.resolve() or _is_full(arguments.output):
        raise CommandError(f"--output: {arguments.output} holds a model already; choose a new directory.")
    from vishwamai.models.compressing import check_source, write_compressed

    check_source(arguments.directory, arguments.format)
    model.keep_programs()
    with Countdown() as progress:
        weights = None if text is None else _importance(arguments, text, progress)
        form = write_compressed(
            arguments.directory,
            arguments.output,
            arguments.format,
            weights,
            count_report(progress, "rounding weights", "rounding weights, {} of {}"),
        )
    shared = "a scale for each output" if form.group_size is None else f"a scale for {form.group_size} inputs"
    print(f"{arguments.output}: {arguments.format}, {shared}")
    return 0


def _is_full(directory: Path) -> bool:
    return any(directory.glob("*.safetensors")) or (directory / "config.json").exists()


def _importance(arguments: argparse.Namespace, text: str, progress: Countdown) -> dict[Place, Any]:
    """The mean squares of the inputs of the products over the calibration text."""
    from vishwamai.models import from_pretrained, read_tokenizer
    from vishwamai.models.importance import importance

    ids = read_tokenizer(arguments.directory).encode(text)[: arguments.max_tokens]
    if not ids:
        raise CommandError(f"--calibrate {arguments.calibrate}: the text has no tokens; pass a longer one.")
    progress.say("loading the model")
    plain = from_pretrained(arguments.directory, dtype="float32")
    length = min(_ROW, plain.config.max_positions)
    rows = [ids[start : start + length] for start in range(0, len(ids), length)]
    activity = "computing the calibration text"
    return importance(plain, rows, count_report(progress, activity, activity + ", {} of {}"))
