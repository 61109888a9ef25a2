"""Documents to batches: what is read, what is named as unreadable, how rows are packed, and the order of rows."""

import dataclasses
import gzip
import json
import re
import resource
from typing import Any

import numpy as np
import pytest
import tokenizers

from test_training import small_values
from vishwamai.cli import main
from vishwamai.core.errors import ConfigError
from vishwamai.training import bounded
from vishwamai.training.config import DpoSection, EvaluationSection, SourceSection
from vishwamai.training.config_file import from_dict
from vishwamai.training.data import held_out_batches, prepare, training_batches
from vishwamai.training.packing import IGNORED, plan_rows, row
from vishwamai.training.sources import Bad, Chat, Completion, Pair, documents, files, pairs


def corpus_of(folder, texts, **data):
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    values = {"sources": [{"paths": [f"{folder}/*.txt"]}], "sequence_length": 16} | data
    config = from_dict({"data": values, "tokenizer": {"vocab_size": 257}})  # bytes and the end of a text
    return config, prepare(config, folder / "data")


def lines(count=40):
    return [f"document {n} has its own words {n * 7919} " * (1 + n % 3) for n in range(count)]


@pytest.mark.parametrize("method", ["concat", "best_fit"])
def test_rows_hold_every_token_once_with_labels_of_the_same_document(method):
    rng = np.random.default_rng(0)
    sizes, length = rng.integers(1, 60, 100), 24
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    tokens = np.arange(offsets[-1]) + 1
    plan = plan_rows(method, offsets, rng.permutation(100), length)
    seen = []
    for index in range(len(plan)):
        made = row(plan, tokens, None, index, length)
        used = made["segment_ids"] > 0
        seen += made["tokens"][used].tolist()
        counted = made["labels"] != IGNORED
        assert (made["labels"][counted] == made["tokens"][counted] + 1).all()
        for segment in range(1, made["segment_ids"].max() + 1):
            piece = made["segment_ids"] == segment
            assert (made["positions"][piece] == np.arange(piece.sum())).all()
            documents_of = np.searchsorted(offsets, made["tokens"][piece] - 1, side="right")
            assert len(set(documents_of.tolist())) == 1 and counted[piece].sum() == piece.sum() - 1
    assert len(seen) == len(set(seen))
    assert len(seen) == (len(tokens) // length * length if method == "concat" else len(tokens))
    if method == "best_fit":
        assert len(plan) <= -(-len(tokens) // length) * 1.1  # little padding


def test_the_loss_mask_leaves_out_what_is_no_target():
    plan = plan_rows("concat", np.array([0, 6]), np.array([0]), 6)
    made = row(plan, np.arange(6), np.array([0, 0, 0, 1, 1, 0], bool), 0, 6)
    assert made["labels"].tolist() == [IGNORED, IGNORED, 3, 4, IGNORED, IGNORED]


def test_too_little_text_is_an_error_with_its_size(tmp_path):
    with pytest.raises(ConfigError, match="the documents have 4 tokens, less than one row of 16"):
        corpus_of(tmp_path, ["abc"])
    with pytest.raises(
        ConfigError, match=r"the held-out documents \(data\.holdout=0\.3\) have 4 tokens, less than one"
    ):
        (tmp_path / "more").mkdir()
        corpus_of(tmp_path / "more", ["abc"] * 3, holdout=0.3, sequence_length=6)


def test_a_source_without_files_is_an_error_before_another_is_tokenized(tmp_path):
    (tmp_path / "text.txt").write_text("words " * 100)
    sources = [{"paths": [str(tmp_path / name)]} for name in ("text.txt", "none.txt")]
    with pytest.raises(ConfigError, match=r"none\.txt', which matches no file"):
        prepare(from_dict({"data": {"sources": sources}, "tokenizer": {"vocab_size": 257}}), tmp_path / "data")
    assert not list((tmp_path / "data").iterdir())


def test_held_out_documents_without_a_whole_batch_are_an_error_with_the_numbers(tmp_path):
    config, corpus = corpus_of(tmp_path, ["the quick brown fox jumps over it"] * 40, holdout=0.1)
    assert 4 < len(corpus.held_out[0]) <= 8
    for batch_size, change in (
        (9, r"raise data\.holdout to 0\.\d+ or more, lower"),
        (1000, "pass more documents, lower"),
    ):
        config = dataclasses.replace(config, batch_size=batch_size, evaluation=EvaluationSection(every=2))
        text = (
            rf"evaluation\.every=2 .* takes batch_size={batch_size} rows, but data\.holdout=0\.1 holds "
            rf"{len(corpus.held_out[0])} of \d+ rows out; {change} batch_size, or set evaluation\.every=0"
        )
        with pytest.raises(ConfigError, match=text):
            prepare(config, tmp_path / "data")
    prepare(dataclasses.replace(config, batch_size=4), tmp_path / "data")


def test_batches_are_the_same_for_every_number_of_processes(tmp_path):
    _, corpus = corpus_of(tmp_path, lines())
    whole = iter(training_batches(corpus, 3, 4))
    parts = [iter(training_batches(corpus, 3, 4, p, 2)) for p in range(2)]
    for _ in range(30):  # more than an epoch
        expected = next(whole)["tokens"]
        found = [next(part)["tokens"] for part in parts]
        np.testing.assert_array_equal(np.stack(found, 1).reshape(expected.shape), expected)
    # The state of one process serves every process of another number of them.
    resumed = iter(training_batches(corpus, 3, 4))
    resumed.set_state(parts[1].get_state())
    np.testing.assert_array_equal(next(resumed)["tokens"], next(whole)["tokens"])


def test_an_epoch_has_every_row_once_and_the_next_one_another_order(tmp_path):
    _, corpus = corpus_of(tmp_path, lines())
    rows = len(corpus.training[0])
    batches = iter(training_batches(corpus, 0, 1))
    epochs = [[next(batches)["tokens"].tobytes() for _ in range(rows)] for _ in range(2)]
    assert set(epochs[0]) == set(epochs[1]) and epochs[0] != epochs[1]


def test_a_mixture_has_its_weights_and_held_out_documents_are_never_trained_on(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(30):
            (tmp_path / name / f"{number}.txt").write_text(name * 40)
    sources = [{"paths": [str(tmp_path / n)], "weight": w} for n, w in (("a", 3), ("b", 1))]
    data = {"sources": sources, "sequence_length": 16, "holdout": 0.2}
    config = from_dict({"data": data, "tokenizer": {"vocab_size": 257}})
    corpus = prepare(config, tmp_path / "data")
    a = corpus.training[0].tokens.tokens[0]
    batches = iter(training_batches(corpus, 0, 8))
    share = np.mean([(next(batches)["tokens"] == a).mean() for _ in range(50)])
    assert 0.6 < share < 0.8  # 3/4, of which 1/41 are ends of a text
    trained, held = ({int(s) for s in r.plan.starts // 41} for r in (corpus.training[0], corpus.held_out[0]))
    assert len(held) <= 6 and not trained & held
    assert len(held_out_batches(corpus, 4)) == (len(corpus.held_out[0]) + len(corpus.held_out[1])) // 4


def test_bad_records_are_named_with_file_and_line_and_too_many_stop(tmp_path):
    good = json.dumps({"text": "fine " * 20})
    (tmp_path / "x.jsonl").write_text(f"{good}\nnot json\n{good}\n" + '{"txt": 1}\n' + '{"text": ""}\n  \n')
    (tmp_path / "y.txt").write_bytes(b"\xff\xfe bad")
    (tmp_path / "z.txt").write_text(" \n")
    source = SourceSection(paths=(str(tmp_path),))
    found = list(documents(source))
    bad = [str(b) for b in found if isinstance(b, Bad)]
    assert len(found) - len(bad) == 2
    expected = [
        "x.jsonl:2: not JSON",
        "x.jsonl:4: no column 'text'; it has txt",
        "x.jsonl:5: column 'text' holds neither",
    ]
    expected += ["x.jsonl:6: empty line", "y.txt: not UTF-8", "z.txt: empty"]
    assert len(bad) == 6 and all(text in b for text, b in zip(expected, bad)), bad
    data = {"sources": [{"paths": [str(tmp_path)]}], "sequence_length": 16}
    config = from_dict({"data": data | {"max_bad_records": 6}, "tokenizer": {"vocab_size": 257}})
    assert len(prepare(config, tmp_path / ".data").bad) == 6
    strict = from_dict({"data": data | {"max_bad_records": 1}, "tokenizer": {"vocab_size": 257}})
    with pytest.raises(ConfigError, match=r"2 records cannot be read.*max_bad_records=1.*\n.*x\.jsonl:2"):
        prepare(strict, tmp_path / ".other")


@pytest.mark.turns(4)
def test_the_command_shows_what_it_could_not_read_before_the_first_step(tmp_path, capsys):
    lines = [json.dumps({"text": "fine " * 20})] * 40 + ["not json"] * 5
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    data = {"sources": [{"paths": [str(tmp_path / "x.jsonl")]}], "sequence_length": 16}
    described = small_values(tmp_path, steps=1, data=data)
    (tmp_path / "run.yaml").write_text(json.dumps(described))
    assert main(["train", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "run")]) == 0
    said = capsys.readouterr()
    names = "".join(rf"  \S*x\.jsonl:{n}: not JSON: .*\n" for n in (41, 42, 43))
    path = re.escape(str(tmp_path / "run" / "data" / "source-0" / "bad.txt"))
    assert re.search(rf"5 records could not be read:\n{names}  and 2 more\nAll are in {path}\.\n", said.err), said.err
    assert "step 1/1" in said.out


def test_parquet_and_datasets_directories(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"body": ["one", "two", "three"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    saved = tmp_path / "saved"  # as `datasets.save_to_disk` writes it
    saved.mkdir()
    (saved / "state.json").write_text("{}")
    (saved / "dataset_info.json").write_text("{}")
    with pyarrow.OSFile(str(saved / "data-00000-of-00001.arrow"), "wb") as sink:
        with pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    for path in ("a.parquet", "saved"):
        assert list(documents(SourceSection(paths=(str(tmp_path / path),), column="body"))) == ["one", "two", "three"]
    (bad,) = documents(SourceSection(paths=(str(tmp_path / "a.parquet"),)))
    assert isinstance(bad, Bad) and "no column 'text'; it has body" in bad.reason


def test_no_file_takes_more_memory_than_its_bound(tmp_path):
    """A few kilobytes of Parquet that a dictionary makes gigabytes, long lines, and gzip of zeros."""
    import pyarrow
    import pyarrow.parquet

    def write(name, column, **options):
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / name, compression="zstd", **options)

    def read(name, **options) -> list[Any]:
        return list(documents(SourceSection(paths=(str(tmp_path / name),), **options)))

    long = "x" * (1 << 20)
    many = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1024, pyarrow.int32()), pyarrow.array([long]))
    write("rows.parquet", many)  # 1 GiB of rows of 1 MiB
    message = pyarrow.StructArray.from_arrays([pyarrow.array(["user"] * 1024), many], ["role", "content"])
    write("chat.parquet", pyarrow.ListArray.from_arrays([0, 1, 1024], message))  # a chat of one message, and the rest
    (tmp_path / "line.jsonl").write_text(f'{{"text": "{"y" * (3 << 20)}"}}\n{{"text": "short"}}')
    (tmp_path / "zeros.txt.gz").write_bytes(gzip.compress(bytes(3 << 20)))
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(bytes(3 << 20) + b'\n{"text": "short"}\n'))
    assert sum((tmp_path / name).stat().st_size for name in ("rows.parquet", "chat.parquet")) < 20_000

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = documents(SourceSection(paths=(str(tmp_path / "rows.parquet"),), max_record_mib=2))
    assert sum(row == long for row in rows) == 1024
    (first, bad) = read("chat.parquet", column="text", max_record_mib=2)
    assert first.messages[0]["content"] == long and isinstance(bad, Bad) and "data.sources.max_record_mib" in bad.reason
    for name in ("line.jsonl", "lines.jsonl.gz"):
        (bad, short) = read(name, max_record_mib=2)
        assert short == "short" and (bad.line, "2 MiB" in bad.reason) == (1, True)
    (bad,) = read("zeros.txt.gz", max_record_mib=2)
    assert "2 MiB" in bad.reason
    assert len(read("line.jsonl", max_record_mib=4)[0]) == 3 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB


def test_files_of_arrow_are_checked_before_they_are_read(tmp_path, monkeypatch):
    """Buffers that decompression makes large, offsets outside their buffer, and rows that share their bytes."""
    import pyarrow

    def read(column, compression=None, damage=None) -> list[Any]:
        table = pyarrow.table({"text": column})
        options = pyarrow.ipc.IpcWriteOptions(compression=compression)
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        content = sink.getvalue().to_pybytes()
        (tmp_path / "a.arrow").write_bytes(content if damage is None else content.replace(*damage))
        return list(documents(SourceSection(paths=(str(tmp_path / "a.arrow"),), max_record_mib=2)))

    monkeypatch.setattr(bounded, "_GROUP", 1 << 20)
    for column in (["x" * (1 << 20)] * 8, pyarrow.array(["y" * (4 << 20)] * 4).dictionary_encode()):
        for compression in ("zstd", "lz4"):
            (bad,) = read(column, compression)
            assert isinstance(bad, Bad) and "max_record_mib" in bad.reason
    assert read(["a", "b"], "zstd") == ["a", "b"] == read(["a", "b"])
    offsets = np.array([0, 3, 6], np.int32).tobytes()
    (bad,) = read(["one", "two"], damage=(offsets, np.array([0, 3, 1 << 30], np.int32).tobytes()))
    assert isinstance(bad, Bad) and "column 'text' is damaged" in bad.reason
    (first, bad) = read(["one", "two"], damage=(b"two", b"\xff\xfe\xfd"))
    assert first == "one" and "not UTF-8" in bad.reason
    runs = pyarrow.RunEndEncodedArray.from_arrays(pyarrow.array([2], pyarrow.int32()), pyarrow.array(["a"]))
    for column in (pyarrow.array(["a", "b"], pyarrow.string_view()), runs):
        (bad,) = read(column)
        assert "which is not read" in bad.reason


def test_links_that_leave_the_data_are_named(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    data = tmp_path / "data"
    data.mkdir()
    (data / "own.txt").write_text("own")
    (data / "near.txt").symlink_to("own.txt")
    (data / "far.txt").symlink_to("../secret.txt")
    for pattern in (data, data / "*.txt", data / "**" / "*.txt"):
        with pytest.raises(ConfigError, match=r"far.txt is a link to .*secret.txt, outside of .*follow_links"):
            files(SourceSection(paths=(str(pattern),)))
        assert len(files(SourceSection(paths=(str(pattern),), exclude=("*far*",)))) == 2
        assert len(files(SourceSection(paths=(str(pattern),), follow_links=True))) == 3
    assert len(files(SourceSection(paths=(str(data / "far.txt"),)))) == 1  # named itself


def test_a_chat_counts_the_assistants_turns_alone(tmp_path):
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    (tmp_path / "template.jinja").write_text(turns + "{% if add_generation_prompt %}<assistant>{% endif %}")
    chat = [("user", "what is two and two"), ("assistant", "FOUR"), ("user", "sure?"), ("assistant", "YES")]
    record = {"messages": [{"role": role, "content": content} for role, content in chat]}
    (tmp_path / "chat.jsonl").write_text((json.dumps(record) + "\n") * 3)
    source = {"paths": [str(tmp_path / "chat.jsonl")], "column": "messages"}
    template = str(tmp_path / "template.jinja")
    data = {"sources": [source], "sequence_length": 128, "packing": "best_fit", "chat_template": template}
    config = from_dict({"data": data, "tokenizer": {"vocab_size": 257}})
    corpus = prepare(config, tmp_path / "data")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tmp_path / "data" / "tokenizer.json"))
    made = corpus.training[0][0]
    counted = made["labels"][made["labels"] != IGNORED]
    assert tokenizer.decode(counted.tolist(), skip_special_tokens=False) == "FOUR\nYES\n<|endoftext|>"
    (tmp_path / "whole.jinja").write_text("{{ messages | length }}" + turns)  # depends on the last message
    whole = from_dict(
        {"data": data | {"chat_template": str(tmp_path / "whole.jinja")}, "tokenizer": {"vocab_size": 257}}
    )
    made = prepare(whole, tmp_path / "other").training[0][0]
    counted = made["labels"][made["labels"] != IGNORED]
    assert tokenizer.decode(counted.tolist(), skip_special_tokens=False) == "FOUR\nYES\n<|endoftext|>"


def lines_of(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"sources": [{"paths": [str(path)], "column": "messages"}], "sequence_length": 64}


def test_formats_by_suffix(tmp_path):
    import gzip

    records = [{"text": "one"}, {"text": "two"}]
    rows = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "array.json").write_text(json.dumps(records))
    (tmp_path / "lines.json").write_text(rows)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(records).encode()))
    (tmp_path / "plain.txt.gz").write_bytes(gzip.compress(b"one"))
    for name, expected in {
        "array.json": ["one", "two"],
        "lines.json": ["one", "two"],
        "a.jsonl.gz": ["one", "two"],
        "a.json.gz": ["one", "two"],
        "plain.txt.gz": ["one"],
    }.items():
        assert list(documents(SourceSection(paths=(str(tmp_path / name),)))) == expected, name
    (tmp_path / "cut.jsonl.gz").write_bytes((tmp_path / "a.jsonl.gz").read_bytes()[:-12])
    *_, bad = documents(SourceSection(paths=(str(tmp_path / "cut.jsonl.gz"),)))
    assert isinstance(bad, Bad) and "cut.jsonl.gz" in str(bad)
    for name in ("a.xlsx", "a.bz2", "a.zip"):
        (tmp_path / name).write_text("text\none\n")
        with pytest.raises(ConfigError, match=rf"{name}, which format=auto does not read .* reads text, \.jsonl"):
            list(documents(SourceSection(paths=(str(tmp_path / name),))))
    unread = [str(b) for b in documents(SourceSection(paths=(str(tmp_path),))) if isinstance(b, Bad)]
    assert sum("format=auto does not read" in text for text in unread) == 3  # in a directory they are counted
    assert list(documents(SourceSection(paths=(str(tmp_path / "a.bz2"),), format="text"))) == ["text\none\n"]


