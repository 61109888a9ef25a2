"""Continues a text, answers a chat or continues token ids with a model that Hugging Face's directory holds.

  vishwamai generate DIR --prompt "Once upon a time" --stream
  vishwamai generate ORG/NAME@REVISION --chat messages.json --temperature 0.7
  vishwamai generate DIR --token-ids 1,2,3 --max-new-tokens 32 --json

Without options of sampling the model's own generation_config.json decides. Standard output has the text; with --json
its last line is an object with `token_ids`, `text`, `finish_reason` and `timing`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vishwamai.cli import binding, model, model_options, options
from vishwamai.cli.function import CommandError

if TYPE_CHECKING:
    from vishwamai.inference import Delta, Engine, Sampling
    from vishwamai.models.generation import GenerationConfig

_DRAWS = ("temperature", "top_k", "top_p", "min_p")
_ALWAYS = ("repetition_penalty",)
"""Recommended options that hold for the largest logit, too."""


def configure(parser: argparse.ArgumentParser) -> None:
    model_options.add_model_options(parser, sequences=1)
    model_options.add_compile(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="continue this text")
    prompt.add_argument("--chat", metavar="FILE", type=Path, help="answer the messages in this JSON file (a list)")
    prompt.add_argument("--token-ids", metavar="1,2,3", help="continue these tokens; needs no tokenizer")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="(128, or what a sequence has room for)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 takes the likeliest token")
    parser.add_argument("--top-p", type=float, metavar="P", help="only the likeliest tokens that sum to P")
    parser.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens")
    parser.add_argument("--min-p", type=float, metavar="P", help="only tokens of this part of the largest probability")
    parser.add_argument(
        "--repetition-penalty", type=float, metavar="R", help="above 1: tokens seen before are less likely"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="the same answer every time")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the model's end token")
    parser.add_argument("--stream", action="store_true", help="print the text as it comes")
    options.add_json(parser, "the last line of standard output is one JSON object, or PATH holds it")


def run(arguments: argparse.Namespace) -> int:
    binding.bind(arguments)
    ids = _token_ids(arguments.token_ids)
    messages = _messages(arguments.chat)
    planned = model.plan(arguments)
    if ids is None and planned.tokenizer is None:
        raise CommandError(f"{planned.directory / 'tokenizer.json'} is missing; pass --token-ids in place of a text.")
    settings = sampling(arguments, planned.generation)
    prompt = arguments.prompt if ids is None else ids
    if messages is not None and planned.tokenizer is not None:
        prompt = planned.tokenizer.chat(messages)
    encoded = planned.prompts.encode(prompt)
    if arguments.max_new_tokens is None:
        room = max(1, planned.limits.max_length - len(encoded))
        settings = dataclasses.replace(settings, max_new_tokens=min(128, room))
    planned.prompts.check(encoded, settings)
    engine, timing = model.load(planned, arguments.compile)
    deltas, spent = _answer(engine, encoded, settings, arguments.stream)
    timing |= spent
    tokens = [token for delta in deltas for token in delta.token_ids]
    text = None if engine.tokenizer is None else "".join(delta.text for delta in deltas)
    if not arguments.stream:
        print(" ".join(map(str, tokens)) if text is None else text)
    if arguments.json is not None:
        result = {
            "token_ids": tokens,
            "text": text,
            "finish_reason": deltas[-1].finish,
            "prompt_tokens": len(encoded),
            **({"accepted_share": round(engine.statistics.accepted_share, 4)} if engine.drafts else {}),
            "timing": {name: round(value, 6) for name, value in timing.items()},
        }
        options.write_json(result, arguments.json, indent=None)
    return 0


def sampling(arguments: argparse.Namespace, generation: GenerationConfig) -> Sampling:
    """The options given, and the model's own where none is given."""
    from vishwamai.inference import Sampling

    explicit = {name: value for name in (*_DRAWS, *_ALWAYS) if (value := getattr(arguments, name)) is not None}
    defaults = recommended(generation)
    if "temperature" in explicit:
        defaults = {name: value for name, value in defaults.items() if name in _ALWAYS}
    return Sampling(
        max_new_tokens=arguments.max_new_tokens,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
        **{**defaults, **explicit},
    )


def recommended(generation: GenerationConfig) -> dict[str, float]:
    """Options of `Sampling` that a model's authors recommend; options of random sampling only where they sample."""
    names = (*_DRAWS, *_ALWAYS) if generation.do_sample else _ALWAYS
    options = {name: value for name in names if (value := getattr(generation, name)) is not None}
    return {"temperature": 1.0, **options} if generation.do_sample else options


def _answer(
    engine: Engine, prompt: tuple[int, ...], options: Sampling, stream: bool
) -> tuple[list[Delta], dict[str, float]]:
    from vishwamai.inference import Request

    deltas: list[Delta] = []
    first: list[float] = []

    def sink(delta: Delta) -> None:
        if not first:
            first.append(time.monotonic())
        deltas.append(delta)
        if stream:
            text = "".join(f"{token} " for token in delta.token_ids) if engine.tokenizer is None else delta.text
            print(text, end="\n" if delta.finish else "", flush=True)

    started = time.monotonic()
    engine.submit(Request(prompt, options, sink))
    while not engine.idle:
        engine.step()
    finish = time.monotonic()
    spent = {"first_token_s": first[0] - started, "total_s": finish - started}
    tokens = sum(len(delta.token_ids) for delta in deltas)
    if tokens > 1 and finish > first[0]:
        spent["tokens_per_s"] = (tokens - 1) / (finish - first[0])
    return deltas, spent


def _token_ids(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise CommandError(f"--token-ids is {text!r}; write whole numbers with commas, such as 1,2,3.") from error


def _messages(path: Path | None) -> list[dict[str, object]] | None:
    if path is None:
        return None
    try:
        messages = json.loads(sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"--chat {path}: {error}; write a JSON list of messages.") from error
    messages = messages.get("messages") if isinstance(messages, dict) else messages
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise CommandError(f'--chat {path}: expected a list such as [{{"role": "user", "content": "Hello"}}].')
    return messages
