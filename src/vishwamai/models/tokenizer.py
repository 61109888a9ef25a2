"""Text to tokens and back: `tokenizer.json`, the chat template, and text that arrives token by token."""

from __future__ import annotations

import codecs
import dataclasses
import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer as Encoder

from vishwamai.core.arguments import checked
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models.chat import ChatTemplate
from vishwamai.models.gguf import model_directory
from vishwamai.models.values import read_json


def _byte_characters() -> dict[str, int]:
    """Bytes by the characters that byte-level tokenizers write them as: GPT-2's table."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with its chat template.

    Attributes:
      encoder: tokenizer of the library `tokenizers`.
      template: the chat template, or None.
      special: texts of the special tokens that templates name ("bos_token", "eos_token", ...).

    >>> from tokenizers import Tokenizer as Encoder, models
    >>> tokenizer = Tokenizer(Encoder(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    >>> tokenizer.encode("b"), tokenizer.decode([1, 0])
    ([1], 'b a')
    """

    encoder: Encoder
    template: ChatTemplate | None = None
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a text, with the tokens that the model expects around it if `add_special`."""
        try:
            # A batch releases the GIL, which `encoder.encode` holds for seconds with a text of megabytes.
            return self.encoder.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        except TypeError:
            surrogate = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
            if surrogate is None:
                raise
            raise ShapeError(f"the text has a lone surrogate at {surrogate}, which UTF-8 cannot encode.") from None
        except BaseException as error:
            if not _of_library(error):
                raise
            raise UnsupportedError(f"the tokenizer does not read this text ({error}).") from error

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ids. Bytes that are not UTF-8 become U+FFFD."""
        return self.encoder.decode(list(ids), skip_special_tokens=skip_special)

    def render_chat(self, messages: Sequence[Mapping[str, object]], /, **values: object) -> str:
        """The prompt that the chat template makes of messages.

        Args:
          messages: `{"role": ..., "content": ...}` each, as clients of OpenAI's API send them.
          **values: further variables of the template: `tools`, `add_generation_prompt` (True by default) and so on; see
            `ChatTemplate.rendering`.

        Raises:
          UnsupportedError: the model has no chat template, or its template rejects the messages.
        """
        if self.template is None:
            raise UnsupportedError(
                "Tokenizer.chat: the model has no chat template (`chat_template.jinja`, or `chat_template` in "
                "tokenizer_config.json); send a prompt as text instead."
            )
        return self.template.render(messages, {**self.special, "add_generation_prompt": True, **values})

    def chat(self, messages: Sequence[Mapping[str, object]], /, **values: object) -> list[int]:
        """Ids of the prompt that the chat template makes, which writes special tokens itself; see `render_chat`."""
        return self.encode(self.render_chat(messages, **values), add_special=False)

    def token_bytes(self, id: int) -> bytes:
        """What a token adds to a text that it continues; no bytes for an id that no token has.

        The bytes of a text's tokens, in order, are the text in UTF-8; one token may hold a part of a character.

        >>> from tokenizers import Tokenizer as Encoder, decoders, models
        >>> encoder = Encoder(models.WordLevel({"Ã": 0, "Ġa": 1}, unk_token="Ã"))
        >>> encoder.decoder = decoders.ByteLevel()
        >>> Tokenizer(encoder).token_bytes(0), Tokenizer(encoder).token_bytes(1), Tokenizer(encoder).token_bytes(9)
        (b'\xc3', b' a', b'')
        """
        cached = self._bytes.get(id)
        if cached is None:
            cached = self._bytes[id] = self._decoded(id)
        return cached

    def _decoded(self, id: int) -> bytes:
        token = self.encoder.id_to_token(id) if 0 <= id < 2**32 else None
        if token is None:
            return b""
        decoders = self._decoders
        if '"ByteLevel"' in decoders:
            plain = id in self._added or not all(character in _BYTES for character in token)
            return token.encode() if plain else bytes(_BYTES[character] for character in token)
        byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
        if byte and '"ByteFallback"' in decoders:
            return bytes.fromhex(byte[1])
        before = self.encoder.decode(self._anchor)
        return self.encoder.decode([*self._anchor, id], skip_special_tokens=False)[len(before) :].encode()

    @functools.cached_property
    def _bytes(self) -> dict[int, bytes]:
        return {}

    @functools.cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.encoder.get_added_tokens_decoder())

    @functools.cached_property
    def _decoders(self) -> str:
        """The decoders of the tokenizer, as JSON."""
        decoder = self.encoder.decoder
        return "" if decoder is None else decoder.__getstate__().decode()

    @functools.cached_property
    def _anchor(self) -> list[int]:
        """A word that another token continues: decoders strip blanks at the beginning of a text."""
        try:
            word = self.encoder.encode("a", add_special_tokens=False).ids[-1:]
        except Exception:  # the library raises plain Exception, here for a vocabulary without an unknown token
            word = []
        ids = (id for id in (*word, *range(99)) if id not in self._added)
        return [id for id in ids if self.encoder.decode([id])][:1]

    @functools.cached_property
    def special_ids(self) -> Mapping[str, int]:
        """Ids of the special tokens, by text. `decode` and `stream` skip them."""
        return {token.content: id for id, token in self.encoder.get_added_tokens_decoder().items() if token.special}

    @functools.cached_property
    def longest(self) -> int | None:
        """The most characters that one token of a text stands for; None where a token may stand for any text."""
        if '"ByteLevel"' not in self._decoders and '"ByteFallback"' not in self._decoders:
            return None
        return max(map(len, self.encoder.get_vocab()))

    @functools.cached_property
    def end_token(self) -> int | None:
        """The id of the token that the tokenizer's settings call the end of a text."""
        text = self.special.get("eos_token")
        return None if text is None else self.encoder.token_to_id(text)

    def stream(self, *, skip_special: bool = True, keep: Collection[int] = ()) -> Detokenizer:
        """A detokenizer for one answer; `keep` are special tokens that are text all the same."""
        return Detokenizer(self, skip_special, keep)


