"""Attention beyond the contract suite: peers, the walk over blocks, linear memory, the text of errors, what `explain`
says.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rotation
import vishwamai
from vishwamai import flash_attention
from vishwamai.core.errors import KernelError, ShapeError, UnsupportedError
from vishwamai.core.signature import array_specs
from vishwamai.ops.attention.blocks import ChunkedConfig, ScoreBlocks
from vishwamai.ops.attention.cases import CASES
from vishwamai.ops.attention.checks import Options, make_spec
from vishwamai.ops.attention.masks import static_mask
from vishwamai.ops.attention.spec import Operands

JAX_IMPLEMENTATIONS = ("xla_chunked", "xla")
SMALL = ChunkedConfig(block_q=32, block_kv=48, problems=1)


def normal(seed: int, *shape: int, dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def qkv(heads: int = 2, kv_heads: int = 2, q_len: int = 63, kv_len: int = 80, dim: int = 16) -> tuple[jax.Array, ...]:
    return normal(0, 2, heads, q_len, dim), normal(1, 2, kv_heads, kv_len, dim), normal(2, 2, kv_heads, kv_len, dim)


def close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance), got, want)


@pytest.mark.parametrize(
    "name",
    rotation.in_turn(
        3,
        [
            "causal top-left 63x100",
            "window beyond the keys",
            "GQA causal",
            "segments by batch, some alone",
            "bias by query and head",
            "mask of two axes",
            "everything float32",
        ],
    ),
)
def test_many_small_blocks_give_the_definition(name: str) -> None:
    """Ragged blocks, one problem at a time: what the contract's short sequences, one block each, do not reach."""
    (case,) = (case for case in CASES if case.name == name)
    arrays = {name: jnp.asarray(x) for name, x in case.make().items()}
    chosen = {name: arrays[name] for name in case.differentiable}

    def run(chosen: Any, **how: Any) -> Any:
        return case.run({**arrays, **chosen}, **how)

    want, pull_want = jax.vjp(jax.jit(functools.partial(run, implementation="xla")), chosen)
    got, pull = jax.vjp(jax.jit(functools.partial(run, implementation="xla_chunked", config=SMALL)), chosen)
    close(got, want)
    cotangents = jax.tree.map(lambda x: normal(3, *x.shape), want)
    close(pull(cotangents), pull_want(cotangents))


MASKS = [
    dict(),
    dict(causal=True),
    dict(causal=True, causal_align="bottom_right"),
    dict(window=(20, 5)),
    dict(window=(None, 3), causal_align="bottom_right"),
    dict(causal=True, window=(10, 50)),
]


def masked_spec(q_len: int, kv_len: int, options: dict[str, Any]) -> Any:
    q, k, v = (np.zeros((1, 1, n, 8), np.float32) for n in (q_len, kv_len, kv_len))
    return make_spec(array_specs(Operands(q, k, v)), "default", *Options(**options))


def dense(spec: Any) -> np.ndarray:
    seen = static_mask(spec, jnp.arange(spec.q_len), jnp.arange(spec.kv_len))
    return np.ones((spec.q_len, spec.kv_len), bool) if seen is None else np.asarray(seen)


@pytest.mark.parametrize("options", MASKS)
@pytest.mark.parametrize("lengths", [(100, 100), (63, 150), (150, 63)])
def test_blocks_without_work_are_not_in_the_list(options: dict[str, Any], lengths: tuple[int, int]) -> None:
    spec = masked_spec(*lengths, options)
    blocks = ScoreBlocks(spec, SMALL, Operands(*(jnp.zeros(x.shape) for x in spec.operands[:3])))
    seen = dense(spec)
    alive = {
        (i, j)
        for i in range(blocks.q_blocks)
        for j in range(blocks.kv_blocks)
        if seen[i * 32 : (i + 1) * 32, j * 48 : (j + 1) * 48].any()
    }
    for by_key in (False, True):
        pairs = [tuple(pair) for pair in blocks.pairs(by_key).tolist()]
        assert len(pairs) == len(set(pairs))
        assert set(pairs) == alive


@pytest.mark.parametrize("options", MASKS)
@pytest.mark.parametrize("lengths", [(50, 50), (31, 75), (75, 31)])
def test_ranges_and_work_follow_the_mask(options: dict[str, Any], lengths: tuple[int, int]) -> None:
    spec = masked_spec(*lengths, options)
    seen = dense(spec)
    assert spec.live_pairs == seen.sum()
    assert spec.flops == 2 * seen.sum() * 16
    for first in range(0, spec.q_len, 8):
        last = min(first + 8, spec.q_len) - 1
        columns = np.flatnonzero(seen[first : last + 1].any(0))
        start, stop = spec.key_range(first, last)
        assert (start, stop) == (columns[0], columns[-1] + 1) if columns.size else start == stop


