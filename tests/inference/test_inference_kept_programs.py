"""A second engine reads the programs of the first: it traces no layer, answers the same and compiles nothing later."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import zlib

import jax
import numpy as np
import pytest
from flax import nnx

import rotation
from vishwamai.core import caches, jax_private
from vishwamai.core.errors import CacheWarning
from vishwamai.core.op import Op
from vishwamai.inference import Engine, Limits, Sampling, kept_programs
from vishwamai.inference.step_shapes import StepShape, host_tables
from vishwamai.models import Decoder, ModelConfig, decoder

CONFIG = ModelConfig.from_dict(
    {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
)
LIMITS = Limits(max_sequences=2, max_tokens=8, max_length=32, page_size=8)
PROMPTS = [[5, 17, 3], list(range(20))]
OPTIONS = [Sampling(max_new_tokens=6, ignore_eos=True), Sampling(max_new_tokens=6, temperature=1.0, seed=3, logprobs=2)]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of kept programs; the directory of JAX's cache is taken back after each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", str(caches.cache_directory("jax")))
    least = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield caches.cache_directory("jax") / "traced"
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


@pytest.fixture
def traced(monkeypatch):
    """The tokens of each layer that is traced."""
    found, layer = [], decoder.layer

    def counted(config, kind, arrays, carry, *rest):
        found.append(carry[0].shape[1])
        return layer(config, kind, arrays, carry, *rest)

    monkeypatch.setattr(decoder, "layer", counted)
    return found


@contextlib.contextmanager
def nothing_compiles():
    def seen(event, duration_secs, **kwargs):
        if "compile" in event or "trace" in event:
            pytest.fail(event)

    jax.monitoring.register_event_duration_secs_listener(seen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(seen)


def made(config=CONFIG, **options):
    return Engine(Decoder(config, rngs=nnx.Rngs(0)), limits=LIMITS, **options)


def answers(engine):
    return [(one.token_ids, one.logprobs) for one in engine.generate(PROMPTS, OPTIONS)]


OPTIONAL = [{"drafts": 2}, {"optimization": {"attention_memory_efficient": False}}]


@pytest.mark.parametrize("options", [{}, *rotation.in_turn(5, OPTIONAL)])
def test_the_second_engine_compiles_nothing(options, cache):
    first = made(**options)
    expected, kept = answers(first), len(list(cache.iterdir()))
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    jax.clear_caches()  # as in another process
    with nothing_compiles():
        second = Engine(model, limits=LIMITS, **options)
        assert answers(second) == expected
    assert second.programs.compiled == second.programs.total and len(list(cache.iterdir())) == kept
    assert {entry.path for entry in caches.entries("jax")} >= set(cache.iterdir())  # `vishwamai cache` has them


@pytest.mark.turns(5)
def test_an_engine_of_eight_bit_pages_traces_what_measures_their_scales_alone(cache, traced):
    expected = answers(made(kv_dtype="int8"))
    del traced[:]
    second = made(kv_dtype="int8")
    assert len(traced) == 1
    with nothing_compiles():
        assert answers(second) == expected


@pytest.mark.turns(5)
def test_a_program_of_something_else_is_traced(cache, traced, monkeypatch):
    made(compile="lazy")
    others = [
        ({"optimization": {"attention_memory_efficient": False}}, lambda patch: None),
        ({"config": dataclasses.replace(CONFIG, norm_eps=1e-3)}, lambda patch: None),
        ({}, lambda patch: patch.setenv("VISHWAMAI_CPU_THREADS", "1")),
        ({}, lambda patch: patch.setattr(kept_programs, "source_of_cpu", lambda: "another")),
        ({}, lambda patch: patch.setattr(kept_programs, "machine", lambda: ("another",))),
    ]
    for options, change in others:
        del traced[:]
        before = set(cache.iterdir())
        with monkeypatch.context() as patch:
            change(patch)
            made(**options, compile="lazy")
        assert traced and set(cache.iterdir()) > before
    del traced[:]
    made(compile="lazy")
    assert not traced


@pytest.mark.turns(5)
@pytest.mark.filterwarnings("ignore:.*it is compiled again")
def test_a_damaged_program_is_made_again(cache, traced):
    made(compile="lazy")
    assert cache.stat().st_mode & 0o777 == 0o700 and {p.stat().st_mode & 0o777 for p in cache.iterdir()} == {0o600}
    for damage in (lambda data: data[:-9], lambda data: b"", lambda data: data[:40] + b"x" + data[41:]):
        for path in cache.iterdir():
            path.write_bytes(damage(path.read_bytes()))
        for again in (True, False):
            del traced[:]
            engine = made(compile="lazy")
            assert bool(traced) == again
    assert len(engine.generate(PROMPTS[:1], OPTIONS[0])[0].token_ids) == 6


def content_of(path):
    """The header of a file, and the program below it."""
    content = path.read_bytes()
    assert hashlib.sha256(content[32:]).digest() == content[:32]
    text, _, executable = zlib.decompress(content[32:]).partition(b"\n")
    return json.loads(text), executable


@pytest.mark.turns(3)
def test_a_file_is_a_header_in_json_and_what_xla_writes(cache):
    """No part of it is a pickle, and outputs of every kind come back: tuples, pages, named tuples."""
    made(kv_dtype="int8", compile="lazy")
    headers, programs = zip(*map(content_of, sorted(cache.iterdir())))
    assert {name for header in headers for name in header} == {
        "name", "committed", "inputs", "input_types", "output_types", "donated", "outputs",
    }  # fmt: skip
    outputs = json.dumps([header["outputs"] for header in headers])
    assert all(name in outputs for name in ('"tuple"', '"Sampled"', '"argument"', '"array"'))
    assert all(program.startswith(b"\x0a") or b"jit_" in program for program in programs)


@pytest.mark.turns(6)
def test_programs_that_others_could_have_written_are_not_loaded(cache, traced, monkeypatch):
    """A program is machine code: a folder or a file that another user may write, or that is a link, is declined."""
    made(compile="lazy")
    paths = sorted(cache.iterdir())
    monkeypatch.setattr(jax_private, "deserialized", lambda *_: pytest.fail("code of another user ran"))
    contents = {path: path.read_bytes() for path in paths}

    def poison():
        for path in paths:
            path.unlink(missing_ok=True)
            path.write_bytes(contents[path])
            path.chmod(0o600)

    def linked():
        for path in paths:
            path.rename(cache.parent / path.name)
            path.symlink_to(cache.parent / path.name)

    changes = [lambda: cache.chmod(0o777), lambda: [path.chmod(0o602) for path in paths], linked]
    for change in changes:
        del traced[:]
        cache.chmod(0o700)
        poison()
        change()
        caches.warn_once.cache_clear()
        with pytest.warns(CacheWarning, match="it is compiled again|not kept for the next start"):
            made(compile="lazy")
        assert traced
    cache.chmod(0o700)
    poison()
    for path in [cache, *paths]:
        if os.geteuid() == 0:
            os.chown(path, 12345, -1)
    with monkeypatch.context() as patch:
        if os.geteuid() != 0:
            patch.setattr("os.geteuid", lambda: 12345)
        caches.warn_once.cache_clear()
        with pytest.warns(CacheWarning, match="belongs to another user"):
            made(compile="lazy")


@pytest.mark.turns(6)
def test_what_jax_has_kept_is_compiled_anew(cache, traced, monkeypatch):
    """A program that was read from JAX's cache lacks functions once it is written again."""
    with monkeypatch.context() as patch:
        patch.setattr(kept_programs, "_path", lambda *args: None)
        expected = made(compile="lazy").generate(PROMPTS[:1], OPTIONS[0])
    assert not cache.exists() and list(cache.parent.iterdir())
    for again in (True, False):
        del traced[:]
        assert made(compile="lazy").generate(PROMPTS[:1], OPTIONS[0]) == expected and bool(traced) == again


