"""Targets: their names, the hardware behind them, what `explain` says of one you do not have, and the one chooser that
JAX and torch share.
"""

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy
import vishwamai
from vishwamai import aot, cli, explain, kernel_config
from vishwamai.bench import matrix
from vishwamai.core import ffi, hardware, tuning
from vishwamai.core import gpu as core_gpu
from vishwamai.core import op as op_module
from vishwamai.core.config import ambient_target, cuda_architecture
from vishwamai.core.errors import DeviceError, FallbackWarning, UnsupportedError, VishwamaiError
from vishwamai.core.hardware import CPUS, GPUS
from vishwamai.core.observe import record_plans
from vishwamai.core.target import Target
from vishwamai.ops import catalogue
from vishwamai.ops.activation.api import ACTIVATION
from vishwamai.ops.matmul import packed_weight

NAMES = (*hardware.TPUS, *GPUS, *(f"cpu:{isa}" for isa in CPUS))


@pytest.mark.parametrize("name", NAMES)
def test_every_chip_has_a_target(name):
    target = Target.parse(name)
    chip = target.chip
    assert chip is not None and name in (chip.name, f"{target.platform}:{chip.name}")
    assert (target.tpu, target.gpu, target.cpu).count(None) == 2
    assert Target.parse(f" {name.upper()} ") == target and not target.local
    with kernel_config(target=name):
        assert ambient_target() == target


def test_architectures_and_a_plain_cpu():
    assert Target.parse("cpu") == Target("cpu")
    hopper = Target.parse("sm_90").gpu
    assert hopper is not None and hopper.sms is None and hopper.shared_per_sm == GPUS["h100"].shared_per_sm
    assert Target.parse("sm_90") == Target.parse("sm_90") != Target.parse("h100")
    assert (Target.parse("gfx942").platform, Target.parse("sm_89").platform) == ("rocm", "cuda")


@pytest.mark.parametrize("name", ["v99", "h1000", "sm_9", "cpu:avx3", "cpu:h100", "tpu", "v5e-", "v9:2x2", ""])
def test_an_unknown_target_is_told_what_there_is(name):
    with pytest.raises(DeviceError, match=f"{re.escape(repr(name))}.*v5e.*h100.*sm_90.*cpu:avx2"):
        Target.parse(name)


@pytest.mark.parametrize(
    "written, name",
    [
        ("V5E", "v5e"),
        (" v5e:4x4 ", "v5e:4x4"),
        ("v5e:4x2", "v5e:4x2"),
        ("v5litepod-16", "v5e:4x4"),
        ("v5litepod-1", "v5e:1x1"),
        ("v5p-8", "v5p:2x2x1"),
        ("v4-32", "v4:2x2x4"),
        ("v6e-8", "v6e:2x4"),
        ("tpu7x-128", "tpu7x:4x4x4"),
        ("TPU v6 lite", "v6e"),
        ("ironwood", "tpu7x"),
    ],
)
def test_targets_as_users_write_them(written, name):
    target = Target.parse(written)
    assert target.name == name and Target.parse(name) == target
    assert target.tpu is not None and target.tpu.name == name.partition(":")[0]


@pytest.mark.parametrize(
    "name, near",
    [
        ("v5e:0x2", "v5e:1x1, v5e:2x2"),
        ("v5p:0x1x1", "v5p:1x1x1, v5p:2x2x1"),
        ("v5e:2x2x2", "v5e:2x4"),
        ("v5e:3x5", "v5e:4x4"),
        ("v5e:6x10", "v5e:8x8"),
        ("v4:2x2", "v4:2x2x1"),
        ("v5p:4x4x6", "v5p:4x4x8, v5p:4x4x4"),
        ("v6e:64x64", "v6e:16x16"),
        ("v5litepod-3", "v5e:2x2"),
        ("v5p-7", "v5p:2x2x1"),
    ],
)
def test_a_slice_that_does_not_exist_is_answered_by_the_nearest(name, near):
    with pytest.raises(DeviceError, match=f"{name}': v.* has no slice of .*; the nearest are .*{near}"):
        Target.parse(name)


@pytest.mark.parametrize("name", ["v5e:", "v5e:x", "v5e:2x", "v5e:-1x2", "v5e:2*2", "v5e:2.0x2", "v5e:²x2"])
def test_what_is_no_topology_is_answered_by_one(name):
    with pytest.raises(DeviceError, match="is not a topology; write its sides joined by .*'v5e:2x2'"):
        Target.parse(name)


