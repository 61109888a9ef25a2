"""Documents as tokens on disk: each source is tokenized once, into arrays that are mapped into memory."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vishwamai.core import caches
from vishwamai.core.errors import ConfigError, ShapeError, UnsupportedError
from vishwamai.models.tokenizer import special_tokens
from vishwamai.training.chat import Span, TrainingTemplate, end_of_text, tokenizer_path, tokenizer_settings
from vishwamai.training.config import DataSection, DpoSection, SourceSection, TokenizerSection, TrainConfig
from vishwamai.training.sources import (
    Bad,
    Chat,
    Completion,
    Document,
    Pair,
    Place,
    documents,
    placed_documents,
    placed_pairs,
    source_name,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BATCH = 256  # documents that `tokenizers` encodes at once, on all cores


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The documents of one source.

    Attributes:
      tokens: uint16 or uint32 `[tokens]`, each document with its end after it.
      offsets: int64 `[documents + 1]`, where each document begins.
      targets: bool `[tokens]`, the tokens that count in the loss; None if all do.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    targets: np.ndarray | None


def make_tokenizer(config: TrainConfig) -> Tokenizer:
    """The tokenizer of a run: that of `tokenizer_path`, or a byte-level BPE trained on the sources.

    Raises:
      ConfigError: there is no tokenizer.json, or it lacks the end-of-text token.
    """
    import tokenizers

    path, end = tokenizer_path(config), end_of_text(config)
    if path is None:
        tokenizer = _train(config.tokenizer, end, config.data.sources)
    else:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            key = "model.start_from" if config.tokenizer.path is None else "tokenizer.path"
            raise ConfigError(f"config: {key} is {str(path)!r}, but {file} is not a file; set tokenizer.path.")
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    if tokenizer.token_to_id(end) is None:
        raise ConfigError(
            f"config: tokenizer.end_of_text is {end!r}, which {path} does not contain; name its own end token."
        )
    return tokenizer


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How texts become documents.

    Attributes:
      tokenizer: the encoder.
      end: id of the end-of-text token.
      begin: ids before a text; that of BOS, or none.
      begin_chats: a chat gets them too, unless its template has written them. Templates do where a chat has a BOS.
    """

    tokenizer: Tokenizer
    end: int
    begin: tuple[int, ...] = ()
    begin_chats: bool = False

    @classmethod
    def of(cls, config: TrainConfig, tokenizer: Tokenizer) -> Encoding:
        """The encoding of a configuration, which `tokenizer.add_bos` changes.

        Raises:
          ConfigError: `tokenizer.add_bos` is set, and the tokenizer has no BOS.
        """
        add_bos = config.tokenizer.add_bos
        begin = first_tokens(tokenizer)
        if add_bos is False:
            begin = ()
        elif add_bos and not begin:
            name = special_tokens(tokenizer_settings(config)).get("bos_token")
            number = None if name is None else tokenizer.token_to_id(name)
            if number is None:
                raise ConfigError(
                    "config: tokenizer.add_bos=true, but the tokenizer has no `bos_token` in tokenizer_config.json; "
                    "set tokenizer.add_bos to null."
                )
            begin = (number,)
        end = tokenizer.token_to_id(end_of_text(config))
        assert end is not None  # `make_tokenizer` says so
        return cls(tokenizer, end, begin, bool(add_bos))

    def __call__(self, texts: Sequence[Rendered]) -> Iterator[tuple[list[int], list[bool]]]:
        """Ids of each text with what begins and ends it, and which of them count in the loss."""
        encoded = self.tokenizer.encode_batch([text.text for text in texts], add_special_tokens=False)
        added = self.tokenizer.get_added_tokens_decoder()
        closings = tuple(token.content for token in added.values())
        for text, tokens in zip(texts, encoded):
            ids = list(tokens.ids)
            is_target = [any(a < end and begin < b for begin, end in text.spans) for a, b in tokens.offsets]
            if not text.is_chat or (self.begin_chats and tuple(ids[: len(self.begin)]) != self.begin):
                ids, is_target = [*self.begin, *ids], [False] * len(self.begin) + is_target
            if not (text.is_chat and text.text.rstrip().endswith(closings)):  # the template has not ended the turn
                ids, is_target = [*ids, self.end], [*is_target, text.ends]
            yield ids, is_target