@pytest.mark.turns(6)
def test_a_program_that_xla_declines_to_load_is_made_again(cache, traced, monkeypatch):
    def fails(*args):
        raise jax.errors.JaxRuntimeError("of another XLA")

    made(compile="lazy")
    del traced[:]
    monkeypatch.setattr(jax_private, "deserialized", fails)
    with pytest.warns(CacheWarning, match="the program cannot be loaded .of another XLA.; it is compiled again"):
        made(compile="lazy")
    assert traced


@pytest.mark.turns(4)
def test_a_program_with_a_kernel_that_declines_is_not_kept(cache, monkeypatch):
    monkeypatch.setattr(Op, "fallbacks", lambda self, choice: [f"{self.name} declined"])
    made(compile="lazy")
    assert len(list(cache.iterdir())) == 5  # two draws, the zeros, and the placing of a prompt call no operation


@pytest.mark.turns(4)
def test_without_the_cache_nothing_is_kept(tmp_path, traced):
    assert jax.config.values["jax_compilation_cache_dir"] is None
    made(compile="lazy")
    made(compile="lazy")
    assert len(traced) == 4


@pytest.mark.turns(3)
def test_the_identity_is_the_same_in_each_process():
    """It has no address of an object, and names what it is made of."""
    programs = made(compile="lazy").programs
    shape = StepShape(1, 1, 1, 1)
    tables = host_tables(shape, LIMITS, ())
    text = kept_programs.identity(
        programs._forward[shape]._function, (*programs._state(), programs.history, *tables.values())
    )
    assert not re.search(r"\bat 0x[0-9a-f]+", text)
    for part in (
        "_forward",
        str(shape),
        f"norm_eps={CONFIG.norm_eps}",
        "KernelConfig",
        "jax_enable_x64",
        jax.__version__,
    ):
        assert part in text
    assert np.__version__ in text and str(kept_programs.source_of_cpu()) in text
