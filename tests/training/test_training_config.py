"""The configuration of a run: what is read is what was printed, and every mistake names its key."""

import dataclasses
import json
from typing import Any

import pytest
import yaml

from test_training import LLAMA
from vishwamai.cli import main
from vishwamai.core.errors import ConfigError, UnsupportedError
from vishwamai.training.checks import check
from vishwamai.training.config import TrainConfig
from vishwamai.training.config_file import describe, from_dict, nearest, read_config, to_dict
from vishwamai.training.records import Record
from vishwamai.training.report import write_report
from vishwamai.training.run import train


def test_what_is_printed_reads_back_and_has_every_key_with_its_doc():
    values = {"data": {"sources": [{"paths": ["a", "b"], "weight": 2}, {"paths": ["c"]}]}, "optimizer": {"eps": 1e-9}}
    for config in (TrainConfig(), from_dict(values)):
        text = describe(config)
        assert from_dict(yaml.safe_load(text)) == config == from_dict(to_dict(config))
        for section in dataclasses.fields(TrainConfig):
            assert f"{section.name}:" in text and section.metadata["doc"] in text


def test_overrides_reach_sections_and_entries_of_lists(tmp_path):
    (tmp_path / "run.yaml").write_text("data: {sources: [{paths: [a]}]}\nsteps: 5\n")
    overrides = ["data.sources.0.weight=3", "optimizer.learning_rate=1e-4", "steps=7", "data.sources.0.paths=[b, c]"]
    config = read_config(tmp_path / "run.yaml", overrides)
    assert (config.steps, config.optimizer.learning_rate) == (7, 1e-4)
    assert config.data.sources[0].paths == ("b", "c") and config.data.sources[0].weight == 3


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("optimizer.lerning_rate=1", "unknown key optimizer.lerning_rate; did you mean optimizer.learning_rate?"),
        ("learning_rate=1", "unknown key learning_rate; did you mean optimizer.learning_rate?"),
        ("stps=1", "unknown key stps; did you mean steps?"),
        ("zzzz=1", "unknown key zzzz; see `vishwamai train --print-config`"),
        ("steps=many", "steps is 'many': input should be a valid integer"),
        ("steps=0", "steps is 0: input should be greater than or equal to 1"),
        ("optimizer.name=adam", "optimizer.name is 'adam': input should be 'adamw', 'lion'"),
        ("optimizer.groups=[{weight_decay: 1}]", "the key optimizer.groups.0.pattern is missing"),
        ("data.sources.0.weight=1", "names entry '0'|goes into|empty list"),
        ("optimizer.clip_norm=-1", "optimizer.clip_norm is -1: input should be greater than 0"),
        ("optimizer.ema_decay=2.0", "optimizer.ema_decay is 2.0: input should be less than 1"),
        ("optimizer.ema_decay=-0.5", "optimizer.ema_decay is -0.5: input should be greater than or equal to 0"),
        ("optimizer.learning_rate=-1e-3", "optimizer.learning_rate is -0.001: input should be greater than or equal"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate is inf: input should be a finite number"),
        ("optimizer.end_factor=1.5", "optimizer.end_factor is 1.5: input should be less than or equal to 1"),
        ("optimizer.eps=0", "optimizer.eps is 0: input should be greater than 0"),
        ("optimizer.groups=[{pattern: x, weight_decay: -1}]", "optimizer.groups.0.weight_decay is -1: input should be"),
        ("guard.max_norm=-1", "guard.max_norm is -1: input should be greater than 0"),
        ("lora.alpha=0", "lora.alpha is 0: input should be greater than 0"),
        ("dpo.beta=0", "dpo.beta is 0: input should be greater than 0"),
        ("data.sources=[{paths: [x], weight: 0}]", "data.sources.0.weight is 0: input should be greater than 0"),
        ("data.sequence_length=1", "data.sequence_length is 1: input should be greater than or equal to 2"),
        ("data.holdout=1", "data.holdout is 1: input should be less than 1"),
        ("steps", "'steps' is not of the form section.key=value"),
        ("steps.x=[", "is not YAML"),
    ],
)
def test_a_mistake_names_the_key_and_what_is_expected(override, text):
    with pytest.raises(ConfigError) as caught:
        read_config(None, ["data.sources=[]", override])
    assert any(part in str(caught.value) for part in text.split("|"))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "data.sources is empty"),
        ({"batch_size": 6, "microbatches": 4}, "batch_size=6 is not a multiple of microbatches=4"),
        ({"evaluation": {"every": 5}}, "set data.holdout"),
        ({"optimizer": {"warmup_steps": 50}, "steps": 20}, "warmup_steps=50 exceeds steps=20"),
        (
            {"model": {"reduce_dtype": "bfloat16", "compute_dtype": "float32"}},
            "compute_dtype=float32 multiplies them unrounded; set model.compute",
        ),
        (
            {"model": {"reduce_dtype": "bfloat16", "compute_dtype": "bfloat16"}, "precision": "fp8"},
            "reduce_dtype=bfloat16 does not go with precision=fp8; set model.reduce_dtype=float32",
        ),
    ],
)
def test_sections_that_contradict_one_another(values, text):
    source = {} if "sources" in text else {"data": {"sources": [{"paths": ["x"]}]}}
    with pytest.raises(ConfigError, match=text):
        check(from_dict(values | source))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"remat": "ful"}, r"remat: 'ful' is neither a policy nor an activation .* did you mean 'full'\?"),
        ({"remat": "mixed,block_outptu"}, r"'block_outptu' is neither .* did you mean 'block_output'\?"),
        ({"optimizer": {"name": "lion", "moment_dtype": "int8"}}, r"moment_dtype=int8 is for adamw; lion takes"),
        ({"optimizer": {"groups": [{"pattern": "layers/0/qury"}]}}, r"groups\.0\.pattern 'layers/0/qury' matches no"),
        ({"optimizer": {"groups": [{"pattern": "("}]}}, r"groups\.0\.pattern '\(' is not a regular expression"),
        (
            {"lora": {"rank": 2, "targets": "qury"}},
            r"lora\.targets 'qury' names no matrix of a layer; .* layers/0/query",
        ),
        ({"lora": {"rank": 2, "targets": "("}}, r"lora\.targets '\(' is not a regular expression"),
        (
            {"lora": {"rank": 2}, "optimizer": {"groups": [{"pattern": "embed"}]}},
            r"groups\.0\.pattern 'embed' matches no parameter; the parameters are layers/0/.*/down",
        ),
        (
            {
                "mesh": {"pipeline": 2},
                "optimizer": {"groups": [{"pattern": "layers/0/query", "learning_rate_scale": 0}]},
            },
            r"tells layers apart that mesh\.pipeline stacks",
        ),
    ],
)
def test_a_name_that_the_model_lacks_is_an_error_before_anything_is_written(tmp_path, values, text):
    described = LLAMA | {"vocab_size": 300, "max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps(described))
    model = {"start_from": str(tmp_path)} if "lora" in values else {"config": LLAMA}
    config = from_dict(values | {"model": model, "data": {"sources": [{"paths": ["x"]}]}})
    with pytest.raises((ConfigError, UnsupportedError), match=text):
        next(train(config, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_nearest_key_is_looked_for_in_its_own_section_first():
    assert nearest("checkpoint.evry", ("checkpoint",)) == "checkpoint.every"
    assert nearest("log.evry", ("log",)) == "log.every"


def test_the_command_prints_the_config_and_fails_with_the_key(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("steps: 5\n")
    assert main(["train", str(tmp_path / "run.yaml"), "--print-config", "batch_size=2"]) == 0
    printed = read_config(None, [])
    out = capsys.readouterr().out
    assert from_dict(yaml.safe_load(out)) == dataclasses.replace(printed, steps=5, batch_size=2)
    assert main(["train", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "x"), "btch_size=2"]) == 2
    assert "did you mean batch_size?" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    assert "--output DIR" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", str(tmp_path / "run.yaml"), "--outptu", "x"])


def test_the_report_of_a_run(tmp_path):
    """It begins with the result, names the steps whose loss is not finite, and loads nothing."""
    every: dict[str, Any] = dict(
        tokens=1, gradient_norm=1.0, learning_rate=1e-3, tokens_per_second=5.0, skipped=0, memory=1 << 30
    )
    records = [
        Record(**every | dict[str, Any](step=i, loss=loss, evaluation_loss=held, seconds=i + 1.0, step_seconds=i + 0.5))
        for i, (loss, held) in enumerate([(4.0, None), (3.0, 3.5), (float("nan"), None), (2.5, 2.75)])
    ]
    write_report(TrainConfig(), records, tmp_path / "report.html", ["a <bad> record"], "once upon")
    page = (tmp_path / "report.html").read_text()
    assert page.index("<b>2.750</b><span>held-out loss") < page.index("last loss") < page.index("<figure>")
    assert page.count("<figure>") == 4 and "<script" not in page and "http:" not in page
    assert "not a finite number at 1 of the steps, first at step 2" in page and "a &lt;bad&gt; record" in page
