"""Other libraries' models on our operations, by one line.

>>> import vishwamai.patch
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
>>> model = LlamaForCausalLM(LlamaConfig(**sizes))
>>> print(vishwamai.patch.transformers(model, mlp=True))
swapped:
   1 LlamaAttention: flash_attention
   1 LlamaAttention: apply_rope
   1 LlamaMLP: gated_linear_unit
   3 LlamaRMSNorm: rms_norm
left:
   1 Embedding: torch's own
   6 Linear: torch's own
   1 LlamaRotaryEmbedding: makes the tables of all layers, once a call
   1 loss: loss=True swaps it: in training a call with labels then returns no logits
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vishwamai.core.arguments import checked, checks_its_own
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.installing import install_line

if TYPE_CHECKING:
    from types import ModuleType

    from vishwamai.patch.swaps import Patch

__all__ = ["register_attention", "transformers"]


@checks_its_own("model")
def transformers(
    model: Any,
    *,
    attention: bool = True,
    norm: bool = True,
    rope: bool = True,
    mlp: bool | None = None,
    loss: bool = False,
) -> Patch:
    """Swaps what a transformers model computes by itself for our operations, in place.

    Modules are recognised by the code of their forward pass; what is not recognised is left, and named. Only this
    model changes: not its class, its parameters or other models. Outputs are the same up to rounding, and so are
    gradients; rows that are padding may differ. Swap before `torch.compile`, and after a change of dtype or device.

    Args:
      model: a `transformers.PreTrainedModel`: Llama, Mistral, Mixtral, Qwen 2 and 3 (MoE too), Gemma 2 and 3, Phi-3,
        BERT and others of the same modules.
      attention: attention by `flash_attention`, through transformers' `AttentionInterface`.
      norm: RMSNorm and LayerNorm by `rms_norm` and `layer_norm`.
      rope: rotary embeddings by `apply_rope`.
      mlp: SwiGLU and GeGLU by `gated_linear_unit`, blocks of experts by `grouped_gemm`. Their weights are stored
        transposed, behind the same shape. Phi-3's one weight for gate and up stays, and its halves are copied in calls
        of at least twice as many rows as features; torch computes the others. None swaps all except for float32 on a
        CPU, where torch is faster for few rows.
      loss: the head and the loss by `linear_cross_entropy`, which holds no logits. A call with labels in training then
        returns `logits=None`.

    Returns:
      What was swapped and what was left, which prints as a list; its `undo()` puts everything back.

    Raises:
      ShapeError: the model is not one of transformers, or is patched already.
      UnsupportedError: torch or transformers is not installed.

    >>> import torch
    >>> from transformers import Qwen3Config, Qwen3ForCausalLM
    >>> sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    >>> model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=1, head_dim=16)).eval()
    >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
    >>> before = model(ids).logits
    >>> patched = transformers(model)
    >>> [entry.module for entry in patched.swapped]
    ['Qwen3Attention', 'Qwen3Attention', 'Qwen3RMSNorm']
    >>> torch.allclose(model(ids).logits, before, atol=1e-5)
    True
    >>> patched.undo()
    """
    return _needing_torch("patch.transformers", "swaps").patch(model, attention, norm, rope, mlp, loss)


@checked
def register_attention(name: str = "vishwamai") -> None:
    """Makes `attn_implementation=name` an attention of transformers' models, by `flash_attention`; nothing that is
    loaded already changes.

    Args:
      name: its name in that place.

    Raises:
      UnsupportedError: torch or transformers is not installed, or transformers is older than its mask interface.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> register_attention()
    >>> sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="vishwamai"))
    >>> model(torch.tensor([[3, 1, 4, 1, 5]])).logits.shape
    torch.Size([1, 5, 32])
    """
    _needing_torch("patch.register_attention", "attention").register(name)


def _needing_torch(function: str, module: str) -> ModuleType:
    """A module of this package, which imports torch."""
    try:
        return importlib.import_module(f"vishwamai.patch.{module}")
    except ImportError as error:
        raise UnsupportedError(f"{function}: {error}; {install_line('torch')}.") from error
