"""Which activations of the forward pass are kept for the backward pass, and which are computed again.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). The model names its activations
(`jax.ad_checkpoint.checkpoint_name`); a policy says which of the names are kept.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vishwamai.core import observe
from vishwamai.core.errors import ConfigError
from vishwamai.core.types import PyTree
from vishwamai.models import Decoder

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

    from vishwamai.models.decoder import Period, WrapLayer
    from vishwamai.models.layers.feed_forward import ExpertLoad
    from vishwamai.models.layers.layer import Carry

Policy = Callable[..., bool]
"""JAX's policy of `jax.checkpoint`: whether a value is kept, by the operation that made it."""

POLICIES = {
    "none": "everything is kept, nothing is recomputed",
    "dots": "results of products are kept; norms, activations and attention's weights are recomputed",
    "block_wise": "the inputs of each layer and of its feed-forward network are kept; within a block all is recomputed",
    "full": "the input of each layer is kept; within a layer all is recomputed",
    "offload": "what `full` keeps lies in the host's memory until the backward pass",
}
"""The policies with names of their own; any other text lists names of activations to keep."""

_INPUT, _MLP_INPUT, _STREAM = "layer_input", "mlp_input", "stream"
"""Names of the sum from which a layer starts, which every policy keeps, and of what its blocks start from."""

AUTOMATIC = "auto:"
_LADDER = ("none", "dots", "block_wise", "full")
"""Policies from the most memory to the most recomputation, among which "auto:<bytes>" chooses."""

_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def apply_gradient_checkpointing(model: Decoder, policy: str) -> Callable[..., jax.Array]:
    """The model's forward pass under a policy, which changes the memory and time of its gradient but not its numbers.

    Args:
      model: the decoder.
      policy: one of `POLICIES`, or names of activations with commas between them, such as "mixed,block_output".

    Returns:
      A function of the model's arguments, `[batch, seq]` tokens to `[batch, seq, hidden]`.

    Raises:
      ConfigError: a name is neither a policy nor an activation of this model (the text lists this model's names), or is
        "auto:<bytes>", which chooses by the memory of a whole step.

    >>> from flax import nnx
    >>> from vishwamai.models import ModelConfig
    >>> config = ModelConfig.from_dict({
    ...     "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    ...     "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64})
    >>> model = Decoder(config, rngs=nnx.Rngs(0))
    >>> apply_gradient_checkpointing(model, "full")(jnp.ones((1, 5), jnp.int32)).shape
    (1, 5, 32)
    >>> apply_gradient_checkpointing(model, "streem")
    Traceback (most recent call last):
    ...
    vishwamai.core.errors.ConfigError: remat: 'streem' is neither a policy nor an activation of this model; did you ...
    """
    forward = checkpointed(model, checkpoint_policy(model, policy))
    return lambda *args, **options: forward(*args, **options)[0]


