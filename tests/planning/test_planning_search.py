"""The search of a training step's plan, and the command that prints it."""

import dataclasses
import io
import json
import math
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from plans import GIB, LLAMA, training
from vishwamai import planning
from vishwamai.cli import main
from vishwamai.cli.plan_training import table
from vishwamai.cli.progress import Countdown, _countdown_bar
from vishwamai.core.errors import ConfigError, KernelError
from vishwamai.planning.memory.analytic import training_memory
from vishwamai.planning.search import candidates as settings
from vishwamai.planning.search import plan as search
from vishwamai.planning.search.candidates import candidates, meshes
from vishwamai.planning.search.controller import REMAT
from vishwamai.planning.search.plan import FINALISTS, plan_training
from vishwamai.planning.time.pace import COMPILED, Pace
from vishwamai.planning.time.program_time import Row
from vishwamai.planning.time.speed import training_time
from vishwamai.training.config import MeshSection
from vishwamai.training.config_file import to_dict


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path))


def test_candidates_keep_the_global_batch():
    found = list(candidates(training(batch_size=16), "v5e:2x4"))
    whole = [c for c in found if c.mesh.tensor == 1]
    assert len(whole) == 4 * len(REMAT) * 2 and len({(c.mesh, c.remat, c.microbatches) for c in found}) == len(found)
    # Rows of 128 tokens are not cut, and two kv heads go on two devices at most.
    assert len(found) - len(whole) == 3 * len(REMAT) * 3 and {c.mesh.tensor for c in found} == {1, 2}
    assert all(c.batch_size == 16 and math.prod(vars(c.mesh).values()) == 8 for c in found)
    split = list(candidates(training(batch_size=12), "v5e:2x4"))
    assert {c.mesh.tensor for c in split} == {2}  # four parts divide the batch, eight do not
    with pytest.raises(ConfigError, match=r"not a multiple of the 8 devices .* no mesh\.sequence or mesh\.tensor"):
        list(candidates(training(batch_size=6), "v5e:2x4"))


def test_meshes_are_legal_for_the_model():
    def sizes(target="v5e:4x4", length=1024, model=None, **keys):
        config = training(batch_size=16, **keys)
        data = dataclasses.replace(config.data, sequence_length=length)
        described = dataclasses.replace(config.model, config=LLAMA | {"max_position_embeddings": 4096} | (model or {}))
        found = meshes(dataclasses.replace(config, data=data, model=described), target)
        assert all(math.prod(vars(mesh).values()) == 16 for mesh in found) and len(set(found)) == len(found)
        return {axis: sorted({getattr(mesh, axis) for mesh in found}) for axis in ("expert", "sequence", "tensor")}

    assert sizes() == {"expert": [1], "sequence": [1, 2, 4], "tensor": [1, 2]}
    assert sizes(length=1000)["sequence"] == [1]
    assert sizes(mesh={"sequence": 8}) == {"expert": [1], "sequence": [8], "tensor": [1, 2]}
    assert sizes(objective="dpo")["sequence"] == [1, 2, 4]
    mixture = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    assert sizes(model=mixture)["expert"] == [1, 2, 4, 8]
    assert sizes(model=mixture, precision="fp8")["expert"] == [1, 2, 4, 8]


def fake_trace(config, target):
    name = f"{config.mesh.fsdp}x{config.mesh.tensor} {config.remat} {config.microbatches}"
    return planning.Program(name, target, b"", (), name)


@pytest.mark.turns(3)
def test_a_search_probes_in_order_and_verifies_what_fits(monkeypatch):
    monkeypatch.setattr(search, "trace_training", fake_trace)
    asked = []

    def answer(self, program, hbm_mib, *_):
        asked.append((program.name, hbm_mib))
        if program.name.endswith("none 1"):  # formulas say that it fits, the compiler does not
            return {"needed": 20 * GIB, "allocations": []}
        if hbm_mib is not None:
            return {"needed": GIB, "allocations": []}
        names = ("arguments", "outputs", "temporaries", "code", "aliased")
        return {"memory": dict.fromkeys(names, GIB)}

    monkeypatch.setattr(planning.Compiler, "_answer", answer)
    said = []
    plan = plan_training(
        training(), "v5e:2x2", search=True, time=False, report=lambda text, left=None: said.append((text, left))
    )
    # Formulas say that dots on fsdp=1 and 2 needs more than none on fsdp=4, which did not fit.
    limit = plan.limit >> 20
    none = [(f"{mesh} none 1", allowed) for mesh in ("1x1", "2x1", "4x1", "1x2", "2x2") for allowed in (1, limit)]
    assert asked == [*none, *(("4x1 dots 1", allowed) for allowed in (1, 1013, None))]
    assert plan.chosen is not None and plan.chosen.config.remat == "dots" and plan.chosen.verified is not None
    assert plan.chosen.verified.value == 3 * GIB and plan.chosen.best.level == "verified"
    assert plan.pruned == 0 and len(plan.candidates) == plan.count == 48 and plan.unprobed == 48 - 6
    assert said[0][0].startswith("v5e:2x2: 48 candidates") and len(said) == 8
    assert said[1][1] is None and all(left > 0 for _, left in said[2:])  # before the first probe nothing is known


