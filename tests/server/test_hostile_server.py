"""The server under requests of strangers: mutations of recorded ones, next to an answer that nobody may hold up.

The server, the strangers and the client of the plain answer are processes of their own: as a program, this file sends
the bodies. `test_server_world.py` has a sample of such bodies in the default suite.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import resource
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import scripts
import world
from serving import free_port

REQUESTS = world.files("requests", "*.json")
STATUSES = {*range(200, 300), *range(400, 500), 503}
MEMORY = 1 << 30
"""Bytes by which the process may grow: 512 MiB of compiled grammars, and the bodies."""

SECONDS = os.environ.get("VISHWAMAI_TEST_HOSTILE_SECONDS")
"""Seconds after which no further body is sent, in place of a case's own; how many were is printed."""

LONGEST = 4 << 20
"""Bytes of a body that is read to its end; the connection of a longer one may end while the client still writes."""

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
            # Of a list of long texts, 500 are gigabytes: the client would write them for longer than a server waits.
            parent[key] = part * draw.choice([10, 500]) if len(repr(part)) < 10_000 else part
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


async def send_bodies(address: str, count: int, seed: int, seconds: float) -> dict[str, Any]:
    """Sends bodies, eight at once, none after so many seconds; what came of it."""
    recorded = [json.loads(path.read_text(encoding="utf-8")) for path in REQUESTS]
    recorded = [request for request in recorded if request["body"]]
    statuses: dict[int, int] = {}
    faults: list[str] = []
    numbers, end = iter(range(count)), time.monotonic() + seconds

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
            except httpx.TransportError as error:
                if len(sent) < LONGEST:
                    faults.append(f"body {number} of {len(sent)} bytes has no answer: {error!r}")
                statuses[413] = statuses.get(413, 0) + 1
            except Exception as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                faults.append(
                    f"body {number}: {type(error).__name__}: {str(error)[:1500]} ({frame.name}:{frame.lineno})"
                )
            else:
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1

    async with httpx.AsyncClient(base_url=address, timeout=120) as client:
        await asyncio.gather(*(send(client) for _ in range(8)))
    return {"faults": faults, "statuses": statuses}


def plain_answer(client: httpx.Client) -> tuple[str, list[float]]:
    """A streamed answer's text, and the seconds between its pieces."""
    body = {"prompt": "Once upon a time", "max_tokens": 50, "temperature": 0, "ignore_eos": True, "stream": True}
    text, pauses, last = "", [], None
    with client.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                now = time.monotonic()
                if last is not None:
                    pauses.append(now - last)
                last, text = now, text + json.loads(line[6:])["choices"][0]["text"]
    return text, pauses


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server whose programs are all compiled."""
    port = free_port()
    sizes = [
        "--dtype",
        "float32",
        "--max-sequences",
        "16",
        "--step-tokens",
        "64",
        "--max-length",
        "2048",
        "--max-new-tokens",
        "2",
    ]
    path = world.tiny("qwen3", max_position_embeddings=8192)
    command = [
        sys.executable,
        "-m",
        "vishwamai.cli",
        "serve",
        str(path),
        "--port",
        str(port),
        "--name",
        "served-model",
        "--pooling",
        "last",
        *sizes,
    ]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        threading.Thread(target=process.stderr.read, daemon=True).start()
        address, end = f"http://127.0.0.1:{port}", time.monotonic() + 400
        while time.monotonic() < end:
            try:
                if httpx.get(f"{address}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert process.poll() is None
            time.sleep(0.2)
        yield process, address
        process.kill()


def resident(process: subprocess.Popen[str]) -> int:
    with open(f"/proc/{process.pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(
    "count, seconds",
    [
        pytest.param(10_000, 180, id="many", marks=pytest.mark.long),
        pytest.param(100_000, 7200, id="most", marks=pytest.mark.soak),
    ],
)
def test_no_body_brings_the_server_down(count, seconds, server, capsys):
    """Bodies that are wrong get an error of ours, others an answer; memory is bounded, and a plain answer is the same
    each time. The pauses between its tokens are printed; what a step may compute is counted elsewhere
    (`test_inference_faults.py`), because the clock depends on what else runs.
    """
    if not REQUESTS:
        pytest.skip("world: requests are not here")
    process, address = server
    with httpx.Client(base_url=address, timeout=120) as client:
        expected, alone = plain_answer(client)
        before, memory, pauses, answers = time.monotonic(), [], [], set()
        command = [sys.executable, __file__, address, str(count), "20261128", SECONDS or str(seconds)]
        with subprocess.Popen(command, env=scripts.environment(), stdout=subprocess.PIPE, text=True) as strangers:
            while strangers.poll() is None:
                text, seconds = plain_answer(client)
                answers.add(text)
                pauses += seconds
                if time.monotonic() - before > 10 or not memory:
                    memory.append(resident(process))
            assert strangers.stdout is not None
            outcome = json.loads(strangers.stdout.read())
        assert client.get("/health").status_code == 200
        memory.append(resident(process))
    pauses.sort()
    sent, longest = sum(outcome["statuses"].values()), pauses[-1]
    with capsys.disabled():
        print(
            f"\n{sent} of {count} bodies in {time.monotonic() - before:.0f} s: {outcome['statuses']}, +"
            f"{(max(memory) - memory[0]) / 2**20:.0f} MiB; {len(pauses)} pauses between tokens: longest {longest:.3f}"
            f" s, 99.9 % {pauses[int(0.999 * len(pauses))]:.3f}, median {pauses[len(pauses) // 2]:.3f}, "
            f"over 0.2 s {sum(pause > 0.2 for pause in pauses)}; alone: {max(alone):.3f}; load {os.getloadavg()[0]:.1f}"
        )
    assert not outcome["faults"], "\n".join(outcome["faults"][:20])
    assert answers == {expected}
    assert max(memory) - memory[0] < MEMORY
    assert sent > 100


if __name__ == "__main__":
    place, *sizes = sys.argv[1:]
    print(json.dumps(asyncio.run(send_bodies(place, *map(int, sizes)))))
