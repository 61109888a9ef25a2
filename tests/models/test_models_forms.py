"""Families, by table, in the forms that training and serving hold it: gradients, adapters of peft, rounded weights
and two devices.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from safetensors.numpy import load_file

import models_peer
import world
from models_families import TINY
from test_models_renamed import ALIKE
from vishwamai import aot
from vishwamai.core.qtensor import QTensor
from vishwamai.models import Decoder, ModelConfig, from_pretrained, read_config, save_pretrained
from vishwamai.models.adapters import AdapterSizes, adapt, read_adapter
from vishwamai.models.parameters import split_units
from vishwamai.models.variables import parameter_variables
from vishwamai.planning.memory.analytic import serving_memory
from vishwamai.planning.memory.compiler import Compiler
from vishwamai.planning.serving import Serving, trace_serving
from vishwamai.training.head import cross_entropy, head_operands

TOKENS = np.random.default_rng(0).integers(3, 131, (2, 24))
UNTRAINED = ("e_score_correction_bias", "expert_bias", "act_fn.beta", "act_fn.eps", "layer_scalar")
"""Ends of the names of what no gradient reaches."""
CONSTANTS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""The same of what follows from the configuration, which we do not write."""

STATES = ("falcon_h1", "mamba", "falcon_mamba", "jamba", "minimax", "zamba2")
SMALL_GEMMA = ("gemma4_text, layer embeddings", "gemma3n_text")
NEW = (
    *SMALL_GEMMA,
    *("phimoe", "exaone", "hyperclovax", "cwm", "granitemoeshared", "flex_olmo"),
    *("gemma4_text, experts", "llama4_text", "mimo_v2_flash", "mistral4", "afmoe", "minicpm3", "phi", "opt", "bloom"),
    *("falcon", "falcon, one head of keys", "falcon, in turn", "gpt2", "gpt_bigcode", "gpt_bigcode, all heads", "gptj"),
    *("cohere, norms of heads", "stablelm, norms of heads", "deepseek_v32", "glm_moe_dsa"),
)
OLDER = (
    *("arcee", "apertus", "starcoder2", "cohere", "cohere2", "nemotron", "stablelm", "gpt_neox"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "exaone_moe", "olmo", "ernie4_5_moe"),
)
FIRST = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "gemma2", "gemma3_text", "gemma4_text", "phi3"),
    *("mixtral", "gpt_oss", "granite", "olmo2", "smollm3", "minimax_m2"),
)
PLAIN = (
    *("ernie4_5", "exaone4", "gemma", "glm", "glm4", "granitemoe", "helium", "ministral", "ministral3", "olmo3"),
    *("olmoe", "qwen2_moe", "seed_oss"),
)
"""Families that differ from Llama in few options, and mixtures of theirs."""
MIXED = ("glm4_moe_lite", "qwen3_5_text")
FURTHER = ("internlm3", "lfm2", "qwen3_5_moe_text", "vaultgemma")
FIRST_MIXTURES = ("deepseek_v2", "deepseek_v3", "glm4_moe", "dots1")
"""Those whose experts peft adapts too, which is declined by name."""
GRADIENTS = (
    *(*NEW, *OLDER, *STATES, *FIRST, *FIRST_MIXTURES, *PLAIN, *MIXED, *FURTHER, *ALIKE),
    *("bamba", "granitemoehybrid", "hy_v3", "mamba2", "solar_open"),
)
ADAPTED = (
    *(*FIRST, *PLAIN, "cohere2", "cwm", "flex_olmo", "hunyuan_v1_dense"),
    *(*SMALL_GEMMA, "phimoe", "hyperclovax", "granitemoeshared"),
    *("gemma4_text, experts", "llama4_text", "mimo_v2_flash", "mistral4", "gpt2", "bloom", "falcon", "gpt_neox"),
    "falcon_h1",
)
DEVICES = (
    *(*FIRST, *FIRST_MIXTURES, *PLAIN, *MIXED, *FURTHER, "ernie4_5_moe"),
    *("apertus", "arcee", "deepseek_v32", "hunyuan_v1_dense", "starcoder2"),
    *(*SMALL_GEMMA, "phimoe", "exaone", "hyperclovax", "cwm", "granitemoeshared", "flex_olmo"),
    *("gemma4_text, experts", "llama4_text", "mimo_v2_flash", "mistral4", "afmoe", "minicpm3", "bloom", "falcon"),
    *("falcon, one head of keys", "falcon, in turn", "gpt2", "gpt_bigcode", "gpt_bigcode, all heads", "gptj", "opt"),
    *("cohere", "cohere, norms of heads", "cohere2", "stablelm", "stablelm, norms of heads", "gpt_neox"),
    *("falcon_h1", "jamba", "glm_moe_dsa", "zamba2", "zamba2, groups of heads"),
)
ROUNDED = (
    *(*FIRST, *FIRST_MIXTURES, *PLAIN, *MIXED, "cohere", "cohere2", "ernie4_5_moe"),
    *("apertus", "arcee", "cwm", "deepseek_v32", "flex_olmo", "glm_moe_dsa", "hunyuan_v1_dense", "starcoder2"),
    *(*SMALL_GEMMA, "phimoe", "exaone", "hyperclovax", "granitemoeshared"),
    *("gemma4_text, experts", "llama4_text", "mimo_v2_flash", "gpt2", "bloom", "falcon_h1", "falcon_mamba", "zamba2"),
)


