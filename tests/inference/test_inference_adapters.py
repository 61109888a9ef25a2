"""Adapters that the library peft made, several in one batch: answers are those of the merged models."""

import dataclasses
import json
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from prometheus_client.parser import text_string_to_metric_families

from benchmark_files import loaded
from serving import serving, write_tokenizer
from vishwamai.core.errors import DeviceError, ShapeError, UnsupportedError
from vishwamai.inference import CacheTiers, Request, Sampling, memory_release, plan_load
from vishwamai.inference.server.metrics import Metrics
from vishwamai.inference.server.settings import Settings
from vishwamai.models import read_config
from vishwamai.models.adapters import AdaptedWeight, AdapterSizes, read_adapter
from vishwamai.ops.matmul.packed_weight import pack_weight
from vishwamai.ops.quantization import quantize

SIZES = {"vocab_size": 262, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
         "pad_token_id": None, "eos_token_id": None, "bos_token_id": None}  # fmt: skip
PROMPTS = [list(range(5, 45)), list(range(5, 45)), list(range(5, 45)), [7, 8, 9], [7, 8, 9]]
NAMES = [None, "a", "b", "b", "c"]
GREEDY = Sampling(max_new_tokens=8, temperature=0.0, ignore_eos=True)
TARGETS = {"Llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"], "Phi3": ["qkv_proj", "gate_up_proj"]}


