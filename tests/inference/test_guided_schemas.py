"""Published JSON schemas with their valid and invalid instances, of the world folder, as grammars."""

import json
import random

import pytest
from jsonschema.validators import validator_for

import world
from serving import write_model
from vishwamai.core.errors import ShapeError
from vishwamai.inference.guided import Vocabulary
from vishwamai.models import read_tokenizer

_REASONS = ("keys: [", "oneOf", "Unknown format: ", "intersection", "regex", "circular references")
"""Each error names the keyword that llguidance does not serve."""

FILES = world.files("bugs/jsonschemabench", "*.jsonl")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes")
    write_model(path)
    tokenizer = read_tokenizer(path)
    return tokenizer, Vocabulary.of(tokenizer, 262, [2])


def accepts(tokenizer, grammar, value):
    """Whether a grammar takes a value in JSON, and ends there."""
    matcher = grammar.matcher()
    ids = tokenizer.encoder.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False).ids
    return matcher.advance(ids) is None and matcher._matcher.is_accepting()


def sentence(tokenizer, grammar, draw):
    """A text under the masks of a grammar that ends soon; None where it does not."""
    matcher, ids = grammar.matcher(), []
    ends = [tokenizer.encoder.token_to_id(text) for text in '"}]0123456789,:{[']
    for _ in range(600):
        mask = matcher.mask()
        allowed = [token for token in range(262) if mask[token // 32] >> token % 32 & 1]
        if 2 in allowed:
            return tokenizer.decode(ids)
        short = [token for token in ends if token in allowed]
        token = short[0] if short and draw.random() < 0.6 else draw.choice(allowed)
        ids.append(token)
        assert matcher.advance([token]) is None
        if matcher.finished:
            return tokenizer.decode(ids)
    return None


def check(vocabulary, lines):
    """(schemas, declined, valid ones rejected, invalid ones accepted, of how many, texts that violate it)."""
    tokenizer, compiler = vocabulary
    draw, counts = (
        random.Random(0),
        dict.fromkeys(("schemas", "declined", "valid", "rejected", "invalid", "accepted", "texts", "wrong"), 0),
    )
    for line in lines:
        schema = line["schema"]
        counts["schemas"] += 1
        try:
            grammar = compiler.grammar("json_schema", schema)
        except ShapeError as error:
            assert any(word in str(error) for word in _REASONS) and len(str(error)) < 500, error
            counts["declined"] += 1
            continue
        for case in line["tests"]:
            kind, wrong = ("valid", "rejected") if case["valid"] else ("invalid", "accepted")
            counts[kind] += 1
            counts[wrong] += accepts(tokenizer, grammar, case["data"]) != case["valid"]
        text = sentence(tokenizer, grammar, draw)
        if text is not None:
            counts["texts"] += 1
            try:
                counts["wrong"] += not validator_for(schema)(schema).is_valid(json.loads(text))
            except Exception:
                counts["texts"] -= 1  # the validator itself declines the schema
    return counts


def lines(every):
    return [line for path in FILES for i, line in enumerate(world.records(path)) if i % every == 0]


@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.long)])
def test_published_schemas(vocabulary, every):
    if not FILES:
        pytest.skip("world: jsonschemabench is not here (the world folder)")
    counts = check(vocabulary, lines(every))
    print(counts)
    # llguidance 1.9.1 over all 779: 140 declined by their keyword (65 of them for `not`), of the others 1 of 749 valid
    # instances rejected and none of 800 invalid ones accepted.
    assert counts["declined"] <= 0.25 * counts["schemas"]
    assert counts["rejected"] <= 0.01 * counts["valid"] and counts["accepted"] == 0
    assert counts["wrong"] == 0
