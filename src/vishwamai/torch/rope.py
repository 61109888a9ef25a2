"""`apply_rope` of torch tensors, as a custom operator with gradients (eager and under `torch.compile`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vishwamai.core.errors import ShapeError
from vishwamai.core.spec import array_spec
from vishwamai.ops.rope.api import ROPE
from vishwamai.ops.rope.scaling import MRopeScaling, NtkScaling, RopeScaling
from vishwamai.ops.rope.spec import Operands, Outputs, RopeSpec, check, check_positions
from vishwamai.ops.rope.tables import check_frequencies
from vishwamai.torch import bridge
from vishwamai.torch.sharding import beside, is_dtensor


def _ready(x: Tensor | None) -> Tensor | None:
    """Any strides will do, of heads whose features lie side by side and are aligned."""
    return x if x is None or (x.stride(-1) == 1 and x.data_ptr() % 16 == 0) else x.contiguous()


def _operands(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, layout: str
) -> tuple[RopeSpec, Operands]:
    operands = Operands(_ready(query), _ready(key), cos.contiguous(), sin.contiguous())
    described = Operands(*(None if x is None else array_spec(x) for x in operands))
    check(described.query, described.key, layout)
    return RopeSpec(described, interleaved, layout), operands


@torch.library.custom_op("vishwamai::rope", mutates_args=())
def rope(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, layout: str
) -> tuple[Tensor, Tensor]:
    """(query, key) turned; the second is empty where there is no key. Tables are `[batch or 1, seq, pairs]` and have no gradient. See `apply_rope`."""
    spec, operands = _operands(query, key, cos, sin, interleaved, layout)
    outputs, _ = bridge.forward(bridge.choose(ROPE, spec, query), spec, operands)
    return outputs.query, query.new_empty(0) if key is None else outputs.key


def _fake(query: Tensor, key: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    del rest
    return query.new_empty(query.shape), query.new_empty(0) if key is None else key.new_empty(key.shape)


rope.register_fake(_fake)


@torch.library.custom_op("vishwamai::rope_backward", mutates_args=())
def rope_backward(
    dquery: Tensor, dkey: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, layout: str
) -> tuple[Tensor, Tensor]:
    """Gradients of the query and the key, from those of the results."""
    spec, operands = _operands(dquery, dkey, cos, sin, interleaved, layout)
    cotangents = Outputs(operands.query, operands.key)
    gradients = bridge.backward(bridge.choose(ROPE, spec, dquery), spec, operands, cotangents, None, cotangents)
    return gradients.query, dquery.new_empty(0) if dkey is None else gradients.key


rope_backward.register_fake(_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    _, key, cos, sin, ctx.interleaved, ctx.layout = inputs
    ctx.has_key = key is not None
    ctx.save_for_backward(cos, sin)


def _gradient(ctx: Any, dquery: Tensor, dkey: Tensor) -> tuple[Any, ...]:
    gradients = rope_backward(dquery, dkey if ctx.has_key else None, *ctx.saved_tensors, ctx.interleaved, ctx.layout)
    return gradients[0], gradients[1] if ctx.has_key else None, None, None, None, None


bridge.register_autograd(rope, _gradient, _setup)


def _angles(positions: Tensor, frequencies: np.ndarray) -> Tensor:
    """`position * frequency` without its whole turns, float32 `[..., pairs]`: the same bits as `vishwamai.ops.rope.tables` has."""
    turns = np.round(frequencies / (2 * math.pi) * 2.0**48).astype(np.int64)  # 48 bits after the point
    product = positions.long() * torch.tensor(turns.tolist(), device=positions.device)  # modulo 2^64
    return ((product << 16) >> 32).float() * float(np.float32(2 * math.pi / 2.0**32))


def _tables(
    positions: Tensor, rotary_dim: int, theta: float, scaling: RopeScaling, length: int | None
) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 `[batch or 1, seq, pairs]`, of positions `[(3,) batch or 1, seq]`."""
    if isinstance(scaling, MRopeScaling) and positions.dim() == 3:
        chosen = positions[torch.tensor(scaling.coordinates.tolist(), device=positions.device)].movedim(0, -1)
    else:
        chosen = positions[..., None]
    threshold = scaling.threshold
    if threshold is None or length is not None:
        angles = _angles(chosen, scaling.frequencies(rotary_dim, theta, length or 0))
    else:
        longest = positions.max() + 1
        plain = scaling.frequencies(rotary_dim, theta, threshold)
        if isinstance(scaling, NtkScaling):
            # The base itself depends on the length, so these frequencies are found on the device.
            stretch = scaling.factor * longest.float() / threshold - (scaling.factor - 1)
            power = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float64) / (rotary_dim - 2)
            frequencies = torch.tensor(plain.tolist(), device=positions.device, dtype=torch.float32)
            long = chosen.float() * (torch.exp(torch.log(stretch) * -power.float()) * frequencies)
        else:
            long = _angles(chosen, scaling.frequencies(rotary_dim, theta, threshold + 1))
        angles = torch.where(longest > threshold, long, _angles(chosen, plain))
    return torch.cos(angles) * scaling.magnitude, torch.sin(angles) * scaling.magnitude


