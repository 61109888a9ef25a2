"""Training on the tokenizers, templates and weights that others published."""

import json

import numpy as np
import pytest

import world
from vishwamai.core.errors import UnsupportedError, VishwamaiError
from vishwamai.models.chat import ChatTemplate
from vishwamai.models.tokenizer import read_tokenizer
from vishwamai.training.chat import TrainingTemplate
from vishwamai.training.config import SourceSection
from vishwamai.training.config_file import from_dict
from vishwamai.training.data import prepare
from vishwamai.training.packing import IGNORED
from vishwamai.training.run import train
from vishwamai.training.sources import Chat, documents

CHAT = [
    {"role": "user", "content": "Where is Paris?"},
    {"role": "assistant", "content": "It lies in France."},
    {"role": "user", "content": "And Rome?"},
    {"role": "assistant", "content": "In Italy, of course."},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TURNS = {
    "llamacpp/Qwen-Qwen3-0.6B.jinja": (
        "It lies in France.<|im_end|>\n",
        "<think>\n\n</think>\n\nIn Italy, of course.<|im_end|>\n",
    ),
    "llamacpp/openai-gpt-oss-120b.jinja": (
        "<|channel|>final<|message|>It lies in France.<|end|>",
        "<|channel|>final<|message|>In Italy, of course.<|return|>",
    ),
    "llamacpp/microsoft-Phi-3.5-mini-instruct.jinja": (
        "It lies in France.<|end|>\n",
        "In Italy, of course.<|end|>\n</s>",
    ),
    "trl/deepseekv3.jinja": (
        "It lies in France.<｜end▁of▁sentence｜>",
        "In Italy, of course.<｜end▁of▁sentence｜>",
    ),
    "llamacpp/GLM-4.7-Flash.jinja": ("</think>It lies in France.", "</think>In Italy, of course."),
}


def turns(path):
    template = TrainingTemplate(ChatTemplate(path.read_text(encoding="utf-8"), path.name), SPECIAL)
    text, spans = template.render(CHAT)
    return tuple(text[begin:end] for begin, end in spans)


def test_turns_in_published_templates():
    folder = world.folder("chat_templates")
    assert {name: turns(folder / name) for name in TURNS} == TURNS


@pytest.mark.long
def test_all_published_templates_that_render_a_chat_show_its_turns():
    rejected, wrong, seen = [], [], set()
    for path in world.files("chat_templates", "**/*.jinja"):
        if path.read_text(encoding="utf-8") in seen:
            continue
        seen.add(path.read_text(encoding="utf-8"))
        try:
            texts = turns(path)
        except VishwamaiError:
            rejected.append(path.name)
            continue
        joined = "".join(texts)
        answers = [message["content"] for message in CHAT[1::2]]
        if not all(a in joined for a in answers) or any(word in joined for word in ("Where is", "And Rome")):
            wrong.append((path.name, texts))
    assert not wrong and len(rejected) <= 5 and (not seen or len(seen) > 250), (wrong, rejected)


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = [
    {"role": "user", "content": "Does it rain in Rome?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}],
    },
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny."},
]


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])], ids=["list", "text"])
def test_the_tools_of_a_row_are_in_its_chat(tmp_path, tools):
    """The text is transformers'. What counts are the call and the answer, and none of the schemas."""
    from transformers import AutoTokenizer

    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CALL, "tools": tools}))
    source = SourceSection(paths=(str(tmp_path / "a.jsonl"),), column="messages")
    (chat,) = documents(source)
    assert isinstance(chat, Chat)
    folder = world.tokenizer("qwen3")
    program = (world.folder("chat_templates") / "llamacpp/Qwen-Qwen3-0.6B.jinja").read_text(encoding="utf-8")
    text, spans = TrainingTemplate(ChatTemplate(program, "qwen3")).render(chat.messages, chat.tools)
    oracle = AutoTokenizer.from_pretrained(folder)
    assert text == oracle.apply_chat_template(CALL, tools=[TOOL], tokenize=False, chat_template=program)
    first, second = (text[begin:end] for begin, end in spans)
    assert first.startswith("<tool_call>") and '{"city": "Rome"}' in first and first.endswith("<|im_end|>\n")
    assert second.endswith("It is sunny.<|im_end|>\n") and "weather" not in second


