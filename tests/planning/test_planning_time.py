"""The time of a step: the timeline of a written program, the compiler's own, and what is made of them."""

import functools
import itertools
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vishwamai import aot, planning
from vishwamai.aot.compile import libtpu
from vishwamai.aot.compile.traced import devices_in_order, trace
from vishwamai.core.errors import DeviceError, UnsupportedError
from vishwamai.core.figures import Estimate
from vishwamai.core.hardware import TPUS
from vishwamai.core.hlo import parse_module
from vishwamai.core.links import AxisLinks, axis_links, estimate_collective
from vishwamai.core.numbers import divisors
from vishwamai.models import ModelConfig
from vishwamai.parallel import estimate_exchange
from vishwamai.planning.exchange import exchange_seconds
from vishwamai.planning.memory.analytic import CLASSES, Breakdown
from vishwamai.planning.memory.compiler import Compiler
from vishwamai.planning.mesh_links import links_of
from vishwamai.planning.serving import Serving, kv_bytes_per_token, trace_serving
from vishwamai.planning.time import program_time
from vishwamai.planning.time.collectives import group_of, link_seconds
from vishwamai.planning.time.program_time import time_program
from vishwamai.planning.time.speed import training_speed, training_time
from vishwamai.planning.time.timeline import Follower, trip_count
from vishwamai.training.config import MeshSection
from vishwamai.training.config_file import from_dict
from vishwamai.training.sharding import make_layout

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")
CHIP = TPUS["v5e"]
HOST = float(CHIP.host_bandwidth or 0)

PROGRAM = """HloModule program, is_scheduled=true

%condition (c: (s32[], bf16[1024,1024])) -> pred[] {
  %limit = s32[] constant(5)
  %c = (s32[], bf16[1024,1024]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%body (b: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {
  %b = (s32[], bf16[1024,1024]) parameter(0)
  %x = bf16[1024,1024]{1,0} get-tuple-element(%b), index=1
  %all-gather-start.1 = (bf16[1024,1024]{1,0}, bf16[4096,1024]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3}}
  %fusion.1 = bf16[1024,1024]{1,0} fusion(%x), kind=kOutput, calls=%f, backend_config={"estimated_cycles":"15000"}
  %all-gather-done.1 = bf16[4096,1024]{1,0} all-gather-done(%all-gather-start.1)
  %kernel.1 = bf16[1024,1024]{1,0} custom-call(%fusion.1), custom_call_target="tpu_custom_call"
  ROOT %t = (s32[], bf16[1024,1024]{1,0}) tuple(%x, %kernel.1)
}

ENTRY %main (p: bf16[1024,1024]) -> bf16[1024,1024] {
  %p = bf16[1024,1024]{1,0} parameter(0)
  %first = s32[] constant(2)
  %start = (s32[], bf16[1024,1024]{1,0}) tuple(%first, %p)
  %while.1 = (s32[], bf16[1024,1024]{1,0}) while(%start), condition=%condition, body=%body
  %y = bf16[1024,1024]{1,0} get-tuple-element(%while.1), index=1
  %all-reduce.1 = bf16[1024,1024]{1,0} all-reduce(%y), replica_groups=[1,4]<=[4], to_apply=%add
  %copy-start.1 = (bf16[1024,1024]{1,0:S(5)}, bf16[1024,1024]{1,0}, u32[]) copy-start(%all-reduce.1)
  ROOT %copy-done.1 = bf16[1024,1024]{1,0:S(5)} copy-done(%copy-start.1)
}
"""
MIB = 1 << 20


def follow(text=PROGRAM, cycles=lambda name: 3000.0, links=lambda one, scattered: 30e-6):
    return Follower(parse_module(text), CHIP, cycles, links).follow()


