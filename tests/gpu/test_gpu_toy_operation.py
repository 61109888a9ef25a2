"""The operator of torch that is derived from the toy operation: fake, gradients, vmap and DTensor's rules.

Run as it is, XLA serves the tensors on the CPU; under TRITON_INTERPRET=1 (`make test-gpu`) the Triton kernels do,
interpreted.
"""

import contextlib
import types

import pytest

import contract

torch = pytest.importorskip("torch")

import vishwamai.torch as vt  # noqa: E402
from toy_ops.soft_clip import SOFT_CLIP  # noqa: E402
from toy_ops.soft_clip.torch import soft_clip  # noqa: E402
from triton_kernels import triton_serves  # noqa: E402
from vishwamai.core import tuning  # noqa: E402

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning"),
]


@pytest.fixture(autouse=True)
def kernels():
    with triton_serves() if contract.TRITON else contextlib.nullcontext():
        yield


def formula(x, limit, gain=None):
    y = limit * torch.tanh(x / limit)
    return y if gain is None else y * gain


def tensors(*shape):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for _ in range(2)]


@pytest.mark.parametrize("gained", [False, True])
def test_values_and_gradients(gained):
    x, gain = tensors(3, 5, 40)
    arguments = (x, gain) if gained else (x,)
    ours, theirs = (f(x, 2.0, gain=gain if gained else None) for f in (soft_clip, formula))
    torch.testing.assert_close(ours, theirs)
    for got, want in zip(*(torch.autograd.grad(y.cos().sum(), arguments) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(got, want)


def test_opcheck():
    x, gain = tensors(7, 40)
    found = torch.library.opcheck(torch.ops.vishwamai.soft_clip.default, (x, gain, 2.0))
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap(axis):
    x, gain = tensors(4, 3, 40)
    got = torch.vmap(lambda x, gain: soft_clip(x, 2.0, gain=gain), in_dims=(axis, axis))(x, gain)
    torch.testing.assert_close(got.movedim(0, axis), formula(x, 2.0, gain))


def test_a_compiled_graph_is_whole():
    x, gain = tensors(5, 40)
    compiled = torch.compile(
        lambda x, gain: soft_clip(x, 2.0, gain=gain), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for rows in (5, 3):
        y = compiled(x[:rows], gain[:rows])
        torch.testing.assert_close(y, formula(x[:rows], 2.0, gain[:rows]))
        y.sum().backward()


def test_dtensor_splits_any_axis():
    """Rows and features, forward and backward, without moving anything."""
    from torch.distributed.tensor import Shard

    from vishwamai.torch import sharding

    x, gain = tensors(4, 6, 8)
    rule = sharding.RULES[SOFT_CLIP.name](types.SimpleNamespace(x=x, gain=gain, limit=2.0))
    found = sharding.placements(rule, {"x": x, "gain": gain})
    for axis in range(3):
        assert ([Shard(axis)], [Shard(axis)] * 2) in found


@pytest.mark.skipif(not contract.TRITON, reason="the CPU serves it")
def test_the_tuner_searches_its_tiles(monkeypatch, tmp_path):
    monkeypatch.setenv("VISHWAMAI_TUNING_DIR", str(tmp_path))
    monkeypatch.setenv("VISHWAMAI_CUDA_ARCH", "90")
    tuning.reload()
    (found,) = vt.tune(soft_clip, torch.randn(600), 2.0, timer=lambda run: (run(), 1.0)[1], budget=4)
    tuning.reload()
    assert (found.op, found.path) == (SOFT_CLIP.name, tmp_path / "sm_90" / f"{SOFT_CLIP.name}.json")
    assert found.trials > 1
