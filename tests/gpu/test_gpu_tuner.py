"""`vishwamai.torch.tune` and the tables of GPUs, with a timer that is told what is fast: the search, the table, who
reads it. In Triton's interpreter.
"""

import contextlib
import json
import math

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")

import contract  # noqa: E402
import vishwamai  # noqa: E402
import vishwamai.torch as vt  # noqa: E402
from triton_kernels import triton_serves  # noqa: E402
from vishwamai.core import observe, tuning  # noqa: E402
from vishwamai.core.config import kernel_config  # noqa: E402
from vishwamai.core.errors import CacheWarning, DeviceError, KernelError  # noqa: E402
from vishwamai.core.observe import record_plans  # noqa: E402

pytestmark = pytest.mark.interpreter

interpreter = pytest.mark.skipif(not contract.TRITON, reason="for Triton's interpreter: make test-gpu")


@pytest.fixture(autouse=True)
def own_tables(monkeypatch, tmp_path):
    monkeypatch.setenv("VISHWAMAI_TUNING_DIR", str(tmp_path))
    monkeypatch.setenv("VISHWAMAI_CUDA_ARCH", "90")
    tuning.reload()
    with triton_serves() if contract.TRITON else contextlib.nullcontext():
        yield tmp_path
    monkeypatch.undo()
    tuning.reload()


def current():
    """The config on trial, or None."""
    return next(iter(tuning._TRIALS.values()), None)


def distance(run):
    """Four rows and two warps are fastest; the rest by its distance."""
    run()
    config = current()
    assert config is not None
    return 1.0 + abs(math.log2(config.rows / 4)) + abs(math.log2(config.warps / 2))


def config_of(function, *args):
    with observe.recording() as found:
        function(*args)
    return found[0].choices[0].config


@interpreter
def test_the_search_and_the_table(own_tables):
    """The fastest is found, written with its evidence, used by torch and by JAX, and not searched for again."""
    x = torch.randn(12, 16)
    before = config_of(vt.rms_norm, x)
    assert (before.rows, before.warps) != (4, 2)
    (found,) = vt.tune(vt.rms_norm, x, timer=distance)
    assert (found.config.rows, found.config.warps) == (4, 2) and found.trials > 3
    assert found.seconds == 1.0 < found.heuristic_seconds
    assert found.config.backward_rows == before.backward_rows and not tuning._TRIALS
    assert found.path == own_tables / "sm_90" / "norm.json"
    ((key, entry),) = json.loads(found.path.read_text())["triton"].items()
    assert key == found.key == "rms float32 12x16" and set(entry["versions"]) == {"vishwamai", "torch", "triton"}
    assert config_of(vt.rms_norm, x) == found.config
    assert config_of(vt.rms_norm, torch.randn(13, 16)) == before
    with kernel_config(auto_optimize=False):
        assert config_of(vt.rms_norm, x) == before
    plan = record_plans(vishwamai.rms_norm, jnp.ones((12, 16)))[0]
    assert plan.choice("cuda").config == found.config

    def never(run):
        raise AssertionError("timed again")

    (known,) = vt.tune(vt.rms_norm, x, timer=never)
    assert known.trials == 0 and known.config == found.config
    (again,) = vt.tune(vt.rms_norm, x, timer=distance, again=True, budget=2)
    assert again.trials == 2


@interpreter
def test_the_backward_pass_after_the_forward_one(own_tables):
    """It begins from what was found, changes its own tiles only, and the entry says that both are done."""

    def gradient(x):
        return torch.autograd.grad(vt.rms_norm(x).sum(), x)

    def fewest(run):
        run()
        return 1.0 + current().backward_rows

    x = torch.randn(12, 16, requires_grad=True)
    (first,) = vt.tune(vt.rms_norm, x.detach(), timer=distance)
    (second,) = vt.tune(gradient, x, timer=fewest, passes="backward")
    assert second.config.backward_rows == 1 and (second.config.rows, second.config.warps) == (4, 2)
    assert json.loads(first.path.read_text())["triton"][first.key]["passes"] == ["backward", "forward"]
    assert vt.tune(gradient, x, timer=fewest, passes="both")[0].trials == 0
    with pytest.raises(KernelError, match="`passes` is 'all'; pass 'forward', 'backward', 'both'"):
        vt.tune(gradient, x, timer=fewest, passes="all")  # type: ignore[arg-type]


@interpreter
def test_wrong_and_impossible_configs_are_out(own_tables):
    from triton import OutOfResources

    def function(x):
        y = vt.rms_norm(x)
        config = current()
        if config is not None and config.rows > 16:
            raise OutOfResources(300000, 232448, "shared memory")
        return y + 1 if config is not None and config.rows == 4 else y

    (found,) = vt.tune(function, torch.randn(12, 16), timer=distance)
    assert found.config.rows != 4
    assert any("results differ by" in reason for reason in found.rejected)
    assert any("OutOfResources" in reason for reason in found.rejected)
    with pytest.raises(KernelError, match="returns no tensor by which"):
        vt.tune(lambda x: [vt.rms_norm(x)][:0], torch.randn(3, 16), timer=distance)


@interpreter
def test_a_damaged_entry_of_the_users_is_named_and_the_defaults_serve(own_tables):
    place = own_tables / "sm_90"
    place.mkdir()
    (place / "norm.json").write_text(json.dumps({"triton": {"rms float32 3x16": {"config": {"tiles": 3}}}}))
    tuning.reload()
    with pytest.warns(
        CacheWarning, match=r"tuning table of norm on sm_90: entry 'rms float32 3x16' does not fit NormGpuConfig"
    ):
        assert vt.rms_norm(torch.ones(3, 16)).shape == (3, 16)


@pytest.mark.skipif(contract.TRITON, reason="the same without Triton")
def test_keys_serve_many_lengths():
    """Attention by head width and mask, whatever the batch; decoding by about the same batch."""

    def key(heads, length, **options):
        q = jax.ShapeDtypeStruct((2, heads, length, 64), jnp.bfloat16)
        plans = record_plans(lambda q: vishwamai.flash_attention(q, q, q, **options), q)
        return tuning.key_of(plans[0].spec, "cuda")

    assert key(4, 2048, causal=True) == key(8, 5000, causal=True) == "bfloat16 d64/64 causal t2048x2048"
    assert (
        len(
            {
                key(4, 2048),
                key(4, 2048, causal=True),
                key(4, 2048, window=(64, 0)),
                key(4, 100),
                key(4, 2048, softcap=5.0),
            }
        )
        == 5
    )


@pytest.mark.skipif(contract.TRITON, reason="the CPU serves it")
def test_without_a_gpu_it_says_so():
    with pytest.raises(DeviceError, match="tune: the tensors are on the CPU"):
        vt.tune(vt.rms_norm, torch.ones(2, 4))
