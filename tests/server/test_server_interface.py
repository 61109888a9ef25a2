"""What the server's interface promises, on Qwen3's vocab: log probabilities, echo, tools, keys, the log."""

import json
import logging
import time
from typing import Any

import httpx
import numpy as np
import openai
import pytest

import world
from serving import serving, write_model
from vishwamai.core import logs
from vishwamai.core.errors import ShapeError
from vishwamai.inference import Sampling, plan_load
from vishwamai.inference.answers import Delta, TokenLogprobs
from vishwamai.inference.guided import Vocabulary
from vishwamai.inference.server import schema, tools
from vishwamai.inference.server.errors import HttpError
from vishwamai.inference.server.pieces import Pieces, Places
from vishwamai.inference.server.reading import Reader, read
from vishwamai.inference.server.replies import Prompt, Reply
from vishwamai.inference.server.service import check_keys
from vishwamai.inference.server.settings import Settings
from vishwamai.models import read_tokenizer

PROMPT = "The capital of France is Paris 😀"
USER = [{"role": "user", "content": "hi"}]
PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/Unit"}},
    "required": ["unit"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["C", "F"]}},
}
TOOL = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def path():
    return world.tiny("qwen3")


@pytest.fixture(scope="module")
def engine(path):
    planned = plan_load(path, dtype="float32", max_sequences=4, max_tokens=64, max_length=512)
    return planned.engine(compile="lazy")


@pytest.fixture(scope="module")
def address(engine):
    with serving(engine, Settings("qwen", defaults={"temperature": 0.0})) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


