"""The server under requests of strangers: mutations of recorded ones, next to an answer that nobody may hold up.

The application is called in this process, without sockets. A grammar is compiled in its own process, as in `serve`.
`test_server_world.py` has a sample of such bodies in the default suite.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import resource
import time
import traceback
from typing import Any

import httpx
import pytest

import world
from vishwamai.inference import Embedder, Sampling, plan_load
from vishwamai.inference.server.app import make_app
from vishwamai.inference.server.settings import Settings
from vishwamai.models import Pooling

REQUESTS = world.files("requests", "*.json")
STATUSES = {*range(200, 300), *range(400, 500), 503}
MEMORY = 1 << 30
"""Bytes by which the process may grow: 512 MiB of compiled grammars, and the bodies."""

COUNT, SECONDS = 10_000, 180
"""Bodies, and the time after which no further one is sent; how many were is printed."""

JUNK: list[Any] = [
    None, True, -1, 0, 1.5, 2**31, 2**70, 1e308, "", "\x00", "😀" * 500, "a" * 20_000, "\ud800", [], {}, [[]], [None],
    {"type": "x"}, "start: /a/", {"type": "object"}, {"$ref": "#"}, {"enum": [f"value {i}" for i in range(3000)]},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all parts of a JSON value but itself."""
    if len(path) > 30:
        return []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, part in items for place in [(*path, key), *places(part, (*path, key))]]


def mutated(draw: random.Random, body: Any) -> Any:
    """A body with a part dropped, doubled, of another type, nested, huge, or with odd text."""
    body = copy.deepcopy(body)
    for _ in range(draw.randint(1, 3)):
        found = places(body)
        if not found:
            return copy.deepcopy(draw.choice(JUNK))
        *path, key = draw.choice(found)
        parent = body
        for name in path:
            parent = parent[name]
        part, kind = parent[key], draw.choice(["drop", "double", "junk", "nest", "huge", "name", "unicode"])
        if kind == "drop":
            del parent[key]
        elif kind == "double" and isinstance(parent, list):
            parent += copy.deepcopy(parent)
        elif kind == "nest":
            for _ in range(draw.choice([1, 3, 80])):
                part = draw.choice([[part], {"a": part}])
            parent[key] = part
        elif kind == "huge" and isinstance(part, str | list):
            parent[key] = part * draw.choice([10, 500]) if len(part) < 1000 else part
        elif kind == "name" and isinstance(parent, dict):
            parent[str(key) + draw.choice(["", "_", "\x00", "é"])] = copy.deepcopy(draw.choice(JUNK))
        elif kind == "unicode" and isinstance(part, str):
            parent[key] = part[: len(part) // 2] + draw.choice(["\u202e", "\x7f", "e\u0301", "\ufeff", "𝔘"]) + part
        else:
            parent[key] = copy.deepcopy(draw.choice(JUNK))
    return body


def content(draw: random.Random, body: Any) -> bytes:
    """The bytes of a body, which are not always JSON."""
    text = json.dumps(body).encode()
    kind = draw.random()
    if kind < 0.02:
        return text[: draw.randrange(len(text))]
    if kind < 0.03:
        return b"[" * draw.choice([10, 100_000])
    if kind < 0.04:
        return text.replace(b"e", b"\xff", 1)
    return text


def check(answer: httpx.Response, sent: bytes) -> None:
    assert answer.status_code in STATUSES, (answer.status_code, answer.text[:500], sent[:2000])

    def finite(name: str) -> Any:
        raise AssertionError(f"{name} in an answer to {sent[:2000]!r}")

    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    else:
        lines = [answer.text]
    for line in lines:
        value = json.loads(line, parse_constant=finite)
        message = (value.get("error") or {}).get("message") if isinstance(value, dict) else None
        assert message is None or (len(message) < 3000 and "/tmp/" not in message), (message, sent[:2000])
        assert answer.status_code == 200 or message


@pytest.fixture(scope="module")
def engine():
    path = world.tiny("qwen3", max_position_embeddings=8192)
    return plan_load(path, dtype="float32", max_sequences=8, max_tokens=256, max_length=4096).engine(compile="lazy")


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


async def fuzz(engine: Any, count: int, seed: int) -> dict[str, Any]:
    """Sends bodies, eight at once, next to answers whose tokens are timed; what came of it."""
    embed = Embedder.of_decoder(engine.model, engine.tokenizer, Pooling("last"), 64)
    app = make_app(engine, Settings("served-model", max_new_tokens=2), embed)
    recorded = [json.loads(path.read_text(encoding="utf-8")) for path in REQUESTS]
    recorded = [request for request in recorded if request["body"]]
    statuses: dict[int, int] = {}
    pauses: list[float] = []
    answers: set[tuple[int, ...]] = set()
    numbers, memory, done = iter(range(count)), [], asyncio.Event()
    faults: list[str] = []
    end = time.monotonic() + SECONDS

    async def send(client: httpx.AsyncClient) -> None:
        for number in numbers:
            if time.monotonic() > end:
                return
            draw = random.Random(seed * 1_000_003 + number)
            request = draw.choice(recorded)
            sent = content(draw, mutated(draw, request["body"]))
            headers = {"Content-Type": "application/json"}
            try:
                answer = await client.post(request["path"], content=sent, headers=headers)
                check(answer, sent)
            except Exception as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                faults.append(
                    f"body {number}: {type(error).__name__}: {str(error)[:1500]} ({frame.name}:{frame.lineno})"
                )
                continue
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            if number == 200:
                memory.append(resident())

    async def plain() -> None:
        while not done.is_set():
            tokens, last = [], None
            async for delta in engine.stream([5, 6, 7], Sampling(max_new_tokens=50, ignore_eos=True)):
                now = time.monotonic()
                if last is not None:
                    pauses.append(now - last)
                last, tokens = now, [*tokens, *delta.token_ids]
            answers.add(tuple(tokens))

    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as client:
            other = asyncio.create_task(plain())
            await asyncio.gather(*(send(client) for _ in range(8)))
            done.set()
            await other
            assert (await client.get("/health")).status_code == 200
    pauses.sort()
    return {
        "faults": faults,
        "statuses": statuses,
        "answers": len(answers),
        "grown": resident() - min(memory, default=resident()),
        "longest pause": pauses[-1],
        "99.9 %": pauses[int(0.999 * len(pauses))],
    }


@pytest.mark.long
def test_no_body_brings_the_server_down(engine, capsys):
    """Bodies that are wrong get an error of ours, others an answer; memory is bounded, and a plain answer is the same
    each time.
    """
    if not REQUESTS:
        pytest.skip("world: requests are not here")
    outcome = asyncio.run(fuzz(engine, COUNT, seed=20261128))
    faults, sent = outcome.pop("faults"), sum(outcome["statuses"].values())
    with capsys.disabled():
        print(f"\n{sent} of {COUNT} bodies: {outcome}")
    assert not faults, "\n".join(faults[:20])
    assert outcome["answers"] == 1 and engine.failure is None
    assert outcome["grown"] < MEMORY
    assert sent > 100
