"""The parameter grids of JAX's own tests of its paged attention kernels for TPUs, on our paged attention.

Those of `ragged_paged_attention` (prefill and decoding in one call) and of `paged_attention` (decoding). What no
sequence owns is NaN. Results are compared with the formula in float64. Lengths are about a quarter of JAX's.
"""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import contract
import rotation
from test_paged_attention import poison_unused
from vishwamai import ragged_paged_attention
from vishwamai.core.cases import ArrayInit
from vishwamai.core.errors import ShapeError
from vishwamai.ops.paged_attention.cases import ForwardCase, Table, separate_pages, tables
from vishwamai.ops.paged_attention.tpu import PagedConfig

pytestmark = pytest.mark.skipif(contract.TRITON, reason="the kernels of the CPU, and those of the TPU in the simulator")
IMPLEMENTATIONS = {impl.name: impl for op, impl in contract.pairs() if op.name == "paged_attention"}
ON_CPU = ("xla", "native_cpu")

# (new tokens, all tokens) of each sequence.
BASIC = ((48, 82), (32, 45), (16, 64))
ENDS = (18, 33, 149, 122, 16, 81, 116, 45, 277, 31, 8, 5, 307, 57, 22, 332)
RUNS = {
    "basic": BASIC,
    "decode only": tuple((1, n) for n in ENDS),
    "prefill only": tuple(zip((5, 15, 30, 100, 5, 8, 63, 10, 16, 25, 3, 2, 3, 30, 9, 2), ENDS, strict=True)),
    "mixed": tuple(zip((5, 1, 30, 1, 1, 8, 63, 1, 1, 25, 1, 5, 3, 29, 1, 1), ENDS, strict=True)),
}


def random_runs(number):
    rng = np.random.default_rng(1234)
    new = rng.integers(1, 50, number)
    return tuple(zip(new.tolist(), (new + rng.integers(0, 25, number)).tolist(), strict=True))


def padded(runs, page, sequences):
    """Tables of at least so many sequences, of which the last have no tokens, and the number that counts."""
    rest = max(0, sequences - len(runs))
    arrays, pages = tables(runs + ((0, 0),) * rest, page)
    return arrays | {"num_seqs": Table((1,), "int32", values=(len(runs),))}, pages


def ragged_case(name, runs, heads, dtype, stored=None, **options):
    """A call of JAX's `ragged_paged_attention`, whose default scale is 1: at least 128 rows and 8 sequences, 128
    features and 16 tokens of a page.
    """
    arrays, pages = padded(runs, 16, 8)
    stored = stored or dtype
    rows = max(128, sum(new for new, _ in runs))
    found = {
        "query": ArrayInit((rows, heads[0], 128), dtype),
        "kv_pages": ArrayInit((pages, 16, 2 * heads[1], 128), stored),
    }
    return ForwardCase(name, "paged_attention", ragged_paged_attention, found | arrays, {"scale": 1.0, **options})


