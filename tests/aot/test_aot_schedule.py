"""Whole programs: recorded dumps whose counts are known beforehand, `inspect` from end to end, the roofline, the words
and the page.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aot_programs as programs
from vishwamai import aot
from vishwamai.aot.compile.child import Child, Ended
from vishwamai.aot.compile.known import scalar_operands
from vishwamai.aot.compile.traced import Program
from vishwamai.aot.schedule import dump, inspection
from vishwamai.aot.schedule.roofline import roofline
from vishwamai.aot.schedule.simulate import Simulator, Source, simulate
from vishwamai.core.errors import DeviceError, KernelError, ShapeError, UnsupportedError
from vishwamai.core.hardware import TPUS

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install '.[aot]'")
FLOPS = 2 * 512 * 1024 * 256
BLOCK = 256 * 256 * 2


def recorded(name, target, known=None):
    return simulate(dump.read_sources(programs.RECORDED / f"{name}-{target}"), TPUS[target], known)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("target", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_matmul_counts_are_those_of_its_grid(target):
    found = recorded("matmul", target)
    assert found.flops == {"bf16": FLOPS}
    # x and y blocks for each of the 8 steps, 2 output blocks; on TPU7x x and y are brought to VMEM whole, once
    expected = 2 * 8 * BLOCK + 2 * BLOCK if target != "tpu7x" else (512 * 1024 + 1024 * 256 + 512 * 256) * 2
    assert found.hbm_bytes == expected
    assert not found.unknown
    kernel = next(program for program in found.programs if program.name == "matmul.1")
    assert kernel.calls == 1
    steps = 8 // TPUS[target].cores_per_device
    assert steps in {block.passes for block in kernel.blocks}
    assert kernel.bundles == sum(block.length * block.passes for block in kernel.blocks)
    assert kernel.cycles >= kernel.bundles + kernel.matrix_stall
    assert kernel.cycles == pytest.approx(kernel.bundles + kernel.dma_wait + kernel.matrix_stall)
    # busy cycles of one unit, if the work were spread evenly: flops / (units x 2 x size^2 x rows a cycle)
    one = TPUS[target]
    rows = 1 if one.generation < 6 else 2
    even = FLOPS / one.cores_per_device / (one.mxus * 2 * one.mxu_size**2 * rows)
    assert even <= kernel.matrix <= kernel.cycles


def test_megacore_runs_both_cores():
    found = recorded("matmul", "v4")
    assert len(found.core_cycles) == 2
    kernel = next(program for program in found.programs if program.name == "matmul.1")
    assert kernel.flops["bf16"] == FLOPS / 2
    assert kernel.hbm_bytes == found.hbm_bytes / 2


def test_known_tables_are_followed():
    found = recorded("gather", "v5e", {"gather": [{0: programs.TABLE}]})
    block = 64 * 128 * 4
    runs = 1 + np.count_nonzero(np.diff(programs.TABLE))
    assert found.hbm_bytes == (runs + programs.TABLE.size) * block + 512  # and the table itself, padded
    assert not found.unknown
    blind = recorded("gather", "v5e")
    assert blind.hbm_bytes > found.hbm_bytes
    assert any("depends on data" in what for what in blind.unknown)


def test_a_kernel_that_takes_its_place_from_a_loop_and_a_division_is_followed():
    found = recorded("turns", "v5e")
    assert not found.unknown
    turn = next(program for program in found.programs if program.name.startswith("turn."))
    assert turn.calls == programs.TURNS
    assert found.looped
    turns = [(n, np.arange(programs.TURN_STEPS)) for n in range(1, 1 + programs.TURNS)]
    fetched = sum(1 + np.count_nonzero(np.diff(places)) for n, g in turns for places in (g // n, g % n))
    assert turn.hbm_bytes == fetched * 64 * 128 * 4


def test_an_operand_that_stays_on_the_chip_is_not_read_again():
    """Each pass alone reads and writes 32 MiB; the second reads the first's result where it lies, while that is copied
    out.
    """
    found = recorded("chain", "v5e")
    one = 16384 * 1024 * 2
    moved = {program.name.partition(".")[0]: program.hbm_bytes for program in found.programs}
    assert (moved["first"], moved["second"], moved["TLP"] - moved["TLP"] % one) == (one, one, one)
    assert not found.looped
    assert found.dma_wait + found.cycles > 3 * one / (TPUS["v5e"].hbm_bandwidth * 0.9) * TPUS["v5e"].clock


def test_a_missing_program_is_said():
    sources = {name: s for name, s in dump.read_sources(programs.RECORDED / "gather-v5e").items() if name == "TLP"}
    assert dict(simulate(sources, TPUS["v5e"]).unknown) == {"program gather.1 is not in the dump": 1}
    assert simulate({"empty": Source("0 : {}", "")}, TPUS["v5e"]).cycles == 1


def test_calls_are_told_apart_by_their_numbers():
    one, other = {0: np.array([1])}, {0: np.array([2])}
    top = Source(
        (
            "0 : { %1 = inlined_call /* %k.10 = custom-call(%x) */ }\n0x1 : { %2 = inlined_call /* %k.9 = "
            "custom-call(%x) */ }"
        ),
        "",
    )

    def told(known):
        simulator = Simulator({"TLP": top}, TPUS["v5e"], {"k": known})
        return [simulator.known_of(f"k.{number}") for number in (9, 10)]

    assert told([one, other]) == [one, other]
    assert told([one, one]) == [one, one]
    assert told([one]) == [one, one]
    assert told([one, one, other]) == [one, other]  # equal calls were merged
    assert told([one, other, {0: np.array([3])}]) == [{}, {}]  # it is not clear which
    assert Simulator({"TLP": top}, TPUS["v5e"], {"k": [one]}).known_of("kernel.9") == {}
    top = Source(
        top.bundles.replace("0x1 :", "0x1 : >"), ""
    )  # in a loop: XLA numbers those of another computation as it pleases
    assert told([one, other]) == [{}, {}]
    assert told([one, one]) == [one, one]


def test_equal_instructions_run_the_code_of_one():
    sources = dict(dump.read_sources(programs.RECORDED / "gather-v5e"))
    top = sources["TLP"].bundles.replace("%gather.1 = ", "%gather.2 = ")
    assert top != sources["TLP"].bundles
    sources["TLP"] = Source(top, sources["TLP"].utilisation)
    lost = simulate(sources, TPUS["v5e"])
    found = simulate(
        sources, TPUS["v5e"], {"gather": [{0: programs.TABLE}]}, twins={"gather.1": "same", "gather.2": "same"}
    )
    assert list(lost.unknown) == ["program gather.2 is not in the dump"]
    assert found.cycles == recorded("gather", "v5e", {"gather": [{0: programs.TABLE}]}).cycles


def test_known_operands_are_folded_through_calls():
    @jax.jit
    def inner(table, x):
        return programs.gather(jnp.sort(table)[::-1], x)

    def outer(table, x):
        return inner(table * 1, x) + 1

    traced = jax.make_jaxpr(outer)(programs.TABLE, jax.ShapeDtypeStruct((256, 128), jnp.float32))
    found = scalar_operands(traced, {0: programs.TABLE})
    ((values,),) = found.values()
    assert list(found) == ["gather"]
    np.testing.assert_array_equal(values[0], np.sort(programs.TABLE)[::-1])
    assert scalar_operands(traced, {}) == {}


def test_known_operands_are_folded_through_branches_and_loops():
    x = jax.ShapeDtypeStruct((256, 128), jnp.float32)

    def call(x):
        return programs.gather(programs.TABLE * 1, x)[:256]

    def branches(flag, x):
        return jax.lax.cond(flag, call, lambda x: x, x)

    def platforms(x):
        return jax.lax.platform_dependent(x, tpu=call, default=lambda x: x)

    def scanned(x):
        return jax.lax.scan(lambda carry, _: (call(carry), None), x, length=3)[0]

    def looped(x):
        return jax.lax.while_loop(lambda carry: carry[0, 0] < 3, call, x)

    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    for fn, args in ((branches, (flag, x)), (platforms, (x,)), (scanned, (x,)), (looped, (x,))):
        (calls,) = scalar_operands(jax.make_jaxpr(fn)(*args), {}).values()
        np.testing.assert_array_equal(calls[0][0], programs.TABLE)


def test_roofline_is_per_device():
    assert roofline(TPUS["tpu7x"], 1e12, 1).peak == 2307e12 / 2
    bound = roofline(TPUS["v4"], flops=275e12, nbytes=2 * 1.228e12)
    assert (bound.compute_seconds, bound.memory_seconds, bound.seconds, bound.by) == (1.0, 2.0, 2.0, "memory")
    assert roofline(TPUS["v5e"], 1, 0).intensity == float("inf")
    assert roofline(TPUS["v5e"], 1, 1, "int8").peak == 2 * roofline(TPUS["v5e"], 1, 1).peak


def as_schedule(simulation, flops: float = FLOPS, nbytes=1.8e6, source="given"):
    bound = roofline(simulation.chip, flops, nbytes)
    return inspection.KernelSchedule(
        "matmul", simulation.chip.name, simulation, bound, source, {"matmul.1": 1 << 20}, frozenset(["matmul.1"])
    )


def test_table_names_every_program_and_says_that_it_is_an_estimate():
    text = as_schedule(recorded("matmul", "v4")).table()
    assert "estimate" in text
    assert "1.0 MiB" in text
    for word in ("matmul.1", "pallas", "TLP", "top level", "cores", "roofline", "hottest block of matmul.1"):
        assert word in text


def test_kernels_are_known_where_the_program_cannot_be_read():
    sources = dump.read_sources(programs.RECORDED / "matmul-v5e")
    found = dump.Dump(TPUS["v5e"], sources, {}, {}, (), {}, "copies run on the SparseCore")
    case = inspection.Inspection(programs.matmul, target="v5e")
    made = inspection.schedule_of(case, Program("double", "v5e", b"", (), "", 1 << 20), found)
    assert made.pallas == {"matmul.1"}
    assert "note: copies run on the SparseCore" in made.table()


def test_advice_names_what_bounds():
    simulation = recorded("matmul", "v5e")
    kernel = next(program for program in simulation.programs if program.name == "matmul.1")
    others = tuple(program for program in simulation.programs if program.name != "matmul.1")

    def advice(flops: float = FLOPS, core_cycles=None, extra=(), **changes):
        programs_ = (dataclasses.replace(kernel, **changes), *others, *extra)
        changed = dataclasses.replace(simulation, programs=programs_, core_cycles=core_cycles or simulation.core_cycles)
        return " ".join(as_schedule(changed, flops=flops).advice())

    cycles = kernel.cycles
    assert "bound by the matrix units, busy 90%" in advice(matrix=0.9 * cycles)
    assert "waits for HBM 60%" in advice(dma_wait=0.6 * cycles)
    quiet = dict(matrix=0.1 * cycles, dma_wait=0.0, crosslane=0.0)
    assert "bound by latency" in advice(**quiet)
    busy = dict(kernel.units) | {"EUP": int(0.8 * cycles * kernel.capacity["EUP"])}
    assert "transcendental unit" in advice(units=busy, **quiet)
    assert "cross-lane units" in advice(**quiet | {"crosslane": 0.9 * cycles})
    spilling = dict(kernel.units) | {"VSTORE:SPILL": int(0.5 * cycles)}
    assert "registers spill" in advice(units=spilling)
    assert "waits for products" in advice(matrix_stall=0.2 * cycles)
    assert "4.0 times the useful work" in advice(flops=FLOPS / 4)
    assert "out of balance" in advice(core_cycles=(100.0, 200.0))
    copy = dataclasses.replace(kernel, name="copy.1", cycles=0.2 * simulation.cycles)
    assert "XLA around the kernel" in advice(extra=(copy,))


def test_an_empty_program_is_said():
    empty = simulate({"TLP": Source("0 : {}", "")}, TPUS["v5e"])
    assert "nothing runs" in as_schedule(empty).advice()[0]


def test_page_is_self_contained(tmp_path):
    pytest.importorskip("jinja2")
    path = tmp_path / "page.html"
    found = as_schedule(recorded("matmul", "v4"))
    dataclasses.replace(found, name="<b>mat & mul</b>").report(path)
    text = path.read_text()
    assert "&lt;b&gt;mat &amp; mul&lt;/b&gt;" in text
    assert "<b>mat" not in text.replace("&lt;", "")[: text.find("</style>")]
    assert 'src="http' not in text
    for word in ("matmul.1", "Roofline", "What bounds it", "An estimate"):
        assert word in text
    assert "<script" not in text and len(text) < 60_000
    assert text.count("<figure>") == 2  # roofline, and the kernel's timeline


@needs_libtpu
def test_a_slice_is_declined():
    """Its schedule would leave out what waits for other devices."""
    with pytest.raises(UnsupportedError, match=r"'v5e:2x2' is a slice.*planning.step_time"):
        aot.inspect(jnp.sin, (jax.ShapeDtypeStruct((8, 128), jnp.float32),), "v5e:2x2")


@pytest.mark.turns(4)
@needs_libtpu
def test_inspect_many_targets_and_errors(cache):
    matmul, args = programs.PROGRAMS["matmul"]

    def too_large(x):
        return x @ x

    cases = [
        inspection.Inspection(matmul, args, target="v5e", name="matmul"),
        inspection.Inspection(too_large, [jax.ShapeDtypeStruct((400_000, 400_000), jnp.float32)], target="v5e"),
        inspection.Inspection(matmul, args, target="v6e"),
    ]
    first, rejected, third = inspection.inspect_many(cases)
    assert isinstance(rejected, DeviceError)
    assert "of HBM" in str(rejected)
    assert isinstance(first, inspection.KernelSchedule)
    assert isinstance(third, inspection.KernelSchedule)
    assert first.simulation.flops == {"bf16": FLOPS}
    assert first.pallas == {"matmul.1"}
    # blocks of x, y and o, twice each, and the accumulator
    assert first.vmem["matmul.1"] >= 2 * 3 * BLOCK + 256 * 256 * 4
    assert first.roofline.bytes == (512 * 1024 + 1024 * 256 + 512 * 256) * 2
    assert first.flops_source.startswith("as issued")  # the kernel gives no cost estimate
    assert third.chip is TPUS["v6e"]
    assert json.loads(inspection.to_json(first))["cycles"] == first.simulation.cycles
    # with the same versions, what is compiled now is what was recorded
    if aot.versions()["libtpu"] == "0.0.51" and aot.versions()["jax"] == "0.10.2":
        assert first.simulation.cycles == recorded("matmul", "v5e").cycles


@pytest.mark.turns(4)
@needs_libtpu
def test_two_calls_of_a_kernel_keep_their_own_tables(cache):
    x = jax.ShapeDtypeStruct((256, 128), jnp.float32)
    block, same = 64 * 128 * 4, np.zeros_like(programs.TABLE)

    def fn(x):
        return programs.gather(programs.TABLE, x), programs.gather(same, x)

    found = inspection.inspect(fn, [x], "v5e")
    assert not found.guessed
    runs = 1 + np.count_nonzero(np.diff(programs.TABLE))
    moved = sum(p.hbm_bytes for p in found.programs if p.name.startswith("gather"))
    assert moved == (runs + 1 + 2 * same.size) * block


@pytest.mark.turns(6)
@needs_libtpu
def test_repeated_code_is_counted_every_time(cache):
    """libtpu emits equal transposes once; both calls must be counted."""

    one = jax.ShapeDtypeStruct((2048, 1024), jnp.float32)
    cases = [
        inspection.Inspection(lambda a: jnp.sin(a).T, [one], target="v5e"),
        inspection.Inspection(lambda a, b, c: (jnp.sin(a).T, jnp.sin(b).T, jnp.sin(c).T), [one] * 3, target="v5e"),
    ]
    once, thrice = inspection.inspect_many(cases)
    assert isinstance(once, inspection.KernelSchedule)
    assert isinstance(thrice, inspection.KernelSchedule)
    assert not thrice.guessed
    assert thrice.seconds == pytest.approx(3 * once.seconds, rel=0.2)


@pytest.mark.turns(4)
@needs_libtpu
def test_the_cache_spares_the_compiler(cache, monkeypatch):
    gather, args = programs.PROGRAMS["gather"]
    before = inspection.inspect(gather, args, "v5e")
    assert not before.guessed
    monkeypatch.setattr(Child, "ask", lambda *_: pytest.fail("compiled again"))
    assert inspection.inspect(gather, args, "v5e").simulation.cycles == before.simulation.cycles
    other_values = (np.zeros_like(programs.TABLE), args[1])
    assert inspection.inspect(gather, other_values, "v5e").simulation.hbm_bytes < before.simulation.hbm_bytes


@pytest.mark.turns(6)
@needs_libtpu
def test_a_compiler_that_dies_is_reported_and_the_others_go_on(cache, monkeypatch):
    gather, args = programs.PROGRAMS["gather"]
    jobs = [
        inspection.prepare(gather, args, {}, "v5e"),
        inspection.prepare(lambda x: x + 1, [np.ones(8, np.float32)], {}, "v5e"),
    ]
    real, calls = Child.ask, []

    def dies_first(process, question):
        calls.append(question["target"])
        if len(calls) == 1:
            raise Ended("the compiler ended its process by signal 6: Check failed")
        return real(process, question)

    monkeypatch.setattr(Child, "ask", dies_first)
    lost, fine = dump.dump_many(jobs)
    assert isinstance(lost, KernelError)
    assert "Check failed" in str(lost)
    assert isinstance(fine, dump.Dump)
    assert calls == ["v5e", "v5e"]
    assert dump.dump(jobs[0]).sources  # what went wrong once is not remembered


@pytest.mark.turns(4)
@needs_libtpu
def test_kernel_errors_keep_their_words(cache):
    from jax.experimental import pallas as pl

    def product(x_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], x_ref[...], preferred_element_type=jnp.int32)

    def copy(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    odd = pl.BlockSpec((7, 100), lambda i: (i, 0))
    untiled = pl.pallas_call(
        copy, grid=(2,), in_specs=[odd], out_specs=odd, out_shape=jax.ShapeDtypeStruct((70, 300), jnp.int32)
    )
    with pytest.raises(UnsupportedError, match="a block of"):
        inspection.inspect(untiled, [jax.ShapeDtypeStruct((70, 300), jnp.int32)], "v4")
    call = pl.pallas_call(product, out_shape=jax.ShapeDtypeStruct((256, 256), jnp.int32), name="product")
    with pytest.raises(UnsupportedError, match="v4 multiplies bfloat16 and float32"):
        inspection.inspect(call, [jax.ShapeDtypeStruct((256, 256), jnp.int8)], "v4")


def test_no_cases_is_an_error():
    with pytest.raises(ShapeError, match="empty"):
        inspection.inspect_many([])
