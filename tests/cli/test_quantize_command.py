"""`vishwamai quantize`: transformers with the library compressed-tensors, and every command here, read its files."""

import json
import math
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import world
from vishwamai.cli import main
from vishwamai.core.errors import ShapeError
from vishwamai.core.qtensor import QTensor, of_zero_words
from vishwamai.core.quantized.packed_qtensor import PackedQTensor
from vishwamai.models import from_pretrained
from vishwamai.models.compressing import packed, write_compressed
from vishwamai.models.format_choice import losses
from vishwamai.models.gptq import gptq
from vishwamai.models.layer_files import LayerFiles
from vishwamai.models.moments import layer_moments
from vishwamai.models.storage import Storage
from vishwamai.models.variables import named_parameters
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


@pytest.mark.parametrize(
    "form", ["int4", "int4 --asymmetric", *(pytest.param(form, marks=pytest.mark.long) for form in ("int8", "fp8"))]
)
def test_transformers_reads_it_and_computes_the_same(form, source, tmp_path):
    form, *options = form.split()
    assert main(["quantize", str(source), "--format", form, *options, "-o", str(tmp_path / "out")]) == 0
    # transformers 5.24 makes room for zero points that are not packed, unless it dequantizes at once, into bfloat16.
    how = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if options else {}
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, **how).eval()
    with torch.no_grad():
        expected = peer(torch.tensor(TOKENS)).logits.numpy()
    plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        before = plain(torch.tensor(TOKENS)).logits.numpy()
    tolerance = 2**-7 if options else 2e-5
    np.testing.assert_allclose(logits(tmp_path / "out"), expected, atol=tolerance * np.abs(expected).max())
    error = np.abs(expected - before).max() / np.abs(before).max()
    assert 0 < error < {"int8": 0.02, "int4": 0.3, "fp8": 0.1}[form]
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = compressed_tensors.quantization.QuantizationConfig.model_validate(settings)
    weights = config.config_groups["group_0"].weights
    assert (weights.num_bits, weights.symmetric) == (4 if form == "int4" else 8, not options)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_those_of_the_library(bits):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    values = np.random.default_rng(0).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, 37)).astype(np.int8)
    for layout in (values, np.asfortranarray(values)):
        words = packed(layout, bits)
        np.testing.assert_array_equal(words, pack_to_int32(torch.tensor(values), bits).numpy())
        assert words.flags.c_contiguous


@pytest.fixture(scope="module")
def asymmetric(source, text, tmp_path_factory):
    """A directory of int4 with zero points and int8, rounded by a text."""
    out = tmp_path_factory.mktemp("asymmetric") / "out"
    words = ["--format", "int4", "--asymmetric", "--calibrate", str(text), "--max-tokens", "120", "--bits", "6"]
    assert main(["quantize", str(source), *words, "-o", str(out)]) == 0
    return out


def test_zero_points_are_served_in_four_bits(asymmetric):
    from vishwamai.inference.loading import plan_load

    planned = plan_load(asymmetric, quantize="keep", max_sequences=1, max_tokens=64, max_length=256)
    model = planned.decoder()
    weights = [value for *_, value in named_parameters(model) if isinstance(value, PackedQTensor)]
    size = {"uint4": 4 + 32 / 32, "int8": 8 + 32 / 32}  # a word of 32 bits for 32 numbers
    assert len(weights) == 7 and {weight.format for weight in weights} == set(size)
    for weight in weights:
        assert 8 * weight.nbytes == size[weight.format] * math.prod(weight.shape)
    assert planned.weights == sum(value.nbytes for *_, value in named_parameters(model))
    plain = from_pretrained(asymmetric, dtype=jnp.float32)
    for (name, *_, value), (*_, expected) in zip(named_parameters(model), named_parameters(plain), strict=True):
        if isinstance(value, PackedQTensor):
            np.testing.assert_array_equal(value.unpack().dequantize(), expected, err_msg=name)


