"""The kernels for 64-bit Arm, which `make arm64` compiles: each instruction set's numbers under an emulator, the choice
of the set on processors with and without it, and the instructions in the objects.
"""

import collections
import os
import re
import shutil
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from vishwamai.core.hardware import CPUS
from vishwamai.ops.matmul import packed_weight

BUILD = Path(__file__).parents[2] / "build" / "arm64"
CHECK = BUILD / "kernels_check"
EMULATOR, DISASSEMBLER = "qemu-aarch64", "aarch64-linux-gnu-objdump"
MISSING = [name for name in (EMULATOR, DISASSEMBLER) if shutil.which(name) is None] + [CHECK] * (not CHECK.exists())

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(MISSING), reason=f"there is no {' and no '.join(map(str, MISSING))}: see `make arm64`"),
]

PROCESSORS = {"cortex-a72": "generic", "neoverse-n1": "neon_dot", "max": "neon_bf16"}
"""Processors of the emulator, each with the greatest set that it has: Armv8.0, Armv8.2 with dot products, all."""
ISAS = [name for name, cpu in CPUS.items() if cpu.architecture in (None, "aarch64")]


def emulated(*words, processor="max", **environment):
    command = [EMULATOR, "-cpu", processor, str(CHECK), *words]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_processor_gets_the_greatest_set_that_it_has(processor):
    environment = {name: value for name, value in os.environ.items() if name != "VISHWAMAI_CPU_ISA"}
    command = [EMULATOR, "-cpu", processor, str(CHECK), "isa"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [PROCESSORS[processor]] and not result.stderr


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("isa", CPUS)
def test_the_variable_forces_a_lesser_set_only(processor, isa):
    """Sets beyond those of the processor, and sets of another architecture, are declined with a reason."""
    best = PROCESSORS[processor]
    result = emulated("isa", processor=processor, VISHWAMAI_CPU_ISA=isa)
    if isa in ISAS[: ISAS.index(best) + 1]:
        assert result.stdout.split() == [isa] and not result.stderr
    else:
        assert result.stdout.split() == [best]
        assert "asks for an instruction set that this machine or build does not have" in result.stderr


@pytest.mark.parametrize("isa", ISAS)
def test_the_numbers_of_every_set(isa):
    """On the least processor that has the set, so that an instruction beyond it would stop the program."""
    processor = next(name for name, best in PROCESSORS.items() if best == isa)
    result = emulated(processor=processor)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert result.stdout.splitlines()[-1] == f"kernels_check: ok ({isa})"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", packed_weight.DTYPES)
def test_a_packed_weight_has_the_order_of_pack_weight(isa, dtype):
    k, n = 70, 33
    result = emulated("packed", dtype, str(k), str(n), VISHWAMAI_CPU_ISA=isa)
    weight = jnp.asarray((np.arange(k * n) * 7 % 251 - 125).reshape(k, n), dtype)
    want = packed_weight.permuted(weight, False, isa)
    np.testing.assert_array_equal(np.array(result.stdout.split(), int), np.asarray(want, int).ravel())


def instructions(target):
    """{name of the source: {demangled function: the set of its instructions}} of the objects of a CMake target."""
    sources = {}
    for path in sorted((BUILD / "CMakeFiles" / f"{target}.dir").rglob("*.cc.o")):
        command = [DISASSEMBLER, "-d", "-C", "--no-show-raw-insn", str(path)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        functions = collections.defaultdict(set)
        for line in listing.splitlines():
            if (start := re.match(r"[0-9a-f]+ <(.*)>:$", line)) is not None:
                name = start[1]
            elif (word := re.match(r"\s+[0-9a-f]+:\s+([a-z][\w.]*)", line)) is not None:
                functions[name].add(word[1])
        sources[path.name.removesuffix(".cc.o")] = functions
    return sources


PRODUCTS = {"sdot", "udot", "usdot", "smmla", "ummla", "usmmla", "bfdot", "bfmmla"}
"""Instructions that the sets add."""


def everything(sources):
    """All instructions of some sources."""
    return {word for functions in sources.values() for words in functions.values() for word in words}


def functions_with(instruction, functions):
    return {name for name, words in functions.items() if instruction in words}


def test_the_baseline_has_none_of_the_instructions():
    seen = set()
    for kind in ("products", "attention", "rows"):
        seen |= everything(instructions(f"_cpu_{kind}_generic"))
    assert "fmla" in seen and not PRODUCTS & seen


def test_dot_products_are_where_they_should_be():
    sources = instructions("_cpu_products_neon_dot")
    assert set(sources) == {"cpu_matmul.isa", "engine.isa", "quantized.isa"}
    # every product of int8, and every form of a weight in bytes or halves of bytes that is not exact
    int8 = functions_with("sdot", sources["cpu_matmul.isa"])
    assert int8 and all("InRegisters" in name and "ArmDotEngine<signed char>" in name for name in int8)
    forms = {name for name in sources["quantized.isa"] if re.search(r"::multiply<\d", name)}
    assert len(forms) >= 12 and forms == functions_with("sdot", sources["quantized.isa"])
    assert PRODUCTS & everything(sources) == {"sdot"}


def test_matrix_products_are_where_they_should_be():
    sources = instructions("_cpu_products_neon_bf16")
    engine = functions_with("bfmmla", sources["engine.isa"])
    assert engine and all("ArmMatrixEngine<unsigned short>::" in name for name in engine)
    matmul = sources["cpu_matmul.isa"]
    assert any("ArmMatrixEngine<signed char>::" in name for name in functions_with("smmla", matmul))
    assert functions_with("bfdot", matmul)  # few rows times columns
    assert not functions_with("sdot", matmul)
    for source in ("cpu_matmul.isa", "cpu_gated.isa", "cpu_grouped.isa", "cpu_loss.isa", "cpu_sparse.isa"):
        assert calls("ArmMatrixEngine<unsigned short>::multiply", "_cpu_products_neon_bf16", source), source
    for source in ("cpu_forward.isa", "cpu_backward.isa", "cpu_bias.isa"):
        assert calls("ArmMatrixEngine<unsigned short>::multiply", "_cpu_attention_neon_bf16", source), source
    forms = {name for name in sources["quantized.isa"] if re.search(r"::multiply<\d", name)}
    one_row = {name for name in forms if "multiply<1," in name}
    assert one_row and one_row == functions_with("usdot", sources["quantized.isa"])
    assert forms - one_row == functions_with("usmmla", sources["quantized.isa"])


def calls(function, target, source):
    """Whether an object calls a function of another."""
    (path,) = (BUILD / "CMakeFiles" / f"{target}.dir").rglob(f"{source}.cc.o")
    listing = subprocess.run([DISASSEMBLER, "-r", "-C", str(path)], capture_output=True, text=True, check=True).stdout
    return any("R_AARCH64_CALL26" in line and function in line for line in listing.splitlines())
