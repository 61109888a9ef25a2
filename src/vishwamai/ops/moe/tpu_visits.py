"""In which order the TPU kernels visit tiles of rows: every tile that a group has a part of, group after group, from
the sizes on the device.

The tables are small integer arrays that the kernels read from scalar memory. A tile that k groups share is visited k
times in a row, so it stays in VMEM between the visits. After MegaBlocks (Gale et al. 2022) and its TPU form in jax,
`megablox`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Visits(NamedTuple):
    """One entry for each visit of each batch entry; the tables of all batch entries stand one after another."""

    group: jax.Array  # the group whose matrix is used
    tile: jax.Array  # the tile of rows
    start: jax.Array  # first row of the tile that belongs to the group
    stop: jax.Array  # one past the last; start == stop where nothing is computed
    following: jax.Array  # the next group that is not this one, -1 if there is none: what to load ahead
    second: jax.Array  # and the one after that
    count: jax.Array  # [1]: visits that the longest batch entry has


def length(m: int, groups: int, block_m: int) -> int:
    """Entries of one batch entry's tables: each group can add one visit to those of the tiles, and so can the rows
    without a group.
    """
    return -(-m // block_m) + groups + 1


def plan(group_sizes: jax.Array, first_row: jax.Array | None, m: int, block_m: int, *, every_group: bool) -> Visits:
    """The visits for sizes `[B, G]`.

    Args:
      first_row: `[B or 1]`, where the first group begins; None for 0.
      every_group: also visit groups without rows (their weights' gradient is to be zeroed), and no rows without a
        group. Otherwise rows without a group are visited (to be zeroed), and groups without rows are not.
    """
    groups = group_sizes.shape[1]
    entries = length(m, groups, block_m)
    tiles = -(-m // block_m)
    batch = group_sizes.shape[0]
    opening = jnp.zeros((batch, 1), jnp.int32)
    if first_row is not None:
        opening += first_row[:, None]
    ends = jnp.minimum(opening + jnp.cumsum(group_sizes, axis=1), m)
    starts = jnp.concatenate([opening, ends[:, :-1]], axis=1)
    first = jnp.minimum(starts // block_m, tiles - 1)
    visits = of_groups = jnp.where(ends > starts, -(-ends // block_m) - first, 1 if every_group else 0)
    leads = 0
    if not every_group:
        # What is left of the tiles after the last group that has rows is one group more, which holds no rows of its
        # own.
        tail = -(-ends[:, -1:] // block_m)
        first, visits = (jnp.concatenate(parts, axis=1) for parts in ((first, tail), (visits, tiles - tail)))
        if first_row is not None:
            # So are the tiles before the first group that has rows.
            lead, leads = jnp.where(ends[:, -1:] > opening, opening // block_m, tail), 1
            first, visits = (jnp.concatenate(parts, axis=1) for parts in ((0 * lead, first), (lead, visits)))
        starts, ends = (jnp.pad(x, ((0, 0), (leads, 1))) for x in (starts, ends))
    done = jnp.cumsum(visits, axis=1)  # [B, G to G + 2]
    total = done[:, -1:]
    index = jnp.arange(entries, dtype=jnp.int32)[None]
    # Past the end the last visit is repeated, but computes nothing.
    visit = jnp.minimum(index, total - 1)
    owner = jnp.sum(done[:, None, :] <= visit[:, :, None], axis=2)  # [B, entries]

    def of_owner(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, owner, axis=1)

    tile = of_owner(first) + visit - of_owner(done - visits)
    live = index < total
    start = jnp.where(live, jnp.clip(of_owner(starts) - tile * block_m, 0, block_m), 0)
    stop = jnp.where(live, jnp.clip(of_owner(ends) - tile * block_m, 0, block_m), 0)
    candidates = jnp.where(of_groups > 0, jnp.arange(groups, dtype=jnp.int32), groups)
    if every_group:
        group = owner
    else:
        # Rows without a group ask for no other matrix than the first or the last one used.
        used = jnp.where(of_groups > 0, jnp.arange(groups), 0).max(axis=1, keepdims=True)
        group = jnp.clip(owner - leads, jnp.minimum(candidates.min(axis=1, keepdims=True), used), used)
    # The first group after this one that is visited.
    later = jnp.flip(jax.lax.cummin(jnp.flip(candidates, 1), axis=1), 1)
    later = jnp.pad(later[:, 1:], ((0, 0), (0, 1)), constant_values=groups)
    following = jnp.take_along_axis(later, group, axis=1)
    second = jnp.take_along_axis(later, jnp.minimum(following, groups - 1), axis=1)
    second = jnp.where((following < groups) & (second < groups), second, -1)
    following = jnp.where(following < groups, following, -1)
    columns = (group, tile, start, stop, following, second, jnp.max(total))
    return Visits(*(x.astype(jnp.int32).reshape(-1) for x in columns))


def tables(
    group_sizes: jax.Array, first_row: jax.Array | None, m: int, block_m: int, *, every_group: bool
) -> tuple[dict[str, jax.Array], jax.Array]:
    """`plan` as the scalars of a kernel, by their refs, and the number of visits, `[1]`."""
    visits = plan(group_sizes, first_row, m, block_m, every_group=every_group)
    return {f"{name}_ref": table for name, table in zip(Visits._fields[:-1], visits)}, visits.count
