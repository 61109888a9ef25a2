"""Reading the dump, and the models of matrix units, copies and scalar unit, each on programs small enough to work out
by hand.
"""

import numpy as np
import pytest

import aot_programs as programs
from vishwamai.aot.schedule import bundles
from vishwamai.aot.schedule.bundles import UNITS, Bundle, BundleOperand, Matrix, Utilisation, parse
from vishwamai.aot.schedule.dump import read_sources
from vishwamai.aot.schedule.interpret import BundledProgram, run
from vishwamai.aot.schedule.machine import Machine, Model, smem_words
from vishwamai.aot.schedule.mxu import RESERVATIONS, occupancy, product_rows
from vishwamai.core.hardware import TPUS

EMPTY = Bundle((), (), (), 0)


def program(text, name="kernel", target="v5e"):
    parsed = parse(text)
    return BundledProgram(
        name, parsed, Utilisation((1,) * len(UNITS), ((0,) * len(UNITS),) * len(parsed)), RESERVATIONS[target]
    )


def finish(text, known=None, machine=None, **kwargs):
    """Runs a program; returns the run's machine and the passes of its blocks."""
    machine = machine or Machine(TPUS["v5e"])
    return machine, run(program(text, **kwargs), machine, known)


def test_parse_bundles_regions_and_instructions():
    text = """= control target key start
LH: loop header
= control target key end

     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: bf16[8,128], index: 2, kind: input] /* operand 2 */ } \
/* Start region 7 */
   0x1 LB: > { %s2_s1 = sadd.s32 4294967295, %s1_s0  ;;  %v3_v0 = vld [vmem:[%s1_s0] sm:$0xff]  \
;;  %p4_p0 = scmp.eq.s32.totalorder %s2_s1, -1 }
   0x2 LB: > { %5 = sbr.rel (!%p4_p0) target = $region9 } /* End region 7 :: Start/End empty region 9 */
   0x3   :  {}
   0x4   :  { %6 = inlined_call /* %fusion.2 = fusion(%x) */  ;;  %s7_s2 = sld [smem:[#allocation3]] /* core id */ }
"""
    parsed = parse(text)
    assert len(parsed) == 5
    assert [bundle.regions for bundle in parsed] == [(7,), (), (9,), (), ()]
    (operand,) = parsed[0].scalars
    assert (operand.op, operand.target, operand.result) == ("operand.hbm", 2, "s1_s0")
    add, compare = parsed[1].scalars  # the vector load is not the scalar unit's
    assert add.operands == (BundleOperand("constant", 0xFFFFFFFF), BundleOperand("register", "s1_s0"))
    assert compare.operands[1] == BundleOperand("constant", 0xFFFFFFFF)
    (branch,) = parsed[2].scalars
    assert branch.predicate.register == "p4_p0"
    assert branch.predicate.negated
    assert branch.target == 9
    call, core = parsed[4].scalars
    assert (call.op, call.target) == ("inlined_call", "fusion.2")
    assert core.op == "core id"
    assert bundles.block_starts(parsed, 4) == ([0, 2], {7: 0, 9: 2})
    assert bundles.block_starts(parsed, 1) == ([0, 2, 4], {7: 0, 9: 2})


def test_parse_predicates_and_addresses():
    (bundle,) = parse(
        "0 : { %s9_s4 = smov (!%p8_p1, %s1_s4), 7 ;; %2 = sst [smem:[#allocation2 + $0x80]] (%p3_p0), %s9_s4 ;; "
        "%4 = dma.hbm_to_vmem [thread:$0] (%p3_p0), /*hbm=*/%s5_s2, /*size_in_granules=*/1024, /*vmem=*/%s6_s3, "
        "/*dst_syncflagno=*/[#allocation4], /*src_stride=*/%s1_s4 }"
    )
    move, store, copy = bundle.scalars
    assert move.predicate.negated
    assert move.predicate.otherwise == BundleOperand("register", "s1_s4")
    assert store.predicate.register == "p3_p0"
    assert store.operands[0] == BundleOperand(
        "sum", (BundleOperand("symbol", "#allocation2"), BundleOperand("constant", 0x80))
    )
    assert store.operands[1] == BundleOperand("register", "s9_s4")
    assert copy.op == "dma.hbm_to_vmem"
    assert copy.operands[1] == BundleOperand("constant", 1024)
    assert copy.operands[3].kind == "sum"
    assert copy.target == 0
    assert parse("0 : { %1 = dma.hbm_to_vmem [thread:$5] %s1_s0, 64, %s2_s1, %s3_s2 }")[0].scalars[0].target == 5