def first_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that a tokenizer puts before a text, such as that of BOS.

    >>> from tokenizers import Tokenizer, models
    >>> first_tokens(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    ()
    """
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    ids = tokenizer.encode("a").ids
    starts = (i for i in range(len(ids) - len(plain) + 1) if ids[i : i + len(plain)] == plain)
    return tuple(ids[: next(starts, 0)])


def write_tokens(
    source: SourceSection,
    data: DataSection,
    encoding: Encoding,
    folder: Path,
    preferences: DpoSection | None = None,
    template: TrainingTemplate | None = None,
) -> list[Bad]:
    """Tokenizes a source into `folder`; with `preferences`, each pair as two documents, the preferred one first, of
    which the answer counts. Chats become text by `template`.

    Returns:
      The records that could not be read; `folder/bad.txt` names them too.

    Raises:
      ConfigError: more than `data.max_bad_records` records cannot be read, or no document is left.
      DeviceError: a file cannot be written, such as on a full disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bad: list[Bad] = []
    lengths: list[int] = []
    all_counted = True
    dtype = _dtype(encoding.tokenizer.get_vocab_size())
    records = placed_documents(source) if preferences is None else placed_pairs(source, preferences)
    rendered = _good(records, template, data.max_bad_records, bad)
    longest = None if preferences is None else data.sequence_length
    with (
        caches.writing(folder / "tokens.bin", "train"),
        (folder / "tokens.bin").open("wb") as tokens,
        (folder / "targets.bin").open("wb") as targets,
    ):
        for place, document in _encoded(rendered, encoding):
            size = sum(len(ids) for ids, _ in document)
            if longest is not None and size > longest:
                reason = f"the pair has {size} tokens, more than data.sequence_length={longest}"
                _add_bad(Bad(*place, reason), data.max_bad_records, bad)
                continue
            for ids, targets_of_tokens in document:
                tokens.write(np.asarray(ids, dtype).tobytes())  # `tofile` does not say why it fails
                targets.write(np.asarray(targets_of_tokens, bool).tobytes())
                lengths.append(len(ids))
                all_counted = all_counted and all(targets_of_tokens[1:])  # the first token is never a label
    with caches.writing(folder / "bad.txt", "train"):
        caches.write(folder / "bad.txt", "".join(f"{b}\n" for b in bad))
    if not lengths:
        named = "".join(f"\n  {b}" for b in bad[:3])
        raise ConfigError(f"data: {source_name(source)} has no document; {len(bad)} records could not be read:{named}")
    if all_counted and preferences is None:
        (folder / "targets.bin").unlink()
    with caches.writing(folder / "offsets.npy", "train"):
        caches.write(folder / "offsets.npy", as_npy(np.cumsum([0, *lengths], dtype=np.int64)))
        sums = {name: caches.crc32(folder / name) for name in _ARRAYS if (folder / name).exists()}
        about = json.dumps({"dtype": np.dtype(dtype).name, "crc32": sums})
        caches.write(folder / "tokens.json", about)  # last: the folder is complete
    return bad


def check_template(source: SourceSection, template: TrainingTemplate | None, preferences: DpoSection | None) -> None:
    """Whether one of the first documents of a source becomes text.

    Raises:
      VishwamaiError: as `TrainingTemplate.render`.
      ConfigError: a document is a chat, and there is no template.
    """
    records = placed_documents(source) if preferences is None else placed_pairs(source, preferences)
    failure = None
    for _, record in itertools.islice(records, _BATCH):
        if not isinstance(record, Bad):
            try:
                _render(record, template)
                return
            except (ShapeError, UnsupportedError) as error:
                failure = failure or error
    if failure is not None:
        raise failure


_ARRAYS = ("tokens.bin", "targets.bin", "offsets.npy")


def read_tokens(folder: Path) -> Tokens:
    """The arrays that `write_tokens` wrote, mapped into memory.

    Raises:
      ConfigError: a file is missing, or is not as it was written.
    """
    name = "tokens.json"
    try:
        about = json.loads((folder / name).read_text())
        for name, crc in about.get("crc32", {}).items():
            if caches.crc32(folder / name) != crc:
                raise ValueError("another checksum")
        if about["dtype"] not in ("uint16", "uint32"):  # of `_dtype`
            raise ValueError("another dtype")
        name, targets = "tokens.json", folder / "targets.bin"
        return Tokens(
            np.memmap(folder / "tokens.bin", np.dtype(about["dtype"]), "r"),
            np.load(folder / "offsets.npy"),
            np.memmap(targets, bool, "r") if targets.exists() else None,
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"data: {folder / name} is not as it was written, so the rows of the run would change; remove {folder}, "
            "and --resume tokenizes its source again."
        ) from error


def as_npy(array: np.ndarray) -> bytes:
    """What `np.save` writes; of a failed write `np.save` itself does not say the reason."""
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def _dtype(vocab: int) -> type[np.unsignedinteger]:
    return np.uint16 if vocab <= np.iinfo(np.uint16).max + 1 else np.uint32


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A document as text.

    Attributes:
      text: the document.
      spans: the characters that count in the loss.
      is_chat: a template has written it.
      ends: its end-of-text token, where it gets one, counts in the loss.
    """

    text: str
    spans: list[Span]
    is_chat: bool = False
    ends: bool = True


def _good(
    records: Iterable[tuple[Place, Document | Pair | Bad]],
    template: TrainingTemplate | None,
    limit: int,
    bad: list[Bad],
) -> Iterator[tuple[Place, list[Rendered]]]:
    """The records that become text, one or a pair each; the others go to `bad`."""
    for place, record in records:
        if not isinstance(record, Bad):
            try:
                texts = _render(record, template)
                for text in texts:
                    text.text.encode()
                yield place, texts
                continue
            except UnicodeEncodeError as error:
                record = Bad(*place, f"not Unicode: a lone surrogate at character {error.start}")
            except (ShapeError, UnsupportedError) as error:
                record = Bad(*place, str(error).splitlines()[0])
        _add_bad(record, limit, bad)


def _add_bad(record: Bad, limit: int, bad: list[Bad]) -> None:
    bad.append(record)
    if len(bad) > limit:
        named = "\n  ".join(str(b) for b in bad[:5])
        raise ConfigError(
            f"data: {len(bad)} records cannot be read, more than data.max_bad_records={limit}; the first are\n  {named}"
        )


_Encoded = list[tuple[list[int], list[bool]]]
"""The texts of a document, one or a pair: ids, and which of them count in the loss."""


def _encoded(records: Iterator[tuple[Place, list[Rendered]]], encoding: Encoding) -> Iterator[tuple[Place, _Encoded]]:
    while batch := list(itertools.islice(records, _BATCH)):
        encoded = encoding([text for _, texts in batch for text in texts])
        for place, texts in batch:
            yield place, list(itertools.islice(encoded, len(texts)))


def _render(document: Document | Pair, template: TrainingTemplate | None) -> list[Rendered]:
    """The texts of a document, one or a pair, each with the spans of characters that count in the loss."""
    if isinstance(document, str):
        return [Rendered(document, [(0, len(document))])]
    if isinstance(document, Completion):
        text = document.prompt + document.text
        return [Rendered(text, [(len(document.prompt), len(text))])]
    if isinstance(document, Chat):
        return [_chat(document, template)]
    answers, prompt = (document.chosen, document.rejected), document.prompt
    if isinstance(document.chosen, str):
        texts = [f"{prompt}{answer}" for answer in answers]
        return [Rendered(text, [(len(prompt), len(text))]) for text in texts]
    chats = [_chat(answer, template) for answer in answers if not isinstance(answer, str)]
    common = len(os.path.commonprefix([chat.text for chat in chats]))  # the prompt, and words that both begin with
    return [
        dataclasses.replace(chat, spans=[span for span in chat.spans if span[1] > common] or chat.spans[-1:])
        for chat in chats
    ]


def _chat(chat: Chat, template: TrainingTemplate | None) -> Rendered:
    if template is None:
        raise ConfigError(
            "config: the sources hold chat messages, and the tokenizer that the run takes has no chat template; set "
            "data.chat_template to a Jinja file."
        )
    text, spans = template.render(chat.messages, chat.tools)
    if chat.answers is not None:
        spans = spans[len(spans) - chat.answers :] if chat.answers < len(spans) else spans
    return Rendered(text, spans, is_chat=True, ends=chat.messages[-1]["role"] == "assistant")


def _train(section: TokenizerSection, end: str, sources: Iterable[SourceSection]) -> Tokenizer:
    """A byte-level BPE (Sennrich et al., 2016; the bytes as in GPT-2), which can write any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=section.vocab_size,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(section.sample_bytes, sources), trainer)
    return tokenizer


def _sample(limit: int, sources: Iterable[SourceSection]) -> Iterator[str]:
    """The first documents of each source, an equal number of bytes of each."""
    sources = list(sources)
    for source in sources:
        left = limit // len(sources)
        for document in documents(source):
            if isinstance(document, Bad):
                continue
            if isinstance(document, Completion):
                document = document.prompt + document.text
            text = document if isinstance(document, str) else "\n".join(map(_words, document.messages))
            text = text.encode("utf-8", "ignore").decode()  # without lone surrogates
            yield text
            left -= len(text.encode())
            if left <= 0:
                break


def _words(message: Mapping[str, object]) -> str:
    """The text of a message, whose content may be a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
