"""Models with states through the engine: tokens of transformers, and turns that compute their new tokens alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import httpx
import jax.numpy as jnp
import numpy as np
import pytest

import models_peer
from models_families import TINY
from serving import serving
from vishwamai import DeviceError, ShapeError, UnsupportedError
from vishwamai.cli import main
from vishwamai.inference import Engine, Limits, Sampling, plan_load
from vishwamai.inference.memory import state_bytes
from vishwamai.inference.server.service import Settings
from vishwamai.models import Decoder, from_pretrained
from vishwamai.planning.memory.analytic import serving_memory
from vishwamai.planning.serving import Serving, kv_bytes_per_token

LIMITS = Limits(max_sequences=3, max_tokens=24, max_length=160, page_size=4)
TOKENS = np.random.default_rng(5).integers(3, 131, (6, 60)).tolist()
PROMPTS = [TOKENS[0], TOKENS[1][:5], TOKENS[2][:33], TOKENS[3][:1]]


def greedy(new: int) -> Sampling:
    return Sampling(max_new_tokens=new, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen3_5_text", "lfm2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory, and the model of transformers that is in it."""
    path = tmp_path_factory.mktemp(request.param)
    return path, TINY[request.param].save(path)


@pytest.fixture(scope="module")
def model(checkpoint: tuple[Path, Any]) -> Decoder:
    return from_pretrained(checkpoint[0], dtype=jnp.float32)


@pytest.fixture(scope="module")
def engine(model: Decoder) -> Engine:
    return Engine(model, limits=LIMITS, compile="lazy", num_states=16)


@pytest.mark.turns(4)
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2"])
def test_64_tokens_of_ragged_prompts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    peer = TINY[family].save(tmp_path)
    engine = Engine(from_pretrained(tmp_path, dtype=jnp.float32), limits=LIMITS, compile="lazy")
    answers = engine.generate(PROMPTS, greedy(64))
    assert [list(answer.token_ids) for answer in answers] == [models_peer.peer_greedy(peer, p, 64) for p in PROMPTS]


def test_ten_turns_compute_their_new_tokens_alone(checkpoint: tuple[Path, Any], engine: Engine) -> None:
    text, known, turn = TOKENS[4][:19], 0, 0
    for turn in range(10):
        prompt, before = text, engine.statistics.computed_tokens
        (answer,) = engine.generate([prompt], greedy(6))
        cached = known // LIMITS.page_size * LIMITS.page_size
        computed = engine.statistics.computed_tokens - before
        assert (answer.cached, computed) == (cached, len(prompt) - cached + 6 - 1)
        text = [*prompt, *answer.token_ids, *TOKENS[5][turn * 5 : turn * 5 + 5]]
        known = len(prompt) + 6 - 1
    assert list(answer.token_ids) == models_peer.peer_greedy(checkpoint[1], prompt, 6)


@pytest.mark.turns(2)
def test_conversations_that_share_a_prompt_with_few_states_and_pages(model: Decoder, engine: Engine) -> None:
    """Pages and states give way, answers are cancelled, and no token changes."""
    system = TOKENS[0][:21]
    prompts = [[*system, *TOKENS[i % 6][: 3 + 7 * i]] for i in range(6)]
    expected = [list(answer.token_ids) for answer in engine.generate(prompts, greedy(9))]
    tight = Engine(model, limits=LIMITS, compile="lazy", num_states=4, num_pages=40)
    for turn in range(3):
        if turn == 1:  # two answers are cancelled on their way
            requests = [tight_request(tight, prompt) for prompt in prompts[:2]]
            for _ in range(3):
                tight.step()
            for request in requests:
                tight.cancel(request)
        answers = tight.generate(prompts, greedy(9))
        assert [list(answer.token_ids) for answer in answers] == expected
        if turn:
            assert sum(answer.cached > 0 for answer in answers) >= 2
    states: Any = tight.scheduler.states
    assert states.evicted and states.reused and states.available == 4 and tight.scheduler.pool.available == 40


def tight_request(engine: Engine, prompt: list[int]) -> Any:
    """A request that was handed in, and whose answer goes nowhere."""
    from vishwamai.inference.requests import Request

    request = Request(tuple(prompt), greedy(30), lambda delta: None)
    engine.submit(request)
    return request


