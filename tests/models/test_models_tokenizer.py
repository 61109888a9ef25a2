"""Tokenizers, chat templates and generation defaults of Hugging Face directories."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import world
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


@pytest.mark.turns(4)
@given(st.text(max_size=40))
@settings(deadline=None, max_examples=50)
def test_a_stream_gives_whole_characters_and_the_same_text(directory: Path, text: str) -> None:
    tokenizer = read_tokenizer(directory)
    text = text.replace("\ufffd", "?")
    stream = tokenizer.stream()
    pieces = [stream.add(id) for id in tokenizer.encode(text)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == text


REAL = ["llama3_1", "qwen3"]
LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("llama3", "gemma3", "gptoss", "deepseek_v3")]


def prose() -> list[str]:
    """Texts of the world folder, and what tokenizers treat differently."""
    lines = (world.WORLD / "README.md").read_text(encoding="utf-8").splitlines()
    recorded = [
        json.dumps(json.loads(path.read_text()), ensure_ascii=False) for path in world.files("requests", "*.json")
    ]
    special = [
        "grüß Gott 你好 🤷🏽‍♀️ \u200b",
        "def f(x):\n\treturn x**2\n\n\n",
        "<s>[INST] hi [/INST]",
        "<think>x</think>",
        "",
    ]
    return [*special, *lines[:60], *recorded[::8]]


@pytest.mark.parametrize("name", [*REAL, *LONG])
def test_real_tokenizers_are_those_of_transformers(name: str) -> None:
    """Ids with their BOS, texts with and without special tokens, and texts of tokens one after another."""
    from transformers import AutoTokenizer

    path = world.tokenizer(name)
    theirs, ours = AutoTokenizer.from_pretrained(path), read_tokenizer(path)
    for text in prose():
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        for skip in (True, False):
            decoded = ours.decode(ids, skip_special=skip)
            assert decoded == theirs.decode(ids, skip_special_tokens=skip), text
        stream = ours.stream()
        assert "".join(map(stream.add, ids)) + stream.finish() == ours.decode(ids)
        plain = ours.encode(text, add_special=False)
        assert b"".join(map(ours.token_bytes, plain)).decode() == ours.decode(plain, skip_special=False)


def test_the_first_tokenizer_of_llama_is_that_of_sentencepiece() -> None:
    """transformers 5 differs from both where a text begins with two blanks."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = world.tokenizer("mistral") / "tokenizer.model.v1"
    theirs, ours = (
        sentencepiece.SentencePieceProcessor(model_file=str(model)),
        read_tokenizer(world.tokenizer("llama2")),
    )
    assert theirs.get_piece_size() == ours.encoder.get_vocab_size()
    for text in prose():
        if "<s>" in text or "</s>" in text:
            continue  # special tokens, which SentencePiece does not read in a text
        ids = ours.encode(text)
        assert ids == [ours.special_ids["<s>"], *theirs.encode(text)], text
        assert ours.decode(ids) == theirs.decode(ids[1:]) == text
        stream = ours.stream()
        assert "".join(map(stream.add, ids)) + stream.finish() == (text and f" {text}")  # the blank of a continuation


def test_bytes_of_real_tokens() -> None:
    """The bytes of every token: byte fallback, byte-level pieces, ids without a token, added tokens that are text."""
    tokenizer = read_tokenizer(world.tokenizer("qwen3"))
    think = tokenizer.encode("<think>", add_special=False)
    assert len(think) == 1 and tokenizer.token_bytes(think[0]) == b"<think>"
    stream = tokenizer.stream()
    ids = [*tokenizer.encode("a<think>"), 151_935, 2**40, -1, *tokenizer.encode("<|im_end|>你")]
    assert "".join(map(stream.add, ids)) + stream.finish() == "a<think>你"
    everything = [tokenizer.token_bytes(id) for id in range(151_669)]
    assert all(everything) and len(set(everything)) > 151_600
    assert tokenizer.token_bytes(tokenizer.encode(" Paris")[0]) == b" Paris"
    llama = read_tokenizer(world.tokenizer("llama2"))
    byte = llama.encoder.token_to_id("<0xE4>")
    paris = llama.encoder.token_to_id("▁Paris")
    assert byte is not None and paris is not None
    assert (llama.token_bytes(byte), llama.token_bytes(paris)) == (b"\xe4", b" Paris")
    assert llama.decode([paris]) == "Paris"
    stream = llama.stream()
    assert [stream.add(id) for id in (paris, byte, byte)] == [" Paris", "", "\ufffd"] and stream.finish() == "\ufffd"


def test_invalid_text_and_damaged_settings(directory: Path, tmp_path: Path) -> None:
    tokenizer = read_tokenizer(directory)
    with pytest.raises(ShapeError, match="the text has a lone surrogate at 1"):
        tokenizer.encode("a\ud800")
    (tmp_path / "tokenizer.json").write_text((directory / "tokenizer.json").read_text())
    for setting in (5, [5], [{"name": "default"}], {"a": 1}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": setting}))
        with pytest.raises(ShapeError, match="tokenizer_config.json: `chat_template`"):
            read_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ShapeError, match="chat_template.jinja: the file is not UTF-8"):
        read_tokenizer(tmp_path)


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
    for read, expected in (({"top_k": -1}, (0, None)), ({"top_p": 0}, (1, None)), ({"top_p": 0.5}, (20, 0.5))):
        (tmp_path / "generation_config.json").write_text(json.dumps({**values, **read}))
        found = read_generation_config(tmp_path)
        assert (found.top_k, found.top_p) == expected
    wrong = {"top_k": ["many", -2, 1.5], "top_p": [2, "a", True], "temperature": [math.nan, -1, math.inf, []]}
    wrong |= {"eos_token_id": ["</s>", ["</s>"], [1, -5], True], "do_sample": [1], "repetition_penalty": [0]}
    for key, value in ((key, value) for key, several in wrong.items() for value in several):
        (tmp_path / "generation_config.json").write_text(json.dumps({**values, key: value}))
        with pytest.raises(ShapeError, match=f"generation_config.json: `{key}` is .*; expected"):
            read_generation_config(tmp_path)


def test_a_tokenizer_that_panics_is_an_error(directory: Path, tmp_path: Path) -> None:
    """A regular expression that backtracks without end: the library's Rust code panics."""
    values = json.loads((directory / "tokenizer.json").read_text())
    values["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedError, match="the tokenizer does not read this text"):
        read_tokenizer(tmp_path).encode("a" * 100 + "b")
