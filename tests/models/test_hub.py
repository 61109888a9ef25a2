"""Models by their names on the Hub, against a Hub on this machine; `huggingface_hub` is the real one."""

import json
import os
import shutil
import subprocess
import sys

import pytest

import world
from fake_hub import TOKEN, serving_hub
from vishwamai.cli import main
from vishwamai.models.hub import HubModel
from vishwamai.training.card import model_card
from vishwamai.training.config_file import from_dict
from vishwamai.training.records import Record

SCRIPT = """
import contextlib, io, json, sys
from vishwamai.cli import main
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    print("RESULT", json.dumps([status, out.getvalue(), err.getvalue()]))
"""
# The command reads all files, plans, and ends where the weights do not fit.
TOO_LITTLE = ["--token-ids", "1,2", "--memory", "0.001"]
PLANNED = "qwen3, 1 layers, from "


def commands(endpoint, home, *lines, **variables):
    """Runs command lines in one process: (exit status, standard output, standard error) of each."""
    return results_of(SCRIPT, lines, endpoint, home, **variables)


def results_of(script, lines, endpoint, home, **variables):
    """What a script prints of each of its lines."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **variables}
    environment |= {"XDG_CACHE_HOME": str(home / "cache"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", script, json.dumps(lines)], env=environment, capture_output=True, text=True, timeout=240
    )
    results = [json.loads(line[7:]) for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(results) == len(lines), run.stderr
    return results


def test_names_of_the_hub_are_told_from_paths(monkeypatch, tmp_path):
    for text, name in (
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("meta-llama/Llama-3.1-8B@refs/pr/1", "meta-llama/Llama-3.1-8B@refs/pr/1"),
    ):
        assert str(HubModel.parse(text)) == name
    for text in ("model", "./a/b", "/a/b", "a/b/c", "~/b", "a/b.gguf", "a/b.yaml", "../b", "a//b", "a/b@", "a b/c"):
        assert HubModel.parse(text) is None, text
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "model").mkdir(parents=True)
    assert HubModel.parse("runs/model") is None  # a path that exists is a path


@pytest.mark.turns(6)
def test_commands_take_names_of_the_hub(tmp_path):
    tiny = world.tiny("qwen3")
    with serving_hub({"org/tiny": tiny, "org/closed": tiny}, private=frozenset({"org/closed"})) as hub:
        answers = commands(
            hub.url,
            tmp_path,
            ["generate", "org/tiny", *TOO_LITTLE],
            ["generate", "org/tiny@main", *TOO_LITTLE],
            ["generate", "org/tiny@v9", *TOO_LITTLE],
            ["serve", "org/nothing"],
            ["plan", "org/closed", "--target", "v5e"],
        )
        assert {status for status, _, _ in answers} == {2}
        assert "fetching org/tiny from the Hub" in answers[0][2]
        assert all(PLANNED in answers[i][2] and "That does not fit" in answers[i][2] for i in (0, 1))
        assert "the Hub has org/tiny, but not the revision 'v9'" in answers[2][2]
        assert all("no such path here, and the Hub has no such model" in answers[i][2] for i in (3, 4))
        weights = [path for method, path in hub.requests if method == "GET" and path.endswith("model.safetensors")]
        assert len(weights) == 1  # by the first command; then the cache has them
    (copy,) = tmp_path.glob("hub/models--org--tiny/snapshots/*/model.safetensors")
    assert copy.read_bytes() == (tiny / "model.safetensors").read_bytes()
    # Without the Hub: what its cache has is used, and anything else names the line to run elsewhere.
    for variables, reason in (({}, "the Hub cannot be reached ("), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set")):
        first, second = commands(
            hub.url,
            tmp_path,
            ["generate", "org/tiny", *TOO_LITTLE],
            ["generate", "org/other@v1", *TOO_LITTLE],
            **variables,
        )
        assert PLANNED in first[2], first[2]
        assert second[0] == 2 and reason in second[2], second[2]
        assert "`hf download org/other --revision v1 --local-dir other`; copy the folder other" in second[2]


@pytest.mark.turns(6)
def test_train_starts_from_a_name_and_uploads_with_a_card(tmp_path):
    tiny = world.tiny("llama2")
    (tmp_path / "text.txt").write_text("to be or not to be\n\n" * 200)
    settings = [
        f"data.sources=[{{paths: [{tmp_path / 'text.txt'}]}}]", "data.sequence_length=16", "steps=2", "batch_size=2",
        "evaluation.every=0", "data.holdout=0", "sample.prompt=null", "checkpoint.every=2",
    ]  # fmt: skip
    with serving_hub({"org/tiny": tiny}) as hub:
        output = ["--output", str(tmp_path / "run"), "--push-to-hub", "me/answer"]
        (done,) = commands(hub.url, tmp_path, ["train", "org/tiny", *settings, *output], HF_TOKEN=TOKEN)
        assert done[0] == 0, done[2]
        files = hub.uploads["me/answer"]
    assert "start_from: org/tiny" in (tmp_path / "run" / "config.yaml").read_text()
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert files["model.safetensors"] == (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    card = files["README.md"].decode()
    assert "base_model: org/tiny" in card and "| steps | 2 |" in card and str(tmp_path) not in card


def test_a_card_without_a_base_model():
    record = Record(7, 1.25, 700, 10.0, 1.0, 1e-3, 0, 2**30, 1.0, 1.0, evaluation_loss=1.5)
    card = model_card(from_dict({}), [record], "me/name")
    header = card.split("---")[1]
    assert "base_model" not in header and "pipeline_tag: text-generation" in header
    assert "# name" in card and "| held-out loss | 1.5000 |" in card and "Trained from nothing" in card


def test_what_an_upload_lacks_is_an_error_before_any_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("vishwamai.training.run.train", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    for name, text in (
        ("a/b/c", "'a/b/c' is not the name of a repository; pass ORG/NAME"),
        ("a b", "'a b' is not the name"),
        ("me/name", "the Hub asks for a token; run `hf auth login`, or set HF_TOKEN"),
    ):
        assert main(["train", "--output", str(tmp_path / "run"), "--push-to-hub", name]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.turns(6)
def test_gguf_files_of_the_hub(tmp_path):
    """By their names and by their formats; the real file of SmolLM2 next to others that are declined."""
    folder = tmp_path / "repository"
    folder.mkdir()
    shutil.copy(world.gguf(world.SMOLLM2_GGUF), folder)
    for name in ("SmolLM2-Q8_0-00001-of-00002.gguf", "SmolLM2-Q8_0-00002-of-00002.gguf", "mmproj-Q4_1.gguf"):
        (folder / name).write_bytes(b"GGUF")
    (folder / "README.md").write_text("a card")
    name = f"org/tiny-GGUF/{world.SMOLLM2_GGUF}"
    planned = ["--token-ids", "1,2", "--memory", "0.001"]
    with serving_hub({"org/tiny-GGUF": folder}) as hub:
        answers = commands(
            hub.url,
            tmp_path,
            ["generate", name, *planned],
            ["generate", "org/tiny-GGUF@main:q4_1", *planned],
            ["generate", "org/tiny-GGUF:Q2_K", *planned],
            ["generate", "org/tiny-GGUF:Q8_0", *planned],
            ["generate", "org/tiny-GGUF", *planned],
            ["generate", "org/tiny-GGUF/none.gguf", *planned],
        )
        downloads = [path for method, path in hub.requests if method == "GET" and path.endswith(world.SMOLLM2_GGUF)]
    assert {status for status, _, _ in answers} == {2} and len(downloads) == 1
    for _, _, text in answers[:2]:
        assert "That does not fit" in text
    assert f"org/tiny-GGUF:Q2_K: the repository has no such GGUF file; it has {world.SMOLLM2_GGUF}" in answers[2][2]
    assert "a model is read from one GGUF file, but this is 2: SmolLM2-Q8_0-00001-of-00002.gguf" in answers[3][2]
    assert f"the repository has GGUF files; pass one of them, such as {name}" in answers[4][2]
    assert "org/tiny-GGUF/none.gguf: the repository has no such GGUF file" in answers[5][2]
    ((_, _, text),) = commands(
        hub.url, tmp_path / "empty", ["generate", "org/tiny-GGUF:Q4_1", *planned], HF_HUB_OFFLINE="1"
    )
    assert "`hf download org/tiny-GGUF --include '*Q4_1*.gguf' --local-dir tiny-GGUF`" in text


def test_functions_and_paths_are_no_gguf_files_of_the_hub():
    for text in ("examples/attention.py:f16", "a/b:main", "a/b.gguf", "a/b/c", "a/b/c.gguf:Q4_0", "a/b/c.txt"):
        assert HubModel.parse(text) is None, text
    for text in (
        "a/b:Q4_K_M",
        "a/b:iq3_xxs",
        "a/b:UD-Q4_K_XL",
        "a/b:BF16",
        "a/b@v1:F16",
        "a/b/c/d.gguf",
        "a/b/c.gguf@v1",
    ):
        assert str(HubModel.parse(text)) == text


DATA = """
import json, sys
from vishwamai.core.errors import VishwamaiError
from vishwamai.training.config_file import from_dict
from vishwamai.training.sources import check_source, documents
for values in json.loads(sys.argv[1]):
    source = from_dict({"data": {"sources": [values]}}).data.sources[0]
    try:
        check_source(source)
        print("RESULT", json.dumps([str(record) for record in documents(source)]))
    except VishwamaiError as error:
        print("RESULT", json.dumps(f"{type(error).__name__}: {error}"))
