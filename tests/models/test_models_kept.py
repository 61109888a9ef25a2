"""Published quantized weights held in their own numbers (`quantize="keep"`): those of the plain weights, in fewer
bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models_peer
from published import FORMATS, write
from vishwamai import ShapeError, UnsupportedError
from vishwamai.core.qtensor import QTensor
from vishwamai.inference import plan_load
from vishwamai.inference.memory import weight_bytes
from vishwamai.models import Decoder, from_pretrained, save_pretrained
from vishwamai.models.storage import Storage
from vishwamai.models.variables import named_parameters

KEPT = [name for name, (*_, form) in FORMATS.items() if form]
PROMPTS = [[3, 9, 27, 4, 12], [7, 1]]


def held(model: Decoder) -> dict[str, QTensor]:
    """The quantized weights of the layers by name and layer."""
    found = named_parameters(model)
    return {f"{name} {layer}": value for name, _, layer, value in found if isinstance(value, QTensor)}


def plain(model: Decoder) -> dict[str, Any]:
    return {f"{name} {layer}": value for name, _, layer, value in named_parameters(model)}


@pytest.mark.turns(6)
@pytest.mark.parametrize("name", KEPT)
def test_kept_weights_are_the_plain_ones_in_fewer_bytes(name: str, tmp_path: Path) -> None:
    published, _ = write(name, tmp_path, num_hidden_layers=2)
    *_, form = FORMATS[name]
    expected = from_pretrained(published, dtype=jnp.float32, stacked=False)
    for stacked in (False, True):
        model = from_pretrained(published, dtype=jnp.float32, quantize="keep", stacked=stacked)
        weights = held(model)
        assert len(weights) == 2 * (3 if name == "mxfp4" else 7)
        for key, weight in weights.items():
            of = Storage(weight.format, weight.block_size)
            assert str(of) == form.replace("ROWS / 2", str(weight.shape[-2] // 2))
            np.testing.assert_array_equal(weight.dequantize(), plain(expected)[key])  # bit for bit
            assert weight.nbytes < 0.36 * plain(expected)[key].nbytes
    tokens = jnp.array(PROMPTS[:1])
    found, wanted = (m.logits(m(tokens)) for m in (model, expected))
    assert np.abs(found - wanted).max() <= 2e-5 * np.abs(wanted).max()


@pytest.mark.turns(6)
@pytest.mark.parametrize("name", KEPT)
def test_64_greedy_tokens_are_those_of_the_plain_weights(name: str, tmp_path: Path) -> None:
    published, directory = write(name, tmp_path)
    kept = from_pretrained(published, dtype=jnp.float32, quantize="keep", stacked=False)
    expected = from_pretrained(directory, dtype=jnp.float32, stacked=False)
    tokens = models_peer.greedy(expected, PROMPTS, 64)
    assert models_peer.greedy(kept, PROMPTS, 64) == tokens


@pytest.mark.parametrize("name", KEPT)
def test_planned_bytes_are_those_of_the_arrays(name: str, tmp_path: Path) -> None:
    published, _ = write(name, tmp_path, num_hidden_layers=2)
    planned = {}
    for how in ("keep", "keep packed"):
        model = from_pretrained(published, quantize=how, stacked=False)
        # On a CPU, arrays of 4-bit numbers take a byte each; packed ones half of it, with float32 scales.
        arrays = sum(x.nbytes for x in jax.tree.leaves(model))
        four_bits = [w for w in held(model).values() if w.format in ("int4", "mxfp4", "uint4")]
        saved = sum(w.values.size // 2 - w.scales.size * (4 - w.scales.dtype.itemsize) for w in four_bits)
        planned[how] = weight_bytes(model.config, 2, quantize=how, directory=published)
        assert planned[how] == arrays - saved
    load = plan_load(published, quantize="keep", max_length=16, max_sequences=1)
    assert load.weights == planned["keep packed"]
    assert (planned["keep packed"] < planned["keep"]) == (name == "awq")
    assert "in its published numbers (other arrays bfloat16)" in str(load)


def test_four_bits_with_zero_points_are_packed_in_four_bits(tmp_path: Path) -> None:
    for name in ("awq", "compressed-asymmetric"):
        published, _ = write(name, tmp_path / name)
        weights = held(from_pretrained(published, quantize="keep packed"))
        if name != "awq":  # float32 scales have more bits than a word beside a zero point
            assert {weight.format for weight in weights.values()} == {"int8"}
            tensors = load_file(published / "model.safetensors")
            narrow = {key: value.astype(np.float16) for key, value in tensors.items() if key.endswith("_scale")}
            save_file(tensors | narrow, published / "model.safetensors")
            weights = held(from_pretrained(published, quantize="keep packed"))
        assert len(weights) == 7 and {weight.format for weight in weights.values()} == {"uint4"}
        expected = plain(from_pretrained(published, dtype=jnp.float32))
        for key, weight in weights.items():
            np.testing.assert_array_equal(weight.dequantize(), expected[key], err_msg=key)
            assert len(np.unique(np.asarray(weight.scales) & 255)) > 4  # zero points of blocks differ


def test_interleaved_and_fused_tensors_are_cut_in_their_own_numbers(tmp_path: Path) -> None:
    """Phi 3 has query, key and value in one tensor, gate and up in another."""
    published, directory = write("gptq-symmetric", tmp_path, model_type="phi3", pad_token_id=0)
    kept = from_pretrained(published, dtype=jnp.float32, quantize="keep")
    expected = plain(from_pretrained(directory, dtype=jnp.float32))
    assert len(held(kept)) == 7
    for key, weight in held(kept).items():
        np.testing.assert_allclose(weight.dequantize(), expected[key], rtol=1e-6, atol=1e-7)


def test_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    published, directory = write("gptq-desc-act", tmp_path / "a")
    with pytest.raises(UnsupportedError, match=r"model.safetensors: rows of a weight .* are not neighbours"):
        from_pretrained(published, quantize="keep")
    with pytest.raises(ShapeError, match="`quantize` is 'keep', but .*config.json has no `quantization_config`"):
        from_pretrained(directory, quantize="keep")
    with pytest.raises(ShapeError, match="`quantize` is 'int5'; pass keep, int8, int4, fp8 or None"):
        from_pretrained(directory, quantize="int5")
    with pytest.raises(UnsupportedError, match="are not neighbours"):
        plan_load(published, quantize="keep", max_length=16, max_sequences=1)

    published, _ = write("gptq", tmp_path / "b")
    config = json.loads((published / "config.json").read_text())
    config["quantization_config"]["sym"] = True
    (published / "config.json").write_text(json.dumps(config))
    with pytest.raises(ShapeError, match="zero points other than 8, and so numbers that int4 does not have"):
        from_pretrained(published, quantize="keep")


def test_layers_of_several_forms_stack_only_apart(tmp_path: Path) -> None:
    """One layer is left out of quantization, as `ignore` of compressed-tensors does."""
    published, directory = write("compressed-tensors", tmp_path, num_hidden_layers=2)
    tensors, ours = load_file(directory / "model.safetensors"), load_file(published / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    ours[name] = tensors[name]
    del ours[f"{name}_scale"]
    save_file(ours, published / "model.safetensors")
    with pytest.raises(UnsupportedError, match="layers/0/up would hold .* as int8 and .* as a plain array"):
        from_pretrained(published, quantize="keep", stacked=True)
    model = from_pretrained(published, dtype=jnp.float32, quantize="keep", stacked=False)
    assert set(plain(model)) - set(held(model)) >= {"up 1"}
    np.testing.assert_array_equal(plain(model)["up 1"], tensors[name].T)


def test_kept_weights_are_not_saved(tmp_path: Path) -> None:
    published, _ = write("compressed-tensors", tmp_path)
    with pytest.raises(ShapeError, match="parameter `query` is a QTensor; save the model that it came from, or load"):
        save_pretrained(from_pretrained(published, quantize="keep"), tmp_path / "again")
