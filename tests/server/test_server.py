"""The server, through OpenAI's own client on a real port."""

import json
import runpy
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import openai
import pytest

from serving import serving, write_encoder, write_model
from vishwamai.inference import Embedder, Limits, Sampling, plan_load
from vishwamai.inference.server.service import Service, Settings
from vishwamai.models import Pooling, SentenceEncoder
from vishwamai.models.encoder_tensors import stored_bytes
from vishwamai.models.shards import read_index

SETTINGS = Settings("tiny", max_queue=3, max_body=20_000, defaults={"temperature": 0.0})
MESSAGES: Any = [{"role": "user", "content": "Grüße"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes")
    write_model(path)
    return path


@pytest.fixture(scope="module")
def engine(path):
    return plan_load(path, dtype="float32", max_sequences=2, max_tokens=32, max_length=400, page_size=8).engine()


@pytest.fixture(scope="module")
def address(engine):
    with serving(engine, SETTINGS) as found:
        yield found


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


def wait_until_idle(engine):
    end = time.monotonic() + 30
    while not engine.idle:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert engine.scheduler.pool.available == engine.scheduler.pool.num_pages


def test_completions_are_the_engines_own(client, engine):
    expected = engine.generate(["Hello"], Sampling(max_new_tokens=12, ignore_eos=True))[0]
    options = {"ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=12, extra_body=options, logprobs=2)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (expected.text, "length")
    assert choice.model_extra["token_ids"] == list(expected.token_ids)
    assert len(choice.logprobs.tokens) == len(choice.logprobs.top_logprobs) == 12
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)
    both = client.completions.create(model="tiny", prompt=[[5, 6], [7]], n=2, max_tokens=3, temperature=1, seed=1)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]


def test_a_stream_has_the_same_text_in_whole_characters(client, engine):
    ask = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "seed": 3, "temperature": 1.0}
    whole = client.chat.completions.create(**ask)
    parts = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert parts[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert parts[-1].usage.prompt_tokens_details.cached_tokens == 16  # two of the prompt's pages
    assert [part.choices[0].delta.role for part in parts if part.choices][0] == "assistant"


def test_a_schema_is_followed(client):
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2, 3]}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format=form, temperature=1.0, seed=2, max_tokens=100
    )
    found = json.loads(answer.choices[0].message.content)
    assert set(found) == {"n", "ok"} and answer.choices[0].finish_reason == "stop"
    answer = client.completions.create(model="tiny", prompt="a", max_tokens=20, extra_body={"regex": "[ab]{3}c"})
    assert answer.choices[0].text[3] == "c" and len(answer.choices[0].text) == 4


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object", "schema": {"const": "ab"}}},
        {"response_format": {"type": "json_schema", "schema": {"const": "ab"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "ab"}, "strict": None}}},
        {"json_schema": {"const": "ab"}},
        {"grammar": 'root ::= quote "ab" quote\nquote ::= "\\""'},
        {"structured_outputs": {"grammar": 'root ::= "\\"ab\\""', "json": None, "choice": None}},
    ],
)
def test_forms_of_llama_cpp(address, body):
    ask = {"messages": MESSAGES, "max_tokens": 20, "top_p": 0}
    answer = httpx.post(f"{address}/v1/chat/completions", json=ask | body).json()
    assert answer["choices"][0]["message"]["content"] == '"ab"'


def test_the_example_of_the_client(address, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_BASE_URL", f"{address}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "openai_client.py"))
    said = capsys.readouterr().out
    assert "model: tiny" in said and "as JSON: {" in said and "declined: `temperature`" in said
    assert "vishwamai_" in said


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called(client, stream):
    parameters = {
        "type": "object",
        "properties": {"x": {"enum": [4, 5]}},
        "required": ["x"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "add", "description": "d", "parameters": parameters}}]
    ask = {"model": "tiny", "messages": MESSAGES, "tools": tools, "tool_choice": "required", "max_tokens": 100}
    if stream:
        parts = list(client.chat.completions.create(**ask, stream=True))
        calls = [call for part in parts for call in part.choices[0].delta.tool_calls or ()]
        finish = parts[-1].choices[0].finish_reason
        assert not any(part.choices[0].delta.content for part in parts)
    else:
        choice = client.chat.completions.create(**ask).choices[0]
        calls, finish = choice.message.tool_calls, choice.finish_reason
    assert ([call.function.name for call in calls if call.id], finish) == (["add"], "tool_calls")
    assert json.loads("".join(call.function.arguments for call in calls))["x"] in (4, 5)


