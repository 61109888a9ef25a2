"""Swaps the modules of a transformers model for our operations, in the instance alone, and back."""

from __future__ import annotations

import dataclasses
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.types import PyTree
from vishwamai.patch import attention as attention_interface
from vishwamai.patch import modules

_ROUTED = "ALL_ATTENTION_FUNCTIONS"  # what the forward pass of a module reads that asks for an attention by name
_PLAIN = "torch's own"
_UNKNOWN = "no operation is known that computes it"
_TABLES = "makes the tables of all layers, once a call"


@dataclasses.dataclass(frozen=True)
class PatchEntry:
    """A class of a model: how many modules, what computes them now or why it was left."""

    module: str
    count: int
    status: str

    def __str__(self) -> str:
        return f"{self.count:4d} {self.module}: {self.status}"


@dataclasses.dataclass
class Patch:
    """What a model had swapped.

    Attributes:
      swapped: classes of modules, with the operation that computes them now.
      left: classes that are as they were, with the reason.
    """

    swapped: tuple[PatchEntry, ...]
    left: tuple[PatchEntry, ...]
    _undo: list[Callable[[], None]] = dataclasses.field(repr=False)

    def undo(self) -> None:
        """Puts everything back as it was; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        return "\n".join(["swapped:", *map(str, self.swapped), "left:", *map(str, self.left)])


class _Walk:
    """The swaps of one model, as they are made."""

    def __init__(self) -> None:
        self.swapped: Counter[tuple[str, str]] = Counter()
        self.left: Counter[tuple[str, str]] = Counter()
        self.undo: list[Callable[[], None]] = []
        self.inside: set[int] = set()  # modules that a swapped one computes

    def swap(self, module: nn.Module, forward: Callable[..., object], operation: str) -> None:
        module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]
        self.undo.append(lambda: delattr(module, "forward"))
        self.swapped[type(module).__name__, operation] += 1

    def leave(self, module: nn.Module, why: str) -> None:
        self.left[type(module).__name__, why] += 1


def patch(model: PyTree, attention: bool, norm: bool, rope: bool, mlp: bool | None, loss: bool) -> Patch:
    """See `vishwamai.patch.transformers`."""
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise UnsupportedError(
            f"patch.transformers: {error}; pip install 'transformers>=5.0', whose models it changes."
        ) from error
    if not isinstance(model, PreTrainedModel):
        raise ShapeError(
            f"patch.transformers: `model` is of type {type(model).__name__}; pass a transformers model of torch, such "
            "as AutoModelForCausalLM.from_pretrained(...)."
        )
    if any(hasattr(module, "_vishwamai") for module in model.modules()):
        raise ShapeError("patch.transformers: the model is patched already; call undo() of that patch first.")
    walk = _Walk()
    model._vishwamai = True  # type: ignore[assignment]
    walk.undo.append(lambda: delattr(model, "_vishwamai"))
    routed = attention and _swap_attention(model, walk)
    for module in model.modules():
        _visit(module, model, walk, routed, norm, rope, mlp)
    _swap_loss(model, walk, loss)
    return Patch(_entries(walk.swapped), _entries(walk.left), walk.undo)


def _entries(counts: Counter[tuple[str, str]]) -> tuple[PatchEntry, ...]:
    return tuple(PatchEntry(module, count, operation) for (module, operation), count in counts.items())


def _swap_attention(model: Any, walk: _Walk) -> bool:
    """Routes all attention that is asked for by name; whether the model lets it."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    attention_interface.register()
    model.set_attn_implementation(attention_interface.NAME)

    def undo() -> None:
        for config, name in before:  # from the outermost on, for a config sets its parts
            config._attn_implementation = name

    walk.undo.append(undo)
    return model.config._attn_implementation == attention_interface.NAME


def _visit(
    module: nn.Module, model: PyTree, walk: _Walk, routed: bool, norm: bool, rope: bool, mlp: bool | None
) -> None:
    if id(module) in walk.inside:
        return
    if modules.own_forward(module):
        walk.leave(module, "its forward pass was replaced already")
        return
    if modules.reads(module, _ROUTED):
        _visit_attention(module, model, walk, routed, rope)
        return
    normalize, gated = modules.norm(module), modules.mlp_why_not(module)
    if normalize is not None:
        if norm:
            walk.swap(module, normalize, "layer_norm" if type(module) is nn.LayerNorm else "rms_norm")
        else:
            walk.leave(module, "norm=False")
    elif gated != "":
        _visit_mlp(module, walk, gated, mlp)
    elif _computes(module):
        plain = type(module).__module__.startswith("torch.nn.")
        tables = modules.makes_tables(type(module))
        walk.leave(module, _PLAIN if plain else _TABLES if tables else _UNKNOWN)


def _visit_attention(module: Any, model: Any, walk: _Walk, routed: bool, rope: bool) -> None:
    ours = routed and module.config._attn_implementation == attention_interface.NAME
    why = modules.rope_why_not(module, model)
    if ours:
        walk.swapped[type(module).__name__, "flash_attention"] += 1
    else:
        walk.leave(module, "attention=False" if not routed else "its model does not ask for attention by name")
    if rope and why is None:
        forward = modules.with_rope(module)
        assert forward is not None  # or `why` says so
        walk.swap(module, forward, "apply_rope")
    elif why != "":
        walk.leave(module, "rope=False" if why is None else why)


def _visit_mlp(module: Any, walk: _Walk, why: str | None, mlp: bool | None) -> None:
    form = modules.feed_forward(type(module))
    assert form is not None  # or `why` is ""
    if why is None and mlp is None:
        if any(w.device.type == "cpu" and w.dtype == torch.float32 for w in modules.weights(module, form)):
            why = "on a CPU, torch's own products of float32 are faster for few rows; mlp=True swaps it"
    if why is None and mlp is False:
        why = "mlp=False"
    if why is not None:
        walk.leave(module, why)
    else:
        modules.turn(module)
        walk.undo.append(lambda: modules.turn(module, back=True))
        walk.swap(module, modules.mlp(module), form.operation)
        walk.inside |= {id(getattr(module, name)) for name in form.weights}
    walk.inside.add(id(getattr(module, form.activation)))


def _computes(module: nn.Module) -> bool:
    """Whether a module has parameters of its own, or is a leaf with work to do."""
    idle = (nn.Dropout, nn.Identity, nn.ModuleList)
    return bool(module._parameters) or (not module._modules and not isinstance(module, idle))


def _swap_loss(model: Any, walk: _Walk, loss: bool) -> None:
    if not hasattr(model, "lm_head"):
        return
    why = modules.loss_why_not(model)
    if why is None and loss:
        walk.swap(model, modules.with_loss(model), "linear_cross_entropy, in training: `logits` are None")
    else:
        walk.left["loss", why or "loss=True swaps it: in training a call with labels then returns no logits"] += 1