def memory_limit(policy: str) -> int | None:
    """The bytes of "auto:<bytes>", such as "auto:12GiB"; None for another policy.

    Raises:
      ConfigError: the bytes are not a number above 0 with a known unit.

    >>> memory_limit("auto:1.5 GiB"), memory_limit("full")
    (1610612736, None)
    """
    if not policy.startswith(AUTOMATIC):
        return None
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", policy.removeprefix(AUTOMATIC))
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise ConfigError(
            f"remat: {policy!r} does not name a number of bytes; write auto:12GiB, auto:800MB or auto:8000000000."
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def fitting_policy(limit: int, needs: Callable[[str], int]) -> str:
    """The first of "none", "dots", "block_wise" and "full" whose step fits.

    Args:
      limit: bytes of a device.
      needs: bytes that a step takes under a policy, as the compiler says.

    Raises:
      ConfigError: none of them fits; the text has the bytes of each.

    >>> fitting_policy(100, {"none": 300, "dots": 120, "block_wise": 90, "full": 60}.__getitem__)
    'block_wise'
    """
    sizes: dict[str, int] = {}
    for policy in _LADDER:
        sizes[policy] = needs(policy)
        if sizes[policy] <= limit:
            return policy
    listed = ", ".join(f"{policy} {size / 2**20:,.0f} MiB" for policy, size in sizes.items())
    raise ConfigError(
        f"remat: no policy fits into {limit / 2**20:,.0f} MiB of a device; a step needs: {listed}. Raise microbatches, "
        "or split over more devices (mesh.fsdp)."
    )


def checkpointed(
    model: Decoder, policy: Policy | None, gather: Callable[[PyTree], PyTree] | None = None
) -> Callable[..., tuple[jax.Array, tuple[ExpertLoad | None, ...]]]:
    """The model's forward pass, `Decoder.with_load`, with a policy of `checkpoint_policy`.

    Args:
      model: the decoder.
      policy: the policy, or None to keep everything.
      gather: makes the parameters of a layer whole, inside what is computed again.
    """
    if policy is None and gather is None:
        return model.with_load
    return functools.partial(model.with_load, wrap_layer=layer_wrapper(policy, gather))


def layer_wrapper(policy: Policy | None, gather: Callable[[PyTree], PyTree] | None) -> WrapLayer:
    """What `Decoder.__call__` takes as `wrap_layer`; the arguments are those of `checkpointed`."""

    def wrap(run: Period) -> Period:
        def gathered(carry: Carry, pages: PyTree, group: PyTree, index: PyTree) -> tuple[Carry, PyTree, PyTree]:
            return run(carry, pages, group if gather is None else gather(group), index)

        def joined(carry: Carry, pages: PyTree, group: PyTree, index: PyTree) -> tuple[Carry, PyTree, PyTree]:
            """What is computed again starts from the sum of the carry: one array is kept of each layer, not two."""
            stream, delta, memory = carry
            return gathered((checkpoint_name(stream + delta, _INPUT), None, memory), pages, group, index)

        return gathered if policy is None else jax.checkpoint(joined, policy=policy)

    return wrap


def activation_names(model: Decoder) -> tuple[str, ...]:
    """The names of a model's activations, in the order of the forward pass; the trace does not run, and says nothing of
    kernels that decline.
    """
    names: dict[str, None] = {}

    def walk(jaxpr: Jaxpr) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "name":
                names[equation.params["name"]] = None
            for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(inner, "eqns"):
                    walk(inner)
                elif hasattr(inner, "jaxpr"):
                    walk(inner.jaxpr)

    with observe.watching(observe.PlanRecorder(dry_run=True)):
        walk(jax.make_jaxpr(lambda tokens: model(tokens))(jax.ShapeDtypeStruct((1, 8), jnp.int32)).jaxpr)
    return tuple(names)


def checkpoint_policy(model: Decoder, policy: str) -> Policy | None:
    """JAX's policy for a name of `POLICIES` or names of activations; None for "none".

    Raises:
      ConfigError: as `apply_gradient_checkpointing`.
    """
    if policy == "none":
        return None
    if policy.startswith(AUTOMATIC):
        raise ConfigError(
            f"remat: {policy!r} compiles whole steps and takes the first policy that fits, but here is a forward pass "
            f"alone; set `remat: {policy}` in the configuration of a run, or pass one of {', '.join(POLICIES)}."
        )
    policies = jax.checkpoint_policies
    save = functools.partial(policies.save_only_these_names, _INPUT)
    if policy == "full":
        return save()
    if policy == "block_wise":
        return save(_MLP_INPUT)
    if policy == "offload":
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=(),
            names_which_can_be_offloaded=(_INPUT,),
            offload_src="device",
            offload_dst="pinned_host",
        )
    names = activation_names(model)
    if policy == "dots":
        return save(*(name for name in names if name not in (_MLP_INPUT, _STREAM)))
    chosen = [name.strip() for name in policy.split(",")]
    for name in chosen:
        if name not in names:
            near = difflib.get_close_matches(name, (*POLICIES, *names), n=1, cutoff=0.5)
            raise ConfigError(
                f"remat: {name!r} is neither a policy nor an activation of this model; "
                f"{f'did you mean {near[0]!r}? ' if near else ''}The policies are {', '.join(POLICIES)}; the "
                f"activations of this model are {', '.join(names)}."
            )
    return save(*chosen)
