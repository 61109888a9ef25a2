"""What a stranger does in the first hour, in an environment that has the package installed: `tools/wheels.py` calls
this for every wheel, and `make first-hour` for one.

The Python blocks of README.md and of the pages are pasted; without a home directory, with a cache that cannot be
written, and on a full disk. `bench`, `tune`, `train` and `serve` are interrupted at random moments (interrupts.py).
A full disk is a limit on the size of files, which needs no rights: a write fails with EFBIG where a full disk says
ENOSPC.

python tools/first_hour.py --bin .venv/bin --seed 7 --minutes 5
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from interrupts import Failed, commands, serve_trials, trials

ROOT = Path(__file__).parent.parent
BARE = (ROOT / "README.md", ROOT / "docs" / "fallback.md", ROOT / "docs" / "recipes.md")
"""Pages that need jax and numpy alone, and write no file of their own."""

LEFT_OUT = {"gpu.md": "needs torch", "transformers.md": "needs torch and transformers"}
"""Pages of which no block runs in an environment without torch."""

NO_ROOM = ["sh", "-c", 'ulimit -f 0 && exec "$@"', "sh"]
"""Before a command: it can make files, and write nothing into them."""

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def pages() -> list[Path]:
    """The pages with Python blocks that run without torch."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in paths if page.name not in LEFT_OUT and "\n```python\n" in page.read_text("utf-8")]


def places(folder: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """What is hostile about a machine: words before a command, and environment variables."""
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    return {
        "no home directory": ([], {"HOME": "/proc/nonexistent"}),  # root cannot make it either
        "a cache that cannot be written": ([], {"HOME": str(home), "XDG_CACHE_HOME": "/proc"}),
        "a full disk": (NO_ROOM, {"HOME": str(home)}),
    }


class Environment:
    """An installed package, and what its commands find around them."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self.python, self.vishwamai = str(binaries / "python"), str(binaries / "vishwamai")
        self.folder = folder
        self.elsewhere = folder / "elsewhere"  # nothing of the repository is on the path there
        self.elsewhere.mkdir(parents=True)
        self.around = {"PATH": os.environ["PATH"], "JAX_PLATFORMS": "cpu", "HOME": "/nonexistent"}

    def run(self, place: str, *words: str, status: int = 0, says: str = "", once: str | None = None) -> str:
        """What a command prints.

        Raises:
          Failed: it ends with another status, does not say what it must, says more than once what it may say `once`, or
            prints a traceback.
        """
        before, more = places(self.folder)[place]
        done = subprocess.run(
            [*before, *words], cwd=self.elsewhere, env=self.around | more, capture_output=True, text=True, check=False
        )
        output = done.stdout + done.stderr
        repeated = once is not None and output.count(once) > 1
        if done.returncode != status or says not in output or repeated or (status and "Traceback" in output):
            raise Failed(
                f"with {place}: {' '.join(words)}\nended with status {done.returncode}, not {status} and {says!r}; it "
                f"said:\n{output[-3000:]}"
            )
        return done.stdout

    def paste(self, place: str, page: Path) -> str:
        return self.run(place, self.python, "-P", str(ROOT / "tools" / "paste.py"), str(page)).splitlines()[-1]


def bare(environment: Environment) -> Iterator[str]:
    """What needs jax and numpy alone."""
    for place in places(environment.folder):
        for page in BARE:
            yield f"{place}: {environment.paste(place, page)}"


def every_page(environment: Environment) -> Iterator[str]:
    """What every page shows, without a home directory."""
    for name, why in LEFT_OUT.items():
        yield f"{name}: left out, it {why}"
    for page in pages():
        if page not in BARE:
            yield environment.paste("no home directory", page)


def prepared(environment: Environment) -> tuple[Path, Path]:
    """A small training run's configuration, and the model that it makes."""
    text, config, output = (environment.folder / name for name in ("text.txt", "run.json", "first"))
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    run = {
        "model": {"config": MODEL},
        "tokenizer": {"vocab_size": 300},
        "data": {"sources": [{"paths": [str(text)]}], "sequence_length": 32},
        "checkpoint": {"every": 5, "keep": 2},
        "steps": 40,
        "batch_size": 4,
    }
    config.write_text(json.dumps(run))  # JSON is YAML
    environment.run("no home directory", environment.vishwamai, "train", str(config), "--output", str(output))
    return config, output / "model"


def full_disk(environment: Environment, config: Path, model: Path) -> Iterator[str]:
    """Commands say in words what could not be written; one that needs no file works."""
    place, command = "a full disk", environment.vishwamai
    environment.run(place, command, "bench", "--quick", "--ops", "norm", "--target", "none", "--no-model", status=2,
                    says="report.json could not be written")  # fmt: skip
    environment.run(place, command, "train", str(config), "--output", "full", status=2, says="could not be written")
    environment.run(place, command, "tune", "--quick", "--ops", "norm", "--directory", "tables", status=2,
                    says="could not be written")  # fmt: skip
    environment.run(place, command, "generate", str(model), "--prompt", "the", "--max-new-tokens", "4")
    yield f"{place}: bench, train and tune name the file; generate answers"


def interrupted(environment: Environment, config: Path, model: Path, count: int, seed: int) -> Iterator[str]:
    """Every command, interrupted `count` times."""
    chance = random.Random(seed)
    for command in commands(environment.vishwamai, config):
        yield from trials(command, environment.folder / command.name, environment.around, count, chance)
    where = environment.folder / "serve"
    yield from serve_trials(environment.vishwamai, model, where, environment.around, count, chance)


def everything(environment: Environment, count: int, seed: int) -> Iterator[str]:
    """All of it, the interrupts first; one line for each thing that held."""
    config, model = prepared(environment)
    yield "train: a small model"
    yield from full_disk(environment, config, model)
    yield from interrupted(environment, config, model, count, seed)
    yield from every_page(environment)


MISSING = "the native CPU kernels are not built"


def without_native(environment: Environment) -> Iterator[str]:
    """A short hour where the wheel was installed without a compiler: every command does its work, and says once for the
    module that XLA takes its place.
    """
    place, command = "no home directory", environment.vishwamai
    for page in BARE[:1]:
        yield environment.paste(place, page)
    config, model = prepared(environment)
    yield "train: a small model"
    prompt = ("--prompt", "the", "--max-new-tokens", "4")
    for words in (
        ("generate", str(model), *prompt),
        ("generate", str(model), *prompt, "--quantize", "int8"),
        ("train", str(config), "--output", "again"),
        ("bench", "--quick", "--ops", "norm", "--target", "none", "--no-model"),
    ):
        environment.run(place, command, *words, once=MISSING)
        yield f"{words[0]}: works, and names the module once at most"
    environment.run(place, command, "generate", str(model), *prompt, says=MISSING)
    yield from serve_trials(command, model, environment.folder / "serve", environment.around, 0, random.Random(0))


def follow(lines: Iterator[str], end: float) -> bool:
    """Prints each line after the seconds since the call; whether all was done by a moment of the monotonic clock.
    Nothing is begun after it.
    """
    start = time.monotonic()
    for line in lines:
        now = time.monotonic()
        print(f"{now - start:4.0f} s  {line}", flush=True)
        if now > end:
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="where python and vishwamai are, with its extras")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the moments and the signals")
    parser.add_argument("--interrupts", type=int, default=4, help="of each command (4)")
    parser.add_argument("--minutes", type=float, default=60.0, help="nothing is begun after so long (60)")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    print(f"first hour: --seed {arguments.seed} repeats these moments", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment(arguments.bin.absolute(), Path(folder))
        try:
            complete = follow(everything(environment, arguments.interrupts, arguments.seed), end)
        except Failed as error:
            print(f"first hour: FAILED (--seed {arguments.seed}): {error}", file=sys.stderr)
            return 1
    print("first hour: all of it" if complete else "first hour: NOT CHECKED TO THE END, there was no time for the rest")
    return 0


if __name__ == "__main__":
    sys.exit(main())
