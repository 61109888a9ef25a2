"""Interfaces besides OpenAI's, on Qwen3's vocab: Anthropic's messages by its library, scores and rankings, names."""

import json
from typing import Any

import anthropic
import httpx
import numpy as np
import pytest
import torch
import transformers

import world
from serving import serving, write_encoder
from vishwamai.inference import Embedder, plan_load
from vishwamai.inference.server.scores import PAIR, TASK
from vishwamai.inference.server.settings import Settings
from vishwamai.models import SentenceEncoder, read_tokenizer

USER: Any = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [4]}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"name": "add", "description": "d", "input_schema": SCHEMA}]


@pytest.fixture(scope="module")
def path():
    return world.tiny("qwen3")


@pytest.fixture(scope="module")
def address(path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    write_encoder(folder)
    embed = Embedder.of_encoder(SentenceEncoder.from_pretrained(folder))
    planned = plan_load(path, dtype="float32", max_sequences=4, max_tokens=64, max_length=512)
    settings = Settings(
        "qwen", keys=("secret",), defaults={"temperature": 0.0}, aliases=("claude-x",), encoder="encoder"
    )
    with serving(planned.engine(compile="lazy"), settings, embed) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    return anthropic.Anthropic(base_url=address, api_key="secret", max_retries=0)


def test_messages_are_those_of_chats(client, address):
    answer = client.messages.create(model="claude-x", messages=USER, system="Be brief.", max_tokens=8)
    assert (answer.type, answer.role, answer.model, answer.stop_reason) == (
        "message",
        "assistant",
        "claude-x",
        "max_tokens",
    )
    chat = {"messages": [{"role": "system", "content": "Be brief."}, *USER], "max_tokens": 8}
    headers = {"Authorization": "Bearer secret"}
    same = httpx.post(f"{address}/v1/chat/completions", json=chat, headers=headers, timeout=60).json()
    assert answer.content[0].text == same["choices"][0]["message"]["content"]
    usage = answer.usage
    prompt = usage.input_tokens + usage.cache_read_input_tokens
    assert (prompt, usage.output_tokens) == (same["usage"]["prompt_tokens"], 8)
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    with client.messages.stream(model="qwen", messages=parts, system=blocks, max_tokens=8) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == answer.content[0].text and message.stop_reason == "max_tokens" and message.usage.output_tokens == 8
    assert client.messages.count_tokens(model="qwen", messages=USER, system="Be brief.").input_tokens == prompt


@pytest.mark.turns(3)
@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_their_results_come_back(client, stream):
    ask = {"model": "qwen", "messages": USER, "tools": TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 80}
    if stream:
        with client.messages.stream(**ask) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**ask)
    (block,) = answer.content
    assert (block.type, block.name, block.input, answer.stop_reason) == ("tool_use", "add", {"a": 4}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "VALUE"}]}
    turns = [
        *USER,
        {"role": "assistant", "content": [block.model_dump(exclude={"caller"})]},
        {"role": "user", "content": [result]},
    ]
    counts = [client.messages.count_tokens(model="qwen", messages=turns[:n], tools=TOOLS).input_tokens for n in (1, 3)]
    assert counts[1] > counts[0] + 20
    assert client.messages.create(**{**ask, "messages": turns, "tool_choice": {"type": "auto"}, "max_tokens": 2})


def test_a_last_assistant_message_is_continued_and_stops_are_named(client):
    turns = [*USER, {"role": "assistant", "content": "The"}]
    shorter = client.messages.count_tokens(model="qwen", messages=USER).input_tokens
    assert client.messages.count_tokens(model="qwen", messages=turns).input_tokens > shorter
    text = client.messages.create(model="qwen", messages=turns, max_tokens=8).content[0].text
    stop = text[3:5]
    ended = client.messages.create(model="qwen", messages=turns, max_tokens=8, stop_sequences=[stop])
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", stop)
    assert ended.content[0].text == text[: text.index(stop)]


def test_errors_have_the_form_of_anthropic(client, address):
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\].*'image'") as caught:
        client.messages.create(model="qwen", messages=[{"role": "user", "content": [image]}], max_tokens=2)
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", messages=USER, max_tokens=2)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.post("/v1/messages", body={"model": "qwen", "messages": USER}, cast_to=object)
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=address, api_key="wrong", max_retries=0).messages.create(
            model="qwen", messages=USER, max_tokens=2
        )