def test_general_copies_are_known_by_their_comment():
    (bundle,) = parse(
        "0 : { %1 = dma.general (!%p2_p0), /*src=*/%s1_s0, /*size_in_granules=*/64, /*dst=*/%s2_s1, "
        "/*dst_syncflagno=*/%s3_s2 /* hbm-to-vmem */ }"
    )
    (copy,) = bundle.scalars
    assert copy.op == "dma.hbm_to_vmem"
    assert [operand.value for operand in copy.operands] == ["s1_s0", 64, "s2_s1", "s3_s2"]
    (bundle,) = parse("0 : { %1 = dma.general %s1_s0, 64, %s2_s1, %s3_s2 }")
    assert bundle.scalars[0].op == "dma.general"


def test_parse_matrix_and_crosslane_instructions():
    (bundle,) = parse(
        "0 : { %1 = vmatmul.mubr.bf16.gmra.mxu2 %v1_v0 ;; %v2_v1 = vpop.f32.mrf.mxu2 ;; %3 = vxpose.xlu0.b32.start "
        "%v1_v0 ;; %4 = vmatmul.mubr.f8e4m3fn.mrb[8].mxu1 %v1_v0 ;; %v5_v2 = vpop.trf.xlu0 }"
    )
    assert bundle.matrices == (
        Matrix(False, 2, None, 16, False),
        Matrix(True, 2, None, 32, False),
        Matrix(False, 1, 8, 8, True),
    )
    assert bundle.crosslane == 1
    assert product_rows([bundle]) == {"bf16": 16, "fp8": 32}


def test_utilisation_rows_are_padded_to_the_bundles():
    text = f"== CAPACTIY:\n{', '.join(UNITS)}\n 4 4 3 4 2 1 3 3 1 1 2\n== UTILIZATION:\n0 0 0 1 0 0 2 0 0 0 1\n"
    found = bundles.parse_utilisation(text, 3)
    assert dict(zip(UNITS, found.capacity))["VALU"] == 4
    assert [sum(row) for row in found.rows] == [4, 0, 0]


def test_columns_go_by_their_names():
    """As 0.0.48.1 and 0.0.50.1 wrote them, with one column for both uses of a matrix unit."""
    names = "MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU"
    text = f"== CAPACTIY:\n{names}\n    4     3     4     2     1     3     3     1     1     2\n== UTILIZATION:\n"
    found = bundles.parse_utilisation(text + "2 0 0 1 0 0 0 0 0 1\n", 2)
    capacity, row = (dict(zip(UNITS, numbers)) for numbers in (found.capacity, found.rows[0]))
    assert (capacity["MATMUL"], capacity["MATPUSH"], capacity["EUP"], capacity["SALU"]) == (4, 0, 1, 2)
    assert (row["MATMUL"], row["VPOP"], row["SALU"], sum(row.values())) == (2, 1, 1, 4)
    other = bundles.parse_utilisation("== CAPACTIY:\nA, B\n 1 2\n== UTILIZATION:\n1 1\n", 1)
    assert len(other.rows[0]) != len(UNITS)  # which `inspect` says


def products(count, unit=0, gap=0, bits=16):
    block = []
    for _ in range(count):
        block += [Bundle((), (), (Matrix(False, unit, None, bits),), 0), *[EMPTY] * gap]
    return block


@pytest.mark.parametrize("target", TPUS)
def test_back_to_back_products_take_their_reservation(target):
    cycles = RESERVATIONS[target].half
    found = occupancy(products(100), RESERVATIONS[target])
    assert found.busy == 100 * cycles
    assert found.stall == 100 * cycles - 100  # 100 bundles, as long as the unit is busy
    spread = occupancy(products(100, gap=cycles - 1), RESERVATIONS[target])
    assert (spread.busy, spread.stall) == (100 * cycles, 0)


def test_units_work_side_by_side():
    block = [Bundle((), (), tuple(Matrix(False, unit, None, 16) for unit in range(4)), 0)] * 10
    assert occupancy(block, RESERVATIONS["v5e"]).busy == 160


