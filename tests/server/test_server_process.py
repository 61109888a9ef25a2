"""`vishwamai serve` as a process: what it says, how it ends, and that it starts again after it was killed."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import pytest

from serving import free_port, write_encoder, write_model
from vishwamai.cli import model, serve
from vishwamai.models import SentenceEncoder


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("process")
    write_model(path / "tiny")
    return path


SERVE = ("-m", "vishwamai.cli")


@contextlib.contextmanager
def started(directory, *options, program=SERVE):
    """(the process, its address), once it is ready; `program` are the arguments of Python before those of serve."""
    port = free_port()
    sizes = ["--dtype", "float32", "--max-length", "256", "--step-tokens", "32", "--max-sequences", "2"]
    command = [sys.executable, *program, "serve", str(directory / "tiny"), "--port", str(port)]
    command += [*sizes, *options]
    environment = {**os.environ, "XDG_CACHE_HOME": str(directory)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr.readline() == "... loading jax\n"
        line = process.stderr.readline()
        assert line.startswith("loading llama, 1 layers, from ") and "planned" in line
        threading.Thread(target=process.stderr.read, daemon=True).start()
        end = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                    break
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_a_missing_tokenizer_is_said_once(tmp_path, capsys, monkeypatch):
    write_model(tmp_path)
    parser = argparse.ArgumentParser()
    serve.configure(parser)
    monkeypatch.setattr(model, "load", lambda planned, compile, tiers: (None, {}))
    text = f"{tmp_path / 'tokenizer.json'} is missing: prompts and answers are token ids only\n"
    for count in (0, 1):
        serve._models(parser.parse_args([str(tmp_path), "--max-length", "64"]))
        assert capsys.readouterr().err.count(text) == count
        (tmp_path / "tokenizer.json").unlink(missing_ok=True)


@pytest.mark.long
def test_an_encoder_answers_next_to_the_model(directory):
    (directory / "vectors").mkdir()
    write_encoder(directory / "vectors")
    ask = {"model": "vectors", "input": ["a b", "c"]}
    with started(directory, "--encoder", str(directory / "vectors")) as (_, address):
        found = httpx.post(f"{address}/v1/embeddings", json=ask).json()["data"]
        assert httpx.post(f"{address}/v1/completions", json={"prompt": "x", "model": "tiny"}).status_code == 200
    expected = SentenceEncoder.from_pretrained(directory / "vectors").embed(ask["input"])
    np.testing.assert_allclose([one["embedding"] for one in found], expected, atol=1e-6)


@pytest.mark.long
def test_sigterm_lets_answers_end_and_a_killed_server_starts_again(directory):
    body = {"prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True, "return_token_ids": True}
    with started(directory) as (process, address):
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [json.loads(line[6:]) for line in (first, *lines) if line.startswith("data: {")]
        assert sum(len(part["choices"][0]["token_ids"]) for part in rest) == 200
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        assert process.wait(timeout=30) == 0
    with started(directory) as (process, address):
        process.kill()
        process.wait()
    with started(directory) as (process, address):
        assert httpx.post(f"{address}/v1/completions", json={"prompt": "x"}).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130


@pytest.mark.long
def test_a_later_start_computes_the_new_tokens_of_a_known_prompt_alone(directory, tmp_path):
    prompt = list(range(3, 203))
    answers, metrics = [], []
    for _ in range(2):
        with started(directory, "--cache-dir", str(tmp_path / "cache")) as (process, address):
            body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
            body["return_token_ids"] = True
            answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()
            details = answer["usage"]["prompt_tokens_details"]
            answers.append((answer["choices"][0]["token_ids"], details["cached_tokens"]))
            metrics.append(httpx.get(f"{address}/metrics").text)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
    (tokens, cached), (again, restored) = answers
    assert tokens == again and (cached, restored) == (0, 192)
    for text, computed, hits in zip(metrics, (207, 15), (0, 12)):
        assert f"vishwamai_computed_tokens_total {computed}.0" in text
        assert f'vishwamai_tier_hits_total{{tier="disk"}} {hits}.0' in text
    stored = list((tmp_path / "cache").glob("*/*"))
    assert {path.stat().st_mode & 0o777 for path in stored} == {0o600} and len(stored) == 12


BROKEN = """
import sys
from vishwamai.cli import main
from vishwamai.inference.engine import Engine

def step(self):
    raise MemoryError("the device is gone")

Engine.step = step
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
def test_a_server_whose_engine_cannot_go_on_ends_with_status_1(directory):
    with started(directory, program=("-c", BROKEN)) as (process, address):
        body = {"prompt": "a", "max_tokens": 1}
        with contextlib.suppress(httpx.TransportError):
            assert httpx.post(f"{address}/v1/completions", json=body, timeout=30).status_code >= 500
        assert process.wait(60) == 1
