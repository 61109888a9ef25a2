"""`vishwamai generate`: a directory that transformers wrote goes in, transformers' own tokens come out."""

import argparse
import json
import os
import signal
import subprocess
import sys

import pytest
import tokenizers

import models_peer
from models_peer import Peer
from vishwamai.cli import generate, main
from vishwamai.core.errors import DeviceError, ShapeError
from vishwamai.inference import Sampling, plan_load
from vishwamai.models import read_generation_config

WORDS = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(128))]
PROMPT = [5, 17, 99, 3, 42]
SMALL = ("--max-length", "64", "--step-tokens", "16", "--dtype", "float32")


def write_tokenizer(path):
    """A tokenizer of one token for each word, and a chat template."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(WORDS[:3])
    words.save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    model = Peer("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}).save(path)
    return path, models_peer.peer_greedy(model, PROMPT, 32)


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.turns(4)
def test_the_tokens_are_those_of_transformers(peer, capsys):
    path, expected = peer
    (path / "tokenizer.json").unlink(missing_ok=True)
    ids = ",".join(map(str, PROMPT))
    arguments = ["generate", str(path), "--token-ids", ids, *SMALL, "--max-new-tokens", "32", "--ignore-eos", "--json"]
    assert main([*arguments, "--temperature", "0"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert found["token_ids"] == expected
    assert (found["text"], found["finish_reason"], found["prompt_tokens"]) == (None, "length", 5)
    assert found["timing"]["total_s"] >= found["timing"]["first_token_s"] > 0
    begun, first = said.err.splitlines()[:2]
    assert begun == "... loading jax"
    assert f"from {path}, in float32" in first and "planned" in first and "weights" in first


@pytest.mark.long
def test_a_mesh_gives_the_same_tokens(peer, capsys):
    path, expected = peer
    (path / "tokenizer.json").unlink(missing_ok=True)
    ids = ",".join(map(str, PROMPT))
    arguments = ["generate", str(path), "--token-ids", ids, *SMALL, "--max-new-tokens", "8", "--ignore-eos", "--json"]
    assert main([*arguments, "--temperature", "0", "--mesh", "tensor=2"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["token_ids"] == expected[:8]
    assert "on cpu split by tensor=2: " in said.err.splitlines()[1]


@pytest.mark.turns(6)
def test_texts_and_chats(peer, capsys, tmp_path):
    path, expected = peer
    write_tokenizer(path)
    text = " ".join(WORDS[t] for t in PROMPT)
    (tmp_path / "chat.json").write_text(json.dumps([{"role": "user", "content": text}]))
    same = [*SMALL, "--max-new-tokens", "8", "--temperature", "0", "--ignore-eos"]
    assert main(["generate", str(path), "--prompt", text, *same, "--stream"]) == 0
    streamed = capsys.readouterr().out
    assert streamed.split() == [WORDS[t] for t in expected[:8] if t > 2]
    assert main(["generate", str(path), "--chat", str(tmp_path / "chat.json"), *same]) == 0
    assert capsys.readouterr().out == streamed


def test_what_cannot_be_is_said_before_loading(peer, capsys, tmp_path):
    path, _ = peer
    assert main(["generate", str(path), "--token-ids", "1,x"]) == 2
    assert "--token-ids is '1,x'" in capsys.readouterr().err
    for wrong, said in (("1,999", "token id 999; ids are 0 to"), (",".join("1" * 300), "the prompt has 300 tokens")):
        assert main(["generate", str(path), "--token-ids", wrong]) == 2
        printed = capsys.readouterr().err
        assert said in printed and "compiling" not in printed
    assert main(["generate", str(path), "--token-ids", "1", "--memory", "0.0001"]) == 2
    assert "That does not fit: one sequence of 256 tokens needs" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "none"), "--token-ids", "1"]) == 2
    assert "expected a directory" in capsys.readouterr().err
    for options, said in (
        (["--mesh", "tensor=4"], "pass one of tensor=1, tensor=2"),
        (["--mesh", "tensor=2", "--quantize", "int4"], "layers/0/down has 96 rows ('mlp') in blocks of 32"),
        (["--quantize", "keep"], "config.json has no `quantization_config`: its weights are plain"),
    ):
        assert main(["generate", str(path), "--token-ids", "1", *options]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(DeviceError, match="--max-length"):
        plan_load(path, memory=10)
    with pytest.raises(ShapeError, match="a model of 256 positions"):
        plan_load(path, max_length=257)


GENERATION = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05, "max_new_tokens": 2048}


@pytest.mark.parametrize(
    ("settings", "options", "expected"),
    [
        (GENERATION, [], Sampling(None, temperature=0.6, top_k=20, repetition_penalty=1.05)),
        (GENERATION, ["--top-k", "5"], Sampling(None, temperature=0.6, top_k=5, repetition_penalty=1.05)),
        (GENERATION, ["--temperature", "0.9"], Sampling(None, temperature=0.9, repetition_penalty=1.05)),
        (GENERATION, ["--temperature", "0", "--repetition-penalty", "1"], Sampling(None)),
        ({**GENERATION, "do_sample": False}, [], Sampling(None, repetition_penalty=1.05)),
        ({"do_sample": True}, [], Sampling(None, temperature=1.0)),
    ],
)
def test_what_the_authors_recommend_holds_where_no_option_is_given(settings, options, expected, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": 2}))
    parser = argparse.ArgumentParser()
    generate.configure(parser)
    given = parser.parse_args([str(tmp_path), "--prompt", "a", *options])
    assert generate.sampling(given, read_generation_config(tmp_path)) == expected


@pytest.mark.turns(3)
def test_an_interrupt_ends_it_cleanly(peer):
    """It says what it loads before it loads, and Ctrl-C leaves no traceback."""
    command = [sys.executable, "-m", "vishwamai.cli", "generate", str(peer[0]), "--token-ids", "1"]
    command += ["--max-length", "256", "--max-new-tokens", "250", "--dtype", "float32"]  # it takes its time
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "XLA_FLAGS": ""})
    assert process.stderr.readline() == "... loading jax\n"
    assert process.stderr.readline().startswith("loading qwen3, 2 layers")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert (process.returncode, said.splitlines()[-1]) == (130, "vishwamai generate: interrupted")
    assert "Traceback" not in said


@pytest.mark.turns(4)
def test_without_a_number_of_new_tokens_the_answer_has_the_room_there_is(peer, capsys):
    path, _ = peer
    (path / "tokenizer.json").unlink(missing_ok=True)
    arguments = ["generate", str(path), "--token-ids", "5,17", "--max-length", "10", "--step-tokens", "40"]
    assert main([*arguments, "--dtype", "float32", "--ignore-eos", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["token_ids"]) == 8
