"""A small training configuration, for tests of plans."""

from typing import Any

from vishwamai.training.config_file import from_dict

GIB = 1 << 30
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def training(layers=4, **keys):
    model = {"config": LLAMA | {"num_hidden_layers": layers}, "compute_dtype": "bfloat16"}
    return from_dict({"model": model, "data": {"sequence_length": 128}, "batch_size": 8, **keys})
