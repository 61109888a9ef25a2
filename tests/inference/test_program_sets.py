"""Programs compiled elsewhere: written whole or not at all, read by a start that they fit, declined by name."""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from models_peer import Peer
from vishwamai.cli import main, model, serve
from vishwamai.core import caches, jax_private
from vishwamai.core.errors import CacheWarning, DeviceError, ShapeError
from vishwamai.inference import Sampling, kept_programs, plan_load
from vishwamai.inference.pools import make_pools
from vishwamai.inference.program_sets import FILE, ProgramSet, fingerprint, write_set
from vishwamai.inference.sharding import logical_rules, serving_mesh
from vishwamai.models import Decoder, decoder, from_pretrained
from vishwamai.models.shapes import decoder_shapes

WORDS = ["--max-sequences", "2", "--step-tokens", "8", "--max-length", "32", "--page-size", "8", "--no-keep-packed"]
OPTIONS = [Sampling(max_new_tokens=5, ignore_eos=True), Sampling(max_new_tokens=5, temperature=1.0, seed=3)]
PROMPTS = [[5, 17, 3], list(range(20))]
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    Peer("Llama").save(directory)
    return directory


@pytest.fixture(scope="module")
def programs(checkpoint, tmp_path_factory):
    """A set for this machine, as the command writes it, and what the command reports of it."""
    directory = tmp_path_factory.mktemp("sets") / "programs"
    report = directory.with_name("report.json")
    words = ["compile", str(checkpoint), "--target", "cpu", "-o", str(directory), *WORDS, "--json", str(report)]
    assert main(words) == 0
    return directory, json.loads(report.read_text())


def planned(checkpoint, *words, programs=None, required=False):
    """What `serve` loads."""
    parser = argparse.ArgumentParser()
    serve.configure(parser)
    return model.plan(parser.parse_args([str(checkpoint), *WORDS, *words]), None, None, programs, required)


def answers(engine):
    return [one.token_ids for one in engine.generate(PROMPTS, OPTIONS)]


def test_a_start_reads_all_programs_and_answers_the_same(checkpoint, programs, monkeypatch, capsys):
    directory, report = programs
    expected = answers(planned(checkpoint).engine())
    load = planned(checkpoint, programs=directory)
    assert f"programs are read from {directory}" in capsys.readouterr().err
    jax.clear_caches()
    monkeypatch.setattr(decoder, "layer", lambda *_: pytest.fail("a layer was traced"))
    engine = load.engine()
    assert answers(engine) == expected and engine.programs.from_cache == engine.programs.total
    files = sorted(path for path in directory.iterdir() if path.name != FILE)
    assert report["bytes"] == sum(path.stat().st_size for path in files) and report["seconds"] > 0
    assert len(report["programs"]) == len(files) == engine.programs.total and report["target"] == "this machine"
    assert directory.stat().st_mode & 0o777 == 0o700 and {p.stat().st_mode & 0o777 for p in files} == {0o600}


def test_sizes_that_options_leave_open_are_those_of_the_set(checkpoint, tmp_path, monkeypatch):
    """Less memory at the start changes nothing, as long as the pages fit."""
    wide = plan_load(checkpoint, max_sequences=2, max_tokens=8, page_size=8, num_pages=40)
    monkeypatch.setattr(Decoder, "__init__", lambda *_, **__: pytest.fail("loaded"))
    entries = fingerprint(wide)
    compiled = ProgramSet(tmp_path, entries, {})
    assert compiled.sizes == {"num_pages": 40, "max_length": 256, "num_states": None, "mesh": None}
    load = plan_load(checkpoint, max_sequences=2, max_tokens=8, page_size=8, **compiled.sizes)
    assert compiled.differences(load) == [] and load.num_pages == 40
    with pytest.raises(ShapeError, match="num_pages is 31; pass at least 32"):
        plan_load(checkpoint, max_length=256, page_size=8, num_pages=31)
    (text,) = compiled.differences(dataclasses.replace(load, num_pages=39))
    assert text == "num_pages is 39 here and 40 in the programs (see --memory)"