def test_loops_collectives_and_what_hides_them():
    found = follow()
    assert trip_count(parse_module(PROGRAM), parse_module(PROGRAM).by_name["while.1"]) == 3  # from 2 to 5
    assert found.exposed["fusions"] == pytest.approx(3 * 15000 / CHIP.clock)
    assert found.exposed["kernels"] == pytest.approx(3 * 3000 / CHIP.clock)
    # 10 us of the fusion hide as much of each gather; the sum afterwards hides behind nothing.
    assert found.exposed["collectives"] == pytest.approx(3 * 20e-6 + 30e-6)
    assert found.hidden["collectives"] == pytest.approx(3 * 10e-6)
    assert found.by_name["collectives", "all-gather"] == (pytest.approx(90e-6), 3)
    assert found.exposed["host"] == pytest.approx(2 * MIB / HOST)
    assert not found.host_bytes and not found.missing
    assert found.seconds == pytest.approx(sum(found.exposed.values()))


OFFLOADED = """HloModule m

%put (stack: f32[4,1024,1024], piece: f32[1,1024,1024], i: s32[]) -> f32[4,1024,1024] {
  %stack = f32[4,1024,1024]{2,1,0:S(5)} parameter(0)
  %piece = f32[1,1024,1024]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %into = f32[4,1024,1024]{2,1,0:S(5)} dynamic-update-slice(%stack, %piece, %i)
}

%take (from: f32[4,1024,1024], j: s32[]) -> f32[1,1024,1024] {
  %from = f32[4,1024,1024]{2,1,0:S(5)} parameter(0)
  %j = s32[] parameter(1)
  ROOT %part = f32[1,1024,1024]{2,1,0} dynamic-slice(%from, %j), dynamic_slice_sizes={1,1024,1024}
}

ENTRY %main (all: f32[4,1024,1024], one: f32[1,1024,1024], at: s32[]) -> f32[1,1024,1024] {
  %all = f32[4,1024,1024]{2,1,0:S(5)} parameter(0)
  %one = f32[1,1024,1024]{2,1,0} parameter(1)
  %at = s32[] parameter(2)
  %out = ((f32[4,1024,1024]{2,1,0:S(5)}, f32[1,1024,1024]{2,1,0}, s32[]), f32[4,1024,1024]{2,1,0:S(5)}, u32[]) \
async-start(%all, %one, %at), calls=%put
  %in = ((f32[4,1024,1024]{2,1,0:S(5)}, s32[]), f32[1,1024,1024]{2,1,0}, u32[]) async-start(%all, %at), calls=%take
  %work = f32[1,1024,1024]{2,1,0} fusion(%one), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"150000"}
  %out.1 = f32[4,1024,1024]{2,1,0:S(5)} async-done(%out)
  ROOT %in.1 = f32[1,1024,1024]{2,1,0} async-done(%in)
}
"""


PUT = "async-start(%all, %one, %at), calls=%put"


@pytest.mark.parametrize("put", [PUT, "dynamic-update-slice-start(%all, %one, %at)"])  # libtpu 0.0.51 writes the second
def test_the_host_gives_and_takes_at_once_behind_work(put):
    assert PUT in OFFLOADED
    text = OFFLOADED.replace(PUT, put)
    found = follow(text)
    each = 4 * MIB / HOST  # a piece each way, not the stack that it lies in
    assert found.exposed["host"] == pytest.approx(each - 150000 / CHIP.clock)
    assert found.hidden["host"] == pytest.approx(each + 150000 / CHIP.clock)
    assert found.by_name["host", "to the host's memory"] == (pytest.approx(each), 1)
    assert found.by_name["host", "from the host's memory"] == (pytest.approx(each), 1) and not found.missing
    ironwood = Follower(parse_module(text), TPUS["tpu7x"], lambda name: 0.0, lambda one, scattered: 0.0).follow()
    assert ironwood.host_bytes == 8 * MIB and not ironwood.exposed["host"]  # no source states its bandwidth
    assert "8.0 MiB to and from the host's memory" in str(program_time._plain(ironwood)["missing"])