@pytest.mark.turns(4)
def test_a_search_compiles_the_best_meshes_and_takes_the_fastest(monkeypatch, tmp_path):
    monkeypatch.setattr(search, "trace_training", fake_trace)
    timed = []

    def time_program(compiler, program):
        timed.append(program.name)
        memory = planning.ProgramMemory(program.target, planning.Estimate(3 * GIB, "verified"), 15 * GIB)
        seconds = planning.Estimate(0.5 - 0.1 * len(timed), "verified", "s")
        return memory, planning.StepTime(program.target, seconds, {}, {}, (), memory)

    def answer(self, program, *_):
        if program.name in declined:
            return {"rejected": "no layout for it", "kind": "compiler"}
        return {"needed": 3 * GIB, "allocations": []}

    monkeypatch.setattr(search, "time_program", time_program)
    monkeypatch.setattr(planning.Compiler, "_answer", answer)
    declined: list[str] = []
    plan = plan_training(training(), "v5e:2x2", search=True)
    tried = [one for one in plan.candidates if one.time is not None]
    assert len(timed) == len(tried) == FINALISTS and len({one.config.mesh for one in tried}) == FINALISTS
    assert plan.chosen is tried[0] and plan.chosen.step.value == pytest.approx(0.5 - 0.1 * FINALISTS)
    assert plan.chosen.formula.value >= tried[1].formula.value  # formulas had it last

    declined, first = [timed[0]], timed[0]
    timed.clear()
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path / "declined"))
    plan = plan_training(training(), "v5e:2x2", search=True)
    (one,) = (one for one in plan.candidates if one.declined)
    assert "no layout for it" in one.declined and not one.fits and len(timed) == FINALISTS and first not in timed
    assert any("no layout" in line for line in table(plan))
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path / "fast"))
    declined.clear()
    # A program that is as fast as the next formula says ends the search.
    monkeypatch.setattr(search, "time_program", lambda *_: timed_at(1e-6))
    plan = plan_training(training(), "v5e:2x2", search=True)
    assert sum(one.time is not None for one in plan.candidates) == 1
    # The configuration itself is not searched: its error is the caller's.
    declined.append("1x1 none 1")
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path / "alone"))
    with pytest.raises(KernelError, match="no layout for it"):
        plan_training(training(mesh={"data": 4}), "v5e:2x2")


def timed_at(seconds):
    """A compiled program of 3 GiB that takes so long."""
    memory = planning.ProgramMemory("v5e:2x2", planning.Estimate(3 * GIB, "verified"), 15 * GIB)
    found = planning.Estimate(seconds, "verified", "s")
    row = Row("kernels", "attention", seconds / 2, 4)
    return memory, planning.StepTime("v5e:2x2", found, {"kernels": found}, {}, (row,), memory)


@pytest.mark.turns(4)
def test_a_search_takes_moments_of_fewer_bits_where_nothing_else_fits(monkeypatch, tmp_path):
    def traced(config, target):
        program = fake_trace(config, target)
        name = f"{program.name} {config.optimizer.moment_dtype}"
        return dataclasses.replace(program, name=name, fingerprint=name)

    def answer(self, program, *_):
        return {"needed": GIB if program.name.endswith("int8") else 20 * GIB, "allocations": []}

    monkeypatch.setattr(search, "trace_training", traced)
    monkeypatch.setattr(settings, "REMAT", ("full",))
    monkeypatch.setattr(planning.Compiler, "_answer", answer)
    said = []
    config = training(batch_size=4, mesh={"tensor": 2})
    plan = plan_training(config, "v5e:2x2", search=True, verify=False, report=lambda text, left=None: said.append(text))
    rounds = [line for line in said if "nothing fits" in line]
    assert len(rounds) == 2 and "bfloat16" in rounds[0] and "int8" in rounds[1]
    assert plan.chosen is not None and plan.chosen.config.optimizer.moment_dtype == "int8"
    assert plan.chosen.name.endswith("moments=int8") and plan.chosen is plan.candidates[0]
    once = len(list(candidates(config, "v5e:2x2")))
    assert plan.count == len(plan.candidates) == 3 * once
    lines = table(plan)
    assert lines[2][1] == "8" and any("in 8 bits, which changes numbers" in line for line in lines)
    assert max(map(len, lines)) <= 80
    # What fits as it is keeps its numbers.
    monkeypatch.setattr(planning.Compiler, "_answer", lambda *_: {"needed": 2 * GIB, "allocations": []})
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path / "fits"))
    plan = plan_training(config, "v5e:2x2", search=True, verify=False)
    assert {one.config.optimizer.moment_dtype for one in plan.candidates} == {"float32"}


