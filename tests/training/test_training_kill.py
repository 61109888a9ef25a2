"""A run that is killed at any moment goes on from a whole checkpoint, and ends as if it had never been killed."""

import json
import os
import random
import subprocess
import sys
import time

import pytest

from test_training import LLAMA, tensors

EVERY = 2


def start(folder, name, resume=False):
    command = [sys.executable, "-m", "vishwamai.cli", "train", str(folder / "run.yaml"), "--output", str(folder / name)]
    return subprocess.Popen(
        command + ["--resume"] * resume,
        env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def steps(folder, name):
    path = folder / name / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("kills", [pytest.param(3, marks=pytest.mark.long), pytest.param(50, marks=pytest.mark.soak)])
def test_kill_nine_at_random_moments_loses_less_than_two_intervals(tmp_path, kills):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    total = kills * (EVERY + 1) + 4
    config = {
        "model": {"config": LLAMA},
        "tokenizer": {"vocab_size": 300},
        "data": {"sources": [{"paths": [str(tmp_path / "text.txt")]}], "sequence_length": 32},
        "checkpoint": {"every": EVERY, "keep": 2},
        "steps": total,
        "batch_size": 4,
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))  # JSON is YAML
    chance = random.Random(0)
    before = 0
    for _ in range(kills):
        process = start(tmp_path, "killed", resume=True)
        goal = before + chance.randint(1, EVERY + 1)
        while process.poll() is None and steps(tmp_path, "killed") < goal:
            time.sleep(0.01)
        time.sleep(chance.random() * 0.3)  # in a step, in a checkpoint, or between
        process.kill()
        assert process.wait() in (-9, 0), process.stderr.read().decode()
        whole = [int(p.name) for p in (tmp_path / "killed" / "checkpoints").iterdir() if p.name.isdigit()]
        # The newest checkpoint may have been in the making; the one before was whole before that began.
        assert max(whole, default=0) > steps(tmp_path, "killed") - 2 * EVERY
        before = max(whole, default=0)
    for name in ("killed", "whole"):
        assert start(tmp_path, name, resume=True).wait() == 0
    left, right = tensors(tmp_path / "killed"), tensors(tmp_path / "whole")
    assert all((left[name] == right[name]).all() for name in right)
    lines = [json.loads(x) for x in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, total + 1))
