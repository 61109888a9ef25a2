"""The modules of transformers that our operations can compute, recognised by the code of their forward pass.

transformers copies a module from family to family, so that one definition serves a hundred classes. A module is
recognised where its forward pass is compiled to the same instructions, constants and names as that of the class in
which we know the definition. A class that was changed in any way is not recognised, and is left as it is. Written for
transformers 5.24.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vishwamai.core.arrays import bincount
from vishwamai.ops.moe.routing import Routing
from vishwamai.torch.gated import gated_linear_unit
from vishwamai.torch.loss import linear_cross_entropy
from vishwamai.torch.moe import grouped_gemm, moe_combine, moe_dispatch
from vishwamai.torch.norm import layer_norm, rms_norm
from vishwamai.torch.rope import apply_rope


class FunctionCode(NamedTuple):
    """What a function does, whatever its variables are called."""

    instructions: bytes
    constants: tuple[Any, ...]
    names: tuple[str, ...]


def code_of(function: Any) -> FunctionCode | None:
    """The code of a function under its decorators; None for what has none."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return None
    texts = code.co_consts[1:] if code.co_consts and isinstance(code.co_consts[0], str) else code.co_consts
    constants = tuple(c.co_code if isinstance(c, types.CodeType) else (type(c).__name__, c) for c in texts)
    return FunctionCode(code.co_code, constants, code.co_names)


def _published(path: str) -> Any:
    """ "llama.LlamaMLP.forward" of transformers; None where this version does not have it."""
    family, *names = path.split(".")
    try:
        definition: Any = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    except ImportError:
        return None
    for name in names:
        definition = getattr(definition, name, None)
    return definition


def is_published(path: str, function: object) -> bool:
    """Whether a function is the one that transformers has at `path`, or a copy of it."""
    published = _published(path)
    return published is not None and function is not None and code_of(published) == code_of(function)


_SCALED = "scaled"  # weight * x^ in the wider dtype of both
_NORMS = {
    "llama.LlamaRMSNorm": _SCALED,
    "olmo2.Olmo2RMSNorm": "",
    "gpt_oss.GptOssRMSNorm": "",
    "gemma2.Gemma2RMSNorm": "one more",  # (1 + weight) * x^
}
_ROPES = ("llama.apply_rotary_pos_emb", "olmo2.apply_rotary_pos_emb", "phi3.apply_rotary_pos_emb")
_TABLES = ("llama.LlamaRotaryEmbedding", "olmo2.Olmo2RotaryEmbedding", "gemma3.Gemma3RotaryEmbedding")
_LOSSES = ("llama.LlamaForCausalLM", "gemma2.Gemma2ForCausalLM")


def own_forward(module: nn.Module) -> bool:
    """Whether a forward pass was put into the module itself already, by accelerate or another patch."""
    return "forward" in vars(module)


def reads(module: nn.Module, name: str) -> bool:
    """Whether the forward pass of a module's class refers to a global, or an attribute, of that name."""
    code = code_of(type(module).forward)
    return code is not None and name in code.names


def _class_known(path: str, kind: type) -> bool:
    """Whether all methods of a class that compute are those of the one at `path`."""
    published = _published(path)
    helpers = ("forward", "_norm")
    return published is not None and all(
        (theirs := getattr(published, name, None)) is (ours := getattr(kind, name, None))
        or (theirs is not None and ours is not None and code_of(theirs) == code_of(ours))
        for name in helpers
    )


@functools.cache
def _norm_form(kind: type) -> str | None:
    return next((form for path, form in _NORMS.items() if _class_known(path, kind)), None)


def norm(module: nn.Module) -> Callable[..., Tensor] | None:
    """The forward pass of a normalization on our operation; None where the module is not one that is known."""
    kind = type(module)
    if kind is nn.LayerNorm:
        return _layer_norm if len(module.normalized_shape) == 1 else None  # type: ignore[arg-type]
    if kind is nn.RMSNorm:
        # Its eps of None is that of the input's dtype.
        return _torch_rms_norm if len(module.normalized_shape) == 1 and module.eps is not None else None  # type: ignore[arg-type]
    form = _norm_form(kind)
    return None if form is None else functools.partial(_rms_norm, form)


def _layer_norm(self: Any, x: Tensor) -> Tensor:
    return layer_norm(x, self.weight, self.bias, eps=self.eps)


def _torch_rms_norm(self: Any, x: Tensor) -> Tensor:
    return rms_norm(x, self.weight, eps=self.eps)


def _rms_norm(form: str, self: Any, x: Tensor) -> Tensor:
    eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
    out = rms_norm(x, self.weight, eps=eps, scale_offset=1.0 if form == "one more" else 0.0)
    return out.to(torch.promote_types(x.dtype, self.weight.dtype)) if form == _SCALED else out


