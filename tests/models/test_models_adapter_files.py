"""Adapters that we write, read by the library peft: its model has the logits of the merged weights."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from vishwamai import UnsupportedError
from vishwamai.cli import main
from vishwamai.cli import model as model_commands
from vishwamai.models import ModelConfig, from_pretrained, read_config
from vishwamai.models.adapter_files import write_adapter
from vishwamai.models.adapters import Place, Thin, read_adapter

SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "pad_token_id": None, "eos_token_id": None, "bos_token_id": None}  # fmt: skip
GPT2 = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "pad_token_id": None, "eos_token_id": None, "bos_token_id": None}  # fmt: skip
NEOX = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": SIZES,
    "Phi3": SIZES,
    "Gemma2": SIZES | {"head_dim": 8},
    "GPT2": GPT2,
    "GPTNeoX": NEOX,
    "Falcon": SIZES | {"new_decoder_architecture": True, "num_kv_heads": 2},
}


def matrices(config: ModelConfig, rank: int = 3) -> dict[Place, Thin]:
    """Adapters of every product of the layers that is one matrix."""
    draw = np.random.default_rng(0)

    def random_pair(rows: int, columns: int) -> Thin:
        pair = (draw.normal(size=shape).astype(np.float32) * 0.1 for shape in ((rows, rank), (rank, columns)))
        return next(pair), next(pair)

    return {
        (layer, name): random_pair(*parameter.shape)
        for layer, kind in enumerate(config.layers)
        for name, parameter in kind.parameters(config).items()
        if parameter.matrix and len(parameter.shape) == 2
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_what_we_write(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {k: v for k, v in FAMILIES[family].items() if not (family == "Falcon" and k == "num_key_value_heads")}
    base: Any = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**sizes)).eval()
    base.save_pretrained(tmp_path / "base")
    config = read_config(tmp_path / "base")
    thin = matrices(config)
    write_adapter(tmp_path / "adapter", config, thin, 6.0, str(tmp_path / "base"))
    model = from_pretrained(tmp_path / "base", dtype=jnp.float32)
    for (layer, name), (down, up) in thin.items():
        weight = getattr(model.layers[layer], name)
        weight.set_value(weight.get_value() + 2.0 * down @ up)
    tokens = np.arange(10)[None] * 7 % 60
    expected = model.logits(model(jnp.asarray(tokens)))
    adapted: Any = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        found = adapted(torch.tensor(tokens)).logits.numpy()
        adapted.disable_adapter_layers()
        plain = adapted(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    assert np.abs(plain - found).max() > 100 * np.abs(found - expected).max()
    for place, (down, up) in read_adapter(tmp_path / "adapter", config).items():
        np.testing.assert_allclose(down @ up, 2.0 * thin[place][0] @ thin[place][1], rtol=1e-4, atol=1e-5)


def test_experts_are_not_linear_layers_of_peft(tmp_path: Path) -> None:
    sizes = SIZES | {"model_type": "qwen3_moe", "head_dim": 8, "num_experts": 3, "num_experts_per_tok": 2}
    config = ModelConfig.from_dict(sizes | {"moe_intermediate_size": 16})
    thin = {(0, "expert_up"): (np.ones((3, 32, 2), np.float32), np.ones((3, 2, 16), np.float32))}
    with pytest.raises(UnsupportedError, match="`expert_up` of layer 0 is not the matrix of a linear layer"):
        write_adapter(tmp_path / "adapter", config, thin, 2.0, None)
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("form", ["one tensor", "one module each"])
def test_adapters_of_experts_are_declined_by_name(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both forms that peft writes, and before `serve` reads the model."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}
    base: Any = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).eval()
    base.save_pretrained(tmp_path / "base")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if form == "one tensor" else None
    settings: Any = {"r": 2, "target_modules": ["q_proj"], "target_parameters": parameters, "task_type": "CAUSAL_LM"}
    peft.get_peft_model(base, peft.LoraConfig(**settings)).save_pretrained(str(tmp_path / "adapter"))
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    if form == "one module each":
        module = "base_model.model.model.layers.0.block_sparse_moe.experts.1.w1"
        halves = {f"{module}.lora_A.weight": np.ones((2, 32), np.float32), f"{module}.lora_B.weight": np.ones((48, 2))}
        save_file(load_file(path) | halves, path)
    config = read_config(tmp_path / "base")
    name = "`target_parameters` is" if parameters else r"experts\.1\.w1\.lora_A\.weight` is not a matrix"
    with pytest.raises(UnsupportedError, match=rf"{name}.*Merge it into the model instead"):
        read_adapter(tmp_path / "adapter", config)
    monkeypatch.setattr(model_commands, "load", lambda *_: pytest.fail("the model was read"))
    words = ["serve", str(tmp_path / "base"), "--adapter", f"a={tmp_path / 'adapter'}", "--port", "0"]
    assert main([*words, "--max-length", "16", "--max-sequences", "1"]) == 2
    assert "Merge it into the model instead" in capsys.readouterr().err


def test_settings_name_the_modules(tmp_path: Path) -> None:
    config = ModelConfig.from_dict(SIZES | {"model_type": "llama"})
    thin = {place: pair for place, pair in matrices(config, 2).items() if place == (1, "query")}
    write_adapter(tmp_path, config, thin, 4.0, "a/b")
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["model.layers.1.self_attn.q_proj"]
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (2, 4.0, "a/b")
    assert sorted(read_adapter(tmp_path, config)) == [(1, "query")]
