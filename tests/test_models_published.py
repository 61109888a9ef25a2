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

from published import FORMATS, write
from vishwamai import ShapeError, UnsupportedError
from vishwamai.models import from_pretrained


@pytest.mark.parametrize("name", FORMATS)
def test_a_published_checkpoint_is_its_plain_weights(name: str, tmp_path: Path) -> None:
    published, plain = (from_pretrained(path, dtype=jnp.float32) for path in write(name, tmp_path))
    for found, expected in zip(jax.tree.leaves(published), jax.tree.leaves(plain)):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


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
