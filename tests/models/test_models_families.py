"""Every family against transformers, by table: a tiny random checkpoint, its logits, and greedy tokens over pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import models_peer
import rotation
from models_families import TINY
from test_models_renamed import ALIKE, FILES
from vishwamai.inference import Engine, Limits, Sampling
from vishwamai.models import ModelConfig, from_pretrained, read_config, save_pretrained
from vishwamai.models.families import FAMILIES
from vishwamai.models.text_part import WRAPPERS

ROWS = {**TINY, **ALIKE}


def test_every_family_has_a_tiny_model() -> None:
    """Those that exist within another model's file alone are in `test_models_world`, and those that transformers has
    no class of in `test_models_renamed`.
    """
    rows = {name.split(",")[0] for name in (*TINY, *FILES)}
    assert set(FAMILIES) - rows <= set(WRAPPERS.values())


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", TINY)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    peer = TINY[name].save(tmp_path)
    tokens = np.random.default_rng(0).integers(3, 131, (2, 48))
    exact = models_peer.peer_logits(peer, tokens, double=True)
    # transformers takes a rotation's angles in float32 in either dtype: they are off by up to 48 * 2^-24.
    bound = 2 * np.abs(models_peer.peer_logits(peer, tokens) - exact).max() + 48 * 2.0**-24 * np.abs(exact).max()
    model = from_pretrained(tmp_path, dtype=jnp.float32)
    logits = model.logits(model(jnp.asarray(tokens)))
    assert np.abs(np.asarray(logits, np.float64) - exact).max() <= bound
    save_pretrained(model, tmp_path / "ours")
    assert read_config(tmp_path / "ours") == model.config
    assert (
        models_peer.peer_logits(models_peer.load(tmp_path / "ours"), tokens)
        == models_peer.peer_logits(models_peer.load(tmp_path), tokens)
    ).all()


@pytest.mark.parametrize("name", rotation.in_turn(6, ROWS))
def test_tokens_over_pages_and_states_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    peer = ROWS[name].save(tmp_path)
    tokens = np.random.default_rng(0).integers(3, 131, (2, 48))
    prompts = [tokens[0, :37].tolist(), tokens[1, :11].tolist()]
    model = from_pretrained(tmp_path, dtype=jnp.float32, stacked=True)
    assert models_peer.greedy(model, prompts, 24) == [models_peer.peer_greedy(peer, prompt, 24) for prompt in prompts]


@pytest.mark.parametrize("name", rotation.in_turn(18, ROWS))
def test_the_engine_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts go in chunks, next to other sequences, and a second time from the prefix cache."""
    peer = ROWS[name].save(tmp_path)
    tokens = np.random.default_rng(1).integers(3, 131, (2, 40)).tolist()
    prompts = [tokens[0], tokens[1][:7]]
    limits = Limits(max_sequences=2, max_tokens=16, max_length=64, page_size=4)
    engine = Engine(from_pretrained(tmp_path, dtype=jnp.float32), limits=limits)
    expected = [models_peer.peer_greedy(peer, prompt, 12) for prompt in prompts]
    for _ in range(2):
        answers = engine.generate(prompts, Sampling(max_new_tokens=12, ignore_eos=True))
        assert [list(answer.token_ids) for answer in answers] == expected


def test_a_file_of_pythia_gives_the_rotation_of_transformers() -> None:
    """Its keys have names of their own, and `rope_theta` is not among them."""
    import transformers

    values = {**TINY["gpt_neox"].config().to_dict(), "rotary_pct": 0.5, "rotary_emb_base": 500, "rope_theta": 7.0}
    del values["rope_parameters"]
    peer: Any = transformers.GPTNeoXConfig(**values).rope_parameters
    mixer: Any = ModelConfig.from_dict(values).layers[0].mixer
    assert (mixer.rope.theta, mixer.rope.partial) == (peer["rope_theta"], peer["partial_rotary_factor"])
