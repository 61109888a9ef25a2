"""Loading of models for the commands, and what they say while they do."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vishwamai.cli.function import CommandError
from vishwamai.cli.model_options import optimization
from vishwamai.core import logs
from vishwamai.core.errors import VishwamaiError
from vishwamai.core.installing import install_line

if TYPE_CHECKING:
    from vishwamai.inference import CacheTiers, Embedder, Engine, Load
    from vishwamai.models.adapters import AdapterSizes
    from vishwamai.parallel.optimization import Optimization, Purpose


def fetch(path: Path, weights: bool = True) -> tuple[Path, str]:
    """The local directory or file of a model, fetched from the Hub where a name of it is passed, and its name."""
    from vishwamai.models.hub import HubModel, local_model
    from vishwamai.models.remote import address

    model, place = HubModel.parse(path), address(path)
    if place is not None:
        say(f"copying {place}")
        return local_model(place), path.name
    if model is None:
        return path, path.resolve().name
    say(f"fetching {model} from the Hub, or its cache")
    return local_model(path, weights), model.name


def say_optimization(keys: Optimization, purpose: Purpose, devices: int | None) -> None:
    """Says what each key does, where one is set."""
    from vishwamai.parallel.optimization import explain_optimization

    if keys.explicit:
        say(str(explain_optimization(keys, purpose, devices)))


def plan(
    arguments: argparse.Namespace,
    adapters: AdapterSizes | None = None,
    target: str | None = None,
    programs: Path | None = None,
    require_programs: bool = False,
) -> Load:
    """What is to be loaded, which is said at once.

    Args:
      arguments: options of `add_model_options`.
      adapters: places for adapters.
      target: argument of `plan_load`.
      programs: directory of compiled programs (`program_sets`), or None.
      require_programs: bool, True declines a start that they do not fit.

    Raises:
      CommandError: the packages for it are missing, or required programs do not fit.
      VishwamaiError: the directory is not a whole model, or it does not fit.
    """
    require_packages()
    drafts = _drafts(arguments)
    arguments.directory, _ = fetch(arguments.directory)
    if arguments.draft_model is not None:
        arguments.draft_model, _ = fetch(arguments.draft_model)
    from vishwamai.aot.compile import libtpu
    from vishwamai.inference import fit, plan_load

    libtpu.local_devices()
    keys = optimization(arguments)
    options: dict[str, Any] = dict(
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        kv_dtype=arguments.kv_dtype,
        max_sequences=arguments.max_sequences,
        max_tokens=arguments.step_tokens,
        max_length=arguments.max_length,
        page_size=arguments.page_size,
        memory=arguments.memory,
        drafts=drafts,
        adapters=adapters,
        draft_model=arguments.draft_model,
        draft_head=arguments.draft_head,
        prefix_cache=arguments.prefix_cache,
        keep_packed=arguments.keep_packed,
        mixed_tokens=arguments.mixed_tokens,
        token_seconds=arguments.itl,
        mesh=arguments.mesh,
        num_states=arguments.num_states,
        optimization=keys,
        target=target,
    )
    load = None if programs is None else _plan_of(programs, arguments.directory, options, require_programs)
    if load is None:
        load = (fit.fit_load if arguments.fit else plan_load)(arguments.directory, **options)
    say_optimization(keys, "serving", len(load.devices))
    if arguments.fit:
        say(fit.reason(load, arguments.max_sequences))
    say(f"{'loading' if target is None else 'planning'} {load}")
    return load


def _plan_of(programs: Path, directory: Path, options: Mapping[str, Any], required: bool) -> Load | None:
    """What is to be loaded with compiled programs, whose sizes hold where options leave them open; None where they do
    not fit, which is said.
    """
    from vishwamai.inference import plan_load
    from vishwamai.inference.program_sets import ProgramSet

    compiled = ProgramSet.read(programs, required)
    sizes = {name: value for name, value in compiled.sizes.items() if options.get(name) is None}
    try:
        load = plan_load(directory, **{**options, **sizes})
        reasons = compiled.differences(load)
    except VishwamaiError as error:
        load, reasons = None, [str(error).rstrip(".")]
    if not reasons and load is not None:
        say(f"programs are read from {programs}")
        return dataclasses.replace(load, store=compiled)
    more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    text = f"the programs of {programs} do not fit: {'; '.join(reasons[:3])}{more}"
    again = "compile them again for this start with `vishwamai compile`"
    if required:
        raise CommandError(f"{text}. Change that, {again}, or leave out --require-programs.")
    warn(f"{text}. This start compiles its own; {again}")
    return None


def require_packages() -> None:
    """Raises `CommandError` where packages that read models are missing."""
    names = ("flax", "safetensors", "tokenizers", "jinja2")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"models need {', '.join(missing)}: {install_line('serve')}.")


def _drafts(arguments: argparse.Namespace) -> int:
    """Guesses of a step, by the text itself, by a draft model or by the model's head."""
    options = {"--guesses": arguments.guesses, "--draft-model": arguments.draft_model}
    options["--draft-head"] = arguments.draft_head
    passed = [name for name, value in options.items() if value]
    if len(passed) > 1:
        raise CommandError(f"{' and '.join(passed)} both guess the next tokens; pass one of them.")
    if passed in ([], ["--guesses"]):
        if arguments.draft_tokens is not None:
            raise CommandError(
                "--draft-tokens counts the guesses of a draft; pass --draft-model DIR or --draft-head too."
            )
        return arguments.guesses
    most = 2 if arguments.draft_head else 4
    return most if arguments.draft_tokens is None else arguments.draft_tokens