@pytest.mark.turns(3)
def test_blocks_of_other_segments_are_never_read() -> None:
    """NaN in a key or value is poison to whoever multiplies it, were it by 0."""
    q, k, v = qkv(q_len=64, kv_len=96)
    ids = jnp.repeat(jnp.arange(2), 32), jnp.repeat(jnp.arange(2), 48)
    k, v = (x.at[:, :, 48:].set(jnp.nan) for x in (k, v))

    def first_segment(q: Any) -> Any:
        out = flash_attention(q, k, v, segment_ids=ids, implementation="xla_chunked", config=SMALL)
        return jnp.where(jnp.arange(64)[:, None] < 32, out, 0.0)

    out, pull = jax.vjp(first_segment, q)
    assert np.isfinite(out).all()
    assert np.isfinite(pull(jnp.ones_like(out))[0][:, :, :32]).all()


LENGTH = 8192


def sequences() -> tuple[jax.ShapeDtypeStruct, ...]:
    return (jax.ShapeDtypeStruct((1, 2, LENGTH, 64), jnp.float32),) * 3


def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return flash_attention(q, k, v, causal=True, **options)


def gradient(**options: Any) -> Any:
    return jax.grad(lambda *a: attend(*a, **options).sum(), (0, 1, 2))


def largest(program: str) -> int:
    """Elements of the largest array in a program's text (HLO or StableHLO)."""
    shapes = re.findall(r"(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", program) + re.findall(r"tensor<([\dx]+)x[a-z]", program)
    return max(int(np.prod([int(n) for n in re.split("[,x]", shape)])) for shape in shapes)


@pytest.mark.parametrize(
    "function", [functools.partial(attend, implementation="xla_chunked"), gradient(implementation="xla_chunked")]
)
def test_memory_is_linear_in_the_sequence(function: Any) -> None:
    compiled = jax.jit(function).lower(*sequences()).compile()
    operand = 2 * LENGTH * 64
    assert largest(str(compiled.as_text())) <= operand
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries < 8 * operand * 4 < LENGTH * LENGTH * 4, f"{temporaries:,} bytes"


def test_the_definition_is_not_linear() -> None:
    """The check above can fail."""
    compiled = jax.jit(gradient(implementation="xla")).lower(*sequences()).compile()
    assert largest(str(compiled.as_text())) >= LENGTH * LENGTH
    assert compiled.memory_analysis().temp_size_in_bytes > LENGTH * LENGTH * 4


@pytest.mark.turns(6)
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_no_score_matrix_leaks_through_the_choice_of_a_platform(platform: str) -> None:
    """`custom_vjp` stands outside `platform_dependent`, so no branch's own residuals reach the program."""
    residuals = jax.eval_shape(lambda *a: jax.vjp(attend, *a)[1], *sequences())
    assert max(leaf.size for leaf in jax.tree.leaves(residuals)) == 2 * LENGTH * 64
    lowered = jax.jit(gradient()).trace(*sequences()).lower(lowering_platforms=(platform,))
    assert largest(lowered.as_text()) < LENGTH * LENGTH


def jax_nn(
    q: Any,
    k: Any,
    v: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    causal: bool = False,
    window: Any = None,
    **options: Any,
) -> Any:
    out = jax.nn.dot_product_attention(
        q.swapaxes(1, 2),
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        bias,
        mask,
        is_causal=causal,
        local_window_size=window,
        **options,
    )
    return out.swapaxes(1, 2)


@pytest.mark.parametrize("implementation", JAX_IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "heads, arrays, options",
    rotation.in_turn(
        2,
        [
            ((2, 2), {}, {}),
            ((4, 2), {}, dict(causal=True)),
            ((4, 1), {}, dict(window=(9, 4), scale=0.2)),
            ((2, 2), dict(bias=normal(5, 1, 2, 63, 80), mask=normal(6, 2, 1, 63, 80) > -1), {}),
        ],
    ),
)
def test_equals_jax_nn(
    implementation: str, heads: tuple[int, int], arrays: dict[str, Any], options: dict[str, Any]
) -> None:
    def loss(function: Any, *a: Any, **more: Any) -> Any:
        return (function(*a, **arrays, **options, **more) ** 2).sum()

    q, k, v = qkv(*heads)
    close(
        jax.value_and_grad(functools.partial(loss, flash_attention, implementation=implementation), (0, 1, 2))(q, k, v),
        jax.value_and_grad(functools.partial(loss, jax_nn), (0, 1, 2))(q, k, v),
        2e-4,  # of a sum of squares over thousands of elements
    )


