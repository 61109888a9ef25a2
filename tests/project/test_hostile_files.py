"""Damaged files of caches and of training runs: an error of ours, or what the undamaged file gives."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vishwamai.aot.compile import answers
from vishwamai.core import caches, tuning
from vishwamai.core.errors import VishwamaiError
from vishwamai.inference import kept_programs
from vishwamai.training.checkpoints import Checkpoints, set_damaged_aside
from vishwamai.training.records import read_records
from vishwamai.training.step import initial_state
from vishwamai.training.tokens import read_tokens

pytestmark = pytest.mark.filterwarnings("ignore")  # a damaged file is a warning

DEEP = b'{"a":' * 100_000
TYPES: list[Any] = [None, True, -1, 0, 1.5, 10**30, "", "a", [], [5], {}, {"a": [[]]}]


def damage(draw: random.Random, path: Path) -> str:
    """Changes bits, the length or the types of a file; says how."""
    content = bytearray(path.read_bytes())
    kind = draw.choice(["bits", "cut", "longer", "types", "deep", "empty", "other"])
    place = draw.randrange(max(1, len(content)))
    if kind == "bits" and content:
        for _ in range(draw.randint(1, 3)):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del content[place:]
    elif kind == "longer":
        content += draw.randbytes(draw.randint(1, 64))
    elif kind == "types":
        try:
            value = json.loads(content.decode().split("\n")[-1])
            name = draw.choice(list(value))
            content = bytearray(json.dumps({**value, name: draw.choice(TYPES)}).encode())
        except (ValueError, TypeError, LookupError):
            content[place : place + 4] = b"null"
    else:
        content = bytearray({"deep": DEEP, "empty": b"", "other": draw.randbytes(64)}.get(kind, content))
    path.write_bytes(content)
    return f"{kind} of {path.name} at {place}"


def check(count: int, source: Path, folder: Path, read: Callable[[Path], bool]) -> int:
    """Damages a file of a directory `count` times; `read` says whether the result is the right one. Returns how many
    were an error of ours.
    """
    errors = 0
    for seed in range(count):
        place = folder / str(seed)
        shutil.copytree(source, place)
        draw = random.Random(seed)
        how = damage(draw, draw.choice(sorted(path for path in place.rglob("*") if path.is_file())))
        try:
            assert read(place), f"seed {seed}: {how}: another result"
        except VishwamaiError as error:
            errors += 1
            assert len(str(error)) < 2000, how
        except AssertionError:
            raise
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {how}") from error
        shutil.rmtree(place, ignore_errors=True)
    return errors


def counts(few: int, many: int) -> Any:
    return pytest.mark.parametrize(
        "count", [pytest.param(few, id="few"), pytest.param(many, id="many", marks=pytest.mark.long)]
    )


@counts(40, 1000)
def test_answers_of_compilers(count, tmp_path, monkeypatch):
    value = {"needed": 5, "allocations": [{"name": "a", "bytes": 7}]}
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path / "source"))
    answers.write("plans", "k" * 32, value)

    def read(place: Path) -> bool:
        monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(place))
        return answers.read("plans", "k" * 32) in (None, value)

    assert check(count, tmp_path / "source", tmp_path, read) == 0


@counts(40, 1000)
def test_tables_of_tuning(count, tmp_path):
    table = {"pallas_tpu": {"key": {"config": {"block_q": 512}}}}
    caches.write(tmp_path / "source" / "norm.json", json.dumps(table))

    def read(place: Path) -> bool:
        found = tuning.read_own(place / "norm.json")
        return isinstance(found, dict) and all(isinstance(entries, dict) for entries in found.values())

    assert check(count, tmp_path / "source", tmp_path, read) == 0


def doubled(x: jax.Array) -> jax.Array:
    return 2 * x + 1


@counts(6, 200)
def test_kept_programs(count, tmp_path, monkeypatch):
    program, x = jax.jit(doubled), jnp.arange(8.0)
    monkeypatch.setattr(kept_programs, "_path", lambda *_: tmp_path / "source" / "a-cache")
    kept_programs.compiled(program, (x,))
    os.chmod(tmp_path / "source", 0o700)

    def read(place: Path) -> bool:
        place.chmod(0o700)
        monkeypatch.setattr(kept_programs, "_path", lambda *_: place / "a-cache")
        return bool((kept_programs.compiled(program, (x,))(x) == doubled(x)).all())

    assert check(count, tmp_path / "source", tmp_path, read) == 0


@counts(8, 300)
def test_checkpoints_of_training(count, tmp_path):
    """The newest checkpoint, or the one before it."""
    state = initial_state({"w": jnp.arange(6.0).reshape(2, 3)}, optax.adam(0.1))
    later = initial_state({"w": jnp.arange(6.0).reshape(2, 3) + 1}, optax.adam(0.1))
    with Checkpoints(tmp_path / "source" / "checkpoints", keep=2) as checkpoints:
        checkpoints.save(1, state, {"next_index": 1})
        checkpoints.save(2, later, {"next_index": 2})
    saved = {1: np.asarray(state.params["w"]), 2: np.asarray(later.params["w"])}

    def read(place: Path) -> bool:
        set_damaged_aside(place / "checkpoints")
        with Checkpoints(place / "checkpoints", keep=2) as checkpoints:
            restored = checkpoints.restore(state)
        index = restored.data["next_index"]
        assert isinstance(index, int)
        return bool((np.asarray(restored.state.params["w"]) == saved[index]).all())

    check(count, tmp_path / "source", tmp_path, read)


@counts(30, 500)
def test_files_of_a_run(count, tmp_path):
    """Tokens are an error that names the file; lines that are no records are left out."""
    folder = tmp_path / "source"
    folder.mkdir()
    tokens, offsets = np.arange(100, dtype=np.uint16), np.array([0, 40, 100])
    tokens.tofile(folder / "tokens.bin")
    np.save(folder / "offsets.npy", offsets)
    sums = {name: caches.crc32(folder / name) for name in ("tokens.bin", "offsets.npy")}
    (folder / "tokens.json").write_text(json.dumps({"dtype": "uint16", "crc32": sums}))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')

    def read(place: Path) -> bool:
        read_records(place / "metrics.jsonl")
        restored = read_tokens(place)
        return bool((restored.tokens == tokens).all() and (restored.offsets == offsets).all())

    assert check(count, folder, tmp_path, read) > count // 4
