"""What goes wrong for one request ends that request; the others get the answers that they get without it."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import world
from serving import write_model
from vishwamai.inference import Sampling, plan_load
from vishwamai.inference.guided import Vocabulary
from vishwamai.inference.requests import Request
from vishwamai.inference.sampling import NO_TOKEN, all_allowed, empty_rows, sample, set_row
from vishwamai.models import read_tokenizer

AMBIGUOUS = 'start: a+\na: b | c | a a | a a a\nb: "x" | "xx" | b b\nc: "x"+ | c c'


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes")
    write_model(path)
    return plan_load(path, dtype="float32", max_sequences=4, max_tokens=32, max_length=96, page_size=8).engine()


def answers(engine, *requests):
    """The deltas of each request, which the engine's own loop computes without its thread."""
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()


def request(deltas, **options):
    grammar, sink = options.pop("grammar", None), options.pop("sink", deltas.append)
    prompt = options.pop("prompt", (5, 6, 7))
    return Request(prompt, Sampling(max_new_tokens=6, **options), sink, grammar=grammar)


class Broken:
    """A grammar that fails at some point."""

    finished = False

    def __init__(self, place):
        self.place = place

    def matcher(self):
        if self.place == "matcher":
            raise RuntimeError("broken")
        return self

    def mask(self):
        if self.place == "mask":
            raise RuntimeError("broken")
        return np.full(3 if self.place == "shape" else 9, -1, np.int32)

    def advance(self, tokens):
        raise RuntimeError("broken")


@pytest.mark.parametrize("place", ["matcher", "mask", "advance", "sink", "take"])
def test_a_fault_ends_its_own_request(engine, place):
    expected, good, bad = [], [], []
    answers(engine, request(expected))
    if place == "sink":
        faulty = request(bad, sink=lambda delta: bad.append(delta) or 1 / 0)
    elif place == "take":
        faulty = request(bad, stop_token_ids=(1,))
        faulty.keep_special = 5  # pyright: ignore[reportAttributeAccessIssue]: no collection
    else:
        faulty = request(bad, grammar=Broken(place))
    answers(engine, request(good), faulty)
    assert [delta.token_ids for delta in good] == [delta.token_ids for delta in expected]
    assert bad[-1].finish == ("length" if place == "sink" else "error")
    assert engine.core.idle and engine.failure is None and not engine.core._branches


class Slow(Broken):
    """A grammar whose masks wait for another answer's tokens."""

    def __init__(self, tokens):
        super().__init__("nowhere")
        self.tokens, self.late = tokens, False

    def mask(self):
        count, end = len(self.tokens), time.monotonic() + 20
        while not self.late and len(self.tokens) < min(count + 5, 60):
            self.late = time.monotonic() > end
            time.sleep(0.001)
        return super().mask()

    def advance(self, tokens):
        return None


def test_masks_hold_up_no_other_answer(engine):
    tokens, ends = [], []
    slow = [Slow(tokens), Slow(tokens)]
    plain = Request((5, 6, 7), Sampling(max_new_tokens=60, ignore_eos=True), tokens.append)
    answers(engine, *(request(ends, grammar=grammar) for grammar in slow), plain)
    assert len(tokens) == 60 and not any(grammar.late for grammar in slow)
    assert [delta.finish for delta in ends].count("length") == 2


def test_every_step_has_a_token_of_an_answer_that_runs(engine):
    """Next to long prompts, options of every kind and grammars that fail, and no step computes more than its bound."""
    tokens, rest = [], []
    engine.submit(Request((5, 6, 7), Sampling(max_new_tokens=40, ignore_eos=True), tokens.append))
    while not tokens:
        engine.step()
    prompt = tuple(8 + i % 200 for i in range(80))
    costly = {"temperature": 1.0, "top_k": 9, "top_p": 0.8, "min_p": 0.01, "presence_penalty": 0.5, "logprobs": 20}
    for options in ({"n": 3}, {"grammar": Broken("advance")}, {"grammar": Broken("mask")}):
        engine.submit(request(rest, prompt=prompt, **costly, **options))
    computed = engine.statistics.computed_tokens
    while len(tokens) < 40:
        count, computed = len(tokens), engine.statistics.computed_tokens
        engine.step()
        assert len(tokens) == count + 1
        assert engine.statistics.computed_tokens - computed <= engine.limits.mixed < len(prompt)
    assert sum(delta.finish is not None for delta in rest) >= 3
    answers(engine)


def test_a_step_that_fails_ends_its_answers_and_no_later(engine):
    bad, good = [], []
    answers(engine, request(bad, grammar=Broken("shape")))
    assert bad[-1].finish == "error" and "broadcast" in bad[-1].error
    answers(engine, request(good))
    assert good[-1].finish == "length"


def test_no_prompt_goes_on_after_pages_of_a_step_that_failed(engine):
    """They are known from when the step is planned, and hold whatever was there."""
    prompt, expected, again = tuple(range(3, 3 + 2 * engine.core.scheduler.limits.page_size + 1)), [], []
    answers(engine, request([], prompt=prompt, grammar=Broken("shape")))
    answers(engine, request(again, prompt=prompt))
    answers(engine, request(expected, prompt=prompt))
    assert again[0].cached == 0 < expected[0].cached
    assert [delta.token_ids for delta in again] == [delta.token_ids for delta in expected]


