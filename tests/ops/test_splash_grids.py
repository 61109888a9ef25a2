"""The parameter grid of JAX's tests of splash attention, and its masks, on our attention.

A mask is stated in the three ways that we have: by `causal`, `window` and `q_offset`; as the array `mask`; or as blocks
that are a part of the program. Results, logsumexp and gradients are compared with the formula in float64, a few with
JAX's own kernel in Pallas' interpreter.
"""

import dataclasses
import functools
import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as jax_masks
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import process_mask

import contract
import rotation
from vishwamai import BlockMask, block_sparse_attention, flash_attention
from vishwamai.core.cases import ArrayInit, Case
from vishwamai.core.errors import ShapeError
from vishwamai.ops.attention.block_mask import tile_masks

pytestmark = pytest.mark.skipif(contract.TRITON, reason="the kernels of the CPU, and those of the TPU in the simulator")
IMPLEMENTATIONS = {impl.name: impl for op, impl in contract.pairs() if op.name == "attention"}
ON_CPU = ("xla", "xla_chunked", "native_cpu")


def causal(i, j, offset=0):
    return j <= i + offset


def within(i, j, left=None, right=None, offset=0):
    near = np.full(np.broadcast_shapes(i.shape, j.shape), True)
    near &= True if left is None else j >= i + offset - left
    return near & (True if right is None else j <= i + offset + right)


def mask_of(choose, i, j) -> tuple[np.ndarray, dict[str, Any] | None]:
    """(what is seen, the options that say so; None where none can)."""
    shape = q_len, kv_len = i.size, j.size
    kind = choose(("full", "causal", "random", "both", "either") + ("local",) * (2 * (q_len == kv_len)))
    if kind == "full":
        return np.ones(shape, bool), {}
    if kind == "causal":
        offset = choose((0, 0, choose(range(-q_len, q_len))))
        return causal(i, j, offset), {"causal": True, "q_offset": offset}
    if kind == "local":
        window = tuple(choose((None, choose(range(q_len + 1)))) for _ in range(2))
        offset = choose((0, choose(range(-q_len, q_len))))
        return within(i, j, window[0], window[1], offset), {"window": window, "q_offset": offset}
    if kind == "random":
        sparsity = choose(range(51)) / 100
        return np.random.default_rng(choose(range(2**32))).random(shape) >= sparsity, None
    (one, _), (other, _) = (mask_of(choose, i, j) for _ in range(2))
    return one & other if kind == "both" else one | other, None


@dataclasses.dataclass(frozen=True)
class Uniform(ArrayInit):
    """Numbers from 0 to 1: with `scale=1` the logits are about a quarter of the head dimension."""

    def make(self, rng):
        return rng.random(self.shape).astype(jnp.dtype(self.dtype))


@functools.lru_cache(maxsize=64)
def case_of(index: int, largest: int, heads: tuple[tuple[int, int], ...], dims: tuple[int, ...]) -> Case:
    """The index-th call that the grid allows: lengths are an eighth of JAX's, and not all are whole tiles."""
    choose = random.Random(index).choice
    lengths = [n for n in (100, 128, 256, 384, 512) if n <= largest]
    q_len, kv_len = choose(lengths), choose(lengths)
    kv_len = choose((q_len, kv_len))
    q_heads, kv_heads = choose(heads)
    dim, dtype = choose(dims), choose(("float32", "bfloat16"))
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    options: dict[str, Any] = {"return_lse": True, "scale": 1.0, "softcap": choose((None, choose(range(10, 501)) / 10))}
    if q_len == kv_len and choose((False, True)):
        ends = np.sort([choose(range(1, q_len)) for _ in range(choose((1, 2, 3, 4)))])
        options["segment_ids"] = (np.searchsorted(ends, np.arange(q_len), "right").astype(np.int32)[None],) * 2
    call: Any = flash_attention
    stated = choose(("options", "array", "blocks of heads", "blocks"))
    masks = [mask_of(choose, i, j) for _ in range(q_heads)]
    seen = np.stack([mask for mask, _ in masks])
    if stated == "options":
        options |= next((said for _, said in masks if said is not None), {"causal": True})
    elif stated == "array":
        options["mask"] = seen[None]
    else:
        call = block_sparse_attention
        shared = stated == "blocks"
        options |= {"block_mask": (lambda i, j: seen[0, i, j]) if shared else seen, "block_size": 128 if shared else 1}
    shapes = {"query": (q_heads, q_len), "key": (kv_heads, kv_len), "value": (kv_heads, kv_len)}
    arrays = {name: Uniform((1, *shape, dim), dtype) for name, shape in shapes.items()}
    return Case(f"{index} {stated}", "attention", call, arrays, options)