def test_what_has_no_time_is_named():
    found = follow(cycles=lambda name: None)
    assert found.missing == {"custom-call kernel: no schedule was found": 3} and found.exposed["kernels"] == 0
    endless = follow(PROGRAM.replace("direction=LT", "direction=NE"))
    assert any("while.1: how often it runs" in text for text in endless.missing)

    def no_links(one, scattered):
        raise UnsupportedError("no model of these links")

    assert follow(links=no_links).missing["all-reduce: no model of these links"] == 1


def test_branches_and_what_runs_next_to_the_core():
    body = """HloModule m

%a (x: f32[1024,1024]) -> f32[1024,1024] {
  %x = f32[1024,1024]{1,0} parameter(0)
  ROOT %fusion.1 = f32[1024,1024]{1,0} fusion(%x), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"3000"}
}

%b (y: f32[1024,1024]) -> f32[1024,1024] {
  %y = f32[1024,1024]{1,0} parameter(0)
  ROOT %fusion.2 = f32[1024,1024]{1,0} fusion(%y), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"9000"}
}

%moved (z: f32[1024,1024]) -> f32[512,1024] {
  %z = f32[1024,1024]{1,0} parameter(0)
  ROOT %slice.1 = f32[512,1024]{1,0} slice(%z), slice={[0:512], [0:1024]}
}

ENTRY %main (i: s32[], p: f32[1024,1024]) -> f32[512,1024] {
  %i = s32[] parameter(0)
  %p = f32[1024,1024]{1,0} parameter(1)
  %either = f32[1024,1024]{1,0} conditional(%i, %p, %p), branch_computations={%a, %b}
  %start = ((f32[1024,1024]{1,0}), f32[512,1024]{1,0}, s32[]) async-start(%either), calls=%moved
  ROOT %done = f32[512,1024]{1,0} async-done(%start)
}
"""
    found = follow(body)
    assert found.exposed["fusions"] == pytest.approx(9000 / CHIP.clock)  # the slower branch
    assert found.exposed["copies"] == pytest.approx(2 * MIB / (0.9 * CHIP.hbm_bandwidth) + 0.55e-6)
    elsewhere = follow(body.replace(" slice(%z), slice={[0:512], [0:1024]}", " sort(%z), dimensions={0}"))
    assert elsewhere.missing == {"async-start start: its time is not known": 1} and not elsewhere.exposed["copies"]


def test_a_collective_in_three_fusions_counts_once():
    """libtpu starts it in one fusion, computes next to it in a second one, and ends it in a third."""
    text = """HloModule m

%a (x: bf16[8,1024]) -> bf16[32,1024] {
  %x = bf16[8,1024]{1,0} parameter(0)
  %all-gather.1 = bf16[32,1024]{1,0} all-gather(%x), channel_id=7, replica_groups={{0,1,2,3}}
  ROOT %s = bf16[32,1024]{1,0} custom-call(%x, %all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%b (x.1: bf16[8,1024]) -> bf16[32,1024] {
  %x.1 = bf16[8,1024]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[32,1024]{1,0} all-gather(%x.1), channel_id=7, replica_groups={{0,1,2,3}}
}

%c (x.2: bf16[8,1024]) -> bf16[32,1024] {
  %x.2 = bf16[8,1024]{1,0} parameter(0)
  %all-gather.3 = bf16[32,1024]{1,0} all-gather(%x.2), channel_id=7, replica_groups={{0,1,2,3}}
  ROOT %d = bf16[32,1024]{1,0} custom-call(%all-gather.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (p: bf16[8,1024]) -> bf16[32,1024] {
  %p = bf16[8,1024]{1,0} parameter(0)
  %start = bf16[32,1024]{1,0} fusion(%p), kind=kCustom, calls=%a
  %between = bf16[32,1024]{1,0} fusion(%start), kind=kOutput, calls=%b, backend_config={"estimated_cycles":"15000"}
  ROOT %done = bf16[32,1024]{1,0} fusion(%between), kind=kCustom, calls=%c
}
"""
    found = follow(text)
    assert found.by_name["collectives", "all-gather"] == (pytest.approx(30e-6), 1)
    assert found.exposed["collectives"] == pytest.approx(20e-6)
    assert found.exposed["fusions"] == pytest.approx(10e-6) and not found.missing