def write_adapters(folder, family):
    """A model, three adapters of other ranks and scales, and the models that peft merges of them."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES)
    choices: Any = (
        ("a", {"r": 4, "lora_alpha": 8}),
        ("b", {"r": 8, "lora_alpha": 16, "use_rslora": True}),
        ("c", {"r": 2, "lora_alpha": 2, "alpha_pattern": {TARGETS[family][0]: 6}}),
    )
    for name, options in choices:
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        if name == "a":
            model.save_pretrained(folder / "base")
            write_tokenizer(folder / "base")
        torch.manual_seed(ord(name))
        lora = peft.LoraConfig(
            **options, target_modules=TARGETS[family], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        adapted: Any = peft.get_peft_model(model, lora)
        adapted.save_pretrained(folder / name)
        adapted.merge_and_unload().save_pretrained(folder / f"merged-{name}")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_adapters(tmp_path_factory.mktemp("adapters"), "Llama")


def load(folder, **options):
    options = {"dtype": "float32", "max_sequences": 4, "max_tokens": 32, "max_length": 128, "page_size": 8, **options}
    return plan_load(folder, **options)


def greedy(directory, prompts):
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        answers.append(tuple(ids[0, len(prompt) :].tolist()))
    return answers


@pytest.mark.turns(6)
@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_answers_of_several_adapters_are_those_of_the_merged_models(family, folder, tmp_path):
    folder = folder if family == "Llama" else write_adapters(tmp_path, family)
    engine = load(folder / "base", adapters=AdapterSizes(3, 8)).engine(compile="lazy")
    for name in "abc":
        engine.load_adapter(name, folder / name)
    expected = [
        greedy(folder / ("base" if name is None else f"merged-{name}"), [prompt])[0]
        for prompt, name in zip(PROMPTS, NAMES)
    ]
    answers = engine.generate(PROMPTS, GREEDY, NAMES)
    assert [answer.token_ids for answer in answers] == expected and len(set(expected)) == 5
    again = engine.generate(PROMPTS, GREEDY, NAMES)  # now with the prefixes of each adapter
    assert [answer.token_ids for answer in again] == expected
    assert [answer.cached > 0 for answer in again] == [True, True, True, False, False]
    assert [answer.cached for answer in answers] == [0] * 5


@pytest.mark.turns(3)
def test_the_benchmark_decodes_with_adapters_and_without(folder):
    sizes = {"count": 2, "rank": 3, "sequences": 3, "prompt": 4, "steps": 2, "rounds": 1}
    with loaded("engines/adapters") as script:
        figures = script.compare(folder / "base", {"dtype": "float32"}, **sizes)
    base, adapted = figures["decode 3, base"], figures["decode 3, adapters"]
    assert base > 0 and figures["adapters / base"] == adapted / base == figures["ratios"][0]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("Llama", {}, marks=pytest.mark.turns(4)),
        pytest.param("Phi3", {}, marks=pytest.mark.long),
        pytest.param("Llama", {"quantize": "int8"}, marks=pytest.mark.long),
    ],
)
def test_adapters_are_split_as_the_weights_are(family, options, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_release, "_shares_host_memory", lambda: False)
    folder = folder if family == "Llama" else write_adapters(tmp_path, family)
    sizes = AdapterSizes(3, 8)
    one = load(folder / "base", adapters=sizes, **options).engine(compile="lazy")
    planned = load(folder / "base", adapters=sizes, mesh="tensor=2", **options)
    split = planned.engine(compile="lazy")
    for name in "abc":
        one.load_adapter(name, folder / name)
        split.load_adapter(name, folder / name)
    expected = [answer.token_ids for answer in one.generate(PROMPTS, GREEDY, NAMES)]
    assert [answer.token_ids for answer in split.generate(PROMPTS, GREEDY, NAMES)] == expected
    assert len(set(expected)) == 5
    parts = {
        name: [half.addressable_shards[0].data.shape for half in split.adapters.matrices[0, name]]
        for name in ("query", "output", "up", "down")
    }
    assert parts == {
        "query": [(32, 24), (24, 16)],
        "output": [(16, 24), (24, 32)],
        "up": [(32, 24), (24, 24)],
        "down": [(24, 24), (24, 32)],
    }
    arrays = jax.tree.leaves((split.model, split.adapters.matrices))
    assert planned.weights == sum(shard.data.nbytes for x in arrays for shard in x.addressable_shards)
    before = [x.sharding for x in jax.tree.leaves(split.adapters.matrices)]
    split.sleep()
    split.wake()
    assert [x.sharding for x in jax.tree.leaves(split.adapters.matrices)] == before
    split.unload_adapter("a")
    split.load_adapter("d", folder / "a")
    names = ["d" if name == "a" else name for name in NAMES]
    assert [answer.token_ids for answer in split.generate(PROMPTS, GREEDY, names)] == expected


@pytest.mark.turns(4)
def test_places_are_used_again_and_nothing_is_compiled(folder):
    engine = load(folder / "base", adapters=AdapterSizes(1, 8)).engine()
    compiled = engine.programs.compiled
    prompts = [PROMPTS[0]]
    for name, cached in (("a", 0), ("b", 0), ("a", 32)):  # the same adapter again goes on after its own pages
        engine.load_adapter("one", folder / name)
        with pytest.raises(ShapeError, match="loaded already"):
            engine.load_adapter("one", folder / name)
        with pytest.raises(ShapeError, match="all 1 places"):
            engine.load_adapter("two", folder / name)
        answer = engine.generate(prompts, GREEDY, ["one"])[0]
        assert answer.token_ids == greedy(folder / f"merged-{name}", prompts)[0] and answer.cached == cached
        engine.unload_adapter("one")
        with pytest.raises(ShapeError, match="no adapter 'one'"):
            engine.generate(prompts, GREEDY, ["one"])
    assert engine.programs.compiled == compiled and engine.adapters.names == ()
    engine.load_adapter("one", folder / "a")
    held = engine.adapters.take("one", 1)
    engine.unload_adapter("one")
    with pytest.raises(ShapeError, match="wait for its answers"):
        engine.load_adapter("two", folder / "b")
    engine.adapters.release(held, 1)
    engine.load_adapter("two", folder / "b")


@pytest.mark.turns(2)
def test_adapters_sleep_and_the_gateways_metrics_name_them(folder, monkeypatch):
    """The names, labels and values of the model server protocol (gateway-api-inference-extension, proposal 003)."""
    monkeypatch.setattr(memory_release, "_shares_host_memory", lambda: False)
    engine = load(folder / "base", adapters=AdapterSizes(3, 8), max_sequences=1).engine(compile="lazy")
    for name in "ab":
        engine.load_adapter(name, folder / name)
    metrics = Metrics(engine, "tiny")

    def samples():
        families = list(text_string_to_metric_families(metrics.text().decode()))
        kinds = {family.name: family.type for family in families}
        return kinds, {sample.name: sample for family in families for sample in family.samples}

    expected = [answer.token_ids for answer in engine.generate(PROMPTS[:2], GREEDY, ["a", "b"])]
    with engine._with_adapters(requests := [Request((7, 8), GREEDY, lambda delta: None) for _ in "ab"], ["a", "b"]):
        for request in requests:
            engine.submit(request)
        engine.step()
        kinds, values = samples()
        adapters = values["vllm:lora_requests_info"]
        assert adapters.labels == {"running_lora_adapters": "a,b", "waiting_lora_adapters": "b", "max_lora": "3",
                                   "model_name": "tiny"}  # fmt: skip
        assert adapters.value > 1.6e9  # seconds since 1970
        queued = "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
        assert {kinds[name] for name in (*queued, "vllm:lora_requests_info")} == {"gauge"}
        assert [values[name].value for name in queued[:2]] == [1, 1] and 0 < values[queued[2]].value <= 1
        cache = values["vllm:cache_config_info"].labels
        assert cache["block_size"] == "8" and cache["num_gpu_blocks"] == str(engine.scheduler.pool.num_pages)
        while not engine.idle:
            engine.step()
    assert samples()[1]["vllm:lora_requests_info"].labels["waiting_lora_adapters"] == ""
    for level in (1, 2):
        engine.sleep(level)
        with pytest.raises(DeviceError, match="sleeps"):
            engine.load_adapter("c", folder / "c")
        engine.wake()
        assert [answer.token_ids for answer in engine.generate(PROMPTS[:2], GREEDY, ["a", "b"])] == expected
    engine.unload_adapter("a")
    assert samples()[1]["vllm:lora_requests_info"].labels["running_lora_adapters"] == "b"


def _plain(weight: Any) -> Any:
    weight = weight.unpack() if hasattr(weight, "unpack") else weight
    return weight.dequantize() if hasattr(weight, "dequantize") else weight


@pytest.mark.turns(6)
def test_quantized_bases_have_adapters(folder):
    draw = np.random.default_rng(0)
    weight, x = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in ((32, 48), (1, 5, 32)))
    down, up = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in ((32, 8), (8, 48)))
    chosen = AdapterSizes(2, 4).choice(jnp.asarray([0, 1, -1, 1, 0]))
    for base in (
        quantize(weight, "int8", axis=-2),
        pack_weight(quantize(weight, "int8", axis=-2)),
        pack_weight(weight),
    ):
        plain = _plain(base)
        adapted = AdaptedWeight(base, down, up, chosen)
        got = adapted.product(x, jnp.float32)[0]
        for i, slot in enumerate([0, 1, -1, 1, 0]):
            rows = slice(4 * slot, 4 * slot + 4) if slot >= 0 else slice(0)
            expected = x[0, i] @ plain + x[0, i] @ down[:, rows] @ up[rows]
            np.testing.assert_allclose(got[i], expected, atol=0.3, rtol=0.05)  # int8 products round x, too
    engine = load(folder / "base", quantize="int8", adapters=AdapterSizes(1, 8)).engine(compile="lazy")
    engine.load_adapter("a", folder / "a")
    base, adapted = engine.generate([PROMPTS[0]] * 2, GREEDY, [None, "a"])
    alone = load(folder / "base", quantize="int8").engine(compile="lazy").generate([PROMPTS[0]], GREEDY)[0]
    assert base.token_ids == alone.token_ids != adapted.token_ids


@pytest.mark.turns(4)
def test_what_cannot_be_served_is_named(folder, tmp_path):
    config = read_config(folder / "base")
    assert {shape.shape[1] for shape, _ in read_adapter(folder / "a", config).values()} == {4}
    with pytest.raises(ShapeError, match="adapter_config.json: the file is missing"):
        read_adapter(tmp_path, config)
    settings = json.loads((folder / "a" / "adapter_config.json").read_text())
    (tmp_path / "adapter_model.safetensors").write_bytes((folder / "a" / "adapter_model.safetensors").read_bytes())
    for key, value in (("use_dora", True), ("bias", "all"), ("peft_type", "IA3"), ("modules_to_save", ["lm_head"])):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, key: value}))
        with pytest.raises(UnsupportedError, match=f"`{key}`"):
            read_adapter(tmp_path, config)
    for key, value in (("lora_alpha", None), ("alpha_pattern", {"(": 1})):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, key: value}))
        with pytest.raises(ShapeError, match=key):
            read_adapter(tmp_path, config)
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedError, match="layers, which alone may have adapters"):
        read_adapter(tmp_path, dataclasses.replace(config, layers=config.layers[:1], num_layers=1))
    engine = load(folder / "base", adapters=AdapterSizes(1, 2)).engine(compile="lazy")
    with pytest.raises(ShapeError, match="--max-adapter-rank"):
        engine.load_adapter("a", folder / "a")
    with pytest.raises(ShapeError, match="no places for adapters"):
        load(folder / "base").engine(compile="lazy").load_adapter("a", folder / "a")


@pytest.mark.turns(4)
def test_requests_name_an_adapter_as_their_model(folder):
    engine = load(folder / "base", adapters=AdapterSizes(2, 8)).engine(compile="lazy")
    engine.load_adapter("a", folder / "a")
    expected = {None: greedy(folder / "base", [PROMPTS[0]])[0], "a": greedy(folder / "merged-a", [PROMPTS[0]])[0],
                "b": greedy(folder / "merged-b", [PROMPTS[0]])[0]}  # fmt: skip
    settings = Settings("tiny", defaults={"temperature": 0.0}, adapter_folder=folder)
    with serving(engine, settings) as address, httpx.Client(base_url=address, timeout=60) as client:

        def answer(name):
            body = {"model": name, "prompt": PROMPTS[0], "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
            return client.post("/v1/completions", json={k: v for k, v in body.items() if v is not None})

        assert tuple(answer("a").json()["choices"][0]["token_ids"]) == expected["a"]
        assert answer("a").json()["model"] == "a" and answer("b").status_code == 404
        assert client.post("/v1/load_lora_adapter", json={"lora_name": "b"}).status_code == 200
        for name in (None, "b"):
            assert tuple(answer(name).json()["choices"][0]["token_ids"]) == expected[name]
        models = client.get("/v1/models").json()["data"]
        assert [(model["id"], model.get("parent")) for model in models] == [
            ("tiny", None),
            ("a", "tiny"),
            ("b", "tiny"),
        ]
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "b"}).status_code == 200
        assert answer("b").status_code == 404
        scored = client.post("/v1/completions", json={"model": "a", "prompt": "a", "prompt_logprobs": 1})
        assert scored.status_code == 400 and scored.json()["error"]["param"] == "model"
        for wrong in ({"lora_name": "../a"}, {"lora_name": "x", "lora_path": ".."}, {"lora_name": "x"}, {},
                      {"lora_name": "tiny"}, {"lora_name": "a"}):  # fmt: skip
            assert client.post("/v1/load_lora_adapter", json=wrong).status_code == 400
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "x"}).status_code == 400
    with serving(engine, Settings("tiny")) as address:
        for route in ("load", "unload"):
            assert httpx.post(f"{address}/v1/{route}_lora_adapter", json={"lora_name": "a"}).status_code == 403


@pytest.mark.long
def test_prefixes_of_adapters_come_back_for_the_same_adapter_alone(folder, tmp_path):
    tiers = CacheTiers(tmp_path)

    def started():
        return load(folder / "base", adapters=AdapterSizes(2, 8)).engine(compile="lazy", tiers=tiers)

    def answer(engine, name):
        (answer,) = engine.generate(PROMPTS[:1], GREEDY, [name])
        return answer.token_ids, answer.cached

    engine = started()
    engine.load_adapter("mine", folder / "a")
    tokens, cached = answer(engine, "mine")
    assert cached == 0
    engine.stop()
    engine = started()
    engine.load_adapter("mine", folder / "b")  # first too, and of the same name
    assert answer(engine, "mine") == (greedy(folder / "merged-b", PROMPTS[:1])[0], 0)
    engine.load_adapter("other", folder / "a")
    assert answer(engine, "other") == (tokens, 32) and tokens == greedy(folder / "merged-a", PROMPTS[:1])[0]