def test_csv(tmp_path):
    import gzip

    read = lambda name, **options: list(documents(SourceSection(paths=(str(tmp_path / name),), **options)))  # noqa: E731
    rows = '\ufefftext,n\r\n"one, ""two""\r\nthree",1\r\n\r\nfour\r\n,2\r\nfive,3'
    (tmp_path / "a.csv").write_bytes(rows.encode())
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(rows.encode()))
    (tmp_path / "a.tsv").write_text("n\ttext\n1\tone, two\n")
    for name in ("a.csv", "a.csv.gz"):
        first, short, empty, last = read(name)
        assert (first, last) == ('one, "two"\r\nthree', "five")
        assert "a.csv" in str(short) and ":3: 1 cells, but the first row names 2" in str(short)
        assert ":4: column 'text' holds neither" in str(empty)
    assert read("a.tsv") == ["one, two"]
    (tmp_path / "big.csv").write_text("text\nsmall\n" + "a" * (2 << 20) + "\nlast\n")
    small, bad = read("big.csv", max_record_mib=1)
    assert small == "small" and "more than 1 MiB" in str(bad) and "after record 1" in str(bad)
    (tmp_path / "pairs.csv").write_text("prompt,chosen,rejected\na,b,c\n")
    assert list(pairs(SourceSection(paths=(str(tmp_path / "pairs.csv"),)), DpoSection())) == [Pair("a", "b", "c")]


USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
SHARED = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes?"}]
ROWS = {  # rows of published datasets and their documents
    "messages": ({"messages": [USER, ANSWER], "text": None}, None),
    "chat": ({"messages": [USER, ANSWER], "id": 1}, Chat([USER, ANSWER])),
    "tools": ({"messages": [USER, ANSWER], "tools": '[{"name": "f"}]'}, Chat([USER, ANSWER], [{"name": "f"}])),
    "ShareGPT": ({"conversations": SHARED}, Chat([USER, ANSWER])),
    "ShareGPT with a system text": (
        {"conversations": SHARED, "system": "s"}, Chat([{"role": "system", "content": "s"}, USER, ANSWER])
    ),
    "ShareGPT with a call": (
        {"conversations": [*SHARED[:1], {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
                           {"from": "observation", "value": "1"}, SHARED[1]]},
        Chat([USER, ANSWER | {"content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "1"}, ANSWER]),
    ),
    "ShareGPT with a broken call": ({"conversations": [*SHARED, {"from": "function_call", "value": "f()"}]}, None),
    "Alpaca": ({"instruction": "hi", "input": "", "output": "yes?"}, Chat([USER, ANSWER])),
    "Alpaca without an output": ({"instruction": "hi", "input": "", "output": ""}, None),
    "completion": ({"prompt": "1 + 1 =", "completion": " 2"}, Completion("1 + 1 =", " 2")),
    "completion of a chat": ({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]},
                             Chat([USER, ANSWER, USER, ANSWER], answers=1)),
    "prompt alone": ({"prompt": "a"}, None),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_published_datasets(tmp_path, kind, name):
    row, expected = ROWS[name]
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps([row] if kind == "json" else row))
    (document,) = documents(SourceSection(paths=(str(path),)))
    assert isinstance(document, Bad) if expected is None else document == expected


def test_the_completion_alone_counts(tmp_path):
    """Of a text, what follows the prompt; of a chat, the last turns."""
    (tmp_path / "a.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    for record, expected in (
        ({"prompt": "What is two?", "completion": " 2."}, " 2.<|endoftext|>"),
        ({"prompt": [USER, ANSWER, USER], "completion": [{"role": "assistant", "content": "no"}]},
         "no\n<|endoftext|>"),
    ):  # fmt: skip
        data = lines_of(tmp_path / "a.jsonl", [record]) | {
            "packing": "best_fit",
            "chat_template": str(tmp_path / "a.jinja"),
        }
        (source,) = data["sources"]
        assert isinstance(source, dict)
        del source["column"]
        config = from_dict({"data": data, "tokenizer": {"vocab_size": 257}})
        folder = tmp_path / expected[:2].strip()
        batch = prepare(config, folder).training[0][0]
        counted = batch["labels"][batch["labels"] != IGNORED]
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert tokenizer.decode(counted.tolist(), skip_special_tokens=False).endswith(expected)
        assert "What" not in tokenizer.decode(counted.tolist()) and "yes" not in tokenizer.decode(counted.tolist())


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"prompt": "hi", "chosen": ANSWER, "rejected": ANSWER}, Chat([USER, ANSWER])),
        ({"prompt": SHARED[:1], "chosen": SHARED[1], "rejected": SHARED[1]}, Chat([USER, ANSWER])),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: bad"}, " b"),
        ({"chosen": [ANSWER], "rejected": [ANSWER]}, None),
        ({"conversations": SHARED[:1], "chosen": SHARED[1], "rejected": SHARED[1]}, None),
        ({"chosen": "one", "rejected": "other"}, None),
    ],
)
def test_pairs_of_published_datasets(tmp_path, row, expected):
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (pair,) = pairs(SourceSection(paths=(str(tmp_path / "a.jsonl"),)), DpoSection())
    if expected is None:
        assert isinstance(pair, Bad) and "column 'prompt'" in str(pair)
    else:
        assert isinstance(pair, Pair) and pair.chosen == expected


