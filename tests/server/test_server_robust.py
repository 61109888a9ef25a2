"""The server under requests that make no sense, and under clients that come and go."""

import asyncio
import itertools
import os
import random
import resource
import time

import httpx
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from serving import serving, write_model
from vishwamai.inference import Sampling, plan_load
from vishwamai.inference.server import schema
from vishwamai.inference.server.service import Settings

# Tools are rendered, and the prompt stays short.
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools[0].function.name[:24] }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes")
    write_model(path, TEMPLATE)
    return plan_load(path, dtype="float32", max_sequences=4, max_tokens=32, max_length=96, page_size=8).engine()


@pytest.fixture(scope="module")
def client(engine):
    with serving(engine, Settings("tiny", max_queue=1000)) as address, httpx.Client(base_url=address) as found:
        yield found


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 1e308, "", "tiny", "</s>", "\x00", "😀", "auto", "user"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["type", "name", "schema", "function", "role", "content", "x"]), inner, max_size=3
        ),
    ),
    max_leaves=6,
)
patterns = st.sampled_from(["(", "[ab]{1000000}", "(a*)*b", "start: start", "\\d+", 'start: "a"*', "a" * 3000])
texts = st.sampled_from(
    ['"', '\\"', "\n", "</tool_call>", "😀", "[ab]{1000000}", "(a*)*b", "{{ x }}", "%json", "\x00", ""]
)
parameters = st.one_of(
    st.sampled_from(
        [
            {"type": "object"},
            {"type": "nonsense"},
            {"$ref": "#"},
            {"$ref": "#/$defs/none"},
            {"$ref": "https://example.org/schema"},
            {"enum": [f"value {i}" for i in range(3000)]},
            {"x-guidance": {"whitespace_flexible": "x"}},
        ]
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("object"),
            "properties": st.dictionaries(
                texts,
                st.one_of(
                    st.fixed_dictionaries({"description": texts}),
                    st.fixed_dictionaries({"type": st.just("string"), "pattern": texts}),
                    st.fixed_dictionaries({"const": texts}),
                ),
                max_size=2,
            ),
        },
        optional={"required": st.lists(texts, max_size=2), "additionalProperties": st.booleans()},
    ),
)
functions = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "f", "a.b-c", "\n", "a b"])},
    optional={"description": texts, "parameters": st.one_of(parameters, parameters, values)},
)
calls = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": functions}), max_size=2)
offers = st.fixed_dictionaries(
    {
        "messages": st.just([{"role": "user", "content": "a"}]),
        "tools": calls,
        "tool_choice": st.sampled_from(["auto", "required", {"type": "function", "function": {"name": "f"}}]),
        "max_tokens": st.sampled_from([2, 40]),
    }
)
schemas = st.sampled_from(
    [
        {"type": "object"},
        {"$ref": "#"},
        {"type": "nonsense"},
        {"enum": []},
        {"pattern": "("},
        {"minLength": -1},
        {"not": {}},
    ]
)


def bodies(kind):
    """Bodies with the right keys, whose values are right, wrong or absurd."""
    fields = dict.fromkeys(kind.model_fields, values)
    fields |= {"regex": st.one_of(patterns, values), "grammar": st.one_of(patterns, values)}
    fields |= {"max_tokens": st.one_of(st.just(2), values), "n": st.one_of(st.just(1), values)}
    if kind is schema.Chat:
        fields["tools"] = st.one_of(calls, values)
        formed = st.fixed_dictionaries({"name": st.just("x"), "schema": schemas})
        fields["response_format"] = st.one_of(
            st.fixed_dictionaries({"type": st.just("json_schema"), "json_schema": formed}), values
        )
        required = {"messages": st.one_of(st.just([{"role": "user", "content": "a"}]), values)}
    else:
        required = {"prompt": st.one_of(st.just("a"), values)}
    fields = {name: value for name, value in fields.items() if name not in required}
    chosen = st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({**required, **{name: fields[name] for name in names}}))


def answers_sensibly(client, engine, path, body):
    answer = client.post(path, json=body, timeout=60)
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, (answer.status_code, answer.text, body)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    assert engine.failure is None


REQUESTS = st.one_of(
    st.tuples(st.just("/v1/completions"), bodies(schema.Completion)),
    st.tuples(st.just("/v1/chat/completions"), bodies(schema.Chat)),
    st.tuples(st.just("/v1/chat/completions"), offers),
    st.tuples(st.just("/v1/embeddings"), values),
)
checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@given(request=REQUESTS)
@settings(max_examples=50, suppress_health_check=checks)
def test_absurd_requests(client, engine, request):
    answers_sensibly(client, engine, *request)


