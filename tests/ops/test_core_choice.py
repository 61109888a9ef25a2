"""How an implementation and its config are chosen: fallbacks, strict mode, explain, the ambient config, tuning tables,
errors.
"""

import dataclasses
import json
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy
import vishwamai
from vishwamai.aot.tuning import tables
from vishwamai.core import caches, execute, tuning
from vishwamai.core import op as op_module
from vishwamai.core.config import KernelConfig, current_config, kernel_config
from vishwamai.core.errors import (
    CacheWarning,
    DeviceError,
    FallbackWarning,
    KernelError,
    ShapeError,
    UnsupportedError,
    VishwamaiError,
)
from vishwamai.core.explain import explain
from vishwamai.core.hardware import TPUS
from vishwamai.core.target import Target


@pytest.fixture(autouse=True)
def fresh():
    """Each test sees its own warnings, traces and tuning tables."""
    op_module._warn_once.cache_clear()
    jax.clear_caches()
    toy.SEEN.clear()
    tuning.reload()
    yield
    tuning.reload()


def test_fallback_warns_once_with_its_reason():
    args = toy.inputs(length=7)
    with pytest.warns(FallbackWarning, match=r"toy: 'rows_cpu' declined, so 'matrix' runs on cpu: `q` has 7 positions"):
        got = toy.toy(*args, even_only=True)
    np.testing.assert_allclose(got, toy.truth(*args), rtol=1e-5, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        toy.toy(*args, even_only=True)
        jax.grad(lambda *a: toy.toy(*a, even_only=True).sum())(*args)
        toy.toy(*toy.inputs(length=8), even_only=True)  # served, nothing to warn about
    with pytest.warns(FallbackWarning, match="9 positions"):  # another reason is another warning
        toy.toy(*toy.inputs(length=9), even_only=True)


def test_the_warning_points_at_the_line_that_called():
    with pytest.warns(FallbackWarning) as caught:
        toy.toy(*toy.inputs(length=7), even_only=True)
    assert caught[0].filename == toy.__file__  # the nearest line that is neither the library's nor jax's


def test_strict_raises():
    args = toy.inputs(length=7)
    with kernel_config(strict=True):
        with pytest.raises(UnsupportedError, match=r"toy: 'rows_cpu' declined.*7 positions.*strict"):
            toy.toy(*args, even_only=True)
        toy.toy(*toy.inputs(length=8), even_only=True)
        # What was asked for by name is no fallback.
        toy.toy(*args, even_only=True, implementation="matrix")


def test_strict_is_seen_through_jit():
    """A program traced while falling back was allowed does not answer for one where it is not."""
    args = toy.inputs(length=7)
    jitted = jax.jit(lambda *a: toy.toy(*a, even_only=True))
    with pytest.warns(FallbackWarning):
        jitted(*args)
    with kernel_config(strict=True), pytest.raises(UnsupportedError, match="strict"):
        jitted(*args)
    jitted(*args)


def test_another_platform_declining_is_not_a_fallback():
    """On the CPU nobody is warned of what a TPU kernel declines."""
    only_tpu = op_module.Op("toy", (toy.implementation("rows_tpu", "tpu"), toy.MATRIX), toy.SPLIT)
    spec = toy.ToySpec(toy.Operands(*(jax.ShapeDtypeStruct((1, 1, 7), "float32"),) * 3), True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = only_tpu.plan(spec)
    assert plan.choices[0].declined == (("rows_tpu", "`q` has 7 positions, an odd number."),)
    with kernel_config(target="v5e"), pytest.warns(FallbackWarning, match="runs on tpu"):
        only_tpu.plan(spec)


def test_a_heuristic_is_asked_once_for_a_spec_and_a_target():
    """A search of tiles takes longer than a small call; another chip, and another shape, are other questions."""
    asked = []
    rows = toy.implementation("rows_tpu", "tpu")
    heuristic = rows.heuristic
    assert heuristic is not None

    def counted(spec, target):
        asked.append((spec.operands.q.shape, target.chip.name))
        return heuristic(spec, target)

    op = op_module.Op("toy", (dataclasses.replace(rows, heuristic=counted), toy.MATRIX), toy.SPLIT)
    specs = [toy.ToySpec(toy.Operands(*(jax.ShapeDtypeStruct((1, 1, n), "float32"),) * 3), False) for n in (6, 8)]
    configs = []
    for chip in ("v5e", "v5e", "v4"):
        with kernel_config(target=chip):
            configs += [op.plan(spec).choices[0].config for spec in specs for _ in range(3)]
    assert asked == [((1, 1, n), chip) for chip in ("v5e", "v4") for n in (6, 8)]
    assert configs == [heuristic(spec, Target("tpu", TPUS["v5e"])) for spec in specs for _ in range(3)] * 3
    with kernel_config(target="v5e", block_size=4):  # what is asked for is made of the heuristic's
        assert op.plan(specs[0]).choices[0].config != configs[0]


def test_by_name():
    args = toy.inputs(length=7)
    for name in ("rows_cpu", "matrix"):
        np.testing.assert_allclose(toy.toy(*args, implementation=name), toy.truth(*args), rtol=1e-5, atol=1e-5)
    with pytest.raises(
        UnsupportedError, match="no implementation 'rows'; choose one of 'rows_cpu', 'rows_tpu', 'matrix'"
    ):
        toy.toy(*args, implementation="rows")
    with pytest.raises(UnsupportedError, match=r"'rows_cpu' cannot serve this call: `q` has 7.*These can: 'matrix'"):
        toy.toy(*args, even_only=True, implementation="rows_cpu")


def test_explain_lists_every_implementation():
    args = toy.inputs(length=8)

    def both(q, k, weight):
        y = toy.toy(q, k, weight)
        return toy.toy(y, k, weight, implementation="matrix").sum()

    for function in (both, jax.jit(both), jax.grad(both)):
        found = explain(function, *args)
        assert found.platform == "cpu" and len(found.calls) == 2
        assert [call.runs for call in found.calls] == ["rows_cpu", "matrix"]
        for call in found.calls:
            assert [v.implementation for v in call.verdicts] == ["rows_cpu", "rows_tpu", "matrix"]
            assert [v.platform for v in call.verdicts] == ["cpu", "tpu", "any"]
            assert all(v.reason for v in call.verdicts)
    text = str(explain(both, *args))
    assert "'rows_cpu' is preferred" in text and "'matrix' was asked for" in text and "is for tpu" in text


def test_explain_tells_who_declines_and_targets():
    args = toy.inputs(length=7)
    found = explain(lambda *a: toy.toy(*a, even_only=True), *args, target="v5p")
    assert (found.platform, found.chip) == ("tpu", "v5p")
    (call,) = found.calls
    assert call.runs == "matrix"
    reasons = {v.implementation: v.reason for v in call.verdicts}
    assert reasons["rows_tpu"] == "declines: `q` has 7 positions, an odd number."
    assert reasons["rows_cpu"].startswith("is for cpu")
    assert "calls no vishwamai operation" in str(explain(jnp.sin, args[0]))


def test_explain_answers_in_strict_mode_and_does_not_warn():
    """Who asks is told by the answer; the one warning is kept for the run."""
    args = toy.inputs(length=7)
    with kernel_config(strict=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = explain(lambda *a: toy.toy(*a, even_only=True), *args)
    assert found.calls[0].runs == "matrix"
    with pytest.warns(FallbackWarning):
        toy.toy(*args, even_only=True)


def test_config_changes_retrace():
    """A function jitted under one ambient config runs under the next with that one's tiles, and comes back."""
    args = toy.inputs(length=8)
    jitted = jax.jit(toy.toy)

    def rows_of_a_trace():
        toy.SEEN.clear()
        jitted(*args)
        return {config.rows for _, _, config in toy.SEEN}

    assert rows_of_a_trace() == {1}
    assert rows_of_a_trace() == set()  # cached
    with kernel_config(block_size=4):
        assert rows_of_a_trace() == {4}
        with kernel_config(block_size=2):
            assert rows_of_a_trace() == {2}
        assert rows_of_a_trace() == set()
    assert rows_of_a_trace() == set()


def test_ambient_implementation():
    args = toy.inputs(length=8)
    jitted = jax.jit(toy.toy)
    jitted(*args)
    toy.SEEN.clear()
    with kernel_config(implementation="matrix"):
        jitted(*args)
        assert not toy.SEEN
        assert explain(toy.toy, *args).calls[0].runs == "matrix"
        toy.toy(*args, implementation="rows_cpu")  # the call itself has the last word
        assert toy.SEEN
    with vishwamai.kernel_config(implementation="xla_chunked"):
        assert explain(toy.toy, *args).calls[0].runs == "rows_cpu"


def test_config_of_the_backward_pass_is_the_forwards():
    """The gradient runs under the config in force where the function was called."""
    args = toy.inputs(length=8)
    with kernel_config(block_size=4):
        _, pull = jax.vjp(toy.toy, *args)
    toy.SEEN.clear()
    pull(jnp.ones((2, 4, 8)))
    assert {config.rows for _, _, config in toy.SEEN} == {4}


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"block_size": 0}, "`block_size` is 0"),
        ({"block_size": "big"}, "`block_size` is 'big'"),
        ({"precision": "exact"}, "`products` is 'exact'.*default, high, highest"),
        ({"block_sizes": 128}, "unknown field 'block_sizes'; the fields are .*block_size"),
    ],
)
def test_illegal_configs(fields, text):
    with pytest.raises(KernelError, match=text), kernel_config(**fields):
        pass
    assert current_config() == KernelConfig()


