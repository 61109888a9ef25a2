"""Sleep and wake by HTTP, as vLLM's development endpoints have them."""

import concurrent.futures
import json
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from serving import serving, small_engine
from vishwamai.inference import Settings, make_app

KEY = {"Authorization": "Bearer sk-operator"}
BODY = {"prompt": "abc", "max_tokens": 8, "ignore_eos": True, "temperature": 0, "logprobs": 2}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return small_engine(tmp_path_factory.mktemp("sleep"))


@pytest.fixture(scope="module")
def client(engine):
    settings = Settings("tiny", keys=("sk-operator",), sleep_mode=True, allowed_hosts=("127.0.0.1",))
    with serving(engine, settings) as address, httpx.Client(base_url=address, headers=KEY, timeout=60) as client:
        yield client


def sleep_states(client):
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == "vllm:engine_sleep_state"]
    return {sample.labels["sleep_state"]: sample.value for sample in samples}


@pytest.mark.parametrize(
    ("level", "state"), [(None, "weights_offloaded"), (1, "weights_offloaded"), (2, "discard_all")]
)
def test_a_server_sleeps_and_wakes(client, level, state):
    expected = client.post("/v1/completions", json=BODY).json()["choices"]
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert client.post("/sleep", params={} if level is None else {"level": level}).status_code == 200
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/score", "/v1/load_lora_adapter"):
        declined = client.post(path, json=BODY)
        assert declined.status_code == 503 and int(declined.headers["Retry-After"]) > 0, path
        assert "/wake_up" in declined.json()["error"]["message"]
    ready = client.get("/ready")
    assert ready.status_code == 503 and ready.headers["Retry-After"]
    assert (health := client.get("/health")).status_code == 200 and health.json() == {"status": "sleeping"}
    assert sleep_states(client) == {"awake": 0, "weights_offloaded": 0, "discard_all": 0, state: 1}
    assert client.get("/v1/models").status_code == 200
    assert client.post("/sleep").status_code == 200  # it sleeps already
    for _ in range(2):
        assert client.post("/wake_up").status_code == 200
    assert sleep_states(client)["awake"] == 1 and client.get("/ready").status_code == 200
    assert client.get("/health").json() == {"status": "ok"}
    assert client.post("/v1/completions", json=BODY).json()["choices"] == expected


def test_running_answers_end_before_the_server_sleeps(client):
    body = {**BODY, "max_tokens": 200, "stream": True}
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        sleeping = pool.submit(client.post, "/sleep")
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert sleeping.result().status_code == 200
    assert client.post("/v1/completions", json=BODY).status_code == 503
    assert client.post("/wake_up").status_code == 200


def test_what_is_wrong_is_declined(client, engine):
    for level in ("0", "3", "one", ""):
        declined = client.post("/sleep", params={"level": level})
        assert declined.status_code == 400 and declined.json()["error"]["param"] == "level"
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    address = client.base_url
    for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
        assert httpx.request(method, f"{address}{path}").status_code == 401
    page = {"Origin": "https://page.example"}
    assert client.post("/sleep", headers=page).status_code == 403
    assert client.post("/sleep", content="x", headers={"Content-Type": "text/plain"}).status_code == 415
    assert client.post("/v1/completions").status_code == 415  # other routes need a body of JSON
    app: Any = make_app(engine, Settings("tiny"))
    with TestClient(app, base_url="http://localhost") as awake:
        assert awake.get("/is_sleeping").status_code == 404 and awake.post("/sleep", json={}).status_code == 404
