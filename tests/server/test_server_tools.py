"""Tool calls and reasoning in the forms of many families, whole and in pieces, on templates that others wrote."""

import json
import re

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import world
from serving import serving, write_model, write_tokenizer
from vishwamai.core.errors import UnsupportedError
from vishwamai.inference import plan_load
from vishwamai.inference.guided import Vocabulary
from vishwamai.inference.server.forms import FORMS, THINKING, form_of, marks_of, opened, thinking_of
from vishwamai.inference.server.literals import as_json
from vishwamai.inference.server.reading import Reader, read
from vishwamai.inference.server.service import Settings
from vishwamai.inference.server.tools import grammar
from vishwamai.models import read_tokenizer
from vishwamai.models.chat import ChatTemplate

ONE = '{"name": "add", "arguments": {"a": 1}}'
ADD = ("add", {"a": 1})
MARKED_TEXT = '{"a": "<tool_call></tool_call>"}'
MARKS = f'{{"name": "add", "arguments": {MARKED_TEXT}}}'
DEEP = '{"name": "add", "arguments": "{\\"a\\": 1}"}'
HARMONY = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
CASES = [
    ("hermes", f"Two calls: <tool_call>{ONE}</tool_call>\n<tool_call>\n{ONE}\n</tool_call>", "Two calls:", [ADD, ADD]),
    ("hermes", f"<tool_call>{ONE}", "", [ADD]),  # the model ended before it closed the call
    ("hermes", "a < b, <tool> and <tool_cal", "a < b, <tool> and <tool_cal", []),
    ("hermes", "<tool_call>{not json}</tool_call>", "<tool_call>{not json}</tool_call>", []),
    ("hermes", f"<tool_call>{ONE}</tool_call> Done.", "Done.", [ADD]),
    ("hermes", f"<tool_call>{DEEP}</tool_call>", "", [ADD]),  # arguments as text
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [ADD]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    ("hermes", f"<tool_call>{MARKS}</tool_call><tool_call>{ONE}</tool_call>", "",
     [("add", json.loads(MARKED_TEXT)), ADD]),
    ("mistral", f"[TOOL_CALLS][{ONE}, {ONE}]", "", [ADD, ADD]),
    ("mistral", "[1, 2]", "[1, 2]", []),
    ("mistral_args", 'So [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{}', "So", [ADD, ("now", {})]),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}', "", [ADD, ADD]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}', "", [ADD]),
    ("llama3_json", 'As {"name": "add"}', 'As {"name": "add"}', []),
    ("llama3_json", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),  # no tool's name
    ("llama3_json", '{"a": 1}', '{"a": 1}', []),
    ("pythonic", "[add(a=1), now()]", "", [ADD, ("now", {})]),
    ("pythonic", "<|tool_call_start|>[add(a=1)]<|tool_call_end|>", "", [ADD]),
    ("pythonic", "[1, 2] is a list", "[1, 2] is a list", []),
    ("pythonic", "[add(a=), b]", "[add(a=), b]", []),
    ("functionary", '<function=add>{"a": 1}</function>', "", [ADD]),
    ("gpt_oss", f'{HARMONY}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"a": 1}}', "", [ADD]),
    ("gpt_oss", f"{HARMONY}<|channel|>final<|message|>It is 2.", "It is 2.", []),
    ("gpt_oss", "It is 2.", "It is 2.", []),
    ("phi4_mini", f"<|tool_call|>[{ONE}]<|/tool_call|>", "", [ADD]),
    ("phi4_mini", f"functools[{ONE}]", "", [ADD]),
    ("granite", f"<|tool_call|>[{ONE}]", "", [ADD]),
    ("function_gemma", "<start_function_call>call:add{a:1}<end_function_call>", "", [ADD]),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>", "", [ADD]),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1", "", [ADD]),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "", [ADD]),
]  # fmt: skip


def pieces(text, cuts):
    cuts = sorted({cut for cut in cuts if cut < len(text)} | {0})
    return [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)])]


def turn(reader, parts):
    """(reasoning, content, calls) of an answer in pieces."""
    state, texts, calls = reader.start, {"reasoning": "", "content": ""}, []
    for i, part in enumerate(parts):
        state, events = read(reader, state, part, last=i == len(parts) - 1)
        for kind, text in events:
            if kind == "call":
                calls.append([text, ""])
            elif kind == "arguments":
                calls[-1][1] += text
            else:
                texts[kind] += text
    return texts["reasoning"], texts["content"], [(name, json.loads(arguments)) for name, arguments in calls]


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_answers_in_pieces(case, cuts):
    form, text, content, calls = case
    reader = Reader(form, "gpt_oss" if form == "gpt_oss" else None, tools={"add": {}, "now": {}})
    for parts in ([text], list(text), pieces(text, cuts)):
        assert turn(reader, parts)[1:] == (content, calls)


