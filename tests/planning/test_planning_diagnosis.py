"""Out of memory in words: the peak read from the compiler's texts, the changes and their order, the commands."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from vishwamai import aot, planning
from vishwamai.aot.compile.live_ranges import read_dump
from vishwamai.aot.compile.traced import Argument
from vishwamai.cli import main
from vishwamai.core.errors import ConfigError, KernelError
from vishwamai.planning import Change, Estimate
from vishwamai.planning.memory.peak import peak_memory
from vishwamai.planning.search import advice
from vishwamai.planning.search import plan as search
from vishwamai.planning.search.advice import alternatives, explain_training, training_changes
from vishwamai.planning.search.diagnosis import ranked
from vishwamai.planning.time.speed import training_time
from vishwamai.planning.training import trace_training
from vishwamai.training.config_file import from_dict, read_config, to_dict

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")
EXAMPLE = Path(__file__).parents[2] / "examples" / "out_of_memory.yaml"
GIB = 1 << 30

LIVE_RANGES = """HloLiveRange (max 9):
  InstructionSequence:
    0:args_0_.1
  Live ranges at 5 (peak):
    custom-call.1{}: 4096 bytes (cumulative: 4096 bytes)
    args_1_.1{}: 2048 bytes (cumulative: 6144 bytes)
    fusion.2{1}: 2048 bytes (cumulative: 8192 bytes)
    convert.7{}: 1024 bytes (cumulative: 9216 bytes)
    in_vmem.3{}: 512 bytes (cumulative: 9728 bytes)
    flag.4{}: 512 bytes (cumulative: 10240 bytes)
  Stack trace breakdown for peak usage: 10240 bytes
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 2048, page 0, parameter 0, shape |f32[16,32]| at ShapeIndex {}:
 value: <10 args_1_.1 @0> (size=2048,offset=0): f32[16,32]{1,0:T(8,128)}
allocation 1: size 8192, page 0, preallocated-temp:
 value: <11 custom-call.1 @0> (size=4096,offset=0): bf16[4,16,32]{2,1,0:T(8,128)(2,1)}
 value: <12 stacked.5 @0> (size=4096,offset=0): bf16[4,16,32]{2,1,0:T(8,128)(2,1)}
 value: <13 fusion.2{1} @0> (size=2048,offset=4096): f32[16,32]{1,0:T(8,128)}
 value: <14 convert.7 @0> (size=1024,offset=6144): bf16[16,32]{1,0:T(8,128)(2,1)}
 value: <15 in_vmem.3 @0> (size=512,offset=7168): f32[128]{0:T(128)S(1)}
allocation 2: size 512, color 2, page 0, preallocated-temp:
 value: <16 flag.4 @2> (size=512,offset=0): f32[128]{0:T(128)}
"""
PROGRAM = """HloModule jit_call, is_scheduled=true

FileNames
1 "/home/me/model.py"
2 "/site-packages/jax/numpy.py"
3 "/site-packages/vishwamai/aot/schedule/job.py"

FunctionNames
1 "block"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=9}
2 {file_name_id=2 function_name_id=1 line=99 end_line=99 column=1 end_column=9}
3 {file_name_id=3 function_name_id=1 line=90 end_line=90 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=2 parent_frame_id=3}

%body (p: (bf16[4,16,32])) -> (bf16[4,16,32]) {
  %gate.6 = bf16[16,32]{1,0} custom-call(), custom_call_target="tpu", \
metadata={op_name="jit(call)/jvp()/while/body/gated/pallas_call" stack_frame_id=2}
  %buffer.8 = bf16[4,16,32]{2,1,0} parameter(0)
  %stacked.5 = bf16[4,16,32]{2,1,0} fusion(%buffer.8, %gate.6), kind=kLoop, calls=%f, \
metadata={op_name="jit(call)/jvp()/while/body/dynamic_update_slice"}
}

