"""Which experts each token goes to, with what weight, and the losses that keep the experts evenly used. Plain JAX on
every platform.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from vishwamai.core.arguments import checked
from vishwamai.core.arrays import activations, bincount, cast, constant, gather_last, largest, namespace, numbers
from vishwamai.core.errors import ShapeError
from vishwamai.core.sharding import Axes, follow_explicit_axes, mesh_axis_size
from vishwamai.core.spec import array_spec, as_array
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.moe.spec import FLOATS

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Key

SCORINGS = ("softmax", "sigmoid", "sparsemixer")
GROUP_SCORES = {"top2": 2, "max": 1}
"""How many of a group's best experts make its score."""


class Routing(NamedTuple):
    """Where the T tokens go.

    Attributes:
      weights: `[T, k]` float32, the share of each chosen expert in a token's result.
      experts: `[T, k]` int32, the experts chosen, best first.
      load_balance_loss: scalar; 1 where every expert is equally used, num_experts where one is used alone. Its gradient
        reaches the router.
      z_loss: scalar; mean of logsumexp(logits)^2.
      expert_counts: `[num_experts]` int32, tokens that chose each expert.
    """

    weights: AnyArray
    experts: AnyArray
    load_balance_loss: AnyArray
    z_loss: AnyArray
    expert_counts: AnyArray


@checked
def moe_routing(
    tokens: Float[Array, "*tokens d"],
    router_weights: Float[Array, "d experts"],
    num_experts: int | None = None,
    top_k: int = 2,
    *,
    scoring: str = "softmax",
    bias: Float[Array, " experts"] | None = None,
    logit_bias: Float[Array, " experts"] | None = None,
    normalize: bool = True,
    scale: float = 1.0,
    expert_scale: Float[Array, " experts"] | None = None,
    num_groups: int = 1,
    top_groups: int | None = None,
    group_score: str = "top2",
    margin: float = 0.02,
    jitter: float = 0.0,
    key: Key[Array, ""] | None = None,
    axis_name: str | Sequence[str] | None = None,
    token_mask: Bool[Array, "*tokens"] | None = None,
) -> Routing:
    """Scores every token with every expert and chooses the best k.

    `logits = tokens @ router_weights + logit_bias`, and `scores = softmax(logits)` (Switch, Mixtral) or
    `sigmoid(logits)` (DeepSeek-V3), all in float32. The choice is by `scores + bias`, the weights are the scores
    themselves, so a bias moves load without entering the result: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024),
    section 2.1.2, which raises the bias of underused experts after each step. Of equal scores the lower expert wins.

    With "sparsemixer" an expert's weight is its softmax among the experts that are not chosen yet and whose logits are
    close to the best of these: Liu et al., "GRIN: GRadient-INformed MoE" (2024), without its random choice.

    Load balance: `num_experts * sum_e f_e p_e`, f the share of choices that fell on e and p the mean score of e
    (normalized over experts): Fedus et al., "Switch Transformers" (2021), equation 4. z-loss: Zoph et al., "ST-MoE"
    (2022), equation 5.

    Args:
      tokens: `[..., d]`; leading axes are flattened to T tokens.
      router_weights: `[d, num_experts]`.
      num_experts: only checked against `router_weights`; None takes its columns.
      top_k: experts for each token.
      scoring: "softmax", "sigmoid", or "sparsemixer" (Phi-3.5-MoE), which takes no `bias` and no groups.
      bias: `[num_experts]`, added to the scores for the choice alone; no gradient reaches it.
      logit_bias: `[num_experts]`, the router's own bias, a parameter like its weights (gpt-oss).
      normalize: divide a token's weights by their sum. With "softmax" they are then the softmax of the chosen logits
        alone, as in Mixtral and gpt-oss.
      scale: factor of the weights after that.
      expert_scale: `[num_experts]`, a factor for each expert after that (Gemma 4).
      num_groups: cut the experts into as many groups; top_groups: and choose among the best so many.
      group_score: score of a group: "top2", the sum of its two best experts' (DeepSeek-V3), or "max", its best expert's
        (DeepSeek-V2).
      margin: share of the larger magnitude of two logits by which "sparsemixer" lets one lie below the best.
      jitter: multiply tokens by uniform noise in `[1 - jitter, 1 + jitter]` before scoring (Switch); needs `key`.
      key: a random key, for jitter.
      axis_name: inside `shard_map`, the mesh axes over which tokens are split: losses and counts are then those of all
        tokens.
      token_mask: `[...]`, False for padding, which losses and counts leave out; None counts every token.

    Returns:
      A `Routing`.

    Raises:
      ShapeError: the arguments contradict one another.

    >>> import jax.numpy as jnp
    >>> routing = moe_routing(jnp.array([[3.0, 1.0, 2.0]]), jnp.eye(3), top_k=2)
    >>> routing.experts.tolist(), routing.expert_counts.tolist()
    ([[0, 2]], [1, 0, 1])
    >>> [round(w, 3) for w in routing.weights[0].tolist()]
    [0.731, 0.269]
    """
    tokens = as_array("moe_routing", "tokens", tokens)
    router_weights = as_array("moe_routing", "router_weights", router_weights)
    biases = {"bias": bias, "logit_bias": logit_bias, "expert_scale": expert_scale}
    grouping = num_groups, top_groups, group_score
    experts = check_routing(tokens, router_weights, num_experts, top_k, scoring, biases, grouping, margin, jitter, key)
    x = tokens.astype(jnp.float32)
    if jitter:
        assert key is not None  # `_check` says so
        count = math.prod(x.shape[:-1])
        noise = jax.random.uniform(key, (count, x.shape[-1]), jnp.float32, 1.0 - jitter, 1.0 + jitter)
        x = x * noise.reshape(x.shape)

    if token_mask is not None:
        token_mask = as_array("moe_routing", "token_mask", token_mask)
        if token_mask.shape != x.shape[:-1]:
            raise ShapeError(
                f"moe_routing: `token_mask` has shape {token_mask.shape}, but `tokens` has shape {x.shape}; pass "
                f"a mask of shape {x.shape[:-1]}."
            )

    def score(
        x: AnyArray, router: AnyArray, mask: AnyArray, bias: AnyArray, logit_bias: AnyArray, factors: Any
    ) -> tuple[AnyArray, ...]:
        """Weights and experts of the tokens here, and sums over them."""
        mask = None if mask is None else mask.reshape(-1)
        x = x.reshape(-1, x.shape[-1])
        logits = jnp.matmul(x, router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)  # [T, experts]
        if logit_bias is not None:
            logits = logits + logit_bias.astype(jnp.float32)
        selected = choose(logits, bias, top_k, scoring, normalize, grouping, margin, mask)
        if factors is not None:
            selected = (selected[0] * factors.astype(jnp.float32)[selected[1]], *selected[1:])
        squares = jax.nn.logsumexp(logits, axis=1) ** 2
        if mask is None:
            return *selected, jnp.sum(squares), jnp.float32(x.shape[0])
        return *selected, jnp.sum(jnp.where(mask, squares, 0.0)), jnp.sum(mask, dtype=jnp.float32)

    vectors = [None if v is None else jnp.asarray(v) for v in (bias, logit_bias, expert_scale)]
    arrays = x, router_weights, token_mask, *vectors
    weights, chosen, *summed = follow_explicit_axes(score, lambda: _axes(x.ndim, token_mask, vectors), *arrays)
    if axis_name is not None:
        axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        mesh_axis_size("moe_routing", "axis_name", axes)
        summed = jax.lax.psum(tuple(summed), axes)
    counts, shares, squares, number = summed
    number = jnp.maximum(number, 1.0)
    used = counts.astype(jnp.float32) / (number * top_k)
    balance = experts * jnp.sum(used * shares / number)
    return Routing(weights * scale, chosen.astype(jnp.int32), balance, squares / number, counts)