def test_a_set_of_something_else_is_declined_by_name(checkpoint, programs, monkeypatch, capsys):
    directory, _ = programs
    changes = {
        "max_sequences is 3 here and 2 in the programs (pass --max-sequences 2)": ["--max-sequences", "3"],
        "dtype is float32 here and bfloat16 in the programs (pass --dtype bfloat16)": ["--dtype", "float32"],
        "quantize is int8 here and None in the programs (leave out --quantize)": ["--quantize", "int8"],
        "kernels.block_size is 64 here and None in the programs": ["--optimization", "block_size=64"],
    }
    for text, words in changes.items():
        load = planned(checkpoint, *words, programs=directory)
        err = " ".join(capsys.readouterr().err.split())
        assert load.store is not None and not isinstance(load.store, ProgramSet)
        assert text in err and "This start compiles its own; compile them again" in err, err
    load = planned(checkpoint)
    for entry, change in {
        "jax": lambda patch: patch.setattr(importlib.metadata, "version", lambda name: "0.0"),
        "vishwamai": lambda patch: patch.setattr(kept_programs, "source_of_cpu", lambda: ("another", "")),
        "devices": lambda patch: patch.setattr(kept_programs, "machine", lambda: ("another",)),
        "XLA_FLAGS": lambda patch: patch.setenv("XLA_FLAGS", "--xla_another"),
    }.items():
        with monkeypatch.context() as patch:
            change(patch)
            texts = ProgramSet.read(directory).differences(load)
        assert any(text.startswith(f"{entry} is ") for text in texts), (entry, texts)
        assert entry != "jax" or f"(pip install jax=={jax.__version__})" in " ".join(texts)
    other = dataclasses.replace(load, config=dataclasses.replace(load.config, norm_eps=1.0))
    (text,) = ProgramSet.read(directory).differences(other)
    assert text == f"model.norm_eps is 1.0 here and {load.config.norm_eps} in the programs"
    assert ProgramSet.read(directory).differences(load) == []


def test_required_programs_end_the_start(checkpoint, programs, capsys, tmp_path):
    directory, _ = programs
    words = ["serve", str(checkpoint), *WORDS, "--port", "0", "--require-programs"]
    assert main([*words, "--programs", str(directory), "--dtype", "float32"]) == 2
    assert "dtype is float32 here and bfloat16 in the programs" in capsys.readouterr().err
    assert main([*words, "--programs", str(tmp_path)]) == 2
    assert f"{tmp_path} has no {FILE}; pass the directory that" in capsys.readouterr().err
    assert main(words) == 2 and "--require-programs is about --programs DIR" in capsys.readouterr().err


def copied(directory, target):
    caches.private_directory(target)
    for path in directory.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
        (target / path.name).chmod(0o600)
    return target


def test_a_damaged_or_open_program_is_compiled_again(checkpoint, programs, tmp_path):
    directory = copied(programs[0], tmp_path / "programs")
    files = sorted(path for path in directory.iterdir() if path.name != FILE)
    files[0].write_bytes(files[0].read_bytes()[:-9])
    files[1].unlink()
    files[2].chmod(0o666)
    load = planned(checkpoint, programs=directory)
    with pytest.warns(CacheWarning, match="cannot be loaded .*it is compiled again"):
        engine = load.engine()
    assert engine.programs.total - engine.programs.from_cache == 3
    with pytest.raises(DeviceError, match="cannot be loaded .the file is damaged.; compile the programs again"):
        planned(checkpoint, programs=directory, required=True).engine()
    (directory / FILE).chmod(0o666)
    with pytest.raises(DeviceError, match="may be written by other users"):
        ProgramSet.read(directory)
    (directory / FILE).chmod(0o600)
    for text in ("{", '{"format": 9}', '{"format": 1, "programs": {"a": {"file": "../x"}}, "entries": {}}', "[]"):
        (directory / FILE).write_text(text)
        with pytest.raises(DeviceError, match="cannot be read: .*; compile the programs again"):
            ProgramSet.read(directory)


