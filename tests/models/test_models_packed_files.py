"""Packed weights kept in the user's cache are those that packing gives, and serve only what they were made of."""

import collections
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vishwamai.models.checkpoint as checkpoint
from vishwamai.core import ffi
from vishwamai.inference import Sampling, plan_load
from vishwamai.models import (
    Decoder,
    ModelConfig,
    PagedBatch,
    decoder,
    from_pretrained,
    page_shapes,
    save_pretrained,
    storage,
)
from vishwamai.models.packed_files import Form, read_packed

CONFIG = ModelConfig.from_dict(
    {
        "model_type": "qwen3",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
)

packing = pytest.mark.skipif(
    ffi.why_not() is not None, reason="the native module, whose packed form is stored, is not built"
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    save_pretrained(Decoder(CONFIG, rngs=nnx.Rngs(0), stacked=False), path)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VISHWAMAI_WEIGHTS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load(directory: Path, quantize: str | None = None, keep: bool = True) -> tuple[Decoder, list[str]]:
    """The decoder, and what was said."""
    said: list[str] = []
    planned = plan_load(directory, quantize=quantize, max_sequences=1, max_length=32, keep_packed=keep)
    return planned._decoder(directory, planned.config, None, said.append), said


def same(one: Decoder, other: Decoder) -> None:
    ours, theirs = (jax.tree.leaves_with_path(nnx.state(x)) for x in (one, other))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (_, x), (_, y) in zip(ours, theirs):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@packing
@pytest.mark.turns(3)
@pytest.mark.parametrize("quantize", [None, "int8", "int4", "fp8"])
def test_kept_weights_are_those_of_packing(quantize, directory, monkeypatch):
    packed, said = load(directory, quantize, keep=False)
    assert not said and not any(path.is_dir() for path in directory.iterdir())
    made, said = load(directory, quantize)
    assert "packed weights are kept in" in said[0]
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "_read", None)  # no tensor of the checkpoint is read
        mapped, said = load(directory, quantize)
    assert not said
    same(made, packed)
    same(mapped, packed)
    assert mapped.dtype == packed.dtype and mapped.stacked == packed.stacked


@pytest.mark.turns(6)
def test_an_engine_over_kept_weights_gives_the_same_tokens(directory):
    sizes = {"dtype": "float32", "max_sequences": 1, "max_length": 32, "max_tokens": 8, "page_size": 8}
    plans = [plan_load(directory, **sizes, keep_packed=keep) for keep in (False, True, True)]
    answers = [one.engine(compile="lazy").generate([[5, 17]], Sampling(max_new_tokens=8)) for one in plans]
    tokens = [answer.token_ids for (answer,) in answers]
    assert len(tokens[0]) == 8 and tokens[0] == tokens[1] == tokens[2]


BF16 = Form("bfloat16", None, False)


@packing
def test_weights_of_something_else_are_made_again(directory, cache):
    load(directory)
    assert read_packed(directory, BF16) is not None
    save_pretrained(Decoder(CONFIG, rngs=nnx.Rngs(1), stacked=False), directory)
    assert read_packed(directory, BF16) is None
    again, said = load(directory)
    assert said
    same(again, load(directory, keep=False)[0])
    assert read_packed(directory, Form("float32", None, False)) is None
    assert len(list(cache.iterdir())) == 1  # what was made of the other weights is gone
    assert {oct(path.stat().st_mode & 0o777) for path in cache.rglob("*") if path.is_file()} == {"0o600"}
    assert (cache.stat().st_mode & 0o777, next(cache.iterdir()).stat().st_mode & 0o777) == (0o700, 0o700)


@packing
@pytest.mark.parametrize("way", ["replace", "in place"])
def test_weights_of_equal_size_and_time_are_recognised(way, directory, tmp_path):
    """As `cp -p` and the layers of an image leave them."""
    load(directory)
    save_pretrained(Decoder(CONFIG, rngs=nnx.Rngs(1), stacked=False), tmp_path / "other")
    path, other = (folder / "model.safetensors" for folder in (directory, tmp_path / "other"))
    state = path.stat()
    assert other.stat().st_size == state.st_size
    if way == "replace":
        os.replace(other, path)
    else:
        path.write_bytes(other.read_bytes())
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_mtime_ns == state.st_mtime_ns
    assert read_packed(directory, BF16) is None
    same(load(directory)[0], load(directory, keep=False)[0])


@packing
def test_weights_that_came_with_a_checkpoint_are_not_taken(directory, cache, tmp_path):
    load(directory)
    (entry,) = cache.iterdir()
    shutil.copytree(entry, directory / ".vishwamai" / "bfloat16-avx512")
    weights = directory / ".vishwamai" / "bfloat16-avx512" / "weights.bin"
    weights.write_bytes(bytes(weights.stat().st_size))
    expected = load(directory, keep=False)[0]
    same(load(directory)[0], expected)
    for change in (lambda: entry.chmod(0o777), lambda: (entry / "weights.bin").chmod(0o622)):
        change()
        assert read_packed(directory, BF16) is None
        same(load(directory)[0], expected)  # made again, with its own modes
        assert read_packed(directory, BF16) is not None
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    assert read_packed(directory, BF16) is None
    entry.unlink()
    (tmp_path / "elsewhere").rename(entry)
    assert read_packed(directory, BF16) is not None
    (entry / "weights.bin").rename(tmp_path / "weights.bin")
    (entry / "weights.bin").symlink_to(tmp_path / "weights.bin")
    assert read_packed(directory, BF16) is None


@packing
def test_damaged_files_are_made_again(directory, cache):
    load(directory)
    (entry,) = cache.iterdir()
    expected = load(directory, keep=False)[0]
    whole = {path.name: path.read_bytes() for path in entry.iterdir()}
    index = json.loads(whole["index.json"])
    changes = [("index.json", text.encode()) for text in ("", "{", "[]", "5", "null", "[" * 50_000, '{"index": []}')]
    for change in ({"parameters": {}}, {"samples": 1}, {"made_of": None}):
        changes.append(("index.json", json.dumps({**index, "index": {**index["index"], **change}}).encode()))
    changes.append(("weights.bin", whole["weights.bin"][:-64]))
    changes.append(("weights.bin", bytes(4096) + whole["weights.bin"][4096:]))
    changes.append(("weights.bin", b""))
    for name, content in changes:
        (entry / name).write_bytes(content)
        assert read_packed(directory, BF16) is None, content[:40]
    same(load(directory)[0], expected)
    assert read_packed(directory, BF16) is not None


@packing
def test_a_directory_that_cannot_be_written_loads_all_the_same(directory, cache, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda path: collections.namedtuple("Usage", "free")(1000))
        model, said = load(directory)
    assert "packed weights are not kept for the next start" in said[0] and "the disk has 1000 left" in said[0]
    same(model, load(directory, keep=False)[0])
    cache.rmdir()
    cache.touch()
    assert "packed weights are not kept for the next start" in load(directory)[1][0]
    for variable in ("VISHWAMAI_WEIGHTS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "relative")
    model, said = load(directory)
    assert "there is no home directory to keep the weights cache in" in said[0]


def test_weights_of_one_shape_are_rounded_by_one_program(directory, monkeypatch):
    shapes = []
    rounded = storage.quantize

    def counted(x, *args, **options):
        shapes.append(x.shape)
        return rounded(x, *args, **options)

    monkeypatch.setattr(storage, "quantize", counted)
    storage._rounded.cache_clear()
    from_pretrained(directory, quantize="int8")
    storage._rounded.cache_clear()
    assert shapes and len(shapes) == len(set(shapes))


def test_layers_of_one_kind_are_traced_once_in_a_step(monkeypatch):
    model = Decoder(CONFIG, rngs=nnx.Rngs(0), stacked=False)
    calls, layer = [], decoder.layer

    def counted(*args):
        calls.append(args)
        return layer(*args)

    monkeypatch.setattr(decoder, "layer", counted)
    batch = PagedBatch(jnp.array([2]), jnp.arange(4)[None], jnp.array([0, 2]), 2)
    shapes = page_shapes(CONFIG, num_pages=4, page_size=8, dtype=jnp.float32, stacked=False)
    pages = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    jax.make_jaxpr(lambda pages: model.step(jnp.array([3, 4]), pages, batch))(pages)
    assert len(calls) == 1 and len(model.layers) == 3
