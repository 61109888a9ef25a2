"""From tokens to batches: a Grain pipeline whose batch k is a pure function of (configuration, k).

Rows are read by index, so the order is a permutation of indices and the iterator's state is one number. Process p of P
takes every P-th row from the p-th on; together they read the same global batches for any P.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import SupportsIndex

import grain
import numpy as np

from vishwamai.core import caches
from vishwamai.core.errors import ConfigError
from vishwamai.training.chat import CHAT_TEMPLATE, TrainingTemplate, read_template
from vishwamai.training.config import TrainConfig
from vishwamai.training.packing import REFERENCE, PackingPlan, pair_rows, plan_rows, row
from vishwamai.training.sources import check_source
from vishwamai.training.tokens import Encoding, Tokens, check_template, make_tokenizer, read_tokens, write_tokens

Batch = dict[str, np.ndarray]
"""`tokens`, `labels`, `segment_ids` and `positions`, int32 `[rows, sequence_length]` each; of pairs of answers also
`reference`, float32 `[rows, 2]`."""


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """The packed rows of one source, a random-access source for Grain.

    Attributes:
      tokens: the documents. plan: the pieces of each row. length: tokens in a row.
      reference: float32 `[rows, 2]`, of pairs of answers: what the model at the start thinks of them, as
        `preferences.answer_logprobs` says; None before that is known, and for other rows.
    """

    tokens: Tokens
    plan: PackingPlan
    length: int
    reference: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: SupportsIndex) -> dict[str, np.ndarray]:
        arrays = row(self.plan, self.tokens.tokens, self.tokens.targets, int(index), self.length)
        return arrays if self.reference is None else arrays | {REFERENCE: self.reference[int(index)]}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What `prepare` made: the rows of each source, those held out, and the records that could not be read."""

    training: tuple[PackedRows, ...]
    held_out: tuple[PackedRows, ...]
    weights: tuple[float, ...]
    bad: tuple[str, ...]

    @property
    def token_count(self) -> int:
        """Tokens of all sources, held-out documents included."""
        return sum(int(rows.tokens.offsets[-1]) for rows in self.training)