OBJECT = {"type": "object", "additionalProperties": False}
NAMED = {
    "a parameter's description alone": ({**OBJECT, "properties": {"x": {"description": 'says "\n😀'}}}, 200),
    "no parameters": (None, 200),
    "no properties": (OBJECT, 200),
    "the end of a call in a value": ({"const": {"x": "</tool_call>"}}, 200),
    "an unknown type": ({"type": "nonsense"}, 400),
    "a broken pattern": ({**OBJECT, "properties": {"x": {"type": "string", "pattern": "("}}, "required": ["x"]}, 400),
    "a reference to nothing": ({"$ref": "#/$defs/none"}, 400),
}


@pytest.mark.parametrize("name", NAMED)
def test_tools_of_odd_forms(client, engine, name):
    parameters, status = NAMED[name]
    function = {"name": "f", "description": "</tool_call>", "parameters": parameters}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": function}]}
    for choice, expected in (("auto", 200), ("required", status)):
        answer = client.post("/v1/chat/completions", json={**body, "tool_choice": choice, "max_tokens": 4}, timeout=60)
        assert answer.status_code == expected, answer.text
    if status == 400:
        assert "is not valid" in answer.json()["error"]["message"]
    assert engine.failure is None


@pytest.mark.soak
@given(request=REQUESTS)
@settings(max_examples=10_000, suppress_health_check=checks, deadline=None)
def test_ten_thousand_absurd_requests(client, engine, request):
    answers_sensibly(client, engine, *request)


async def visit(client, number, answers):
    """A client that asks, and sometimes leaves or breaks off."""
    draw = random.Random(number)
    prompt = [draw.randrange(3, 259) for _ in range(draw.randint(1, 60))]
    options = {"max_tokens": draw.randint(1, 30), "temperature": draw.choice([0, 1.0]), "seed": number % 7}
    body = {"prompt": prompt, **options, "ignore_eos": True, "return_token_ids": True}
    kind = draw.choice(["whole", "whole", "leave", "late"])
    if kind == "leave":
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            async for _ in answer.aiter_lines():
                break
    elif kind == "late":
        try:
            await client.post("/v1/completions", json=body, timeout=draw.uniform(0.001, 0.2))
        except httpx.TimeoutException:
            pass
    else:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        answers.append((prompt, options, answer.json()["choices"][0]["token_ids"]))


def crowd(address, engine, visitors, at_once):
    """Answers equal those of their seeds offline; when all have gone, nothing is held."""
    answers = []
    numbers = iter(visitors)  # each client takes the next when it is done with one

    async def run():
        async with httpx.AsyncClient(
            base_url=address, timeout=120, limits=httpx.Limits(max_connections=at_once)
        ) as client:

            async def one():
                for number in numbers:
                    await visit(client, number, answers)

            await asyncio.gather(*(one() for _ in range(at_once)))

    asyncio.run(run())
    expected = engine.generate(
        [prompt for prompt, _, _ in answers],
        [
            Sampling(o["max_tokens"], temperature=o["temperature"], seed=o["seed"], ignore_eos=True)
            for _, o, _ in answers
        ],
    )
    assert answers and [list(answer.token_ids) for answer in expected] == [tokens for _, _, tokens in answers]
    assert engine.idle and engine.scheduler.pool.available == engine.scheduler.pool.num_pages


def test_a_crowd(client, engine):
    crowd(str(client.base_url), engine, range(40), at_once=16)


@pytest.mark.soak
def test_a_crowd_for_long(client, engine):
    """64 clients at once for ten minutes, or for VISHWAMAI_CROWD_MINUTES. Their answers are compared ten times on the
    way, which counts as no part of that time, so that it is not the answers that take the memory.
    """
    seconds = 60 * float(os.environ.get("VISHWAMAI_CROWD_MINUTES", "10"))
    numbers, peaks = itertools.count(), []
    for _ in range(10):
        end = time.monotonic() + seconds / 10
        visitors = itertools.takewhile(lambda _, end=end: time.monotonic() < end, numbers)
        crowd(str(client.base_url), engine, visitors, at_once=64)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    print(f"{next(numbers)} visits in {seconds:.0f} s; KiB resident at most, after each tenth: {peaks}")
    assert peaks[-1] - peaks[0] < 50_000
