"""Mixers with a state: what a token needs of all earlier ones has one size for any length of the sequence.

A subclass writes its computation once, as `mix`, on two forms of mixing over tokens: a short convolution and a
recurrence. Over whole rows (`RowTokens`) both start from zero at each segment. In a step of serving (`StepTokens`) both
go on from the states of the sequences, which lie in a pool of slots, and write them back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

import jax
import jax.numpy as jnp

import vishwamai
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.types import PyTree
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.layers.mixer import Arrays, Mixer, Rows, Step
from vishwamai.models.pages import PagedBatch
from vishwamai.models.rotation import NO_ROTATION, Rope
from vishwamai.ops.delta import PooledStates

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig


class Tokens(Protocol):
    """The tokens of a call of `Recurrent.mix`, which know where their sequences start."""

    @property
    def axes(self) -> MeshAxes:
        """Mesh axes over which the model is split, inside `shard_map`."""
        ...

    def convolve(
        self, name: str, x: jax.Array, weight: PyTree, bias: jax.Array | None = None, activation: str | None = None
    ) -> jax.Array:
        """`vishwamai.causal_conv1d` of each sequence.

        Args:
          name: entry of `Recurrent.state`, `(width - 1, channels)`.
          x: `[batch, seq, channels]`.
          weight: `[channels, width]`. bias: `[channels]`, or None.
          activation: argument of `causal_conv1d`.
        """
        ...

    def recur(self, name: str, function: Callable[..., object], *operands: jax.Array | None) -> jax.Array:
        """A recurrence over the tokens of each sequence.

        Args:
          name: entry of `Recurrent.state`, the shape of `initial_state` without its batch.
          function: called as `function(*operands, initial_state=..., segment_ids=..., return_state=...)`, of which it
            gets what it needs, as `vishwamai.gated_delta_rule` and its relatives take them. A step of serving passes
            `vishwamai.ops.delta.PooledStates`.
          operands: arrays `[batch, heads, seq, ...]`; None for an argument left out.

        Returns:
          `[batch, heads, seq, ...]`.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Recurrent(Mixer):
    """A mixer with a state; a subclass has `state`, `mix` and `mixing_flops` in place of `__call__` and `step`."""

    @classmethod
    def read(cls, sizes: Mapping[str, Any], window: int | None, rope: Rope) -> Self:
        return cls(None, NO_ROTATION, **sizes)

    def mix(self, config: ModelConfig, arrays: Arrays, x: jax.Array, tokens: Tokens) -> jax.Array:
        """The output of tokens `[batch, seq, hidden]`, in the same shape.

        Where every device of `tokens.axes.tensor` has all heads, the result goes through `tokens.axes.once`.
        """
        raise NotImplementedError

    def __call__(self, config: ModelConfig, arrays: Arrays, x: jax.Array, rows: Rows) -> jax.Array:
        if rows.axes.sequence is not None:
            raise UnsupportedError(
                f"{config.family}: rows are split over the mesh axis {rows.axes.sequence!r}, and layers of type "
                f"'{self.layer_type}' need whole rows; set mesh.sequence=1."
            )
        return self.mix(config, arrays, x, RowTokens(rows))

    def step(
        self, config: ModelConfig, arrays: Arrays, x: jax.Array, step: Step, pool: PyTree, first: int | jax.Array
    ) -> tuple[jax.Array, PyTree]:
        tokens = StepTokens(step.batch, x.shape[1], pool, first)
        out = self.mix(config, arrays, x, tokens)
        return out, tokens.pool

    def units(self, config: ModelConfig) -> dict[str, tuple[str, int]]:
        return {}


class RowTokens:
    """The tokens of whole rows."""

    def __init__(self, rows: Rows):
        self.axes = rows.axes
        self._segment_ids = rows.segment_ids

    def convolve(
        self, name: str, x: jax.Array, weight: PyTree, bias: jax.Array | None = None, activation: str | None = None
    ) -> jax.Array:
        del name
        return vishwamai.causal_conv1d(x, weight, bias, activation=activation, segment_ids=self._segment_ids)

    def recur(self, name: str, function: Callable[..., PyTree], *operands: jax.Array | None) -> jax.Array:
        del name
        return function(*operands, segment_ids=self._segment_ids)


class StepTokens:
    """The new tokens of a step: `[1, tokens, ...]`, those of each sequence in turn.

    Args:
      batch: the sequences, with `PagedBatch.states`.
      count: tokens of the step.
      pool: arrays `[slots, ...]` by the names of `Recurrent.state`.
      first: int32 scalar, index of the layer's first slot in the pool.

    Attributes:
      pool: the pool, with the states after the tokens.
    """

    axes = ONE_DEVICE

    def __init__(self, batch: PagedBatch, count: int, pool: Mapping[str, jax.Array], first: int | jax.Array):
        assert batch.states is not None, "the batch of a model with states names their slots"
        self.pool = dict(pool)
        self._starts, self._ends = batch.cu_q_lens[:-1], batch.cu_q_lens[1:]
        self._counts = self._ends - self._starts
        self._begins = batch.kv_lens == self._counts
        self._read, self._write = batch.states + first
        self._batch, self._tokens = batch, count
        self._decodes = batch.max_q_len == 1 and count == batch.kv_lens.shape[0]

    def convolve(
        self, name: str, x: jax.Array, weight: PyTree, bias: jax.Array | None = None, activation: str | None = None
    ) -> jax.Array:
        before = self._before(name).astype(x.dtype)  # [sequences, history, channels]
        history, tokens = before.shape[1], jnp.arange(self._tokens, dtype=jnp.int32)
        rows = jnp.concatenate([before.reshape(-1, x.shape[2]), x[0]])
        back = jnp.arange(history, 0, -1, dtype=jnp.int32)

        def tokens_before(token: jax.Array, sequence: jax.Array) -> jax.Array:
            """The last tokens of a sequence before one of the step, `[..., history, channels]`."""
            offset = (token - self._starts[sequence])[:, None]
            earlier = sequence[:, None] * history + history + offset - back
            return rows[jnp.where(offset >= back, before.shape[0] * history + token[:, None] - back, earlier)]

        if self._decodes:
            windows = before
        else:
            windows = tokens_before(tokens, self._batch.sequences(self._tokens))
        y = vishwamai.causal_conv1d(x[0][:, None], weight, bias, activation=activation, initial_state=windows)
        self._after(name, tokens_before(self._ends, jnp.arange(before.shape[0], dtype=jnp.int32)))
        return y[:, 0][None]

    def recur(self, name: str, function: Callable[..., Any], *operands: jax.Array | None) -> jax.Array:
        pool = self.pool[name]
        slots = jnp.stack([jnp.where(self._begins, -1, self._read), self._write])
        states = PooledStates(pool, slots, self._batch.cu_q_lens, self._decodes)
        y, self.pool[name] = function(*operands, initial_state=states, return_state=True)
        return y

    def _before(self, name: str) -> jax.Array:
        """The states before the step, `[sequences, ...]`; 0 of sequences that begin."""
        states = self.pool[name][self._read]
        return jnp.where(self._begins.reshape(-1, *[1] * (states.ndim - 1)), 0, states)

    def _after(self, name: str, states: jax.Array) -> None:
        """Writes the states after the step; of unused rows none."""
        pool = self.pool[name]
        slots = jnp.where(self._counts > 0, self._write, pool.shape[0])
        self.pool[name] = pool.at[slots].set(states.astype(pool.dtype), mode="drop")
