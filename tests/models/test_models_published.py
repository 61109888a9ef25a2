"""Quantized checkpoints as they are published load as the plain weights that their formats define."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import world
from published import FORMATS, FURTHER, LLAMA, MOE, PLAIN_ONLY, fp8, nvfp4, write
from vishwamai import ShapeError, UnsupportedError
from vishwamai.core.qtensor import QTensor
from vishwamai.models import Decoder, ModelConfig, from_pretrained, save_pretrained
from vishwamai.models.published import Decoded, decode_index
from vishwamai.models.published.files import quantization
from vishwamai.models.shards import read_header, read_metadata
from vishwamai.models.variables import named_parameters


@pytest.mark.parametrize("name", [*FORMATS, *FURTHER, *PLAIN_ONLY])
def test_a_published_checkpoint_is_its_plain_weights(name: str, tmp_path: Path) -> None:
    published, plain = (from_pretrained(path, dtype=jnp.float32) for path in write(name, tmp_path))
    for found, expected in zip(jax.tree.leaves(published), jax.tree.leaves(plain)):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", FURTHER)
def test_options_of_formats_are_held_in_their_own_numbers(name: str, tmp_path: Path) -> None:
    published, _ = write(name, tmp_path)
    plain, kept = (from_pretrained(published, dtype=jnp.float32, quantize=how) for how in (None, "keep"))
    for (path, _, _, expected), (_, _, _, value) in zip(named_parameters(plain), named_parameters(kept)):
        found = value.dequantize() if isinstance(value, QTensor) else value
        np.testing.assert_array_equal(found, expected, err_msg=path)
    assert any(isinstance(value, QTensor) for *_, value in named_parameters(kept))


def test_what_is_not_quantized_here_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    published, _ = write("packed-groups", tmp_path)
    from_pretrained(published)
    assert f"{published / 'config.json'}: activations, keys and values are quantized there" in caplog.text
    config = json.loads((published / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["b"] = {"weights": {**groups["group_0"]["weights"], "group_size": 20}}
    (published / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"targets` is \[None, None\]; .* groups of which one names model.lay"):
        from_pretrained(published)


def test_groups_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    published, _ = write("packed-groups", tmp_path)
    config = json.loads((published / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 48
    (published / "config.json").write_text(json.dumps(config))
    with pytest.raises(ShapeError, match="a weight of 64 inputs has 1|`group_size` is 48"):
        from_pretrained(published)


def test_other_formats_and_missing_parts_are_named(tmp_path: Path) -> None:
    published, _ = write("gptq", tmp_path)
    config = json.loads((published / "config.json").read_text())

    def settings(**values: Any) -> None:
        changed = {**config, "quantization_config": {**config["quantization_config"], **values}}
        (published / "config.json").write_text(json.dumps(changed))

    settings(bits=5)
    with pytest.raises(
        UnsupportedError, match="config.json: `quantization_config.bits` is 5; the loader reads 2, 3, 4, 8"
    ):
        from_pretrained(published)
    settings(quant_method="hqq")
    with pytest.raises(UnsupportedError, match="`quantization_config.quant_method` is 'hqq'; .* fp8, modelopt, compre"):
        from_pretrained(published)
    settings()
    tensors = load_file(published / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.scales"]
    save_file(tensors, published / "model.safetensors")
    with pytest.raises(ShapeError, match=r"tensor `model.layers.0.self_attn.q_proj.scales` is missing; `.*qweight`"):
        from_pretrained(published)


DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("method", ["bitsandbytes", "torchao"])
def test_files_of_other_libraries_are_what_those_read(method: str) -> None:
    """Weights that bitsandbytes 0.50.2 and torchao 0.18.0 wrote, with what they read of them (`.expected`)."""
    tensors = read_header(DATA / f"{method}.safetensors")
    index = {name: stored for name, stored in tensors.items() if not name.endswith(".expected")}
    weights = decode_index(index, {"quant_method": method}, "config.json")
    expected = {name.removesuffix(".expected"): tensors[name] for name in tensors if name.endswith(".expected")}
    assert {name.removesuffix(".weight") for name in weights} == {*expected}
    for name, stored in expected.items():
        weight = weights[f"{name}.weight"]
        assert isinstance(weight, Decoded) and weight.shape == stored.shape, name
        np.testing.assert_allclose(weight.read(), stored.read(), rtol=3e-7, atol=1e-9, err_msg=name)
        if isinstance(weight.storage, str):
            with pytest.raises(UnsupportedError, match=r"a weight of shape .* has the numbers of (nf4|fp4), which no"):
                weight.quantized_parts()
            continue
        values, scales = (
            jnp.asarray(np.ascontiguousarray(np.swapaxes(p.read(), 0, 1))) for p in weight.quantized_parts()
        )
        np.testing.assert_array_equal(weight.storage.tensor(values, scales).dequantize().T, weight.read(), err_msg=name)


def test_classes_of_torchao_that_are_not_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for entry, error in (
        (
            {"_type": "Int4TilePackedTo4dTensor", "_data": {}},
            "`a.weight` is a Int4TilePackedTo4dTensor of torchao; the",
        ),
        ({"_type": "NVFP4Tensor", "_data": {"is_swizzled_scales": True}}, "the scales of `a.weight` are in the order"),
        ({"_type": "MXTensor", "_data": {"block_size": 16}}, "`a.weight` has blocks of 16; expected 32"),
    ):
        tensors = {"a._weight_qdata": np.zeros((4, 32), np.int8), "a._weight_scale": np.ones((4, 1), np.float32)}
        save_file(tensors, path, metadata={"a.weight": json.dumps(entry)})
        read_metadata.cache_clear()
        with pytest.raises((UnsupportedError, ShapeError), match=error):
            decode_index(read_header(path), {"quant_method": "torchao"}, "config.json")
    save_file(tensors, path)
    read_metadata.cache_clear()
    with pytest.raises(ShapeError, match="the header has no class of `a.weight`; expected the metadata that torchao"):
        decode_index(read_header(path), {"quant_method": "torchao"}, "config.json")


def test_parts_that_are_not_read_are_named() -> None:
    for values, error in (
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo` is 'NVFP4_AWQ'; the loader reads FP8"),
        (
            {"quant_method": "modelopt", "quantized_layers": {"a.b": {"quant_algo": "W4A8_AWQ"}}},
            "quantized_layers.a.b` is 'W4A8_AWQ'",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            "format` is 'marlin-24'; the loader reads dense",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"format": "mxfp6-pack-quantized"}}},
            "config_groups.g.format` is 'mxfp6-pack-quantized'",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config` is {'format': 'sparse-24-bitmask'}; the loader reads dense weights",
        ),
        ({"quant_method": "compressed-tensors", "transform_config": {"R1": {}}}, "transform_config` is"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "config_groups` is .1.; .* an object of groups"),
    ):
        with pytest.raises(UnsupportedError, match=error):
            decode_index({}, values, "config.json")


def test_groups_name_modules_expressions_and_classes(tmp_path: Path) -> None:
    """Attention in float8, the rest in NVFP4, by the targets of compressed-tensors and without those of modelopt."""
    published, plain = write("compressed-nvfp4", tmp_path)
    tensors, expected = (
        {name: np.asarray(stored.read()) for name, stored in read_header(folder / "model.safetensors").items()}
        for folder in (published, plain)
    )
    for name in [name for name in expected if ".self_attn." in name and name.endswith("_proj.weight")]:
        stem = name.removesuffix(".weight")
        for part in ("weight_packed", "weight_scale", "weight_global_scale"):
            del tensors[f"{stem}.{part}"]
        made, expected[name] = fp8(name, expected[name].shape)
        tensors |= {name: made[name], f"{stem}.weight_scale": made[f"{name}_scale_inv"]}
    save_file(tensors, published / "model.safetensors")
    save_file(expected, plain / "model.safetensors")
    config = json.loads((published / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_0"] |= {"targets": ["Linear"], "format": "nvfp4-pack-quantized"}
    float8 = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [10, 32]}
    groups["group_1"] = {"targets": ["re:.*self_attn.*_proj"], "weights": float8, "format": "float-quantized"}
    config["quantization_config"]["format"] = "mixed-precision"
    (published / "config.json").write_text(json.dumps(config))
    read, wanted = (from_pretrained(path, dtype=jnp.float32) for path in (published, plain))
    for one, other in zip(jax.tree.leaves(read), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    kept = from_pretrained(published, quantize="keep")
    formats = {name: value.format for name, *_, value in named_parameters(kept) if isinstance(value, QTensor)}
    assert formats["query"] == "fp8_e4m3" and formats["down"] == "fp4_e2m1"


FUSED = {"llama4_text": "feed_forward", "qwen3_vl_moe_text": "mlp"}


@pytest.mark.parametrize("family", FUSED)
def test_experts_that_a_quantized_checkpoint_has_one_by_one(family: str, tmp_path: Path) -> None:
    """Families whose plain checkpoints have the weights of all experts in one tensor."""
    values = {**MOE, "model_type": family}
    if family == "llama4_text":
        values = {**LLAMA, "model_type": family, "head_dim": 16, "num_local_experts": 3, "intermediate_size": 32}
        values |= {"intermediate_size_mlp": 96, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1}
    config = ModelConfig.from_dict(values)
    save_pretrained(Decoder(config, rngs=nnx.Rngs(0)), tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    published, stem = {}, f"model.layers.0.{FUSED[family]}.experts"
    for name, fused in list(plain.items()):
        if not name.startswith(stem):
            published[name] = fused
            continue
        rows = fused.swapaxes(1, 2)  # [experts, out, in]
        halves = np.split(rows, 2, axis=1) if name.endswith("gate_up_proj") else [rows]
        names = ("gate_proj", "up_proj") if len(halves) == 2 else ("down_proj",)
        for half, projection in zip(halves, names):
            for i in range(len(half)):
                tensors, half[i] = nvfp4(f"{stem}.{i}.{projection}.weight", half[i].shape)
                published |= tensors
        plain[name] = np.ascontiguousarray(np.concatenate(halves, axis=1).swapaxes(1, 2))
    (tmp_path / "published").mkdir()
    save_file(published, tmp_path / "published" / "model.safetensors")
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "published" / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
    settings = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
    }
    (tmp_path / "published" / "hf_quant_config.json").write_text(json.dumps(settings))
    read, wanted = (from_pretrained(tmp_path / name, dtype=jnp.float32) for name in ("published", "plain"))
    for (name, *_, one), (*_, other) in zip(named_parameters(read), named_parameters(wanted)):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6, err_msg=name)
    kept = from_pretrained(tmp_path / "published", dtype=jnp.float32, quantize="keep")
    for (name, *_, one), (*_, other) in zip(named_parameters(kept), named_parameters(read)):
        if name in ("expert_gate", "expert_up", "expert_down"):
            assert isinstance(one, QTensor) and one.format == "fp4_e2m1"
            np.testing.assert_array_equal(one.dequantize(), other)


def test_every_published_configuration_is_read_or_named() -> None:
    """All `quantization_config` and `hf_quant_config.json` of the world: 25 of modelopt, some with long lists."""
    read, named = set(), {}
    for path in world.files("configs", "*/config.json"):
        try:
            settings = quantization(path.parent)
            if settings is not None:
                decode_index({}, settings, str(path))
                read.add(path.parent.name)
        except UnsupportedError as error:
            named[path.parent.name] = str(error)
    assert {name: error.partition("quantization_config")[2] for name, error in named.items()} == {
        "Qwen--Qwen3-14B-MLX-4bit": (
            ".quant_method` is 'mlx'; the loader reads fp8, modelopt, compressed-tensors, gptq, awq, mxfp4, "
            "bitsandbytes, torchao."
        )
    }
    modelopt = {path.parent.name for path in world.files("configs", "*/hf_quant_config.json")}
    assert len(modelopt) == 25 and modelopt <= read and len(read) > 45