def test_a_collective_on_the_sparse_core_goes_on_from_where_it_gets_its_operand():
    text = """HloModule m

%sparse (x: bf16[8,1024]) -> bf16[32,1024] {
  %x = bf16[8,1024]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[32,1024]{1,0} all-gather(%x), channel_id=7, replica_groups={{0,1,2,3}}
}

ENTRY %main (p: bf16[8,1024]) -> bf16[32,1024] {
  %p = bf16[8,1024]{1,0} parameter(0)
  %start = ((), ()) custom-call-start(), async_execution_thread="sparsecore", called_computations={%sparse}
  %first = bf16[8,1024]{1,0} fusion(%p), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"30000"}
  %update = ((bf16[8,1024]{1,0}), bf16[32,1024]{1,0}) custom-call-update(%start, %first)
  %between = bf16[8,1024]{1,0} fusion(%p), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"15000"}
  ROOT %done = bf16[32,1024]{1,0} custom-call-done(%update)
}
"""
    found = follow(text)
    assert found.by_name["collectives", "all-gather"] == (pytest.approx(30e-6), 1)
    assert found.exposed["collectives"] == pytest.approx(20e-6) and found.hidden["collectives"] == pytest.approx(10e-6)
    assert found.exposed["fusions"] == pytest.approx(30e-6) and not found.missing
    gather = follow(text.replace(" all-gather(%x), channel_id=7, replica_groups={{0,1,2,3}}", " gather(%x)"))
    assert gather.missing["custom-call-start start: its time is not known"] == 1


@pytest.mark.parametrize(("back", "seconds"), [("{1,0},{0,1}", 60e-6), ("{0,2},{2,0}", 30e-6)])
def test_permutes_along_other_links_go_on_side_by_side(back, seconds):
    text = f"""HloModule m

ENTRY %main (p: bf16[8,1024]) -> (bf16[8,1024], bf16[8,1024]) {{
  %p = bf16[8,1024]{{1,0}} parameter(0)
  %a = (bf16[8,1024]{{1,0}}, bf16[8,1024]{{1,0}}) collective-permute-start(%p), source_target_pairs={{{{0,1}},{{1,0}}}}
  %b = (bf16[8,1024]{{1,0}}, bf16[8,1024]{{1,0}}) collective-permute-start(%p), source_target_pairs={{{back}}}
  %c = bf16[8,1024]{{1,0}} collective-permute-done(%a)
  %d = bf16[8,1024]{{1,0}} collective-permute-done(%b)
  ROOT %t = (bf16[8,1024]{{1,0}}, bf16[8,1024]{{1,0}}) tuple(%c, %d)
}}
"""
    assert follow(text).exposed["collectives"] == pytest.approx(seconds)
    # A gather takes all links, so it waits for the permutes.
    gather = text.replace(
        "collective-permute-start(%p), source_target_pairs={" + back, "all-gather-start(%p), replica_groups={{0,1}"
    )
    gather = gather.replace("collective-permute-done(%b)", "all-gather-done(%b)")
    assert follow(gather).exposed["collectives"] == pytest.approx(60e-6)


def test_groups_in_every_form():
    assert group_of("replica_groups={}", 3) == [0, 1, 2]
    assert group_of("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", 8) == [0, 2]
    assert group_of("replica_groups=mesh['a'=2,'b'=2] {'a'}", 4) == [0, 2]
    assert group_of("source_target_pairs={{3,1},{1,3}}", 4) == [3, 1]
    with pytest.raises(UnsupportedError, match="cannot be read"):
        group_of("replica_groups=mesh['a'=2,'b'=2] {'a':(1)2}", 4)