def check(implementation, case, tile):
    """The numbers; or, where the implementation declines the case, its error.

    Logits and their logsumexp are about a quarter of the head dimension, and the probabilities err by as much as both
    do: four units in the last place of a logit are allowed, and eight to the kernel of the TPU, whose logits of base 2
    are larger and which rounds them and their logsumexp apart.
    """
    impl = IMPLEMENTATIONS[implementation]
    if contract.declined(impl, case):
        return
    reference = contract.OPERATIONS["attention"].reference
    theirs = None if impl is reference else contract.by_reference(case)
    unit = case.arrays["query"].shape[-1] / (4 if impl.platform == "tpu" else 8) * float(np.finfo(np.float32).eps)
    contract.check_all(contract.evaluate(case, impl, config=tile), contract.truth(case), theirs, unit)


@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize("index", rotation.in_turn(40, range(80)))
def test_splash_attention(index, implementation):
    tile = random.Random(index).choice((None, 128, 256))
    case = case_of(index, 512, ((1, 1), (2, 2), (4, 1), (8, 4), (6, 2)), (128, 256))
    check(implementation, case, None if implementation == "xla" else tile)


@pytest.mark.parametrize("index", rotation.in_turn(24, range(24)))
def test_splash_attention_in_the_simulator(index):
    check("pallas_tpu", case_of(index, 256, ((1, 1), (2, 2), (2, 1)), (128,)), None)


KERNELS = {  # by JAX's masks, which leave no row empty: there its kernel has no meaning
    "causal": (jax_masks.CausalMask((256, 256)), {"causal": True}),
    "window": (jax_masks.LocalMask((256, 256), (40, 7), 0), {"window": (40, 7)}),
    "both": (
        jax_masks.LogicalAnd(jax_masks.CausalMask((256, 256), 0), jax_masks.LocalMask((256, 256), (130, None), 0)),
        {"causal": True, "window": (130, None)},
    ),
    "wide": (jax_masks.CausalMask((128, 256), 60), {"causal": True, "q_offset": 60}),
}


@pytest.mark.parametrize("name, softcap", rotation.in_turn(8, itertools.product(KERNELS, (None, 20.0))))
def test_jax_own_kernel(name, softcap):
    """Output, logsumexp and gradients of JAX's kernel in Pallas' interpreter, which computes in float32."""
    mask, options = KERNELS[name]
    q_len, kv_len = mask.shape
    rng = np.random.default_rng(0)
    query, key, value, cotangent = (
        jnp.asarray(rng.random((heads, n, 128)), jnp.float32)
        for heads, n in ((4, q_len), (2, kv_len), (2, kv_len), (4, q_len))
    )
    edges: Any = {field.name: 128 for field in dataclasses.fields(splash.BlockSizes) if field.name.startswith("block")}
    make = functools.partial(
        splash.make_splash_mha_single_device,
        jax_masks.MultiHeadMask((mask,) * 4),
        block_sizes=splash.BlockSizes(**edges),
        attn_logits_soft_cap=softcap,
        interpret=True,
    )

    def ours(*qkv):
        return flash_attention(*(x[None] for x in qkv), scale=1.0, softcap=softcap, **options, return_lse=True)

    theirs, pull = jax.vjp(make(), query, key, value)
    _, (logsumexp,) = make(save_residuals=True)(query, key, value)
    (out, lse), back = jax.vjp(ours, query, key, value)
    got = (out[0], lse[0], *back((cotangent[None], jnp.zeros_like(lse))))
    contract.close(got, (theirs, logsumexp, *pull(cotangent)))