@pytest.mark.turns(3)
def test_a_decoder_scores_pairs_as_transformers_does(address, path):
    headers = {"Authorization": "Bearer secret"}
    texts = ["Paris is the capital of France.", "Bread is made of flour {and water}."]
    ask = {"model": "qwen", "query": "What is the capital?", "documents": [texts[0], {"text": texts[1]}]}
    answer = httpx.post(f"{address}/v1/rerank", json=ask, headers=headers, timeout=120).json()
    tokenizer = read_tokenizer(path)
    peer = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    words = [tokenizer.encode(word, add_special=False)[0] for word in ("yes", "no")]
    expected, count = [], 0
    for text in texts:
        ids = tokenizer.encode(PAIR.format(task=TASK, query=ask["query"], document=text), add_special=False)
        with torch.no_grad():
            logits = peer(torch.tensor([ids])).logits[0, -1, words]
        expected.append(torch.softmax(logits, 0)[0].item())
        count += len(ids)
    found = {result["index"]: result["relevance_score"] for result in answer["results"]}
    np.testing.assert_allclose([found[0], found[1]], expected, atol=1e-5)
    assert answer["usage"]["total_tokens"] == count
    assert [result["index"] for result in answer["results"]] == sorted(found, key=lambda i: -found[i])
    assert answer["results"][0]["document"]["text"] in texts
    top = httpx.post(
        f"{address}/rerank", json={**ask, "top_n": 1, "return_documents": False}, headers=headers, timeout=60
    )
    assert top.json()["results"] == [{name: answer["results"][0][name] for name in ("index", "relevance_score")}]
    body = {"model": "qwen", "text_1": ask["query"], "text_2": texts}
    scores = httpx.post(f"{address}/v1/score", json=body, headers=headers, timeout=60).json()["data"]
    np.testing.assert_allclose([entry["score"] for entry in scores], expected, atol=1e-5)


def test_an_encoder_scores_pairs_by_the_cosine(address):
    headers = {"Authorization": "Bearer secret"}
    body = {"model": "encoder", "text_1": ["a b", "c"], "text_2": ["a b", "a b"]}
    data = httpx.post(f"{address}/v1/score", json=body, headers=headers, timeout=60).json()["data"]
    vectors = httpx.post(f"{address}/v1/embeddings", json={"model": "encoder", "input": ["a b", "c"]}, headers=headers)
    first, second = (np.array(entry["embedding"]) for entry in vectors.json()["data"])
    expected = [1.0, first @ second / np.linalg.norm(first) / np.linalg.norm(second)]
    np.testing.assert_allclose([entry["score"] for entry in data], expected, atol=1e-5)
    for wrong, status in (({"text_2": ["a"] * 3}, 400), ({"model": "other"}, 404), ({"text_2": "a " * 50}, 400)):
        answer = httpx.post(f"{address}/v1/score", json={**body, **wrong}, headers=headers, timeout=60)
        assert answer.status_code == status, answer.text


def test_names_keys_and_reasons_of_the_end(address):
    assert httpx.post(f"{address}/score", json={}).status_code == 401
    headers = {"x-api-key": "secret"}
    models = httpx.get(f"{address}/v1/models", headers=headers).json()["data"]
    assert {model["id"]: model.get("root") for model in models} == {"qwen": "qwen", "claude-x": "qwen", "encoder": None}
    ask = {"model": "claude-x", "prompt": "a", "max_tokens": 4, "return_token_ids": True}
    answer = httpx.post(f"{address}/v1/completions", json=ask, headers=headers, timeout=60).json()
    assert answer["model"] == "claude-x" and "stop_reason" not in answer["choices"][0]
    token = answer["choices"][0]["token_ids"][1]
    answer = httpx.post(
        f"{address}/v1/completions", json={**ask, "stop_token_ids": [token]}, headers=headers, timeout=60
    )
    assert answer.json()["choices"][0]["stop_reason"] == token
    lines = httpx.post(
        f"{address}/v1/completions",
        json={**ask, "stop_token_ids": [token], "stream": True},
        headers=headers,
        timeout=60,
    )
    chunks = [json.loads(line[6:]) for line in lines.text.splitlines() if line.startswith("data: {")]
    assert chunks[-1]["choices"][0]["stop_reason"] == token


@pytest.mark.turns(3)
def test_the_best_answers_of_several(address):
    ask = {"prompt": "The", "temperature": 1.0, "seed": 4, "max_tokens": 5, "logprobs": 0, "ignore_eos": True}
    headers = {"x-api-key": "secret"}
    every = httpx.post(f"{address}/v1/completions", json={**ask, "n": 4}, headers=headers, timeout=60).json()
    best = httpx.post(
        f"{address}/v1/completions", json={**ask, "n": 2, "best_of": 4}, headers=headers, timeout=60
    ).json()
    means = {choice["text"]: np.mean(choice["logprobs"]["token_logprobs"]) for choice in every["choices"]}
    assert [choice["text"] for choice in best["choices"]] == sorted(means, key=lambda text: -means[text])[:2]
    assert [choice["index"] for choice in best["choices"]] == [0, 1] and best["usage"]["completion_tokens"] == 20
    for wrong in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}):
        answer = httpx.post(f"{address}/v1/completions", json={**ask, **wrong}, headers=headers, timeout=60)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "best_of"


def test_bad_words_are_not_written(address, path):
    ask = {"prompt": "The", "temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    headers = {"x-api-key": "secret"}
    tokenizer = read_tokenizer(path)

    def written(words, **options):
        body = {**ask, "bad_words": words, **options}
        answer = httpx.post(f"{address}/v1/completions", json=body, headers=headers, timeout=60).json()
        return answer["choices"][0]["token_ids"]

    free = written([])
    pair = tokenizer.decode(free[:2])
    for word in (
        tokenizer.decode(free[:1]),
        pair if tokenizer.encode(pair) == free[:2] else tokenizer.decode(free[1:2]),
    ):
        assert word.strip() and word not in tokenizer.decode(written([word]))
    guided = written(["yes"], regex="yes|no", ignore_eos=False, max_tokens=4)
    assert tokenizer.decode(guided).startswith("no")
