"""`vishwamai quantize`: transformers with the library compressed-tensors, and every command here, read its files."""

import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import world
from vishwamai.cli import main
from vishwamai.core.qtensor import QTensor
from vishwamai.models import from_pretrained
from vishwamai.models.checkpoint import named_parameters
from vishwamai.models.compressing import packed
from vishwamai.ops.quantization import quantize
from vishwamai.ops.quantization.search import searched

compressed_tensors = pytest.importorskip("compressed_tensors")
TEXT = Path(types.__file__).read_text(encoding="utf-8")
TOKENS = [[1, 7, 300, 42, 9000, 5, 6, 77]]


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def source():
    return world.tiny("llama2", hidden_size=64, intermediate_size=96)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT[:2000], encoding="utf-8")
    return path


def logits(directory):
    model = from_pretrained(directory, dtype=jnp.float32, quantize="keep")
    assert any(isinstance(value, QTensor) for *_, value in named_parameters(model))
    return np.asarray(model.logits(model(jnp.asarray(TOKENS))))


@pytest.mark.parametrize("form", ["int4", *(pytest.param(form, marks=pytest.mark.long) for form in ("int8", "fp8"))])
def test_transformers_reads_it_and_computes_the_same(form, source, tmp_path):
    assert main(["quantize", str(source), "--format", form, "-o", str(tmp_path / "out")]) == 0
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = peer(torch.tensor(TOKENS)).logits.numpy()
    plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        before = plain(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(logits(tmp_path / "out"), expected, atol=2e-5 * np.abs(expected).max())
    error = np.abs(expected - before).max() / np.abs(before).max()
    assert 0 < error < {"int8": 0.02, "int4": 0.3, "fp8": 0.1}[form]
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = compressed_tensors.quantization.QuantizationConfig.model_validate(settings)
    assert config.config_groups["group_0"].weights.num_bits == (4 if form == "int4" else 8)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_those_of_the_library(bits):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    values = np.random.default_rng(0).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, 37)).astype(np.int8)
    for layout in (values, np.asfortranarray(values)):
        words = packed(layout, bits)
        np.testing.assert_array_equal(words, pack_to_int32(torch.tensor(values), bits).numpy())
        assert words.flags.c_contiguous


@pytest.mark.turns(2)
def test_a_calibration_weighs_the_errors(source, text, tmp_path, capsys):
    words = ["quantize", str(source), "--format", "int4", "--max-tokens", "32", "-o"]
    assert main([*words, str(tmp_path / "plain")]) == 0
    assert main([*words, str(tmp_path / "calibrated"), "--calibrate", str(text)]) == 0
    assert "int4, a scale for 32 inputs" in capsys.readouterr().out
    plain, calibrated = (from_pretrained(tmp_path / name, dtype=jnp.float32) for name in ("plain", "calibrated"))
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(calibrated)))
    assert main(["evaluate", str(tmp_path / "calibrated"), "--text", str(text), "--quantize", "keep", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quantize"] == "keep"


@pytest.mark.turns(2)
def test_a_search_lessens_the_squared_error_that_it_is_told_to():
    x = jax.random.normal(jax.random.key(0), (96, 24)) * jnp.exp(jax.random.normal(jax.random.key(1), (96, 1)))
    importance = jnp.exp(2 * jax.random.normal(jax.random.key(2), (96,)))

    def error(q, weights=None):
        squares = (q.dequantize() - x) ** 2
        return float(jnp.sum(squares if weights is None else weights[:, None] * squares))

    for form, block, gain in (("int4", 40, 0.85), ("int8", 64, 1.0)):
        absmax, least = quantize(x, form, axis=-2, block_size=block), searched(x, form, block)
        assert error(least) < gain * error(absmax), form
        assert least.values.dtype == absmax.values.dtype and least.scales.shape == absmax.scales.shape
        weighed = searched(x, form, block, importance)
        assert error(weighed, importance) <= error(least, importance)
    shifted = x + 0.7 * jnp.exp(jax.random.normal(jax.random.key(1), (96, 1)))
    with_zeros = searched(shifted, "uint4", 40)
    squares = [float(jnp.sum((searched(shifted, form, 40).dequantize() - shifted) ** 2)) for form in ("uint4", "int4")]
    assert squares[0] < 0.7 * squares[1] and with_zeros.scales.dtype == jnp.uint32 and with_zeros.values.max() == 15
    assert error(searched(x, "uint4", 40, importance), importance) <= error(searched(x, "uint4", 40), importance)
    for column in (0.0, 0.3, -0.3):  # blocks of one number
        np.testing.assert_allclose(searched(jnp.full((8, 1), column), "uint4", 8).dequantize(), column, rtol=1e-4)
    broken = searched(x.at[3, 1].set(jnp.nan), "uint4", 40).dequantize()
    assert jnp.isnan(broken[:40, 1]).all() and jnp.isfinite(broken[:, 2:]).all()
    narrow = searched(x, "int4", 40, scale_dtype="bfloat16")
    assert (narrow.scales == narrow.scales.astype(jnp.bfloat16)).all()
    assert error(narrow) < 1.1 * error(searched(x, "int4", 40))
    edges = searched(x.at[:40, 0].set(0).at[3, 1].set(jnp.nan), "int4", 40)
    assert (edges.dequantize()[:40, 0] == 0).all() and edges.scales[0, 0] == 1
    assert jnp.isnan(edges.dequantize()[:40, 1]).all() and jnp.isfinite(edges.dequantize()[:, 2:]).all()


def test_what_cannot_be_written_is_named(source, text, tmp_path, capsys):
    full = tmp_path / "full"
    full.mkdir()
    (full / "config.json").write_text("{}")
    odd = world.tiny("llama2", intermediate_size=48)
    for words, said in (
        ([str(source), "--format", "int4", "-o", str(full)], "holds a model already; choose a new directory."),
        ([str(source), "--format", "int4", "-o", str(source)], "holds a model already"),
        ([str(tmp_path / "none"), "--format", "int4"], "none: expected a directory with config.json"),
        ([str(odd), "--format", "int4"], "the products have 32, 48 inputs, which are not multiples of 32"),
        ([str(source), "--format", "fp8", "--calibrate", str(text)], "fp8 has one scale for each output"),
        ([str(source), "--format", "int4", "--calibrate", "none"], "--calibrate none: No such file or directory"),
    ):
        words = words if "-o" in words else [*words, "-o", str(tmp_path / "out")]
        assert main(["quantize", *words]) == 2, words
        assert said in capsys.readouterr().err and not (tmp_path / "out" / "config.json").exists(), words
    assert main(["quantize", str(source), "--format", "int4", "-o", str(tmp_path / "once")]) == 0
    assert main(["quantize", str(tmp_path / "once"), "--format", "int4", "-o", str(tmp_path / "twice")]) == 2
    assert "is published quantized; pass the model that it was made from." in capsys.readouterr().err