def test_arguments_come_before_a_call_ends():
    for form, text in (
        ("hermes", '<tool_call>{"name": "write", "arguments": {"text": "a long'),
        ("qwen3_coder", "<tool_call><function=write>\n<parameter=text>\na long"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>"
         '{"text": "a long'),
    ):  # fmt: skip
        reader = Reader(form, tools={"write": {"properties": {"text": {"type": "string"}}}})
        assert read(reader, reader.start, text)[1] == [("call", "write"), ("arguments", '{"text": "a long')]


TYPED = {  # what a model writes of an argument, its schema, and the value
    "optional text": ("007", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "007"),
    "no text": ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
    "types": ("true", {"type": ["string", "null"]}, "true"),
    "text or number": ("1.5", {"type": ["string", "number"]}, 1.5),
    "nullable": ("12", {"nullable": True, "allOf": [{"type": "string"}]}, "12"),
    "reference": ("5", {"$ref": "#/$defs/Level"}, "5"),
    "lists": ("[1]", {"anyOf": [{"type": "string"}, {"type": "array"}]}, [1]),
    "number": ("12", {"type": "integer"}, 12),
    "no schema": ("12", {}, 12),
    "circle": ("12", {"$ref": "#/$defs/Circle"}, 12),
}


@pytest.mark.parametrize("name", TYPED)
def test_a_value_has_a_type_of_its_schema(name):
    """As pydantic writes `str | None`: a text that looks like a number stays a text."""
    text, kind, expected = TYPED[name]
    defs = {"Level": {"type": "string", "enum": ["1", "5"]}, "Circle": {"anyOf": [{"$ref": "#/$defs/Circle"}]}}
    reader = Reader("qwen3_coder", tools={"f": {"properties": {"a": kind}, "$defs": defs}})
    _, events = read(reader, reader.start, f"<tool_call><function=f>\n<parameter=a>\n{text}\n</parameter>", last=True)
    assert json.loads(events[-1].text) == {"a": expected}


@given(text=st.text(st.sampled_from('<>{}[]()"\\=:, \nab1|｜▁'), max_size=60), form=st.sampled_from(sorted(FORMS)))
def test_any_text_is_read_to_its_end(text, form):
    reader = Reader(form, "think", tools={"a": {}})
    for begin, _ in FORMS[form].sections:
        state, events = read(reader, reader.start, begin + text)
        state, more = read(reader, state, "", last=True)
        assert all(event.text for event in events + more)


REASONS = [
    ("think", "<think>\nI add.\n</think>\n\nIt is 2.", False, "I add.", "It is 2."),
    ("think", "I add.\n</think>\n\nIt is 2.", True, "I add.", "It is 2."),
    ("think", "I add", True, "I add", ""),
    ("think", "It is </think> 2.", False, "", "It is </think> 2."),
    ("mistral", "[THINK]I add.[/THINK]It is 2.", False, "I add.", "It is 2."),
    ("seed_oss", "<seed:think>I add.</seed:think>It is 2.", False, "I add.", "It is 2."),
    ("gemma4", "<|channel>thought\nI add.<channel|>It is 2.", False, "I add.", "It is 2."),
    ("gpt_oss", f"{HARMONY}<|channel|>final<|message|>It is 2.", False, "I add.", "It is 2."),
    (None, "<think>I add.</think>It is 2.", False, "", "<think>I add.</think>It is 2."),
]


@pytest.mark.parametrize(("thinking", "text", "inside", "reasoning", "content"), REASONS)
def test_reasoning_is_split_from_the_content(thinking, text, inside, reasoning, content):
    for parts in ([text], list(text)):
        assert turn(Reader(None, thinking, inside), parts) == (reasoning, content, [])


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "flags": {"type": "object"}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": PARAMETERS}}
CITY, FLAGS = 'São "P"\nx', {"a": [1, True, None]}
EXPECTED = [("get_weather", {"city": CITY, "days": 3, "flags": FLAGS}), ("get_time", {})]
BROKEN = {  # what these print is not what their models write
    "llama4_pythonic": "quotes in texts are not escaped, and all values are texts",
    "qwen1.5-chat": "unbalanced quotes",
    "GLM-4.7.jinja": "ends a call by the mark that begins one",
}


