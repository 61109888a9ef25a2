"""`--threads N` and `--numa NODES`: the processors and memory nodes of a command that serves a model."""

from __future__ import annotations

import argparse
import logging

from vishwamai.core import logs
from vishwamai.core.hardware import binding


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--threads` and `--numa`, which `bind` puts in force."""
    parser.add_argument(
        "--threads", type=_count, metavar="N", help="run on N processors of a CPU, with as many threads (all)"
    )
    parser.add_argument(
        "--numa",
        type=_numa,
        metavar="NODES",
        help="run on the processors of these memory nodes, such as 0 or 0-1, and take memory of a single node first; "
        "interleave: memory from all nodes in turn (all nodes, memory of the node that writes it first)",
    )


def bind(arguments: argparse.Namespace) -> None:
    """Binds the process as `--threads` and `--numa` say, before jax starts its threads.

    Raises:
      VishwamaiError: the machine has no such processors or nodes, or the system denies the binding.
    """
    if arguments.threads is None and arguments.numa is None:
        return
    chosen = binding.choose(arguments.threads, arguments.numa)
    complaint = binding.apply(chosen)
    logs.say(str(chosen))
    if complaint is not None:
        logs.say(complaint, f"WARNING: {complaint}", logging.WARNING)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processors, such as 4")
    return int(text)


def _numa(text: str) -> str:
    if not binding.is_numa(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither interleave nor numbers of memory nodes, such as 0 or 0-1"
        )
    return text