def test_files_of_arrow_and_marks_of_utf8(tmp_path):
    """`datasets` writes Arrow's stream; pyarrow and polars write its file format, too."""
    import pyarrow

    batch = pyarrow.record_batch({"text": ["one", "two"]})
    for name, writer in (("stream", pyarrow.ipc.new_stream), ("file", pyarrow.ipc.new_file)):
        path = tmp_path / f"{name}.arrow"
        with pyarrow.OSFile(str(path), "wb") as sink, writer(sink, batch.schema) as table:
            table.write_batch(batch)
        assert list(documents(SourceSection(paths=(str(path),)))) == ["one", "two"]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    assert list(documents(SourceSection(paths=(str(tmp_path / "a.txt"),)))) == ["one"]


def test_one_bad_record_loses_no_other(tmp_path):
    import pyarrow
    import pyarrow.parquet

    texts = pyarrow.array([b"good"] * 200 + [b"\xff bad"] + [b"good"] * 200, pyarrow.binary())
    column = pyarrow.Array.from_buffers(pyarrow.string(), 401, texts.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    found = list(documents(SourceSection(paths=(str(tmp_path / "a.parquet"),))))
    bad = [str(b) for b in found if isinstance(b, Bad)]
    assert found.count("good") == 400 and len(bad) == 1 and "a.parquet:201: not UTF-8" in bad[0]

    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'judge' %}{{ raise_exception('no judges') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    chat = [{"role": "user", "content": "two and two"}, {"role": "assistant", "content": "four"}]
    records = [{"messages": chat} for _ in range(6)]
    records[0] = {"messages": [{"role": "judge", "content": "no"}, *chat]}
    records[3] = {"messages": [{"role": "user", "content": "a \ud800 b"}, chat[1]]}
    data = lines_of(tmp_path / "c.jsonl", records) | {"sequence_length": 16, "chat_template": str(tmp_path / "t.jinja")}
    corpus = prepare(from_dict({"data": data, "tokenizer": {"vocab_size": 257}}), tmp_path / "data")
    assert len(corpus.training[0].tokens.offsets) == 5
    assert re.search(r"c\.jsonl:1: .*no judges", corpus.bad[0]) and "c.jsonl:4: not Unicode: a lone" in corpus.bad[1]


def test_preference_pairs_in_every_form_have_their_prompt(tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    user, good, poor = ({"role": r, "content": c} for r, c in (("user", "2+2"), ("assistant", "4"), ("assistant", "5")))
    forms = {
        "trl": {"prompt": [user], "chosen": [good], "rejected": [poor]},
        "implicit": {"chosen": [user, good], "rejected": [user, poor]},
        "ultrafeedback": {"prompt": "2+2", "chosen": [user, good], "rejected": [user, poor]},
        "text prompt": {"prompt": "2+2", "chosen": [good], "rejected": [poor]},
        "prompt twice": {"prompt": [user], "chosen": [user, good], "rejected": [user, poor]},
        "text answers": {"prompt": [user], "chosen": "4", "rejected": "5"},
    }
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(form) + "\n" for form in forms.values()))
    data = {"sources": [{"paths": [str(tmp_path / "p.jsonl")]}], "sequence_length": 64}
    data |= {"chat_template": str(tmp_path / "t.jinja")}
    config = from_dict({"data": data, "tokenizer": {"vocab_size": 257}, "objective": "dpo"})
    corpus = prepare(config, tmp_path / "data")
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(str(tmp_path / "data" / "tokenizer.json")).decode
    tokens, offsets, targets = (getattr(corpus.training[0].tokens, n) for n in ("tokens", "offsets", "targets"))
    assert len(offsets) == 1 + 2 * len(forms)
    for number, (begin, end) in enumerate(zip(offsets, offsets[1:])):
        answer, ids = "45"[number % 2], tokens[begin:end]
        text = decode(ids.tolist(), skip_special_tokens=False)
        assert text == f"<user>2+2<|endoftext|><assistant>{answer}<|endoftext|>", list(forms)[number // 2]
        assert decode(ids[targets[begin:end]].tolist(), skip_special_tokens=False) == f"{answer}<|endoftext|>"
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": 7, "chosen": [good], "rejected": [poor]}) + "\n")
    with pytest.raises(ConfigError, match=r"p\.jsonl:1: column 'prompt' holds neither text nor a list of messages"):
        prepare(config, tmp_path / "other")
