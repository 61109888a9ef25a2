"""What a run says before its first step, and what its first record and its report have of it."""

import json

import jax
import pytest

import vishwamai
from vishwamai.cli import main
from vishwamai.training.config_file import read_config
from vishwamai.training.facts import RunFacts
from vishwamai.training.records import Record, read_records
from vishwamai.training.report import write_report

MODEL = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
MODEL |= {"num_attention_heads": 2, "vocab_size": 300}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three steps that is resumed after two, and what its commands print."""
    folder = tmp_path_factory.mktemp("facts")
    for number in range(3):
        (folder / f"{number}.txt").write_text("to be or not to be\n" * 40)
    values = {
        "model": {"config": MODEL}, "data": {"sources": [{"paths": [str(folder / "*.txt")]}], "sequence_length": 16},
        "batch_size": 2, "steps": 2, "evaluation": {"every": 0}, "tokenizer": {"vocab_size": 300},
    }  # fmt: skip
    values["data"]["holdout"] = 0
    (folder / "run.yaml").write_text(json.dumps(values))
    command = ["train", str(folder / "run.yaml"), "--output", str(folder / "run")]
    assert main(command) == 0
    assert main([*command, "--resume", "steps=3"]) == 0
    return folder / "run"


def test_the_first_record_of_each_process_has_the_facts(run, capsys):
    records = read_records(run / "metrics.jsonl")
    assert [record.step for record in records] == [1, 2, 3]
    assert [record.run is not None for record in records] == [True, False, True]
    assert records[0].run is not None
    facts = RunFacts(**records[0].run)
    assert facts.documents == 3 and facts.trained == facts.parameters > 300 * 16
    assert facts.batch_size == 2 and facts.sequence_length == 16 and facts.steps == 2
    rows = facts.steps * facts.batch_size / facts.epochs
    assert rows == pytest.approx(facts.tokens / 16, abs=3)
    assert facts.step_bytes and facts.step_bytes > 4 * 3 * facts.parameters  # parameters and two moments in float32
    assert facts.estimated_seconds and facts.estimated_seconds > 0
    assert facts.versions["jax"] == jax.__version__ and facts.versions["vishwamai"] == vishwamai.__version__
    assert facts.devices == f"{jax.device_count()} x cpu" and "cores" in facts.machine and "T" in facts.date
    assert Record.from_json(records[0].to_json()) == records[0]
    for part in (f"{facts.parameters:,} parameters", "3 documents", "2 of 2 rows of 16 tokens", "epochs", "roughly"):
        assert part in str(facts), part


def test_a_resumed_run_keeps_the_largest_memory(run):
    memory = [record.memory for record in read_records(run / "metrics.jsonl")]
    assert memory == sorted(memory)


def test_the_report_has_each_process_and_the_sum_of_their_times(run, tmp_path):
    page = (run / "report.html").read_text()
    assert page.count("parameters, in float32, products in ") == 2 and f"jax {jax.__version__}" in page
    rows = [(1, 1.0, 5 << 30), (2, 40.0, 9 << 30), (3, 2.0, 4 << 30), (4, 22.0, 4 << 30)]
    records = [Record(step, 1.0, 1, 1.0, 1.0, 1.0, 0, memory, seconds, seconds) for step, seconds, memory in rows]
    write_report(read_config(None), records, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "9.00 GiB" in page and "0:01:02" in page


@pytest.mark.turns(4)
def test_the_facts_come_before_the_first_step(run, capfd, tmp_path):
    command = [
        "train",
        str(run.parent / "run.yaml"),
        "--output",
        str(tmp_path / "run"),
        "steps=1",
        "model.config.num_hidden_layers=2",
    ]
    assert main(command) == 0
    lines = capfd.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("model: "))
    assert [line.split(":")[0] for line in lines[begin : begin + 4]] == ["model", "data", "steps", "devices"]
    assert any(line.startswith("step 1/1") for line in lines[begin + 4 :])
