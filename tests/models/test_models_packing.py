"""A decoder whose weights are packed computes what it did before."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vishwamai import PackedQTensor, PackedWeight, ShapeError
from vishwamai.models import Decoder, ModelConfig, pack_weights, save_pretrained
from vishwamai.ops.quantization import quantize

CONFIG = ModelConfig.from_dict(
    {
        "model_type": "qwen3",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
)


@pytest.mark.turns(6)
@pytest.mark.parametrize("form", [None, "int8", "int4", "mxfp4", "fp8"])
def test_packed_weights_compute_the_same(form, tmp_path):
    """Within float32's rounding, or that of rows to int8, which 8-bit floats do without."""
    model = Decoder(CONFIG, rngs=nnx.Rngs(0), stacked=False)
    names = [name for name, parameter in CONFIG.layers[0].parameters(CONFIG).items() if parameter.matrix]
    if form is not None:
        for layer in model.layers:
            for name in names:
                held = getattr(layer, name)
                held.set_value(quantize(held.get_value(), form, axis=-2, block_size=32))
    tokens = jnp.arange(12).reshape(2, 6)
    before = np.asarray(model.logits(model(tokens)))
    assert pack_weights(model) is model
    kind = PackedWeight if form is None else PackedQTensor
    assert len(names) >= 6
    assert all(isinstance(getattr(layer, name).get_value(), kind) for layer in model.layers for name in names)
    after = np.asarray(model.logits(model(tokens)))
    tolerance = 2e-5 if form in (None, "fp8") else 0.03
    np.testing.assert_allclose(after, before, rtol=0, atol=tolerance * np.abs(before).max())
    pack_weights(model, quantize_head=True)
    assert isinstance(model.embed.get_value(), PackedQTensor)
    rounded = np.asarray(model.logits(model(tokens)))
    assert 0 < np.abs(rounded - after).max() < 0.05 * np.abs(after).max()
    with pytest.raises(ShapeError, match="is a Packed"):
        save_pretrained(model, tmp_path)
