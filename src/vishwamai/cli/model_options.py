"""Options of the commands that load a model: the model's form, its sizes, its adapters and the `optimization` keys."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from vishwamai.cli import binding
from vishwamai.cli.function import CommandError

if TYPE_CHECKING:
    from vishwamai.inference import CacheTiers
    from vishwamai.models.adapters import AdapterSizes
    from vishwamai.parallel.optimization import Optimization

KV_DTYPES = ("float32", "bfloat16", "float16", "int8", "fp8")


def add_form_options(parser: argparse.ArgumentParser) -> None:
    """The model's directory and the form in which it is held: what decides the numbers that it computes."""
    parser.add_argument(
        "directory",
        metavar="MODEL",
        type=Path,
        help="a directory as Hugging Face writes it, a GGUF file, or a name of the Hub: ORG/NAME[@REVISION], or with "
        "GGUF files ORG/NAME:Q4_K_M or ORG/NAME/FILE.gguf",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="of weights and activations"
    )
    parser.add_argument(
        "--quantize",
        choices=("keep", "int8", "int4", "fp8"),
        help="round the weights of products while loading, or keep those of a checkpoint published quantized as they "
        "are; without it weights are held in --dtype",
    )
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, help="of keys and values (--dtype)")
    parser.add_argument("--step-tokens", type=int, default=512, metavar="N", help="of one step of all sequences (512)")
    parser.add_argument("--page-size", type=int, default=16, metavar="TOKENS", help="of a page (16)")
    parser.add_argument("--memory", type=_gib, metavar="GIB", help="use no more (90 %% of what is available)")
    add_optimization(parser)
    parser.add_argument(
        "--keep-packed",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on a CPU, keep the packed weights in the user's cache, which the next start maps (yes)",
    )
    binding.add_options(parser)


def add_model_options(parser: argparse.ArgumentParser, sequences: int) -> None:
    """The model's directory, its dtypes and its sizes; `sequences`: the default of how many run at once."""
    add_form_options(parser)
    parser.add_argument(
        "--max-length", type=int, metavar="TOKENS", help="of a sequence (the model's, as the pages hold it)"
    )
    parser.add_argument("--max-sequences", type=int, default=sequences, metavar="N", help=f"at once ({sequences})")
    parser.add_argument("--mixed-tokens", type=int, metavar="N", help="tokens of a step that decodes too (a quarter)")
    parser.add_argument(
        "--itl",
        type=_milliseconds,
        metavar="MS",
        help="target time between two tokens of an answer while prompts are computed: steps that decode take as many "
        "tokens of prompts as the measured times leave room for (--mixed-tokens of them)",
    )
    parser.add_argument(
        "--fit",
        action="store_true",
        help="choose the dtype of keys, the sequences and their length for the memory; --max-sequences, --max-length "
        "and --kv-dtype bound the choice",
    )
    parser.add_argument(
        "--guesses", type=int, default=0, metavar="N", help="guess N tokens a step from the text itself (0)"
    )
    parser.add_argument(
        "--draft-model",
        metavar="MODEL",
        type=Path,
        help="a smaller model with the same tokenizer, whose guesses are checked",
    )
    parser.add_argument(
        "--draft-head",
        action="store_true",
        help="guess by the head that the model's checkpoint has for it (multi-token prediction, MTP)",
    )
    parser.add_argument(
        "--draft-tokens", type=int, metavar="K", help="guesses a step of the draft model (4) or of the head (2)"
    )
    parser.add_argument(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share the pages of prompts that begin alike (yes)",
    )
    parser.add_argument(
        "--num-states",
        type=int,
        metavar="N",
        help="states of sequences that run and of prefixes, in models whose layers have them (3 for each sequence)",
    )
    parser.add_argument(
        "--mesh", metavar="AXES", help='split over devices: "tensor=2", or "expert=4,tensor=2" for experts (one device)'
    )


def add_compile(parser: argparse.ArgumentParser) -> None:
    """The option of when programs are compiled."""
    parser.add_argument(
        "--compile",
        choices=("ahead", "lazy"),
        default="ahead",
        help="the programs of all steps before the first request, or most of them when a step first needs them (ahead)",
    )


