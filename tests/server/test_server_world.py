"""The server under the requests that client libraries send: recorded ones, and mutations of them, on Qwen3's vocab."""

import collections
import collections.abc
import json
import random
import types
import typing

import httpx
import openai.types.responses
import pydantic
import pytest
import typing_extensions
from openai.types import chat

import world
from serving import serving
from vishwamai.inference import Embedder, plan_load
from vishwamai.inference.server.settings import Settings
from vishwamai.models import Pooling

REQUESTS = world.files("requests", "*.json")
NO_ROUTE = ("/v1/fim/completions",)
DECLINED = {  # why, in the words of the answer
    "ai-sdk-openai-compatible-2.0.92+ai6.0.326-image.01": "messages[0].content[1]: the part is of type 'image_url'",
    "langchain-openai-1.7.4-image.01": "messages[0].content[1]: the part is of type 'image_url'",
    "litellm-1.110.2-image.01": "messages[0].content[1]: the part is of type 'image_url'",
    "openai-2.54.0-completions-token-ids.01": "`suffix`",
    "openai-2.54.0-image.01": "messages[0].content[1]: the part is of type 'image_url'",
}
OBJECTS = {
    "chat.completion": chat.ChatCompletion,
    "chat.completion.chunk": chat.ChatCompletionChunk,
    "text_completion": openai.types.Completion,
    "response": openai.types.responses.Response,
}
EVENTS = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)


@pytest.fixture(scope="session")
def qwen():
    """An engine of a tiny model with Qwen3's vocab and tokenizer."""
    path = world.tiny("qwen3", max_position_embeddings=8192)
    planned = plan_load(path, dtype="float32", max_sequences=4, max_tokens=512, max_length=8192)
    return planned.engine(compile="lazy")


@pytest.fixture(scope="session")
def server(qwen):
    embed = Embedder.of_decoder(qwen.model, qwen.tokenizer, Pooling("last"), 64)
    settings = Settings("served-model", max_new_tokens=3)
    with serving(qwen, settings, embed) as address, httpx.Client(base_url=address, timeout=120) as client:
        yield client


def send(client: httpx.Client, recorded: dict[str, typing.Any], body: typing.Any = ...) -> httpx.Response:
    headers = {name.lower(): value for name, value in recorded["headers"].items() if name.lower() != "accept-encoding"}
    headers.setdefault("content-type", "application/json")
    body = recorded["body"] if body is ... else body
    content = None if body is None else json.dumps(body)
    return client.request(recorded["method"], recorded["path"], headers=headers, content=content)


def objects(answer: httpx.Response) -> list[dict[str, typing.Any]]:
    """The objects of an answer, or of its stream."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [answer.json()]
    lines = [line for line in answer.text.splitlines() if line]
    events = lines[0].startswith("event: ")  # of /v1/responses
    assert events or lines[-1] == "data: [DONE]"
    values = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert not events or [line for line in lines if line[0] == "e"] == [f"event: {value['type']}" for value in values]
    return values


def check_types(value: dict[str, typing.Any]) -> None:
    """Every field has the type that OpenAI's library documents."""
    if value.get("object") == "text_completion":  # whose type lacks the nulls of streams, and of a prompt's first token
        value = json.loads(json.dumps(value))
        for choice in value["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            for name in ("token_logprobs", "top_logprobs"):
                if choice["logprobs"] and choice["logprobs"][name][0] is None:
                    del choice["logprobs"][name][0]
    if value.get("type", "").startswith("response."):
        event = EVENTS.validate_python(value)
        assert type(event).__name__.startswith("Response") and event.type == value["type"]
    if value.get("object") in OBJECTS:
        OBJECTS[value["object"]].model_validate(value, strict=True)


@pytest.mark.turns(2)
def test_every_recorded_request_is_answered_or_declined_by_name(server, qwen):
    outcomes = collections.Counter()
    for path in REQUESTS:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        answer = send(server, recorded)
        outcomes[answer.status_code] += 1
        where = path.stem
        if recorded["path"] in NO_ROUTE:
            assert answer.status_code == 404 and "/v1/chat/completions" in answer.json()["error"]["message"], where
        elif where in DECLINED:
            assert answer.status_code == 400 and DECLINED[where] in answer.json()["error"]["message"], answer.text
        else:
            assert answer.status_code == 200, (where, answer.text)
            for value in objects(answer):
                assert not value.get("error"), (where, value)
                check_types(value)
    assert outcomes == {200: 126, 400: 5, 404: 1} or not REQUESTS
    assert qwen.failure is None


CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 4}}
ANTHROPIC = {  # as the library anthropic 2.14.0 sends it
    "model": "served-model",
    "max_tokens": 3,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": "b"}, CALL]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "4"}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {}}}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["x"],
    "stream": True,
}
PATHS = {
    "/v1/messages": ANTHROPIC,
    "/v1/messages/count_tokens": {name: ANTHROPIC[name] for name in ("model", "system", "messages", "tools")},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "y"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/v1/score": {"model": "served-model", "text_1": "a", "text_2": ["b", "c"], "truncate_prompt_tokens": 200},
    "/v1/rerank": {"model": "served-model", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
    "/v1/completions": {"prompt": "a", "n": 1, "best_of": 2, "bad_words": ["b", " c d"], "max_tokens": 2},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}], "thinking_budget": 1, "enable_thinking": True,
        "bad_words": ["b"],
    },
}  # fmt: skip
MORE = [{"method": "POST", "path": path, "headers": {}, "body": body} for path, body in PATHS.items()]