def test_a_system_prompt_is_computed_once(engine: Engine) -> None:
    from vishwamai.inference.requests import Request

    cached, system = [], TOKENS[4][:22]
    for user in range(2):
        ends: list[int] = []
        request = Request(
            (*system, *TOKENS[user][:9]), greedy(4), lambda delta, ends=ends: ends.append(delta.cached), shared=22
        )
        engine.submit(request)
        while not request.branches or not request.branches[0].stream.finished:
            engine.step()
        cached.append(ends[-1])
    assert cached == [0, 20]


def test_answers_of_one_prompt_share_its_states(engine: Engine) -> None:
    """Three answers of a prompt: it is computed once, to its last full page."""
    before = engine.statistics.computed_tokens
    prompt = [*TOKENS[3][:30], 7]
    answers = engine.generate([prompt], Sampling(max_new_tokens=4, ignore_eos=True, n=3))
    assert len({answer.token_ids for answer in answers}) == 1
    assert engine.statistics.computed_tokens - before == 31 + 2 * (31 - 28) + 3 * 3


@pytest.mark.turns(4)
@pytest.mark.parametrize(("dtype", "quantize", "tolerance"), [("bfloat16", None, 0.1), ("float32", "int8", 2e-3)])
def test_other_forms_of_weights_keep_float32_states(
    checkpoint: tuple[Path, Any], dtype: str, quantize: str | None, tolerance: float
) -> None:
    """Each token is the most likely one of the same weights over the whole sequence, up to rounding."""
    load = plan_load(
        checkpoint[0], dtype=dtype, quantize=quantize, max_sequences=2, max_tokens=16, max_length=80, page_size=4
    )
    engine = load.engine(compile="lazy")
    leaves = [leaf for pool in engine.programs.pages if isinstance(pool, dict) for leaf in pool.values()]
    assert leaves and {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
    assert load.states == sum(leaf.nbytes for leaf in leaves) == load.num_states * state_bytes(load.config)
    assert f"({load.num_states} sequences or prefixes)" in str(load)
    prompts = [TOKENS[0][:37], TOKENS[1][:3]]
    for prompt, answer in zip(prompts, engine.generate(prompts, greedy(12))):
        text = jnp.asarray([[*prompt, *answer.token_ids]])
        logits = np.asarray(engine.model.logits(engine.model(text)), np.float32)[0, len(prompt) - 1 : -1]
        drawn = logits[np.arange(12), list(answer.token_ids)]
        assert (logits.max(axis=1) - drawn <= tolerance * np.abs(logits).max()).all()


@pytest.mark.turns(2)
def test_guesses_change_no_token(model: Decoder, engine: Engine) -> None:
    """Guesses from the text, right and wrong ones; a wrong one goes back to the states before it."""
    prompts = [TOKENS[0][:9] * 4, [7, 8] * 9]
    expected = [answer.token_ids for answer in engine.generate(prompts, greedy(40))]
    guessing = Engine(model, limits=LIMITS, compile="lazy", drafts=3)
    assert [answer.token_ids for answer in guessing.generate(prompts, greedy(40))] == expected
    statistics = guessing.statistics
    assert statistics.guesses_accepted < statistics.guesses and statistics.guesses > 0
    states: Any = guessing.scheduler.states
    assert states.available == states.num_states


def test_drafts_with_states_and_too_little_memory_are_declined(checkpoint: tuple[Path, Any], model: Decoder) -> None:
    with pytest.raises(UnsupportedError, match="whose state does not go back to the last guess that was right"):
        Engine(model, limits=LIMITS, drafts=2, draft=model)
    with pytest.raises(UnsupportedError, match="pass a draft of attention layers alone"):
        plan_load(checkpoint[0], drafts=2, draft_model=checkpoint[0])
    with pytest.raises(DeviceError, match=r"states .* \(32 sequences or prefixes\).* That does not fit"):
        plan_load(checkpoint[0], dtype="float32", memory=300_000)


def test_the_number_of_states_may_be_set(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    load = plan_load(checkpoint[0], num_states=5)
    assert load.num_states == 5 and load.states == 5 * state_bytes(load.config)
    TINY["llama"].save(tmp_path)
    for directory, count, text in ((checkpoint[0], 0, "0; pass at least 1"), (tmp_path, 5, "5; the model's layers")):
        with pytest.raises(ShapeError, match=f"num_states is {text}"):
            plan_load(directory, num_states=count)


def test_the_plan_counts_states_as_the_engine_holds_them(checkpoint: tuple[Path, Any], engine: Engine) -> None:
    plan = Serving(engine.model.config, batch_size=3, length=80, dtype="float32", kv_dtype="float32", page_size=4)
    parts = serving_memory(plan, "v5e").parts
    states = [leaf for pool in engine.programs.pages if isinstance(pool, dict) for leaf in pool.values()]
    pages = [pool for pool in engine.programs.pages if not isinstance(pool, dict)]
    assert parts["states"].value == 3 * sum(leaf.nbytes for leaf in states) / 16  # the engine's slots
    assert parts["kv"].value == 3 * 20 * sum(pool.nbytes / pool.shape[0] for pool in pages)
    assert kv_bytes_per_token(plan) == sum(pool.nbytes / pool.shape[0] / 4 for pool in pages)
    longer = serving_memory(dataclasses.replace(plan, length=120), "v5e").parts
    assert longer["states"].value == parts["states"].value and longer["kv"].value > parts["kv"].value


@pytest.mark.turns(2)
def test_generate_prints_the_tokens_of_transformers(
    checkpoint: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path, peer = checkpoint
    prompt = TOKENS[0][:29]
    small = ["--max-length", "80", "--step-tokens", "16", "--dtype", "float32", "--max-sequences", "2"]
    arguments = ["generate", str(path), "--token-ids", ",".join(map(str, prompt)), *small, "--temperature", "0"]
    assert main([*arguments, "--max-new-tokens", "20", "--ignore-eos", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1])["token_ids"] == models_peer.peer_greedy(peer, prompt, 20)
    assert "sequences or prefixes), a step" in printed.err


def test_a_server_goes_on_from_a_turn_and_counts_states(checkpoint: tuple[Path, Any], engine: Engine) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    prompt, peer = [9, *TOKENS[5][:30]], checkpoint[1]
    # Programs are compiled while requests wait, so there is no bound of time.
    with serving(engine, Settings("tiny")) as address, httpx.Client(base_url=address, timeout=None) as client:
        first = client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, **options}).json()
        turn = [*prompt, *first["choices"][0]["token_ids"], 5, 6, 7]
        second = client.post("/v1/completions", json={"model": "tiny", "prompt": turn, **options}).json()
        metrics = client.get("/metrics").text
    assert first["choices"][0]["token_ids"] == models_peer.peer_greedy(peer, prompt, 8)
    assert second["choices"][0]["token_ids"] == models_peer.peer_greedy(peer, turn, 8)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(prompt) + 8 - 1) // 4 * 4
    lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(lines["vishwamai_states"]) == 16 and float(lines["vishwamai_states_held"]) == 0
    assert float(lines["vishwamai_states_reused_total"]) > 0 < float(lines["vishwamai_prefix_cached_share"]) < 1


@pytest.mark.long
def test_a_mesh_has_the_states_on_each_device(checkpoint: tuple[Path, Any]) -> None:
    """A device of the axis "tensor" has all of a layer with a state, and its part of attention."""
    load = plan_load(
        checkpoint[0], dtype="float32", max_sequences=2, max_tokens=16, max_length=80, page_size=4, mesh="tensor=2"
    )
    engine = load.engine(compile="lazy")
    states = [leaf for pool in engine.programs.pages if isinstance(pool, dict) for leaf in pool.values()]
    shards = [shard.data.nbytes for leaf in states for shard in leaf.addressable_shards]
    assert load.states == sum(shards) == 2 * sum(leaf.nbytes for leaf in states)
    (answer,) = engine.generate([PROMPTS[2]], greedy(24))
    assert list(answer.token_ids) == models_peer.peer_greedy(checkpoint[1], PROMPTS[2], 24)