def logits_of(model: Decoder) -> np.ndarray:
    return np.asarray(jax.jit(lambda model, tokens: model.logits(model(tokens)))(model, jnp.asarray(TOKENS)))


def assert_close(logits: np.ndarray, expected: np.ndarray, share: float) -> None:
    assert np.abs(logits - expected).max() <= share * np.abs(expected).max()


@pytest.mark.turns(12)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    import torch

    file = ALIKE.get(name)
    peer = (TINY[name] if file is None else file).save(tmp_path)
    model = from_pretrained(tmp_path, dtype=jnp.float32)

    def loss(model: Decoder, tokens: Any) -> Any:
        hidden, head = head_operands(model.config, model.top_arrays(), model(tokens[:, :-1]))
        return cross_entropy(model.config, hidden, head, tokens[:, 1:])

    save_pretrained(jax.jit(jax.grad(loss))(model, jnp.asarray(TOKENS)), tmp_path / "gradient")
    tokens = torch.as_tensor(TOKENS)
    logits = peer.double()(tokens[:, :-1], use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for parameter in peer.parameters():  # transformers itself gives them the names of a checkpoint
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    peer.save_pretrained(tmp_path / "expected")
    ours, expected = (load_file(tmp_path / folder / "model.safetensors") for folder in ("gradient", "expected"))
    expected = expected if file is None else file.tensors(expected)
    assert ours.keys() == {key for key in expected if not key.endswith(CONSTANTS)}
    for key, value in ours.items():
        if not key.endswith(UNTRAINED):
            error = np.abs(value - expected[key]).max()
            assert error <= 1e-4 * np.abs(expected[key]).max() + 1e-6, key


@pytest.mark.turns(8)
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_of_peft_give_its_logits(name: str, tmp_path: Path) -> None:
    import peft
    import torch

    peer = TINY[name].save(tmp_path)
    config = read_config(tmp_path)
    modules = sorted(AdapterSizes.modules(config))
    torch.manual_seed(1)
    settings = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=modules, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    adapted: Any = peft.get_peft_model(peer, settings)
    adapted.save_pretrained(tmp_path / "adapter")
    matrices = read_adapter(tmp_path / "adapter", config)
    assert len(matrices) >= len(modules)
    model = from_pretrained(tmp_path, dtype=jnp.float32)
    adapt(model, matrices, jnp.ones(1))
    assert_close(logits_of(model), models_peer.peer_logits(adapted.eval(), TOKENS), 2e-5)


@pytest.mark.turns(5)
@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_weights_give_the_logits_of_what_they_stand_for(name: str, tmp_path: Path) -> None:
    TINY[name].save(tmp_path)
    for form in ("int8", "int4"):
        model = from_pretrained(tmp_path, dtype=jnp.float32, quantize=form)
        logits, rounded = logits_of(model), 0
        for _, _, _, variable in parameter_variables(model):
            value = variable.get_value()
            if isinstance(value, QTensor):
                variable.set_value(value.dequantize().astype(jnp.float32))
                rounded += 1
        assert rounded
        save_pretrained(model, tmp_path / form)
        assert_close(logits, models_peer.peer_logits(models_peer.load(tmp_path / form), TOKENS), 1e-4)


@pytest.mark.turns(12)
@pytest.mark.parametrize("name", DEVICES)
def test_two_devices_give_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    peer = TINY[name].save(tmp_path)
    units = split_units(read_config(tmp_path))
    rules = {axis: "tensor" for axis, (_, count) in units.items() if count % 2 == 0 and axis != "experts"}
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        logits = logits_of(from_pretrained(tmp_path, dtype=jnp.float32, mesh=mesh, rules=rules))
    assert_close(logits, models_peer.peer_logits(peer, TOKENS), 2e-5)


PUBLISHED = {
    "google--gemma-4-26B-A4B": (24.5, 26.5),
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": (105, 109),
    "XiaomiMiMo--MiMo-V2-Flash": (300, 312),
}
"""Published configurations, and the bounds of the model's numbers in units of 1e9, by the authors' names of them."""


def published(name: str) -> ModelConfig:
    return read_config(world.folder(f"configs/{name}"))


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_planned(name: str) -> None:
    serving = Serving(published(name), batch_size=4, length=8192)
    parts = serving_memory(serving, "v6e").parts
    low, high = PUBLISHED[name]
    assert low <= parts["parameters"].value / 2e9 <= high  # bfloat16
    assert 0 < parts["kv"].value < 2**34


@pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install '.[aot]'")
@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_layer_of_each_kind_compiles_for_v6e_at_its_published_sizes(name: str) -> None:
    config = published(name)
    layers = tuple(dict.fromkeys(config.layers))
    config = dataclasses.replace(config, layers=layers, num_layers=len(layers))
    serving = Serving(config, batch_size=4, length=8192)
    with Compiler() as compiler:
        assert compiler.verify(trace_serving(serving, "v6e")).fits