def test_unknown_target():
    with pytest.raises(DeviceError, match="v5e"), kernel_config(target="v99"):
        pass


def test_wrong_config_type():
    with pytest.raises(KernelError, match="toy: `config` is a str; pass one of ToyConfig, a block size, or None"):
        toy.toy(*toy.inputs(), config="fast")


def config_of(**how):
    """The config that the TPU kernel of the toy gets on v5e."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 4, 8), (2, 4, 8), (1, 4))]
    plan = toy.TOY.plan(toy.ToySpec(toy.Operands(*arrays)), **how)
    return next(choice.config for choice in plan.choices if choice.platform == "tpu")


def write(folder, rows, key="2x4x8", implementation="rows_tpu"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "toy.json").write_text(json.dumps({implementation: {key: {"config": {"rows": rows}, "us": 3.5}}}))
    tuning.reload()


def test_tuning_order(tmp_path, monkeypatch):
    """explicit > ambient > user > shipped > heuristic."""
    user, package = tmp_path / "user", tmp_path / "package"
    monkeypatch.setenv("VISHWAMAI_TUNING_DIR", str(user))
    monkeypatch.setattr(tuning.resources, "files", lambda name: package)
    with kernel_config(target="v5e"):
        assert config_of() == toy.ToyConfig(1)
        write(package / "data" / "tuning" / "v5e", 2)
        assert config_of() == toy.ToyConfig(2)
        write(user / "v5e", 3)
        assert config_of() == toy.ToyConfig(3)
        with kernel_config(block_size=4):
            assert config_of() == toy.ToyConfig(4)
            assert config_of(config=5) == toy.ToyConfig(5)
            assert config_of(config=toy.ToyConfig(6)) == toy.ToyConfig(6)
        with kernel_config(auto_optimize=False):
            assert config_of() == toy.ToyConfig(1)
        write(user / "v5e", 3, key="another spec")
        assert config_of() == toy.ToyConfig(2)
        write(user / "v5e", 3, implementation="another implementation")
        assert config_of() == toy.ToyConfig(2)
    with kernel_config(target="v6e"):
        assert config_of() == toy.ToyConfig(1)
    assert config_of() == toy.ToyConfig(1)  # no chip known


def test_a_damaged_table_of_the_user_is_left_out(tmp_path, monkeypatch):
    """With a warning, once; the next tuning writes it anew. Then the shipped table serves, or the heuristic."""
    user, package = tmp_path / "user", tmp_path / "package"
    monkeypatch.setenv("VISHWAMAI_TUNING_DIR", str(user))
    monkeypatch.setattr(tuning.resources, "files", lambda name: package)
    write(package / "data" / "tuning" / "v5e", 2)
    table = user / "v5e" / "toy.json"
    table.parent.mkdir(parents=True)
    caches.warn_once.cache_clear()
    with kernel_config(target="v5e"):
        for damage in ("{", "[]", '{"rows_tpu": 3}', "\xff"):
            table.write_bytes(damage.encode("latin-1"))
            tuning.reload()
            with pytest.warns(CacheWarning, match=r"toy\.json is damaged .* it is now toy\.json\.damaged"):
                assert config_of() == toy.ToyConfig(2)
            assert not table.exists() and table.with_name("toy.json.damaged").exists()
            caches.warn_once.cache_clear()
        tables.write(user, "v5e", "toy", "rows_tpu", "2x4x8", {"config": {"rows": 3}})
        tuning.reload()
        assert config_of() == toy.ToyConfig(3)
        table.write_text('{"rows_tpu": {"2x4x8": {"config": {"columns": 1}}}}')
        tuning.reload()
        with pytest.warns(CacheWarning, match="entry '2x4x8' does not fit ToyConfig.*columns"):
            assert config_of() == toy.ToyConfig(2)


def test_a_damaged_table_that_ships_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("VISHWAMAI_TUNING_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(tuning.resources, "files", lambda name: tmp_path)
    folder = tmp_path / "data" / "tuning" / "v5e"
    folder.mkdir(parents=True)
    (folder / "toy.json").write_text("{")
    with kernel_config(target="v5e"):
        with pytest.raises(KernelError, match=r"toy\.json is not a table"):
            config_of()
        (folder / "toy.json").write_text('{"rows_tpu": {"2x4x8": {"config": {"columns": 1}}}}')
        tuning.reload()
        with pytest.raises(KernelError, match="entry '2x4x8' does not fit ToyConfig.*columns"):
            config_of()


def test_error_hierarchy():
    """A caller can catch kernel and device errors in turn, and the built-in kinds that they stand for."""
    assert issubclass(KernelError, VishwamaiError) and issubclass(DeviceError, VishwamaiError)
    assert not issubclass(DeviceError, KernelError) and not issubclass(KernelError, DeviceError)
    assert issubclass(ShapeError, KernelError) and issubclass(ShapeError, ValueError)
    assert issubclass(UnsupportedError, KernelError) and issubclass(UnsupportedError, NotImplementedError)
    assert issubclass(DeviceError, RuntimeError)
    for name in ("VishwamaiError", "KernelError", "ShapeError", "UnsupportedError", "DeviceError", "FallbackWarning"):
        assert getattr(vishwamai, name).__name__ == name


def test_chips_by_name():
    assert TPUS["v5e"].name == "v5e"
    with pytest.raises(DeviceError, match="v4.*v5e.*v5p.*v6e.*tpu7x"):
        Target.parse_tpu("v3")


NO_ARRAY: Any = None
NO_NUMBERS: Any = "abc"


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda x: vishwamai.rms_norm(NO_ARRAY), "rms_norm: `x` is None; pass an array"),
        (lambda x: vishwamai.gemm(x, NO_NUMBERS), "gemm: `b` is of type str, which cannot be read as numbers"),
        (lambda x: vishwamai.gemm(x, x, out_dtype="int7"), "gemm: `out_dtype` is 'int7'; pass a dtype"),
        (
            lambda x: vishwamai.moe_dispatch(x, NO_ARRAY),
            "moe_dispatch: `routing` is of type NoneType; pass what `moe_routing`",
        ),
        (
            lambda x: vishwamai.moe_routing(x, x, axis_name="e"),
            r"`axis_name` is \('e',\), which this call is not mapped over",
        ),
    ],
)
def test_what_is_no_argument_is_named(call, text):
    with pytest.raises(ShapeError, match=text):
        call(jnp.ones((8, 8)))


def test_a_torch_tensor_is_sent_to_torch():
    """Read as numbers it would lose its gradient."""
    torch = pytest.importorskip("torch")
    with pytest.raises(ShapeError, match="rms_norm: `x` is a torch tensor; call `vishwamai.torch.rms_norm`"):
        vishwamai.rms_norm(torch.ones(2, 8))


def test_operands_on_different_devices():
    x, w = (jax.device_put(jnp.ones((8, 8)), device) for device in jax.devices()[:2])
    with pytest.raises(DeviceError, match=r"gemm: `a` is on .*:0, but `b` on .*:1; bring them together.*a\.sharding"):
        vishwamai.gemm(x, w)


def test_another_platforms_kernel_by_name():
    x = jnp.ones((8, 128))
    for name, platform in (("pallas_tpu", "tpu"), ("triton", "cuda")):
        with pytest.raises(UnsupportedError, match=f"'{name}'.*(is for {platform}, and this program is|not installed)"):
            vishwamai.rms_norm(x, implementation=name)


def test_kernels_of_one_platform_alone():
    """`only_for` traces no kernel of another platform, changes no result, and leaves the same function free to be
    lowered for every platform after it.
    """
    x, y = jnp.ones((256, 256)), jnp.full((256, 256), 2.0)
    function = jax.jit(lambda x, y: vishwamai.gemm(x, y))
    with execute.only_for("cpu"):
        alone = str(jax.make_jaxpr(function)(x, y))
        got = function(x, y)
        within = function.lower(x, y).as_text()
    assert "platform_index" not in alone and "pallas_call" not in alone
    every = str(jax.make_jaxpr(function)(x, y))
    assert "platform_index" in every and "pallas_call" in every
    np.testing.assert_array_equal(got, function(x, y))
    kernel = "vishwamai_matmul" if "vishwamai_matmul" in function.lower(x, y).as_text() else "dot_general"
    assert kernel in within
    with execute.only_for("cpu"):
        function(x, y)
    assert "tpu_custom_call" in function.trace(x, y).lower(lowering_platforms=("tpu",)).as_text()


def test_the_platform_that_arrays_say():
    """Arrays of JAX's default backend say it; shapes, host arrays and traced ones do not."""
    x, here = jnp.ones(3), jax.default_backend()
    assert execute.platform_of({"a": x, "b": np.ones(3)}) == {"gpu": "cuda"}.get(here, here)
    assert execute.platform_of((np.ones(3), jax.ShapeDtypeStruct((3,), "float32"))) is None
    seen = []
    jax.jit(lambda x: seen.append(execute.platform_of(x)))(x)
    assert seen == [None]