def prepare(config: TrainConfig, folder: Path) -> Corpus:
    """Tokenizes the sources into `folder`, unless that is done, and plans their rows.

    `folder` gets `tokenizer.json`, a copy of the chat template and one directory for each source. A later call reads
    them, so a resumed run has the same tokens though the files have changed.

    Raises:
      ConfigError: a source cannot be read, is too small for one row, or holds chats without a template; or
        `evaluation.every` is set, and the held-out rows are less than a batch.
      DeviceError: a file cannot be written, such as on a full disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    places = [folder / f"source-{number}" for number in range(len(config.data.sources))]
    missing = [pair for pair in zip(config.data.sources, places) if not (pair[1] / "tokens.json").exists()]
    for source, _ in missing:
        check_source(source)  # an error comes before the first source is tokenized
    template = folder / CHAT_TEMPLATE  # a copy, which the exported model gets
    if config.data.chat_template is not None and not template.exists():
        text = read_template(config.data.chat_template)
        with caches.writing(template, "train"):
            caches.write(template, text)
    preferences = config.dpo if config.objective == "dpo" else None
    rendered = TrainingTemplate.of(config) if missing else None
    for source, _ in missing:
        check_template(source, rendered, preferences)  # before a tokenizer is trained
    saved = folder / "tokenizer.json"
    if not saved.exists():
        tokenizer_to_save = make_tokenizer(config)
        with caches.writing(saved, "train"):
            caches.write(saved, tokenizer_to_save.to_str(pretty=True))
    training, held_out = [], []
    for number, (source, place) in enumerate(zip(config.data.sources, places)):
        if not (place / "tokens.json").exists():
            from tokenizers import Tokenizer

            encoding = Encoding.of(config, Tokenizer.from_file(str(saved)))
            write_tokens(source, config.data, encoding, place, preferences, rendered)
        tokens = read_tokens(place)
        documents = (len(tokens.offsets) - 1) // (2 if config.objective == "dpo" else 1)
        order = np.random.default_rng((config.seed, number)).permutation(documents)
        cut = round(len(order) * config.data.holdout)
        training.append(_rows(config, tokens, order[cut:], "the documents"))
        if cut:
            label = f"the held-out documents (data.holdout={config.data.holdout:g})"
            held_out.append(_rows(config, tokens, order[:cut], label))
    _check_held_out(config, sum(map(len, training)), sum(map(len, held_out)))
    weights = tuple(source.weight for source in config.data.sources)
    bad = tuple(line for lines in unread(folder).values() for line in lines)
    return Corpus(tuple(training), tuple(held_out), weights, bad)


def unread(folder: Path) -> dict[Path, list[str]]:
    """The records that `prepare` could not read (a file, a line and why), by the file of `folder` that names them."""
    paths = sorted(folder.glob("source-*/bad.txt"), key=lambda path: int(path.parent.name.removeprefix("source-")))
    lines_by_path = {path: path.read_text(encoding="utf-8").splitlines() for path in paths}
    return {path: lines for path, lines in lines_by_path.items() if lines}


def training_batches(
    corpus: Corpus, seed: int, batch_size: int, process: int = 0, processes: int = 1
) -> grain.IterDataset[Batch]:
    """The endless stream of this process's part of each batch, reshuffled in every epoch.

    Its iterator's state (`get_state`, `set_state`) is the number of batches taken, the same for every process.

    Args:
      corpus: result of `prepare`.
      seed: seed of the order of rows.
      batch_size: rows of a global batch.
      process: number of this process, 0 to `processes - 1`.
      processes: must divide `batch_size`.
    """
    parts = [
        grain.MapDataset.source(rows).seed(seed + number).shuffle().repeat(None, reseed_each_epoch=True)
        for number, rows in enumerate(corpus.training)
    ]
    mixed = parts[0] if len(parts) == 1 else grain.MapDataset.mix(parts, weights=corpus.weights)
    return _batched(mixed, batch_size, process, processes)


def held_out_batches(
    corpus: Corpus, batch_size: int, process: int = 0, processes: int = 1
) -> Sequence[Batch] | grain.MapDataset[Batch]:
    """The held-out rows in a fixed order, as whole batches; empty where there is less than one."""
    if not corpus.held_out:
        return ()
    joined = grain.MapDataset.concatenate([grain.MapDataset.source(rows) for rows in corpus.held_out])
    joined = joined[: len(joined) // batch_size * batch_size]
    return joined.slice(slice(process, None, processes)).batch(batch_size // processes)


def _batched(
    rows: grain.MapDataset[dict[str, np.ndarray]], batch_size: int, process: int, processes: int
) -> grain.IterDataset[Batch]:
    mine = rows.slice(slice(process, None, processes)).batch(batch_size // processes, drop_remainder=True)
    return mine.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))


def _check_held_out(config: TrainConfig, trained: int, held_out: int) -> None:
    """Whether an evaluation has a whole batch; `trained` and `held_out` are numbers of rows."""
    if not config.evaluation.every or held_out >= config.batch_size:
        return
    share = config.batch_size / (trained + held_out)
    more = f"raise data.holdout to {1.2 * share:.2g} or more, " if share < 0.5 else "pass more documents, "
    raise ConfigError(
        f"config: evaluation.every={config.evaluation.every} evaluates whole batches, and a batch takes "
        f"batch_size={config.batch_size} rows, but data.holdout={config.data.holdout:g} holds {held_out} of "
        f"{trained + held_out} rows out; {more}lower batch_size, or set evaluation.every=0."
    )


def _rows(config: TrainConfig, tokens: Tokens, order: np.ndarray, label: str) -> PackedRows:
    length = config.data.sequence_length
    if config.objective == "dpo":
        return PackedRows(tokens, pair_rows(tokens.offsets, order), length)
    return PackedRows(tokens, plan_rows(config.data.packing, tokens.offsets, order, length, label), length)
