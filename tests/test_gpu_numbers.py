"""Triton kernels in Triton's interpreter, beyond the contract: every tile of their configs, torch tensors. Runs under TRITON_INTERPRET=1 alone."""

import numpy as np
import pytest

import contract
from vishwamai.ops.norm import layer_norm, rms_norm
from vishwamai.ops.norm.gpu import NormGpuConfig

pytestmark = pytest.mark.skipif(not contract.INTERPRETED, reason="needs a process of its own: make test-gpu")


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


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_a_kernel_that_leaves_memory_unwritten_is_noticed(norm):
    """Fresh memory is NaN in the interpreter: a grid of half the programs gives NaN, so the tests above would fail."""
    from vishwamai.core import gpu
    from vishwamai.torch import interpret

    def half(how, inputs, outputs):
        return interpret.launch_jax(
            gpu.Launch(how.kernel, (1, 1), how.constants, how.warps, how.stages), inputs, outputs
        )

    x = np.ones((8, 16), np.float32)
    with interpret.interpreted():
        before = gpu.register_launcher("jax", half)
        y = np.asarray(norm(x, implementation="triton", config=NormGpuConfig(4, 1, 4, 1)))
        assert before is not None
        gpu.register_launcher("jax", before)
    assert np.isfinite(y[:4]).all() and np.isnan(y[4:]).all()
