"""Our server next to other engines on this machine, which the page that it writes shows: `make compare`.

    python benchmarks/compare.py DIR --gguf FILE                             # every peer that can be installed
    python benchmarks/compare.py DIR --only ik_llama.cpp,int8 --minutes 10   # one peer, one format
    python benchmarks/compare.py DIR --python llama.cpp=PYTHON               # a build of the peer for this machine

DIR is a model as Hugging Face writes it; FILE has the same weights for llama.cpp, in any format of GGUF. Each peer is
installed from the package index into an environment of its own, as a wheel; one that has none here is named and
skipped, and `--python` passes an environment that has it.

1. Every contestant computes the loss of one text and answers the same prompts. A contestant whose perplexity is more
   than twice the reference's (float32), or that answers otherwise in most cases, has no speed in the table.
2. Rounds: ours and every setting of every peer in turns, each in a process of its own (`serve.py`). `--minutes` begins
   no round after that time; the first is complete in any case.
3. A cell has the median of its rounds, the least and the most. A peer's cell is that of its better setting, which it
   names. A ratio is the median of the ratios of the rounds.

What other processes took of the processors meanwhile is in the page, and a warning where that is more than a twentieth.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.table import Row, page

from vishwamai.bench import machine
from vishwamai.core.hardware import binding

HERE = Path(__file__).parent
QUIET = 0.05
"""Share of the processors that other processes may use."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """An engine to compare with.

    Attributes:
      contestant: module next to this one.
      requirements: distributions that pip installs for it.
      formats: its format by ours.
      settings: its settings, of which a cell has the better.
      options: further options of pip.
    """

    contestant: str
    requirements: tuple[str, ...]
    formats: Mapping[str, str]
    settings: tuple[str, ...]
    options: tuple[str, ...] = ()


_GGUF = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
_FLASH = ("flash", "no-flash")
PEERS = {
    "llama.cpp": Peer("engines.llama", ("llama-cpp-python==0.3.36",), _GGUF, _FLASH),
    "ik_llama.cpp": Peer("engines.llama", ("ik-llama-cpp-python==0.1.5",), _GGUF, _FLASH),
    "transformers": Peer(
        "engines.torch_transformers",
        ("torch>=2.13,<2.14", "transformers>=5,<6"),
        {"bf16": "bf16"},
        ("sdpa",),
        ("--extra-index-url", "https://download.pytorch.org/whl/cpu"),
    ),
}


def environment(name: str, peer: Peer, folder: Path) -> str:
    """The interpreter of a peer's environment, which is made once; an error of pip raises CalledProcessError."""
    python = folder / name / "bin" / "python"
    stamp = folder / name / "installed.json"
    if not stamp.exists() or json.loads(stamp.read_text()) != list(peer.requirements):
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", "--only-binary", ":all:"]
        for command in (
            [sys.executable, "-m", "venv", str(folder / name)],
            [*pip, *peer.options, "numpy", *peer.requirements],
        ):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        stamp.write_text(json.dumps(peer.requirements))
    return str(python)


def versions(python: str, names: Sequence[str]) -> dict[str, str]:
    """Versions of installed distributions."""
    program = (
        "import importlib.metadata as m, json, sys\n"
        "have = {d.name.lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({n: have[n] for n in sys.argv[1:] if n in have}))"
    )
    return json.loads(
        subprocess.run([python, "-c", program, *names], check=True, capture_output=True, text=True).stdout
    )


class Runs:
    """Processes of `serve.py`, one after the other, and what others used of the processors meanwhile."""

    def __init__(self, folder: Path, threads: int, options: Sequence[str]):
        self._folder, self._threads, self._options = folder, threads, options

    def __call__(self, row: Row, *arguments: str) -> dict[str, Any]:
        """The figures of a row's process; `error` where it failed."""
        command = [row.python, str(HERE / "serve.py"), str(self._folder), "--format", row.format]
        if row.contestant:
            command += ["--contestant", row.contestant, "--threads", str(self._threads)]
            command += ["--setting", row.setting] if row.setting else []
        usage = machine.Usage()
        # Ours reads the number from the environment, and it bounds what the libraries of the others start.
        variables = dict.fromkeys(("VISHWAMAI_CPU_THREADS", "OMP_NUM_THREADS", "PJRT_NPROC"), str(self._threads))
        done = subprocess.run(
            [*command, *self._options, *arguments],
            capture_output=True,
            text=True,
            env=os.environ | variables,
        )
        if done.returncode:
            return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
        return json.loads(done.stdout[done.stdout.index("{") :]) | {"others": usage.others()}


