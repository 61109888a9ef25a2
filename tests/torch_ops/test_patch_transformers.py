"""`vishwamai.patch.transformers`: models of transformers before and after, on random weights."""

import copy
import functools
import importlib
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import vishwamai.patch  # noqa: E402
from vishwamai.core.errors import ShapeError, UnsupportedError  # noqa: E402
from vishwamai.patch import modules  # noqa: E402

SIZES: dict[str, Any] = dict(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)
MORE: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": dict(sliding_window=4),
    "Qwen2": dict(use_sliding_window=False),
    "Qwen3": {},
    "Gemma": {},
    "Gemma2": dict(sliding_window=4, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "Gemma3Text": dict(sliding_window=4),
    # Few enough features that the batch is computed by the joint weight's halves, and a step of decoding is not.
    "Phi3": dict(partial_rotary_factor=0.5, hidden_size=8, num_attention_heads=2, num_key_value_heads=1),
    "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "Qwen3Moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[1]),
    "Olmo2": {},
}
LEFT_OUT = {"Phi3": {"head_dim"}, "Qwen2": {"head_dim"}, "Olmo2": {"head_dim"}}
WHOLE = {"flash_attention", "apply_rope", "gated_linear_unit", "rms_norm"}
JOINT = "gated_linear_unit, in calls of at least twice as many rows as features"
EXPECTED = dict.fromkeys(MORE, WHOLE) | {
    "Phi3": WHOLE - {"gated_linear_unit"} | {JOINT},
    "Mixtral": WHOLE - {"gated_linear_unit"} | {"grouped_gemm"},
    "Qwen3Moe": WHOLE | {"grouped_gemm"},
}
IDS = torch.tensor([[7, 3, 9, 4, 1, 8, 2, 6, 5, 11, 12], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])
PADDING = torch.tensor([[1] * 11, [0] * 3 + [1] * 8])
RIGHT = PADDING.flip(1)


