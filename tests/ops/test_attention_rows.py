"""Rows of attention with nothing to attend to: output 0, logsumexp -inf, gradients of exactly 0, on every
implementation.
"""

import numpy as np
import pytest

import contract
import oracle_attention
import rotation
from vishwamai.core.cases import ArrayInit, Case

pytestmark = pytest.mark.interpreter


def _ids(*lengths):
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]


def _nothing(name, shape, mask=None, **options):
    """An attention case of which some rows see no key and some keys are seen by no row. `shape` is (heads, kv heads,
    q_len, kv_len).
    """
    heads, kv_heads, rows, columns = shape
    arrays = {
        "query": ArrayInit((1, heads, rows, 16)),
        "key": ArrayInit((1, kv_heads, columns, 16)),
        "value": ArrayInit((1, kv_heads, columns, 24)),
    }
    call = contract.OPERATIONS["attention"].cases[0].call
    if mask is not None:
        options["mask"] = mask
    return Case(name, "attention", call, arrays, options | {"return_lse": True})


_ROWS_OFF = np.ones((1, 1, 40, 40), bool)
_ROWS_OFF[..., 7:29, :] = False
_ROWS_OFF[..., 11] = False
_ALL_OFF = np.zeros((1, 2, 20, 30), bool)

NOTHING = [
    _nothing("all masked", (2, 2, 20, 30), _ALL_OFF),
    _nothing("rows and a key masked", (4, 2, 40, 40), _ROWS_OFF),
    _nothing("rows masked, causal", (2, 1, 40, 40), _ROWS_OFF, causal=True),
    _nothing("causal, more rows than keys", (2, 2, 50, 20), causal=True, causal_align="bottom_right"),
    _nothing("window beside the keys", (2, 2, 150, 20), window=(3, 0)),
    _nothing("segments without a partner", (2, 2, 40, 30), segment_ids=(_ids(10, 20, 10), _ids(20, 10) * 2)),
    _nothing("rows and softcap", (2, 2, 40, 40), _ROWS_OFF, softcap=2.0),
]


def nothing_parameters():
    return [
        pytest.param(
            impl,
            case,
            id=f"{contract.label(case)}-{impl.name}",
            marks=rotation.one_in(3 if impl.platform in ("tpu", "cuda") else 1, index),
        )
        for index, case in enumerate(NOTHING)
        for op, impl in contract.pairs()
        if op.name == "attention"
    ]


@pytest.mark.turns(4)
@pytest.mark.parametrize("impl, case", nothing_parameters())
def test_nothing_to_attend_to(impl, case):
    """Output 0, logsumexp -inf, and a gradient of exactly 0 to such rows and to keys that nobody sees."""
    contract.skip_if_declined(impl, case)
    arrays = case.make()
    (_, heads, rows, _), (_, kv_heads, columns, _) = arrays["query"].shape, arrays["key"].shape
    names = ("mask", "causal", "causal_align", "window", "segment_ids")
    see = oracle_attention.visible(1, heads, rows, columns, **{k: v for k, v in case.options.items() if k in names})
    no_key = ~see.any(-1)  # [1, heads, rows]
    no_row = ~see.reshape(1, kv_heads, -1, columns).any(-2)  # [1, kv_heads, columns]
    assert no_key.any()
    (out, logsumexp), gradients = contract.evaluate(case, impl)
    assert (out[no_key] == 0).all()
    np.testing.assert_array_equal(np.isneginf(logsumexp), no_key)
    assert (gradients["query"][no_key] == 0).all()
    assert (gradients["key"][no_row] == 0).all() and (gradients["value"][no_row] == 0).all()
    assert all(np.isfinite(x).all() for x in (out, *gradients.values()))
    # And the rest is right.
    contract.check_all(((out, logsumexp), gradients), contract.truth(case), contract.by_reference(case))