def add_adapter_sizes(parser: argparse.ArgumentParser, default: str) -> None:
    """The places for adapters; `default` is the text of their number."""
    parser.add_argument("--max-adapters", type=int, metavar="N", help=f"adapters that are loaded at once ({default})")
    parser.add_argument("--max-adapter-rank", type=int, default=16, metavar="N", help="the highest of an adapter (16)")


def add_cache_tiers(parser: argparse.ArgumentParser) -> None:
    """Where prefixes go that give way to others on the device."""
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="keep prefixes on a disk that give way to others, and those of the device at the end, for this server, "
        "its next start and others",
    )
    parser.add_argument(
        "--cache-dir-size", type=_gib, metavar="GIB", help="of the files in --cache-dir (half of the disk's free space)"
    )
    parser.add_argument(
        "--cache-host", type=_gib, metavar="GIB", help="host memory for prefixes that give way on a GPU or TPU (none)"
    )


def cache_tiers(arguments: argparse.Namespace) -> CacheTiers | None:
    """The tiers of `add_cache_tiers`; None where no option names one.

    Raises:
      CommandError: the options contradict each other.
    """
    if arguments.cache_dir is None and arguments.cache_dir_size is not None:
        raise CommandError("--cache-dir-size is about the files of --cache-dir DIR; pass both.")
    if arguments.cache_dir is None and arguments.cache_host is None:
        return None
    if not arguments.prefix_cache:
        raise CommandError("--cache-dir and --cache-host are of a prefix cache; leave out --no-prefix-cache.")
    from vishwamai.inference import CacheTiers

    return CacheTiers(arguments.cache_dir, arguments.cache_dir_size, arguments.cache_host or 0)


def adapter_sizes(arguments: argparse.Namespace, count: int) -> AdapterSizes | None:
    """The places for `count` adapters or more; None for none.

    Raises:
      CommandError: the options contradict each other.
    """
    from vishwamai.models.adapters import AdapterSizes

    places = count if arguments.max_adapters is None else arguments.max_adapters
    if places < count or arguments.max_adapter_rank < 1:
        raise CommandError("--max-adapters is less than the adapters of --adapter, or --max-adapter-rank less than 1.")
    return AdapterSizes(places, arguments.max_adapter_rank) if places else None


def _milliseconds(text: str) -> float:
    """Seconds of a number of milliseconds."""
    return _positive(text, "milliseconds", "100") / 1000


def _gib(text: str) -> int:
    """Bytes of a number of GiB."""
    return int(_positive(text, "GiB", "2 or 0.5") * 2**30)


def _positive(text: str, unit: str, example: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {unit} above 0, such as {example}")
    return number


def add_optimization(parser: argparse.ArgumentParser) -> None:
    """The option of the `optimization` dict."""
    parser.add_argument(
        "--optimization",
        action="append",
        default=[],
        metavar="key=value",
        help="a key of the dict that training, serving and planning share, such as use_fp8=true or block_size=256; "
        "or a JSON file of them; may be given more than once",
    )


def optimization(arguments: argparse.Namespace) -> Optimization:
    """The `optimization` dict of the command line.

    Raises:
      CommandError: a part is neither key=value nor a JSON file.
      ConfigError: as `Optimization.of`.
    """
    from vishwamai.parallel.optimization import Optimization

    keys: dict[str, object] = {}
    for text in arguments.optimization:
        keys |= _pair(text) if "=" in text else _file(text)
    return Optimization.of(keys)


def _pair(text: str) -> dict[str, object]:
    name, _, value = text.partition("=")
    try:
        return {name: json.loads(value)}
    except ValueError:  # a text, such as the name of a policy
        return {name: value}


def _file(text: str) -> dict[str, object]:
    from vishwamai.parallel.optimization import Optimization

    try:
        values = json.loads(Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"--optimization {text}: {error.strerror}; pass key=value, or a JSON file.") from error
    except ValueError as error:
        raise CommandError(f"--optimization {text}: {error}; the file must hold a JSON object.") from error
    if not isinstance(values, dict):
        raise CommandError(f"--optimization {text}: the file holds a {type(values).__name__}, not a JSON object.")
    return Optimization.of(values).explicit