@pytest.mark.parametrize("value", [5, b"v5e", ("v5e",), 1.5, ["v5e"], hardware.TPUS["v5e"]])
def test_a_target_is_a_name(value):
    asks: tuple[Any, ...] = (Target.parse, lambda value: explain(vishwamai.silu, jnp.ones(3), target=value))
    for ask in asks:
        with pytest.raises(VishwamaiError, match='pass a name such as "v5e"|pass a string or None'):
            ask(value)


def test_explain_takes_the_targets_of_the_other_commands(capsys):
    call = ["vishwamai:silu", "--args", "f32[8,128]", "--target"]
    for name in ("v5e:4x4", "V5E", "v5litepod-16"):
        assert cli.main(["explain", *call, name]) == 0
        assert "On tpu (v5e)" in capsys.readouterr().out
    for command in ("explain", "check", "inspect"):
        assert cli.main([command, *call, "v5e:0x2"]) != 0
        said = capsys.readouterr()
        assert "v5e:1x1, v5e:2x2" in said.out + said.err


def test_slices_are_what_a_pod_has():
    for chip in hardware.TPUS.values():
        sizes = [math.prod(sides) for sides in hardware.slices(chip)]
        assert sizes == sorted(sizes) and sizes[0] == 1 and sizes[-1] <= chip.pod_chips
        assert len({tuple(sorted(sides)) for sides in hardware.slices(chip)}) == len(sizes)
        for sides in hardware.slices(chip):
            assert hardware.is_slice(chip, sides[::-1]) and hardware.nearest(chip, sides, 1) == (sides,)
        assert hardware.is_slice(chip, tuple(map(int, chip.topology.partition(":")[2].split("x"))))


COMPILE = """
import sys, jax, numpy as np
from vishwamai.aot import compile_for
from vishwamai.aot.compile import libtpu
for target in sys.argv[1].split(","):
    devices = libtpu.devices_for(target)
    split = jax.NamedSharding(jax.sharding.Mesh(np.asarray(devices, dtype=object), ("x",)), jax.P("x"))
    x = jax.ShapeDtypeStruct((len(devices) * 8, 128), "float32", sharding=split)
    assert compile_for(lambda x: x.sum(0), x, target=target).devices == len(devices)
    print(target, flush=True)
"""


@pytest.mark.long
@pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install '.[aot]'")
@pytest.mark.parametrize("chip", hardware.TPUS.values(), ids=hardware.TPUS)
def test_libtpu_compiles_for_the_slices(chip):
    """In a process of its own, since libtpu ends it on a topology that it does not know."""
    known = hardware.slices(chip)
    asked = [sides for sides in known if math.prod(sides) <= 256] + [max(known, key=max), max(known, key=min)]
    names = [f"{chip.name}:{hardware.sides_text(sides)}" for sides in dict.fromkeys(asked)]
    ended = subprocess.run(
        [sys.executable, "-c", COMPILE, ",".join(names)], capture_output=True, text=True, check=False, timeout=600
    )
    assert ended.stdout.split() == names, ended.stderr[-2000:]


@pytest.mark.parametrize("name, what", [("h100", "a GPU"), ("cpu:avx2", "a CPU")])
@pytest.mark.parametrize("command", ["check", "inspect", "tune"])
def test_commands_that_need_a_tpu_say_so(command, name, what, capsys):
    function = [] if command == "tune" else ["vishwamai:rms_norm", "--args", "f32[8,128]"]
    assert cli.main([command, *function, f"--target{'s' * (command == 'tune')}", name]) != 0
    said = capsys.readouterr()
    assert re.search(
        f"is {what}, but this compiles with libtpu, for TPUs only; pass one of v4, v5e", said.out + said.err
    )