def load(planned: Load, compile: str = "ahead", tiers: CacheTiers | None = None) -> tuple[Engine, dict[str, float]]:
    """The engine, and the seconds that loading and compiling took; `compile` and `tiers` are arguments of `Engine`.

    Compiled programs are kept in `JAX_COMPILATION_CACHE_DIR`, by default `~/.cache/vishwamai/jax`, for the next start;
    programs of a mesh of CPU devices are not kept (`vishwamai.parallel.mesh.compile_collectives_anew`).
    """
    import jax

    if planned.mesh is not None and jax.default_backend() == "cpu":
        say("compiled programs are not kept: JAX's cache mixes up the collectives of several CPU devices.")
    else:
        keep_programs()
    started = time.monotonic()
    compiling = [started]
    engine = planned.engine(_progress(compiling, compile == "lazy"), compile, say, tiers)
    ready = time.monotonic()
    say(f"ready after {ready - started:.1f} s: {engine.programs.summary}")
    return engine, {"load_s": compiling[-1] - started, "compile_s": ready - compiling[-1]}


def load_encoder(directory: Path) -> Embedder:
    """The encoder of a directory, compiled; its planned bytes are said before a weight is read.

    Raises:
      VishwamaiError: the directory is not a whole encoder.
    """
    keep_programs()
    from vishwamai.aot.compile import libtpu
    from vishwamai.core.numbers import human
    from vishwamai.inference import Embedder
    from vishwamai.models import SentenceEncoder
    from vishwamai.models.cross_encoder import CrossEncoder
    from vishwamai.models.embedding import longest_text
    from vishwamai.models.encoder_tensors import stored_bytes
    from vishwamai.models.encoders import is_cross_encoder, read_encoder_config
    from vishwamai.models.sentence_files import read_sentence_files
    from vishwamai.models.shards import read_index

    libtpu.local_devices()
    started = time.monotonic()
    crossed = is_cross_encoder(directory)
    folder = directory if crossed else read_sentence_files(directory).folder
    config = read_encoder_config(folder)
    use = "scores of pairs" if crossed else f"vectors of {config.hidden_size} numbers of texts"
    say(
        f"loading {config.model_type}, {config.num_hidden_layers} layers, from {directory}, in float32: "
        f"{human(stored_bytes(read_index(folder), 4))} planned for weights; {use} of at most "
        f"{longest_text(folder, config)} tokens"
    )
    if crossed:
        embedder = Embedder.of_cross_encoder(CrossEncoder.from_pretrained(directory))
    else:
        embedder = Embedder.of_encoder(SentenceEncoder.from_pretrained(directory))
    embedder.compile(_progress([]))
    say(f"ready after {time.monotonic() - started:.1f} s")
    return embedder


def embed_by_decoder(engine: Engine, mode: str, max_length: int | None = None, compile: str = "ahead") -> Embedder:
    """Vectors from a decoder's states, of texts of at most `max_length` tokens; None: 4096."""
    from vishwamai.inference import Embedder
    from vishwamai.models import Pooling

    most, keys = min(max_length or 4096, engine.limits.max_length), engine.optimization
    embedder = Embedder.of_decoder(engine.model, engine.tokenizer, Pooling(mode), most, keys)
    if compile == "ahead":
        embedder.compile(_progress([]))
    return embedder


def keep_programs() -> None:
    """Keeps compiled programs for the next start."""
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        from vishwamai.core import caches

        cache = caches.cache_directory("jax")
        if cache is None:
            say(f"compiled programs are not kept: {caches.no_directory('jax')}.")
            return
        try:
            caches.private_directory(cache)
            caches.trim("jax")
        except OSError as error:
            say(f"compiled programs are not kept: {error}; JAX_COMPILATION_CACHE_DIR names another directory.")
            return
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _progress(began: list[float], lazy: bool = False) -> Callable[[int, int, str], None]:
    """Says which program is compiled; `began` gets the time of the first. On demand, each has a line of its own."""
    ready: list[bool] = []

    def on_program(done: int, total: int, name: str) -> None:
        if done == 0:
            began.append(time.monotonic())
        if ready:
            say(f"compiling on demand {done + 1}/{total}: {name}")
        elif sys.stderr.isatty() and logs.shows_bars():
            text = f"preparing {done + 1}/{total}: {name}" if name else ""
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif done == 0:
            some = f"some of {total}, the others on demand" if lazy else f"{total}"
            say(f"preparing programs: {some}; programs of an earlier start are read from the cache")
        if not name:
            ready.append(True)

    return on_program


def say(text: str) -> None:
    """A line for the reader in the log, on standard error: standard output has answers only."""
    logs.say(text)


def warn(text: str) -> None:
    """A warning in the log."""
    logs.say(text, f"WARNING: {text}", logging.WARNING)
