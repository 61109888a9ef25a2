"""Modules of transformers restated on our operations: blocks of sparse experts, with gradients, and activations.

(Rotary embeddings, gpt-oss's block and whole models stand in test_rope.py, test_moe.py and test_models.py.)
"""

import importlib
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rotation
import vishwamai

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[torch]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2"}
GROUPS = {"n_group": 4, "topk_group": 2, "n_shared_experts": 1}
BLOCKS = {  # module, block, its config's class, the config's own keys, and the same said to moe_layer
    "Mixtral": ("mixtral", "MixtralSparseMoeBlock", "MixtralConfig", {}, {}),
    "Qwen 3": ("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig", {"norm_topk_prob": True}, {}),
    "OLMoE": ("olmoe", "OlmoeSparseMoeBlock", "OlmoeConfig", {"norm_topk_prob": False}, {"normalize": False}),
    "DeepSeek V2": (
        "deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config",
        {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, **GROUPS},
        {"normalize": False, "scale": 16.0, "num_groups": 4, "top_groups": 2, "group_score": "max"},
    ),
    "DeepSeek V3": (
        "deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config",
        {"norm_topk_prob": True, "routed_scaling_factor": 2.5, **GROUPS},
        {"scoring": "sigmoid", "scale": 2.5, "num_groups": 4, "top_groups": 2},
    ),
    "GLM 4.5": (
        "glm4_moe", "Glm4MoeMoE", "Glm4MoeConfig",
        {"norm_topk_prob": True, "routed_scaling_factor": 1.0, **GROUPS},
        {"scoring": "sigmoid", "num_groups": 4, "top_groups": 2},
    ),
}  # fmt: skip
GRID = list(itertools.product(BLOCKS, ((8, 2), (16, 3)), ((2, 7), (1, 33)), ((24, 40), (64, 20)), ACTIVATIONS))


def block_of(name, experts, top_k, hidden, intermediate, activation):
    """transformers' block with random weights and nothing beside its routed experts, and what moe_layer is told."""
    module, block, config, keys, told = BLOCKS[name]
    sizes = {"num_local_experts": experts, "num_experts": experts, "n_routed_experts": experts}
    widths = {"hidden_size": hidden, "intermediate_size": intermediate, "moe_intermediate_size": intermediate}
    config = getattr(transformers, config)(
        **sizes,
        **widths,
        **keys,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts_per_tok=top_k,
        hidden_act=activation,
        experts_implementation="eager",
    )
    module = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    built = getattr(module, block)(config).float()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(std=0.3)
        bias = getattr(built.gate, "e_score_correction_bias", None)
        if bias is not None:
            told = told | {"bias": jnp.asarray(bias.normal_(std=0.1).numpy())}
    if hasattr(built, "shared_experts"):
        built.shared_experts = torch.nn.Module()
        built.shared_experts.forward = torch.zeros_like
    return built, told


def case(i, parameters):
    name, (experts, top_k), (batch, length), (hidden, intermediate), activation = parameters
    label = f"{name}-{experts}x{top_k}-{batch}x{length}-{hidden}x{intermediate}-{activation}"
    return pytest.param(name, experts, top_k, batch, length, hidden, intermediate, activation, id=label,
                        marks=rotation.one_in(12, i))  # fmt: skip


@pytest.mark.parametrize(
    "name, experts, top_k, batch, length, hidden, intermediate, activation",
    [case(*x) for x in enumerate(random.Random(0).sample(GRID, 48))],
)
def test_sparse_blocks(name, experts, top_k, batch, length, hidden, intermediate, activation):
    torch.manual_seed(0)
    theirs, told = block_of(name, experts, top_k, hidden, intermediate, activation)
    x = torch.randn(batch, length, hidden, requires_grad=True)
    cotangent = torch.randn(batch, length, hidden)
    want = theirs(x)
    leaves = x, theirs.gate.weight, theirs.experts.gate_up_proj, theirs.experts.down_proj
    gradients = torch.autograd.grad(want, leaves, cotangent)

    @jax.jit
    def ours(x, router, gate_up, down):
        gate, up = jnp.split(gate_up.swapaxes(1, 2), 2, axis=-1)
        options = {"top_k": top_k, "activation": ACTIVATIONS[activation], **told}
        return vishwamai.moe_layer(x, router.T, gate, up, down.swapaxes(1, 2), **options).out

    got, vjp = jax.vjp(ours, *(jnp.asarray(leaf.detach().numpy()) for leaf in leaves))
    for mine, their in zip((got, *vjp(jnp.asarray(cotangent.numpy()))), (want, *gradients), strict=True):
        scale = float(their.abs().max())
        np.testing.assert_allclose(mine, their.detach().numpy(), rtol=1e-4, atol=3e-5 * scale)


SAME = {
    **dict.fromkeys(("gelu", "gelu_python"), lambda x: vishwamai.gelu(x, approximate=False)),
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"),
        lambda x: vishwamai.gelu(x, approximate=True),
    ),
    **dict.fromkeys(("silu", "swish"), vishwamai.silu),
    "relu2": vishwamai.relu2,
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(4099,), (3, 1300), (2, 50, 64)])
def test_activations(name, dtype, shape):
    """About as near to float64 as transformers' own module, at every size of a number; and the gradient too."""
    from transformers.activations import ACT2FN

    rng = np.random.default_rng(0)
    x = torch.tensor(rng.standard_normal(shape) * 10.0 ** rng.uniform(-4, 2, shape)).to(getattr(torch, dtype))
    value, gradient = {}, {}
    for kind in (x.dtype, torch.float64):
        leaf = x.to(kind, copy=True).requires_grad_()
        value[kind] = ACT2FN[name](leaf)
        gradient[kind] = torch.autograd.grad(value[kind].sum(), leaf)[0]
    mine, vjp = jax.vjp(SAME[name], jnp.asarray(x.float().numpy()).astype(dtype))
    step = float(jnp.finfo(dtype).eps)
    for got, found in ((mine, value), (vjp(jnp.ones_like(mine))[0], gradient)):
        true = found[torch.float64].detach()
        error, allowed = (
            ((y.double() - true).abs() / (true.abs() + 1)).max()
            for y in (torch.tensor(np.asarray(got, np.float64)), found[x.dtype].detach())
        )
        assert error <= 2 * allowed + 2 * step
