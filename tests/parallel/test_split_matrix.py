"""Every public operation with its operands split over eight devices: values and gradients are those of one device.

A model splits rows over devices (data), weights along their result (column) or along what is summed up (row), heads,
experts, and weights that are gathered before use (fsdp). Each split runs on explicit axes (but for routing to experts),
on automatic ones, and inside `jax.shard_map` with the collective that a model writes there. `test_transforms.py` splits
the batches of every implementation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import contract
import rotation
import vishwamai

ROWS, LAST, HEADS, SEQUENCE = P("x"), P(None, "x"), P(None, "x"), P(None, None, "x")
Arrays = dict[str, Any]


class Split(NamedTuple):
    """How the operands of a call lie.

    Attributes:
      specs: of the operands that are split. out: of every result, inside `shard_map`.
      local: what a device computes of its parts there; None where the split has no local form.
    """

    specs: Mapping[str, P]
    out: P = P()
    local: Callable[..., Any] | None = None


class Subject(NamedTuple):
    """A call, the public names that it serves, and how its operands are split."""

    names: str
    call: Callable[..., Any]
    arrays: Arrays
    splits: Mapping[str, Split]


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(shape).standard_normal(shape)).astype(np.float32)


def whole_numbers(values: Any) -> Any:
    return np.array(values, np.int32)


def summed(call: Callable[..., Any]) -> Callable[..., Any]:
    """Of tensor parallelism, row: each device has a part of what is summed up."""
    return lambda **arrays: jax.lax.psum(call(**arrays), "x")


def gathered(call: Callable[..., Any], **axes: int) -> Callable[..., Any]:
    """Of FSDP: weights are whole where they are used."""

    def run(**arrays: Any) -> Any:
        for name, axis in axes.items():
            arrays[name] = jax.lax.all_gather(arrays[name], "x", axis=axis, tiled=True)
        return call(**arrays)

    return run


def along(spec: P, call: Callable[..., Any] | None, *names: str) -> Split:
    """Operands and results that are split alike."""
    return Split(dict.fromkeys(names, spec), spec, call)


def fsdp(call: Callable[..., Any], rows: tuple[str, ...], **axes: int) -> Split:
    """Rows split, and each weight along one of its axes."""
    weights = {name: P(*[None] * axis, "x") for name, axis in axes.items()}
    return Split(dict.fromkeys(rows, ROWS) | weights, ROWS, gathered(call, **axes))


def products() -> dict[str, Subject]:
    def up(a: Any, w: Any, bias: Any) -> Any:
        return vishwamai.gemm(a, w, bias=bias, activation="gelu")

    heads = functools.partial(vishwamai.einsum, "btd,dhk->bhtk")
    back = functools.partial(vishwamai.einsum, "bhtk,hkd->btd")

    def gated(a: Any, gate: Any, up: Any) -> Any:
        return vishwamai.gated_linear_unit(a, (gate, up))

    def sparse(dense: Any, values: Any) -> Any:
        return vishwamai.block_sparse_matmul(dense, values, np.array([[0, 1], [1, 0], [0, 0]]), shape=(32, 32))

    quantized = vishwamai.quantize(jnp.asarray(normal(32, 24)), axis=-2)

    def by_quantized(a: Any) -> Any:
        return vishwamai.gemm(a, quantized)

    return {
        "gemm": Subject(
            "gemm",
            up,
            {"a": normal(16, 32), "w": normal(32, 24, scale=0.2), "bias": normal(24)},
            {
                "data": along(ROWS, up, "a"),
                "column": Split({"w": LAST, "bias": ROWS}, LAST, up),
                "fsdp": fsdp(up, ("a",), w=0, bias=0),
            },
        ),
        "gemm of rows": Subject(
            "gemm",
            lambda a, w: vishwamai.gemm(a, w),
            {"a": normal(16, 32), "w": normal(32, 24, scale=0.2)},
            {"row": Split({"a": LAST, "w": ROWS}, P(), summed(lambda a, w: vishwamai.gemm(a, w)))},
        ),
        "gemm of a QTensor": Subject(
            "gemm quantize", by_quantized, {"a": normal(16, 32)}, {"data": along(ROWS, by_quantized, "a")}
        ),
        "einsum to heads": Subject(
            "einsum",
            lambda x, w: heads(x, w),
            {"x": normal(8, 6, 32), "w": normal(32, 8, 4, scale=0.2)},
            {
                "data": along(ROWS, lambda x, w: heads(x, w), "x"),
                "column": along(LAST, lambda x, w: heads(x, w), "w"),
                "fsdp": fsdp(lambda x, w: heads(x, w), ("x",), w=0),
            },
        ),
        "einsum of heads": Subject(
            "einsum",
            lambda x, w: back(x, w),
            {"x": normal(2, 8, 6, 4), "w": normal(8, 4, 32, scale=0.2)},
            {"row": Split({"x": HEADS, "w": ROWS}, P(), summed(lambda x, w: back(x, w)))},
        ),
        "gated_linear_unit": Subject(
            "gated_linear_unit",
            gated,
            {"a": normal(16, 32), "gate": normal(32, 24, scale=0.2), "up": normal(32, 24, scale=0.3)},
            {
                "data": along(ROWS, gated, "a"),
                "column": along(LAST, gated, "gate", "up"),
                "fsdp": fsdp(gated, ("a",), gate=0, up=1),
            },
        ),
        "block_sparse_matmul": Subject(
            "block_sparse_matmul",
            sparse,
            {"dense": normal(16, 32), "values": normal(3, 16, 16, scale=0.2)},
            {"data": along(ROWS, sparse, "dense"), "features": Split({"dense": LAST})},
        ),
    }


def rows() -> dict[str, Subject]:
    def rms(x: Any, residual: Any, scale: Any) -> Any:
        return vishwamai.rms_norm(x, scale, residual=residual)

    def layer(x: Any, scale: Any, offset: Any) -> Any:
        return vishwamai.layer_norm(x, scale, offset)

    found = {
        "rms_norm": Subject(
            "rms_norm",
            rms,
            {"x": normal(8, 6, 32), "residual": normal(8, 6, 32), "scale": normal(32)},
            {
                "data": along(ROWS, rms, "x", "residual"),
                "features": Split({"x": SEQUENCE, "residual": SEQUENCE, "scale": ROWS}),
                "fsdp": fsdp(rms, ("x", "residual"), scale=0),
            },
        ),
        "layer_norm": Subject(
            "layer_norm",
            layer,
            {"x": normal(8, 8, 32), "scale": normal(32), "offset": normal(1, 32)[0]},
            {
                "sequence": along(LAST, None, "x"),
                "features": Split({"x": SEQUENCE, "scale": ROWS, "offset": ROWS}),
                "fsdp": fsdp(
                    lambda x, scale, offset: vishwamai.layer_norm(x, scale, offset), ("x",), scale=0, offset=0
                ),
            },
        ),
    }
    for name in ("gelu", "silu", "relu2", "softmax", "log_softmax"):
        call = functools.partial(lambda x, name: getattr(vishwamai, name)(x), name=name)
        whole = name.endswith("softmax")  # of features, which are added up
        splits = {"data": along(ROWS, call, "x"), "features": along(LAST, None if whole else call, "x")}
        found[name] = Subject(name, call, {"x": normal(16, 32)}, splits)

    def dropout(x: Any) -> Any:
        return vishwamai.fused_gelu_dropout(x, 0.5, key=jax.random.key(3))

    def there_and_back(x: Any) -> Any:
        return vishwamai.dequantize(vishwamai.quantize(x, axis=-1))

    def rounded(x: Any) -> Any:
        return vishwamai.fake_quantize(x, axis=-1)

    # Inside `shard_map` every device would drop the same elements of its part.
    found["fused_gelu_dropout"] = Subject(
        "fused_gelu_dropout",
        dropout,
        {"x": normal(16, 32)},
        {"data": Split({"x": ROWS}), "features": Split({"x": LAST})},
    )
    for name, call in {"quantize dequantize": there_and_back, "fake_quantize": rounded}.items():
        splits = {"data": along(ROWS, call, "x"), "features": Split({"x": LAST})}
        found[name] = Subject(name, call, {"x": normal(16, 32)}, splits)
    return found


def attention() -> dict[str, Subject]:
    def dense(q: Any, k: Any, v: Any) -> Any:
        return vishwamai.flash_attention(q, k, v, causal=True)

    def blocks(q: Any, k: Any, v: Any) -> Any:
        return vishwamai.block_sparse_attention(q, k, v, np.tri(2, dtype=bool), block_size=8)

    def packed(q: Any, k: Any, v: Any) -> Any:
        starts = whole_numbers([0, 10, 32])
        return vishwamai.flash_attention_varlen(q, k, v, starts, starts, 22, 22, causal=True)

    def merged(a: Any, b: Any, lse_a: Any, lse_b: Any) -> Any:
        return vishwamai.merge_attention((a, b), (lse_a, lse_b))

    def rope(q: Any, k: Any, positions: Any) -> Any:
        return vishwamai.apply_rope((q, k), positions)

    qkv = {"q": normal(8, 16, 16, 8), "k": normal(8, 8, 16, 8), "v": normal(1, 8, 8, 16, 8)[0]}
    long = {"q": normal(32, 16, 8), "k": normal(32, 8, 8), "v": normal(1, 32, 8, 8)[0]}
    parts = {"a": normal(8, 8, 16, 4), "b": normal(1, 8, 8, 16, 4)[0], "lse_a": normal(8, 8, 16)}
    parts["lse_b"] = normal(1, 8, 8, 16)[0]
    turned = {"q": normal(8, 16, 16, 8), "k": normal(8, 8, 16, 8)}
    turned["positions"] = np.sort(np.random.default_rng(0).integers(0, 40, (8, 16)).astype(np.int32))
    return {
        "flash_attention": Subject(
            "flash_attention",
            dense,
            qkv,
            {
                "data": along(ROWS, dense, *qkv),
                "heads": along(HEADS, dense, *qkv),
                "sequence": Split(dict.fromkeys(qkv, SEQUENCE)),  # `ring_attention` inside of `shard_map`
            },
        ),
        "block_sparse_attention": Subject(
            "block_sparse_attention",
            blocks,
            qkv,
            {
                "data": along(ROWS, blocks, *qkv),
                "heads": along(HEADS, blocks, *qkv),
                "keys": Split({"k": SEQUENCE, "v": SEQUENCE}),
            },
        ),
        "flash_attention_varlen": Subject(
            "flash_attention_varlen",
            packed,
            long,
            {"heads": along(HEADS, packed, *long), "tokens": Split(dict.fromkeys(long, ROWS))},
        ),
        "merge_attention": Subject(
            "merge_attention",
            merged,
            parts,
            {
                "data": along(ROWS, merged, *parts),
                "heads": along(HEADS, merged, *parts),
                "sequence": along(SEQUENCE, merged, *parts),
            },
        ),
        "apply_rope": Subject(
            "apply_rope",
            rope,
            turned,
            {
                "data": along(ROWS, rope, *turned),
                "heads": along(HEADS, rope, "q", "k"),
                "sequence": Split({"q": SEQUENCE, "k": SEQUENCE, "positions": LAST}, SEQUENCE, rope),
            },
        ),
    }


def losses_and_experts() -> dict[str, Subject]:
    def loss(x: Any, w: Any, labels: Any, **options: Any) -> Any:
        return vishwamai.linear_cross_entropy(x, w, labels, reduction="none", z_loss=0.1, **options)

    sizes = whole_numbers([3, 0, 5, 1, 4, 2, 6, 3])

    def grouped(lhs: Any, rhs: Any) -> Any:
        return vishwamai.grouped_gemm(lhs, rhs, sizes)

    def of_mine(lhs: Any, rhs: Any) -> Any:
        out = vishwamai.grouped_gemm(lhs, rhs, sizes, group_offset=jax.lax.axis_index("x"))
        return jax.lax.psum(out, "x")

    def routing(tokens: Any, router: Any) -> Any:
        found = vishwamai.moe_routing(tokens, router, top_k=2)
        return found.weights, found.experts

    def dispatched(tokens: Any, router: Any) -> Any:
        found = vishwamai.moe_routing(tokens, router, top_k=2)
        laid = vishwamai.moe_dispatch(tokens, found)
        scales = jnp.repeat(jnp.arange(1.0, 9.0), laid.group_sizes, total_repeat_length=laid.rows.shape[0])
        return vishwamai.moe_combine(jnp.sin(laid.rows) * scales[:, None], laid, found)

    def layer(tokens: Any, router: Any, gate: Any, up: Any, down: Any, **options: Any) -> Any:
        return vishwamai.moe_layer(tokens, router, gate, up, down, top_k=2, **options).out

    tokens = {"tokens": normal(16, 32), "router": normal(32, 8, scale=0.2)}
    experts = {"gate": normal(8, 32, 16, scale=0.2), "up": normal(8, 32, 16, scale=0.3)}
    experts["down"] = normal(8, 16, 32, scale=0.2)
    return {
        "linear_cross_entropy": Subject(
            "linear_cross_entropy",
            loss,
            {"x": normal(16, 32), "w": normal(48, 32, scale=0.2), "labels": np.arange(16, dtype=np.int32) * 3},
            {
                "data": along(ROWS, loss, "x", "labels"),
                "column": Split({"w": ROWS}, P(), functools.partial(loss, vocab_axis="x")),
                "features": Split({"x": LAST, "w": LAST}),
                "fsdp": fsdp(loss, ("x", "labels"), w=1),
            },
        ),
        "grouped_gemm": Subject(
            "grouped_gemm",
            grouped,
            {"lhs": normal(24, 16), "rhs": normal(8, 16, 24, scale=0.2)},
            {
                "experts": Split({"rhs": ROWS}, P(), of_mine),
                "column": Split({"rhs": SEQUENCE}, LAST, grouped),
                "row": Split({"lhs": LAST, "rhs": LAST}, P(), summed(grouped)),
                "data": Split({"lhs": ROWS}),  # the rows of a group may lie on several devices
            },
        ),
        "moe_routing": Subject("moe_routing", routing, tokens, {"data": along(ROWS, routing, "tokens")}),
        "moe_dispatch": Subject(
            "moe_dispatch moe_combine", dispatched, tokens, {"data": along(ROWS, dispatched, "tokens")}
        ),
        "moe_layer": Subject(
            "moe_layer",
            layer,
            tokens | experts,
            {
                "data": along(ROWS, layer, "tokens"),
                "experts": along(ROWS, functools.partial(layer, expert_axis="x"), "tokens", *experts),
                "fsdp": fsdp(layer, ("tokens",), gate=2, up=2, down=1),
            },
        ),
    }


def pages() -> dict[str, Subject]:
    lens, table = whole_numbers([13, 7]), whole_numbers([[2, 0], [3, 1]])
    starts = whole_numbers([0, 5, 8])

    def decode(query: Any, pages: Any) -> Any:
        return vishwamai.ragged_paged_attention(query, pages, lens, table, starts)

    def update(pages: Any, key: Any, value: Any) -> Any:
        rope_tables: Any = normal(13, 4), normal(13, 4)
        return vishwamai.update_pages(pages, key, value, lens, table, starts, rope_tables=rope_tables)

    pool = normal(4, 8, 16, 8)  # keys and values of 8 heads in turn
    return {
        "ragged_paged_attention": Subject(
            "ragged_paged_attention",
            decode,
            {"query": normal(8, 16, 8), "pages": pool},
            {"heads": Split({"query": HEADS, "pages": SEQUENCE}, HEADS, decode)},
        ),
        "update_pages": Subject(
            "update_pages",
            update,
            {"pages": pool, "key": normal(8, 8, 8), "value": normal(1, 8, 8, 8)[0]},
            {"heads": Split({"pages": SEQUENCE, "key": HEADS, "value": HEADS}, SEQUENCE, update)},
        ),
    }


def indexed() -> dict[str, Subject]:
    indices = jnp.asarray(np.random.default_rng(0).integers(-1, 9, (1, 6, 4)))

    def attend(query: Any, key: Any, value: Any) -> Any:
        return vishwamai.indexed_attention(query, key, value, indices)

    def index(query: Any, key: Any, weights: Any) -> Any:
        return vishwamai.lightning_index(query, key, weights, top_k=4).astype(jnp.float32)

    arrays = {"query": normal(8, 8, 6, 8), "key": normal(1, 8, 8, 9, 8)[0], "value": normal(8, 8, 9, 16)}
    parts = {"query": normal(8, 2, 6, 8), "key": normal(1, 8, 9, 8)[0], "weights": normal(8, 6, 2)}
    splits = {"data": along(ROWS, attend, *arrays), "heads": along(HEADS, attend, *arrays)}
    return {
        "indexed_attention": Subject("indexed_attention", attend, arrays, splits),
        "lightning_index": Subject("lightning_index", index, parts, {"data": along(ROWS, index, *parts)}),
    }


def states() -> dict[str, Subject]:
    def conv(x: Any, weight: Any) -> Any:
        return vishwamai.causal_conv1d(x, weight, activation="silu")

    def delta(query: Any, key: Any, value: Any, decay: Any, beta: Any) -> Any:
        return vishwamai.gated_delta_rule(query, key, value, -(decay**2), beta)

    def linear(query: Any, key: Any, value: Any, decay: Any) -> Any:
        return vishwamai.linear_attention(query, key, value, -(decay**2))

    def space(x: Any, dt: Any, a: Any, b: Any, c: Any) -> Any:
        return vishwamai.state_space(x, dt**2, -(a**2), b, c)

    heads = {"query": normal(8, 8, 6, 8, scale=0.3), "key": normal(1, 8, 8, 6, 8, scale=0.3)[0]}
    heads |= {"value": normal(8, 8, 6, 16), "decay": normal(8, 8, 6), "beta": normal(1, 8, 8, 6, scale=0.5)[0]}
    fixed = {n: x for n, x in heads.items() if n != "beta"}
    mamba = {"x": normal(8, 8, 6, 8), "dt": normal(8, 8, 6), "a": normal(8), "b": normal(8, 8, 6, 4)}
    mamba["c"] = normal(1, 8, 8, 6, 4)[0]
    rows = {"x": normal(8, 6, 16), "weight": normal(16, 4)}
    channels = Split({"x": SEQUENCE, "weight": ROWS}, SEQUENCE, conv)
    split = Split(dict.fromkeys(("x", "dt", "b", "c"), HEADS) | {"a": ROWS}, HEADS, space)
    return {
        "causal_conv1d": Subject("causal_conv1d", conv, rows, {"data": along(ROWS, conv, "x"), "channels": channels}),
        "gated_delta_rule": Subject(
            "gated_delta_rule",
            delta,
            heads,
            {"data": along(ROWS, delta, *heads), "heads": along(HEADS, delta, *heads)},
        ),
        "linear_attention": Subject(
            "linear_attention",
            linear,
            fixed,
            {"data": along(ROWS, linear, *fixed), "heads": along(HEADS, linear, *fixed)},
        ),
        "state_space": Subject(
            "state_space", space, mamba, {"data": along(ROWS, space, "x", "dt", "b", "c"), "heads": split}
        ),
    }


SUBJECTS = products() | rows() | attention() | losses_and_experts() | pages() | indexed() | states()
WITHOUT_GRADIENTS = ("ragged_paged_attention", "update_pages")
MATRIX = [
    (name, split, mode)
    for name, subject in SUBJECTS.items()
    for split, how in subject.splits.items()
    for mode in ("explicit", "auto", "shard_map")
    if mode != "shard_map" or how.local is not None
]


def results(name: str, call: Callable[..., Any], arrays: Arrays) -> Any:
    """The outputs of a call, and the gradients of a scalar of them."""
    chosen = {n: x for n, x in arrays.items() if x.dtype == np.float32}
    rest = {n: x for n, x in arrays.items() if n not in chosen}
    if name in WITHOUT_GRADIENTS:
        return jax.jit(lambda arrays: call(**arrays))(arrays), {}

    def scalar(chosen: Arrays, rest: Arrays) -> tuple[Any, Any]:
        outputs = call(**chosen, **rest)
        floats = [y for y in jax.tree.leaves(outputs) if jnp.issubdtype(y.dtype, jnp.floating)]
        return sum(jnp.sum(jnp.sin(y)) for y in floats), outputs

    (_, outputs), gradients = jax.jit(jax.value_and_grad(scalar, has_aux=True))(chosen, rest)
    return outputs, gradients


@functools.lru_cache(maxsize=4)
def on_one_device(name: str) -> Any:
    return results(name, SUBJECTS[name].call, SUBJECTS[name].arrays)


@pytest.mark.parametrize(("name", "split", "mode"), rotation.in_turn(12, MATRIX))
def test_a_split_is_one_device(name, split, mode):
    subject, how = SUBJECTS[name], SUBJECTS[name].splits[split]
    specs = {n: how.specs.get(n, P()) for n in subject.arrays}
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Explicit if mode == "explicit" else AxisType.Auto,))
    placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in subject.arrays.items()}
    call = subject.call
    if mode == "shard_map":
        local = how.local or subject.call
        mapped = jax.shard_map(lambda arrays: local(**arrays), mesh=mesh, in_specs=(specs,), out_specs=how.out)
        call = lambda **arrays: mapped(arrays)  # noqa: E731
    with jax.set_mesh(mesh):
        got = results(name, call, placed)
    contract.close(got, on_one_device(name), 1e-4)


# No arrays of a program are their operands.
OTHERS = {"current_config", "explain", "kernel_config", "pack_weight", "load_codes", "save_codes"}


def test_every_public_operation_is_in_the_matrix():
    functions = {n for n in vishwamai.__all__ if n.islower()} - OTHERS
    assert functions == {n for subject in SUBJECTS.values() for n in subject.names.split()}
    for n in functions:
        splits = [how for subject in SUBJECTS.values() if n in subject.names.split() for how in subject.splits.values()]
        assert splits and (n == "fused_gelu_dropout" or any(how.local is not None for how in splits)), n