@needs_libtpu
def test_bytes_and_links_of_a_collective():
    module = parse_module(PROGRAM)
    seconds = link_seconds(module, aot.mesh_for("v5e:2x2", {"x": 4}).devices.tolist())
    bandwidth = 2 * CHIP.ici_bandwidth  # a square of four chips: two links into each
    assert seconds(module.by_name["all-gather-start.1"], False) == pytest.approx(8 * MIB * 3 / 4 / bandwidth)
    assert seconds(module.by_name["all-reduce.1"], False) == pytest.approx(2 * 2 * MIB * 3 / 4 / bandwidth)
    assert seconds(module.by_name["all-reduce.1"], True) == pytest.approx(2 * MIB * 3 / 4 / bandwidth)


@needs_libtpu
@pytest.mark.long
def test_the_time_of_a_compiled_program_over_a_slice(monkeypatch, tmp_path):
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path))
    mesh = Mesh(aot.mesh_for("v5e:2x2", {"fsdp": 4}).devices, ("fsdp",))

    def shape(size, *spec):
        return jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    def forward(weights, x):
        return jax.lax.scan(lambda h, w: (jax.nn.gelu(h @ w), None), x, weights)[0]

    def arguments(layers):
        return shape((layers, 4096, 4096), None, None, "fsdp"), shape((8192, 4096), "fsdp")

    six = planning.step_time(forward, *arguments(6), target="v5e:2x2")
    products = 6 * 2 * 2048 * 4096**2 / CHIP.peak_bf16
    gathers = 6 * 32 * MIB * 3 / 4 / (2 * CHIP.ici_bandwidth)
    assert six.step.level == "verified" and not six.missing and six.memory.fits
    assert products < six.parts["fusions"].value < 1.5 * products
    (row,) = (row for row in six.rows if row.part == "collectives")
    assert (row.name, row.calls, row.seconds) == ("all-gather", 6, pytest.approx(gathers))
    assert max(map(len, str(six).splitlines())) <= 80

    monkeypatch.setattr(planning.Compiler, "_answer", lambda *_: pytest.fail("asked again"))
    assert planning.step_time(forward, *arguments(6), target="v5e:2x2") == six


@needs_libtpu
@pytest.mark.turns(2)
def test_tables_that_hold_numbers_steer_the_kernels_of_a_decoding_step():
    """Pages of four times the tokens take about four times as long; of a table's shape alone nothing is known."""
    model = {"model_type": "llama", "vocab_size": 512, "hidden_size": 1024, "intermediate_size": 1024}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}
    config = ModelConfig.from_dict(model | heads | {"max_position_embeddings": 4096})
    times = []
    for length in (1024, 4096):
        serving = Serving(config, 32, length, page_size=64)
        with Compiler() as compiler:
            _, found = time_program(compiler, trace_serving(serving, "v5e"))
        assert not found.uncertain
        (kernel,) = [row for row in found.rows if "paged" in row.name and "attention" in row.name]
        pages = 32 * length * kv_bytes_per_token(serving)
        least = pages / CHIP.hbm_bandwidth_per_device
        assert least <= kernel.seconds <= 1.4 * least, (kernel, least)
        times.append(kernel.seconds)
    assert times[1] == pytest.approx(4 * times[0], rel=0.15)


@needs_libtpu
def test_a_libtpu_that_writes_no_schedules_is_an_error(tmp_path):
    with pytest.raises(DeviceError, match="wrote no schedules for v5e"):
        program_time._follow(tmp_path, "v5e", ())


def training(**keys):
    model = {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
    }
    return from_dict(
        {"model": {"config": model, "compute_dtype": "bfloat16"}, "data": {"sequence_length": 512}, **keys}
    )