ENTRY %main (args_1_.1: f32[16,32]) -> f32[16,32] {
  %args_1_.1 = f32[16,32]{1,0} parameter(0), metadata={op_name="args[1]"}
  %custom-call.1 = bf16[4,16,32]{2,1,0} custom-call(), custom_call_target="AllocateBuffer", \
metadata={op_name="jit(call)"}
  %convert.7 = bf16[16,32]{1,0} convert(%args_1_.1)
  %fusion.2 = (f32[], f32[16,32]{1,0}) fusion(%args_1_.1), kind=kLoop, calls=%g, \
metadata={op_name="jit(call)/transpose(jvp(mixer))/dot_general" stack_frame_id=1}
  ROOT %in_vmem.3 = f32[128]{0:S(1)} copy(%args_1_.1)
}
"""


def write_dump(folder, **changes):
    texts = {"-live-range": LIVE_RANGES, "-buffer-assignment": ASSIGNMENT, "": PROGRAM} | changes
    for name, text in texts.items():
        if text is not None:
            (folder / f"module_0000.jit_call.after_optimizations{name}.txt").write_text(text)


def of_arguments(name="training_step_of"):
    paths = ("[0].step", "[0].params['layers'][0]['up']")
    arguments = tuple(Argument(path, 2048, False, None) for path in paths)
    return planning.Program(name, "v5e", b"", arguments, "f" * 32)


def test_the_peak_is_read_from_the_texts_of_the_compiler(tmp_path):
    write_dump(tmp_path)
    found = peak_memory(of_arguments(), 12_000, read_dump(tmp_path))
    rows = [(one.use, one.nbytes, one.shape, one.path, one.source, one.where) for one in found.arrays]
    assert rows == [
        ("activations", 4096, "bf16[4,16,32]", "", "gated", "model.py:12"),  # by the loop that fills the buffer
        ("parameters", 2048, "f32[16,32]", "[0].params['layers'][0]['up']", "", ""),
        ("gradients", 2048, "f32[16,32]", "", "mixer/dot_general", "model.py:12"),
        ("temporaries", 1024, "bf16[16,32]", "", "convert of [0].params['layers'][0]['up']", ""),
    ]  # without what lies in VMEM or in another memory
    assert found.by_use["gaps"] == 12_000 - 9216 and sum(found.by_use.values()) == 12_000
    assert "activations 4.0 KiB" in str(found) and "gated at model.py:12" in str(found)
    assert peak_memory(of_arguments("f"), 12_000, read_dump(tmp_path)).by_use["arguments"] == 2048


def test_a_function_of_a_library_has_no_line(tmp_path):
    """Its innermost line outside of JAX is that of the file which traces it, which says nothing."""
    write_dump(tmp_path, **{"": PROGRAM.replace("stack_frame_id=2", "stack_frame_id=4")})
    gated = peak_memory(of_arguments(), 12_000, read_dump(tmp_path)).arrays[0]
    assert (gated.source, gated.where) == ("gated", "") and str(gated).endswith("gated")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"-live-range": None}, "libtpu wrote no after_optimizations-live-range.txt"),
        ({"": None}, "libtpu wrote no after_optimizations.txt"),
        ({"-live-range": "HloLiveRange:\n  at the peak: all\n"}, "in an unknown form"),
    ],
)
def test_texts_of_another_form_are_an_error(tmp_path, changes, words):
    write_dump(tmp_path, **changes)
    with pytest.raises(KernelError, match=words):
        read_dump(tmp_path)


def change(words, cost, probe, rounds=False):
    seconds = None if cost is None else Estimate(cost, "analytic", "s")
    after = None if probe is None else Estimate(probe, "probe")
    return Change(words, Estimate(1, "analytic"), seconds, 10, after, "" if probe else "why", None, rounds)


def test_changes_that_fit_and_cost_least_come_first():
    order = [
        change("free", -1.0, 9),
        change("free, rounds", 0.0, 1, True),
        change("slow", 0.5, 1),
        change("unknown", None, 1),
        change("near", 0.0, 11),
        change("far", 0.0, 20),
        change("declined", None, None),
    ]
    assert ranked(order[::-1]) == tuple(order)
    texts = [str(one) for one in order]
    assert "costs no time by this bound; then 9 bytes (probe): fits" in texts[0] and "changes numbers" in texts[1]
    assert "costs 500 ms (analytic) of a step or more" in texts[2] and "not known" in texts[3]
    assert "does not fit" in texts[4] and "declined: why" in texts[6]


def small(**keys):
    model = {"model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256}
    model |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
    section = {"config": model, "compute_dtype": "bfloat16"}
    return from_dict({"model": section, "data": {"sequence_length": 128}, "batch_size": 8, **keys})


def test_every_single_change_of_a_configuration():
    found = dict(alternatives(small(mesh={"data": 4}, microbatches=1), "v5e:2x2"))
    assert list(found) == [
        "microbatches=2",
        "remat=dots",
        "remat=block_wise",
        "remat=full",
        "remat=offload",
        "mesh.data=2 mesh.fsdp=2",
        "mesh.data=1 mesh.fsdp=4",
        "optimizer.moment_dtype=bfloat16",
        "optimizer.moment_dtype=int8",
    ]
    for words, config in found.items():  # the words are what the command line takes
        assert read_config(None, [f"batch_size={config.batch_size}", *words.split()]).steps == config.steps
    pinned = small(optimization={"gradient_checkpointing": True}, optimizer={"name": "lion"})
    assert [words for words, _ in alternatives(pinned, "v5e")][-4:] == [
        "microbatches=8",
        "remat=full",
        "remat=offload",
        "optimizer.moment_dtype=bfloat16",
    ]


@pytest.mark.turns(5)
def test_the_time_by_formulas_grows_with_what_is_computed_again():
    wide = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 16}
    model = {"config": wide | {"model_type": "llama", "max_position_embeddings": 128}, "compute_dtype": "bfloat16"}
    base = small(mesh={"data": 4}, model=model)
    found = ((name, config) for name, config in alternatives(base, "v5e:2x2") if name != "remat=offload")
    seconds = {name: training_time(config, "v5e:2x2").value for name, config in found}
    start = training_time(base, "v5e:2x2").value
    assert seconds["remat=dots"] <= start < seconds["remat=block_wise"] and start < seconds["remat=full"]
    assert start < seconds["microbatches=2"] and all(seconds.values())


@pytest.mark.long
def test_each_change_is_probed_and_what_is_declined_says_why(monkeypatch, tmp_path):
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path))

    def answer(self, program, hbm_mib, *_):
        if program.name == "optimizer.moment_dtype=int8":
            return {"rejected": "no such thing", "kind": "compiler"}
        return {"needed": 3 * GIB, "allocations": []}

    names = {repr(config): words for words, config in alternatives(small(), "v5e")}

    def fake(config, target):
        return planning.Program(names[repr(config)], target, b"", (), names[repr(config)])

    monkeypatch.setattr(advice, "trace_training", fake)
    monkeypatch.setattr(planning.Compiler, "_answer", answer)
    said = []
    found = {one.words: one for one in training_changes(small(), "v5e", planning.Compiler(), said.append)}
    assert len(found) == len(said) == 6
    assert found["optimizer.moment_dtype=int8"].declined == "no such thing"
    assert all(one.saving.level == "analytic" and one.config is not None for one in found.values())


@needs_libtpu
@pytest.mark.long
def test_the_first_change_of_the_example_makes_it_fit(monkeypatch):
    monkeypatch.setattr(advice, "MOST", 2)
    config = read_config(EXAMPLE)
    with planning.Compiler() as compiler:
        found = explain_training(config, "v5e", compiler)
        assert not found.fits and found.peak.total.value == compiler.probe(trace_training(config, "v5e")).total.value
        uses = found.peak.by_use
        assert uses["activations"] > 0.3 * found.peak.total.value and uses["gaps"] < 0.2 * found.peak.total.value
        assert any("'up'" in one.path for one in found.peak.arrays)
        assert any("gated_linear_unit" in one.source for one in found.peak.arrays)
        first = found.changes[0]
        assert first.config is not None and first.words == "remat=dots" in EXAMPLE.read_text()
        again = compiler.probe(trace_training(first.config, "v5e"))  # kept
    assert first.fits and again.fits and again.total == first.probe
    assert "1. remat=dots" in str(found)


@needs_libtpu
@pytest.mark.long
def test_a_function_is_explained_and_donation_makes_it_fit(capsys):
    def update(state, x):
        return {"w": state["w"] - jnp.tanh(state["w"]) * x, "n": state["n"] + 1}

    state = {"w": jax.ShapeDtypeStruct((50_000, 50_000), jnp.float32), "n": jax.ShapeDtypeStruct((), jnp.int32)}
    x = jax.ShapeDtypeStruct((), jnp.float32)
    found = planning.explain_memory(update, state, x, target="v5e")
    assert found.peak.by_use["arguments"] >= 10**10 and found.peak.arrays[0].path == "[0]['w']"
    first = found.changes[0]
    assert first.words.startswith("donate [0] ") and first.fits and not found.fits
    fixed = jax.jit(update, donate_argnums=(0,))
    assert planning.verify(fixed, state, x, target="v5e").fits
    assert planning.explain_memory(fixed, state, x, target="v5e").changes == ()

    assert main(["check", "vishwamai:softmax", "--args", "f32[60000,60000]", "--target", "v5e"]) == 1
    out = capsys.readouterr().out
    assert "arguments 13.4 GiB, temporaries 13.4 GiB" in out and "softmax_forward" in out
    assert "donate [0]" in out and "float32 arguments in bfloat16, which changes numbers" in out


@needs_libtpu
@pytest.mark.long
def test_options_of_the_compiler_reach_a_probe_and_have_answers_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path))
    asked = []
    answer = planning.Compiler._answer
    monkeypatch.setattr(planning.Compiler, "_answer", lambda self, *a: (asked.append(a[2]), answer(self, *a))[1])
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    options = {"xla_tpu_scoped_vmem_limit_kib": 32768}
    for _ in range(2):
        assert planning.probe(lambda a: a @ a, x, target="v5e").fits
        assert planning.probe(lambda a: a @ a, x, target="v5e", compiler_options=options).fits
    assert [bool(one) for one in asked] == [False, False, True, True]  # a probe asks twice
    assert planning.verify(lambda a: a @ a, x, target="v5e", compiler_options=options).total.level == "verified"
    with pytest.raises(ConfigError, match="xla_tpu_scoped_vmem_limit_kb"):
        planning.verify(lambda a: a @ a, x, target="v5e", compiler_options={"xla_tpu_scoped_vmem_limit_kb": 1})


@pytest.mark.turns(3)
def test_the_command_says_what_to_change(capsys, monkeypatch, tmp_path):
    peak = planning.PeakMemory("v5e", Estimate(20 * GIB, "probe"), 16 * GIB, ())
    found = planning.Diagnosis(peak, (dataclasses.replace(change("remat=full", 0.25, 9), limit=10),))
    monkeypatch.setattr(advice, "explain_training", lambda *_: found)
    monkeypatch.setattr(search, "trace_training", lambda config, target: of_arguments())
    monkeypatch.setattr(planning.Compiler, "_answer", lambda *_: {"needed": 20 * GIB, "allocations": []})
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path))
    (tmp_path / "run.yaml").write_text(json.dumps(to_dict(small())))
    arguments = ["plan", str(tmp_path / "run.yaml"), "--target", "v5e"]
    assert main(arguments) == 1
    assert "  1. remat=full: saves 1 bytes (analytic), costs 250 ms" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 1
    (one,) = json.loads(capsys.readouterr().out)["too_large"]
    assert one["changes"][0]["change"] == "remat=full" and one["total_bytes"] == 20 * GIB
