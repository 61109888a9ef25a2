"""What operators of a server need: its OpenAPI document, metrics under vLLM's names, budgets of keys, certificates."""

import json
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

import world
from serving import serving, small_engine
from vishwamai.cli import main
from vishwamai.cli.certificates import check_certificate
from vishwamai.cli.function import CommandError
from vishwamai.core.errors import ShapeError
from vishwamai.inference import Settings, make_app
from vishwamai.inference.processors import imported
from vishwamai.inference.server.budgets import Budget, Key
from vishwamai.inference.server.vllm_names import ABSENT, NAMES

ROOT = Path(__file__).parents[2]
KEYS = (
    Key.parse("sk-free"),
    Key.parse("sk-few name=web requests_per_day=2"),
    Key.parse("sk-short tokens_per_day=6 requests_per_minute=60"),
)
QUERIES = """
vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum vllm:e2e_request_latency_seconds_count
vllm:prompt_tokens_total vllm:generation_tokens_total vllm:inter_token_latency_seconds_bucket
vllm:inter_token_latency_seconds_sum vllm:num_requests_running vllm:num_requests_waiting
vllm:time_to_first_token_seconds_bucket vllm:time_to_first_token_seconds_sum vllm:kv_cache_usage_perc
vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket vllm:request_success_total
vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum vllm:request_decode_time_seconds_sum
vllm:request_max_num_generation_tokens_sum vllm:gpu_cache_usage_perc vllm:time_per_output_token_seconds_bucket
vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total vllm:num_preemptions_total vllm:cache_config_info
vllm:spec_decode_num_draft_tokens_total vllm:spec_decode_num_accepted_tokens_total
""".split()
"""Names in the queries of the Grafana dashboards in vLLM's repository (examples/observability), and of the endpoint
picker of the Kubernetes gateway's inference extension."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return small_engine(tmp_path_factory.mktemp("operations"))


def even_alone(**options):
    """A processor that a server may be started with: every second token is barred."""
    return lambda tokens: range(1, options.get("below", 262), 2)


@pytest.fixture(scope="module")
def address(engine):
    processors = dict([imported(f"even={__name__}:even_alone")])
    with serving(engine, Settings("tiny", keys=KEYS, processors=processors)) as address:
        assert complete(address, "sk-free", n=2).status_code == 200
        yield address


def complete(address, key, **body):
    body = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True, **body}
    return httpx.post(f"{address}/v1/completions", json=body, headers={"x-api-key": key}, timeout=60)


def samples(address):
    text = httpx.get(f"{address}/metrics", headers={"x-api-key": "sk-free"}).text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_have_vllms_names_with_the_same_values(address):
    values = samples(address)
    names = {name for name, _ in values}
    missing = [name for name in QUERIES if name not in names]
    assert {name.rsplit("_", 1)[0] for name in missing} == {*ABSENT}
    label = (("model_name", "tiny"),)
    for ours, theirs in (
        ("vishwamai_prompt_tokens_total", "vllm:prompt_tokens_total"),
        ("vishwamai_new_tokens_total", "vllm:generation_tokens_total"),
        ("vishwamai_answer_new_tokens_sum", "vllm:request_generation_tokens_sum"),
        ("vishwamai_first_token_seconds_sum", "vllm:time_to_first_token_seconds_sum"),
        ("vishwamai_pages_used_share", "vllm:kv_cache_usage_perc"),
    ):
        assert values[ours, ()] == values[theirs, label]
    assert values["vllm:generation_tokens_total", label] == values["vishwamai_answer_new_tokens_sum", ()] >= 8
    done = values["vllm:request_success_total", (("finished_reason", "length"), ("model_name", "tiny"))]
    assert done == values["vishwamai_answers_total", (("finish", "length"),)] >= 2
    assert values["vishwamai_answer_seconds_count", ()] >= 2
    page = (ROOT / "docs/serving-operations.md").read_text()
    assert [name for names in NAMES.values() for name in names if f"`{name}" not in page] == []
    assert [name for name in ABSENT if f"`{name}" not in page] == []


def test_a_prompt_is_cut_to_its_last_tokens(address):
    ids = list(range(10, 30))
    cut = complete(address, "sk-free", prompt=ids, truncate_prompt_tokens=4, temperature=0).json()
    short = complete(address, "sk-free", prompt=ids[-4:], temperature=0).json()
    assert cut["choices"][0]["text"] == short["choices"][0]["text"] and cut["usage"]["prompt_tokens"] == 4


def test_processors_by_name(address):
    def tokens(*processors, **options):
        body = {"logits_processors": processors, "return_token_ids": True, "temperature": 0, "max_tokens": 24}
        answer = complete(address, "sk-free", **body, **options).json()
        return answer["choices"][0]["token_ids"] if "choices" in answer else answer["error"]

    size = 2
    ids = tokens({"qualname": "no_repeat_ngram", "kwargs": {"size": size}})
    pairs = list(zip(ids, ids[1:]))
    assert len(ids) == 24 and len(set(pairs)) == len(pairs)
    plain = tokens()
    assert len(set(zip(plain, plain[1:]))) < 23  # which greedy answers of this model repeat
    assert all(id % 2 == 0 for id in tokens("even")) and not all(id % 2 == 0 for id in plain)
    both = tokens("even", {"name": "no_repeat_ngram", "kwargs": {"size": 1}}, bad_words=["a"])
    assert len(set(both)) == 24 and all(id % 2 == 0 for id in both)
    for processor, text in (
        ("other", "the processors of this server are no_repeat_ngram, even"),
        ({"name": "no_repeat_ngram", "kwargs": {"size": 0}}, "`size` is 0"),
        ({"name": "no_repeat_ngram", "kwargs": {"length": 3}}, "unexpected keyword argument 'length'"),
    ):
        error = tokens(processor)
        assert text in error["message"] and error["param"] == "logits_processors"
    for text in ("even", "a=b", "a=no.module:f", f"a={__name__}:KEYS"):
        with pytest.raises(ShapeError, match="MODULE:FUNCTION|No module|is a tuple"):
            imported(text)


def test_the_dashboard_asks_for_metrics_that_exist(address):
    names = {name for name, _ in samples(address)}
    dashboard = json.loads((ROOT / "deploy/grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    words = {word for query in queries for word in query.replace("{", " ").replace("(", " ").split()}
    asked = {word for word in words if word.startswith("vishwamai_")}
    assert len(asked) > 15 and asked <= names
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


def test_budgets_fill_up_evenly():
    now = [0.0]
    budget = Budget({"requests_per_minute": 2, "tokens_per_day": 864}, lambda: now[0])
    assert [budget.take() for _ in range(3)] == [None, None, ("requests_per_minute", 30)]
    now[0] += 29.0
    assert budget.take() == ("requests_per_minute", 1)
    now[0] += 1.0
    assert budget.take() is None
    budget.spend(1000)
    now[0] += 60.0
    assert budget.take() == ("tokens_per_day", 13640)  # 136 too many and one to have, at 100 s for each, less a minute
    now[0] += 13640.0
    assert budget.take() is None
    headers = budget.headers()
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("2", "1")
    assert (headers["x-ratelimit-limit-tokens"], headers["x-ratelimit-remaining-tokens"]) == ("864", "1")


@pytest.mark.parametrize("line", ["sk-secret tokens_per_year=3", "sk-secret tokens_per_day=0", "sk-secret name="])
def test_a_wrong_limit_is_an_error_without_the_secret(line):
    with pytest.raises(ShapeError, match="tokens_per_minute=N") as caught:
        Key.parse(line)
    assert "sk-secret" not in str(caught.value)


def test_a_key_beyond_its_budget_waits(address):
    answers = [complete(address, "sk-few") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[1].headers["x-ratelimit-remaining-requests"] == "0"
    assert 40_000 < int(answers[2].headers["retry-after"]) <= 43_200
    assert "2 requests per day" in answers[2].json()["error"]["message"]
    assert answers[2].json()["error"]["type"] == "rate_limit_error"
    assert httpx.get(f"{address}/v1/models", headers={"x-api-key": "sk-few"}).status_code == 200
    short = [complete(address, "sk-short") for _ in range(2)]  # 3 + 4 tokens, of 6
    assert [answer.status_code for answer in short] == [200, 429]
    assert "6 tokens per day" in short[1].json()["error"]["message"]
    assert complete(address, "sk-free").status_code == 200


@pytest.fixture(scope="module")
def document(address):
    return httpx.get(f"{address}/openapi.json").json()


def test_the_document_has_every_route(document, engine):
    app: Any = make_app(engine, Settings("tiny"))
    routes = {(route.path.replace(":path}", "}"), method.lower()) for route in app.routes for method in route.methods}
    paths = {(path, method) for path, operations in document["paths"].items() for method in operations}
    assert paths == {(path, method) for path, method in routes if method != "head"}
    names = [operation["operationId"] for operations in document["paths"].values() for operation in operations.values()]
    assert len(set(names)) == len(names)
    assert (
        "security" in document["paths"]["/tokenize"]["post"] and "security" not in document["paths"]["/health"]["get"]
    )
    alone: Any = make_app(None, Settings("encoder"))
    assert "/v1/responses" not in {route.path for route in alone.routes}


def schema_of(document, path):
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator({**schema, "components": document["components"]})


def test_the_document_takes_what_clients_send(document):
    files = world.files("requests", "*.json")
    if not files:
        pytest.skip("world: requests are not here")
    count = 0
    for file in files:
        recorded = json.loads(file.read_text())
        path, body = recorded["path"].partition("?")[0], recorded["body"]
        if "post" not in document["paths"].get(path, ()) or "image_url" in json.dumps(body):
            continue
        faults = [error.message for error in schema_of(document, path).iter_errors(body)]
        assert not faults, (file.name, faults[0][:300])
        count += 1
    assert count > 50


def test_the_document_declines_what_the_server_declines(document, address):
    for body in ({"prompt": 1}, {"prompt": "a", "n": 0}, {"prompt": "a", "temperature": 3}, {}, {"prompt": []}):
        assert list(schema_of(document, "/v1/completions").iter_errors(body)), body
        answer = httpx.post(f"{address}/v1/completions", json=body, headers={"x-api-key": "sk-free"})
        assert answer.status_code == 400
        responses = document["paths"]["/v1/completions"]["post"]["responses"]
        assert "400" in responses and "Error" in json.dumps(responses["400"])
        jsonschema.validate(answer.json(), document["components"]["schemas"]["Error"])


@pytest.mark.long
def test_schemathesis_walks_the_document(address, tmp_path):
    pytest.importorskip("schemathesis")
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{address}/openapi.json", "--checks", checks]
    command += ["--max-examples", "10", "--seed", "1", "--no-color", "--request-timeout", "60"]
    command += ["--header", "x-api-key: sk-free"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=1800)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


def test_a_span_for_each_request():
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)

    def embed(texts, truncate):
        return np.ones((len(texts), 2), np.float32), 7

    with TestClient(make_app(None, Settings("vectors", traces=True), embed)) as client:
        headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "X-Request-Id": "mine"}
        assert client.post("/v1/embeddings", json={"input": "a"}, headers=headers).status_code == 200
        assert client.get("/health").status_code == 200
        assert client.post("/v1/embeddings", json={"input": 1}).status_code == 400
    finished: Any = spans.get_finished_spans()
    good, declined = finished
    assert good.name == "POST /v1/embeddings" and good.context.trace_id == int("ab" * 16, 16)
    assert good.parent.span_id == int("cd" * 8, 16) and declined.parent is None
    expected = {"http.response.status_code": 200, "gen_ai.usage.input_tokens": 7, "vishwamai.request.id": "mine"}
    assert expected.items() <= good.attributes.items()
    assert declined.attributes["http.response.status_code"] == 400


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    for name in ("a", "b"):
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        command += ["-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem", "-subj", "/CN=localhost"]
        command += ["-days", "2", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("needs openssl")
    return folder


def test_a_certificate_is_checked_before_the_model_loads(certificate, tmp_path, capsys):
    a, b = certificate / "a", certificate / "b"
    check_certificate(None, None)
    check_certificate(a.with_suffix(".pem"), a.with_suffix(".key"))
    for files, text in (
        ((None, a.with_suffix(".key")), "pass --ssl-certfile too"),
        ((tmp_path / "none.pem", None), "none.pem: No such file"),
        ((a.with_suffix(".pem"), None), "cannot be served"),
        ((a.with_suffix(".pem"), b.with_suffix(".key")), "cannot be served"),
    ):
        with pytest.raises(CommandError, match=text):
            check_certificate(*files)
    words = ["serve", str(tmp_path), "--ssl-certfile", str(tmp_path / "none.pem")]
    assert main(words) == 2 and "none.pem: No such file" in capsys.readouterr().err


def test_answers_by_https(certificate):
    options = {"ssl_certfile": certificate / "a.pem", "ssl_keyfile": certificate / "a.key"}
    with serving(None, Settings("tiny"), lambda texts, truncate: (np.ones((1, 1)), 1), **options) as address:
        address = address.replace("http:", "https:")
        context = ssl.create_default_context(cafile=certificate / "a.pem")
        answer = httpx.get(f"{address}/v1/models", verify=context)
        assert answer.json()["data"][0]["id"] == "tiny" and answer.headers["x-request-id"]