def test_popping_too_early_waits_for_the_product():
    # the shortest distance in the block is what the compiler takes for the latency: the second pop comes 20 bundles too
    # early
    push, pop = Bundle((), (), (Matrix(False, 0, None, 16),), 0), Bundle((), (), (Matrix(True, 0, None),), 0)
    block = [push, *[EMPTY] * 30, pop, push, push, *[EMPTY] * 30, pop, pop]
    found = occupancy(block, RESERVATIONS["v5e"])
    assert 0 < found.stall <= 16


def test_addressed_buffers_wait_for_their_own_product():
    push = Bundle((), (), (Matrix(False, 0, 4, 16),), 0)
    pop = Bundle((), (), (Matrix(True, 0, 6),), 0)  # register 6 belongs to the buffer at 4
    found = occupancy([push, pop], RESERVATIONS["tpu7x"])
    assert (
        found.stall == RESERVATIONS["tpu7x"].half - 1
    )  # started in cycle 1, done in cycle 9, popped in what was cycle 2
    other = Bundle((), (), (Matrix(True, 0, 0),), 0)
    assert (
        occupancy([push, other], RESERVATIONS["tpu7x"]).stall == RESERVATIONS["tpu7x"].half - 2
    )  # only the unit's own time


def test_float8_costs_two_passes_where_it_is_no_faster_than_bfloat16():
    fp8 = Matrix(False, 0, None, 8, floating8=True)
    assert RESERVATIONS["v6e"].product(fp8) == 2 * RESERVATIONS["tpu7x"].product(fp8)
    # an int8 register has twice the rows of bfloat16 and takes the same time: twice the rate, as the chips' peaks say
    assert RESERVATIONS["v5e"].product(Matrix(False, 0, None, 8)) == RESERVATIONS["v5e"].half


@pytest.mark.parametrize("target", TPUS)
def test_a_copy_takes_latency_and_bandwidth(target):
    one = TPUS[target]
    machine = Machine(one, model=Model(hbm_efficiency=1.0, dma_latency=1e-6))
    granules = (1 << 20) // machine.granule
    machine.copy("dma.hbm_to_vmem", granules, 1)
    machine.wait(1, granules)
    expected = ((1 << 20) / (one.hbm_bandwidth / one.cores) + 1e-6) * one.clock
    assert machine.now == pytest.approx(expected)
    assert machine.dma_wait == machine.now
    assert machine.hbm_bytes == 1 << 20
    machine.wait(1, 0)
    assert machine.now == pytest.approx(expected)  # nothing more to wait for


def test_copies_share_the_pipe_and_overlap_in_latency():
    machine = Machine(TPUS["v5e"], model=Model(hbm_efficiency=1.0, dma_latency=1e-6))
    for semaphore in (1, 2):
        machine.copy("dma.vmem_to_hbm", 1 << 15, semaphore)
    machine.wait(2, 1 << 15)
    assert machine.now == pytest.approx((2 * (1 << 20) / 0.819e12 + 1e-6) * 1.5e9)
    before = machine.now
    machine.wait(1, 1 << 15)
    assert machine.now == before


def test_a_small_copy_is_not_held_up_by_a_large_one_of_another_queue():
    machine = Machine(TPUS["v5e"], model=Model(hbm_efficiency=1.0, dma_latency=0.0))
    mib = (1 << 20) / 0.819e12 * 1.5e9
    for semaphore, granules, thread in ((1, 64 << 15, 1), (2, 1 << 15, 0)):
        machine.copy("dma.hbm_to_vmem", granules, semaphore, thread)
    machine.wait(2, 1 << 15)
    assert machine.now == pytest.approx(2 * mib)  # half the bandwidth while both are under way
    machine.copy("dma.hbm_to_vmem", 1 << 15, 2)
    machine.now += 10 * mib  # ... whether it is waited for or not
    machine.wait(2, None)
    assert machine.now == pytest.approx(12 * mib)
    machine.wait(1, 64 << 15)
    assert machine.now == pytest.approx(66 * mib)  # all the bytes, as if one after another
    assert machine.dma_wait == pytest.approx(56 * mib)


