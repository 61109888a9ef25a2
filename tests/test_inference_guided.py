"""Grammars of answers."""

import json

import pytest

from serving import write_model
from vishwamai.inference.guided import Vocabulary
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