@pytest.mark.turns(3)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_ends_says_so(tmp_path):
    write_model(tmp_path)
    engine = plan_load(tmp_path, dtype="float32", max_sequences=1, max_tokens=16, max_length=32).engine(compile="lazy")
    ended = threading.Event()
    engine.on_failure = ended.set
    engine.core.step = lambda: 1 / 0  # pyright: ignore[reportAttributeAccessIssue]
    deltas = []
    engine.start()
    engine.submit(request(deltas))
    assert ended.wait(10) and engine.failure.startswith("ZeroDivisionError")
    engine.stop()
    assert deltas[-1].finish == "error"


def rows(vocab, *options):
    filled = empty_rows(len(options), len(options), vocab)
    for i, option in enumerate(options):
        set_row(filled, i, option)
    return filled


def test_the_smallest_temperatures_draw_the_largest():
    logits = jnp.array([[3.0, 80.0, -5.0, 79.0], [-3e38, -1.0, -2.0, -jnp.inf]])
    draw = jax.jit(
        lambda filled: sample(logits, filled, jnp.zeros((2, 8), jnp.int32), jnp.asarray(all_allowed(2, 4))).tokens
    )
    for temperature in (1e-5, 1e-30, 1e-37, 1.2e-38, 1e-40, 1e-45):
        base = Sampling(temperature=temperature, seed=1)
        narrowed = [dataclasses.replace(base, top_p=0.5), dataclasses.replace(base, min_p=0.1)]
        for options in (base, *narrowed, dataclasses.replace(base, top_k=2)):
            assert draw(rows(4, options, options)).tolist() == [1, 1], options


@pytest.mark.turns(3)
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_row_that_is_not_finite_has_no_token(value):
    logits = jnp.array([[1.0, 2.0, 0.0, 0.0], [1.0, value, 0.0, 0.0], [-jnp.inf] * 4])
    for temperature in (0.0, 1.0):
        filled = rows(4, *[Sampling(temperature=temperature, seed=1, logprobs=2, top_k=1)] * 3)
        drawn = sample(logits, filled, jnp.zeros((3, 8), jnp.int32), jnp.asarray(all_allowed(3, 4)))
        assert drawn.tokens.tolist() == [1, NO_TOKEN, NO_TOKEN]


def test_logits_that_are_not_finite_are_an_error_of_their_answer(engine, monkeypatch):
    step = engine.programs.step

    def poisoned(shape, tables, filled, allowed, proposals=()):
        drawn = step(shape, tables, filled, allowed, proposals)
        return drawn._replace(tokens=jnp.full_like(drawn.tokens, NO_TOKEN))

    monkeypatch.setattr(engine.programs, "step", poisoned)
    deltas = []
    answers(engine, request(deltas))
    assert deltas[-1].finish == "error" and "not finite" in deltas[-1].error


@pytest.mark.turns(4)
def test_a_grammar_that_gives_up_is_an_error():
    tokenizer = read_tokenizer(world.tokenizer("qwen3"))
    grammar = Vocabulary.of(tokenizer, 151936, [151645]).grammar("lark", AMBIGUOUS)
    matcher = grammar.matcher()
    token = tokenizer.encode("x")[0]
    reason = None
    for _ in range(400):
        try:
            matcher.mask()
        except Exception as error:
            reason = str(error)
            break
        reason = matcher.advance([token])
        if reason is not None:
            break
    assert reason is not None and "could not go on" in reason and len(reason) < 400


@pytest.mark.turns(4)
def test_the_end_token_of_the_tokenizer_ends_an_answer():
    directory = world.tiny("qwen3", eos_token_id=151643)
    engine = plan_load(directory, dtype="float32", max_sequences=1, max_tokens=16, max_length=64).engine(compile="lazy")
    assert {151643, 151645} <= engine.end_tokens


@pytest.mark.turns(4)
def test_the_first_blank_of_an_answer_stays():
    directory = world.tiny("llama2")
    engine = plan_load(directory, dtype="float32", max_sequences=1, max_tokens=16, max_length=64).engine(compile="lazy")
    tokenizer = engine.tokenizer
    blank = tokenizer.encoder.token_to_id("▁Paris")
    (answer,) = engine.generate(
        ["The capital is"], Sampling(max_new_tokens=2, logit_bias={blank: 1000.0}, stop=(" Paris Paris ",))
    )
    assert answer.text == " Paris Paris"
    (stopped,) = engine.generate(
        ["The capital is"], Sampling(max_new_tokens=2, logit_bias={blank: 1000.0}, stop=(" Paris",))
    )
    assert stopped.text == "" and stopped.finish == "stop"


@pytest.mark.turns(4)
def test_an_id_without_a_token_has_no_text():
    directory = world.tiny("qwen3")
    engine = plan_load(directory, dtype="float32", max_sequences=1, max_tokens=16, max_length=64).engine(compile="lazy")
    (answer,) = engine.generate(["a"], Sampling(max_new_tokens=2, logit_bias={151900: 1000.0}))
    assert answer.token_ids == (151900, 151900) and answer.text == ""
