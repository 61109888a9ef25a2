"""What strangers, pages and slow clients may do: every line of docs/security.md about the server.

Loopback only; each load is bounded.
"""

import asyncio
import json
import logging
import socket
import threading
import time

import httpx
import pytest
import uvicorn

from serving import free_port, serving, write_model
from vishwamai.cli import serve
from vishwamai.core.errors import ShapeError
from vishwamai.inference import plan_load
from vishwamai.inference.server import compilation
from vishwamai.inference.server.app import make_app
from vishwamai.inference.server.connections import LimitedProtocol
from vishwamai.inference.server.errors import HttpError, declined
from vishwamai.inference.server.guards import LOOPBACK, hosts_of
from vishwamai.inference.server.settings import Settings

SETTINGS = Settings(
    "tiny", allowed_hosts=LOOPBACK, allowed_origins=("https://chat.example",), body_seconds=0.5, max_bytes=1 << 20
)
ASK = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes")
    write_model(path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    load = plan_load(path, dtype="float32", max_sequences=4, max_tokens=32, max_length=96, page_size=8)
    return load.engine(compile="lazy")


@pytest.fixture(scope="module")
def address(engine):
    with serving(engine, SETTINGS) as found:
        yield found


def post(address, body=None, **headers):
    headers = {"Content-Type": "application/json", **{key.replace("_", "-"): value for key, value in headers.items()}}
    content = json.dumps(ASK if body is None else body)
    return httpx.post(f"{address}/v1/completions", content=content, headers=headers, timeout=60)


def test_pages_of_others_are_declined(address):
    for status, headers in [
        (200, {}),
        (200, {"Content_Type": "application/json; charset=utf-8"}),
        (200, {"Origin": address}),
        (200, {"Origin": "https://chat.example"}),
        (200, {"Host": "LOCALHOST:1"}),
        (200, {"Host": "[::1]:80"}),
        (403, {"Host": "attacker.example"}),
        (403, {"Host": "127.0.0.1.attacker.example"}),
        (403, {"Host": ""}),
        (403, {"Host": "["}),
        (403, {"Origin": "null"}),
        (403, {"Origin": "http://attacker.example"}),
        (403, {"Origin": "http://127.0.0.1:1"}),
        (415, {"Content_Type": "text/plain"}),
        (415, {"Content_Type": "application/x-www-form-urlencoded"}),
        (415, {"Content_Type": ""}),
    ]:
        answer = post(address, **headers)
        assert answer.status_code == status, (headers, answer.text)
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert httpx.get(f"{address}/health", headers={"Host": "attacker.example"}).status_code == 403


def test_an_allowed_page_may_read_the_answer(address):
    allowed, other = (
        {"Origin": origin, "Access-Control-Request-Method": "POST"}
        for origin in ("https://chat.example", "https://x.example")
    )
    answer = httpx.options(f"{address}/v1/completions", headers=allowed)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://chat.example"
    assert httpx.options(f"{address}/v1/completions", headers=other).status_code == 403
    policy = httpx.get(address).headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in policy and "base-uri 'none'" in policy


def test_the_names_of_a_server():
    assert hosts_of("127.0.0.1", []) == LOOPBACK and hosts_of("127.0.0.1", ["*"]) == ()
    assert hosts_of("0.0.0.0", []) == () and "a.example" in hosts_of("0.0.0.0", ["A.example"])


def raw(address, text, seconds=100.0):
    """What a server sends for a text, until it closes the connection."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.sendall(text.encode())
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer.decode()


HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_a_body_that_stops_ends(address):
    begin = time.monotonic()
    assert raw(address, HEAD + "Content-Length: 100\r\n\r\n{").startswith("HTTP/1.1 408")
    assert time.monotonic() - begin < 60  # without the limit: for ever


def test_two_lengths_of_a_body_end_the_connection(address):
    answer = raw(address, HEAD + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
    assert answer.startswith("HTTP/1.1 400") and "connection: close" in answer.lower()


def test_bodies_in_flight_are_bounded(address):
    host, port = address.removeprefix("http://").split(":")
    held = []
    for _ in range(4):
        connection = socket.create_connection((host, int(port)), timeout=100)
        connection.sendall((HEAD + f"Content-Length: {1 << 20}\r\n\r\n" + " " * 300_000).encode())
        held.append(connection)
    answers = [connection.recv(12) for connection in held]
    assert b"HTTP/1.1 503" in answers
    for connection in held:
        connection.close()
    assert post(address).status_code == 200


@pytest.fixture
def limited(engine, monkeypatch):
    monkeypatch.setattr("vishwamai.inference.server.connections.HEADER_SECONDS", 0.5)
    monkeypatch.setattr(LimitedProtocol, "most", 8)
    port = free_port()
    app = make_app(None, Settings("none"))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", http=LimitedProtocol))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(30)


@pytest.mark.turns(3)
def test_silent_connections_end_and_keep_nobody_out(limited):
    host, port = limited.removeprefix("http://").split(":")
    silent = [socket.create_connection((host, int(port)), timeout=100) for _ in range(20)]
    assert httpx.get(f"{limited}/health").status_code == 200
    begin = time.monotonic()
    for connection in silent:
        try:
            assert connection.recv(1) == b""
        except ConnectionResetError:
            pass
    half = socket.create_connection((host, int(port)), timeout=100)
    half.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
    try:
        assert half.recv(1) == b""
    except ConnectionResetError:
        pass
    assert time.monotonic() - begin < 60  # without the limit: for ever


def test_wrong_bodies_are_declined_at_their_first_fault():
    with serving(None, Settings("none"), lambda texts, most: 1 / 0) as other:
        for body, path in (
            ({"input": [1.5] * 800_000}, "/v1/embeddings"),
            ({"input": [[]] * 1_000_000}, "/v1/embeddings"),
        ):
            begin = time.process_time()
            answer = httpx.post(other + path, json=body, timeout=60)
            assert answer.status_code == 400 and len(answer.text) < 2000
            assert time.process_time() - begin < 5


def test_a_prompt_that_cannot_fit_is_not_tokenized(engine, monkeypatch):
    monkeypatch.setattr(type(engine.tokenizer), "encode", lambda *a, **k: pytest.fail("tokenized"))
    with pytest.raises(Exception, match="--max-length"):
        engine.prompts.check_text(engine.tokenizer.longest * engine.limits.max_length + 1)


def test_too_many_log_probabilities_are_declined(engine):
    with serving(engine, Settings("tiny", max_entries=100)) as address:
        answer = post(address, {"prompt": "a", "max_tokens": 30, "logprobs": 5, "n": 3})
        assert answer.status_code == 400 and "log probabilities" in answer.text
    engine.start()  # its other server goes on


def chain(length):
    defs = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{length}": {"type": "integer"}}}


def test_grammars_that_would_end_the_process(address):
    """Chains of references in each form, as many as the stack of a process does not hold, and endless numbers."""
    rules = "\n".join(f'a{i}: "x" a{i + 1}' for i in range(5000))
    tool = {"type": "function", "function": {"name": "f", "parameters": chain(2000)}}
    bodies = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": chain(2000)}}},
        {"grammar": f'start: a0\n{rules}\na5000: "y"'},
        {"grammar": f'start: A0\n{rules.replace("a", "A")}\nA5000: "y"'},
        {"grammar": f"start: %json {json.dumps(chain(1500))}"},
        {"tools": [tool], "tool_choice": "required"},
    ]
    for body in bodies:
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, **body}
        answer = httpx.post(f"{address}/v1/chat/completions", json=chat, timeout=120)
        assert answer.status_code == 400 and len(answer.text) < 1500, answer.text[:300]
    assert post(address).status_code == 200


@pytest.fixture(scope="module")
def compiler(engine):
    found = compilation.Compilation(engine.tokenizer, engine.programs.vocab, sorted(engine.end_tokens))
    yield found
    found.close()


@pytest.mark.turns(6)
def test_a_grammar_has_limits_of_its_own(compiler, monkeypatch):
    """The trial is a process: its stack, memory and time end it alone."""
    monkeypatch.setattr("vishwamai.inference.guided.MAX_REFERENCES", 10_000)
    for source in (chain(3000), {"type": "integer", "multipleOf": 99_999_999}):
        with pytest.raises(Exception, match="too complex"):
            asyncio.run(compiler.grammar("json_schema", source))
    assert asyncio.run(compiler.grammar("regex", "a+")).matcher().mask().any()


def test_a_trial_ends_when_its_client_leaves(compiler):
    async def leave():
        task = asyncio.create_task(compiler.grammar("json_schema", {"type": "integer", "multipleOf": 99_999_989}))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        begin = time.monotonic()
        await compiler.grammar("regex", "b+")
        while compiler._trials._waiting and time.monotonic() - begin < 60:  # `b+` does not wait for the end
            await asyncio.sleep(0.05)
        return compiler._trials._waiting

    assert not asyncio.run(leave())


def test_compiled_grammars_are_cached_within_a_bound(compiler, monkeypatch):
    monkeypatch.setattr(compilation, "CACHE_ENTRIES", 2)

    async def compiled():
        return [await compiler.grammar("regex", text) for text in ("c", "d", "d", "e", "c")]

    c, d, again, _, other = asyncio.run(compiled())
    assert d is again and c is not other and len(compiler._cache) == 2


def test_keys_have_comments_and_a_mode(tmp_path, capsys):
    path = tmp_path / "keys"
    path.write_text("# team A\nsecret\n\n")
    path.chmod(0o644)
    assert [key.secret for key in serve._keys(path)] == ["secret"] and "chmod 600" in capsys.readouterr().err
    path.chmod(0o600)
    assert [key.secret for key in serve._keys(path)] == ["secret"] and capsys.readouterr().err == ""


def test_a_priority_is_bounded(engine, address, monkeypatch):
    priorities, stream = [], engine.stream
    monkeypatch.setattr(engine, "stream", lambda *a, **k: priorities.append(k["priority"]) or stream(*a, **k))
    for priority in (50, -5):
        assert post(address, ASK | {"priority": priority}).status_code == 200
    assert priorities == [0.0, -5.0]


def test_a_client_that_leaves_writes_no_trace(address, caplog, monkeypatch):
    host, port = address.removeprefix("http://").split(":")
    for name in ("vishwamai", "uvicorn"):  # `serve` turns it off
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    with caplog.at_level("INFO", logger="vishwamai.server.requests"):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall((HEAD + "Content-Length: 100\r\nX-Request-Id: leaver\r\n\r\n{").encode())
        end = time.monotonic() + 20
        while not any("leaver" in record.getMessage() for record in caplog.records):
            assert time.monotonic() < end
            time.sleep(0.01)
    assert [record.getMessage() for record in caplog.records if record.exc_info or record.levelname == "ERROR"] == []


def test_errors_have_no_paths_of_the_server_and_are_short():
    with pytest.raises(HttpError) as caught, declined("messages"):
        raise ShapeError("/srv/models/qwen/chat_template.jinja: line 3; /srv/models/qwen/config.json: `a` is 5.")
    assert caught.value.message == "chat_template.jinja: line 3; config.json: `a` is 5."
    assert len(HttpError(400, "long " * 10_000).message) < 2100


def test_a_long_enum_is_answered(address):
    values = [f"value {i} of many" for i in range(5000)]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": values}}}
    answer = post(address, ASK | {"max_tokens": 40, "temperature": 0, "response_format": form})
    assert answer.status_code == 200 and json.loads(answer.json()["choices"][0]["text"]) in values, answer.text[:500]


def test_values_for_a_template_replace_no_argument(address):
    for name in ("messages", "self", "tools", "conversation", "template", "chat_template"):
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "chat_template_kwargs": {name: 5}}
        answer = httpx.post(f"{address}/v1/chat/completions", json=chat, timeout=60)
        assert answer.status_code in (200, 400), (name, answer.text)