@functools.cache
def _activations() -> dict[type, str]:
    from transformers import activations

    names = {"SiLUActivation": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh"}
    ours: dict[type, str] = {getattr(activations, n): o for n, o in names.items() if hasattr(activations, n)}
    return ours | {nn.SiLU: "silu", nn.ReLU: "relu"}


def activation(module: object) -> str | None:
    """Our name of an activation, or None."""
    name = _activations().get(type(module))
    if type(module) is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return name


class FeedForward(NamedTuple):
    """A gated feed-forward network, or a block of them, that is known.

    Attributes:
      path: its module and name in transformers.
      weights: products or weights that our operation computes with.
      activation: the module's name of its activation.
      operation: ours.
      stored_transposed: the kernel reads `[..., features, hidden]`, and would copy each weight in every call.
    """

    path: str
    weights: tuple[str, ...]
    activation: str
    operation: str
    stored_transposed: bool = True


_GATED = FeedForward("llama.LlamaMLP", ("gate_proj", "up_proj"), "act_fn", "gated_linear_unit")
_JOINT = FeedForward(  # its halves have no strides in which a kernel could read both without a copy
    "phi3.Phi3MLP",
    ("gate_up_proj",),
    "activation_fn",
    "gated_linear_unit, in calls of at least twice as many rows as features",
    stored_transposed=False,
)
_EXPERTS = FeedForward("mixtral.MixtralExperts", ("gate_up_proj", "down_proj"), "act_fn", "grouped_gemm")


@functools.cache
def feed_forward(kind: type[nn.Module]) -> FeedForward | None:
    """Which of the known networks a class is, or None."""
    return next(
        (form for form in (_GATED, _JOINT, _EXPERTS) if is_published(f"{form.path}.forward", kind.forward)), None
    )


def weights(module: nn.Module, form: FeedForward) -> list[Any]:
    """The weights that our operation computes with."""
    parts: list[Any] = [getattr(module, name) for name in form.weights]
    return [part.weight if isinstance(part, nn.Module) else part for part in parts]


def mlp_why_not(module: Any) -> str | None:
    """Why a feed-forward network cannot be ours, or None; "" for what is not one."""
    form = feed_forward(type(module))
    if form is None:
        return ""
    act = getattr(module, form.activation)
    if form is not _EXPERTS and activation(act) is None:
        return f"its activation is {type(act).__name__}, which gated_linear_unit does not have"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are split over devices by transformers"
    for name, weight in zip(form.weights, weights(module, form), strict=True):
        part = getattr(module, name)
        if isinstance(part, nn.Module):
            if type(part) is not nn.Linear or own_forward(part):
                return f"{name} is a {type(part).__name__} that does more than its product"
            if part.bias is not None:
                return f"{name} has a bias"
        if type(weight) is not nn.Parameter or weight.is_meta or getattr(part, "_forward_hooks", None):
            return f"{name} has a weight or a hook that is not plain"
    return None


def mlp(module: object) -> Callable[..., Tensor]:
    """The forward pass of a feed-forward network on our operation."""
    form = feed_forward(type(module))
    assert form is not None  # or `mlp_why_not` says so
    if form is _EXPERTS:
        return _experts
    act = activation(getattr(module, form.activation))
    assert act is not None
    return functools.partial(_gated_mlp if form is _GATED else _joint_mlp, act)


def _gated_mlp(act: str, self: Any, x: Tensor) -> Tensor:
    return self.down_proj(gated_linear_unit(x, (self.gate_proj.weight.t(), self.up_proj.weight.t()), act))


def _joint_mlp(act: str, self: Any, hidden_states: Tensor) -> Tensor:
    """Of one weight for gate and up, which is copied: that costs as many bytes as the sums of twice as many rows as
    features save that are not written and read.
    """
    features = hidden_states.shape[-1]
    if hidden_states.numel() < 2 * features**2:
        return type(self).forward(self, hidden_states)
    joint = self.gate_up_proj.weight.unflatten(0, (2, -1)).mT  # [2, features, hidden]
    return self.down_proj(gated_linear_unit(hidden_states, joint, act))


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Each token's sum over the experts that the router chose, `[tokens, features]`; gate and up are one product."""
    counts = bincount(top_k_index.flatten(), self.num_experts)
    no_loss = top_k_weights.new_zeros(())
    routing = Routing(top_k_weights, top_k_index.int(), no_loss, no_loss, counts)
    sent = moe_dispatch(hidden_states, routing)
    gate, up = grouped_gemm(sent.rows, self.gate_up_proj, sent.group_sizes, transpose_rhs=True).chunk(2, dim=-1)
    out = grouped_gemm(self.act_fn(gate) * up, self.down_proj, sent.group_sizes, transpose_rhs=True)
    return moe_combine(out, sent, routing).reshape(hidden_states.shape)


def turn(module: nn.Module, back: bool = False) -> None:
    """Stores the weights as the kernel reads them, transposed behind the same shape; or `back` as they were."""
    form = feed_forward(type(module))
    assert form is not None
    if form.stored_transposed:
        for weight in weights(module, form):
            weight.data = weight.data.contiguous() if back else weight.data.mT.contiguous().mT


def rope_why_not(module: nn.Module, model: nn.Module) -> str | None:
    """Why the rotary embedding of an attention module cannot be ours, or None; "" for a module without one."""
    if not reads(module, "apply_rotary_pos_emb"):
        return ""
    scope = inspect.unwrap(type(module).forward).__globals__
    if not any(is_published(path, scope.get("apply_rotary_pos_emb")) for path in _ROPES):
        return "its rotary embedding is of a form of its own"
    if not is_published("llama.rotate_half", scope.get("rotate_half")):
        return "its rotary embedding pairs other features"
    for tables in model.modules():
        if type(tables).__name__.endswith("RotaryEmbedding") and not makes_tables(type(tables)):
            return f"{type(tables).__name__} makes tables of a form of its own"
    if with_rope(module) is None:
        return "its forward pass has a decorator that keeps it where it cannot be exchanged"
    return None


@functools.cache
def makes_tables(kind: type[nn.Module]) -> bool:
    """Whether a module makes the cos and sin that `rotate` takes."""
    return any(is_published(f"{path}.forward", kind.forward) for path in _TABLES)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """transformers' `apply_rotary_pos_emb`, whose tables have every angle twice: `[batch or 1, seq, rotary_dim]`."""
    half = cos.shape[-1] // 2
    tables = (cos[..., :half].float(), sin[..., :half].float())
    return apply_rope((q, k), tables=tables, layout="bhsd" if unsqueeze_dim == 1 else "bshd")


def with_rope(module: nn.Module) -> types.FunctionType | None:
    """The forward pass of an attention module, which finds our rotary embedding under the name that it calls; None
    where its decorators do not let it be exchanged.
    """
    return _with_globals(type(module).forward, apply_rotary_pos_emb=rotate)


def _with_globals(function: object, **names: object) -> types.FunctionType | None:
    """A copy of a function, its decorators kept, that finds `names` among its globals; None where a decorator is no
    function that holds the decorated one in a variable of its own, as those do that rename an argument.
    """
    if not isinstance(function, types.FunctionType):
        return None
    cells, scope, wrapped = function.__closure__, function.__globals__, vars(function).get("__wrapped__")
    if wrapped is None:
        scope = {**scope, **names}
    else:
        inner = _with_globals(wrapped, **names)
        holds = [cell.cell_contents is wrapped for cell in cells or ()]
        if inner is None or not any(holds):
            return None
        cells = tuple(
            types.CellType(inner) if holds_inner else cell for cell, holds_inner in zip(cells or (), holds, strict=True)
        )
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def loss_why_not(model: Any) -> str | None:
    """Why the loss of a model cannot be ours, or None."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if not any(is_published(f"{path}.forward", type(model).forward) for path in _LOSSES):
        return "its forward pass is not that of a plain causal language model"
    if model.loss_function is not ForCausalLMLoss:
        return "its loss is not the cross entropy of the next token"
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or own_forward(head) or type(head.weight) is not nn.Parameter:
        return f"its head is a {type(head).__name__} that does more than its product"
    return None


def with_loss(model: Any) -> Callable[..., Any]:
    """The forward pass of a causal language model, whose loss holds no logits where it is in training."""
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.utils.generic import can_return_tuple

    theirs = type(model).forward
    parameters = inspect.signature(theirs)

    @can_return_tuple
    def forward(self: Any, *args: object, **kwargs: object) -> Any:
        call = parameters.bind(self, *args, **kwargs).arguments
        more = call.pop("kwargs", {})
        labels, keep = call.pop("labels", None), call.pop("logits_to_keep", 0)
        if not self.training or labels is None or isinstance(keep, Tensor) or keep:
            return theirs(self, *args, **kwargs)
        call.pop("self")
        outputs = self.model(**call, **more)
        loss = _causal_loss(self, outputs.last_hidden_state, labels, **more)
        # By name, as the field of the cache has two: `past_key_values`, and `cache` since transformers 5.24.
        others = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return CausalLMOutputWithPast(loss=loss, **others)

    return forward


def _causal_loss(
    model: Any,
    hidden: Tensor,
    labels: Tensor,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **options: object,
) -> Tensor:
    """transformers' `ForCausalLMLoss` of the hidden states."""
    head = model.get_output_embeddings()
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss = linear_cross_entropy(
        hidden.flatten(0, -2),
        head.weight,
        shift_labels.flatten().to(hidden.device),
        bias=head.bias,
        softcap=getattr(model.config, "final_logit_softcapping", None),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    if num_items_in_batch is None:
        return loss
    return loss / (num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch)