def random_model(name: str, dtype: Any = torch.float32) -> Any:
    sizes = {key: value for key, value in SIZES.items() if key not in LEFT_OUT.get(name, ())} | MORE[name]
    config = getattr(transformers, f"{name}Config")(**sizes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def gradients(model: Any, of: Any) -> dict[str, Any]:
    model.zero_grad()
    of.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(got: Any, want: Any, rtol: float) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    got, want = got.detach(), want.detach()
    assert float((got - want).abs().max()) <= rtol * float(want.abs().max()) > 0


DEFAULT = ("Llama", "Qwen3Moe", "Gemma2", "Phi3")


@pytest.mark.parametrize("name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.long) for n in MORE])
def test_a_family_computes_what_it_did(name):
    """Logits of a padded batch, the gradient of every parameter, greedy tokens; then all back to the same bits."""
    model = random_model(name)

    def run() -> Any:
        logits = model(IDS, attention_mask=PADDING).logits
        seen = logits[PADDING.bool()]
        return seen.detach(), gradients(model, (seen * torch.linspace(-1, 1, 48)).sum())

    how: dict[str, Any] = dict(attention_mask=PADDING, max_new_tokens=5, do_sample=False)
    before, tokens = run(), model.generate(IDS, **how)
    patched = vishwamai.patch.transformers(model, mlp=True)
    assert {entry.status for entry in patched.swapped} == EXPECTED[name]
    after = run()
    same(after[0], before[0], 2e-5)
    assert after[1].keys() == before[1].keys()
    largest = max(float(g.abs().max()) for g in before[1].values())
    assert all(float((after[1][n] - g).abs().max()) <= 5e-5 * largest for n, g in before[1].items())
    assert torch.equal(model.generate(IDS, **how), tokens)
    assert not torch.equal(after[0], before[0])  # other kernels did compute it
    patched.undo()
    patched.undo()
    again = run()
    assert torch.equal(again[0], before[0]) and all(torch.equal(again[1][n], g) for n, g in before[1].items())
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(p.is_contiguous() for p in model.parameters())


def test_bfloat16_rounds_no_worse():
    """Ours is as near to float32 as transformers' own, which rounds more often."""
    exact = random_model("Llama")(IDS).logits
    model = random_model("Llama", torch.bfloat16)
    theirs = (model(IDS).logits.float() - exact).abs().max()
    patched = vishwamai.patch.transformers(model)
    assert EXPECTED["Llama"] == {entry.status for entry in patched.swapped}  # the feed-forward network, too
    assert (model(IDS).logits.float() - exact).abs().max() <= 1.5 * theirs


def test_an_encoder():
    sizes = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim", "pad_token_id")}
    model = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    before = model(IDS, attention_mask=PADDING).last_hidden_state
    patched = vishwamai.patch.transformers(model)
    counts = {(entry.module, entry.status): entry.count for entry in patched.swapped}
    assert counts == {("BertSelfAttention", "flash_attention"): 2, ("LayerNorm", "layer_norm"): 5}
    same(model(IDS, attention_mask=PADDING).last_hidden_state[PADDING.bool()], before[PADDING.bool()], 2e-5)


@pytest.mark.parametrize("name", ["Qwen2", "Gemma2"])
def test_the_loss_holds_no_logits_in_training(name):
    model = random_model(name)
    labels = IDS.masked_fill(RIGHT == 0, -100)
    wants = []
    for more in ({}, {"num_items_in_batch": torch.tensor(7)}):
        model.train()
        want = model(IDS, attention_mask=RIGHT, labels=labels, **more).loss
        wants.append((more, want.detach(), gradients(model, want)))
    patched = vishwamai.patch.transformers(model, loss=True)
    assert any("linear_cross_entropy" in entry.status for entry in patched.swapped)
    for more, want, of in wants:
        out = model(IDS, attention_mask=RIGHT, labels=labels, **more)
        assert out.logits is None
        same(out.loss, want, 1e-5)
        got = gradients(model, out.loss)
        largest = max(float(g.abs().max()) for g in of.values())
        assert all(float((got[n] - g).abs().max()) <= 5e-5 * largest for n, g in of.items())
    assert model(IDS, labels=labels, return_dict=False)[0].dim() == 0
    evaluated = model.eval()(IDS, attention_mask=RIGHT, labels=labels)
    assert evaluated.logits.shape == (2, 11, 48)
    same(evaluated.loss, wants[0][1], 1e-5)


EXPERTS = {
    "mixtral.MixtralExperts": {},
    "qwen2_moe.Qwen2MoeExperts": {},
    "qwen3_moe.Qwen3MoeExperts": {},
    "olmoe.OlmoeExperts": {},
    "deepseek_v3.DeepseekV3Experts": {},
    "glm4_moe.Glm4MoeExperts": dict(hidden_act="gelu_new"),  # an activation that no gated unit has
}


@pytest.mark.parametrize("path", EXPERTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_of_experts(path, dtype):
    """Against float64 no further than transformers' own, with an expert that gets one token, and one that gets none."""
    family, name = path.split(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    prefix = name.removesuffix("Experts")
    sizes = dict(hidden_size=24, intermediate_size=40, moe_intermediate_size=40, num_experts_per_tok=3)
    counts = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 8)
    config = getattr(transformers, f"{prefix}Config")(
        **sizes, **counts, **EXPERTS[path], experts_implementation="eager"
    )
    torch.manual_seed(0)
    theirs = getattr(module, name)(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    experts = torch.rand(13, 8).topk(3).indices % 7  # the last expert gets nothing
    drawn = torch.randn(13, 24), torch.rand(13, 3)

    def run(block: Any, kind: Any) -> list[Any]:
        block = block.to(kind)
        x, shares = (t.to(dtype).to(kind).requires_grad_() for t in drawn)
        out = block(x, experts, shares)
        cotangent = torch.linspace(-1, 1, out.numel(), dtype=kind).view_as(out)
        return [out, *torch.autograd.grad(out, [x, shares, *block.parameters()], cotangent)]

    theirs.to(dtype)  # what is rounded is the same for all three
    exact, near = run(copy.deepcopy(theirs), torch.float64), run(theirs, dtype)
    assert modules.mlp_why_not(theirs) is None
    modules.turn(theirs)
    theirs.forward = types.MethodType(modules.mlp(theirs), theirs)
    ours = run(theirs, dtype)
    step = torch.finfo(dtype).eps
    for got, their, true in zip(ours, near, exact, strict=True):
        assert got.shape == true.shape and got.dtype == dtype
        got, their, true = (t.detach() for t in (got, their, true))
        scale = float(true.abs().max())
        error, allowed = (float((t.double() - true).abs().max()) for t in (got, their))
        assert error <= 2 * allowed + 2 * step * scale and scale > 0
    assert run(theirs, dtype)[0].equal(ours[0])


def test_experts_that_are_not_plain_are_left():
    """Of another layout (gpt-oss), split over devices, or of another type than parameters."""
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, experts_implementation="eager")
    experts = importlib.import_module("transformers.models.mixtral.modeling_mixtral").MixtralExperts(config)
    assert modules.mlp_why_not(experts) is None
    experts._is_expert_parallel = True
    assert modules.mlp_why_not(experts) == "its experts are split over devices by transformers"
    experts._is_expert_parallel = False
    weight = experts.down_proj.data
    del experts.down_proj
    experts.register_buffer("down_proj", weight)
    assert modules.mlp_why_not(experts) == "down_proj has a weight or a hook that is not plain"
    other = importlib.import_module("transformers.models.gpt_oss.modeling_gpt_oss").GptOssExperts
    assert modules.feed_forward(other) is None


def test_what_is_left_is_named():
    model = random_model("Mixtral")
    left = {entry.module: entry.status for entry in vishwamai.patch.transformers(model).left}
    assert left["MixtralTopKRouter"] == "no operation is known that computes it"
    assert "float32 are faster for few rows" in left["MixtralExperts"]
    assert left["Linear"] == "torch's own" and left["loss"].startswith("its forward pass is not that of a plain")
    model = random_model("Phi3")
    left = {entry.module: entry.status for entry in vishwamai.patch.transformers(model, norm=False, rope=False).left}
    assert left["Phi3RMSNorm"] == "norm=False" and left["Phi3Attention"] == "rope=False"
    assert left["Linear"] == "torch's own"  # the joint product of query, key and value among them
    model = random_model("Llama")
    patched = vishwamai.patch.transformers(model, attention=False, mlp=False)
    left = {entry.module: entry.status for entry in patched.left}
    assert left["LlamaAttention"] == "attention=False" and left["LlamaMLP"] == "mlp=False"
    assert model.config._attn_implementation != "vishwamai"


def test_decorators_of_a_forward_pass():
    """One that renames an argument is kept; one that keeps the function out of reach leaves the module as it is."""

    def renamed(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            kwargs["attention_mask"] = kwargs.pop("mask_by_its_old_name", kwargs.get("attention_mask"))
            return function(*args, **kwargs)

        return call

    functions: list[Any] = []

    def registered(function):
        functions.append(function)

        @functools.wraps(function)
        def call(*args, **kwargs):
            return functions[0](*args, **kwargs)

        return call

    model = random_model("Llama")
    attention = model.model.layers[0].self_attn
    forward = type(attention).forward
    tables = model.model.rotary_emb(torch.ones(1, 11, 32), torch.arange(11)[None])
    x, mask = torch.randn(1, 11, 32), torch.ones(1, 1, 11, 11, dtype=torch.bool).tril(-1)
    mask[..., 0] = True
    for decorator in (renamed, registered):
        attention.__class__ = type("Decorated", (type(attention),), {"forward": decorator(forward)})
        old = "mask_by_its_old_name" if decorator is renamed else "attention_mask"
        want = attention(x, tables, **{old: mask})[0]
        assert not torch.equal(want, attention(x, tables, attention_mask=None)[0])
        patched = vishwamai.patch.transformers(model)
        same(attention(x, tables, **{old: mask})[0], want, 2e-5)
        found = {(entry.module, entry.status) for entry in patched.swapped}
        assert {("Decorated", "flash_attention"), ("LlamaAttention", "apply_rope")} <= found
        assert (("Decorated", "apply_rope") in found) == (decorator is renamed)
        left = {entry.module: entry.status for entry in patched.left}
        assert left.get("Decorated", "").endswith("cannot be exchanged") == (decorator is registered)
        patched.undo()
        attention.__class__ = type(model.model.layers[1].self_attn)


def test_what_was_changed_is_not_recognised():
    """A subclass that computes something else, an adapter in place of a product, a forward pass that was replaced."""
    model = random_model("Llama")
    layers = model.model.layers

    class Doubled(type(model.model.norm)):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    class Adapted(torch.nn.Linear):
        def forward(self, input):
            return super().forward(input) + 1

    model.model.norm.__class__ = Doubled
    layers[0].mlp.gate_proj.__class__ = Adapted
    layers[0].mlp.act_fn = torch.nn.SiLU()
    layers[1].mlp.act_fn = torch.nn.Tanh()
    layers[1].input_layernorm.forward = lambda x: 3 * x
    want = model(IDS).logits
    patched = vishwamai.patch.transformers(model, mlp=True)
    left = [(entry.module, entry.status) for entry in patched.left]
    assert ("Doubled", "no operation is known that computes it") in left
    assert ("LlamaMLP", "gate_proj is a Adapted that does more than its product") in left
    assert ("LlamaMLP", "its activation is Tanh, which gated_linear_unit does not have") in left
    assert ("LlamaRMSNorm", "its forward pass was replaced already") in left
    same(model(IDS).logits, want, 2e-5)


def test_a_copy_and_a_checkpoint(tmp_path):
    """A copy is patched by itself, and what is saved of a patched model loads as before."""
    model = random_model("Llama")
    vishwamai.patch.transformers(model, mlp=True)
    want = model(IDS).logits
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    same(other(IDS).logits, 2 * want, 1e-5)
    assert torch.equal(model(IDS).logits, want)
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


@pytest.mark.long
def test_a_patched_model_compiles():
    model = random_model("Llama")
    want = model(IDS).logits
    vishwamai.patch.transformers(model, mlp=True)
    calls = []
    rotate = modules.rotate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules, "apply_rope", lambda *a, **k: calls.append(1) or _original(*a, **k))
        same(torch.compile(model, backend="aot_eager")(IDS).logits, want, 2e-5)
    assert rotate is modules.rotate and calls  # ours was traced, not the family's own


_original = modules.apply_rope


def test_errors():
    model = random_model("Llama")
    patched = vishwamai.patch.transformers(model)
    with pytest.raises(ShapeError, match="patched already; call undo"):
        vishwamai.patch.transformers(model)
    with pytest.raises(ShapeError, match="`model` is of type Linear; pass a transformers model"):
        vishwamai.patch.transformers(torch.nn.Linear(2, 2))
    with pytest.raises(ShapeError, match="`norm` is 'yes'"):
        vishwamai.patch.transformers(model, norm="yes")  # pyright: ignore
    patched.undo()
    vishwamai.patch.transformers(model).undo()


@pytest.mark.parametrize(
    "call, function",
    [
        (lambda: vishwamai.patch.transformers(None), "transformers"),
        (vishwamai.patch.register_attention, "register_attention"),
    ],
)
def test_absent_torch_is_an_error_that_says_what_to_install(monkeypatch, call, function):
    def absent(name):
        raise ImportError(f"No module named 'torch', asked for by {name}")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(UnsupportedError, match=rf"patch.{function}: No module named 'torch'.*\[torch\]"):
        call()