def _axes(ndim: int, mask: AnyArray, vectors: Sequence[object]) -> Axes:
    """The first axis of the tokens may be split; what is summed over them is then summed over its parts."""
    tokens = ("tokens", *([None] * (ndim - 1)))
    of_vectors = tuple(None if v is None else (None,) for v in vectors)
    split = ("tokens" if ndim > 1 else None, None)
    operands = tokens, (None, None), None if mask is None else tokens[:-1], *of_vectors
    return Axes(operands, (split, split, (None,), (None,), (), ()), frozenset({"tokens"}))


def choose(
    logits: AnyArray,
    bias: AnyArray,
    top_k: int,
    scoring: str,
    normalize: bool,
    grouping: tuple[int, int | None, str],
    margin: float,
    mask: AnyArray = None,
) -> tuple[AnyArray, AnyArray, AnyArray, AnyArray]:
    """(weights, experts, how many chose each expert, the sum over tokens of each expert's share) by float32 logits
    `[T, experts]`, arrays of JAX or torch; the arguments are checked ones of `moe_routing`. Both sums leave
    out the tokens where `mask`, `[T]` of JAX, is False.
    """
    xp, functions = namespace(logits), activations(logits)
    scores = functions.sigmoid(logits) if scoring == "sigmoid" else functions.softmax(logits, -1)
    preference = constant(scores if bias is None else scores + cast(bias, jnp.float32))
    num_groups, top_groups, group_score = grouping
    if top_groups is not None and top_groups < num_groups:
        preference = _within_groups(preference, num_groups, top_groups, GROUP_SCORES[group_score])
    if scoring == "sparsemixer":
        weights, chosen = _among_close(logits, top_k, margin)
    else:
        chosen = largest(preference, top_k)[1]
        weights = gather_last(scores, chosen)
    if normalize:
        weights = weights / xp.clip(weights.sum(1), 1e-20, None)[:, None]
    shares = scores if scoring != "sigmoid" else scores / xp.clip(scores.sum(1), 1e-20, None)[:, None]
    if mask is None:
        return weights, chosen, bincount(chosen.reshape(-1), logits.shape[1]), shares.sum(0)
    bins = jnp.where(mask[:, None], chosen, logits.shape[1])
    counts = bincount(bins.reshape(-1), logits.shape[1] + 1)[:-1]
    return weights, chosen, counts, jnp.where(mask[:, None], shares, 0.0).sum(0)