"""


@pytest.mark.turns(4)
def test_datasets_of_the_hub_are_read_within_the_bounds_of_files(tmp_path):
    """`datasets` is the real one; the same rows from a local file, and from the Hub, are the same documents."""
    pytest.importorskip("datasets")
    rows = [{"text": f"document {number}", "n": number} for number in range(300)]
    rows[7]["text"], rows[9]["text"] = "", "long " * 300_000
    folder = tmp_path / "rows"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "data" / "test.jsonl").write_text('{"text": "of the test"}\n')
    local = {"paths": [str(folder / "data" / "train.jsonl")], "max_record_mib": 1}
    hub_rows = {"dataset": "org/rows", "max_record_mib": 1}
    sources = [
        local,
        hub_rows,
        hub_rows | {"streaming": False},
        hub_rows | {"split": "test"},
        hub_rows | {"max_records": 5},
        hub_rows | {"column": "body"},
        hub_rows | {"split": "validation"},
        hub_rows | {"subset": "none"},
        hub_rows | {"dataset": "org/none"},
        hub_rows | {"dataset": "rows"},
        hub_rows | {"paths": ["x"]},
    ]
    with serving_hub({"datasets/org/rows": folder}) as hub:
        results = results_of(DATA, sources, hub.url, tmp_path)
    from_file, streamed, downloaded, test, five, column, *errors = results
    assert len(from_file) == 300 and from_file[0] == "document 0"
    assert streamed == downloaded and [a == b for a, b in zip(from_file, streamed)].count(False) == 2
    for number, reason in (
        (7, "column 'text' holds neither text nor a list of messages"),
        (9, "takes more than 1 MiB"),
    ):
        assert reason in from_file[number] and reason in streamed[number]
        assert streamed[number].startswith(f"org/rows:{number + 1}: ")
    assert test == ["of the test"] and five == from_file[:5]
    assert column == ["org/rows: no column 'body'; it has text, n"]
    for error, text in zip(
        errors,
        (
            "ConfigError: config: data.sources.dataset=org/rows: Bad split: validation",
            "ConfigError: config: data.sources.dataset=org/rows: BuilderConfig 'none' not found",
            "ConfigError: config: data.sources.dataset: the Hub has no org/none, or shows it to its owner only",
            "ConfigError: config: data.sources.dataset is 'rows'; pass ORG/NAME",
            "ConfigError: config: a source of data.sources has either paths or dataset",
        ),
        strict=True,
    ):
        assert error.startswith(text), error
    (gone,) = results_of(DATA, [hub_rows], hub.url, tmp_path / "elsewhere")
    assert gone.startswith("DeviceError: org/rows: the Hub cannot be reached (")
    assert "hf download --repo-type dataset org/rows --local-dir data" in gone