def test_requests_that_cannot_be_served_are_named(client, engine):
    def fails(status, text, **options):
        ask = {"model": "tiny", "prompt": "a", **options}
        with pytest.raises(openai.APIStatusError, match=text) as error:
            client.completions.create(**ask)
        assert error.value.status_code == status
        assert error.value.response.json()["error"]["message"]

    fails(404, "'other' is not served", model="other")
    fails(400, "`temperature`", temperature=-1)
    fails(400, "`stop` contains an empty text", stop="")
    fails(400, "`prompt`: Input should be a valid string; List should have at least 1 item", prompt=[])
    fails(400, "token id 262; ids are 0 to 261", prompt=[262])
    fails(400, "at most 400 tokens", prompt="a" * 400)
    fails(400, "`logit_bias`", logit_bias={"x": 1})
    fails(400, "regex is not valid", extra_body={"regex": "(["})
    fails(400, "lark is not valid", extra_body={"grammar": "start: nowhere"})
    fails(400, "asks for 128 answers", n=128)
    fails(413, "longer than 20000 bytes", prompt="a" * 20_001)
    with pytest.raises(openai.BadRequestError, match="no encoder"):
        client.embeddings.create(model="tiny", input="text")
    with pytest.raises(openai.BadRequestError, match="tool"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, tool_choice="required")
    assert engine.failure is None
    wait_until_idle(engine)


def test_bodies_that_are_not_json(address):
    for body in (b"", b"{", b'{"prompt": NaN}', b"\xff", b"[" * 10_000, b"null"):
        answer = httpx.post(f"{address}/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(f"{address}/v1/nowhere").status_code == 404
    assert httpx.get(f"{address}/v1/completions").status_code == 405


def test_a_client_that_leaves_frees_its_pages(address, engine):
    body = {"prompt": "leave", "max_tokens": 390, "ignore_eos": True, "temperature": 1}
    before = engine.statistics.finished.get("cancelled", 0)
    with httpx.stream("POST", f"{address}/v1/completions", json={**body, "stream": True}) as answer:
        next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{address}/v1/completions", json={**body, "n": 2}, timeout=0.05)
    wait_until_idle(engine)
    assert engine.statistics.finished["cancelled"] > before


@pytest.mark.turns(3)
def test_a_full_queue_says_when_to_come_again(address, client, engine):
    slow = {"model": "tiny", "prompt": "x", "max_tokens": 390, "n": 5, "temperature": 1.0}
    thread = threading.Thread(target=lambda: client.completions.create(**slow, extra_body={"ignore_eos": True}))
    thread.start()
    while engine.unfinished < 5 and thread.is_alive():
        time.sleep(0.001)
    answer = httpx.post(f"{address}/v1/completions", json={"prompt": "x"})
    thread.join()
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    wait_until_idle(engine)


def test_what_operators_read(address, client, engine):
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    assert httpx.get(f"{address}/ready").status_code == 200
    assert [model.id for model in client.models.list()] == ["tiny"]
    lines = dict(line.rsplit(" ", 1) for line in httpx.get(f"{address}/metrics").text.splitlines() if line[0] != "#")
    assert float(lines["vishwamai_new_tokens_total"]) == engine.statistics.new_tokens > 0
    assert float(lines["vishwamai_cached_tokens_total"]) == engine.statistics.cached_tokens > 0
    assert float(lines["vishwamai_pages"]) == engine.scheduler.pool.num_pages
    assert float(lines["vishwamai_first_token_seconds_count"]) > 0
    page = httpx.get(address)
    assert page.headers["content-type"].startswith("text/html") and "default-src 'none'" in str(page.headers)


@pytest.mark.turns(6)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_failed_says_so_everywhere(path, monkeypatch):
    planned = plan_load(path, dtype="float32", max_sequences=1, max_tokens=32, max_length=64, page_size=8)
    engine = planned.engine(compile="lazy")

    def fails():
        raise RuntimeError("the device is lost")

    failure = "RuntimeError: the device is lost"
    with serving(engine, SETTINGS) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices
        assert httpx.get(f"{address}/ready").status_code == httpx.get(f"{address}/health").status_code == 200
        monkeypatch.setattr(engine.core, "step", fails)
        with pytest.raises(openai.InternalServerError, match="the engine could not go on: " + failure) as error:
            client.completions.create(model="tiny", prompt="a")
        assert error.value.status_code == 500
        ready = httpx.get(f"{address}/ready")
        assert (ready.status_code, ready.json(), ready.headers["retry-after"]) == (503, {"ready": False}, "1")
        health = httpx.get(f"{address}/health")
        assert (health.status_code, health.json()) == (503, {"status": "failed"})
        asks = {
            "completions": lambda **more: client.completions.create(model="tiny", prompt="a", **more),
            "chat": lambda **more: client.chat.completions.create(model="tiny", messages=MESSAGES, **more),
        }

        def unavailable(ask, **more):
            with pytest.raises(openai.InternalServerError) as error:
                ask(**more)
            return error.value.response

        for ask in asks.values():
            answer = unavailable(ask, stream=True)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
            assert answer.json()["error"] == {
                "message": f"the engine has stopped: {failure}.",
                "type": "unavailable_error",
                "param": None,
                "code": None,
            }
        # It fails between the check of a request and its start.
        monkeypatch.setattr(Service, "check_room", lambda self, answers=1: None)
        answer = unavailable(asks["completions"])
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
        assert failure in answer.json()["error"]["message"]


def test_keys_and_embeddings(engine):
    def embed(texts, truncate):
        return np.arange(3 * len(texts)).reshape(-1, 3) / 2, 7

    with serving(engine, Settings("tiny", keys=("first", "second")), embed) as address:
        assert httpx.get(f"{address}/v1/models").status_code == 401
        assert httpx.get(f"{address}/metrics", headers={"Authorization": "Bearer third"}).status_code == 401
        assert httpx.get(f"{address}/health").status_code == 200
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="second", max_retries=0)
        assert [m.id for m in client.models.list()] == ["tiny"]
        found = client.embeddings.create(model="tiny", input=["a", "b"])
        assert found.data[1].embedding == [1.5, 2.0, 2.5] and found.usage.total_tokens == 7