# What each query of four (six) sees of four (six) keys, and how that is asked for.
LITERAL = {
    "1000 1100 1110 1111": {"causal": True},
    "100000 110000 111000 111100": {"causal": True},
    "1000 1100 1110 1111 1111 1111": {"causal": True},
    "0000 1000 1100 1110": {"causal": True, "q_offset": -1},
    "1100 1110 1111 1111": {"causal": True, "q_offset": 1},
    "1111 1111 0111 0011": {"window": (1, None)},
    "1110 1111 1111 1111": {"window": (None, 2)},
    "1100 1110 0111 0011": {"window": (1, 1)},
    "1000 1100 0110 0011": {"window": (1, 0)},
    "1110 0111 0011 0001": {"window": (0, 2)},
    "111111 111111 011111 001111": {"window": (1, None)},
    "111000 111100 111110 111111": {"window": (None, 2)},
    "110000 111000 011100 001110": {"window": (1, 1)},
    "100000 110000 011000 001100": {"window": (1, 0)},
    "111000 011100 001110 000111": {"window": (0, 2)},
    "1111 1111 0111 0011 0001 0000": {"window": (1, None)},
    "1110 1111 1111 1111 1111 1111": {"window": (None, 2)},
    "1100 1110 0111 0011 0001 0000": {"window": (1, 1)},
    "1000 1100 0110 0011 0001 0000": {"window": (1, 0)},
    "1110 0111 0011 0001 0000 0000": {"window": (0, 2)},
}


@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize("rows", rotation.in_turn(5, LITERAL))
def test_masks_written_out(rows, implementation):
    """The mean of what a query sees, where the values are the rows of the identity matrix."""
    contract.skip_unless_built(IMPLEMENTATIONS[implementation])
    seen = np.array([[int(x) for x in row] for row in rows.split()])
    zeros = jnp.zeros((1, 1, len(seen), 8)), jnp.zeros((1, 1, seen.shape[1], 8))
    out = flash_attention(*zeros, jnp.eye(seen.shape[1])[None, None], **LITERAL[rows], implementation=implementation)
    np.testing.assert_allclose(out[0, 0], seen / np.maximum(seen.sum(1, keepdims=True), 1), rtol=1e-6)


def jax_blocks(masks, block_size):
    """JAX's own cut of masks, one for each head: 0 = empty, 1 = in part, 2 = whole; and its different parts."""
    whole = jax_masks.MultiHeadMask([jax_masks.NumpyMask(mask) for mask in masks])
    info, _ = process_mask(whole, block_size, shrink_grid=False)
    parts = info.partial_mask_blocks
    return info.block_mask, 0 if parts is None else len(parts)


SIZES = list(itertools.product(((1024, 1024), (1024, 2048), (2048, 1024)), ((256, 256), (256, 128), (128, 256))))
CHUNKED = [
    *((functools.partial(causal), shape, size) for shape, size in SIZES),
    *(
        (functools.partial(within, left=left, right=right, offset=offset), shape, size)
        for (left, right), far in (((128, None), 16), ((128, 256), 16), ((None, 256), 32))
        for shape, size in SIZES
        for offset in (0, far)
    ),
]


