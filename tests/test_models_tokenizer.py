"""Tokenizers, chat templates and generation defaults of Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vishwamai import ShapeError, UnsupportedError
from vishwamai.models import read_generation_config, read_tokenizer
from vishwamai.models.chat import ChatTemplate

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer without merges, as transformers writes it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=encoder, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    return path


def test_a_chat_is_that_of_transformers(directory: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(directory)
    ours = read_tokenizer(directory)
    messages = [{"role": "user", "content": " grüß Gott 你好 "}]
    tools: list[Any] = [{"type": "function", "function": {"name": "<f>", "parameters": {}}}]
    for values in ({}, {"tools": tools}):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **values)
        assert ours.chat(messages, **values) == expected
    assert ours.decode(ours.encode("grüß 你")) == "grüß 你"


@given(st.text(max_size=40))
@settings(deadline=None, max_examples=50)
def test_a_stream_gives_whole_characters_and_the_same_text(directory: Path, text: str) -> None:
    tokenizer = read_tokenizer(directory)
    text = text.replace("\ufffd", "?")
    stream = tokenizer.stream()
    pieces = [stream.add(id) for id in tokenizer.encode(text)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == text


def test_a_character_that_never_ends_is_given_at_the_end(directory: Path) -> None:
    tokenizer = read_tokenizer(directory)
    stream = tokenizer.stream()
    ids = tokenizer.encode("a你")
    assert [stream.add(id) for id in ids[:-1]] == ["a", "", ""]
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('only users speak') }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_what_a_template_must_not_do_is_an_error(text: str) -> None:
    with pytest.raises(UnsupportedError, match="chat.jinja: the chat template rejects these messages: .+"):
        ChatTemplate(text, "chat.jinja").render([{"role": "user", "content": "hello"}], {})


def test_damaged_files_are_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="tokenizer.json: the file is missing; expected"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text((directory / "tokenizer.json").read_text()[:100])
    with pytest.raises(ShapeError, match="tokenizer.json: the file is not a tokenizer"):
        read_tokenizer(tmp_path)
    with pytest.raises(ShapeError, match="chat.jinja: the chat template is not valid Jinja"):
        ChatTemplate("{% if %}", "chat.jinja").render([], {})


def test_generation_defaults(tmp_path: Path) -> None:
    values = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [5, 7], "transformers_version": "5"}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    found = read_generation_config(tmp_path)
    assert (found.temperature, found.top_k, found.eos_token_ids, found.top_p) == (0.6, 20, (5, 7), None)
    (tmp_path / "generation_config.json").write_text(json.dumps({**values, "top_k": "many"}))
    with pytest.raises(ShapeError, match="`top_k` is 'many'; expected a number"):
        read_generation_config(tmp_path)