def test_tools_that_a_template_leaves_out_are_bad_records(tmp_path):
    rows = [{"text": CALL, "tools": [TOOL]}, {"text": CALL, "tools": "[no"}, {"text": CALL, "tools": [7]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = SourceSection(paths=(str(tmp_path / "a.jsonl"),))
    chat, *bad = documents(source)
    assert isinstance(chat, Chat)
    assert [str(b).split("; pass")[0].split(" holds ")[1].split(" (")[0] for b in bad] == [
        "text that is not JSON",
        "list and not a list of objects",
    ]
    program = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(UnsupportedError, match="leaves out the tools of a chat; .*data.sources.tools"):
        TrainingTemplate(ChatTemplate(program, "plain.jinja")).render(chat.messages, chat.tools)


def prepared(folder, name, data, **values):
    start = {"model": {"start_from": str(world.tokenizer(name))}, "data": {"sequence_length": 64, **data}}
    return prepare(from_dict({**start, **values}), folder)


def ids_of(corpus):
    tokens = corpus.training[0].tokens
    return [tokens.tokens[a:b].tolist() for a, b in zip(tokens.offsets, tokens.offsets[1:])]


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", ["llama2", "llama3_1", "qwen3"])
def test_texts_begin_and_end_as_their_tokenizer_says(tmp_path, name):
    folder = world.tokenizer(name)
    ours = read_tokenizer(folder)
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": "The capital of France is Paris. " * 9}) + "\n") * 2)
    data = {"sources": [{"paths": [str(tmp_path / "a.jsonl")]}], "sequence_length": 32}
    end = ours.encoder.token_to_id(ours.special["eos_token"])
    expected = [*ours.encode("The capital of France is Paris. " * 9), end]  # as generate and serve encode it
    assert ids_of(prepared(tmp_path / "data", name, data))[0] == expected
    without = ids_of(prepared(tmp_path / "without", name, data, tokenizer={"add_bos": False}))[0]
    assert without == ours.encode("The capital of France is Paris. " * 9, add_special=False) + [end]
    assert (len(without) < len(expected)) == (name != "qwen3")

    pair = {"prompt": "Two and two? ", "chosen": "Four.", "rejected": "Five."}
    (tmp_path / "p.jsonl").write_text(json.dumps(pair) + "\n")
    data = {"sources": [{"paths": [str(tmp_path / "p.jsonl")]}]}
    answers = ids_of(prepared(tmp_path / "pairs", name, data, objective="dpo"))
    assert answers == [[*ours.encode(f"Two and two? {answer}"), end] for answer in ("Four.", "Five.")]


@pytest.mark.turns(3)
def test_a_chat_has_the_ids_of_its_published_template_and_no_other_end(tmp_path):
    import transformers

    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in (CHAT, CHAT[:3])))
    template = world.folder("chat_templates") / "trl" / "qwen3_training.jinja"
    data = {"sources": [{"paths": [str(tmp_path / "c.jsonl")], "column": "messages"}], "packing": "best_fit"}
    corpus = prepared(tmp_path / "data", "qwen3", data | {"chat_template": str(template)})
    theirs = transformers.AutoTokenizer.from_pretrained(world.tokenizer("qwen3"))
    theirs.chat_template = template.read_text(encoding="utf-8")
    tokens = corpus.training[0].tokens
    assert tokens.targets is not None
    for number, chat in enumerate((CHAT, CHAT[:3])):  # the second ends with a user's turn
        expected = theirs.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        part = slice(tokens.offsets[number], tokens.offsets[number + 1])
        assert tokens.tokens[part].tolist() == expected["input_ids"]
        assert tokens.targets[part].astype(int).tolist() == expected["assistant_masks"]


def tuned(folder, start, **values):
    """A run of adapters on chats from a published model, by its own tokenizer and template."""
    (folder / "c.jsonl").write_text((json.dumps({"messages": CHAT}) + "\n") * 8)
    data = {"sources": [{"paths": [str(folder / "c.jsonl")], "column": "messages"}], "sequence_length": 128}
    model = {"start_from": str(start), "compute_dtype": "float32"}
    described = {"model": model, "data": data | {"packing": "best_fit"}, "lora": {"rank": 4}}
    config = from_dict({**described, "batch_size": 1, "optimizer": {"learning_rate": 0.01}, **values})
    return config, list(train(config, folder / "run"))


@pytest.mark.turns(6)
def test_adapters_of_a_model_with_the_published_vocab_learn_chats(tmp_path):
    start = world.tiny("qwen3")
    config, records = tuned(tmp_path, start, steps=4)
    assert records[-1].loss < records[0].loss
    saved, ours = (read_tokenizer(folder) for folder in (tmp_path / "run" / "model", start))
    assert saved.encode(CHAT[0]["content"]) == ours.encode(CHAT[0]["content"])
    assert saved.render_chat(CHAT) == ours.render_chat(CHAT)
    row = prepare(config, tmp_path / "run" / "data").training[0][0]
    counted = np.asarray(row["labels"])[row["labels"] != IGNORED].tolist()
    assert ours.decode(counted[: len(counted) // 2], skip_special=False).startswith(TURNS[next(iter(TURNS))][0])
    settings = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert settings["vocab_size"] == 151936


@pytest.mark.long
def test_smollm2_learns_chats_and_answers_them(tmp_path):
    import jax.numpy as jnp

    from vishwamai.models import from_pretrained
    from vishwamai.training.sample import sample

    _, records = tuned(tmp_path, world.smollm2(), steps=12, optimizer={"learning_rate": 3e-3, "schedule": "constant"})
    assert records[-1].loss < 0.3 * records[0].loss
    folder = tmp_path / "run" / "model"
    model, tokenizer = from_pretrained(folder, dtype=jnp.float32), read_tokenizer(folder)
    assert "In Italy, of course." in sample(model, tokenizer.encoder, tokenizer.render_chat(CHAT[:3]), 12)
