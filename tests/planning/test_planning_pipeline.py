"""Plans of configurations with `mesh.pipeline`: the memory and the time of the step that training compiles."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from plans import GIB, LLAMA, training
from vishwamai import aot, planning
from vishwamai.aot.compile import libtpu
from vishwamai.cli.plan_training import table
from vishwamai.core.errors import ConfigError, UnsupportedError
from vishwamai.core.hardware import TPUS
from vishwamai.core.hlo import parse_module
from vishwamai.models import Decoder
from vishwamai.parallel.pipeline.ticks import COLUMNS
from vishwamai.planning.memory.analytic import CLASSES, Breakdown, described, training_memory
from vishwamai.planning.memory.pipeline_buffers import microbatches_kept, stretch
from vishwamai.planning.search.advice import alternatives
from vishwamai.planning.search.candidates import candidates
from vishwamai.planning.search.plan import plan_training
from vishwamai.planning.time.program_time import time_program
from vishwamai.planning.time.speed import training_time
from vishwamai.planning.time.timeline import Follower
from vishwamai.planning.training import trace_training
from vishwamai.training.checks import check
from vishwamai.training.config_file import from_dict
from vishwamai.training.model import model_config, split
from vishwamai.training.pipeline.stages import cut, make_stages
from vishwamai.training.program import make_loss, make_step
from vishwamai.training.sharding import batch_spec, make_layout
from vishwamai.training.slices import on_slice
from vishwamai.training.step import initial_state, update_rule

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")
CHIP = TPUS["v5e"]


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path))


def staged(model=None, batch_size=16, microbatches=4, **keys):
    given: dict[str, Any] = {"mesh": {"pipeline": 2, "data": 2}} | keys
    config = training(batch_size=batch_size, microbatches=microbatches, **given)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, config=LLAMA | (model or {})))


def computation(name, cycles, *more):
    lines = [f"%{name} (x{name}: f32[8]) -> f32[8] {{", f"  %x{name} = f32[8]{{0}} parameter(0)", *more]
    made = f"fusion(%x{name}), kind=kLoop, calls=%f"
    lines.append(f'  ROOT %r{name} = f32[8]{{0}} {made}, backend_config={{"estimated_cycles":"{cycles}"}}')
    return "\n".join([*lines, "}", ""])


def conditional(name, operand, branches, column):
    scope = f'metadata={{op_name="jit(f)/while/body/tick_{column}/cond"}}'
    return f"  %{name} = f32[8]{{0}} conditional(%i, {operand}), {branches}, {scope}"


# A tick that computes the loss takes 5,000 cycles and not 2,000, and a permute follows every action.
TICKS = "".join(
    [
        "HloModule m\n\n",
        computation("idle", 0),
        computation("forward", 1000),
        computation("next", 0),
        computation("loss", 3000),
        computation(
            "both", 2000, conditional("end", "%xboth", "true_computation=%loss, false_computation=%next", "last")
        ),
        computation("weights", 0),
        """
%condition (c: (s32[], f32[8])) -> pred[] {
  %limit = s32[] constant(4)
  %c = (s32[], f32[8]) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  ROOT %less = pred[] compare(%n, %limit), direction=LT
}

