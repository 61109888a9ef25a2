"""Guesses of a draft model: answers are those of the model alone, token by token or in distribution."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx

from vishwamai.core.errors import DeviceError, ShapeError, UnsupportedError
from vishwamai.inference import Engine, Limits, Request, Sampling, plan_load
from vishwamai.inference.drafting import check_draft
from vishwamai.inference.sampling import all_allowed, empty_rows, propose, sample, set_row
from vishwamai.inference.server.metrics import Metrics
from vishwamai.inference.sharding import serving_mesh
from vishwamai.models import Decoder, ModelConfig, save_pretrained

VOCAB = 48
VALUES = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "eos_token_id": None,
}
LIMITS = Limits(max_sequences=2, max_tokens=16, mixed_tokens=16, max_length=48, page_size=4)
PROMPTS = [list(range(3, 3 + count)) for count in (21, 5, 1, 20)]  # the first and the last begin alike


def decoder(**changed):
    return Decoder(ModelConfig.from_dict({**VALUES, **changed}), rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def models():
    """A model, and a draft whose logits are near the model's: the same weights without the second layer."""
    model, draft = decoder(), decoder(num_hidden_layers=1)
    for name in ("embed", "head", "norm"):
        getattr(draft, name).set_value(getattr(model, name).get_value())
    nnx.update(draft.layers[0], nnx.state(model.layers[0]))
    return model, draft


@pytest.fixture(scope="module")
def plain(models):
    return Engine(models[0], limits=LIMITS)


@pytest.fixture(scope="module")
def engine(models):
    return Engine(models[0], limits=LIMITS, num_pages=13, draft=models[1], drafts=3)


OPTIONS = [
    Sampling(max_new_tokens=20),
    Sampling(max_new_tokens=20, temperature=1.0, top_p=0.9, seed=3, n=2),
    Sampling(max_new_tokens=20, temperature=0.7, top_k=9, min_p=0.05, presence_penalty=0.5, seed=4),
    Sampling(max_new_tokens=20, temperature=1.2, repetition_penalty=1.3, logit_bias={7: 1.0}, seed=-5, logprobs=2),
]


def same(answers, expected):
    assert [(a.token_ids, a.finish) for a in answers] == [(e.token_ids, e.finish) for e in expected]


def test_greedy_and_seeded_tokens_are_those_without_a_draft(plain, engine):
    """Few pages: some give theirs up. The second time, prefixes are in the cache."""
    expected = plain.generate(PROMPTS, OPTIONS)
    for _ in range(2):
        answers = engine.generate(PROMPTS, OPTIONS)
        same(answers, expected)
    assert answers[0].cached and engine.statistics.preemptions
    assert 0.1 < engine.statistics.accepted_share < 1
    for ours, theirs in zip(answers[-1].logprobs, expected[-1].logprobs, strict=True):
        assert ours.token == theirs.token and ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert engine.idle and engine.scheduler.pool.available == 13
    shown = {metric.name: metric.samples[0].value for metric in Metrics(engine, "tiny").collect() if metric.samples}
    assert shown["vishwamai_guesses_accepted_share"] == engine.statistics.accepted_share


@pytest.mark.long
def test_a_draft_equal_to_the_model_is_always_right(models, plain):
    twice = Engine(models[0], limits=LIMITS, draft=models[0], drafts=3)
    free = Sampling(max_new_tokens=21, temperature=1.0, top_p=0.8)
    answers = twice.generate(PROMPTS[1:3], [OPTIONS[0], free])
    same(answers[:1], plain.generate(PROMPTS[1:2], OPTIONS[0]))
    assert twice.statistics.accepted_share == 1
    # One token of the prompts' step, then four of each of the others.
    assert twice.statistics.steps == 1 + 21 // 4


def test_stops_and_those_who_leave(plain, engine):
    free = plain.generate([PROMPTS[0]], Sampling(max_new_tokens=20))[0].token_ids
    stop = Sampling(max_new_tokens=20, stop_token_ids=(free[5],))
    same(engine.generate([PROMPTS[0]], stop), plain.generate([PROMPTS[0]], stop))
    deltas = []
    request = Request(tuple(PROMPTS[0]), Sampling(max_new_tokens=20), deltas.append)
    engine.submit(request)
    while not deltas:
        engine.step()
    engine.cancel(request)
    while not engine.idle:
        engine.step()
    assert deltas[-1].finish == "cancelled"
    assert engine.scheduler.pool.available == 13


