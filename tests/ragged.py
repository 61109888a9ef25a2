"""`jax.lax.ragged_all_to_all` for tests on CPUs."""

import jax
import jax.numpy as jnp


def gathered_ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What `jax.lax.ragged_all_to_all` does, for XLA on a CPU, which has none: everyone sees everything and takes its
    own.
    """
    del recv_sizes
    tables = [jax.lax.all_gather(t, axis_name) for t in (input_offsets, send_sizes, output_offsets)]
    everything, me = jax.lax.all_gather(operand, axis_name), jax.lax.axis_index(axis_name)
    rows = jnp.arange(output.shape[0])
    for source in range(everything.shape[0]):
        start, size, first = (t[source, me] for t in tables)
        mine = everything[source].at[rows - first + start].get(mode="fill", fill_value=0)
        output = jnp.where(((rows >= first) & (rows < first + size))[:, None], mine, output)
    return output