%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {
  %b = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[8]{0} get-tuple-element(%b), index=1
""",
        conditional("action", "%x, %x, %x, %x", "branch_computations={%idle, %forward, %both, %weights}", "kind"),
        """
  %sent = f32[8]{0} collective-permute(%action), source_target_pairs={{0,1},{1,0}}
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %sent)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %first = s32[] constant(0)
  %start = (s32[], f32[8]{0}) tuple(%first, %p)
  %while.1 = (s32[], f32[8]{0}) while(%start), condition=%condition, body=%body
  ROOT %y = f32[8]{0} get-tuple-element(%while.1), index=1
}
""",
    ]
)


def test_a_tick_takes_the_longest_action_of_the_stages():
    cells = np.zeros((4, 2, len(COLUMNS)), np.int32)
    kind, last = COLUMNS.index("kind"), COLUMNS.index("last")
    cells[:, :, kind] = [[1, 0], [1, 1], [1, 2], [2, 1]]
    cells[2, 1, last] = 1

    def follow(ticks):
        follower = Follower(parse_module(TICKS), CHIP, lambda name: None, lambda one, scattered: 1e-6, ticks)
        return follower, follower.follow()

    follower, found = follow(cells)
    assert follower.ticked
    cycle = 1 / CHIP.clock
    # The second stage is busy longest, for 1000 + 5000 + 1000 cycles. It waits for the first in two ticks.
    assert found.exposed["fusions"] == pytest.approx(7000 * cycle)
    assert found.exposed["stages"] == pytest.approx((1000 + 1000) * cycle)
    assert found.exposed["collectives"] == pytest.approx(4e-6)
    assert found.by_name["fusions", "rloss"] == (pytest.approx(3000 * cycle), 1)
    assert found.by_name["collectives", "collective-permute"][1] == 4
    # Without a table, or with that of another loop, every tick counts the longest branch.
    for other in (None, cells[:3]):
        follower, found = follow(other)
        assert not follower.ticked and found.exposed["fusions"] == pytest.approx(4 * 5000 * cycle)
        assert "stages" not in found.exposed


def test_the_schedule_stretches_a_step():
    def ratio(recomputed=0.0, **keys):
        config = staged({"vocab_size": 1}, **keys)
        return stretch(config, described(config), recomputed)

    four = {"pipeline": 4}
    assert ratio(mesh={"data": 4}) == 1.0
    # One layer in a part: forward pass and both gradients take as long, so ticks are alike.
    ticks = len(cut(staged(mesh=four), described(staged()))[2].table)
    assert ratio(mesh=four) == pytest.approx(ticks / 12, rel=1e-3) and ticks >= 12 + 3
    assert ratio(mesh=four, microbatches=16) < ratio(mesh=four, microbatches=8) < ratio(mesh=four)
    # A stage that computes the loss lets the others wait.
    assert ratio(mesh=four) < stretch(staged(mesh=four), described(staged()), 0.0)
    # Two layers are a loop, whose gradients are one action.
    assert ratio(1.0, mesh={"pipeline": 2, "data": 2}) > ratio(mesh={"pipeline": 2, "data": 2}) > 1


def test_a_deeper_pipeline_with_few_microbatches_takes_longer():
    parts: dict[str, planning.Estimate] = {}
    parts |= dict.fromkeys(CLASSES, planning.Estimate(1, "analytic"))  # products and links are what is left

    def seconds(target="v5e:2x2", **keys):
        return training_time(staged(batch_size=64, **keys), target, Breakdown(target, 16 * GIB, parts)).value

    two, four = {"pipeline": 2, "data": 2}, {"pipeline": 4}
    assert seconds(mesh=four, microbatches=4) > seconds(mesh=two, microbatches=4)
    config = staged(mesh=four)
    assert microbatches_kept(config, described(config)) == 5  # as many as stages, and the slot that nothing reads
    assert microbatches_kept(staged(mesh={"data": 4}), described(config)) == 1


@pytest.mark.turns(5)
def test_a_stage_has_its_share_of_the_layers():
    whole = training_memory(staged(mesh={"data": 4}), "v5e:2x2").parts
    found = training_memory(staged(), "v5e:2x2").parts
    norm = 4 * 128  # the last one
    assert found["parameters"].value == (whole["parameters"].value - norm) / 2 + norm
    assert found["gradients"].value == found["parameters"].value  # float32, as the parameters
    more = training_memory(staged(microbatches=8), "v5e:2x2").parts
    assert more["activations"].value < found["activations"].value  # the same slots for fewer rows
    gpipe = training_memory(staged(pipeline={"schedule": "gpipe"}), "v5e:2x2").parts
    assert gpipe["activations"].value == pytest.approx(found["activations"].value * 5 / 3)


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        (
            {"mesh": {"pipeline": 4}, "remat": "offload"},
            UnsupportedError,
            "remat=offload with mesh.pipeline=4 frees nothing",
        ),
        ({"mesh": {"pipeline": 4}, "layers": 6}, ConfigError, "4 parts, which do not divide its 6 layers"),
        ({"pipeline": {"schedule": "dualpipe_v"}, "microbatches": 1}, ConfigError, "with microbatches=1: "),
        ({"mesh": {"pipeline": 4}, "model_type": "mixtral_dense"}, UnsupportedError, "needs layers that repeat"),
        ({"mesh": {"pipeline": 2, "sequence": 2}, "heads": 3}, ConfigError, "exchanges heads, and does not"),
        ({"mesh": {"pipeline": 1, "sequence": 4}, "length": 100}, ConfigError, "100 is not a multiple of 8, twice"),
    ],
)
def test_errors_are_those_of_training(monkeypatch, keys, error, text):
    monkeypatch.setattr(planning.Compiler, "_answer", lambda *_: pytest.fail("the compiler was asked"))
    keys = dict(keys)
    layers, heads, length = keys.pop("layers", 4), keys.pop("heads", 4), keys.pop("length", 128)
    model = LLAMA | {"num_hidden_layers": layers, "num_attention_heads": heads}
    model |= {"num_key_value_heads": 1, "head_dim": 32} if heads == 3 else {}
    if keys.pop("model_type", None):
        del model["num_key_value_heads"]
        model |= {"model_type": "deepseek_v3", "first_k_dense_replace": 1, "n_routed_experts": 4}
        model |= {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "kv_lora_rank": 16, "q_lora_rank": None}
        model |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1}
    given = {"mesh": {"pipeline": 2, "data": 2}, "microbatches": 4, "batch_size": 16} | keys
    data = {"sequence_length": length, "sources": [{"paths": ["text"]}]}
    config = from_dict({"model": {"config": model}, "data": data, "tokenizer": {"vocab_size": 512}, **given})
    with pytest.raises(error, match=text) as of_training:
        check(config)
    for planned in (
        lambda: plan_training(config, "v5e:2x2"),
        lambda: on_slice(config, "v5e:2x2"),
    ):
        with pytest.raises(error) as of_plan:
            planned()
        assert str(of_plan.value) == str(of_training.value)


def test_a_search_keeps_the_stages():
    found = list(candidates(staged(pipeline={"schedule": "zb_h1"}), "v5e:2x4"))
    assert {(c.mesh.pipeline, c.pipeline.schedule) for c in found} == {(2, "zb_h1")}
    assert all(c.mesh.data * c.mesh.fsdp * c.mesh.tensor == 4 for c in found) and {c.mesh.tensor for c in found} == {
        1,
        2,
    }
    assert {c.microbatches for c in found} == {1, 2, 4, 8} and len({c.remat for c in found}) == 4
    # What the schedule does not take is left out; where it takes nothing, the error says why.
    two = list(candidates(staged(pipeline={"schedule": "dualpipe_v"}), "v5e:2x4"))
    assert {c.microbatches for c in two} == {4, 8}
    with pytest.raises(ConfigError, match=r"mesh\.pipeline=8 .* 8 parts, which do not divide its 4 layers"):
        list(candidates(staged(mesh={"pipeline": 8}), "v5e:2x4"))
    with pytest.raises(ConfigError, match=r"mesh\.pipeline=3 does not divide the 8 devices"):
        list(candidates(staged(mesh={"pipeline": 3}), "v5e:2x4"))


@pytest.mark.turns(3)
def test_a_search_over_stages_asks_the_compiler_for_them(monkeypatch):
    asked = []

    def traced(config, target):
        asked.append(config)
        name = f"{config.mesh} {config.remat} {config.microbatches}"
        return planning.Program(name, target, b"", (), name)

    monkeypatch.setattr("vishwamai.planning.search.plan.trace_training", traced)
    monkeypatch.setattr("vishwamai.planning.search.candidates.REMAT", ("none",))
    monkeypatch.setattr(planning.Compiler, "_answer", lambda *_: {"needed": GIB, "allocations": []})
    config = staged(mesh={"pipeline": 2, "tensor": 2})
    plan = plan_training(config, "v5e:2x2", search=True, verify=False)
    assert plan.chosen is not None and all(one.mesh.pipeline == one.mesh.tensor == 2 for one in asked)
    lines = table(plan)
    assert lines[0].endswith("; mesh.pipeline=2, 1f1b") and max(map(len, lines)) <= 80
    assert plan.chosen.name.startswith("pipeline=2 ")


def test_changes_of_a_step_with_stages_are_those_that_stages_compute():
    words = [words for words, _ in alternatives(staged(pipeline={"schedule": "dualpipe_v"}), "v5e:2x2")]
    assert "microbatches=8" in words and "remat=full" in words and "remat=offload" not in words
    few = [words for words, _ in alternatives(staged(microbatches=1), "v5e:2x2")]
    assert few[:3] == ["microbatches=2", "microbatches=4", "microbatches=8"]


@needs_libtpu
@pytest.mark.long
@pytest.mark.parametrize(
    "keys",
    [{}, {"pipeline": {"schedule": "interleaved_1f1b"}, "remat": "full", "mesh": {"pipeline": 2, "fsdp": 2}}],
    ids=["1f1b", "interleaved"],
)
def test_the_memory_is_that_of_the_step_that_training_compiles(keys):
    config, target = staged(**keys), "v5e:2x2"
    (one,) = plan_training(config, target, time=False).candidates
    parts = split(
        nnx.eval_shape(lambda: Decoder(model_config(config), dtype=jax.numpy.bfloat16, stacked=True, rngs=nnx.Rngs(0)))
    )
    rows = config.batch_size, config.microbatches
    devices = libtpu.devices_for(target)
    layout = make_layout(config.mesh, parts.params, parts.axes, *rows, devices=devices, model=parts.config)
    stages = make_stages(config, parts.config, parts.params, parts.ranks, parts.stacked)
    mesh = layout.mesh
    assert stages is not None and mesh is not None
    update, attach = update_rule(config, parts.params, parts.ranks, layout.mesh_axes)
    step = make_step(config, make_loss(config, parts, layout, stages, attach), update, layout)
    state = jax.eval_shape(lambda p: initial_state(stages.place(p), update), parts.params)
    state = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        state,
        layout.specs(state),
    )
    batch = {
        name: jax.ShapeDtypeStruct((16, 128), jax.numpy.int32, sharding=NamedSharding(mesh, batch_spec(name)))
        for name in ("tokens", "labels", "positions", "segment_ids")
    }
    compiled = aot.compile_for(jax.jit(step, donate_argnums=0), state, batch, target=target)
    stats = compiled.compiled.memory_analysis()
    assert stats is not None
    total = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    total += stats.temp_size_in_bytes + stats.generated_code_size_in_bytes
    assert one.verified is not None and one.verified.value == total


@needs_libtpu
@pytest.mark.long
def test_the_bubble_of_the_compiled_step():
    def found(**keys):
        program = trace_training(staged(**keys), "v5e:2x2")
        with planning.Compiler() as compiler:
            _, time = time_program(compiler, program)
        assert time is not None and not any("ticks" in text for text in time.uncertain)
        return time

    two, four = found(), found(mesh={"pipeline": 4})
    for time in (two, four):
        assert time.step.value == pytest.approx(sum(part.value for part in time.parts.values()))
        assert f"stages {time.parts['stages'].value * 1e3:17.3f} ms" in str(time)
    assert 0 < two.parts["stages"].value / two.step.value < four.parts["stages"].value / four.step.value


@needs_libtpu
@pytest.mark.long
@pytest.mark.parametrize(
    "keys",
    [
        {"remat": "full"},
        {"remat": "none", "pipeline": {"schedule": "gpipe"}},
        {"remat": "dots", "mesh": {"pipeline": 2, "fsdp": 2}},
        {"remat": "full", "pipeline": {"schedule": "zb_v"}, "mesh": {"pipeline": 2, "sequence": 2}},
    ],
)
def test_formulas_are_near_the_probe(keys):
    wide = LLAMA | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 32000}
    wide |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024}
    given = {"model": {"config": wide, "compute_dtype": "bfloat16"}, "data": {"sequence_length": 1024}}
    given |= {"batch_size": 32, "microbatches": 4, "mesh": {"pipeline": 2, "data": 2}}
    (one,) = plan_training(from_dict(given | keys), "v5e:2x2", verify=False).candidates
    assert one.probe is not None and one.analytic.value == pytest.approx(one.probe.value, rel=0.25)
