"""Serves a model that Hugging Face's directory holds over HTTP, in OpenAI's form.

  vishwamai serve DIR
  vishwamai serve DIR --encoder DIR
  vishwamai serve HuggingFaceTB/SmolLM2-135M-Instruct
  vishwamai serve DIR --host 0.0.0.0 --api-key-file keys.txt --max-sequences 64

DIR may be an encoder, which answers /v1/embeddings, /v1/score and /v1/rerank; --encoder DIR serves one next to a
decoder.
/v1/completions, /v1/chat/completions, /v1/embeddings and /v1/models are OpenAI's; /health, /ready and /metrics are for
operators; / is a page to chat with the model. SIGTERM lets running answers end, for as long as --drain says.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from vishwamai.cli import binding, generate, model, model_options
from vishwamai.cli.address import check_address
from vishwamai.cli.certificates import check_certificate
from vishwamai.cli.function import CommandError
from vishwamai.core.errors import VishwamaiError
from vishwamai.core.host_memory import settled
from vishwamai.core.installing import install_line
from vishwamai.core.interrupt import raise_interrupt

if TYPE_CHECKING:
    from vishwamai.inference import Embedder, Engine
    from vishwamai.inference.processors import Factory
    from vishwamai.inference.server.budgets import Key
    from vishwamai.models.adapters import AdapterSizes

SEQUENCES = 32
"""Those that run at once, where no option says it."""

_NEEDED = (
    "starlette",
    "uvicorn",
    "prometheus_client",
    "pydantic",
    "llguidance",
    "flax",
    "safetensors",
    "tokenizers",
    "jinja2",
)


def configure(parser: argparse.ArgumentParser) -> None:
    model_options.add_model_options(parser, sequences=SEQUENCES)
    model_options.add_compile(parser)
    parser.add_argument(
        "--programs", type=Path, metavar="DIR", help="compiled programs, which `vishwamai compile` wrote (none)"
    )
    parser.add_argument(
        "--require-programs", action="store_true", help="end where a program of --programs does not fit this start"
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1: this machine alone)")
    parser.add_argument("--port", type=int, default=8000, help="(8000; 0: any that is free)")
    parser.add_argument("--name", help="what clients call the model (the directory's name)")
    parser.add_argument(
        "--alias", action="append", default=[], metavar="NAME", help="a further name of the model, such as clients send"
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="a LoRA adapter as the library peft writes it; requests name it as their model",
    )
    model_options.add_adapter_sizes(parser, "the number of --adapter")
    model_options.add_cache_tiers(parser)
    parser.add_argument(
        "--adapter-folder", type=Path, metavar="DIR", help="clients may load and unload adapters that are folders of it"
    )
    parser.add_argument("--encoder", type=Path, metavar="MODEL", help="an encoder for /v1/embeddings and /v1/score")
    parser.add_argument(
        "--pooling", choices=("mean", "last"), help="/v1/embeddings by the decoder: vectors from its tokens' states"
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="keys, one to a line, with name=... and limits such as tokens_per_minute=...; # begins a comment; "
        "without: none is asked",
    )
    parser.add_argument("--ssl-certfile", type=Path, metavar="PEM", help="the certificate: serve HTTPS")
    parser.add_argument("--ssl-keyfile", type=Path, metavar="PEM", help="its private key (in the certificate's file)")
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name of the server in the Host header; * is any (names of this machine, or any with --host)",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="URL",
        help="pages of this origin may send requests (none but the server's own page)",
    )
    parser.add_argument(
        "--tool-parser", metavar="NAME", help="how answers write calls, or none (what the chat template says)"
    )
    parser.add_argument(
        "--reasoning-parser", metavar="NAME", help="how answers mark reasoning, or none (what the chat template says)"
    )
    parser.add_argument(
        "--logits-processor",
        action="append",
        default=[],
        metavar="NAME=MODULE:FUNCTION",
        help="a processor that requests may name: FUNCTION(**options) gives a function from the tokens of an answer to "
        "those that must not follow",
    )
    parser.add_argument(
        "--max-priority", type=float, default=0.0, metavar="N", help="of a request; more counts as this (0)"
    )
    parser.add_argument("--max-queue", type=int, default=256, metavar="N", help="answers that may wait (256)")
    parser.add_argument("--max-body", type=float, default=4.0, metavar="MIB", help="of a request (4)")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="of an answer (what a sequence has room for)")
    parser.add_argument(
        "--unknown-keys",
        choices=("accept", "refuse"),
        default="accept",
        help="keys of requests that no interface documents: named in the log once, or an error (accept)",
    )
    parser.add_argument(
        "--enable-sleep-mode",
        action="store_true",
        help="serve /sleep, /wake_up and /is_sleeping, by which the memory of the model is freed for a while",
    )
    parser.add_argument("--log-json", dest="log_format", action="store_const", const="json", help=argparse.SUPPRESS)
    parser.add_argument(
        "--traces", action="store_true", help="a span of OpenTelemetry a request (needs opentelemetry-api)"
    )
    parser.add_argument("--drain", type=float, default=30.0, metavar="SECONDS", help="for running answers to end (30)")


def run(arguments: argparse.Namespace) -> int:
    binding.bind(arguments)
    if arguments.require_programs and arguments.programs is None:
        raise CommandError("--require-programs is about --programs DIR; pass both.")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"serve needs {', '.join(missing)}: {install_line('serve')}.")
    keys = _keys(arguments.api_key_file)
    if arguments.traces and importlib.util.find_spec("opentelemetry") is None:
        raise CommandError(f"--traces needs opentelemetry-api: {install_line('traces')}.")
    check_certificate(arguments.ssl_certfile, arguments.ssl_keyfile)
    if arguments.encoder is not None and arguments.pooling is not None:
        raise CommandError("--encoder and --pooling both name what computes /v1/embeddings; pass one of them.")
    parsers, processors = _parsers(arguments), _processors(arguments)
    check_address(arguments.host, arguments.port)
    engine, embed, names, defaults = _models(arguments)
    import uvicorn

    from vishwamai.inference.server import connections, guards
    from vishwamai.inference.server.app import make_app
    from vishwamai.inference.server.settings import Settings

    settings = Settings(
        name=names[0],
        keys=keys,
        max_queue=arguments.max_queue,
        max_body=int(arguments.max_body * 2**20),
        max_new_tokens=arguments.max_new_tokens,
        defaults=defaults,
        encoder=names[-1],
        allowed_hosts=guards.hosts_of(arguments.host, arguments.allowed_host),
        allowed_origins=tuple(origin.rstrip("/") for origin in arguments.allow_origin),
        max_priority=arguments.max_priority,
        aliases=tuple(arguments.alias),
        adapter_folder=arguments.adapter_folder,
        tool_parser=parsers[0],
        reasoning_parser=parsers[1],
        traces=arguments.traces,
        sleep_mode=arguments.enable_sleep_mode,
        processors=processors,
        decline_unknown_keys=arguments.unknown_keys == "refuse",
    )
    app = make_app(engine, settings, embed)
    config = uvicorn.Config(
        app,
        host=arguments.host,
        port=arguments.port,
        http=connections.LimitedProtocol,
        timeout_keep_alive=connections.IDLE_SECONDS,
        backlog=128,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=max(1, int(arguments.drain)),
        ssl_certfile=arguments.ssl_certfile,
        ssl_keyfile=arguments.ssl_keyfile,
    )
    server = uvicorn.Server(config)
    if not keys and not guards.is_loopback(arguments.host):
        model.warn(f"anyone who reaches {arguments.host} may use this server; pass --api-key-file to ask for keys")
    if engine is not None:
        # A process that cannot answer ends, with status 1, so that whoever runs it starts another.
        engine.on_failure = lambda: setattr(server, "should_exit", True)

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    # Until uvicorn takes SIGTERM, and drains at it. It raises the signal again at its end, for who handled it before.
    signal.signal(signal.SIGTERM, stop)
    with settled():
        raise_interrupt()  # one that the garbage collector or a library swallowed would come again amid requests
        server.run()
    return 0 if engine is None or engine.failure is None else 1


def _models(arguments: argparse.Namespace) -> tuple[Engine | None, Embedder | None, tuple[str, ...], dict[str, float]]:
    """The engine and the encoder, what clients call them, and the model's own options of sampling."""
    from vishwamai.models.adapters import read_adapter
    from vishwamai.models.encoders import is_encoder

    arguments.directory, name = model.fetch(arguments.directory)
    name = arguments.name or name
    if is_encoder(arguments.directory):
        if arguments.encoder is not None or arguments.pooling is not None:
            raise CommandError(f"{arguments.directory} is an encoder itself; leave --encoder and --pooling out.")
        for option in ("optimization", "cache_dir", "cache_host"):
            if getattr(arguments, option):
                raise CommandError(
                    f"--{option.replace('_', '-')} is for decoders, and {arguments.directory} is an encoder; leave it "
                    "out."
                )
        return None, model.load_encoder(arguments.directory), (name,), {}
    if arguments.mesh is not None and arguments.pooling is not None:
        raise CommandError("--pooling computes vectors on one device; leave out --mesh, or pass --encoder.")
    adapters, tiers = _adapters(arguments), model_options.cache_tiers(arguments)
    planned = model.plan(arguments, adapters[1], None, arguments.programs, arguments.require_programs)
    for directory in adapters[0].values():
        read_adapter(directory, planned.config)  # its errors come before the model is read
    if planned.tokenizer is None:
        model.say(f"{planned.directory / 'tokenizer.json'} is missing: prompts and answers are token ids only")
    elif planned.tokenizer.template is not None:
        try:  # once, before a client does
            planned.tokenizer.render_chat([{"role": "user", "content": "Hello"}])
        except VishwamaiError as error:
            model.warn(f"chats may be declined: {error}")
    names = (name,)
    if arguments.encoder is not None:
        arguments.encoder, encoder = model.fetch(arguments.encoder)
        names = (name, encoder)
        if names[0] == names[1]:
            raise CommandError(f"the model and the encoder are both called {name!r}; pass another --name.")
        embed = model.load_encoder(arguments.encoder)
        engine, _ = model.load(planned, arguments.compile, tiers)
    else:
        engine, _ = model.load(planned, arguments.compile, tiers)
        embed = None
        if arguments.pooling is not None:
            embed = model.embed_by_decoder(engine, arguments.pooling, arguments.max_length, arguments.compile)
    for adapter, directory in adapters[0].items():
        engine.load_adapter(adapter, directory)
    return engine, embed, names, generate.recommended(planned.generation)