def model_folder(source: Path, gguf: Path | None, work: Path) -> Path:
    """A folder with links to the model's files, in which peers keep theirs."""
    folder = work / "models" / source.resolve().name
    folder.mkdir(parents=True, exist_ok=True)
    files = {path.name: path for path in source.iterdir() if path.is_file()}
    if gguf is not None:
        files["source.gguf"] = gguf
    for name, path in files.items():
        link = folder / name
        if link.is_symlink():
            link.unlink()
        if not link.exists():
            link.symlink_to(path.resolve())
    return folder


def rows_of(pythons: Mapping[str, str], only: Sequence[str], formats: Sequence[str]) -> list[Row]:
    """Ours and the peers' rows, a format after the other."""
    chosen = [format for format in formats if format in only] or list(formats)
    rows = []
    for format in chosen:
        rows.append(Row("ours", format, format))
        for name, python in pythons.items():
            peer = PEERS[name]
            if format in peer.formats:
                rows += [Row(name, format, peer.formats[format], s, peer.contestant, python) for s in peer.settings]
    return rows


def checks(
    rows: Sequence[Row], run: Callable[..., dict[str, Any]], work: Path, options: Any
) -> dict[Row, dict[str, Any]]:
    """The loss and the answers of every row, and of the reference."""
    from vishwamai.models import read_tokenizer

    lines = (line for line in options.text.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    tokens = read_tokenizer(options.directory).encode(" ".join(lines), add_special=False)
    if len(tokens) < options.check_tokens:
        raise SystemExit(f"{options.text} has {len(tokens)} tokens; pass a longer one, or fewer with --check-tokens.")
    part = options.check_tokens // 8
    prompts = [tokens[i * part : i * part + max(2, part // 2)] for i in range(8)]
    file = work / "check.json"
    file.write_text(json.dumps({"tokens": tokens[: options.check_tokens], "prompts": prompts, "new": 4}))
    results: dict[Row, dict[str, Any]] = {}
    for row in (Row("reference", "f32", "f32"), *rows):
        say(f"checking {row}")
        results[row] = run(row, "--check", str(file))
    return results


def measure(
    figures: dict[Row, list[dict[str, Any]]], run: Callable[..., dict[str, Any]], rounds: int, until: float
) -> Iterator[int]:
    """Adds rounds to the figures, and yields after each; a row that fails once is left out from then on."""
    for turn in range(rounds):
        if turn and time.monotonic() > until:
            say(f"{turn} of {rounds} rounds: the time is over")
            return
        for row, measurements in figures.items():
            if measurements and "error" in measurements[-1]:
                continue
            say(f"round {turn + 1} of {rounds}: {row}")
            measurements.append(run(row))
        yield turn


def say(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the same weights, for llama.cpp")
    parser.add_argument(
        "--only", default="", type=lambda text: text.split(","), help=f"some of {', '.join(PEERS)}, and of our formats"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no further round after that (60)")
    parser.add_argument("--rounds", type=int, default=5, help="at most (5)")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PYTHON", help="an environment with it")
    parser.add_argument("--threads", type=int, help="of every contestant (one for each core)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompts (512)")
    parser.add_argument("--steps", type=int, default=32, help="tokens that are decoded after each (32)")
    parser.add_argument("--sequences", type=int, default=32, help="most that decode at once (32)")
    parser.add_argument("--text", type=Path, default=HERE.parent / "src/vishwamai/data/sentences.txt")
    parser.add_argument("--check-tokens", type=int, default=1024, help="of the text whose loss is computed (1024)")
    parser.add_argument("--out", type=Path, default=Path("build/compare"), help="(build/compare)")
    options = parser.parse_args()
    formats = ("bf16", "int8", "int4")
    unknown = [name for name in options.only if name and name not in (*PEERS, *formats)]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)} is not among {', '.join((*PEERS, *formats))}")
    if wrong := [text for text in options.python if text.partition("=")[0] not in PEERS or "=" not in text]:
        parser.error(f"--python {wrong[0]} is not PEER=PYTHON with one of {', '.join(PEERS)}")
    if not (options.directory / "config.json").exists():
        parser.error(f"{options.directory} has no config.json; `make world` fetches SmolLM2, or pass another model")
    until = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    pythons, skipped = interpreters(options)
    folder = model_folder(options.directory, options.gguf, options.out)
    threads = options.threads or physical_cores()
    sizes = ("--prompt", str(options.prompt), "--steps", str(options.steps), "--sequences", str(options.sequences))
    run = Runs(folder, threads, sizes)
    rows = rows_of(pythons, options.only, formats)
    before = machine.Usage()
    time.sleep(1)
    load = before.others()
    if load is not None and load > QUIET * machine.cpu().cores:
        say(f"the machine is not quiet: other processes use {load:.2f} of {machine.cpu().cores} processors")
    results = checks(rows, run, options.out, options)
    reference = next(iter(results.values()))
    if "error" in reference:
        raise SystemExit(f"the reference in float32 failed: {reference['error']}")
    wrong = {row: text for row, result in results.items() if (text := complaint(result, reference))}
    facts = {
        "machine": dataclasses.asdict(machine.cpu()),
        "threads": threads,
        "model": options.directory.resolve().name,
        "prompt": options.prompt,
        "steps": options.steps,
        "versions": {"ours": {k: v for k, v in machine.versions().items() if v and k in ("vishwamai", "jax", "jaxlib")}}
        | {name: versions(python, [_name(r) for r in PEERS[name].requirements]) for name, python in pythons.items()},
        "skipped": skipped,
        "wrong": {str(row): text for row, text in wrong.items()},
        "others_before": load,
        "quiet": QUIET,
    }
    figures: dict[Row, list[dict[str, Any]]] = {row: [] for row in rows if row not in wrong}
    for _ in measure(figures, run, options.rounds, until):
        write(options.out, facts, results, figures)
    print((options.out / "compare.md").read_text(encoding="utf-8"))
    return 0


def write(
    out: Path,
    facts: Mapping[str, Any],
    results: Mapping[Row, dict[str, Any]],
    figures: Mapping[Row, list[dict[str, Any]]],
) -> None:
    """Writes the page, and all figures as JSON."""
    (out / "compare.md").write_text(page(facts, results, figures), encoding="utf-8")
    runs = [
        {"row": dataclasses.asdict(row) | {"python": None}, "check": results[row], "rounds": figures.get(row, [])}
        for row in results
    ]
    (out / "compare.json").write_text(json.dumps({**facts, "rows": runs}, indent=1), encoding="utf-8")


def interpreters(options: Any) -> tuple[dict[str, str], dict[str, str]]:
    """The peers' interpreters by name, and why others are skipped."""
    names = [name for name in PEERS if name in options.only] or list(PEERS)
    pythons = {name: python for name, _, python in (text.partition("=") for text in options.python) if name in names}
    skipped: dict[str, str] = {}
    for name in names:
        if PEERS[name].contestant == "engines.llama" and options.gguf is None:
            if not (options.directory / "bf16.gguf").exists():
                skipped[name] = "the model has no GGUF file; pass --gguf"
                pythons.pop(name, None)
                continue
        if name in pythons:
            continue
        say(f"installing {name}")
        try:
            pythons[name] = environment(name, PEERS[name], options.out / "environments")
        except (OSError, subprocess.CalledProcessError) as error:
            lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
            skipped[name] = f"{' '.join(PEERS[name].requirements)} has no wheel that installs here ({lines[-1]})"
            say(f"skipped: {name}: {skipped[name]}")
    return pythons, skipped


def physical_cores() -> int:
    """Cores of which this process may use a processor."""
    return len({binding.siblings(processor) for processor in binding.choose(None, None).processors})


def complaint(result: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """Why a contestant has no speed in the table; empty where it computes the model."""
    if "error" in result:
        return f"failed: {result['error']}"
    if not result["loss"] < reference["loss"] + 0.693:
        return f"its loss is {result['loss']:.3f} nats, the reference's {reference['loss']:.3f}"
    same = agreement(result, reference)
    return "" if same >= 0.5 else f"{same:.0%} of its answers begin as the reference's"


def agreement(result: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    """The share of the answers whose first token is the reference's."""
    pairs = list(zip(result["answers"], reference["answers"], strict=True))
    return sum(mine[0] == theirs[0] for mine, theirs in pairs) / len(pairs)


def _name(requirement: str) -> str:
    return requirement.split("=")[0].split(">")[0].split("<")[0]


if __name__ == "__main__":
    sys.exit(main())
