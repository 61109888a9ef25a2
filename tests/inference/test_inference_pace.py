"""The budget of steps that decode follows their measured times: of a simulated machine, and of an engine whose clock a
test turns.
"""

import itertools

import numpy as np
import pytest
from flax import nnx

from vishwamai import ShapeError
from vishwamai.inference import Engine, Limits, Sampling
from vishwamai.inference.pace import Pace
from vishwamai.models import Decoder, ModelConfig

CONFIG = ModelConfig.from_dict(
    {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
    }
)
SIZES = (32, 64, 128, 256, 512)


def simulate(pace: Pace, base: float, rate: float, steps: int = 12) -> int:
    """The budget after steps, by turns decodes and with prompts, of `base` seconds and `rate` more for each token."""
    for _ in range(steps):
        pace.record(4, base, prompts=False)
        pace.record(pace.tokens - 1, base + rate * pace.tokens, prompts=True)
    return pace.tokens


def test_the_largest_step_within_the_target_is_found():
    pace = Pace(0.1, SIZES, tokens=128)
    for base, rate in ((0.02, 0.001), (0.05, 0.001), (0.02, 0.0001), (0.09, 0.001), (0.2, 0.001), (0.001, 1e-5)):
        fitting = [size for size in SIZES if base + rate * size <= 0.1]
        assert simulate(pace, base, rate) == max(fitting, default=SIZES[0]), (base, rate)
        assert pace.seconds(256) == pytest.approx(base + 256 * rate)
    before = pace.tokens
    pace.record(200, 30.0, prompts=True)  # a program was compiled in this step
    assert pace.tokens == before


@pytest.mark.turns(2)
def test_an_engine_follows_its_clock():
    limits = Limits(max_sequences=2, max_tokens=64, max_length=120, page_size=4, token_seconds=0.05)
    assert limits.mixed_sizes == (16, 32, 64)
    model = Decoder(CONFIG, rngs=nnx.Rngs(0), stacked=False)
    engine = Engine(model, limits=limits, compile="lazy", prefix_cache=False)
    long = np.arange(90).tolist()
    prompts = [[token % 64 for token in long[:3]], [token % 64 for token in long]]
    options = [Sampling(max_new_tokens=20, ignore_eos=True), Sampling(max_new_tokens=2, ignore_eos=True)]
    answers = []
    for tick, tokens in ((1e-6, 64), (1.0, 16)):
        engine.core.clock = itertools.count(step=tick).__next__
        answers.append(engine.generate(prompts, options))
        for _ in range(3):  # what was measured before is forgotten
            engine.generate(prompts, options)
        assert engine.core.pace is not None and engine.core.pace.tokens == tokens
        assert engine.scheduler.mixed == tokens
    assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]


def test_a_target_is_a_time():
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ShapeError, match="`token_seconds` is"):
            Limits(token_seconds=seconds)