def _among_close(logits: Any, top_k: int, margin: float) -> tuple[AnyArray, AnyArray]:
    """Weights and experts of "sparsemixer": one choice after the other among the experts that remain."""
    xp, softmax = namespace(logits), activations(logits).softmax
    fixed, remaining, weights, experts = constant(logits), logits, [], []
    for _ in range(top_k):
        best, expert = largest(constant(remaining), 1)  # [T, 1]
        close = best - fixed <= margin * xp.maximum(abs(fixed), best)
        weights.append(gather_last(softmax(xp.where(close, remaining, -xp.inf), -1), expert))
        experts.append(expert)
        remaining = xp.where(expert == numbers(logits.shape[1], expert), -xp.inf, remaining)
    return xp.concatenate(weights, 1), xp.concatenate(experts, 1)


def _within_groups(preference: jax.Array, num_groups: int, top_groups: int, best_count: int) -> jax.Array:
    """-inf for experts outside the `top_groups` groups whose `best_count` best experts are best."""
    tokens, experts = preference.shape
    xp, grouped = namespace(preference), preference.reshape(tokens, num_groups, experts // num_groups)
    best = largest(grouped, min(best_count, grouped.shape[2]))[0].sum(2)  # [T, num_groups]
    selected = largest(best, top_groups)[1]
    mask = (selected[:, :, None] == numbers(num_groups, selected)).any(1)  # [T, num_groups]
    return xp.where(mask[:, :, None], grouped, -xp.inf).reshape(tokens, experts)


def check_routing(
    tokens: AnyArray,
    router_weights: AnyArray,
    num_experts: int | None,
    top_k: int,
    scoring: str,
    biases: Mapping[str, PyTree],
    grouping: tuple[int, int | None, str],
    margin: float,
    jitter: float,
    key: object,
) -> int:
    """Checks the arguments of `moe_routing`, arrays of any framework; returns the number of experts."""
    num_groups, top_groups, group_score = grouping
    x, w = array_spec(tokens), array_spec(router_weights)
    for name, array in (("tokens", x), ("router_weights", w)):
        if array.dtype not in FLOATS:
            raise ShapeError(f"moe_routing: `{name}` has dtype {array.dtype.name}; pass a floating-point array.")
    if not x.shape or len(w.shape) != 2 or w.shape[0] != x.shape[-1]:
        features = x.shape[-1] if x.shape else 0
        raise ShapeError(
            f"moe_routing: `router_weights` has shape {w.shape}, but `tokens` of shape {x.shape} has {features} "
            f"features; pass `router_weights` of shape ({features}, num_experts)."
        )
    experts = w.shape[1]
    if num_experts is not None and num_experts != experts:
        raise ShapeError(
            f"moe_routing: `num_experts` is {num_experts}, but `router_weights` of shape {w.shape} has {experts} "
            "columns; make them equal or pass None."
        )
    if not isinstance(top_k, Integral) or not 1 <= top_k <= experts:
        raise ShapeError(f"moe_routing: `top_k` is {top_k}; pass a number from 1 to the {experts} experts there are.")
    if scoring not in SCORINGS:
        raise ShapeError(f"moe_routing: `scoring` is {scoring!r}; pass one of {', '.join(SCORINGS)}.")
    for name, bias in biases.items():
        if bias is not None and tuple(jnp.shape(bias)) != (experts,):
            raise ShapeError(
                f"moe_routing: `{name}` has shape {tuple(jnp.shape(bias))}, but there are {experts} experts; pass "
                f"shape ({experts},)."
            )
    if num_groups < 1 or experts % num_groups:
        raise ShapeError(
            f"moe_routing: `num_groups` is {num_groups}, which does not divide {experts} experts; pass a divisor."
        )
    if top_groups is not None and (not 1 <= top_groups <= num_groups or top_groups * (experts // num_groups) < top_k):
        raise ShapeError(
            f"moe_routing: `top_groups` is {top_groups} of {num_groups} groups of {experts // num_groups} experts; "
            f"pass 1 to {num_groups} groups that hold at least `top_k` = {top_k} experts."
        )
    if group_score not in GROUP_SCORES:
        raise ShapeError(f"moe_routing: `group_score` is {group_score!r}; pass one of {', '.join(GROUP_SCORES)}.")
    if scoring == "sparsemixer" and (biases["bias"] is not None or top_groups is not None):
        name = "top_groups" if biases["bias"] is None else "bias"
        raise ShapeError(f"moe_routing: `scoring` is 'sparsemixer', which chooses by logits alone; leave out `{name}`.")
    if not margin >= 0.0:
        raise ShapeError(f"moe_routing: `margin` is {margin}; pass a number of at least 0.")
    if not 0.0 <= jitter < 1.0:
        raise ShapeError(f"moe_routing: `jitter` is {jitter}; pass a number from 0 to less than 1.")
    if jitter and key is None:
        raise ShapeError(f"moe_routing: `jitter` is {jitter} but `key` is None; pass a random key, or no jitter.")
    return experts
