"""Documents as tokens on disk: each source is tokenized once, into arrays that are mapped into memory."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vishwamai.core import caches
from vishwamai.core.errors import ConfigError
from vishwamai.training.chat import TrainingTemplate
from vishwamai.training.config import DataSection, DpoSection, SourceSection, TokenizerSection
from vishwamai.training.sources import Bad, Document, Pair, documents, pairs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BATCH = 256  # documents that `tokenizers` encodes at once, on all cores


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The documents of one source.

    Attributes:
      tokens: uint16 or uint32 `[tokens]`, each document with the end-of-text token after it.
      offsets: int64 `[documents + 1]`, where each document begins.
      targets: bool `[tokens]`, the tokens that count in the loss; None if all do.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    targets: np.ndarray | None


def make_tokenizer(section: TokenizerSection, sources: Iterable[SourceSection]) -> Tokenizer:
    """The tokenizer that a configuration names, or a byte-level BPE trained on its sources.

    Raises:
      ConfigError: there is no tokenizer.json, or it lacks the end-of-text token.
    """
    import tokenizers

    if section.path is None:
        made = _train(section, sources)
    else:
        path = Path(section.path)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(f"config: tokenizer.path is {section.path!r}, but {path} is not a file.")
        made = tokenizers.Tokenizer.from_file(str(path))
    if made.token_to_id(section.end_of_text) is None:
        raise ConfigError(
            f"config: tokenizer.end_of_text is {section.end_of_text!r}, which {section.path} does not contain; name "
            "its own end token."
        )
    return made


def write_tokens(
    source: SourceSection,
    data: DataSection,
    tokenizer: Tokenizer,
    end_of_text: str,
    folder: Path,
    preferences: DpoSection | None = None,
    template: TrainingTemplate | None = None,
) -> list[Bad]:
    """Tokenizes a source into `folder`; with `preferences`, each pair as two documents, the preferred one first, of
    which the last answer counts. Chats become text by `template`.

    Returns:
      The records that could not be read; `folder/bad.txt` names them too.

    Raises:
      ConfigError: more than `data.max_bad_records` records cannot be read, or no document is left.
      DeviceError: a file cannot be written, such as on a full disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end = tokenizer.token_to_id(end_of_text)
    bad: list[Bad] = []
    lengths: list[int] = []
    whole = True
    dtype = _dtype(tokenizer.get_vocab_size())
    found = documents(source) if preferences is None else pairs(source, preferences)
    encoded = _encoded(_good(found, data.max_bad_records, bad), tokenizer, template)
    with (
        caches.writing(folder / "tokens.bin", "train"),
        (folder / "tokens.bin").open("wb") as tokens,
        (folder / "targets.bin").open("wb") as targets,
    ):
        for document in encoded if preferences is None else _fitting(encoded, data, source, bad):
            for ids, counted in document:
                tokens.write(np.asarray([*ids, end], dtype).tobytes())  # `tofile` does not say why it fails
                targets.write(np.asarray([*counted, True], bool).tobytes())
                lengths.append(len(ids) + 1)
                whole = whole and all(counted)
    with caches.writing(folder / "bad.txt", "train"):
        caches.write(folder / "bad.txt", "".join(f"{b}\n" for b in bad))
    if not lengths:
        raise ConfigError(
            f"data: {list(source.paths)} has no document; {len(bad)} records could not be read: {bad[:3]}"
        )
    if whole and preferences is None:
        (folder / "targets.bin").unlink()
    with caches.writing(folder / "offsets.npy", "train"):
        caches.write(folder / "offsets.npy", as_npy(np.cumsum([0, *lengths], dtype=np.int64)))
        sums = {name: caches.crc32(folder / name) for name in _ARRAYS if (folder / name).exists()}
        about = json.dumps({"dtype": np.dtype(dtype).name, "crc32": sums})
        caches.write(folder / "tokens.json", about)  # last: the folder is complete
    return bad


def check_template(source: SourceSection, template: TrainingTemplate | None, preferences: DpoSection | None) -> None:
    """Whether the first document of a source becomes text.

    Raises: as `TrainingTemplate.render`; and ConfigError where it is a chat, and there is no template.
    """
    found = documents(source) if preferences is None else pairs(source, preferences)
    first = next((record for record in itertools.islice(found, _BATCH) if not isinstance(record, Bad)), None)
    if first is not None:
        _render(first, template)


_ARRAYS = ("tokens.bin", "targets.bin", "offsets.npy")