class EvenTokens:
    """A grammar of its own: even tokens only."""

    finished = False

    def matcher(self):
        return self

    def mask(self):
        return np.full(-(-VOCAB // 32), 0x55555555, np.int32)

    def advance(self, tokens):
        return None if all(token % 2 == 0 for token in tokens) else "an odd token"


def test_an_answer_with_a_grammar_has_no_guesses(plain, engine):
    def run(served):
        found = {True: [], False: []}
        for guided, prompt in ((True, PROMPTS[0]), (False, PROMPTS[1])):
            grammar: Any = EvenTokens() if guided else None
            sink = found[guided].append
            served.submit(Request(tuple(prompt), Sampling(max_new_tokens=12), sink, grammar=grammar))
        while not served.idle:
            served.step()
        return {key: [token for delta in deltas for token in delta.token_ids] for key, deltas in found.items()}

    before = engine.statistics.guesses
    found = run(engine)
    assert found == run(plain) and all(token % 2 == 0 for token in found[True])
    assert engine.statistics.guesses > before  # of the other one


def p_value(drawn, probabilities):
    """Of a chi-square test; outcomes that are expected less than 5 times are one."""
    found, expected = np.bincount(drawn, minlength=len(probabilities)), probabilities * len(drawn)
    assert not found[expected == 0].any()
    rare = expected < 5
    groups = [(found[~rare], expected[~rare])] + ([(found[rare].sum(), expected[rare].sum())] if rare.any() else [])
    found, expected = (np.concatenate([np.atleast_1d(group[i]) for group in groups]) for i in (0, 1))
    keep = expected > 0
    return scipy.stats.chisquare(found[keep], expected[keep]).pvalue


@pytest.mark.turns(3)
@pytest.mark.parametrize("options", [{}, {"top_k": 5, "temperature": 0.8}, {"top_p": 0.8, "min_p": 0.02}])
def test_a_checked_guess_has_the_models_distribution(options: dict[str, Any]):
    """A guess of a draft whose logits differ, checked: tokens follow p, and 1 - TV(p, q) of the guesses are taken."""
    count, draws = 12, 20_000
    sampling = Sampling(**{"temperature": 1.0, **options})
    p_logits, q_logits = np.random.default_rng(5).normal(size=(2, count)).astype(np.float32) * 1.5
    rows = empty_rows(draws, 1, count)
    for i in range(draws):
        set_row(rows, i, sampling)
    rows.seed[:] = np.arange(draws)
    assert rows.rejects.all()
    history, allowed = jnp.zeros((1, 4), jnp.int32), all_allowed(draws, count)
    proposals = jax.jit(propose)(np.tile(q_logits, (draws, 1)), rows, history, allowed)
    checked = rows._replace(proposal=np.arange(draws, dtype=np.int32))
    tiled = np.tile(p_logits, (draws, 1))
    drawn = np.asarray(jax.jit(sample)(tiled, checked, history, allowed, proposals).tokens)
    p, q = (support(logits, sampling) for logits in (p_logits, q_logits))
    guesses = np.asarray(proposals.tokens)
    assert p_value(guesses, q) > 1e-3
    assert p_value(drawn, p) > 1e-3
    right = (guesses == drawn).mean()
    assert abs(right - np.minimum(p, q).sum()) < 5 * np.sqrt(0.25 / draws)
    # A row with a seed: the draw is the one without a guess, and the noise that both share makes many equal.
    seeded = rows._replace(rejects=np.zeros(draws, bool))
    shared = np.asarray(jax.jit(propose)(np.tile(q_logits, (draws, 1)), seeded, history, allowed).tokens)
    own = np.asarray(jax.jit(sample)(tiled, seeded, history, allowed).tokens)
    assert p_value(shared, q) > 1e-3 and p_value(own, p) > 1e-3
    assert right - 0.2 < (shared == own).mean() <= right + 5 * np.sqrt(0.25 / draws)


def support(logits, options):
    """Probabilities after the options, by sorting, in float64."""
    x = logits.astype(np.float64) / options.temperature
    order = np.argsort(-x)
    p = np.exp(x - x.max())
    p[order[options.top_k or len(x) :]] = 0
    p /= p.sum()
    p[order[np.cumsum(p[order]) - p[order] >= options.top_p]] = 0
    p[p < options.min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.long
def test_answers_without_a_seed_have_the_models_distribution(models, engine, monkeypatch):
    """Three tokens, of the likeliest three each: how often each of the 27 answers occurs."""
    seeds = np.random.default_rng(0)
    monkeypatch.setattr("os.urandom", seeds.bytes)
    options = Sampling(max_new_tokens=3, temperature=1.0, top_k=3, ignore_eos=True, n=128)
    before = engine.statistics.guesses
    found = [answer.token_ids for answer in engine.generate([[9, 4]] * 16, options)]
    assert engine.statistics.guesses > before
    expected = dict(continuations(models[0], options, (), 1.0))
    outcomes = sorted(expected)
    assert len(outcomes) == 27
    drawn = np.array([outcomes.index(tokens) for tokens in found])
    assert p_value(drawn, np.array([expected[one] for one in outcomes])) > 1e-3


def continuations(model, options, tokens, chance):
    """Every answer of three tokens that goes on from `tokens`, and its probability."""
    if len(tokens) == 3:
        yield tokens, chance
        return
    logits = model.logits(model(jnp.asarray([[9, 4, *tokens]])))[0, -1]
    p = support(np.asarray(logits), options)
    for token in np.flatnonzero(p):
        yield from continuations(model, options, (*tokens, int(token)), chance * p[token])


def test_a_draft_that_cannot_guess_is_an_error_before_loading(tmp_path, models):
    model, draft = models
    other = ModelConfig.from_dict({**VALUES, "vocab_size": 50})
    with pytest.raises(ShapeError, match="vocab of 50 tokens, the model .* one of 48"):
        check_draft(model.config, other, 4, 48)
    with pytest.raises(ShapeError, match="number of them in a step is 0"):
        Engine(model, limits=LIMITS, draft=draft)
    with pytest.raises(ShapeError, match="has 64 positions, but a sequence may have 65"):
        check_draft(model.config, draft.config, 4, 65)
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}
    longrope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 20}
    turning = ModelConfig.from_dict({**VALUES, "rope_parameters": longrope})
    with pytest.raises(UnsupportedError, match="rotation changes at 20 tokens"):
        check_draft(model.config, turning, 4, 48)

    for name, one in (("model", model), ("draft", draft)):
        save_pretrained(one, tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text(_tokenizer(["a", "b"]))
    sizes: dict[str, Any] = {"dtype": "float32", "max_sequences": 2, "max_length": 48, "memory": 2**24}
    alone = plan_load(tmp_path / "model", drafts=3, **sizes)
    both = plan_load(tmp_path / "model", drafts=3, draft_model=tmp_path / "draft", **sizes)
    assert both.draft.pages == both.pages // 2 and both.draft.weights < both.weights
    assert both.total - alone.total == both.draft.weights + both.draft.pages + (both.step - alone.step)
    assert f"draft llama, 1 layers, from {tmp_path / 'draft'}" in str(both)
    least = alone.weights + alone.step + 3 * alone.pages // alone.num_pages  # one sequence of the model alone
    plan_load(tmp_path / "model", drafts=3, **{**sizes, "memory": least})
    with pytest.raises(DeviceError, match="does not fit"):
        plan_load(tmp_path / "model", drafts=3, draft_model=tmp_path / "draft", **{**sizes, "memory": least})
    (tmp_path / "draft" / "tokenizer.json").write_text(_tokenizer(["b", "a"]))
    with pytest.raises(ShapeError, match="gives tokens other ids than"):
        plan_load(tmp_path / "model", drafts=3, draft_model=tmp_path / "draft", **sizes)
    with pytest.raises(ShapeError, match="expected a directory"):
        plan_load(tmp_path / "model", drafts=3, draft_model=tmp_path / "none", **sizes)


def _tokenizer(words):
    import tokenizers

    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    return tokenizers.Tokenizer(model).to_str()


@pytest.mark.long
def test_the_command(tmp_path, models, plain, capsys, monkeypatch):
    from vishwamai.cli import main

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_pretrained(models[0], tmp_path / "model")
    command = ["generate", str(tmp_path / "model"), "--token-ids", "3,4,5", "--dtype", "float32", "--max-length", "48"]
    command += ["--step-tokens", "16", "--max-new-tokens", "12", "--temperature", "0", "--json"]
    draft = ["--draft-model", str(tmp_path / "model")]
    assert main([*command, *draft, "--draft-tokens", "2"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert tuple(found["token_ids"]) == plain.generate([[3, 4, 5]], Sampling(max_new_tokens=12))[0].token_ids
    assert found["accepted_share"] == 1
    for wrong, said in ((["--draft-tokens", "2"], "pass --draft-model"), ([*draft, "--guesses", "2"], "one of them")):
        assert main([*command, *wrong]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.long
def test_a_mesh_splits_the_draft_too(plain):
    model, draft = decoder(), decoder(num_hidden_layers=1)
    limits = dataclasses.replace(LIMITS, max_sequences=1)
    split = Engine(model, limits=limits, draft=draft, drafts=2, mesh=serving_mesh("tensor=2"))
    same(split.generate(PROMPTS[1:3], OPTIONS[0]), plain.generate(PROMPTS[1:3], OPTIONS[0]))
    assert split.statistics.guesses