def rendered(path):
    """(the template, the text of two calls and what is behind them) as a published template prints earlier calls."""
    text = path.read_text(encoding="utf-8")
    template = ChatTemplate(text, path.name)
    names = [("get_weather", json.dumps(EXPECTED[0][1], ensure_ascii=False)), ("get_time", "{}")]
    calls = [
        {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(names)
    ]
    for count in (2, 1):
        chat = [
            {"role": "user", "content": "QUESTION"},
            {"role": "assistant", "content": "", "tool_calls": calls[:count]},
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": "RESULT"},
        ]
        try:
            printed = template.render(chat, {"tools": [TOOL], "bos_token": "<s>", "eos_token": "</s>"})
        except UnsupportedError:
            continue
        return text, printed[printed.rindex("QUESTION") + 8 :].partition("RESULT")[0]
    return text, None


FORCED = {
    *("hermes", "llama3_json", "mistral", "mistral_args", "qwen3_coder", "deepseek_v3", "deepseek_v31", "deepseek_v32"),
    *("deepseek_v4", "glm", "kimi_k2", "minimax_m2", "functionary"),
}  # fmt: skip
"""Forms whose grammar accepts what a template prints of a call, blanks and order of the arguments included."""


def calls_begin(form, printed):
    marks = [re.escape(begin) for begin, _ in FORMS[form].sections if begin]
    marks += [r"\s?to=functions"] if form == "gpt_oss" else [r'\{"name"'] if form == "llama3_json" else []
    found = re.search("|".join(marks), printed)
    return None if found is None else printed[found.start() :]


@pytest.mark.parametrize("share", [pytest.param(12, id="sample"), pytest.param(1, id="all", marks=pytest.mark.long)])
def test_calls_that_published_templates_print_are_read(share, tmp_path):
    """Reads what each template prints of earlier calls, and the grammar of a forced call accepts the first of them."""
    write_tokenizer(tmp_path)
    tokenizer = read_tokenizer(tmp_path)
    vocabulary = Vocabulary.of(tokenizer, 262, [2])
    paths = [*world.files("chat_templates", "**/*.jinja"), *world.files("chat_templates", "**/*.jinja2")]
    count: dict[str, int] = {}
    accepted: set[str] = set()
    for path in sorted(paths)[::share]:
        if "tool_calls" not in path.read_text(encoding="utf-8") or any(name in path.name for name in BROKEN):
            continue
        template, printed = rendered(path)
        form = form_of(template)
        if form is None or printed is None or "&#34;" in printed:
            continue
        answer = calls_begin(form, printed)
        if answer is None:  # the template prints calls of its own in a form that it does not ask for
            continue
        reader = Reader(
            form, "gpt_oss" if form == "gpt_oss" else None, tools={"get_weather": PARAMETERS, "get_time": {}}
        )
        for parts in ([answer], list(answer)):
            calls = turn(reader, parts)[2]
            assert calls and calls == EXPECTED[: len(calls)], (path.name, form, printed)
        if form in FORCED and form not in accepted:
            matcher = vocabulary.grammar(*grammar(form, [TOOL["function"]], {})).matcher()
            forced, text = answer[answer.index("{") if FORMS[form].lead else 0 :], b""
            for token in tokenizer.encode(forced):
                if not matcher.mask()[token // 32] >> (token % 32) & 1 or matcher.advance([token]) is not None:
                    break
                text += tokenizer.token_bytes(token)
            if b"null]}" in text:
                accepted.add(form)
        count[form] = count.get(form, 0) + 1
    if paths:
        assert accepted >= (FORCED if share == 1 else set()), FORCED - accepted
        assert sum(count.values()) >= (130 if share == 1 else 3) and len(count) >= (18 if share == 1 else 2), count


LLAMA = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
FAMILIES = {
    "Kimi-K2.jinja": ("kimi_k2", None),
    "Qwen3-Coder.jinja": ("qwen3_coder", None),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3.5-4B": ("qwen3_coder", "think"),
    "DeepSeek-V3.1": ("deepseek_v31", "think"),
    "DeepSeek-V3.2.jinja": (None, "think"),
    "GLM-4.6": ("glm", "think"),
    "gpt-oss-120b": ("gpt_oss", "gpt_oss"),
    "MiniMax-M2.5": ("minimax_m2", "think"),
    "Nemotron-3-Nano": ("qwen3_coder", "think"),
    "granite-3.3": ("granite", None),
    "gemma-4-31B-it.jinja": ("gemma4", "gemma4"),
    "Llama-3.1-8B-Instruct.jinja": ("llama3_json", None),
    "Mistral-Small-3.2": ("mistral_args", None),
    "Mistral-Nemo": ("mistral", None),
    "Seed-OSS": ("seed_oss", "seed_oss"),
    "lfm2_2_5": ("pythonic", None),
    "Hermes-2-Pro": ("hermes", None),
    "v15_think": ("mistral_args", "mistral"),
}


def test_the_template_tells_the_form():
    templates = {path: path.read_text(encoding="utf-8") for path in world.files("chat_templates", "**/*.jinja")}
    for name, (form, thinking) in FAMILIES.items() if templates else ():
        found = [text for path, text in templates.items() if name in path.name]
        assert found, name
        for text in found:
            if form is not None:
                assert form_of(text) == form, name
            if thinking is not None:
                assert thinking_of(text) == thinking, name
    assert form_of("{{ messages }}") is None and thinking_of("{{ messages }}") is None
    assert form_of(LLAMA) == "llama3_json"


def test_a_prompt_may_begin_the_reasoning():
    assert opened(THINKING["think"], "<|im_start|>assistant\n<think>\n")
    assert not opened(THINKING["think"], "<think>\n\n</think>\n\n")
    assert not opened(THINKING["think"], "Write <think> please.\nassistant:")


def test_values_of_calls_become_json():
    assert (
        as_json("{a=-1.5, 'b': \"it\\'s\", c=(True, None,)}", ('"', "'"))
        == '{"a": -1.5, "b": "it\'s", "c": [true, null]}'
    )
    for text in ("{a=NaN}", "{a=1", "{a=b}", "{a=" + "[" * 9000 + "}", "{'a}", "{a=1 b=2}"):
        assert as_json(text, ('"', "'")) is None


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
    write_tokenizer(tmp_path, template, marks)
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
    assert matcher.finished
    stream = tokenizer.stream(keep=marks_of(form, None, tokenizer.special_ids))
    text = "".join(stream.add(token) for token in [1, *ids, 2])
    assert turn(Reader(form), [text]) == ("", "", [ADD])


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """The address of a server of a model for which `[TOOL_CALLS]` is one special token, and its engine."""
    path = tmp_path_factory.mktemp("marked")
    write_model(path, *MARKED["mistral"][:2])
    planned = plan_load(path, dtype="float32", max_sequences=1, max_tokens=32, max_length=256)
    with serving(planned.engine(compile="lazy"), Settings("tiny")) as address:
        yield address


OFFER = {"type": "function", "function": {"name": "add", "parameters": {"enum": [{"a": 4}]}}}
ASK = {"messages": [{"role": "user", "content": "4"}], "tools": [OFFER], "seed": 1, "max_tokens": 80}


def choices_of(answer):
    parts = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return [choice for part in parts for choice in part["choices"]]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_behind_a_special_mark_are_found(marked, stream):
    ask = {**ASK, "tool_choice": "required", "return_token_ids": True, "stream": stream}
    answer = httpx.post(f"{marked}/v1/chat/completions", json=ask, timeout=60)
    if stream:
        choices = choices_of(answer)
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        assert not any(choice["delta"].get("content") for choice in choices)
        assert [call["function"].get("name") for call in calls] == ["add"] + [None] * (len(calls) - 1)
        arguments = "".join(call["function"]["arguments"] for call in calls)
        ids = [id for choice in choices for id in choice.get("token_ids", ())]
        assert choices[-1]["finish_reason"] == "tool_calls"
    else:
        choice = answer.json()["choices"][0]
        (call,), ids = choice["message"]["tool_calls"], choice["token_ids"]
        assert choice["message"]["content"] is None and call["function"]["name"] == "add"
        arguments = call["function"]["arguments"]
    assert ids[0] == 259 and json.loads(arguments) == {"a": 4}


@pytest.mark.turns(6)
def test_without_a_known_form_a_forced_call_is_an_error(tmp_path):
    write_model(tmp_path, "{{ tools }}{{ messages[0].content }}")
    planned = plan_load(tmp_path, dtype="float32", max_sequences=1, max_tokens=32, max_length=400)
    engine = planned.engine(compile="lazy")
    with serving(engine, Settings("tiny")) as address:
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            answer = httpx.post(f"{address}/v1/chat/completions", json={**ASK, "tool_choice": choice})
            assert answer.status_code == 400
            assert "writes calls in a form that the server does not read" in answer.json()["error"]["message"]
        forced = {"regex": '[{]"name": "add", "parameters": [{][}][}]'}
        answer = httpx.post(f"{address}/v1/chat/completions", json={**ASK, **forced}, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == '{"name": "add", "parameters": {}}'
    with serving(engine, Settings("tiny", tool_parser="kimi_k2")) as address:
        ask = {**ASK, "tool_choice": "required", "max_tokens": 200}
        message = httpx.post(f"{address}/v1/chat/completions", json=ask, timeout=60).json()["choices"][0]["message"]
        assert message["tool_calls"][0]["id"] == "functions.add:0"
    with serving(engine, Settings("tiny", tool_parser="gemma4")) as address:
        answer = httpx.post(f"{address}/v1/chat/completions", json={**ASK, "tool_choice": "required"})
        assert answer.status_code == 400 and "have no grammar" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def reasoning(tmp_path_factory):
    """The address of a server of a model whose answers begin inside of `<think>`."""
    path = tmp_path_factory.mktemp("reasoning")
    template = (
        "{% if tools %}{{ tools[0].function.name }}<tool_call>{% endif %}{{ messages[0].content }}"
        "{% if enable_thinking is not defined or enable_thinking %}<think>{% else %}<think></think>{% endif %}"
    )
    write_model(path, template, ("<think>", "</think>"))
    planned = plan_load(path, dtype="float32", max_sequences=2, max_tokens=32, max_length=256)
    with serving(planned.engine(compile="lazy"), Settings("tiny")) as address:
        yield address


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_has_a_budget_and_a_grammar_behind_it(reasoning, stream):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes"]}}}
    ask = {"messages": ASK["messages"], "seed": 3, "max_tokens": 60, "response_format": form, "stream": stream}
    ask |= {"thinking_budget": 8, "return_token_ids": True, "logit_bias": {"2": -100, "260": -100}}
    for budget, ids_inside in ((8, 8), (0, 0)):
        answer = httpx.post(f"{reasoning}/v1/chat/completions", json={**ask, "thinking_budget": budget}, timeout=60)
        if stream:
            choices = choices_of(answer)
            texts = [
                "".join(choice["delta"].get(key) or "" for choice in choices)
                for key in ("reasoning_content", "content")
            ]
            ids = [id for choice in choices for id in choice.get("token_ids", ())]
        else:
            body = answer.json()
            message, ids = body["choices"][0]["message"], body["choices"][0]["token_ids"]
            texts = [message.get("reasoning_content", ""), message["content"]]
            details = body["usage"].get("completion_tokens_details", {"reasoning_tokens": 0})
            assert ids_inside <= details["reasoning_tokens"] <= ids_inside + 1
        assert ids.index(260) == ids_inside and texts[1] == '"yes"' and bool(texts[0].strip()) == bool(ids_inside)


def test_reasoning_can_be_off_or_left_out(reasoning):
    ask = {"messages": ASK["messages"], "seed": 3, "max_tokens": 12, "logit_bias": {"2": -100, "260": -100}}
    for options, inside in (
        ({}, True),
        ({"enable_thinking": False}, False),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"include_reasoning": False}, False),
    ):
        answer = httpx.post(f"{reasoning}/v1/chat/completions", json={**ask, **options}, timeout=60).json()
        message = answer["choices"][0]["message"]
        assert ("reasoning_content" in message) == inside
        assert bool(message["content"]) == (not inside and "include_reasoning" not in options)


def test_a_forced_call_comes_behind_the_reasoning(reasoning):
    ask = {**ASK, "tool_choice": "required", "thinking_budget": 5, "logit_bias": {"2": -100}, "max_tokens": 120}
    choice = httpx.post(f"{reasoning}/v1/chat/completions", json=ask, timeout=60).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 4} and choice["finish_reason"] == "tool_calls"
    events = httpx.post(
        f"{reasoning}/v1/responses",
        json={"input": "4", "stream": True, "max_output_tokens": 9, "temperature": 0},
        timeout=60,
    )
    kinds = [json.loads(line[6:])["type"] for line in events.text.splitlines() if line.startswith("data: {")]
    assert "response.reasoning_text.delta" in kinds and kinds.count("response.output_item.done") >= 1
