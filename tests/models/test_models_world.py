"""`config.json` files that others published: each loads, or is declined in one line that names the key."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models_peer
import world
from models_families import TINY
from models_peer import SIZES, Peer
from vishwamai import ShapeError, UnsupportedError
from vishwamai.inference.memory import weight_bytes
from vishwamai.models import ModelConfig, from_pretrained, read_config, save_pretrained
from vishwamai.models.published.files import quantization

FILES = world.files("configs", "*/config.json")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_a_published_config_loads_or_names_what_is_declined(path: Path) -> None:
    values = json.loads(path.read_text())
    inner = values.get("text_config") or values
    try:
        config = read_config(path.parent)
    except (ShapeError, UnsupportedError) as error:
        keys = re.findall("`([^`]*)`", str(error))
        assert keys and keys[0] in ("model_type", "text_config", *values, *inner)
        assert "\n" not in str(error)
        return
    for key, size in (("num_hidden_layers", config.num_layers), ("hidden_size", config.hidden_size)):
        assert inner.get(key, size) == size
    assert inner.get("num_attention_heads", config.num_heads) == config.num_heads
    ends = inner.get("eos_token_id", values.get("eos_token_id"))
    assert ends is None or config.eos_token_id == (tuple(ends) if isinstance(ends, list) else ends)
    assert ModelConfig.from_dict(config.to_dict()) == config


def load_tool(name: str) -> Any:
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_the_page_has_the_table_of_published_configs() -> None:
    folder = world.folder("configs").parent
    tool = load_tool("model_table")
    page = tool.PAGE.read_text()
    published = tool.PUBLISHED.read_text()
    assert tool.families() in page and tool.table(folder) in published, "write it again: python tools/model_table.py"
    with pytest.raises(SystemExit, match=r"nowhere: no configs/"):
        tool.main([str(folder / "nowhere")])
    assert page == tool.PAGE.read_text(), "a wrong folder empties no table"


def test_the_page_has_the_table_of_proofs() -> None:
    world.folder("configs")
    tool = load_tool("proof_table")
    assert tool.table() in tool.PAGE.read_text(), "write it again: python tools/proof_table.py"


BILLIONS = {
    "MiniMaxAI--MiniMax-M2.5": 229,
    "XiaomiMiMo--MiMo-V2-Flash": 309,
    "deepseek-ai--DeepSeek-V3": 671,
    "deepseek-ai--DeepSeek-V3.2": 671,
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": 400,
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": 109,
    "microsoft--phi-4": 14.7,
    "mistralai--Devstral-Small-2507": 23.6,
    "mistralai--Mixtral-8x22B-v0.1": 141,
    "mistralai--Mixtral-8x7B-v0.1": 46.7,
    "moonshotai--Kimi-K2-Instruct": 1026,
    "zai-org--GLM-5": 744,
}
"""Parameters that the authors of models state, in units of 1e9, where the names lack them or have another number."""
OTHERS = re.compile(r"neuronx--|-VL-|@|micro-")
"""Names with the number of another model, or of one with its tower of images."""


def stated_sizes() -> dict[Path, float]:
    """Published configurations, and the parameters that their authors state, in units of 1e9."""
    sizes = {}
    for path in FILES:
        name = path.parent.name
        numbers = re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)([BM])(?![a-z\d])", name, re.I)
        if name in BILLIONS or (numbers and not OTHERS.search(name)):
            number, unit = numbers[0] if numbers else ("0", "B")
            sizes[path] = BILLIONS.get(name, float(number) / (1000 if unit in "mM" else 1))
    return sizes


def sized_families() -> set[str]:
    """The families of published configurations whose parameters are as many as their authors state."""
    families: set[str] = set()
    for path, stated in stated_sizes().items():
        with contextlib.suppress(ShapeError, UnsupportedError):
            config = read_config(path.parent)
            numbers = weight_bytes(config, 2, on_cpu=False) / 2e9
            # Names round to whole billions, and some leave out embeddings.
            assert abs(numbers - stated) <= max(0.09 * stated, 0.4), path.parent.name
            families.add(config.family)
    return families


def test_published_sizes_have_the_parameters_that_their_authors_state() -> None:
    world.folder("configs")
    assert {"deepseek_v3", "gemma4_text", "gpt_oss", "llama4_text", "nemotron_h", "qwen3_next"} <= sized_families()


def stored(directory: Path) -> dict[str, np.ndarray]:
    return load_file(directory / "model.safetensors")


ENDS = {
    "llama": ("model.embed_tokens.weight", "lm_head.weight"),
    "gpt_neox": ("gpt_neox.embed_in.weight", "embed_out.weight"),
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "opt": ("model.decoder.embed_tokens.weight", "lm_head.weight"),
    "mamba2": ("backbone.embeddings.weight", "lm_head.weight"),
}


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", ENDS)
def test_a_tied_model_with_a_head_of_its_own_uses_that_head(tmp_path: Path, name: str) -> None:
    peer = Peer("Llama") if name == "llama" else TINY[name]
    dataclasses.replace(peer, options={**peer.options, "tie_word_embeddings": True}).save(tmp_path)
    tokens = np.random.default_rng(0).integers(3, 131, (1, 20))
    tensors = stored(tmp_path)
    embed, head_name = ENDS[name]
    table = tensors[embed]
    for head, tied in ((table, True), (2 * table[::-1], False)):
        save_file({**tensors, head_name: np.ascontiguousarray(head)}, tmp_path / "model.safetensors")
        model = from_pretrained(tmp_path, dtype=jnp.float32)
        assert model.config.tie_embeddings == read_config(tmp_path).tie_embeddings == tied
        expected = models_peer.peer_logits(models_peer.load(tmp_path), tokens)
        np.testing.assert_allclose(model.logits(model(jnp.asarray(tokens))), expected, rtol=2e-4, atol=2e-4)


VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
QWEN_VISION |= {"num_position_embeddings": 4, "deepstack_visual_indexes": [0]}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 24}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3]}}
STEP: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_sliding_attention_heads": 6,
    "head_dim": 24,
    "sliding_window": 9,
    "moe_intermediate_size": 40,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "share_expert_dim": 48,
    "moe_router_scaling_factor": 1.7,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
    "rope_theta": [500.0, 10000.0, 10000.0, 500.0],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
}
LFM2 = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "tie_embedding": False}
WRAPPED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3", "gemma3_text", VISION, {"head_dim": 24, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    "lfm2_vl": ("Lfm2Vl", "lfm2", {**VISION, "model_type": "siglip2_vision_model"}, LFM2),
    "llava": (
        "Llava",
        "mistral",
        {**VISION, "model_type": "clip_vision_model"},
        {"sliding_window": 9, "norm_eps": 1.0},  # which Mistral's class does not read
    ),
    "mistral3": ("Mistral3", "mistral", {**VISION, "model_type": "pixtral"}, {"sliding_window": None}),
    "qwen2_vl": ("Qwen2VL", "qwen2_vl_text", {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2}, MROPE),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        "qwen2_5_vl_text",
        {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64},
        MROPE,
    ),
    "qwen3_vl": ("Qwen3VL", "qwen3_vl_text", QWEN_VISION, {"head_dim": 24}),
    "qwen3_vl_moe": ("Qwen3VLMoe", "qwen3_vl_moe_text", QWEN_VISION, MIXTURE),
    "step3p7": ("Step3p7", "step3p5", {**VISION, "image_size": 56}, STEP),
}


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", WRAPPED)
def test_the_text_part_of_a_vision_model_loads(name: str, tmp_path: Path) -> None:
    """Both the keys in `text_config` and the tensors under their prefix; the tower stays in the files."""
    import torch
    import transformers

    kind, text, vision, options = WRAPPED[name]
    torch.manual_seed(0)
    values = {"text_config": {**SIZES, "model_type": text, **options}, "vision_config": vision}
    config = getattr(transformers, f"{kind}Config")(**values, tie_word_embeddings=False)
    peer = getattr(transformers, f"{kind}ForConditionalGeneration")._from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    peer.eval().save_pretrained(tmp_path)
    if name == "qwen3_vl_moe":  # as published; transformers 5 reads both, and writes the transposed form
        tensors = {key: value.swapaxes(1, 2) if "experts" in key else value for key, value in stored(tmp_path).items()}
        save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, tmp_path / "model.safetensors")
    tokens = np.random.default_rng(0).integers(3, 131, (1, 40))
    expected = models_peer.peer_logits(peer, tokens)
    model = from_pretrained(tmp_path, dtype=jnp.float32)
    np.testing.assert_allclose(
        model.logits(model(jnp.asarray(tokens))), expected, rtol=0, atol=1e-4 * np.abs(expected).max()
    )
    if name == "step3p7":  # whose layers with a window have more heads
        prompts = [tokens[0, :23].tolist(), tokens[0, 23:].tolist()]
        answers = [models_peer.peer_greedy(peer, prompt, 12) for prompt in prompts]
        assert models_peer.greedy(model, prompts, 12) == answers
    if name in ("qwen2_vl", "qwen2_5_vl"):  # published flat
        inner = json.loads((tmp_path / "config.json").read_text())["text_config"]
        flat = {**inner, "model_type": name, "vision_config": vision, "image_token_id": 5}
        (tmp_path / "config.json").write_text(json.dumps(flat))
        assert read_config(tmp_path) == model.config
    if name == "lfm2_vl":  # as older files write it
        older = {**json.loads((tmp_path / "config.json").read_text()), "tie_embedding": True}
        assert ModelConfig.from_dict(older).tie_embeddings
        assert type(config).from_dict(older).tie_word_embeddings
    save_pretrained(model, tmp_path / "text")
    assert read_config(tmp_path / "text") == model.config


def test_older_keys_of_step_mean_what_transformers_reads(tmp_path: Path) -> None:
    import transformers

    types = STEP["layer_types"]
    older = {
        **{key: value for key, value in STEP.items() if key not in ("mlp_layer_types", "num_sliding_attention_heads")},
        "num_nextn_predict_layers": 2,
        "layer_types": [*types, "full_attention", "full_attention"],
        "rope_theta": [*STEP["rope_theta"], 1.0, 1.0],
        "partial_rotary_factors": [*STEP["partial_rotary_factors"], 1.0, 1.0],
        "moe_layers_enum": "1,3,4",
        "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6},
        "swiglu_limits": [0.0] * 6,
    }
    values = {**SIZES, "model_type": "step3p5", **older}
    peer = transformers.Step3p7TextConfig(**{**SIZES, **older}).to_dict()
    config = ModelConfig.from_dict(values)
    assert config == ModelConfig.from_dict(peer) == ModelConfig.from_dict({**SIZES, "model_type": "step3p5", **STEP})
    for wrong, key in (
        ({"swiglu_limits": [0.0, 7.0, 0.0, 0.0]}, "swiglu_limits"),
        ({"num_sliding_attention_heads": 5}, "num_sliding_attention_heads"),
        ({"per_layer_config": {"0": {"num_attention_heads": 6}}}, "per_layer_config"),
    ):
        with pytest.raises((ShapeError, UnsupportedError), match=f"`{key}` is"):
            ModelConfig.from_dict({**values, **wrong})


def test_quantized_forms_that_are_not_read_are_declined_by_name(tmp_path: Path) -> None:
    Peer("Llama").save(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for method in ("hqq", "aqlm", "quanto", "auto-round"):
        settings = {"quant_method": method, "load_in_4bit": True}
        (tmp_path / "config.json").write_text(json.dumps({**values, "quantization_config": settings}))
        with pytest.raises(UnsupportedError, match=f"`quantization_config.quant_method` is '{method}'"):
            from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "quanto_qmap.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="quanto_qmap.json: the weights are quantized by optimum-quanto"):
        quantization(tmp_path)
    (tmp_path / "quanto_qmap.json").unlink()
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ShapeError, match="hf_quant_config.json: `quantization` is None; expected an object"):
        quantization(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "INT4_AWQ"}}')
    with pytest.raises(UnsupportedError, match="quant_algo` is 'INT4_AWQ'; the loader reads FP8"):
        quantization(tmp_path)