def test_the_matrix_of_one_target():
    (operation,) = catalogue.chosen(["softmax"])
    for target, names in (
        ("h100", {"triton", "xla"}),
        ("cpu:avx2", {"native_cpu", "xla"}),
        ("v5e", {"pallas_tpu", "xla"}),
    ):
        rows = matrix.rows_of(operation, Target.parse(target))
        assert rows and all(set(row.cells) == names for row in rows)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_the_figures_of_a_gpu_are_plausible(gpu):
    figures = {k: v for k, v in dataclasses.asdict(gpu).items() if isinstance(v, (int, float))}
    assert all(value > 0 for value in figures.values())
    assert gpu.shared_per_block <= gpu.shared_per_sm < 1 << 20
    assert gpu.l2_bytes < gpu.hbm_bytes and 1 << 10 <= gpu.registers_per_sm <= 1 << 17
    assert 100 < gpu.peak_bf16 / gpu.hbm_bandwidth < 500  # FLOP for every byte
    assert gpu.peak_f32 < gpu.peak_tf32 < gpu.peak_bf16 <= gpu.peak_int8
    assert gpu.peak("float8_e4m3fn") >= gpu.peak("bfloat16") == gpu.peak("float16") > gpu.peak("float32")


def test_devices_are_told_apart():
    assert len({gpu.name for gpu in GPUS.values()} | set(hardware.TPUS) | set(CPUS)) == len(NAMES)
    for name, architecture, found in (
        ("NVIDIA H100 80GB HBM3", "sm_90", "h100"),
        ("NVIDIA H200", "sm_90", "h200"),
        ("NVIDIA H100 PCIe", "sm_90", "sm_90"),  # fewer multiprocessors, slower memory
        ("NVIDIA A100-SXM4-80GB", "sm_80", "a100"),
        ("NVIDIA A100-SXM4-40GB", "sm_80", "sm_80"),
        ("NVIDIA B200", "sm_100", "b200"),
        ("NVIDIA GB200", "sm_100", "sm_100"),
        ("AMD Instinct MI300X", "gfx942", "mi300x"),
        ("NVIDIA GeForce RTX 4090", "sm_89", "sm_89"),
    ):
        assert hardware.gpu_for(name, architecture).name == found
    assert core_gpu.SMS == GPUS["h100"].sms == GPUS["h200"].sms
    for gpu in GPUS.values():
        assert hardware.architecture(gpu.architecture).shared_per_block == gpu.shared_per_block


def test_the_native_module_has_the_same_instruction_sets():
    source = (Path(ffi.__file__).parent / "cpp" / "isa.h").read_text()
    numbered = re.search(r"enum class Isa : int \{([^}]*)\}", source)
    assert numbered is not None
    assert re.findall(r"(\w+) = \d", numbered[1]) == list(CPUS) == list(ffi.ISAS)
    for architecture in ("x86_64", "aarch64"):
        cpus = [cpu for cpu in CPUS.values() if cpu.architecture in (None, architecture)]
        widths = [(cpu.vector_bytes, cpu.bfloat16_products, cpu.int8_products, cpu.tile_products) for cpu in cpus]
        assert widths == sorted(widths)  # each contains those before it


def test_the_local_target_is_this_machine():
    target = ambient_target()
    assert (target.platform, target.framework, target.local) == ("cpu", "jax", True)
    assert target.chip is ffi.chip()
    other = target.on("tpu")
    assert (other.platform, other.chip, other.local) == ("tpu", None, True)
    assert target.on("cpu") is target.on(None) is target


def test_kernels_for_nvidia_are_compiled_for_the_target(monkeypatch):
    monkeypatch.delenv("VISHWAMAI_CUDA_ARCH", raising=False)
    assert cuda_architecture() == "sm_90"
    with kernel_config(target="b200"):
        assert cuda_architecture() == "sm_100"
        monkeypatch.setenv("VISHWAMAI_CUDA_ARCH", "80")
        assert cuda_architecture() == "sm_80"


def without_tools(monkeypatch):
    """This machine has neither triton nor the native module."""
    from vishwamai.core import triton_launch

    monkeypatch.setattr(triton_launch, "why_not", lambda: "triton is not installed.")
    monkeypatch.setattr(ffi, "_load", lambda: (None, "the native CPU kernels are not built."))


@pytest.mark.parametrize("target, platform, runs", [("h100", "cuda", "triton"), ("cpu:avx2", "cpu", "native_cpu")])
def test_explain_a_target_that_is_not_here(target, platform, runs, monkeypatch):
    """What would run there does not depend on what is installed here."""
    without_tools(monkeypatch)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 128), (128, 512)))
    found = explain(lambda x, w: vishwamai.rms_norm(vishwamai.gemm(x, w)), x, w, target=target)
    assert (found.platform, found.chip) == (platform, target.removeprefix("cpu:"))
    assert str(found).startswith(f"On {platform} ({found.chip}):")
    assert [call.runs for call in found.calls] == [runs, runs]
    for call in found.calls:
        reasons = {v.implementation: v.reason for v in call.verdicts}
        assert reasons["pallas_tpu"] == "is for tpu" and reasons["xla"].startswith("could serve, but")
    here = explain(vishwamai.rms_norm, x)
    assert here.calls[0].runs == "xla"
    assert "not built" in str(here) and "not installed" in str(here)


