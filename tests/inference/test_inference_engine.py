"""The engine on tiny random checkpoints: its tokens are transformers', whatever else runs."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models_peer
from benchmark_files import loaded
from models_families import TINY
from models_peer import Peer
from vishwamai.core import execute
from vishwamai.core.errors import DeviceError, ShapeError, UnsupportedError
from vishwamai.inference import Engine, Limits, Sampling
from vishwamai.inference import pools as pools_module
from vishwamai.inference.pools import kv_dtype_of, make_pools
from vishwamai.models import Decoder, ModelConfig, PagedBatch, from_pretrained
from vishwamai.models.rotation import rotation_switch

LIMITS = Limits(max_sequences=4, max_tokens=16, max_length=96, page_size=4)
TOKENS = np.random.default_rng(0).integers(3, 131, (4, 40)).tolist()
PROMPTS = [TOKENS[0][:37], TOKENS[1][:5], TOKENS[2][:17], TOKENS[3][:1], TOKENS[0][:30]]


@pytest.fixture(scope="module")
def peer_and_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    peer = Peer("Llama").save(path)
    return peer, from_pretrained(path, dtype=jnp.float32)


@pytest.fixture(scope="module")
def engine(peer_and_model):
    told = []
    engine = Engine(peer_and_model[1], limits=LIMITS, on_program=lambda *what: told.append(what))
    assert [done for done, _, _ in told] == list(range(len(told))) and told[-1][1] == len(told) - 1
    return engine


def test_greedy_tokens_are_those_of_transformers(peer_and_model, engine):
    options = Sampling(max_new_tokens=32, ignore_eos=True)
    expected = [models_peer.peer_greedy(peer_and_model[0], prompt, 32) for prompt in PROMPTS]
    answers = engine.generate(PROMPTS, options)
    assert [list(answer.token_ids) for answer in answers] == expected
    assert {answer.finish for answer in answers} == {"length"}
    again = engine.generate(PROMPTS[:1], options)
    assert again[0].token_ids == answers[0].token_ids and again[0].cached == 36  # every full page but the last token's


@pytest.mark.turns(5)
def test_stacked_layers_change_no_token_and_a_deep_model_is_no_longer_program(tmp_path, engine):
    Peer("Llama").save(tmp_path)
    stacked = from_pretrained(tmp_path, dtype=jnp.float32, stacked=True)
    options = Sampling(max_new_tokens=8, ignore_eos=True)
    found, expected = (e.generate(PROMPTS[:2], options) for e in (Engine(stacked, limits=LIMITS), engine))
    assert [a.token_ids for a in found] == [a.token_ids for a in expected]

    def lines(layers):
        config = dataclasses.replace(stacked.config, num_layers=layers, layers=stacked.config.layers[:1] * layers)
        model = Decoder(config, rngs=nnx.Rngs(0), stacked=True)
        batch = PagedBatch(
            jnp.array([7], jnp.int32), jnp.arange(2, dtype=jnp.int32)[None], jnp.array([0, 7], jnp.int32)
        )
        pools = make_pools(model, 4, 2, jnp.dtype(jnp.float32), ())
        step = jax.jit(lambda model, pools: model.step(jnp.arange(7, dtype=jnp.int32), pools, batch))
        return step.lower(model, pools).as_text().count("\n")

    assert lines(2) == lines(7)


@pytest.mark.turns(4)
def test_few_pages_preempt_and_change_nothing(peer_and_model, engine):
    options = [Sampling(max_new_tokens=40, ignore_eos=True, temperature=t, seed=3) for t in (0.0, 1.0, 0.0, 1.0, 0.7)]
    small = Engine(peer_and_model[1], limits=LIMITS, num_pages=24)
    answers = small.generate(PROMPTS, options)
    assert small.statistics.preemptions > 0
    assert [a.token_ids for a in answers] == [engine.generate([p], o)[0].token_ids for p, o in zip(PROMPTS, options)]
    assert small.scheduler.pool.available == 24


@pytest.mark.turns(6)
def test_guesses_change_no_token(peer_and_model, engine):
    prompts = [[5, 6, 7, 8] * 5, TOKENS[1][:9]]
    guessing = Engine(peer_and_model[1], limits=LIMITS, drafts=3)
    for options in (Sampling(max_new_tokens=40, ignore_eos=True), Sampling(max_new_tokens=20, temperature=0.3, seed=5)):
        answers = guessing.generate(prompts, options)
        assert [a.token_ids for a in answers] == [a.token_ids for a in engine.generate(prompts, options)]
    assert guessing.statistics.guesses > guessing.statistics.guesses_accepted > 0


def test_nothing_compiles_while_serving(engine):
    def seen(event, duration_secs, **kwargs):
        if "compile" in event or "trace" in event:
            pytest.fail(f"{event} while serving")

    jax.monitoring.register_event_duration_secs_listener(seen)
    try:
        options = [Sampling(max_new_tokens=9), Sampling(max_new_tokens=20, temperature=1.0, top_p=0.5, logprobs=3)]
        engine.generate([PROMPTS[0], PROMPTS[1]], options)
        engine.generate(PROMPTS, Sampling(max_new_tokens=12, presence_penalty=0.5, n=2, temperature=0.4))
    finally:
        jax.monitoring.unregister_event_duration_listener(seen)


@pytest.mark.turns(4)
def test_programs_have_kernels_of_their_platform_alone(peer_and_model, monkeypatch):
    """The kernels of other platforms are not traced, which would take most of a start."""
    traced = []
    branch = execute._branch

    def record(plan, choice, *rest):
        traced.append(choice)
        return branch(plan, choice, *rest)

    monkeypatch.setattr(execute, "_branch", record)
    Engine(peer_and_model[1], limits=Limits(2, 32, 64), num_pages=16, compile="lazy")
    here = execute.platform_of(jnp.ones(1))
    assert traced and all(choice.implementation.platform in (None, here) for choice in traced)


@pytest.mark.turns(3)
def test_lazy_programs_are_compiled_when_a_step_needs_them(peer_and_model, engine):
    told = []
    lazy = Engine(peer_and_model[1], limits=LIMITS, compile="lazy", on_program=lambda *what: told.append(what))
    programs, early = lazy.programs, 5  # a token of one sequence, and prompts; their sampling; new prompts
    assert told[-1] == (early, programs.total, "") and programs.compiled == len(told) - 1 == early < programs.total
    options = Sampling(max_new_tokens=4, ignore_eos=True)
    for prompts, late in ((PROMPTS[1:2], []), (PROMPTS[1:3], ["step of 2 tokens, 2 sequences", "sampling of 2"])):
        del told[:]
        for _ in range(2):  # nothing is compiled twice
            answers = lazy.generate(prompts, options)
            assert [a.token_ids for a in answers] == [a.token_ids for a in engine.generate(prompts, options)]
        assert [name for _, _, name in told] == late
    assert programs.compiled == early + 2 < engine.programs.compiled == engine.programs.total == programs.total
    with pytest.raises(ShapeError, match="`compile` is 'never'; pass 'ahead' or 'lazy'"):
        Engine(peer_and_model[1], limits=LIMITS, compile="never")


def test_answers_end_as_they_should(engine):
    free = engine.generate([PROMPTS[1]], Sampling(max_new_tokens=20, ignore_eos=True))[0]
    stop = free.token_ids[6]
    first = free.token_ids.index(stop)
    ended = engine.generate([PROMPTS[1]], Sampling(max_new_tokens=20, ignore_eos=True, stop_token_ids=(stop,)))[0]
    assert (ended.token_ids, ended.finish) == (free.token_ids[: first + 1], "stop")
    longest = engine.generate([PROMPTS[0]], Sampling(ignore_eos=True))[0]
    assert (len(longest.token_ids), longest.finish) == (96 - 37, "length")


def test_n_answers_differ_and_repeat_with_their_seed(engine):
    options = Sampling(max_new_tokens=8, temperature=1.0, seed=7, n=3, logprobs=2)
    one, two = (engine.generate([PROMPTS[2]], options) for _ in range(2))
    assert [a.token_ids for a in one] == [a.token_ids for a in two]
    assert len({a.token_ids for a in one}) == 3
    assert all(len(a.logprobs) == 8 and len(a.logprobs[0].top) == 2 for a in one)
    before, fresh = engine.statistics.computed_tokens, [9, *PROMPTS[2]]  # 18 tokens, 16 of them in full pages
    engine.generate([fresh], Sampling(max_new_tokens=4, temperature=1.0, seed=7, n=3, ignore_eos=True))
    assert engine.statistics.computed_tokens - before == 16 + 3 * (2 + 3)


def test_streams_and_those_who_leave(engine):
    async def follow():
        parts = [d async for d in engine.stream(PROMPTS[1], Sampling(max_new_tokens=6, ignore_eos=True))]
        leaving = engine.stream(PROMPTS[0], Sampling(max_new_tokens=50, ignore_eos=True))
        await anext(leaving)
        await leaving.aclose()
        late = [d async for d in engine.stream(PROMPTS[2], Sampling(), deadline=0.0)]
        return parts, late

    engine.start()
    try:
        parts, late = asyncio.run(follow())
        same = engine.generate([PROMPTS[1]], Sampling(max_new_tokens=6, ignore_eos=True))[0]
    finally:
        engine.stop()
    assert tuple(t for d in parts for t in d.token_ids) == same.token_ids and parts[-1].finish == "length"
    assert late[-1].finish == "deadline"
    assert engine.statistics.finished["cancelled"] == 1
    assert engine.idle and engine.scheduler.pool.available == engine.scheduler.pool.num_pages


def test_what_cannot_be_served_is_declined(peer_and_model, engine):
    with pytest.raises(ShapeError, match="token id 131; ids are 0 to 130"):
        engine.generate([[131]])
    with pytest.raises(ShapeError, match="no tokenizer"):
        engine.generate(["text"])
    with pytest.raises(ShapeError, match="at most 96 tokens"):
        engine.generate([[5] * 90], Sampling(max_new_tokens=7))
    with pytest.raises(ShapeError, match="`logit_bias` names token 131"):
        engine.generate([[5]], Sampling(logit_bias={131: 1.0}))
    with pytest.raises(UnsupportedError, match="float64.*int8, fp8"):
        Engine(peer_and_model[1], limits=LIMITS, kv_dtype="float64")
    assert engine.idle


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"model": 5}, "Engine: `model` is 5, of type int; pass a Decoder"),
        ({"limits": 5}, "Engine: `limits` is 5, of type int; pass a Limits or None"),
        ({"draft": "small"}, "Engine: `draft` is 'small', of type str; pass a Decoder or None"),
        ({"mesh": "tensor=2"}, "Engine: `mesh` is 'tensor=2', of type str; pass a Mesh or None"),
        ({"drafts": 1.5}, "Engine: `drafts` is 1.5, of type float; pass an integer"),
        ({"end_tokens": 5}, "Engine: `end_tokens` is 5"),
    ],
)
def test_wrong_arguments_of_an_engine(peer_and_model, changed, text):
    with pytest.raises(ShapeError, match=text):
        Engine(**{"model": peer_and_model[1], "limits": LIMITS} | changed)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_reaches_every_client(engine, monkeypatch):
    def breaks(*arguments):
        raise RuntimeError("the device is gone")

    prompt = PROMPTS[1][::-1]  # in no cache of an earlier test, so that its two answers are in two steps

    async def follow():
        return [delta async for delta in engine.stream(prompt, Sampling(n=2))]

    with monkeypatch.context() as patched:
        patched.setattr(engine.programs, "step", breaks)
        engine.start()
        try:
            deltas = [delta for _ in range(2) for delta in asyncio.run(follow())]  # three failed steps in a row
            with pytest.raises(DeviceError, match="the device is gone; start it again"):
                engine.generate([PROMPTS[1]])
        finally:
            engine.stop()
    assert [(d.finish, d.error) for d in deltas] == [("error", "RuntimeError: the device is gone")] * 4
    assert engine.idle and engine.scheduler.pool.available == engine.scheduler.pool.num_pages
    engine.failure = None
    assert engine.generate([PROMPTS[1]], Sampling(max_new_tokens=3))[0].finish in ("length", "stop")


FEW = Limits(max_sequences=2, max_tokens=8, mixed_tokens=8, max_length=64, page_size=4)  # few programs


@pytest.mark.turns(4)
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_keys_and_values_of_8_bits(peer_and_model, kv_dtype, monkeypatch):
    """With scales of tokens, as on a CPU, and with scales of heads, as elsewhere, which lose more."""
    model, tokens = peer_and_model[1], jnp.asarray(PROMPTS[2])
    count, pages = len(tokens), 5
    batch = PagedBatch(
        jnp.array([count], jnp.int32), jnp.arange(pages, dtype=jnp.int32)[None], jnp.array([0, count], jnp.int32)
    )
    by_token = make_pools(model, 4, pages, kv_dtype_of(kv_dtype), TOKENS[1])
    monkeypatch.setattr(pools_module, "scales_by_token", lambda *_: False)
    pools = make_pools(model, 4, pages, kv_dtype_of(kv_dtype), TOKENS[1])
    assert [pool.by_token for pool in (by_token[0], pools[0])] == [True, False]
    step = jax.jit(lambda pools: model.logits(model.step(tokens, pools, batch)[0]))
    exact = step(make_pools(model, 4, pages, kv_dtype_of("float32"), TOKENS[1]))

    def error(pools):
        return float(jnp.abs(step(pools) - exact).max() / jnp.abs(exact).max())

    assert 0 < error(pools) < (0.06 if kv_dtype == "int8" else 0.2)
    assert 0 < error(by_token) < (0.03 if kv_dtype == "int8" else 0.2)
    if kv_dtype == "int8":  # whose error grows with the scale
        assert error(by_token) < error(pools)
        coarse = jax.tree.map(lambda x: 9 * x if x.dtype == jnp.float32 else x, pools)
        assert error(coarse) > 2 * error(pools)


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", ["gemma4_text, layer embeddings", "nemotron_h"])
def test_layers_without_pages_have_8_bits_next_to_them(name):
    """Layers that read the keys of another, or have no mixer, have pages of no features."""
    model = Decoder(ModelConfig.from_dict(TINY[name].config().to_dict()), rngs=nnx.Rngs(0))
    tokens = jnp.asarray(PROMPTS[2])
    count, pages = len(tokens), 5
    batch = PagedBatch(
        jnp.array([count], jnp.int32),
        jnp.arange(pages, dtype=jnp.int32)[None],
        jnp.array([0, count], jnp.int32),
        states=jnp.zeros((2, 1), jnp.int32),
    )
    step = jax.jit(lambda pools: model.logits(model.step(tokens, pools, batch)[0]))
    exact, rounded = (
        step(make_pools(model, 4, pages, kv_dtype_of(kind), TOKENS[1], num_states=1)) for kind in ("float32", "int8")
    )
    assert 0 < jnp.abs(rounded - exact).max() < 0.1 * jnp.abs(exact).max()


@pytest.mark.turns(5)
def test_an_engine_with_keys_and_values_of_8_bits(peer_and_model):
    quantized = Engine(peer_and_model[1], limits=FEW, kv_dtype="int8")
    assert {pool.pool.dtype.name for pool in quantized.programs.pages} == {"int8"}
    options = Sampling(max_new_tokens=6, ignore_eos=True, logprobs=0)
    together = quantized.generate(PROMPTS[1:4], options)
    alone = [quantized.generate([prompt], options)[0] for prompt in PROMPTS[1:4]]
    assert [a.token_ids for a in alone] == [a.token_ids for a in together]
    assert len({a.token_ids for a in alone}) == 3


@pytest.mark.turns(4)
@pytest.mark.parametrize("drafts", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_rotation_that_changes_with_the_length(tmp_path, drafts):
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "factor": 2.0}
    rope |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 4.0, 8.0, 16.0]}
    peer = Peer("Phi3", {"rope_parameters": rope, "original_max_position_embeddings": 20}).save(tmp_path)
    model = from_pretrained(tmp_path, dtype=jnp.float32)
    assert rotation_switch(model.config) == 20
    prompts = [TOKENS[0][:12], TOKENS[1][:20], TOKENS[2][:37], TOKENS[2][:12]]  # the last ones begin alike
    expected = [models_peer.peer_greedy(peer, prompt, 14) for prompt in prompts]
    turning = Engine(model, limits=FEW, drafts=drafts)
    answers = turning.generate(prompts, Sampling(max_new_tokens=14, ignore_eos=True))
    assert [list(answer.token_ids) for answer in answers] == expected
    assert turning.statistics.preemptions == 3  # all but the long prompt


@pytest.mark.turns(4)
def test_the_benchmark_calls_the_programs_of_steps_again_without_changing_them(peer_and_model, engine):
    with loaded("serve") as serve:
        driven = serve.DrivenEngine(Engine(peer_and_model[1], limits=LIMITS))
        programs = driven.engine.programs
        own = vars(programs).keys()
        with serve.Recorded(driven.engine) as recorded:
            tokens = {i: int(driven.prefill(i, PROMPTS[i]).argmax()) for i in range(2)}
            for _ in range(5):
                tokens = driven.decode(tokens)
        before = jax.tree.map(np.asarray, (programs.pages, programs.history))
        programs.pages = jax.tree.map(jnp.zeros_like, programs.pages)
        assert recorded.seconds() > 0 and vars(programs).keys() == own
        jax.tree.map(np.testing.assert_array_equal, (programs.pages, programs.history), before)
        driven.advance([0, 1], 12)
        expected = engine.generate(PROMPTS[:2], Sampling(max_new_tokens=12, ignore_eos=True))
        assert [driven._sampled[i][:12] for i in range(2)] == [list(answer.token_ids) for answer in expected]
