"""The modules of transformers that our operations can compute, recognised by the code of their forward pass.

transformers copies a module from family to family, so that one definition serves a hundred classes. A module is
recognised where its forward pass is compiled to the same instructions, constants and names as that of the class in
which we know the definition. A class that was changed in any way is not recognised, and is left as it is. Written for
transformers 5.23.
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

from vishwamai.torch.gated import gated_linear_unit
from vishwamai.torch.loss import linear_cross_entropy
from vishwamai.torch.norm import layer_norm, rms_norm
from vishwamai.torch.rope import apply_rope


class Code(NamedTuple):
    """What a function does, whatever its variables are called."""

    instructions: bytes
    constants: tuple[Any, ...]
    names: tuple[str, ...]


def code_of(function: Any) -> Code | None:
    """The code of a function under its decorators; None for what has none."""
    found = getattr(inspect.unwrap(function), "__code__", None)
    if found is None:
        return None
    texts = found.co_consts[1:] if found.co_consts and isinstance(found.co_consts[0], str) else found.co_consts
    constants = tuple(c.co_code if isinstance(c, types.CodeType) else (type(c).__name__, c) for c in texts)
    return Code(found.co_code, constants, found.co_names)


def _published(path: str) -> Any:
    """ "llama.LlamaMLP.forward" of transformers; None where this version does not have it."""
    family, *names = path.split(".")
    try:
        found: Any = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    except ImportError:
        return None
    for name in names:
        found = getattr(found, name, None)
    return found


def known(path: str, function: Any) -> bool:
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


def norm(module: nn.Module) -> Callable[..., Any] | None:
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

    found = {"SiLUActivation": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh"}
    ours: dict[type, str] = {getattr(activations, n): o for n, o in found.items() if hasattr(activations, n)}
    return ours | {nn.SiLU: "silu", nn.ReLU: "relu"}


def activation(module: Any) -> str | None:
    """Our name of an activation, or None."""
    name = _activations().get(type(module))
    if type(module) is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return name


def mlp_why_not(module: nn.Module) -> str | None:
    """Why a gated feed-forward network cannot be ours, or None; "" for what is not one."""
    if known("phi3.Phi3MLP.forward", type(module).forward):
        return "gate and up are one weight, whose halves the kernel would copy in every call"
    if not known("llama.LlamaMLP.forward", type(module).forward):
        return ""
    if activation(module.act_fn) is None:
        return f"its activation is {type(module.act_fn).__name__}, which gated_linear_unit does not have"
    for name in ("gate_proj", "up_proj"):
        linear: Any = getattr(module, name)
        if type(linear) is not nn.Linear or own_forward(linear):
            return f"{name} is a {type(linear).__name__} that does more than its product"
        if linear.bias is not None:
            return f"{name} has a bias"
        if type(linear.weight) is not nn.Parameter or linear.weight.is_meta or linear._forward_hooks:
            return f"{name} has a weight or a hook that is not plain"
    return None


def mlp(module: Any) -> Callable[..., Any]:
    act = activation(module.act_fn)
    assert act is not None  # or `mlp_why_not` says so
    return functools.partial(_gated_mlp, act)


def _gated_mlp(act: str, self: Any, x: Tensor) -> Tensor:
    return self.down_proj(gated_linear_unit(x, (self.gate_proj.weight.t(), self.up_proj.weight.t()), act))


def turn(module: Any, back: bool = False) -> None:
    """Stores the weights of gate and up transposed, behind the same shape: the kernel reads `[features, hidden]`, and
    would copy each weight in every call.
    """
    for linear in (module.gate_proj, module.up_proj):
        weight = linear.weight
        weight.data = weight.data.contiguous() if back else weight.data.t().contiguous().t()


def rope_why_not(module: nn.Module, model: nn.Module) -> str | None:
    """Why the rotary embedding of an attention module cannot be ours, or None; "" for a module without one."""
    forward = type(module).forward
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    if "apply_rotary_pos_emb" not in names:
        return ""
    scope = forward.__globals__
    if not any(known(path, scope.get("apply_rotary_pos_emb")) for path in _ROPES):
        return "its rotary embedding is of a form of its own"
    if not known("llama.rotate_half", scope.get("rotate_half")):
        return "its rotary embedding pairs other features"
    for tables in model.modules():
        if type(tables).__name__.endswith("RotaryEmbedding") and not makes_tables(type(tables)):
            return f"{type(tables).__name__} makes tables of a form of its own"
    return None


@functools.cache
def makes_tables(kind: type[nn.Module]) -> bool:
    """Whether a module makes the cos and sin that `rotate` takes."""
    return any(known(f"{path}.forward", kind.forward) for path in _TABLES)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """transformers' `apply_rotary_pos_emb`, whose tables have every angle twice: `[batch or 1, seq, rotary_dim]`."""
    half = cos.shape[-1] // 2
    tables = (cos[..., :half].float(), sin[..., :half].float())
    return apply_rope((q, k), tables=tables, layout="bhsd" if unsqueeze_dim == 1 else "bshd")


def with_rope(module: nn.Module) -> Callable[..., Any]:
    """The forward pass of an attention module, which finds our rotary embedding under the name that it calls."""
    forward: Any = type(module).forward
    scope = {**forward.__globals__, "apply_rotary_pos_emb": rotate}
    made = types.FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def loss_why_not(model: Any) -> str | None:
    """Why the loss of a model cannot be ours, or None."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if not any(known(f"{path}.forward", type(model).forward) for path in _LOSSES):
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
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(self, *args, **kwargs).arguments
        more = call.pop("kwargs", {})
        labels, keep = call.pop("labels", None), call.pop("logits_to_keep", 0)
        if not self.training or labels is None or isinstance(keep, Tensor) or keep:
            return theirs(self, *args, **kwargs)
        call.pop("self")
        outputs = self.model(**call, **more)
        loss = _causal_loss(self, outputs.last_hidden_state, labels, **more)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=None,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    return forward


def _causal_loss(
    model: Any,
    hidden: Tensor,
    labels: Tensor,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **options: Any,
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