def test_nothing_stays_of_a_set_that_was_interrupted(checkpoint, tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(kept_programs, "write_program", interrupted)
    words = ["compile", str(checkpoint), "--target", "cpu", *WORDS, "-o"]
    assert main([*words, str(tmp_path / "programs")]) == 130 and not list(tmp_path.iterdir())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main([*words, str(tmp_path / "full")]) == 2
    assert "is not empty; choose a new directory" in capsys.readouterr().err


def test_the_help_of_the_command(capsys):
    with pytest.raises(SystemExit):
        main(["compile", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "vishwamai serve DIR --programs programs" in text
    shared = ("--max-sequences", "--step-tokens", "--dtype", "--quantize", "--kv-dtype", "--mesh", "--max-adapters")
    assert all(option in text for option in (*shared, "--target", "--json")) and "--compile {" not in text
    assert main(["compile", "none", "--target", "h100", "-o", "none"]) == 2
    assert "is a GPU, but this compiles with libtpu" in capsys.readouterr().err


def kinds(tree):
    return [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("axes", [None, "tensor=2"])
def test_shapes_are_those_of_the_arrays(checkpoint, quantize, axes):
    """A decoder of shapes and its pools have the structure, shapes, dtypes and shardings of the loaded ones."""
    mesh = None if axes is None else serving_mesh(axes)
    load = plan_load(checkpoint, max_length=32)
    place, options = SingleDeviceSharding(jax.devices()[0]), {}
    if mesh is not None:
        place = mesh, logical_rules(load.config, mesh)
        options = {"mesh": mesh, "rules": place[1]}
    loaded = from_pretrained(checkpoint, quantize=quantize, **options)
    described = decoder_shapes(checkpoint, load.config, jnp.dtype("bfloat16"), quantize, place)
    assert kinds(described) == kinds(loaded) and jax.tree.structure(described) == jax.tree.structure(loaded)
    for dtype in ("bfloat16", "int8"):
        pools = [make_pools(m, 8, 4, jnp.dtype(dtype), [1, 2, 3], mesh) for m in (loaded, described)]
        assert kinds(pools[0]) == kinds(pools[1])


def test_a_program_of_several_devices_is_read_back():
    """Of a mesh of CPU devices, without collectives, which jaxlib mixes up."""
    mesh = serving_mesh("tensor=2")
    split, everywhere = NamedSharding(mesh, PartitionSpec(None, "tensor")), NamedSharding(mesh, PartitionSpec())
    x, y = jax.device_put(jnp.arange(8.0).reshape(2, 4), split), jax.device_put(jnp.float32(3), everywhere)
    with jax.set_mesh(mesh):
        program = kept_programs.writable(jax.jit(lambda x, y, n: {"sum": x * y + n}).lower(x, y, np.int32(2)))
    parts = jax_private.serialized(program)
    assert parts is not None
    header = json.loads(json.dumps(parts[1]))
    assert header["input_specs"][:2] == [[None, "tensor"], []] and header["output_specs"] == [[None, "tensor"]]
    trees = jax.tree.structure(((x, y, np.int32(2)), {})), jax.tree.structure({"sum": 0})
    again = jax_private.deserialized(parts[0], header, mesh, *trees)
    result = again(x, y, np.int32(2))["sum"]
    assert result.sharding == split and (np.asarray(result) == np.arange(8.0).reshape(2, 4) * 3 + 2).all()


@needs_libtpu
@pytest.mark.long
@pytest.mark.parametrize("target, axes", [("v6e", None), ("v6e-4", "tensor=2"), ("v5e", None)])
def test_programs_of_a_tpu_are_written_and_declined_here(checkpoint, target, axes, tmp_path, capsys):
    options = {} if axes is None else {"mesh": axes, "kv_dtype": "int8", "quantize": "int8"}
    load = plan_load(checkpoint, target=target, max_sequences=1, max_tokens=16, max_length=32, page_size=8, **options)
    directory = tmp_path / "programs"
    written = write_set(load, directory)
    compiled = ProgramSet.read(directory)
    assert len(written) == len(compiled.files) and all(entry.bytes > 1000 for entry in written)
    assert compiled.entries["devices"].endswith(
        {"v6e": "v6e", "v6e-4": "2 devices of v6e in 2x1x1", "v5e": "v5e"}[target]
    )
    assert compiled.differences(load) == []
    words = [*WORDS, "--max-sequences", "1", "--step-tokens", "16"]
    planned(checkpoint, *words, programs=directory)
    text = " ".join(capsys.readouterr().err.split())
    assert re.search(r"devices is (2 devices of )?cpu \w+ here and .*v\d\w+.* in the programs", text)
    entry = next(iter(compiled.files.values()))
    assert b"pjrt" in zlib.decompress((directory / entry["file"]).read_bytes()[32:])
