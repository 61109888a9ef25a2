"""Sleep and wake: the memory of an engine leaves its device and comes back, and answers stay as they were."""

import gc
import threading
from typing import Any

import jax
import pytest

import world
from serving import write_model
from vishwamai.core.errors import DeviceError, ShapeError
from vishwamai.inference import CacheTiers, Engine, Sampling, memory_release, plan_load
from vishwamai.models import Pooling

GREEDY = Sampling(max_new_tokens=8, temperature=0.0, ignore_eos=True, logprobs=3)
PROMPTS = [list(range(5, 45)), [7, 8, 9]]
SIZES: Any = {"max_sequences": 2, "max_tokens": 32, "max_length": 128, "page_size": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sleep")
    write_model(path)
    return path


def load(path, tiers=None, **options):
    return plan_load(path, **{"dtype": "float32", **SIZES, **options}).engine(compile="lazy", tiers=tiers)


def device_bytes():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


def answers(engine):
    return [(answer.token_ids, answer.logprobs) for answer in engine.generate(PROMPTS, GREEDY)]


def weights(engine):
    return sum(x.nbytes for x in jax.tree.leaves(engine.model) if isinstance(x, jax.Array))


@pytest.mark.parametrize("moves", [True, False])
def test_answers_after_a_wake_are_those_before(folder, moves, monkeypatch):
    """With memory of its own, as a GPU has it, and with that of the host."""
    monkeypatch.setattr(memory_release, "_shares_host_memory", lambda: not moves)
    engine = load(folder)
    expected, size, awake = answers(engine), weights(engine), device_bytes()
    for level in (1, 2, 1):
        engine.sleep(level)
        assert engine.sleeping == level
        freed = awake - device_bytes()
        assert freed > (size if moves or level == 2 else 0)
        assert weights(engine) == (0 if moves or level == 2 else size)
        with pytest.raises(DeviceError, match="sleeps"):
            engine.generate([[1]], GREEDY)
        engine.sleep(1)  # it sleeps already
        assert engine.sleeping == level
        engine.wake()
        engine.wake()
        assert not engine.sleeping and device_bytes() == awake
        cached = engine.statistics.cached_tokens
        assert answers(engine) == expected and engine.statistics.cached_tokens == cached  # no prefix is known


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"quantize": "int8", "kv_dtype": "int8"},
        {"quantize": "int4", "kv_dtype": "bfloat16"},
        {"dtype": "bfloat16", "kv_dtype": "fp8"},
        {"draft_model": True, "drafts": 2},
        {"mesh": "tensor=2"},
    ],
    ids=str,
)
def test_every_form_of_weights_and_pages_comes_back(folder, options, monkeypatch):
    if "draft_model" in options:
        options = {**options, "draft_model": folder}
    engine = load(folder, **options)
    expected = answers(engine)
    for moves in (False, True):
        monkeypatch.setattr(memory_release, "_shares_host_memory", lambda moves=moves: not moves)
        for level in (1, 2):
            engine.sleep(level)
            engine.wake()
            assert answers(engine) == expected, (moves, level)


def test_sleep_waits_for_answers_and_declines_new_ones(folder):
    engine = load(folder)
    expected = engine.generate([PROMPTS[0]], Sampling(max_new_tokens=60, temperature=0.0, ignore_eos=True))
    engine.start()
    try:
        results: list[Any] = []
        options = Sampling(max_new_tokens=60, temperature=0.0, ignore_eos=True)
        client = threading.Thread(target=lambda: results.append(engine.generate([PROMPTS[0]], options)))
        client.start()
        while not engine.unfinished and not results:
            pass
        engine.sleep()
        client.join()
        assert [answer.token_ids for answer in results[0]] == [answer.token_ids for answer in expected]
        with pytest.raises(DeviceError, match="wake"):
            engine.generate([[1]], GREEDY)
        engine.wake()
        assert engine.generate([PROMPTS[0]], options)[0].token_ids == expected[0].token_ids
    finally:
        engine.stop()
    engine.sleep()  # without the loop's thread
    engine.wake()


def test_what_has_no_files_is_named(folder, tmp_path):
    planned = plan_load(folder, dtype="float32", **SIZES)
    engine = Engine(planned.decoder(), limits=planned.limits, compile="lazy")
    with pytest.raises(ShapeError, match="no files"):
        engine.sleep(2)
    with pytest.raises(ShapeError, match="`level` of sleep is 3"):
        engine.sleep(3)
    assert not engine.sleeping
    write_model(tmp_path)
    engine = load(tmp_path)
    expected, file = answers(engine), tmp_path / "model.safetensors"
    engine.sleep(2)
    file.rename(tmp_path / "away")
    with pytest.raises(ShapeError):
        engine.wake()
    assert engine.sleeping == 2
    (tmp_path / "away").rename(file)
    engine.wake()
    assert answers(engine) == expected


def test_prefixes_wait_in_the_tiers(folder, tmp_path):
    engine = load(folder, CacheTiers(directory=tmp_path / "prefixes"))
    expected = answers(engine)
    engine.sleep(2)
    engine.wake()
    # A prefix that is known is another step: the last digits of log probabilities may differ.
    assert [tokens for tokens, _ in answers(engine)] == [tokens for tokens, _ in expected]
    assert engine.statistics.cached_tokens >= 32


def test_vectors_by_the_same_weights(folder):
    from vishwamai.inference import Embedder

    engine = load(folder)
    embed = Embedder.of_decoder(engine.model, None, Pooling("mean"), 64)
    expected, _ = embed(PROMPTS)
    engine.sleep(2)
    engine.wake()
    assert (embed(PROMPTS)[0] == expected).all()


@pytest.mark.long
def test_the_real_model_wakes_with_its_answers():
    engine = load(world.smollm2())
    expected = engine.generate(["The capital of France is"], GREEDY)[0].text
    for level in (1, 2):
        engine.sleep(level)
        engine.wake()
        assert engine.generate(["The capital of France is"], GREEDY)[0].text == expected