def test_the_library_reads_the_zero_points_of_a_mix(asymmetric):
    from compressed_tensors.compressors.base import BaseCompressor
    from safetensors.torch import load_file

    tensors = load_file(asymmetric / "model.safetensors")
    settings = json.loads((asymmetric / "config.json").read_text())["quantization_config"]
    groups = compressed_tensors.quantization.QuantizationConfig.model_validate(settings).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    plain = {n: value for n, _, i, value in named_parameters(from_pretrained(asymmetric, dtype="float32")) if i == 0}
    for name, ending in (("query", "self_attn.q_proj"), ("output", "self_attn.o_proj"), ("down", "mlp.down_proj")):
        stem = f"model.layers.0.{ending}"
        (scheme,) = (group for group in groups if stem in group.targets)
        parts = {key.removeprefix(f"{stem}."): value for key, value in tensors.items() if key.startswith(f"{stem}.")}
        parts["weight_scale"] = parts["weight_scale"].float()
        assert ("weight_zero_point" in parts) == (scheme.weights.num_bits == 4) == (not scheme.weights.symmetric)
        expected = compressor.decompress({**parts}, scheme)["weight"].numpy()
        np.testing.assert_allclose(np.asarray(plain[name]).T, expected, rtol=1e-6, err_msg=name)


def test_zero_points_lessen_the_squared_error(source, tmp_path):
    weights = from_pretrained(source, dtype=jnp.float32)
    products = {(n, i): value for n, p, i, value in named_parameters(weights) if p.matrix and i is not None}
    errors = []
    for options in ([], ["--asymmetric"]):
        out = tmp_path / f"out{len(options)}"
        assert main(["quantize", str(source), "--format", "int4", *options, "-o", str(out)]) == 0
        read = {(n, i): value for n, _, i, value in named_parameters(from_pretrained(out, dtype=jnp.float32))}
        errors.append([float(jnp.sum((read[key] - value) ** 2)) for key, value in products.items()])
    assert all(0 < small < large for large, small in zip(*errors, strict=True)), errors