@pytest.mark.parametrize("implementation", JAX_IMPLEMENTATIONS)
@pytest.mark.parametrize("case", ["plain", "causal", "mask", "bias", "grouped"])
def test_equals_torch(implementation: str, case: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    arrays = [np.asarray(x) for x in qkv(heads=4, kv_heads=2 if case == "grouped" else 4)]
    ours: dict[str, Any] = {"plain": {}, "grouped": {}, "causal": dict(causal=True)}.get(case, {})
    theirs: dict[str, Any] = {"causal": dict(is_causal=True), "grouped": dict(enable_gqa=True)}.get(case, {})
    if case in ("mask", "bias"):
        array = np.random.default_rng(7).standard_normal((2, 1, 63, 80)).astype(np.float32)
        array = array > -1 if case == "mask" else array
        ours, theirs = {case: array}, dict(attn_mask=torch.tensor(array))
    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    want = sdpa(*tensors, **theirs)
    (want**2).sum().backward()
    run = functools.partial(flash_attention, **ours, implementation=implementation)
    close(run(*arrays), want.detach().numpy())
    got = jax.grad(lambda *a: (run(*a) ** 2).sum(), (0, 1, 2))(*map(jnp.asarray, arrays))
    close(got, tuple(t.grad.numpy() for t in tensors))


@pytest.mark.parametrize("implementation", JAX_IMPLEMENTATIONS)
def test_rows_with_nothing_to_attend_to(implementation: str) -> None:
    q, k, v = qkv()
    dead = np.zeros((63, 1), bool)
    dead[[0, 5, 62]] = True
    bias = jnp.where(jnp.arange(80) < 70, 0.0, -jnp.inf) * jnp.ones((2, 63, 80))  # -inf forbids as a mask does

    def run(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return flash_attention(q, k, v, bias, jnp.asarray(~dead), return_lse=True, implementation=implementation)

    (out, lse), pull = jax.vjp(run, q, k, v, bias)
    rows = dead[:, 0]
    assert (np.asarray(out)[:, :, rows] == 0).all() and (np.asarray(out)[:, :, ~rows] != 0).all()
    assert (np.asarray(lse)[:, :, rows] == -np.inf).all() and np.isfinite(np.asarray(lse)[:, :, ~rows]).all()
    dq, dk, dv, dbias = (np.asarray(g) for g in pull((jnp.ones_like(out), jnp.ones_like(lse))))
    assert (dq[:, :, rows] == 0).all() and (dbias[:, rows] == 0).all()
    for masked in (dk[:, :, 70:], dv[:, :, 70:], dbias[:, :, 70:]):
        assert (masked == 0).all()
    for g in (dq, dk, dv, dbias):
        assert np.isfinite(g).all() and g.any()


@pytest.mark.turns(3)
@pytest.mark.parametrize("implementation", JAX_IMPLEMENTATIONS)
def test_two_halves_merge_by_their_logsumexp(implementation: str) -> None:
    """And so do their gradients, which pass through the logsumexp's own."""

    def whole(q: Any, k: Any, v: Any) -> Any:
        return flash_attention(q, k, v, implementation=implementation)

    def merged(q: Any, k: Any, v: Any) -> Any:
        halves = [
            flash_attention(q, k[:, :, part], v[:, :, part], return_lse=True, implementation=implementation)
            for part in (slice(0, 30), slice(30, None))
        ]
        weights = jax.nn.softmax(jnp.stack([lse for _, lse in halves]), axis=0)
        return sum(w[..., None] * out for w, (out, _) in zip(weights, halves, strict=True))

    arrays = qkv()
    (want, pull_want), (got, pull) = (jax.vjp(f, *arrays) for f in (whole, merged))
    close(got, want)
    close(pull(jnp.cos(want)), pull_want(jnp.cos(want)))


@pytest.mark.filterwarnings("ignore:.*an axis is empty")  # the native kernels leave it to the blocked ones
@pytest.mark.parametrize("axis, extent", [(0, 0), (2, 0)])
@pytest.mark.parametrize("implementation", (None, *JAX_IMPLEMENTATIONS))
def test_empty_axes(axis: int, extent: int, implementation: str | None) -> None:
    """No batch, or no queries: results of that shape, and gradients of the keys that are 0."""
    q, k, v = qkv()
    q = jax.lax.slice_in_dim(q, 0, extent, axis=axis)
    k, v = (jax.lax.slice_in_dim(x, 0, extent if axis == 0 else x.shape[0], axis=0) for x in (k, v))
    out, pull = jax.vjp(functools.partial(flash_attention, implementation=implementation), q, k, v)
    assert out.shape == q.shape
    for gradient, x in zip(pull(out), (q, k, v), strict=True):
        assert gradient.shape == x.shape and not np.any(gradient)


def test_layouts_agree() -> None:
    q, k, v = qkv(4, 2)
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True, implementation="xla")
    swapped = flash_attention(
        *(x.swapaxes(1, 2) for x in (q, k, v)), causal=True, return_lse=True, layout="bshd", implementation="xla"
    )
    close(swapped, (out.swapaxes(1, 2), lse))


Q, K, V = qkv(4, 2)
ERRORS: list[tuple[dict[str, Any], list[str]]] = [
    (dict(query=Q[0]), ["`query`", "(4, 63, 16)", "(batch, heads, q_len, qk_dim)"]),
    (dict(query=Q.astype(int)), ["`query`", "int32", "bfloat16"]),
    (dict(value=V.astype(jnp.bfloat16)), ["`value`", "bfloat16", "float32", "cast"]),
    (dict(key=K[:1]), ["`key`", "(1, 2, 80, 16)", "`query` has batch = 2", "(2, heads, kv_len, 16)"]),
    (dict(key=K[..., :8]), ["`key`", "(2, 2, 80, 8)", "`query` has qk_dim = 16"]),
    (dict(value=V[:, :, :5]), ["`value`", "(2, 2, 5, 16)", "`key` has kv_len = 80", "(2, 2, 80, v_dim)"]),
    (dict(query=Q[:, :3]), ["`key`", "(2, 2, 80, 16)", "`query` has 3 heads", "heads divides 3"]),
    (dict(mask=np.ones((63, 80))), ["`mask`", "float", "bool", "`bias`"]),
    (dict(mask=np.ones((63, 81), bool)), ["`mask`", "(63, 81)", "(2, 4, 63, 80), with 1, or without leading axes"]),
    (dict(bias=np.ones((63, 80), bool)), ["`bias`", "bool", "`mask`"]),
    (dict(bias=np.ones((3, 63, 80), np.float32)), ["`bias`", "(3, 63, 80)", "`query` has 4 heads", "(2, 4, 63, 80)"]),
    (dict(causal=1), ["`causal`", "1", "True or False"]),
    (dict(causal_align="middle"), ["`causal_align`", "'middle'", "'bottom_right'"]),
    (dict(window=5), ["`window`", "5", "(left, right)"]),
    (dict(window=(-1, 0)), ["`window`", "(-1, 0)", "left", "zero or more"]),
    (dict(window=(3, 1.5)), ["`window`", "right", "1.5"]),
    (dict(segment_ids=np.zeros((2, 63), int)), ["`segment_ids`", "ndarray", "(q_ids, kv_ids)"]),
    (dict(segment_ids=(np.zeros((2, 63), int), None)), ["`segment_ids`", "pair"]),
    (dict(segment_ids=(np.zeros((2, 63), int), np.zeros((2, 63), int))), ["kv_ids", "(2, 63)", "(2, 80)"]),
    (dict(segment_ids=(np.zeros(63), np.zeros(80, int))), ["`segment_ids`", "q_ids", "float32", "integers"]),
    (dict(softcap=0.0), ["`softcap`", "0.0", "None"]),
    (dict(softcap="big"), ["`softcap`", "'big'", "50.0"]),
    (dict(scale=float("nan")), ["`scale`", "nan", "1/sqrt(head_dim)"]),
    (dict(sinks=np.zeros(2, np.float32)), ["`sinks`", "(2,)", "4 heads", "(4,)"]),
    (dict(sinks=np.zeros(4, int)), ["`sinks`", "int32", "floating"]),
    (dict(dropout_rate=1.0, dropout_key=jax.random.key(0)), ["`dropout_rate`", "1.0", "[0, 1)"]),
    (dict(dropout_rate=0.1), ["`dropout_key`", "None", "jax.random.key(0)"]),
    (dict(dropout_rate=0.1, dropout_key=jax.random.split(jax.random.key(0))), ["`dropout_key`", "(2,)", "one key"]),
    (dict(layout="sbhd"), ["`layout`", "'sbhd'", "'bshd'"]),
]


@pytest.mark.parametrize(
    "change, pieces", ERRORS, ids=[f"{'-'.join(change)}-{i}" for i, (change, _) in enumerate(ERRORS)]
)
def test_errors_name_the_argument_the_value_and_the_fix(change: dict[str, Any], pieces: list[str]) -> None:
    with pytest.raises(ShapeError) as caught:
        flash_attention(**{"query": Q, "key": K, "value": V, **change})
    text = str(caught.value)
    assert text.startswith("flash_attention: ")
    for piece in pieces:
        assert piece in text, text


def test_traced_options_are_errors_that_explain_themselves() -> None:
    with pytest.raises(ShapeError, match="`scale` is .* part of the compiled program"):
        jax.jit(lambda s: flash_attention(Q, K, V, scale=s))(0.5)


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def shape_of(*arrays: Any, **options: Any) -> tuple[int, ...]:
    return jax.eval_shape(lambda *a: flash_attention(*a, **options), *arrays).shape


def test_sizes_that_look_swapped() -> None:
    q, kv = struct(2, 4096, 32, 128), struct(2, 4096, 8, 128)
    with pytest.raises(ShapeError, match="look swapped.*layout='bshd'.*layout='bhsd'"):
        shape_of(q, kv, kv)
    assert shape_of(q, kv, kv, layout="bshd") == (2, 4096, 32, 128)
    assert shape_of(q, kv, kv, layout="bhsd") == (2, 4096, 32, 128)
    # Different lengths: as heads they do not divide, and the error says what would.
    k = struct(2, 300, 8, 128)
    with pytest.raises(ShapeError, match="\\(2, 300, 8, 128\\).*4096 heads.*layout='bshd'"):
        shape_of(q, k, k)
    # A mask of the sequences' sizes gives equal heads away.
    with pytest.raises(ShapeError, match="`mask`.*layout='bshd'"):
        shape_of(q, q, q, mask=jnp.ones((4096, 4096), bool))
    # Many heads over short sequences are what they say.
    for legal in ((struct(1, 128, 1, 192),) * 3, (struct(1, 512, 8, 64),) * 3):
        assert shape_of(*legal) == legal[0].shape


def test_one_way_to_say_the_blocks() -> None:
    with pytest.raises(KernelError, match="`block_size` is 64 and `config`"):
        flash_attention(Q, K, V, block_size=64, config=SMALL)
    with pytest.raises(KernelError, match="`block_size` is 0"):
        flash_attention(Q, K, V, block_size=0)
    with pytest.raises(UnsupportedError, match="no implementation 'flash'.*'xla_chunked'"):
        flash_attention(Q, K, V, implementation="flash")


def test_explain_lists_every_implementation() -> None:
    call = vishwamai.explain(flash_attention, Q, K, V).calls[0]
    assert call.op == "attention"
    verdicts = {v.implementation: v for v in call.verdicts}
    assert {"xla_chunked", "xla"} <= set(verdicts)
    assert sum(v.runs for v in call.verdicts) == 1 and not verdicts["xla"].runs
    asked = vishwamai.explain(lambda *a: flash_attention(*a, implementation="xla_chunked", block_size=32), Q, K, V)
    assert asked.calls[0].runs == "xla_chunked"
    assert "block_q=32, block_kv=32" in str(asked)


def test_use_flash_false_takes_the_definition() -> None:
    with vishwamai.kernel_config(use_flash=False):
        assert vishwamai.explain(flash_attention, Q, K, V).calls[0].runs == "xla"
        asked = vishwamai.explain(lambda *a: flash_attention(*a, implementation="xla_chunked"), Q, K, V)
    assert asked.calls[0].runs == "xla_chunked"  # the caller's own word is stronger


def test_products_of_float32_follow_the_ambient_precision() -> None:
    def precisions() -> str:
        call = functools.partial(flash_attention, implementation="xla_chunked")
        return jax.jit(call).lower(Q, K, V).as_text()

    assert "precision = [HIGHEST, HIGHEST]" in precisions()
    with vishwamai.kernel_config(precision=vishwamai.PrecisionConfig("high")):
        text = precisions()
    assert "precision = [HIGH, HIGH]" in text and "HIGHEST" not in text