def test_a_copy_to_memory_of_both_cores_has_the_bandwidth_of_both():
    machine = Machine(TPUS["v4"], model=Model(hbm_efficiency=1.0, dma_latency=0.0))
    machine.copy("dma.hbm_to_cmem", (1 << 20) // machine.granule, 1)
    machine.wait(1, (1 << 20) // machine.granule)
    assert machine.now == pytest.approx((1 << 20) / 1.228e12 * 1.05e9)
    assert machine.hbm_bytes == 1 << 20


def test_symbols_survive_pointer_arithmetic():
    machine = Machine(TPUS["v5e"])
    first, second = machine.symbol("operand:k:0"), machine.symbol("operand:k:1")
    assert machine.symbol_of(first + 4096) == "operand:k:0"
    assert machine.symbol_of(second >> 5) == "operand:k:1"
    assert machine.symbol_of(12345) is None
    assert machine.symbol_of(None) is None


LOOP = """
0   : { %s1_s0 = smov 0 }
0x1 : { %s2_s0 = sphi %s1_s0, %s3_s0 } /* Start region 1 */
0x2 : { %s3_s0 = sadd.s32 1, %s2_s0 }
0x3 : { %p4_p0 = scmp.ge.s32.totalorder %s3_s0, 5 }
0x4 : { %5 = sbr.rel (!%p4_p0) target = $region1 }
0x5 : {}
0x6 : {}
0x7 : {}
0x8 : {}
0x9 : { %s6_s1 = smov 1 }
"""


def test_loops_run_as_often_as_they_should_and_branches_are_delayed():
    machine, passes = finish(LOOP)
    assert dict(passes) == {0: 1, 1: 5, 9: 1}
    assert machine.now == 1 + 5 * 8 + 1  # the four bundles after the branch issue every time
    assert not machine.unknown


def test_a_branch_in_the_delay_slots_of_a_taken_one_does_not_count():
    text = """
0   : { %1 = sbr.rel target = $region1 }
0x1 : { %2 = sbr.rel target = $region2 }
0x2 : {}
0x3 : {}
0x4 : {}
0x5 : { %s1_s0 = smov 1 }
0x6 : { %s2_s0 = smov 2 } /* Start region 1 */
0x7 : { %s3_s0 = smov 3 } /* Start region 2 */
"""
    machine, passes = finish(text)
    assert dict(passes) == {0: 1, 6: 1, 7: 1}
    assert machine.now == 5 + 2


@pytest.mark.parametrize("target", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_delay_slots_are_those_that_the_compiler_leaves(target):
    """The last branch of a kernel closes its grid loop; the loop ends with the slots after it, which the dump marks."""
    (source,) = (s for name, s in read_sources(programs.RECORDED / f"matmul-{target}").items() if name != "TLP")
    lines = source.bundles.splitlines()
    branch = max(i for i, line in enumerate(lines) if "sbr.rel" in line)
    after = next(i for i in range(branch, len(lines)) if "vsyncpa" in lines[i])
    end = max(i for i in range(branch + 1, after) if "End region" in lines[i])
    assert end - branch == RESERVATIONS[target].branch_delay


def test_instructions_of_a_bundle_read_before_any_of_them_writes():
    text = """
0   : { %s1_s0 = smov 3 ;; %s2_s1 = smov 4 }
0x1 : { %s3_s0 = sadd.s32 %s2_s1, 0 ;; %s4_s1 = sadd.s32 %s1_s0, 0 }
0x2 : { %5 = sst [smem:[#allocation0]], %s3_s0 ;; %6 = sst [smem:[#allocation1]], %s4_s1 }
"""
    machine, _ = finish(text)
    assert machine.memory[machine.symbol("#allocation0@kernel")] == 4
    assert machine.memory[machine.symbol("#allocation1@kernel")] == 3


def test_predicated_off_instructions_keep_the_old_value():
    text = """
0   : { %s1_s0 = smov 3 ;; %p2_p0 = scmp.eq.s32.totalorder 1, 2 }
0x1 : { %s3_s0 = smov (%p2_p0, %s1_s0), 9 ;; %4 = sst [smem:[#allocation1]] (%p2_p0), 5 }
0x2 : { %5 = sst [smem:[#allocation0]], %s3_s0 }
"""
    machine, _ = finish(text)
    assert machine.memory == {machine.symbol("#allocation0@kernel"): 3}


@pytest.mark.parametrize(
    ("op", "a", "b", "expected"),
    [
        ("ssub.s32", 2, 5, 0xFFFFFFFD),
        ("smul.u32", 1 << 20, 1 << 20, 0),
        ("sshrl.u32", 0xF0, 4, 0xF),
        ("sshra.s32", 0xFFFFFFF0, 2, 0xFFFFFFFC),
        ("smin.s32", 0xFFFFFFFF, 3, 0xFFFFFFFF),
        ("smin.u32", 0xFFFFFFFF, 3, 3),
        ("sand.u32", 12, 10, 8),
        ("scmp.lt.s32.totalorder", 0xFFFFFFFF, 3, True),
        ("scmp.lt.u32.totalorder", 0xFFFFFFFF, 3, False),
        ("sc.u32", 0xFFFFFFFF, 1, True),
    ],
)
def test_arithmetic(op, a, b, expected):
    kind = "p" if isinstance(expected, bool) else "s"
    text = f"0 : {{ %{kind}1_{kind}0 = {op} {a}, {b} }}\n0x1 : {{ %2 = sst [smem:[#allocation0]], %{kind}1_{kind}0 }}"
    machine, _ = finish(text)
    assert machine.memory[machine.symbol("#allocation0@kernel")] == expected


@pytest.mark.parametrize(("wanted", "expected"), [("kDivAndRem", [3, 2, None]), ("kRem", [2, None, None])])
def test_divisions_are_popped_quotient_first(wanted, expected):
    pops = "".join(
        (
            f"{1 + i:#x} : {{ %s{i}_s{i} = spop.drf %9 }}\n{8 + i:#x} : {{ %2{i} = sst [smem:[#allocation{i}]], "
            f"%s{i}_s{i} }}\n"
        )
        for i in range(3)
    )
    machine, _ = finish(f"0 : {{ %9 = sdivrem.u32 17, 5 /* {wanted} */ }}\n{pops}")
    assert [machine.memory[machine.symbol(f"#allocation{i}@kernel")] for i in range(3)] == expected


def test_a_called_program_gets_the_scalars_of_its_caller():
    called = []
    text = "0 : { %s1_s0 = smov 7 }\n0x1 : { %2 = inlined_call %s1_s0, 5 /* %inner = custom-call(%x) */ }"
    run(program(text), Machine(TPUS["v5e"]), {}, lambda name, arguments: called.append((name, arguments)))
    assert called == [("inner", [7, 5])]
    inner = """
0   : { %s1_s0 = inlined_call_operand.<no memory space> [shape: s32[1], index: 1, kind: input] }
0x1 : { %2 = sst [smem:[#allocation3]], %s1_s0 }
"""
    for known, arguments, expected in (({}, [7, 5], 5), ({1: np.array([9])}, [7, 5], 5), ({1: np.array([9])}, [], 9)):
        machine = Machine(TPUS["v5e"])
        run(program(inner), machine, known, None, arguments)
        assert machine.memory[machine.symbol("#allocation3@kernel")] == expected


def test_what_only_the_device_knows_is_unknown_and_said():
    text = """
0   : { %s1_s0 = spop %7 ;; %s9_s2 = smov 0 }
0x1 : { %p2_p0 = scmp.eq.s32.totalorder %s1_s0, 0 ;; %s3_s1 = sand.u32 %s1_s0, %s9_s2 }
0x2 : { %4 = sbr.rel (%p2_p0) target = $region1 ;; %5 = sst [smem:[#allocation0]], %s3_s1 }
0x3 : {}
0x4 : {}
0x5 : {}
0x6 : { %p6_p1 = por %p2_p0, %p2_p0 }
0x7 : { %s8_s1 = smov 1 } /* Start region 1 */
"""
    machine, passes = finish(text)
    assert machine.memory[machine.symbol("#allocation0@kernel")] == 0  # 0 & anything
    assert dict(passes) == {0: 1, 7: 1}
    assert dict(machine.unknown) == {"kernel: branch at 0x2 depends on data": 1}


def test_an_endless_loop_is_given_up_and_said():
    text = LOOP.replace("%s3_s0, 5 }", "%s3_s0, 0x7fffffff }").replace("sadd.s32 1", "sadd.s32 0")
    machine, _ = finish(text, machine=Machine(TPUS["v5e"], model=Model(max_steps=1000)))
    assert dict(machine.unknown) == {"kernel: stopped after 1001 steps": 1}


def test_known_operands_reach_scalar_memory():
    text = """
0   : { %s1_s0 = inlined_call_operand.hbm [shape: s32[3], index: 1, kind: input] }
0x1 : { %s2_s1 = int_to_ptr.hbm %s1_s0 }
0x2 : { %3 = dma.hbm_to_smem %s2_s1, 1, [#allocation3], [#allocation4] }
0x3 : { %4 = dma.done.wait [#allocation4], 1 }
0x4 : { %s5_s2 = sld [smem:[#allocation3 + $0x2]] }
0x5 : { %6 = sst [smem:[#allocation9]], %s5_s2 }
"""
    machine, _ = finish(text, {1: np.array([10, 11, -12], np.int32)})
    assert machine.memory[machine.symbol("#allocation9@kernel")] == 0xFFFFFFF4
    assert machine.dma_wait > 0
    unknown, _ = finish(text)
    assert unknown.memory[unknown.symbol("#allocation9@kernel")] is None


@pytest.mark.parametrize("ends", ["%s2_s1, 64, [#allocation3]", "[#allocation3], 64, %s2_s1"])
def test_a_strided_copy_goes_where_its_addresses_say(ends):
    """Its comment may name no memories; bytes of an operand in HBM are counted all the same."""
    machine, _ = finish(
        f"""0x0 : {{ %s2_s1 = inlined_call_operand.hbm [shape: bf16[64,128], index: 0, kind: input] }}
0x1 : {{ %3 = dma.general {ends}, [#allocation4], [#allocation5], [#allocation6], %s2_s1, 0 \
/* element_size_in_bytes: 2048 */ }}
0x2 : {{ %4 = dma.done.wait [#allocation4], 64 }}
"""
    )
    assert machine.hbm_bytes == 64 * machine.granule
    assert machine.dma_wait > 0
    assert not machine.unknown


def test_a_copy_between_unknown_memories_is_counted_and_said():
    machine, _ = finish("0x0 : { %3 = dma.general [#allocation1], 64, [#allocation3], [#allocation4] }\n")
    assert machine.hbm_bytes == 64 * machine.granule
    (said,) = machine.unknown
    assert "unknown memories" in said


def test_a_copy_that_the_program_before_may_have_made_is_counted_and_said():
    """XLA's cross-program prefetch: a flag in scalar memory says whether the operand is there already."""
    machine, _ = finish(
        """0x0 : { %s1_s0 = sld [smem:[#allocation9]] }
0x1 : { %p2_p0 = scmp.ne.s32.totalorder %s1_s0, 0 }
0x2 : { %s3_s1 = scalar_select /*predicate=*/%p2_p0, /*on_true=*/0, /*on_false=*/4096 }
0x3 : { %4 = dma.hbm_to_vmem [thread:$1] [#allocation1], %s3_s1, [#allocation2], [#allocation3] }
0x4 : { %5 = dma.done.wait [#allocation3], 4096 }
"""
    )
    assert machine.hbm_bytes == 4096 * machine.granule
    assert machine.dma_wait > machine.latency
    assert dict(machine.unknown) == {"kernel: whether the program before made the copy at 0x3 depends on data": 1}


def test_the_core_id_tells_the_cores_apart():
    text = "0 : { %s1_s0 = sld [smem:[#allocation0]] /* core id */ }\n0x1 : { %2 = sst [smem:[#allocation1]], %s1_s0 }"
    machine, _ = finish(text, machine=Machine(TPUS["v4"], core=1))
    assert machine.memory[machine.symbol("#allocation1@kernel")] == 1


def test_smem_layout_of_small_integers():
    assert dict(smem_words(np.arange(3, dtype=np.int32))) == {0: 0, 1: 1, 2: 2}
    two_rows = np.array([[1, 2], [3, 4]], np.int32)
    assert dict(smem_words(two_rows)) == {0: 1, 1: 2, 128: 3, 129: 4}
    packed = dict(smem_words(np.array([[1, 2], [3, -1]], np.int8)))  # four rows a word
    assert packed == {0: 1 | 3 << 8, 1: 2 | 0xFF << 8}
    assert dict(smem_words(np.arange(130, dtype=np.int16)))[1] == 1 | 129 << 16


def test_a_loop_of_unknown_length_is_listed_at_the_top_level_too():
    text = LOOP.replace("scmp.ge.s32.totalorder %s3_s0, 5", "vtos %v9_v0")
    for name in ("kernel", "TLP"):
        machine, passes = finish(text, name=name)
        assert (passes[1], list(machine.unknown)) == (
            1,
            [f"{name}: loop that ends at 0x4, of unknown length, counted as one turn"],
        )