def rope_tables(
    positions: Tensor | int,
    head_dim: int,
    *,
    theta: float = 10000.0,
    scaling: RopeScaling | Mapping[str, Any] | None = None,
    rotary_dim: int | None = None,
    device: Any = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin for `apply_rope(..., tables=...)`: made once, they serve every layer of a model.

    Args:
      positions: integers `[seq]`, `[batch, seq]` or, with `MRopeScaling`, `[3, batch, seq]`; or how many there are, counted from 0.
      head_dim: features of a head.
      theta, scaling, rotary_dim: as in `vishwamai.apply_rope`.
      device: of the tables, where `positions` is a number.

    Returns:
      Two float32 tensors `[batch or 1, seq, rotary_dim / 2]`.

    Raises:
      ShapeError: an argument is not legal.

    >>> cos, sin = rope_tables(100, 64)
    >>> cos.shape
    torch.Size([1, 100, 32])
    """
    parsed, rotary_dim = check_frequencies("rope_tables", head_dim, theta, scaling, rotary_dim)
    length = None
    if not isinstance(positions, Tensor):
        length, positions = positions, torch.arange(positions, device=device)
    elif positions.is_floating_point() or positions.dim() not in (1, 2, 3):
        raise ShapeError(
            f"rope_tables: `positions` is {positions.dtype} of shape {tuple(positions.shape)}; pass integers [seq] or [batch, seq]."
        )
    elif positions.dim() == 3 and not (isinstance(parsed, MRopeScaling) and positions.shape[0] == 3):
        raise ShapeError(
            f"rope_tables: `positions` has shape {tuple(positions.shape)}; three axes mean [3, batch, seq], with `MRopeScaling`."
        )
    return _tables(positions if positions.dim() > 1 else positions[None], rotary_dim, theta, parsed, length)


def apply_rope(
    x: Any,
    positions: Tensor | None = None,
    *,
    tables: tuple[Tensor, Tensor] | None = None,
    theta: float = 10000.0,
    scaling: RopeScaling | Mapping[str, Any] | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    layout: str = "bhsd",
) -> Any:
    """Rotary position embedding of queries, or of queries and keys in one pass over memory; see `vishwamai.apply_rope`.

    Args:
      x: `[batch, heads, seq, head_dim]`, or a pair (query, key) of such tensors, of any strides (a transposed view costs no copy). bfloat16, float16 or
        float32 (float64 on the CPU, with float32 angles).
      positions: integers `[seq]` or `[batch, seq]`; `[3, batch, seq]` with `MRopeScaling`. None counts from 0.
      tables: made beforehand by `rope_tables`, in place of positions, theta, scaling and rotary_dim. Under `torch.compile(fullgraph=True)` they are
        needed: making them leaves the graph.
      theta, scaling, rotary_dim, interleaved: as in `vishwamai.apply_rope`.
      layout: of the tensors: "bhsd", or "bshd" for `[batch, seq, heads, head_dim]`.

    Returns:
      Like `x`: a tensor, or a pair, contiguous.

    Raises:
      ShapeError: an argument is not legal or does not fit the others.
      UnsupportedError: no kernel serves the call on the tensors' device.

    >>> import torch
    >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    >>> apply_rope(x, torch.tensor([1]), theta=100.0).flatten()
    tensor([-1.9841,  1.5907,  2.4624,  4.1797])
    """
    pair = isinstance(x, (tuple, list))
    if pair and len(x) != 2:
        raise ShapeError(f"apply_rope: `x` is a sequence of {len(x)}; pass a tensor, or a pair (query, key).")
    query, key = x if pair else (x, None)
    if not torch.compiler.is_compiling():  # a compiled call is checked when it runs
        check(array_spec(query), None if key is None else array_spec(key), layout)
    batch, head_dim = query.shape[0], query.shape[3]
    length = query.shape[2 if layout == "bhsd" else 1]
    if tables is None:
        parsed, _ = check_frequencies("apply_rope", head_dim, theta, scaling, rotary_dim)
        check_positions(positions, batch, length, isinstance(parsed, MRopeScaling))
        if is_dtensor(positions):
            raise ShapeError(
                "apply_rope: `positions` is a DTensor; pass a tensor that every process has whole, or `tables` that are DTensors."
            )
        where = {"theta": theta, "scaling": parsed, "rotary_dim": rotary_dim, "device": query.device}
        tables = rope_tables(length if positions is None else positions, head_dim, **where)
    elif positions is not None or scaling is not None or rotary_dim is not None or theta != 10000.0:
        raise ShapeError(
            "apply_rope: `tables` bring positions, theta, scaling and rotary_dim; pass those to `rope_tables`."
        )
    cos, sin = tables
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.dim() == 3 and table.shape[0] in (1, batch) and table.shape[1] == length
        if not fits or table.shape != cos.shape or not 2 <= 2 * table.shape[2] <= head_dim or table.requires_grad:
            raise ShapeError(
                f"apply_rope: {name} of `tables` has shape {tuple(table.shape)}{' and wants a gradient' if table.requires_grad else ''}; "
                f"pass what `rope_tables` gives for {length} positions of {batch} batch elements and {head_dim} features."
            )
    turned = rope(query, key, beside(query, cos), beside(query, sin), interleaved, layout)
    return tuple(turned) if pair else turned[0]