def test_the_analytic_time_follows_what_a_step_does():
    parts: dict[str, planning.Estimate] = {}
    parts |= dict.fromkeys(CLASSES, planning.Estimate(64 * MIB, "analytic"))

    def seconds(target="v5e:2x2", **keys):
        return training_time(training(batch_size=64, **keys), target, Breakdown(target, 1 << 34, parts)).value

    fsdp = seconds(mesh={"fsdp": 4})
    assert seconds(mesh={"fsdp": 4}, remat="full") > fsdp
    assert seconds(mesh={"fsdp": 4}, microbatches=4) > fsdp
    assert seconds(mesh={"data": 4}) != fsdp and seconds("v5p") < seconds("v5e")
    speed = training_speed(training(batch_size=64), "v5e", planning.Estimate(0.5, "verified", "s"))
    assert speed.tokens_per_chip.value == 64 * 512 / 0.5 and 0 < speed.mfu.value < 1 and speed.mfu.level == "verified"
    assert speed.cost(1.2).value == pytest.approx(1.2 / 3600 * 0.5 / (64 * 512) * 1e6)
    assert "197 TFLOP/s (bfloat16)" in str(speed)


def test_what_each_mesh_axis_exchanges():
    links = AxisLinks(CHIP, (4,), (False,))

    def seconds(recomputed=0.0, model=None, **sizes):
        config = training(batch_size=64, mesh=sizes)
        described = ModelConfig.from_dict(config.model.config | (model or {}))
        target = {1: "v5e", 2: "v5e:1x1", 4: "v5e:2x2", 16: "v5e:4x4"}[math.prod(sizes.values())]
        axes = {axis for axis, size in sizes.items() if size > 1}
        # Most of a device's parameters are split by "fsdp", a part of them by "expert" too, and norms by no axis.
        parts = {("fsdp",): 44e6, ("expert", "fsdp"): 16e6, (): 4e6}
        found: dict[tuple[str, ...], float] = {}
        for split, nbytes in parts.items():
            kept = tuple(axis for axis in split if axis in axes)
            found[kept] = found.get(kept, 0.0) + nbytes
        return exchange_seconds(config, target, described, found, recomputed)

    assert seconds(data=1) == {}
    stream, around = 64 * 512 * 512 * 2, AxisLinks(CHIP, (2, 2), (False, False))
    tensor = seconds(tensor=4)
    assert tensor["tensor"] == pytest.approx((4 * 4 + 2) * estimate_collective("all_reduce", stream, around))
    assert tensor["data"] == pytest.approx(estimate_collective("all_reduce", 64e6, around))  # as none is split
    assert seconds(recomputed=1.0, tensor=4)["tensor"] == pytest.approx(tensor["tensor"] * 26 / 18)
    fsdp = seconds(fsdp=4)
    # Parameters are gathered in bfloat16, and their gradients are added up in float32; norms are whole everywhere.
    gathered, added = (
        estimate_collective("all_gather", 4 * 30e6, around),
        estimate_collective("reduce_scatter", 4 * 60e6, around),
    )
    norms = estimate_collective("all_reduce", 4e6, around)
    assert fsdp == {"fsdp": pytest.approx(2 * gathered + added), "data": pytest.approx(norms)}

    ring = seconds(sequence=4)
    keys = 64 * 512 / 4 * 2 * 512  # numbers: tokens of a device, keys and values, features
    hop, back = (estimate_collective("permute", keys * size, links) for size in (2, 4))
    assert ring["sequence"] == pytest.approx(4 * (3 * 2 * hop + 4 * back))
    assert ring["data"] == pytest.approx(estimate_collective("all_reduce", 64e6, around))
    windowed = seconds(model={"model_type": "mistral", "sliding_window": 129}, sequence=4)
    assert windowed["sequence"] == pytest.approx(4 * (1 * 2 * hop + 4 * back))

    mixture = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    found = seconds(model=mixture, data=4, expert=4)
    line, square = links, AxisLinks(CHIP, (4, 4), (False, False))
    dense, apart = estimate_collective("all_reduce", 48e6, square), estimate_collective("all_reduce", 16e6, line)
    assert found["data"] == pytest.approx(dense + apart)