def test_bodies_of_other_interfaces_are_answered(server, qwen):
    for request in MORE:
        answer = send(server, request)
        if "lora_adapter" in request["path"]:
            assert answer.status_code == 403 and "--adapter-folder" in answer.text
            continue
        assert answer.status_code == 200 and "error" not in answer.text, (request["path"], answer.text)
    assert qwen.failure is None


JUNK = [None, True, -1, 0, 2**31, 2**70, 1e308, "", "\ud800", "\x00", "a" * 3000, [], {}, [[]], [None], {"type": "x"}]


def mutated(value: typing.Any, draw: random.Random) -> typing.Any:
    """A JSON value with a part of it dropped, doubled, of another type, nested, or with text that is none."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        name = draw.choice(list(value))
        kind = draw.random()
        if kind < 0.15:
            return {key: entry for key, entry in value.items() if key != name}
        if kind < 0.25:
            return {**value, draw.choice(["x", name + "_", "schema", "strict"]): draw.choice(JUNK)}
        return {**value, name: mutated(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        i = draw.randrange(len(value))
        entry = mutated(value[i], draw)
        return draw.choice([[*value[:i], entry, *value[i + 1 :]], [*value, entry], value[:i], [entry, *value]])
    if isinstance(value, str) and draw.random() < 0.5:
        return draw.choice([value + "\udc00", value * 3, value[1:], [{"type": "text", "text": value}], {"text": value}])
    return draw.choice(JUNK)


@pytest.mark.parametrize("count", [40, pytest.param(1500, marks=pytest.mark.long)])
def test_a_mutated_request_is_never_a_500(server, qwen, count):
    recorded = [json.loads(path.read_text(encoding="utf-8")) for path in REQUESTS]
    recorded = [request for request in recorded if request["body"] and request["path"] not in NO_ROUTE] + MORE
    draw = random.Random(20261128)
    for _ in range(count if recorded else 0):
        request = draw.choice(recorded)
        body = request["body"]
        for _ in range(draw.randint(1, 3)):
            body = mutated(body, draw)
        answers_sensibly(server, qwen, request, body)


def answers_sensibly(server, qwen, request, body):
    answer = send(server, request, body)
    assert answer.status_code < 500, (answer.text, body)
    if answer.status_code == 200:
        assert all(not value.get("error") for value in objects(answer)), (answer.text, body)
    else:
        assert answer.json()["error"]["message"]
    assert qwen.failure is None


def typed(kind: typing.Any, draw: random.Random) -> typing.Any:
    """A random value of a type of OpenAI's library."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return draw.choice(arguments)
    if origin in (typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated):
        return typed(arguments[0], draw)
    if origin is typing.Union or isinstance(kind, types.UnionType):
        return typed(draw.choice(arguments), draw)
    if typing_extensions.is_typeddict(kind):
        hints = typing_extensions.get_type_hints(kind, include_extras=True)
        names = [name for name in hints if name in kind.__required_keys__ or draw.random() < 0.4]
        return {name: typed(hints[name], draw) for name in names}
    if origin in (list, collections.abc.Iterable, collections.abc.Sequence):
        return [typed(arguments[0], draw) for _ in range(draw.randint(1, 2))]
    if origin is dict:
        return {draw.choice(["a", "5", "name"]): typed(arguments[1], draw)}
    plain = {
        str: ["a", "", "user", "^a$", "{}", "😀", "start: /a/"],
        int: [0, 1, 2, -1, 20],
        float: [0.0, 0.5, 1, -2.0],
        bool: [True, False],
        object: [{"type": "object"}, "string", 1],
        type(None): [None],
    }
    return draw.choice(plain[kind])


@pytest.mark.turns(6)
@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.long)])
def test_every_field_of_the_api_is_answered_or_declined(server, qwen, count):
    kinds = {
        "/v1/chat/completions": (chat.completion_create_params.CompletionCreateParamsNonStreaming, "messages"),
        "/v1/completions": (openai.types.completion_create_params.CompletionCreateParamsNonStreaming, "prompt"),
        "/v1/embeddings": (openai.types.EmbeddingCreateParams, "input"),
        "/v1/responses": (openai.types.responses.response_create_params.ResponseCreateParamsNonStreaming, "input"),
    }
    draw = random.Random(20261128)
    for _ in range(count):
        path = draw.choice(list(kinds))
        kind, required = kinds[path]
        hints = typing_extensions.get_type_hints(kind, include_extras=True)
        names = draw.sample(sorted(hints.keys() - {"model", "stream"}), min(draw.randint(1, 4), len(hints) - 2))
        body = {required: [{"role": "user", "content": "a"}] if required == "messages" else "a"}
        body |= {name: typed(hints[name], draw) for name in names} | {"stream": draw.random() < 0.3}
        answers_sensibly(server, qwen, {"method": "POST", "path": path, "headers": {}}, body)