class Detokenizer:
    """Text of an answer, token by token; a character is given once all of its bytes are there.

    The answer continues a text: its first blank stays, which SentencePiece's decoder strips at the beginning of a text.

    >>> from tokenizers import Tokenizer as Encoder, decoders, models
    >>> encoder = Encoder(models.WordLevel({"Ã": 0, "¤": 1, "a": 2}, unk_token="a"))
    >>> encoder.decoder = decoders.ByteLevel()
    >>> stream = Tokenizer(encoder).stream()
    >>> [stream.add(id) for id in (2, 0, 1, 0)], stream.finish()
    (['a', '', 'ä', ''], '�')
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, keep: Collection[int] = ()):
        skipped = set(tokenizer.special_ids.values()) if skip_special else set()
        self._tokenizer, self._skipped = tokenizer, skipped - set(keep)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, id: int) -> str:
        """The text that one more token completes; "" where there is none yet."""
        return "" if id in self._skipped else self._characters.decode(self._tokenizer.token_bytes(id))

    def finish(self) -> str:
        """What is left at the end: a character that was never completed is U+FFFD."""
        return self._characters.decode(b"", final=True)


@checked
def read_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory: `tokenizer.json`, with `tokenizer_config.json` and
    `chat_template.jinja` where they exist.

    Raises:
      ShapeError: `tokenizer.json` is missing or damaged; the text names it.
    """
    directory = model_directory(Path(directory))
    path = directory / "tokenizer.json"
    if not path.exists():
        raise ShapeError(
            f"{path}: the file is missing; expected a tokenizer in the format of the library `tokenizers`. Download "
            "it, or pass token ids instead of text."
        )
    if not path.is_file():
        raise ShapeError(f"{path}: it is not a regular file; expected a tokenizer.")
    try:
        encoder = Encoder.from_file(str(path))
    except BaseException as error:  # the library raises plain Exception, and panics that are not even that
        if not _of_library(error):
            raise
        raise ShapeError(f"{path}: the file is not a tokenizer ({error}); download it again.") from error
    encoder.no_truncation()
    encoder.no_padding()
    settings = directory / "tokenizer_config.json"
    values = read_json(settings) if settings.exists() else {}
    return Tokenizer(encoder, chat_template(directory, values.get("chat_template")), special_tokens(values))


def _of_library(error: BaseException) -> bool:
    """Whether an error is one of the library: a plain `Exception`, or a panic of its Rust code."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def special_tokens(values: Mapping[str, object]) -> dict[str, str]:
    """Texts of the special tokens that chat templates name, in the values of a tokenizer_config.json.

    >>> special_tokens({"eos_token": {"content": "</s>"}, "bos_token": "<s>", "pad_token": None})
    {'bos_token': '<s>', 'eos_token': '</s>'}
    """
    special = {}
    for name in _SPECIAL:
        token = values.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            special[name] = token
    return special


def chat_template(directory: Path, setting: object) -> ChatTemplate | None:
    """The template of a Hugging Face directory: the file's before the setting's, of several named ones "default", and
    the others of `additional_chat_templates/` or of the setting by name.

    Raises:
      ShapeError: a file is not text, or the setting is neither a text nor a list of named texts.
    """
    source = directory / "tokenizer_config.json"
    named: dict[str, str] = {}
    if isinstance(setting, list):
        for entry in setting:
            if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
                raise ShapeError(
                    f"{source}: `chat_template` has {entry!r:.100}; expected objects with a `name` and a `template`."
                )
            named[entry["name"]] = entry["template"]
    elif isinstance(setting, str):
        named["default"] = setting
    elif setting is not None:
        raise ShapeError(f"{source}: `chat_template` is {setting!r:.100}; expected a text or a list of named ones.")
    path = directory / "chat_template.jinja"
    if path.is_file():
        named["default"], source = _read_text(path), path
    for path in sorted(directory.glob("additional_chat_templates/*.jinja")):
        named[path.stem] = _read_text(path)
    text = named.pop("default", None)
    return None if text is None else ChatTemplate(text, str(source), named)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ShapeError(f"{path}: the file is not UTF-8 ({error}); download it again.") from error
