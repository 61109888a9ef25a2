"""Tool calls in the forms of several models, whole and in pieces."""

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import serving, write_model
from vishwamai.inference import plan_load
from vishwamai.inference.guided import Vocabulary
from vishwamai.inference.server.replies import CallText
from vishwamai.inference.server.service import Settings
from vishwamai.inference.server.tools import Call, form_of, grammar, marks_of, split
from vishwamai.models import read_tokenizer

ONE = '{"name": "add", "arguments": {"a": 1}}'
ADD = Call("add", '{"a": 1}')
MARKED_TEXT = '{"a": "<tool_call></tool_call>"}'
MARKS = f'{{"name": "add", "arguments": {MARKED_TEXT}}}'
CASES = [
    ("hermes", f"Two calls: <tool_call>{ONE}</tool_call>\n<tool_call>\n{ONE}\n</tool_call>", "Two calls:", [ADD, ADD]),
    ("hermes", f"<tool_call>{ONE}", "", [ADD]),  # the model ended before it closed the call
    ("hermes", "a < b, <tool> and <tool_cal", "a < b, <tool> and <tool_cal", []),
    ("hermes", "<tool_call>{not json}</tool_call>", "<tool_call>{not json}</tool_call>", []),
    ("hermes", f"<tool_call>{ONE} and more</tool_call>", f"<tool_call>{ONE} and more</tool_call>", []),
    ("hermes", f"<tool_call>{MARKS}</tool_call><tool_call>{ONE}</tool_call>", "", [Call("add", MARKED_TEXT), ADD]),
    ("mistral", f"[TOOL_CALLS][{ONE}, {ONE}]", "", [ADD, ADD]),
    ("mistral", "[1, 2]", "[1, 2]", []),
    ("llama", '{"name": "add", "parameters": {"a": 1}}', "", [ADD]),
    ("llama", 'As {"name": "add"}', 'As {"name": "add"}', []),
    ("llama", '{"a": 1}', '{"a": 1}', []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_whole_answers(form, text, content, calls):
    assert split(form, text) == (content, calls)


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_answers_in_pieces(case, cuts):
    form, text, content, calls = case
    cuts = sorted({cut for cut in cuts if cut < len(text)} | {0})
    pieces = [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)])]
    reader = CallText(form)
    found = [reader.add(piece, last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    assert "".join(sent for sent, _ in found).strip() == content
    assert [call for _, some in found for call in some] == calls


LLAMA = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("<tool_call>\n", "hermes"),
        ("[TOOL_CALLS] [", "mistral"),
        (LLAMA, "llama"),
        ("<tool_call>\n<function=", None),  # Qwen3 Coder
        ("[TOOL_CALLS]{{ name }}[ARGS]", None),  # Mistral since 2025
        ("<|channel|>commentary to=functions.", None),  # gpt-oss
        ("<｜tool▁calls▁begin｜>", None),  # DeepSeek
        ("{{ messages }}", None),
    ],
)
def test_the_template_tells_the_form(template, form):
    assert form_of(template) == form


MARKED = {
    "hermes": (
        "{% if tools %}{{ tools[0].function.name }}<tool_call>{% endif %}{{ messages[0].content }}",
        ("<tool_call>", "</tool_call>"),
        ONE,
    ),
    "mistral": (
        "{% if tools %}{{ tools[0].function.name }}[TOOL_CALLS]{% endif %}{{ messages[0].content }}",
        ("[TOOL_CALLS]",),
        f"[{ONE}]",
    ),
}


@pytest.mark.parametrize("form", MARKED)
def test_a_forced_call_is_written_with_marks_of(form, tmp_path):
    template, marks, call = MARKED[form]
    write_model(tmp_path, template, marks)
    tokenizer = read_tokenizer(tmp_path)
    vocabulary = Vocabulary.of(tokenizer, 262, [2])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    source = grammar(form, [{"name": "add", "parameters": schema}], tokenizer.special_ids)
    matcher = vocabulary.grammar(*source).matcher()
    ids = tokenizer.encode(call.join([marks[0], marks[-1] if form == "hermes" else ""]))
    assert ids[0] == 259
    for token in ids:
        assert matcher.mask()[token // 32] >> (token % 32) & 1
        assert matcher.advance([token]) is None
    assert matcher.ended
    stream = tokenizer.stream(keep=marks_of(form, tokenizer.special_ids).values())
    text = "".join(stream.add(token) for token in [1, *ids, 2])
    assert split(form, text) == ("", [ADD])


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """The address of a server of a model for which `[TOOL_CALLS]` is one special token, and its engine."""
    path = tmp_path_factory.mktemp("marked")
    write_model(path, *MARKED["mistral"][:2])
    planned = plan_load(path, dtype="float32", max_sequences=1, max_tokens=32, max_length=256)
    with serving(planned.engine(compile="lazy"), Settings("tiny")) as address:
        yield address


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"enum": [{"a": 4}]}}}
ASK = {"messages": [{"role": "user", "content": "4"}], "tools": [TOOL], "seed": 1, "max_tokens": 80}


@pytest.mark.parametrize("stream", [False, True])
def test_calls_behind_a_special_mark_are_found(marked, stream):
    ask = {**ASK, "tool_choice": "required", "return_token_ids": True, "stream": stream}
    answer = httpx.post(f"{marked}/v1/chat/completions", json=ask, timeout=60)
    if stream:
        parts = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [part["choices"][0] for part in parts]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        assert not any(choice["delta"].get("content") for choice in choices)
        ids = [id for choice in choices for id in choice.get("token_ids", ())]
    else:
        choice = answer.json()["choices"][0]
        calls, ids = choice["message"]["tool_calls"], choice["token_ids"]
        assert choice["message"]["content"] is None
    assert ids[0] == 259
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == [
        ("add", {"a": 4})
    ]


def test_without_a_known_form_a_forced_call_is_an_error(tmp_path):
    write_model(tmp_path, "{{ tools }}{{ messages[0].content }}")
    planned = plan_load(tmp_path, dtype="float32", max_sequences=1, max_tokens=32, max_length=400)
    with serving(planned.engine(compile="lazy"), Settings("tiny")) as address:
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            answer = httpx.post(f"{address}/v1/chat/completions", json={**ASK, "tool_choice": choice})
            assert answer.status_code == 400
            assert "writes calls in a form that the server does not read" in answer.json()["error"]["message"]
        forced = {"regex": '[{]"name": "add", "parameters": [{][}][}]'}
        answer = httpx.post(f"{address}/v1/chat/completions", json={**ASK, **forced}, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == '{"name": "add", "parameters": {}}'