@pytest.mark.parametrize(("seen", "shape", "size"), rotation.in_turn(4, CHUNKED))
def test_a_function_in_blocks(seen, shape, size):
    """Positions are those of JAX's mask, and blocks are empty, whole or partly visible where JAX's are."""
    options = seen.keywords
    if seen.func is causal:
        dense = jax_masks.make_causal_mask(shape)
    else:
        window = options["left"], options["right"]
        dense = jax_masks.make_local_attention_mask(shape, window, offset=options["offset"])
    ours = BlockMask.from_function(seen, shape[0], shape[1], size)
    np.testing.assert_array_equal(ours.positions(*shape)[0], dense)
    kinds, parts = jax_blocks([dense], size)
    np.testing.assert_array_equal(np.where(ours.codes > 1, 1, 2 * ours.codes), kinds)
    assert len(ours.patterns) == parts


CUT = {
    "full": [((64, 64), None)],
    "two causal": [((64, 64), {}), ((64, 64), {})],
    "causal wide": [((64, 128), {})],
    "causal tall": [((128, 64), {})],
    "local": [((64, 64), {"left": 8, "right": 8})],
    "local narrow": [((64, 64), {"left": 8, "right": 0})],
    "causal and local": [((64, 64), {}), ((64, 64), {"left": 8, "right": 8})],
    "causal and full": [((64, 64), {}), ((64, 64), None)],
    "local of two widths": [((64, 64), {"left": 8, "right": 8}), ((64, 64), {"left": 8, "right": 0})],
}


@pytest.mark.parametrize("name", CUT)
def test_heads_in_tiles(name):
    """A mask for each head, cut into tiles of 16: empty, whole and different parts are JAX's."""
    masks = []
    for shape, options in CUT[name]:
        i, j = np.arange(shape[0])[:, None], np.arange(shape[1])[None, :]
        masks.append(np.ones(shape, bool) if options is None else within(i, j, **options) if options else causal(i, j))
    whole = BlockMask.from_blocks(np.stack(masks), (1, 1))
    q_tiles, kv_tiles = (n // 16 for n in masks[0].shape)
    ours = tile_masks(whole, 16, 16, q_tiles, kv_tiles)
    kinds, parts = jax_blocks(masks, (16, 16))
    np.testing.assert_array_equal(np.select([ours.ids < 0, ours.ids > 0], [0, 1], 2), kinds)
    assert len(ours.patterns) == parts + 1


@pytest.mark.parametrize("shape", [(256, 256), (512, 256)], ids=str)
@pytest.mark.parametrize("both", [np.logical_or, np.logical_and], ids=lambda f: f.__name__)
def test_two_masks_in_one(both, shape):
    """Functions and arrays combine as they are."""
    one, other = (jax_masks.make_random_mask(shape, 0.5, seed=seed) for seed in (1, 2))
    theirs = {np.logical_or: jax_masks.LogicalOr, np.logical_and: jax_masks.LogicalAnd}[both](
        jax_masks.NumpyMask(one), jax_masks.NumpyMask(other)
    )
    ours = BlockMask.from_function(lambda i, j: both(one[i, j], other[i, j]), shape[0], shape[1], (256, 256))
    np.testing.assert_array_equal(ours.positions(*shape)[0], theirs[:, :])


@pytest.mark.parametrize(
    "masks, block_size, words",
    [
        (np.ones((3, 4, 4), bool), 32, "has 3 heads, but `query` has 2; pass one mask for each head"),
        (np.ones((2, 4, 8), bool), 32, "has 4 x 8 blocks, but 128 queries and 128 keys have 4 x 4"),
        (np.ones((2, 2, 4, 4), bool), 32, r"shape \(2, 2, 4, 4\); pass bool \[q_blocks, kv_blocks\]"),
        (jnp.ones((2, 4, 4)), 32, "dtype float32"),
        (np.ones((2, 4, 4), bool), (32, 0), r"`block_size` is \(32, 0\)"),
    ],
)
def test_masks_that_do_not_fit(masks, block_size, words):
    """JAX's errors of several masks in one: unlike shapes, masks of masks, what is no mask."""
    query = jnp.zeros((1, 2, 128, 16))
    with pytest.raises(ShapeError, match=words):
        block_sparse_attention(query, query, query, masks, block_size=block_size)
