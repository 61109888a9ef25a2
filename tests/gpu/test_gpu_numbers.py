"""Triton kernels in Triton's interpreter, beyond the contract: every tile of their configs, torch tensors. Runs under
TRITON_INTERPRET=1 alone.
"""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import contract
from vishwamai.measure.timing import sampler
from vishwamai.ops.catalogue import operations
from vishwamai.ops.norm import layer_norm, rms_norm
from vishwamai.ops.norm.gpu import NormGpuConfig
from vishwamai.ops.softmax import log_softmax, softmax
from vishwamai.ops.softmax.gpu import SoftmaxGpuConfig

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not contract.TRITON, reason="needs a process of its own: make test-gpu"),
]
OPERATIONS = {
    name
    for name, op in operations().items()
    if op.has_kernel("cuda") and op.facts.small.call.__module__.startswith("vishwamai.")
}


@pytest.mark.parametrize(
    "config", [NormGpuConfig(1, 4, 1, 4, 1), NormGpuConfig(4, 4, 2, 4, 3), NormGpuConfig(8, 4, 16, 4)], ids=str
)
def test_norm_tiles(config):
    """Rows of any number for bands and tiles of any size; the tiles change nothing but the order of sums."""
    op = contract.OPERATIONS["norm"]
    (case,) = (case for case in op.cases if case.name == "layer residual float32")
    (triton,) = (impl for impl in op.op.implementations if impl.platform == "cuda")
    contract.check_all(
        contract.evaluate(case, triton, config=config), contract.truth(case), contract.by_reference(case)
    )


@pytest.mark.parametrize("name", ["softmax (63, 100) bfloat16", "log_softmax (63, 100) float32"])
@pytest.mark.parametrize("config", [SoftmaxGpuConfig(1, 4, 128), SoftmaxGpuConfig(8, 4, 16)], ids=str)
def test_softmax_tiles(config, name):
    """Rows in one tile or in several, the last one ragged."""
    op = contract.OPERATIONS["softmax"]
    (case,) = (case for case in op.cases if case.name == name)
    (triton,) = (impl for impl in op.op.implementations if impl.platform == "cuda")
    contract.check_all(
        contract.evaluate(case, triton, config=config), contract.truth(case), contract.by_reference(case)
    )


@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_softmax_of_long_rows_of_infinities(function):
    """A tile of nothing but -inf counts for nothing; a row of them is NaN, and so is one with a NaN or with +inf, and
    no other. The gradient is finite where the row has one, and the same bits come twice.
    """
    from triton_kernels import triton_serves

    x = np.random.default_rng(0).standard_normal((6, 20000)).astype(np.float32)
    x[0, :9000], x[1, 9000:], x[2], x[3, 19999], x[4, 5000] = -np.inf, -np.inf, -np.inf, np.nan, np.inf

    def run(x):
        y, pull = jax.vjp(lambda x: function(x, implementation="triton"), x)
        return y, pull(jnp.ones_like(y).at[:, ::2].set(-3.0))[0]

    with triton_serves():
        (y, dx), again = (jax.tree.map(np.asarray, jax.jit(run)(x)) for _ in range(2))
    for one, same in zip((y, dx), again, strict=True):
        np.testing.assert_array_equal(one, same)
    assert np.isnan(y[2:5]).all() and np.isnan(dx[2:5]).all()
    usual = [0, 1, 5]
    of = {softmax: jax.nn.softmax, log_softmax: jax.nn.log_softmax}[function]
    expected, pull = jax.vjp(of, x[usual])
    np.testing.assert_allclose(y[usual], expected, rtol=2e-6)
    (right,) = pull(jnp.ones_like(expected).at[:, ::2].set(-3.0))
    np.testing.assert_allclose(dx[usual], right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_a_kernel_that_leaves_memory_unwritten_is_noticed(norm):
    """Fresh memory is NaN in the interpreter: a grid of half the programs gives NaN, so the tests above would fail."""
    import triton_kernels
    from vishwamai.core import gpu

    def half(how, inputs, outputs):
        return triton_kernels.launch_jax(
            gpu.Launch(how.kernel, (1, 1), how.constants, how.warps, how.stages), inputs, outputs
        )

    x = np.ones((8, 16), np.float32)
    with triton_kernels.triton_serves():
        before = gpu.register_launcher("jax", half)
        y = np.asarray(norm(x, implementation="triton", config=NormGpuConfig(4, 1, 4, 1)))
        assert before is not None
        gpu.register_launcher("jax", before)
    assert np.isfinite(y[:4]).all() and np.isnan(y[4:]).all()


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).parents[2] / "benchmarks" / "subjects" / "gpu" / "kernels.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_gpus", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_runs_dry(script, tmp_path, capsys):
    """The smallest case of every operation: ours is right in every one, forward and with gradients, next to a peer."""
    out = tmp_path / "rows.json"
    assert script.main(["--dry", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    ours = [row for row in rows if row["contestant"] == script.OURS]
    assert {row["op"] for row in ours} == OPERATIONS == {row["op"] for row in rows if row not in ours}
    assert sum("forward and backward" in row["case"] for row in ours) == len(OPERATIONS) - 1  # not of pages
    assert all(row["ms"] > 0 and row["tflops"] > 0 and row["share"] > 0 and not row["note"] for row in ours)
    assert capsys.readouterr().out.startswith("dry: the times mean nothing")


def test_the_benchmark_times_no_wrong_numbers(script, tmp_path):
    (this, _) = script.comparisons(operations()["norm"], dry=True)
    ours, peer = this.contestants

    def off(arrays):
        call, outputs, memory = peer.build(arrays)
        return call, lambda result: tuple(x + 1 for x in outputs(result)), memory

    def declines(arrays):
        raise RuntimeError("no such instruction")

    another = dataclasses.replace(peer, name="another", build=declines)
    wrong = dataclasses.replace(this, contestants=[dataclasses.replace(ours, build=off), peer, another])
    rows = script.measure(wrong, script.prepared(wrong, tmp_path), 1, sampler(), (1e12, 1e12))
    by_name = {row.contestant: row for row in rows}
    assert by_name[script.OURS].ms is None and "largest error 1, allowed" in by_name[script.OURS].note
    assert by_name[peer.name].ms > 0 and by_name["another"].note == "it raised RuntimeError: no such instruction"


def test_the_benchmark_has_every_case_of_a_model(script):
    """`vishwamai.torch` computes them all; nothing is run."""
    for name in OPERATIONS:
        found = {this.case.name for this in script.comparisons(operations()[name], dry=False)}
        assert found == {case.name for case in operations()[name].tagged("model")}, name