def peer_scores(path, ids):
    """Log probabilities of transformers: of each token but the first, and of the whole vocab before it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1).numpy()
    return logprobs[np.arange(len(ids) - 1), ids[1:]], logprobs[:-1]


@pytest.mark.turns(3)
def test_scores_of_prompts_equal_those_of_transformers(client, path, engine):
    batch = [list(engine.tokenizer.encode(text)) for text in (PROMPT, "2 + 2 = 4")]
    # As lm-eval asks: a batch of token ids of different lengths; the last token is an answer.
    ask = {"model": "qwen", "echo": True, "logprobs": 2, "temperature": 0, "seed": 1}
    answer = client.completions.create(prompt=batch, max_tokens=1, **ask)
    only = client.completions.create(prompt=batch, max_tokens=0, **ask)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for ids, choice, alone in zip(batch, answer.choices, only.choices):
        own, every = peer_scores(path, ids)
        entries = choice.logprobs
        assert len(entries.tokens) == len(ids) + 1 and entries.token_logprobs[0] is entries.top_logprobs[0] is None
        np.testing.assert_allclose(entries.token_logprobs[1:-1], own, atol=2e-4)
        best = [max(top.values()) for top in entries.top_logprobs[1:-1]]
        np.testing.assert_allclose(best, every.max(1), atol=2e-4)
        assert alone.logprobs.token_logprobs == entries.token_logprobs[:-1] and alone.finish_reason == "length"
        assert alone.text == engine.tokenizer.decode(ids) and choice.text.startswith(alone.text)
        offsets = [len(engine.tokenizer.decode(ids[:i]).rstrip("\ufffd")) for i in range(len(ids))]
        assert entries.text_offset[:-1] == offsets
    assert only.usage.completion_tokens == 0


def test_prompt_logprobs_name_the_rank(client, path, engine):
    extra = {"prompt_logprobs": 1}
    ids = engine.tokenizer.encode(PROMPT)
    own, every = peer_scores(path, ids)
    found = client.completions.create(model="qwen", prompt=PROMPT, max_tokens=1, extra_body=extra)
    places = found.choices[0].model_extra["prompt_logprobs"]
    assert places[0] is None and len(places) == len(ids)
    for place, id, logprob, row in zip(places[1:], ids[1:], own, every):
        assert abs(place[str(id)]["logprob"] - logprob) < 2e-4
        assert abs(place[str(id)]["rank"] - 1 - (row > logprob).sum()) <= 1  # of nearly equal ones
        assert any(entry["rank"] == 1 for entry in place.values())
    chat = client.chat.completions.create(model="qwen", messages=USER, max_tokens=1, extra_body=extra)
    assert chat.model_extra["prompt_logprobs"][0] is None


@pytest.mark.turns(4)
def test_log_probabilities_have_each_token_and_its_bytes(client, engine):
    ask = {"model": "qwen", "temperature": 1.5, "seed": 2, "max_tokens": 60}
    chat = client.chat.completions.create(messages=USER, logprobs=True, top_logprobs=20, **ask)
    entries = chat.choices[0].logprobs.content
    pieces = b"".join(bytes(entry.bytes or ()) for entry in entries)
    special = engine.tokenizer.special_ids
    if not any(entry.token in special for entry in entries):
        assert pieces.decode("utf-8", "replace") == chat.choices[0].message.content
    assert all(len(entry.top_logprobs) == 20 for entry in entries)
    whole = client.completions.create(prompt="a", logprobs=20, **ask).choices[0].logprobs
    assert all(len(top) >= 20 for top in whole.top_logprobs)
    parts = [
        part.choices[0].logprobs for part in client.completions.create(prompt="a", logprobs=20, stream=True, **ask)
    ]
    for name in ("tokens", "text_offset", "token_logprobs"):
        assert [value for part in parts if part for value in getattr(part, name)] == getattr(whole, name)


def test_tokens_of_parts_of_characters_have_names_of_their_own():
    tokenizer = read_tokenizer(world.tokenizer("qwen3"))
    pieces = Pieces(tokenizer)
    ids = tokenizer.encode("😀𝄞ü")
    entries = [TokenLogprobs(id, -1.0, tuple((other, -1.0) for other in ids)) for id in ids]
    places = Places(pieces)
    found = places.logprobs(entries)
    assert b"".join(pieces.bytes_of(id) or b"" for id in ids).decode() == "😀𝄞ü"
    assert all(isinstance(top, dict) and len(top) == len(set(ids)) for top in found["top_logprobs"])
    assert found["text_offset"][0] == 0 and found["text_offset"][-1] == 2
    assert any(str(name).startswith("bytes:\\x") for name in found["tokens"])
    assert pieces.name(151_935) == "token_id:151935" and pieces.entry(151_935, float("-inf"))["logprob"] == -9999.0


def test_whole_answers_with_log_probabilities_take_linear_time():
    pieces = Pieces(read_tokenizer(world.tokenizer("qwen3")))
    reply = Reply("completion", "m", pieces, (Prompt((1,)),), logprobs=True)

    def seconds(count):
        entry = TokenLogprobs(9707, -1.0, ((9707, -1.0), (1879, -2.0)))
        deltas = [Delta(0, (9707,), "Hello", (entry,)) for _ in range(count)] + [Delta(0, finish="stop")]
        started = time.perf_counter()
        reply.body(deltas)
        return time.perf_counter() - started

    seconds(100)
    assert min(seconds(16_000) for _ in range(3)) < 12 * min(seconds(4_000) for _ in range(3))


def test_a_lone_surrogate_is_declined_by_its_place(address):
    for route, body, where in (
        ("completions", '{"prompt": "a\\ud800"}', "`prompt` has a lone surrogate at character 1"),
        ("chat/completions", '{"messages": [{"role": "user", "content": "\\udc00"}]}', "`messages[0].content`"),
        ("completions", '{"prompt": "a", "logit_bias": {"\\ud800": 1}}', "`logit_bias (a key)`"),
        ("completions", '{"prompt": "a", "stop": ["\\ud83d"]}', "`stop[0]`"),
    ):
        answer = httpx.post(f"{address}/v1/{route}", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and where in answer.json()["error"]["message"], answer.text
    pair = httpx.post(
        f"{address}/v1/completions",
        json={"prompt": "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "max_tokens": 1},
    )
    assert pair.status_code == 200


def test_keys_without_effect_are_accepted_and_logged_once(client, address, caplog):
    extra = {
        "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "user": "me", "verbosity": "low",
        "prediction": {"type": "content", "content": "x"}, "modalities": ["text"], "audio": None, "top_k": -1,
        "reasoning_effort": "low", "nobody_documents_this": 1, "best_of": 1, "min_tokens": 2,
    }  # fmt: skip
    with caplog.at_level(logging.WARNING, "vishwamai.server"):
        for _ in range(2):
            client.chat.completions.create(model="qwen", messages=USER, max_tokens=2, extra_body=extra)
    lines = [record.getMessage() for record in caplog.records if "nobody_documents_this" in record.getMessage()]
    assert len(lines) == 1
    ask = {"model": "qwen", "prompt": "a", "max_tokens": 1}
    assert client.completions.create(**ask, suffix="", best_of=1).choices
    for name, value in {"suffix": "b", "audio": {}, "modalities": ["audio"]}.items():
        route, body = ("completions", ask) if name == "suffix" else ("chat/completions", {"messages": USER})
        answer = httpx.post(f"{address}/v1/{route}", json={**body, name: value})
        assert answer.status_code == 400 and f"`{name}`" in answer.json()["error"]["message"]


def test_unknown_keys_can_be_declined():
    settings = Settings("qwen", decline_unknown_keys=True)
    for extra, where in (({"surprise": 1}, "surprise"), ({"stream_options": {"x": 1}}, "stream_options.x")):
        with pytest.raises(HttpError, match=f"`{where}`") as error:
            check_keys(schema.parse(schema.Completion, {"prompt": "a", **extra}), settings)
        assert error.value.status == 400 and error.value.param == where
    check_keys(schema.parse(schema.Completion, {"prompt": "a", "user": "me"}), settings)


def test_the_first_end_token_waits_for_min_tokens(client, engine):
    end = sorted(engine.end_tokens)[0]
    ask = {"model": "qwen", "prompt": "a", "max_tokens": 8, "logit_bias": {str(end): 100}}
    extra = {"return_token_ids": True}
    assert client.completions.create(**ask, extra_body=extra).choices[0].model_extra["token_ids"] == [end]
    answer = client.completions.create(**ask, extra_body={**extra, "min_tokens": 5})
    ids = answer.choices[0].model_extra["token_ids"]
    assert len(ids) == 6 and ids[-1] == end and not engine.end_tokens & set(ids[:-1])


def test_usage_comes_with_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = list(client.completions.create(model="qwen", prompt="a", max_tokens=4, stream=True, stream_options=options,
                                           extra_body={"ignore_eos": True}))  # fmt: skip
    counts = [part.usage.completion_tokens for part in parts]
    assert counts == sorted(counts) and counts[-1] == 4 and parts[-1].choices == []


@pytest.mark.turns(3)
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_written_with_the_tokens_of_the_marks(client, stream):
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        ask = {"model": "qwen", "messages": USER, "tools": [TOOL], "tool_choice": choice, "max_tokens": 60}
        answer = client.chat.completions.create(**ask, stream=stream)
        if stream:
            calls = [call for part in answer for call in part.choices[0].delta.tool_calls or ()]
            assert [call.id is not None for call in calls] == [True] + [False] * (len(calls) - 1)
        else:
            calls = answer.choices[0].message.tool_calls
        assert [call.function.name for call in calls if call.function.name] == ["weather"]
        assert json.loads("".join(call.function.arguments for call in calls))["unit"] in ("C", "F")


def test_a_choice_among_some_tools(client):
    other = TOOL | {"function": TOOL["function"] | {"name": "other"}}
    ask = {"model": "qwen", "messages": USER, "tools": [other, TOOL], "max_tokens": 60}
    some = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    answer = client.chat.completions.create(**ask, tool_choice={"type": "allowed_tools", "allowed_tools": some})
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["weather"]
    answer = client.chat.completions.create(**{**ask, "tools": [TOOL]}, tool_choice="any")
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["weather"]
    functions = [{"type": "function", **tool["function"]} for tool in (other, TOOL)]
    some = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    answer = client.responses.create(
        model="qwen", input="a", tools=functions, tool_choice=some, max_output_tokens=60, reasoning={"effort": "none"}
    )
    assert [item.name for item in answer.output if item.type == "function_call"] == ["weather"]
    with pytest.raises(openai.BadRequestError, match="tool that `tools` lacks"):
        some = {"mode": "required", "tools": [{"type": "function", "function": {"name": "absent"}}]}
        client.chat.completions.create(**ask, tool_choice={"type": "allowed_tools", "allowed_tools": some})


def test_a_refusal_of_an_earlier_turn_is_a_text(client):
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}
    text = {"role": "assistant", "content": [{"type": "text", "text": "I cannot."}]}
    ask = {"model": "qwen", "max_tokens": 1}
    counts = [
        client.chat.completions.create(**ask, messages=[*USER, turn, *USER]).usage.prompt_tokens
        for turn in (refusal, text)
    ]
    assert counts[0] == counts[1]


def test_the_older_form_of_a_call(client):
    function = {"name": "weather", "parameters": PARAMETERS}
    ask = {"model": "qwen", "functions": [function], "function_call": {"name": "weather"}, "max_tokens": 60}
    choice = client.chat.completions.create(messages=USER, **ask).choices[0]
    assert choice.finish_reason == "function_call" and choice.message.function_call.name == "weather"
    call = choice.message.function_call.model_dump()
    result = {"role": "function", "name": "weather", "content": "21"}
    turns = [*USER, {"role": "assistant", "content": None, "function_call": call}, result]
    ids = client.chat.completions.create(model="qwen", messages=turns, max_tokens=1, extra_body={"echo": False})
    assert ids.usage.prompt_tokens > 30  # the call and its result are in the prompt


CALLS = '<tool_call>\n{"name": "weather", "arguments": {"unit": "C"}}\n</tool_call>'


def test_one_call_where_parallel_calls_are_off():
    for single, count in ((True, 1), (False, 2)):
        reply = Reply("chat", "m", Pieces(None), (Prompt((1,)),), reader=Reader("hermes"), single=single)
        choices = reply.body([Delta(0, (1,), f"{CALLS}\n{CALLS}", finish="stop")])["choices"]
        assert isinstance(choices, list) and len(choices[0]["message"]["tool_calls"]) == count


@pytest.mark.turns(3)
@pytest.mark.parametrize("form", ["hermes", "mistral", "llama3_json"])
@pytest.mark.parametrize("as_tokens", [True, False])
def test_once_a_call_begins_its_strict_arguments_follow_the_schema(engine, tmp_path, form, as_tokens):
    if as_tokens:  # marks are tokens of their own in Qwen3's tokenizer, those of Hermes
        tokenizer, vocab, end = engine.tokenizer, engine.programs.vocab, min(engine.end_tokens)
        added = {token.content: id for id, token in tokenizer.encoder.get_added_tokens_decoder().items()}
    else:
        write_model(tmp_path)
        tokenizer, vocab, end, added = read_tokenizer(tmp_path), 262, 2, {}
    vocabulary = Vocabulary.of(tokenizer, vocab, [end])
    free = {"name": "free", "parameters": PARAMETERS}
    grammar = vocabulary.grammar(*tools.grammar(form, [TOOL["function"], free], added, forced=False))
    key = "parameters" if form == "llama3_json" else "arguments"

    def call(name, unit):
        value = f'{{"name": "{name}", "{key}": {{"unit": "{unit}"}}}}'
        return {"hermes": f"<tool_call>\n{value}\n</tool_call>", "mistral": f"[TOOL_CALLS][{value}]"}.get(form, value)

    def accepts(text):
        matcher = grammar.matcher()
        ids = tokenizer.encode(text)
        for id in ids:
            if not matcher.mask()[id // 32] >> (id % 32) & 1:
                return False
            matcher.advance([id])
        return matcher.finished or bool(matcher.mask()[end // 32] >> (end % 32) & 1)

    assert accepts("a < b, <tool> and [TOOL]") and accepts(call("weather", "C")) and accepts(call("free", "x"))
    assert not accepts(call("weather", "x")) and not accepts(call("other", "C"))


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
def test_keywords_without_a_grammar_hold_for_no_forced_call_and_decline_a_strict_one(engine, form):
    """As OpenAI's servers have it: a schema of any keywords is taken where the function is not strict."""
    vocabulary = Vocabulary.of(engine.tokenizer, engine.programs.vocab, [min(engine.end_tokens)])
    added = {token.content: id for id, token in engine.tokenizer.encoder.get_added_tokens_decoder().items()}
    several = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    place = {"oneOf": [{"type": "object", "properties": {"x": {"type": "number"}}}, {"type": "object"}]}
    unless = {"if": {"required": ["x"]}, "then": {"required": ["y"]}, "not": {"required": ["z"]}}
    schema = {"type": "object", "properties": {"days": several, "place": {**place, **unless}}, "required": ["days"]}
    function = {"name": "plan", "parameters": schema}
    matcher = vocabulary.grammar(*tools.grammar(form, [function], added)).matcher()
    call = {
        "hermes": '{"name": "plan", "arguments": {"days": [1, 1]}}',
        "qwen3_coder": "<function=plan>\n<parameter=days>\n[1, 1]\n</parameter>\n</function>",
    }[form]
    for id in engine.tokenizer.encode(f"<tool_call>\n{call}\n</tool_call>"):
        assert matcher.mask()[id // 32] >> (id % 32) & 1
        matcher.advance([id])
    with pytest.raises(ShapeError, match="uniqueItems"):
        vocabulary.grammar(*tools.grammar(form, [{**function, "strict": True}], added))


@pytest.mark.turns(6)
def test_tools_reach_a_model_whose_template_does_not_read_them(tmp_path):
    write_model(tmp_path, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
    planned = plan_load(tmp_path, dtype="float32", max_sequences=1, max_tokens=64, max_length=500)
    engine = planned.engine(compile="lazy")
    with serving(engine, Settings("tiny")) as address:
        short = {"type": "function", "function": {"name": "f", "parameters": {"enum": [{"a": 4}]}}}
        ask = {"messages": [{"role": "user", "content": "4"}], "tools": [short]}
        answer = httpx.post(f"{address}/v1/chat/completions", json={**ask, "max_tokens": 1}, timeout=60)
        offer = str(tools.in_messages(ask["messages"], [short])[0]["content"])
        assert answer.json()["usage"]["prompt_tokens"] > len(offer)
    chat = tools.in_messages(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "?"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 4}'}}],
            },
            {"role": "tool", "content": "one"},
            {"role": "tool", "content": "two"},
        ],
        [short],
    )
    assert [message["role"] for message in chat] == ["system", "user", "assistant", "user"]
    offer = str(chat[0]["content"])
    assert offer.startswith("Be brief.\n\n# Tools") and '"name": "f"' in offer
    events = read(Reader("hermes"), Reader("hermes").start, str(chat[2]["content"]), last=True)[1]
    assert events == [("call", "f"), ("arguments", '{"a": 4}')]
    assert chat[3]["content"] == ("<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>")


