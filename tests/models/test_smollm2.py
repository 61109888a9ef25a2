"""SmolLM2-135M-Instruct, real weights with their own tokenizer and template: answers that make sense, by every door."""

import json

import httpx
import jsonschema
import openai
import pytest

import world
from serving import serving
from vishwamai.inference import plan_load
from vishwamai.inference.server.settings import Settings

pytestmark = pytest.mark.long

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "capital": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
    },
    "required": ["capital", "population"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module", params=[None, "int8"])
def address(request):
    planned = plan_load(world.smollm2(), quantize=request.param, max_sequences=2, max_tokens=128, max_length=512)
    with serving(planned.engine(compile="lazy"), Settings("smollm2", defaults={"temperature": 0.0})) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


def test_an_answer_makes_sense(client):
    reply = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=24)
    assert "Paris" in reply.choices[0].message.content
    stream = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=24, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == reply.choices[0].message.content


def test_json_follows_the_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA, "strict": True}}
    reply = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=96, response_format=form)
    jsonschema.validate(json.loads(reply.choices[0].message.content), SCHEMA)


def test_a_forced_call_has_its_arguments(client):
    reply = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "How is the weather in Paris?"}],
        max_tokens=64,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    (call,) = reply.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), TOOL["function"]["parameters"])


def test_the_chat_page_is_served(address):
    page = httpx.get(address)
    assert page.status_code == 200 and "<textarea" in page.text