def test_limits_are_the_engines(engine):
    assert engine.limits == Limits(max_sequences=2, max_tokens=32, max_length=400, page_size=8)


@pytest.mark.turns(3)
def test_an_encoder_alone(tmp_path):
    write_encoder(tmp_path)
    encoder = SentenceEncoder.from_pretrained(tmp_path)
    held = sum(array.nbytes for array in jax.tree.leaves(encoder.parameters))
    assert stored_bytes(read_index(tmp_path), 4) == held
    with serving(None, Settings("vectors"), Embedder.of_encoder(encoder)) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        texts = ["a b", "b a c " * 5, "c"]
        for form in ("float", openai.omit):  # by default the client asks for base64 and decodes it
            found = client.embeddings.create(model="vectors", input=texts, encoding_format=form)
            vectors = np.array([one.embedding for one in found.data], np.float32)
            np.testing.assert_allclose(vectors, encoder.embed(texts), atol=1e-6)
        assert found.usage.total_tokens == sum(map(len, encoder.ids(texts)))
        by_ids = client.embeddings.create(model="vectors", input=encoder.ids(texts)[:2])
        np.testing.assert_allclose(by_ids.data[1].embedding, vectors[1], atol=1e-6)
        cut = client.embeddings.create(model="vectors", input="a " * 90, extra_body={"truncate_prompt_tokens": -1})
        assert cut.usage.total_tokens == encoder.max_tokens == 40
        for wrong, text in (("a " * 90, "92 tokens"), ([7, 99], "token id 99"), ([[]], "at least 1")):
            with pytest.raises(openai.BadRequestError, match=text):
                client.embeddings.create(model="vectors", input=wrong)
        with pytest.raises(openai.NotFoundError, match="'other'"):
            client.embeddings.create(model="other", input="a")
        with pytest.raises(openai.BadRequestError, match="is an encoder"):
            client.completions.create(model="vectors", prompt="a")
        assert [one.id for one in client.models.list()] == ["vectors"]
        assert httpx.get(f"{address}/ready").status_code == httpx.get(f"{address}/metrics").status_code == 200


def test_vectors_of_a_decoder(engine):
    model, tokenizer = engine.model, engine.tokenizer
    text = "Grüße"
    states = np.asarray(jax.jit(lambda m, ids: m(ids))(model, np.array([tokenizer.encode(text)])), np.float64)[0]
    for mode, expected in (("mean", states.mean(0)), ("last", states[-1])):
        found, tokens = Embedder.of_decoder(model, tokenizer, Pooling(mode), 64)([text])
        assert tokens == len(text.encode())
        np.testing.assert_allclose(found[0], expected / np.linalg.norm(expected), atol=1e-5)
