"""Writes a model whose products are rounded to few bits, in the form of compressed-tensors.

  vishwamai quantize DIR --format int4 -o OUT
  vishwamai quantize DIR --format int4 --asymmetric -o OUT
  vishwamai quantize DIR --format int4 --calibrate FILE -o OUT
  vishwamai quantize DIR --format int4 --calibrate FILE --bits 5.5 -o OUT
  vishwamai serve OUT --quantize keep

transformers reads OUT, and so does every command here; vLLM documents the form. With --calibrate, a text goes through
the model, and each number's rounding makes up for the errors of those before it (GPTQ). With --bits, the products whose
rounding raises the loss of that text most are written in int8. The embedding and the head stay as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vishwamai.cli import evaluate, model, output
from vishwamai.cli.function import CommandError
from vishwamai.cli.progress import Countdown, count_report

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
        "--asymmetric",
        action="store_true",
        help="int4 with a zero point beside each scale, which blocks that are not symmetric lose less by",
    )
    parser.add_argument(
        "--output", "-o", type=Path, action=output.Directory, required=True, metavar="OUT", help="the new directory"
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="text in UTF-8, or - for standard input, by which the weights are rounded with error feedback",
    )
    parser.add_argument(
        "--bits",
        type=float,
        metavar="B",
        help="mean bits of a weight: int8 for the products that matter most in --calibrate, int4 for the others",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=16384, metavar="N", help="of the calibration text that are read (16384)"
    )


def run(arguments: argparse.Namespace) -> int:
    model.require_packages()
    text = None if arguments.calibrate is None else evaluate.read_text(arguments.calibrate, "--calibrate")
    if text is not None and arguments.format == "fp8":
        raise CommandError("fp8 has one scale for each output, which no text changes; leave --calibrate out.")
    if text is None and arguments.bits is not None:
        raise CommandError("--bits chooses the products by a calibration text; pass --calibrate FILE.")
    if arguments.asymmetric and arguments.format != "int4":
        raise CommandError(f"--asymmetric gives int4 zero points, but --format is {arguments.format}; leave it out.")
    if arguments.max_tokens < 1:
        raise CommandError(f"--max-tokens is {arguments.max_tokens}; pass at least 1.")
    arguments.directory, _ = model.fetch(arguments.directory)
    if arguments.output.resolve() == arguments.directory.resolve() or _is_full(arguments.output):
        raise CommandError(f"--output: {arguments.output} holds a model already; choose a new directory.")
    from vishwamai.models.compressing import check_bits, check_source, write_compressed

    _, index, places, form = check_source(arguments.directory, arguments.format, arguments.asymmetric)
    if arguments.bits is not None:
        check_bits(form, arguments.bits, places, index)
    model.keep_programs()
    with Countdown() as progress:
        counts = write_compressed(
            arguments.directory,
            arguments.output,
            arguments.format,
            None if text is None else _rows(arguments, text),
            arguments.bits,
            count_report(progress, "rounding weights", "rounding weights, {} of {}"),
            arguments.asymmetric,
        )
    bits = sum(form.bits_with_scales * count for form, count in counts.items()) / sum(counts.values())
    print(f"{arguments.output}: {'; '.join(map(str, counts))}; {bits:.4g} bits a weight")
    return 0


def _is_full(directory: Path) -> bool:
    return any(directory.glob("*.safetensors")) or (directory / "config.json").exists()


def _rows(arguments: argparse.Namespace, text: str) -> list[list[int]]:
    """The tokens of the calibration text in rows that are computed at once."""
    from vishwamai.models import read_tokenizer
    from vishwamai.models.config import read_config
    from vishwamai.models.gguf import model_directory

    directory = model_directory(arguments.directory)
    ids = read_tokenizer(directory).encode(text)[: arguments.max_tokens]
    if len(ids) < 2:
        raise CommandError(f"--calibrate {arguments.calibrate}: the text has {len(ids)} tokens; pass a longer one.")
    length = min(_ROW, read_config(directory).max_positions)
    return [ids[start : start + length] for start in range(0, len(ids), length)]