def check(implementation, case, config=None):
    """The numbers, with NaN in what no sequence owns and page tables whose unused entries name no page; or, where the
    implementation declines the case, its error.
    """
    impl = IMPLEMENTATIONS[implementation]
    if contract.declined(impl, case):
        return
    arrays = case.make()
    lens, table = arrays["kv_lens"], arrays["page_indices"]
    for name in {"kv_pages", "k_pages", "v_pages"} & set(arrays):
        if not jnp.issubdtype(arrays[name].dtype, jnp.integer):
            arrays[name] = poison_unused(arrays[name], lens, table)
        page = arrays[name].shape[1]
    used = np.arange(table.shape[1]) < -(-lens[:, None] // page)
    arrays["page_indices"] = np.where(used, table, np.iinfo(np.int32).max).astype(np.int32)
    reference = contract.OPERATIONS["paged_attention"].reference
    theirs = None if impl is reference else contract.by_reference(case)
    contract.check_all(contract.evaluate(case, impl, arrays, config=config), contract.truth(case), theirs)


HEADS = ((32, 8), (32, 16), (12, 2), (16, 2), (4, 4), (8, 1))
DTYPES = ("float32", "bfloat16")
SCALED = tuple({"k_scale": scale, "v_scale": scale} if scale else {} for scale in (0.5, None))
CASES = [
    *(ragged_case(f"{name} {dtype}", runs, (32, 8), dtype) for name, runs in RUNS.items() for dtype in DTYPES),
    *(
        ragged_case(f"basic {stored} {scaled}", BASIC, (32, 8), "bfloat16", stored, **scaled)
        for stored in ("float8_e5m2", "float8_e4m3fn")
        for scaled in SCALED
    ),
    *(
        ragged_case(f"{number} sequences {heads} {dtype}", random_runs(number), heads, dtype)
        for number, heads, dtype in itertools.product((1, 5, 16), HEADS, DTYPES)
    ),
    # JAX's window counts the query's own key, ours the keys before it.
    *(
        ragged_case(f"window {window}", random_runs(5), (4, 4), "float32", window=window and window - 1)
        for window in (None, 5, 128)
    ),
    *(ragged_case(f"cap {cap}", random_runs(2), (16, 2), "float32", softcap=cap) for cap in (None, 50.0)),
]


@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize("case", rotation.in_turn(28, CASES), ids=contract.label)
def test_ragged_paged_attention(case, implementation):
    check(implementation, case)


SIMULATED = list(
    itertools.product(
        (((33, 40),), ((1, 20), (0, 7), (35, 60))),  # runs
        ((4, 4), (8, 1), (16, 2)),  # heads
        DTYPES,
        (None, 4),  # window
        (64, 128),  # keys of a step
        (32, 64),  # queries of a step
    )
)


@pytest.mark.parametrize(("runs", "heads", "dtype", "window", "keys", "queries"), rotation.drawn(SIMULATED, 24, 24))
def test_ragged_paged_attention_in_the_simulator(runs, heads, dtype, window, keys, queries):
    case = ragged_case(f"{runs} {heads} {dtype} {window}", runs, heads, dtype, window=window, softcap=50.0)
    check("pallas_tpu", case, PagedConfig(keys, long_rows=queries * heads[0] // heads[1]))


DECODING = list(
    itertools.product(
        DTYPES,
        (16, 32, 64),  # tokens of a page
        (1, 8),  # kv heads
        (1, 4, 8),  # query heads of one of them
        (128, 256),  # features
        (1.0, None),  # soft-cap
        (False, True),  # int8 pages
    )
)
STORED = (0, 3, 64, 129, 255, 512)


def decoding_case(dtype, page, kv_heads, group, dim, softcap, int8, lens):
    """A call of JAX's `paged_attention`: keys and values apart, one token of each sequence, the first of which is
    empty.
    """
    arrays, pages = tables(tuple((1, n) for n in lens), page)
    pool = ArrayInit((pages, page, kv_heads, dim), "int8" if int8 else dtype, "integers" if int8 else "normal")
    found = {"query": ArrayInit((len(lens), kv_heads * group, dim), dtype), "k_pages": pool, "v_pages": pool}
    options: dict[str, Any] = {"scale": 1.0, "softcap": softcap, "max_q_len": 1}
    if int8:
        options |= {"k_scale": 0.01, "v_scale": tuple(0.01 * (1 + h) for h in range(kv_heads))}
    name = f"{dtype} {page} {kv_heads} {group} {dim} {softcap} {int8}"
    return ForwardCase(name, "paged_attention", separate_pages, found | arrays, options)


@pytest.mark.parametrize(
    ("dtype", "page", "kv_heads", "group", "dim", "softcap", "int8"), rotation.drawn(DECODING, 36, 72)
)
def test_paged_attention(dtype, page, kv_heads, group, dim, softcap, int8):
    case = decoding_case(dtype, page, kv_heads, group, dim, softcap, int8, STORED)
    for implementation in ON_CPU:
        check(implementation, case)


@pytest.mark.parametrize(
    ("dtype", "page", "kv_heads", "group", "dim", "softcap", "int8"), rotation.drawn(DECODING, 16, 16)
)
def test_paged_attention_in_the_simulator(dtype, page, kv_heads, group, dim, softcap, int8):
    check("pallas_tpu", decoding_case(dtype, page, kv_heads, group, dim, softcap, int8, (0, 3, 130)))


# Keys and values of four tokens, how many of them there are, queries, and the result by hand.
BY_HAND = {
    "one head": ([0.1, 0.2, 0.3, 0.4], [4.0, 3.0, 2.0, 1.0], 2, [[1.2]], [[3.47]]),
    "three tokens": ([0.12, 0.23, 0.34, 0.45], [4.32, 3.21, 2.10, 1.09], 3, [[1.7]], [[3.0723]]),
    "two heads": ([0.12, 0.23, 0.34, 0.45], [4.32, 3.21, 2.10, 1.09], 4, [[1.3], [9.7]], [[2.488], [1.576]]),
    "two features": (
        [[0.1, 0.2], [0.2, 0.3], [0.3, 0.4], [0.4, 0.5]],
        [[4.0, 5.0], [3.0, 6.0], [2.0, 7.0], [1.0, 8.0]],
        2,
        [[1.2, 9.0]],
        [[3.265, 5.735]],
    ),
}


@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name, dtype, implementation):
    contract.skip_unless_built(IMPLEMENTATIONS[implementation])
    keys, values, length, query, expected = BY_HAND[name]
    query = jnp.asarray([query], dtype)
    pages = tuple(jnp.asarray(x, dtype).reshape(1, 4, 1, query.shape[-1]) for x in (keys, values))
    lens, table, starts = (jnp.array(x, jnp.int32) for x in ([length], [[0]], [0, 1]))
    out = ragged_paged_attention(query, pages, lens, table, starts, scale=1.0, implementation=implementation)
    tolerance = 2e-4 if dtype == "float32" else 5e-3
    np.testing.assert_allclose(out[0].astype(np.float32), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": -1}, "`window` is -1; pass how many keys before its own"),  # 0 of JAX
        ({"window": -2}, "`window` is -2; pass how many keys before its own"),
        ({"softcap": 0.0}, "`softcap` is 0.0"),
        # The scales of keys in JAX's int8 pages begin with the heads, ours with the pages.
        ({"k_scale": jnp.ones((8, 42, 16, 1))}, r"`k_scale` has shape \(8, 42, 16, 1\).*of shape \(50, 16, 8, 1\)"),
        ({"v_scale": jnp.ones((42, 16, 8))}, r"`v_scale` has shape \(42, 16, 8\).*one for each kv head"),
    ],
    ids=str,
)
def test_errors(options, words):
    case = ragged_case("basic", BASIC, (32, 8), "float32", "int8", **options)
    with pytest.raises(ShapeError, match=words):
        case.run(case.make())