def test_explain_says_why_a_kernel_is_not_chosen_for_jax():
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    (call,) = explain(vishwamai.silu, x, target="h100").calls
    assert call.runs == "xla" and "v5e" not in str(call)
    (verdict,) = (v for v in call.verdicts if v.implementation == "triton")
    assert verdict.reason.startswith("could serve, but only if it is asked for by name: XLA's own code")
    (by_name,) = explain(lambda x: vishwamai.silu(x, implementation="triton"), x, target="h100").calls
    assert by_name.runs == "triton"


def test_explain_an_amd_gpu():
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    found = explain(vishwamai.rms_norm, x, target="mi300x")
    assert (found.platform, found.chip, found.calls[0].runs) == ("rocm", "mi300x", "xla")
    assert "is for cuda" in str(found)


def test_a_packed_weight_is_for_one_instruction_set():
    weight = packed_weight.pack_weight(jnp.ones((64, 64), jnp.bfloat16), isa="avx2")
    x = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)
    runs = {
        isa: explain(lambda x: vishwamai.gemm(x, weight), x, target=f"cpu:{isa}").calls[0] for isa in ("avx2", "avx512")
    }
    assert runs["avx2"].runs != runs["avx512"].runs
    assert "in the order of avx2, and the kernels here use avx512" in str(runs["avx512"])


def test_jax_and_torch_choose_by_one_rule():
    (plan,) = record_plans(vishwamai.silu, jax.ShapeDtypeStruct((8, 128), jnp.float32))
    for platform, framework, runs in (
        ("cuda", "torch", "triton"),
        ("cuda", "jax", "xla"),
        ("cpu", "torch", "native_cpu"),
    ):
        choice = ACTIVATION.choose(plan.spec, Target(platform, framework=framework))
        assert (choice.implementation.name, choice.platform, choice.target.framework) == (runs, platform, framework)
    with pytest.raises(UnsupportedError, match="'pallas_tpu' is for tpu|there is no implementation 'pallas_tpu'"):
        ACTIVATION.choose(plan.spec, Target("cuda", framework="torch"), implementation="pallas_tpu")
    with pytest.raises(UnsupportedError, match="'xla' is JAX code, and the arrays are torch's on cuda"):
        ACTIVATION.choose(plan.spec, Target("cuda", framework="torch"), implementation="xla")


def test_a_fallback_is_reported_in_one_way():
    odd = toy.ToySpec(toy.Operands(*(jax.ShapeDtypeStruct((1, 1, 7), "float32"),) * 3), True)
    for framework in ("jax", "torch"):
        op_module._warn_once.cache_clear()
        choice = toy.TOY.choose(odd, Target("cpu", framework=framework))
        with pytest.warns(FallbackWarning, match="toy: 'rows_cpu' declined, so 'matrix' runs on cpu: `q` has 7"):
            toy.TOY.report_fallback(choice)
        with kernel_config(strict=True), pytest.raises(UnsupportedError, match="strict mode"):
            toy.TOY.report_fallback(choice)


@pytest.mark.parametrize("name, folder", [("v5e", "v5e"), ("h100", "sm_90"), ("sm_80", "sm_80"), ("mi300x", "gfx942")])
def test_tuned_configs_go_by_the_target(name, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("VISHWAMAI_TUNING_DIR", str(tmp_path))
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "toy.json").write_text('{"rows": {"2x4x8": {"config": {"rows": 3}}}}')
    tuning.reload()
    spec = toy.ToySpec(toy.Operands(*(jax.ShapeDtypeStruct((2, 4, 8), np.float32),) * 3))
    for other in NAMES:
        found = tuning.lookup("toy", "rows", Target.parse(other), spec, toy.ToyConfig)
        same = tuning.table_of(Target.parse(other)) == folder
        assert found == (toy.ToyConfig(3) if same else None)
    assert tuning.lookup("toy", "rows", Target.parse(name), spec, toy.ToyConfig) == toy.ToyConfig(3)
    tuning.reload()