def read_tokens(folder: Path) -> Tokens:
    """The arrays that `write_tokens` wrote, mapped into memory.

    Raises:
      ConfigError: a file is missing, or is not as it was written.
    """
    about = json.loads((folder / "tokens.json").read_text())
    for name, crc in about.get("crc32", {}).items():
        if not (folder / name).is_file() or caches.crc32(folder / name) != crc:
            raise ConfigError(
                f"data: {folder / name} is not as it was written, so the rows of the run would change; remove "
                f"{folder}, and --resume tokenizes its source again."
            )
    targets = folder / "targets.bin"
    return Tokens(
        np.memmap(folder / "tokens.bin", np.dtype(about["dtype"]), "r"),
        np.load(folder / "offsets.npy"),
        np.memmap(targets, bool, "r") if targets.exists() else None,
    )


def as_npy(array: np.ndarray) -> bytes:
    """What `np.save` writes; of a failed write `np.save` itself does not say the reason."""
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def _dtype(vocab: int) -> Any:
    return np.uint16 if vocab <= np.iinfo(np.uint16).max + 1 else np.uint32


_Encoded = list[tuple[list[int], list[bool]]]
"""The texts of a document, one or a pair: ids, and which of them count in the loss."""


def _good(found: Iterable[Any], limit: int, bad: list[Bad]) -> Iterator[Any]:
    for record in found:
        if not isinstance(record, Bad):
            yield record
            continue
        bad.append(record)
        _check_bad(bad, limit)


def _check_bad(bad: list[Bad], limit: int) -> None:
    if len(bad) > limit:
        named = "\n  ".join(str(b) for b in bad[:5])
        raise ConfigError(
            f"data: {len(bad)} records cannot be read, more than data.max_bad_records={limit}; the first are\n  {named}"
        )


def _fitting(found: Iterable[_Encoded], data: DataSection, source: SourceSection, bad: list[Bad]) -> Iterator[_Encoded]:
    """The pairs that fit into a row; the others are bad records."""
    for number, pair in enumerate(found, 1):
        size = sum(len(ids) + 1 for ids, _ in pair)
        if size <= data.sequence_length:
            yield pair
            continue
        reason = f"pair {number} has {size} tokens, more than data.sequence_length={data.sequence_length}"
        bad.append(Bad(", ".join(source.paths), 0, reason))
        _check_bad(bad, data.max_bad_records)


def _encoded(
    found: Iterator[Document | Pair], tokenizer: Tokenizer, template: TrainingTemplate | None
) -> Iterator[_Encoded]:
    while batch := list(itertools.islice(found, _BATCH)):
        rendered = [_render(document, template) for document in batch]
        texts = [text for document in rendered for text, _ in document]
        encoded = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
        for document in rendered:
            made = []
            for (_, spans), one in zip(document, encoded):
                made.append((one.ids, [any(a < end and begin < b for begin, end in spans) for a, b in one.offsets]))
            yield made


_Rendered = tuple[str, list[tuple[int, int]]]


def _render(document: Document | Pair, template: TrainingTemplate | None) -> list[_Rendered]:
    """The texts of a document, one or a pair, each with the spans of characters that count in the loss."""
    if isinstance(document, Pair):
        return [_answer(document.prompt, answer, template) for answer in (document.chosen, document.rejected)]
    if isinstance(document, str):
        return [(document, [(0, len(document))])]
    return [_chat(document, template)]


def _answer(prompt: str, answer: Document, template: TrainingTemplate | None) -> _Rendered:
    if isinstance(answer, str):
        return prompt + answer, [(len(prompt), len(prompt) + len(answer))]
    text, spans = _chat(answer, template)
    return text, spans[-1:]


def _chat(messages: list[dict[str, Any]], template: TrainingTemplate | None) -> _Rendered:
    if template is None:
        raise ConfigError(
            "config: the sources hold chat messages, and the tokenizer that the run takes has no chat template; set "
            "data.chat_template to a Jinja file."
        )
    return template.render(messages)


def _train(section: TokenizerSection, sources: Iterable[SourceSection]) -> Tokenizer:
    """A byte-level BPE (Sennrich et al., 2016; the bytes as in GPT-2), which can write any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=section.vocab_size,
        special_tokens=[section.end_of_text],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_sample(section.sample_bytes, sources), trainer)
    return made


def _sample(limit: int, sources: Iterable[SourceSection]) -> Iterator[str]:
    """The first documents of each source, an equal number of bytes of each."""
    sources = list(sources)
    for source in sources:
        left = limit // len(sources)
        for document in documents(source):
            if isinstance(document, Bad):
                continue
            text = document if isinstance(document, str) else "\n".join(str(m["content"]) for m in document)
            yield text
            left -= len(text.encode())
            if left <= 0:
                break