@pytest.mark.long
def test_a_calibration_lessens_the_loss_that_int4_adds(source, text, tmp_path, capsys):
    words = ["quantize", str(source), "--format", "int4", "--max-tokens", "700", "-o"]
    assert main([*words, str(tmp_path / "plain")]) == 0
    assert main([*words, str(tmp_path / "calibrated"), "--calibrate", str(text)]) == 0
    assert "int4, a scale for 32 inputs; 4.5 bits a weight" in capsys.readouterr().out
    divergences = []
    for name in ("plain", "calibrated"):
        words = ["evaluate", str(tmp_path / name), "--text", str(text), "--quantize", "keep", "--against", str(source)]
        assert main([*words, "--dtype", "float32", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["quantize"] == "keep"
        divergences.append(result["against"]["kl"])
    assert 0 < divergences[1] < 0.9 * divergences[0], divergences


@pytest.fixture(scope="module")
def mixed(source, text, tmp_path_factory):
    """A directory of int4 and int8, of at most 6 bits in the mean."""
    out = tmp_path_factory.mktemp("mixed") / "out"
    words = ["--format", "int4", "--calibrate", str(text), "--max-tokens", "120", "--bits", "6"]
    assert main(["quantize", str(source), *words, "-o", str(out)]) == 0
    return out


def test_a_mix_of_formats_has_the_bits_and_the_numbers_that_transformers_reads(mixed):
    from safetensors.numpy import load_file

    tensors = load_file(mixed / "model.safetensors")
    sizes = {name: tensor for name, tensor in tensors.items() if name.endswith("weight_shape")}
    numbers = sum(int(np.prod(shape)) for shape in sizes.values())
    stored = sum(8 * tensors[name.replace("_shape", end)].nbytes for name in sizes for end in ("_packed", "_scale"))
    assert 4.6 < stored / numbers <= 6
    config = json.loads((mixed / "config.json").read_text())["quantization_config"]
    groups = {group["weights"]["num_bits"]: set(group["targets"]) for group in config["config_groups"].values()}
    assert set(groups) == {4, 8} and sum(map(len, groups.values())) == len(sizes) and "Linear" not in groups[4]
    for fused in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        assert len({f"model.layers.0.{name}" in groups[8] for name in fused}) == 1  # vLLM wants one scheme for these
    peer = transformers.AutoModelForCausalLM.from_pretrained(mixed, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = peer(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(logits(mixed), expected, atol=2e-5 * np.abs(expected).max())


def test_a_mix_of_formats_is_served_as_it_is_evaluated(mixed):
    from vishwamai.inference import Request, Sampling
    from vishwamai.inference.evaluation import Passes
    from vishwamai.inference.loading import plan_load

    planned = plan_load(mixed, quantize="keep", max_sequences=1, max_tokens=64, max_length=256)
    engine = planned.engine(compile="lazy")
    deltas = []
    engine.submit(Request(tuple(TOKENS[0]), Sampling(max_new_tokens=1, temperature=0.0, logprobs=1), deltas.append))
    while not engine.idle:
        engine.step()
    passes = Passes(planned.decoder(), 64, None, tokenizer=planned.tokenizer)
    hidden = passes.hidden([*TOKENS[0], 0], 0)[len(TOKENS[0]) - 1]
    scores = jax.nn.log_softmax(passes.model.logits(hidden).astype(jnp.float32))
    entry = deltas[0].logprobs[0]
    np.testing.assert_allclose(scores[deltas[0].token_ids[0]], entry.logprob, atol=1e-3)


def test_error_feedback_lessens_the_error_of_a_product():
    keys = jax.random.split(jax.random.key(0), 4)
    weight = np.asarray(jax.random.normal(keys[0], (96, 24)) * jnp.exp(jax.random.normal(keys[1], (96, 1))))
    x = np.array(jax.random.normal(keys[2], (400, 96)) @ jax.random.normal(keys[3], (96, 96)), np.float64)
    x[:, 5] = 0.0  # an input that the text never has
    moments = x.T @ x / len(x)

    def error(q, moments=moments):
        difference = np.asarray(q.dequantize(), np.float64) - weight
        return np.trace(difference.T @ moments @ difference)

    for form, block in (("int4", 32), ("uint4", 32), ("int8", 32)):
        options = {"scale_dtype": "bfloat16", "zero_steps": 1}
        least = searched(jnp.asarray(weight), form, block, jnp.diagonal(moments), **options)
        q = gptq(weight, moments, form, block, "bfloat16")
        assert error(q) < 0.75 * error(least), (form, block)
        assert q.values.dtype == least.values.dtype and q.scales.shape == least.scales.shape
        scales, zeros = of_zero_words(q.scales) if form == "uint4" else (q.scales, jnp.zeros(()))
        assert (scales == scales.astype(jnp.bfloat16)).all() and (zeros == jnp.round(zeros)).all()
    alike = gptq(weight, np.zeros((96, 96)), "int4", 32)  # nothing to make up for: every number by itself
    np.testing.assert_array_equal(alike.values, searched(jnp.asarray(weight), "int4", 32).values)
    few = x[:3].T @ x[:3] / 3  # of fewer tokens than inputs
    assert error(gptq(weight, few, "int4", 32), few) < 0.1 * error(searched(jnp.asarray(weight), "int4", 32), few)
    for wrong in (moments[:32, :32], np.full_like(moments, np.nan)):
        with pytest.raises(ShapeError, match="moments"):
            gptq(weight, wrong, "int4", 32)


def test_the_moments_of_a_layer_are_those_of_the_rounded_layers_before_it():
    model = from_pretrained(world.tiny("llama2", num_hidden_layers=2), dtype="float32")
    hidden = model(jnp.asarray(TOKENS))
    first, second = layer_moments(model, TOKENS)
    np.testing.assert_array_equal(model(jnp.asarray(TOKENS)), hidden)
    changed = layer_moments(model, TOKENS)
    np.testing.assert_array_equal(next(changed)["down"], first["down"])
    down = getattr(model.layers[0], "down")  # noqa: B009 (which its type does not have)
    down.set_value(down.get_value() * 30)
    assert np.abs(next(changed)["query"] - second["query"]).max() > 1e-3


def test_one_layer_is_in_memory_at_a_time():
    """And its moments are those of the model that is in memory as a whole."""
    path = world.tiny("llama2", num_hidden_layers=3)
    files = LayerFiles(path, "float32")

    def in_memory(module):
        return [isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(module))]

    expected = layer_moments(from_pretrained(path, dtype="float32"), TOKENS)
    for number, moments in enumerate(layer_moments(files.model, TOKENS, files.layers())):
        assert [any(in_memory(layer)) for layer in files.model.layers] == [i == number for i in range(3)]
        assert all(in_memory(files.model.layers[number]))
        assert not isinstance(files.model.embed.get_value(), jax.Array)
        for name, whole in next(expected).items():
            np.testing.assert_array_equal(moments[name], whole)
    assert not any(in_memory(files.model)) and number == 2


@pytest.mark.turns(2)
def test_the_loss_that_rounding_adds_grows_with_the_error(source):
    model = from_pretrained(source, dtype="float32")
    (fine, coarse) = (losses(model, TOKENS, storage) for storage in (Storage("int8", 32), Storage("int4", 32)))
    assert set(fine) == {(0, "attention"), (0, "output"), (0, "unit"), (0, "down")}
    assert all(0 < 50 * fine[unit] < coarse[unit] for unit in fine)


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
    short = tmp_path / "short"
    short.write_text("")
    for words, said in (
        ([str(source), "--format", "int4", "-o", str(full)], "holds a model already; choose a new directory."),
        ([str(source), "--format", "int4", "-o", str(source)], "holds a model already"),
        ([str(tmp_path / "none"), "--format", "int4"], "none: expected a directory with config.json"),
        ([str(odd), "--format", "int4"], "the products have 32, 48 inputs, which are not multiples of 32"),
        ([str(source), "--format", "fp8", "--calibrate", str(text)], "fp8 has one scale for each output"),
        (
            [str(source), "--format", "int8", "--asymmetric"],
            "--asymmetric gives int4 zero points, but --format is int8",
        ),
        ([str(source), "--format", "int4", "--bits", "5"], "--bits chooses the products by a calibration text"),
        ([str(source), "--format", "int8", "--bits", "5", "--calibrate", str(text)], "a mean goes with int4."),
        ([str(source), "--format", "int4", "--bits", "4", "--calibrate", str(text)], "from 4.5 (int4) to 8.5 (int8)"),
        ([str(source), "--format", "int4", "--calibrate", str(short)], "the text has 1 tokens; pass a longer one."),
        ([str(source), "--format", "int4", "--calibrate", "none"], "--calibrate none: No such file or directory"),
    ):
        words = words if "-o" in words else [*words, "-o", str(tmp_path / "out")]
        assert main(["quantize", *words]) == 2, words
        assert said in capsys.readouterr().err and not (tmp_path / "out" / "config.json").exists(), words
    with pytest.raises(ShapeError, match="`rows` is None; pass the texts that choose the products"):
        write_compressed(source, tmp_path / "out", "int4", bits=5.0)
    with pytest.raises(ShapeError, match="zero points are those of int4"):
        write_compressed(source, tmp_path / "out", "int8", asymmetric=True)
    assert main(["quantize", str(source), "--format", "int4", "-o", str(tmp_path / "once")]) == 0
    assert main(["quantize", str(tmp_path / "once"), "--format", "int4", "-o", str(tmp_path / "twice")]) == 2
    assert "is published quantized; pass the model that it was made from." in capsys.readouterr().err