@pytest.mark.parametrize("batch_size, hidden_away", [(16, False), (256, True)])  # few rows read all weights in vain
def test_rows_of_experts_count_as_far_as_products_do_not_hide_them(batch_size, hidden_away):
    links, rows, top_k, inner = AxisLinks(CHIP, (4,), (False,)), batch_size * 512 // 16, 1, 16384
    mixture = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": top_k}
    config = training(batch_size=batch_size, mesh={"data": 4, "expert": 4})
    described = ModelConfig.from_dict(config.model.config | mixture | {"intermediate_size": inner})
    found = exchange_seconds(config, "v5e:4x4", described, {}, 1.0)["expert"]
    once = estimate_collective("all_to_all", 4 * 4 * rows * top_k * 512 * 2, links)
    if not hidden_away:  # to the experts and back, forward, again, and backward, in each of 4 layers
        assert found == pytest.approx(4 * 6 * once)
        return
    estimate = functools.partial(
        estimate_exchange, rows * top_k, experts=2, dtype="bfloat16", links=links, rows=rows * top_k / 4
    )
    there, back = estimate(k=512, n=2 * inner), estimate(k=inner, n=512, results=True)
    assert there.overlapped + back.overlapped < there.plain + back.plain  # so the layer sends pieces
    home, away = estimate(k=512, n=inner), estimate(k=2 * inner, n=512, results=True)
    assert found == pytest.approx(4 * (2 * (there.exposed + back.exposed) + home.exposed + away.exposed))
    assert found < 4 * 6 * once


@needs_libtpu
@pytest.mark.parametrize("target", ["v5e:2x4", "v5e:4x4", "v5p:2x2x4", "tpu7x:2x2x2"])
def test_the_links_of_a_mesh_are_those_of_its_devices(target):
    devices = libtpu.devices_for(target)
    for sizes in itertools.product(divisors(len(devices)), repeat=3):
        others, odd = divmod(len(devices), math.prod(sizes))
        if odd or not others:
            continue
        section = MeshSection(data=others, fsdp=sizes[0], sequence=sizes[1], tensor=sizes[2])
        params = {"up": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
        mesh = make_layout(section, params, {"up": (None, None)}, 64 * len(devices), 1, devices).mesh
        assert mesh is not None
        assert set(mesh.devices.flat) == set(devices)
        for axis in (name for name, size in mesh.shape.items() if size > 1):
            found = links_of(section, target, axis)
            try:
                assert found == axis_links(mesh, axis)
            except UnsupportedError:  # others use its links, too
                assert len(found.sides) == 1 and found.links == 1


@needs_libtpu
def test_a_program_keeps_the_order_of_its_mesh():
    devices = libtpu.devices_for("v5e:2x2")
    order = [devices[i] for i in (2, 0, 3, 1)]
    sharding = NamedSharding(Mesh(np.array(order), ("x",)), P("x"))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    program = trace(jnp.sin, x, target="v5e:2x2")
    assert [device.id for device in devices_in_order(program)] == [device.id for device in order]
    one = trace(jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32), target="v5e")
    assert devices_in_order(one) == libtpu.devices_for("v5e")


@pytest.mark.turns(6)
def test_the_range_of_times_is_that_of_the_published_steps():
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    from subjects.plans import published as published_steps

    from vishwamai.planning.time.published import STEPS, published_range

    assert len(STEPS) == len(published_steps.ROWS)
    for step, row in zip(STEPS, published_steps.ROWS):
        formula = training_time(published_steps.configured(row, {}), row.target).value
        assert (step.target, step.experts) == (row.target, row.model["model_type"] == "mixtral")
        assert step.seconds == pytest.approx(row.seconds, rel=1e-3)
        assert step.estimates[0] == pytest.approx(formula, rel=2e-3), row
    found = published_range("v6e:2x2", experts=True)
    text = found.describe(Estimate(0.1, "analytic", "s"), "v6e:2x2")
    kind = "1 published training step of mixtures of experts"
    assert text == f"167.7 to 167.7 ms, for {kind} on v6e took 1.68 of such estimates"
    assert "on other chips (none of v4)" in published_range("v4", experts=False).comparison("v4")