@pytest.mark.long
def test_a_search_tries_the_fastest_first_and_reports_the_front(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(search, "trace_training", fake_trace)
    monkeypatch.setattr(search, "time_program", lambda *_: timed_at(0.5))
    monkeypatch.setattr(planning.Compiler, "_answer", lambda *_: {"needed": 3 * GIB, "allocations": []})
    monkeypatch.setattr(settings, "REMAT", ("none", "full"))
    path, page = tmp_path / "run.yaml", tmp_path / "plan.html"
    path.write_text(json.dumps({"model": {"config": LLAMA}, "data": {"sequence_length": 128}, "batch_size": 8}))
    command = ["plan", str(path), "--target", "v5e:2x2", "--search", "--price", "1.2", "--report", str(page)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for text in (
        "step 500 ms (verified)",
        "512 tokens/s a chip",
        "its peak of",
        "USD per million tokens",
        "attention",
    ):
        assert text in out, text
    written = page.read_text()
    assert (
        written.count("<title>data=") == 24 + 1
        and "tensor=2" in written
        and "USD per million tokens" in written
        and "http" not in written
    )
    assert main([*command, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["plans"]
    tried, rest = found["candidates"][:FINALISTS], found["candidates"][FINALISTS:]
    assert {one["step_level"] for one in tried} == {"verified"} and found["count"] == 24
    times = [candidate["step_seconds"] for candidate in rest]
    assert times == sorted(times) and found["chosen"] == found["candidates"][0]
    assert found["chosen"]["step_seconds"] == 0.5 and found["chosen"]["step_level"] == "verified"
    assert any(candidate["on_front"] for candidate in found["candidates"])


def test_the_command_plans_a_training_step(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(search, "trace_training", fake_trace)
    monkeypatch.setattr(planning.Compiler, "_answer", lambda *_: {"needed": 3 * GIB, "allocations": []})
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"model": {"config": LLAMA}, "data": {"sequence_length": 128}, "batch_size": 8}))
    assert main(["plan", str(path), "mesh.fsdp=4", "--target", "v5e:2x2", "--no-verify", "--json"]) == 0
    out, said = capsys.readouterr()
    (plan,) = json.loads(out)["plans"]
    assert plan["chosen"]["probe_bytes"] == 3 * GIB and plan["chosen"]["mesh"]["fsdp"] == 4
    assert "probing" in said and json.loads(out)["not_tried"]

    assert main(["plan", str(path), "mesh.fsdp=4", "--target", "v5e:2x2", "--no-verify"]) == 0
    out = capsys.readouterr().out
    assert "chosen: data=1 fsdp=4" in out and max(map(len, out.splitlines())) <= 80


QUIET = """
import sys
from vishwamai.cli import main
from vishwamai.core.errors import DeviceError
from vishwamai.planning.search import plan as search

def traced(config, target):
    raise DeviceError("formulas are done")

search.trace_training = traced
sys.exit(main(["plan", sys.argv[1], "--target", "v5e"]))
"""


@pytest.mark.turns(3)
def test_libtpu_does_not_complain_that_there_is_no_tpu(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"model": {"config": LLAMA}, "data": {"sequence_length": 128}}))
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", QUIET, path], capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and "formulas are done" in done.stderr
    assert "TPU_" not in done.stderr and "InitGoogle" not in done.stderr


@pytest.mark.turns(4)
def test_a_pod_of_18_thousand_devices_is_planned_by_formulas():
    model = LLAMA | {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8}
    config = training(batch_size=18432, mesh={"data": 72, "fsdp": 256})
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, config=model))
    found = training_memory(config, "tpu7x:16x24x24")
    step = training_time(config, "tpu7x:16x24x24", found)
    assert found.fits and step.level == "analytic" and 0 < step.value < 1
    alone = training_memory(dataclasses.replace(config, batch_size=1, mesh=MeshSection()), "tpu7x")
    assert found.parts["parameters"].value < alone.parts["parameters"].value / 100


