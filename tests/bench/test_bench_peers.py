"""The benchmark's peers and `vishwamai.torch` compute what our operations compute, forward and backward; and the line
that `bench.ratios` prints of them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vishwamai.bench import numbers, ratios
from vishwamai.bench.candidates import candidates, theirs
from vishwamai.bench.contest import contest
from vishwamai.bench.gradient import gradient_case
from vishwamai.bench.subject import subject
from vishwamai.bench.subjects import gemm
from vishwamai.core import ffi
from vishwamai.measure.timing import sampler, side_by_side
from vishwamai.ops.catalogue import operations

pytest.importorskip("torch", reason="torch is not installed: pip install '.[torch]'")

CASES = [
    ("softmax", "softmax (63, 100) float32"),
    ("softmax", "log_softmax (63, 100) bfloat16"),
    ("activation", "gelu tanh"),
    ("activation", "relu2 bfloat16"),
    ("gated_linear_unit", "63x100x300 float32"),
    ("linear_cross_entropy", "each token (5, 7) 50 words"),
    ("grouped_gemm", "one feature bfloat16"),
    ("block_sparse_matmul", "unsorted and twice"),
    ("gemm", "int8"),
    ("paged_attention", "decode one head a group f32"),
    ("paged_attention", "decode bf16"),
]


def case_named(op, name):
    return next(c for c in operations()[op].cases if c.name == name)


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize(("op", "name"), CASES)
def test_peers_compute_the_same(op, name, gradients):
    case, about = case_named(op, name), subject(op)
    able, _ = candidates(operations()[op], case, about, gradients)
    peers = [one for one in able if one.implementation is None]
    assert peers or gradients
    run = gradient_case(case) if gradients else case
    if run is None or not peers:
        return
    ours = about.in_torch(case)
    assert ours is not None
    peers.append(theirs(ours, case, gradients))
    arrays = run.make()
    sample = about.gradient_sample(run, arrays) if gradients else about.sample(run, arrays)
    right = numbers.truth(sample, gradients)
    found = contest(
        peers,
        arrays,
        lambda one, outputs: numbers.check(outputs, sample, right, ratios.PEERS),
        lambda calls: side_by_side(calls, rounds=1, sample_seconds=0.0),
    )
    for outcome in found:
        assert outcome.numbers is not None and outcome.numbers.right, (outcome.candidate.name, outcome.numbers)
        assert outcome.timing is not None


@pytest.mark.skipif(ffi.why_not() is not None, reason="the native module is not built")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_weights_mean_the_same(dtype):
    case = case_named("gemm", "int8")
    case = dataclasses.replace(
        case, arrays={n: dataclasses.replace(x, dtype=dtype, kind="normal") for n, x in case.arrays.items()}
    )
    arrays = case.make()
    want = np.matmul(*(arrays[n].astype(np.float64) for n in "ab"))
    peers = gemm.packed(case)
    assert "torch packed" in peers or dtype == "bfloat16"  # which oneDNN does not pack on every CPU
    for peer in peers.values():
        got = peer.call(*peer.prepare(arrays))
        got = np.asarray(got.float() if peer.framework == "torch" else got, np.float64)
        np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02 * np.abs(want).max(), err_msg=peer.name)


def test_dropout_of_another_framework_is_timed_unchecked():
    case = case_named("activation", "dropout float32")
    (peer,) = subject("activation").peers(case)
    assert not peer.checked and peer.framework == "torch"


@pytest.mark.skipif(ffi.why_not() is not None, reason=ffi.why_not() or "")
def test_the_line_of_a_comparison():
    """Ours, torch and XLA in this order, each with its rate; peers with the ratio of best times."""
    wanted = ratios.Comparison(case_named("softmax", "softmax (63, 100) float32"), "GB/s")
    outcomes, work = ratios.run(wanted, rounds=2, seconds=0.0, sample=sampler())
    assert [o.candidate.name for o in outcomes] == ["ours", "torch", "xla"]
    line, rates, found = ratios._line(wanted, outcomes, work)
    assert set(rates) == {"ours", "torch", "xla"} and set(found) == {"torch", "xla"}
    assert line.startswith("softmax (63, 100) float32") and " GB/s: ours " in line and "| x torch " in line
    assert np.isclose(rates["ours"] * 1e9, work / outcomes[0].timing.best)


def test_a_candidate_without_memory_is_left_out_and_the_others_are_timed():
    def build(arrays):
        program = jax.jit(lambda: jnp.zeros(1 << 45)).lower().compile()  # float32: 128 TiB
        return lambda: program().block_until_ready(), numbers.as_tuple, None

    (case, about) = case_named("softmax", "softmax float16"), subject("softmax")
    one = next(c for c in candidates(operations()["softmax"], case, about, False)[0] if c.implementation == "xla")
    arrays = case.make()
    sample = about.sample(case, arrays)
    right = numbers.truth(sample, False)
    found = contest(
        [dataclasses.replace(one, name="greedy", build=build), one],
        arrays,
        lambda one, outputs: numbers.check(outputs, sample, right),
        lambda calls: side_by_side(calls, rounds=1, sample_seconds=0.0),
    )
    assert found[0].numbers is found[0].timing is None and found[1].timing is not None
    assert "greedy: JaxRuntimeError: RESOURCE_EXHAUSTED" in found[0].note
