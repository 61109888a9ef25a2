"""The mesh axes over which a decoder is split inside `shard_map`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from vishwamai.core.types import PyTree


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """Names of mesh axes.

    A loss that every device of `tensor` computes counts once for each of them. Its gradient is that of the sum over
    all devices, so divide the loss by their number, and add up the gradients of parameters that they all hold.

    Attributes:
      tokens: axes over which tokens are split; the losses and counts of experts are those of all tokens.
      expert: axis of those over which experts are split too; tokens travel to their experts.
      sequence: axis of those over which each row is split; keys and values travel around a ring.
      heads: attention exchanges heads in place of the ring, for a branch that not all devices of the mesh take: XLA
        waits for all of them where arrays travel from neighbour to neighbour (on CPUs; jaxlib 0.10.2).
      features: axis over which the features of the embedding table and of the head are split; its devices have tokens
        of their own.
      tensor: axis over which heads, features of feed-forward networks and the vocab are split; all its devices have
        the same tokens. Shoeybi et al., "Megatron-LM" (2019).
    """

    tokens: tuple[str, ...] = ()
    expert: str | None = None
    sequence: str | None = None
    features: str | None = None
    tensor: str | None = None
    heads: bool = False

    def total(self, x: PyTree) -> PyTree:
        """The sum of what each device of `tensor` has made of its part."""
        return x if self.tensor is None else jax.lax.psum(x, self.tensor)

    def once(self, bias: PyTree) -> PyTree:
        """A whole bias on one device of `tensor`, zeros on the others: `total` counts it once. None stays None."""
        return _on_first(self.tensor, bias)

    def row_total(self, x: PyTree) -> PyTree:
        """The sum of what each device of `sequence` has made of its part of the rows."""
        return x if self.sequence is None else jax.lax.psum(x, self.sequence)

    def row_once(self, x: PyTree) -> PyTree:
        """What all devices of `sequence` have, on one of them, and zeros on the others: it counts once among tokens."""
        return _on_first(self.sequence, x)


def _on_first(axis: str | None, x: PyTree) -> PyTree:
    if x is None or axis is None:
        return x
    return jnp.where(jax.lax.axis_index(axis) == 0, x, jnp.zeros_like(x))


ONE_DEVICE = MeshAxes()
