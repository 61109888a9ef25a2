"""Tiny random checkpoints that transformers makes, and what transformers computes with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.models import Decoder, PagedBatch, page_shapes

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclasses.dataclass(frozen=True)
class Peer:
    """A model of transformers: the name of its configuration's class without "Config", and options of it."""

    name: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def config(self) -> Any:
        """The configuration of transformers."""
        import transformers

        return getattr(transformers, f"{self.name}Config")(**{**SIZES, **self.options})

    def save(self, directory: Path) -> Any:
        """Writes a random checkpoint and returns the model."""
        model = self.build(self.config())
        model.save_pretrained(directory)
        return model

    @staticmethod
    def build(config: Any) -> Any:
        """A random model, whose norms and biases are random too."""
        import torch
        import transformers

        torch.manual_seed(0)
        options = {"attn_implementation": "eager", "experts_implementation": "eager"}
        if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            model = transformers.AutoModelForCausalLM.from_config(config, **options).eval()
        else:  # a class that the mapping lacks
            model = _causal_class(config)._from_config(config, **options).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1 or "bias" in name or "sinks" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        return model


def peer_logits(model: Any, tokens: np.ndarray, double: bool = False) -> np.ndarray:
    """Logits `[batch, seq, vocab]` of transformers, in float32 or float64."""
    import copy

    import torch

    model = copy.deepcopy(model).double() if double else model
    with torch.no_grad():
        return model(torch.as_tensor(tokens), use_cache=False).logits.numpy()


def greedy(model: Decoder, prompts: list[list[int]], count: int, page_size: int = 8) -> list[list[int]]:
    """`count` greedy tokens of every prompt through `step`: one prefill of all, then steps of one token each."""
    sequences = len(prompts)
    per = -(-(max(map(len, prompts)) + count) // page_size)
    sizes: dict[str, Any] = {"num_pages": sequences * per, "page_size": page_size, "num_states": sequences}
    shapes = page_shapes(model.config, dtype=model.dtype, stacked=model.stacked, **sizes)
    pages = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), shapes)
    # Pages of the sequences are interleaved, as an engine would leave them.
    table = jnp.arange(sequences * per, dtype=jnp.int32).reshape(per, sequences).T

    @jax.jit
    def step(model: Decoder, tokens: Any, pages: Any, batch: PagedBatch) -> tuple[Any, Any]:
        hidden, pages = model.step(tokens, pages, batch)
        return jnp.argmax(model.logits(hidden[batch.cu_q_lens[1:] - 1]), axis=-1), pages

    lens = np.array([len(p) for p in prompts], np.int32)
    cu = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    padded = np.concatenate([*prompts, [5, 5, 5]]).astype(np.int32)  # an engine pads to few lengths
    states = jnp.arange(sequences, dtype=jnp.int32)[::-1] * jnp.ones((2, 1), jnp.int32)
    batch = PagedBatch(jnp.asarray(lens), table, jnp.asarray(cu), states=states)
    new, pages = step(model, jnp.asarray(padded), pages, batch)
    out = [new]
    for i in range(1, count):
        ends = jnp.arange(sequences + 1, dtype=jnp.int32)
        batch = PagedBatch(jnp.asarray(lens + i), table, ends, 1, states=states)
        new, pages = step(model, new, pages, batch)
        out.append(new)
    return np.stack(out, axis=1).tolist()


def peer_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens of transformers."""
    import torch

    found = model.generate(
        torch.as_tensor([prompt]),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found[0, len(prompt) :].tolist()


def load(directory: Path) -> Any:
    """The model of transformers in a directory."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    known = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    kind = transformers.AutoModelForCausalLM if known else _causal_class(config)
    return kind.from_pretrained(directory, attn_implementation="eager").eval()


def _causal_class(config: Any) -> Any:
    import transformers

    return getattr(transformers, type(config).__name__.replace("Config", "ForCausalLM"))