@pytest.mark.turns(3)
def test_a_search_that_is_interrupted_says_what_it_has(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(search, "trace_training", fake_trace)
    timed = []

    def time_program(compiler, program):
        timed.append(program.name)
        if len(timed) == 3:
            raise KeyboardInterrupt
        return timed_at(0.5 - 0.1 * len(timed))

    monkeypatch.setattr(search, "time_program", time_program)
    monkeypatch.setattr(planning.Compiler, "_answer", lambda *_: {"needed": 3 * GIB, "allocations": []})
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"model": {"config": LLAMA}, "data": {"sequence_length": 128}, "batch_size": 8}))
    command = ["plan", str(path), "--target", "v5e:2x2", "--search"]
    assert main(command) == 130
    out, said = capsys.readouterr()
    assert "step 300 ms (verified)" in out and "interrupted: other candidates were not tried" in out
    assert "the same command goes on" in said.replace("\n", " ")
    lines = [line for line in said.splitlines() if "probing" in line]
    assert len(lines) == 3 and "left" not in lines[0] and all(" left" in line for line in lines[1:])
    timed.clear()
    assert main([*command, "--json"]) == 130
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["interrupted"] and len(plan["candidates"]) == 2 and plan["chosen"]["step_seconds"] == 0.3
    # Nothing was found, so there is nothing to print.
    monkeypatch.setattr(search, "time_program", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(command) == 130
    out, said = capsys.readouterr()
    assert out == "" and said.endswith("vishwamai plan: interrupted\n")


def test_what_is_left_of_a_search():
    pace = Pace(verify=True)
    assert pace.left(3) is None
    pace.probes += [4.0, 8.0]
    assert pace.left(2) == 2 * (6.0 + COMPILED * 6.0)
    pace.compilations.append(30.0)
    assert (pace.left(2), pace.left(2, probed=True)) == (72.0, 66.0)
    alone = Pace(verify=False)
    alone.probes.append(6.0)
    assert alone.left(1) == 6.0


def test_the_bar_of_a_search_fills_as_time_goes_by(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    with Countdown() as progress:
        progress.say("probing", 100.0)
        progress.say("compiling")
    assert capsys.readouterr().err == "[   0 s] probing, about 1 min 40 s left\n[   0 s] compiling\n"
    clock = [1000.0]
    screen = Console(file=io.StringIO(), force_terminal=True, width=80)
    bar = _countdown_bar(screen, lambda: clock[0])
    task = bar.add_task("v5e:4x4: probing", total=None)

    def shown():
        with screen.capture() as found:
            screen.print(bar.make_tasks_table(bar.tasks))
        return found.get()

    assert "0 s" in shown() and "left" not in shown()
    bar.update(task, total=100.0)
    clock[0] += 40.0
    assert "40 s, about 1 min 0 s left" in shown() and "v5e:4x4: probing" in shown()
    assert bar.tasks[0].percentage == 40.0
    clock[0] += 100.0  # longer than was expected
    assert "2 min 20 s, about 0 s left" in shown() and bar.tasks[0].percentage == 100.0


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["lora.rank=4", "lora.quantize=int8"], r"lora\.rank trains adapters of an existing model"),
        (["model.reduce_dtype=bfloat16", "model.compute_dtype=float32"], r"set model\.compute_dtype=bfloat16"),
        (["evaluation.every=5"], r"evaluation\.every needs held-out documents"),
        (["optimizer.warmup_steps=2000"], r"warmup_steps=2000 exceeds steps=1000"),
        (["objective=dpo"], r"objective=dpo goes on from a trained model"),
        (["optimizer.groups=[{pattern: nowhere}]"], r"matches no parameter"),
    ],
)
def test_a_plan_declines_what_training_declines(tmp_path, capsys, overrides, words):
    config = to_dict(training(data={"sources": [{"paths": [str(tmp_path)]}]}))
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    command = ["plan", str(tmp_path / "c.yaml"), *overrides, "--target", "v5e", "--no-verify"]
    assert main(command) == 2 and re.search(words, capsys.readouterr().err)
    assert main(["train", str(tmp_path / "c.yaml"), *overrides, "--output", str(tmp_path / "run")]) == 2
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.turns(6)
def test_a_plan_of_all_devices_prints_the_mesh_that_it_compiles(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(json.dumps(to_dict(training(optimization={"use_pjit": True}))))
    assert main(["plan", str(tmp_path / "c.yaml"), "--target", "v5e:2x2", "--no-verify", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["chosen"]["mesh"]["fsdp"] == 4
    low, high = plan["chosen"]["step_seconds_by_published_steps"]
    assert 0.97 * plan["chosen"]["step_seconds"] < high and low < high


@pytest.mark.turns(6)
def test_a_plan_takes_automatic_remat(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(json.dumps(to_dict(training(remat="auto:12GiB"))))
    assert main(["plan", str(tmp_path / "c.yaml"), "--target", "v5e", "--no-verify"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "chosen: data=1 fsdp=1 remat=none" in said
    assert "published training steps of dense models on v5e took 0.97 to 1.15 of such estimates" in said