def test_a_request_has_a_line_and_an_id(address, caplog):
    with caplog.at_level(logging.INFO, "vishwamai.server.requests"):
        url = f"{address}/v1/completions"
        answer = httpx.post(url, json={"prompt": "a b", "max_tokens": 2}, headers={"X-Request-Id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        other = httpx.post(url, json={"prompt": 1})
        assert len(other.headers["x-request-id"]) == 32
        end = time.monotonic() + 10
        while len(caplog.records) < 2 and time.monotonic() < end:
            time.sleep(0.01)
    records = {record.record["id"]: record for record in caplog.records if hasattr(record, "record")}
    line = records["mine-1"].getMessage()
    assert line.startswith("mine-1 POST /v1/completions 200 2 + 2 tokens ") and line.endswith(" ms")
    declined = records[other.headers["x-request-id"]].getMessage()
    assert " 400 " in declined and "`prompt`" in declined
    fields = json.loads(logs.JsonLines().format(records["mine-1"]))
    assert fields["status"] == 200 and fields["new_tokens"] == 2 and fields["level"] == "info"


def test_models_say_the_defaults(client):
    model = client.models.list().data[0]
    assert model.model_extra["max_model_len"] == 512 and model.model_extra["defaults"]["temperature"] == 0.0


def test_texts_become_tokens_and_texts_again(address, engine):
    answer = httpx.post(f"{address}/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert answer["tokens"] == engine.tokenizer.encode(PROMPT) and answer["count"] == len(answer["token_strs"])
    assert httpx.post(f"{address}/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": PROMPT}
    chat = httpx.post(f"{address}/tokenize", json={"messages": USER, "tools": [TOOL]}).json()
    asked = httpx.post(f"{address}/v1/chat/completions", json={"messages": USER, "tools": [TOOL], "max_tokens": 1})
    assert chat["count"] == asked.json()["usage"]["prompt_tokens"]


@pytest.mark.turns(6)
def test_a_sequence_is_as_long_as_the_model_where_pages_hold_it(path):
    sizes: Any = {"dtype": "float32", "max_sequences": 4, "max_tokens": 64}
    long = world.tiny("qwen3", max_position_embeddings=20_000)
    assert plan_load(long, **sizes).limits.max_length == 16_384 == 4 * 4096
    assert plan_load(path, **sizes).limits.max_length == 2048
    assert plan_load(long, **sizes | {"max_sequences": 8}).limits.max_length == 20_000
    planned = plan_load(long, **sizes)
    short = plan_load(long, **sizes, max_length=512)
    answers = [load.engine(compile="lazy").generate([[1, 2, 3]], Sampling(8))[0].token_ids for load in (planned, short)]
    assert answers[0] == answers[1]
    with pytest.raises(ShapeError, match="--max-length"):
        short.prompts.check([1] * 600, Sampling(8))


def test_responses_carry_text_calls_and_their_results(client):
    offer = {"type": "function", "strict": True, **{k: TOOL["function"][k] for k in ("name", "parameters")}}
    ask = {"model": "qwen", "tools": [offer], "max_output_tokens": 60}
    first = client.responses.create(**ask, input="hi", instructions="Be brief.", tool_choice="required")
    (call,) = first.output
    assert (first.status, call.type, call.name) == ("completed", "function_call", "weather")
    assert json.loads(call.arguments)["unit"] in ("C", "F") and first.usage.input_tokens > 10
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    turns = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, call.model_dump(), result]
    ask |= {"input": turns, "max_output_tokens": 6, "tool_choice": "none"}
    second = client.responses.create(**ask)
    with client.responses.stream(**ask) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds.count("response.output_item.done") == 1
    assert kinds[-1] == f"response.{second.status}" and events[-1].response.output_text == second.output_text
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="qwen", input="a", previous_response_id="x")
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]"):
        client.responses.create(model="qwen", input=[{"type": "web_search_call", "id": "1"}])