def _adapters(arguments: argparse.Namespace) -> tuple[dict[str, Path], AdapterSizes | None]:
    """The adapters to load by name, and the places for them and for others."""
    adapters: dict[str, Path] = {}
    for text in arguments.adapter:
        name, separator, directory = text.partition("=")
        if not separator or not name or name in adapters:
            raise CommandError(f"--adapter {text!r} is not NAME=DIR with a name of its own.")
        adapters[name] = Path(directory)
    sizes = model_options.adapter_sizes(arguments, len(adapters))
    if sizes is None and arguments.adapter_folder is not None:
        raise CommandError("--adapter-folder needs places for adapters; pass --max-adapters.")
    return adapters, sizes


def _parsers(arguments: argparse.Namespace) -> tuple[str | None, str | None]:
    """The names of the forms of calls and of reasoning, where they are chosen by options."""
    from vishwamai.inference.server.forms import FORMS, THINKING

    for option, names in (("tool_parser", FORMS), ("reasoning_parser", THINKING)):
        name = getattr(arguments, option)
        if name not in (None, "none", *names):
            text = f"--{option.replace('_', '-')} {name!r} is not one of none, {', '.join(names)}"
            raise CommandError(f"{text}; leave it out to follow the chat template.")
    return arguments.tool_parser, arguments.reasoning_parser


def _processors(arguments: argparse.Namespace) -> dict[str, Factory]:
    from vishwamai.inference.processors import imported

    try:
        return dict(imported(text) for text in arguments.logits_processor)
    except VishwamaiError as error:
        raise CommandError(f"--logits-processor {error}") from error


def _keys(path: Path | None) -> tuple[Key, ...]:
    if path is None:
        return ()
    from vishwamai.inference.server.budgets import Key

    try:
        lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
        keys = tuple(Key.parse(line) for line in lines if line and not line.startswith("#"))
        if path.stat().st_mode & 0o077:
            model.warn(f"other users may read {path}; run chmod 600 on it")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--api-key-file {path} cannot be read: {error}; pass a text file, a key a line.") from error
    except VishwamaiError as error:
        raise CommandError(f"--api-key-file {path}: {error}") from error
    if not keys:
        raise CommandError(f"--api-key-file {path} has no key; write one to a line.")
    return keys
