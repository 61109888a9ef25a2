"""Quantized checkpoints as they are published load as the plain weights that their formats define."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from published import FORMATS, FURTHER, write
from vishwamai import ShapeError, UnsupportedError
from vishwamai.core.qtensor import QTensor
from vishwamai.models import from_pretrained
from vishwamai.models.checkpoint import named_parameters


@pytest.mark.parametrize("name", [*FORMATS, *FURTHER])
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
    with pytest.raises(UnsupportedError, match=r"config_groups.b.weights.group_size` is 20; the loader reads equal"):
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

    settings(bits=3)
    with pytest.raises(UnsupportedError, match="config.json: `quantization_config.bits` is 3; the loader reads 4"):
        from_pretrained(published)
    settings(quant_method="bitsandbytes")
    with pytest.raises(
        UnsupportedError, match="`quantization_config.quant_method` is 'bitsandbytes'; .* fp8, compressed"
    ):
        from_pretrained(published)
    settings()
    tensors = load_file(published / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.scales"]
    save_file(tensors, published / "model.safetensors")
    with pytest.raises(ShapeError, match=r"tensor `model.layers.0.self_attn.q_proj.scales` is missing; `.*qweight`"):
        from_pretrained(published)
