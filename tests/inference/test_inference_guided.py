"""Grammars of answers."""

import json

import pytest

import world
from serving import write_model
from vishwamai.inference.guided import Vocabulary
from vishwamai.inference.sampling import all_allowed
from vishwamai.models import read_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}


@pytest.fixture(scope="module")
def declines(tmp_path_factory):
    """Why a JSON text cannot be an answer in the form of a schema, or None."""
    path = tmp_path_factory.mktemp("bytes")
    write_model(path)
    tokenizer = read_tokenizer(path)
    vocabulary = Vocabulary.of(tokenizer, 262, [257])

    def advance(text, schema):
        return vocabulary.grammar("json_schema", schema).matcher().advance(tokenizer.encoder.encode(text).ids)

    return advance


@pytest.mark.parametrize("form", [{}, {"indent": 2}, {"indent": "\t"}, {"separators": (",", ":")}])
def test_every_usual_form_of_json_is_an_answer(declines, form):
    assert declines(json.dumps({"a": [1, 2]}, **form), SCHEMA) is None


def test_a_weak_model_cannot_write_whitespace_for_ever(declines):
    assert "grammar" in declines('{"a":  [1]}', SCHEMA)
    assert "grammar" in declines('{"a":\n\n[1]}', SCHEMA)
    assert declines('{"a":\n\n[1]}', SCHEMA | {"x-guidance": {"whitespace_flexible": True}}) is None


@pytest.mark.parametrize("vocab", [287, 288, 289])
def test_a_mask_has_the_words_of_the_sampler(tmp_path, vocab):
    """Published vocabs are multiples of 32, for which llguidance computes one word more."""
    write_model(tmp_path)
    grammar = Vocabulary.of(read_tokenizer(tmp_path), vocab, [257]).grammar("json_schema", SCHEMA)
    mask = grammar.matcher().mask()
    assert mask.shape == all_allowed(1, vocab)[0].shape


@pytest.mark.turns(3)
def test_a_published_vocab_allows_no_id_without_a_token():
    tokenizer = read_tokenizer(world.tokenizer("qwen3"))
    grammar = Vocabulary.of(tokenizer, 151936, [151645]).grammar("regex", r"(.|\n)*")
    mask = grammar.matcher().mask()
    assert mask.shape == (4748,)
    bits = (mask[:, None] >> range(32) & 1).reshape(-1)
    assert bits[:151643].sum() > 150000 and not bits[151669:].any()
