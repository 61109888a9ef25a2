"""The `optimization` dict: what each key sets in training, serving and planning, and what contradicts it."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from vishwamai.cli import main
from vishwamai.core.config import current_config, kernel_config
from vishwamai.core.errors import ConfigError, UnsupportedError
from vishwamai.core.observe import Observer, watching
from vishwamai.inference import Engine, Limits, Sampling, plan_load
from vishwamai.models import Decoder, ModelConfig, save_pretrained
from vishwamai.models.checkpoint import quantized
from vishwamai.models.variables import parameter_variables
from vishwamai.parallel.optimization import Optimization, explain_optimization
from vishwamai.planning.memory.analytic import serving_memory, training_memory
from vishwamai.planning.search.candidates import candidates, meshes
from vishwamai.planning.serving import Serving
from vishwamai.training.config_file import describe, from_dict, load_yaml, to_dict
from vishwamai.training.run import train

KEYS = tuple(field.name for field in dataclasses.fields(Optimization))
LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 64,
}


class Choices(Observer):
    """What every call of an operation saw: the operation, the implementation asked for, the ambient block size."""

    def __init__(self):
        self.seen: list[tuple[str, Any, Any]] = []

    def planned(self, plan):
        self.seen.append((plan.op.name, plan.implementation, current_config().block_size))

    def of(self, *names: str) -> set[Any]:
        return {seen[1:] for seen in self.seen if seen[0] in names}


@pytest.mark.parametrize(
    "keys, purpose, found",
    [
        ({"use_fp8": True}, "training", {"precision": "fp8"}),
        ({"use_fp8": True, "kv_cache_fp8": True}, "serving", {"quantize": "fp8", "kv_dtype": "fp8"}),
        ({"use_fp8": False, "kv_cache_fp8": False}, "serving", {"quantize": None, "kv_dtype": None}),
        ({"gradient_checkpointing": True}, "training", {"remat": "block_wise"}),
        ({"gradient_checkpointing": "auto:3GiB"}, "training", {"remat": "auto:3GiB"}),
        ({"gradient_checkpointing": False}, "training", {"remat": "none"}),
        ({"kv_cache_fp8": True}, "training", {}),
        (dict.fromkeys(("use_pjit", "attention_memory_efficient"), True) | {"block_size": 64}, "training", {}),
        (dict.fromkeys(KEYS), "training", {}),
    ],
)
def test_what_the_keys_set(keys, purpose, found):
    assert Optimization.of(keys).settings(purpose) == found
    assert Optimization.of(keys).settings(purpose, dict(found)) == {n: v for n, v in found.items() if v is None}


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"use_fp9": True}, r"unknown key 'use_fp9'; did you mean use_fp8\? The keys are use_fp8, gradient_"),
        ({3: True}, "unknown key 3; The keys are"),
        ({"use_fp8": "yes"}, "use_fp8 is 'yes', of type str; pass true or false"),
        ({"use_pjit": 1}, "use_pjit is 1"),
        ({"gradient_checkpointing": 2}, "gradient_checkpointing is 2.* a policy"),
        ({"gradient_checkpointing": ""}, "gradient_checkpointing is ''"),
        ({"block_size": 0}, "block_size is 0; pass a positive number"),
        ({"block_size": True}, "block_size is True"),
        ("use_fp8", "expected a dict"),
    ],
)
def test_wrong_keys_and_values_are_errors(keys, words):
    with pytest.raises(ConfigError, match=words):
        Optimization.of(keys)


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"optimization": {"use_fp8": True}, "precision": "plain"}, "use_fp8=true asks for precision=fp8, but prec"),
        ({"optimization": {"use_fp8": False}, "precision": "fp8"}, "use_fp8=false asks for precision=plain"),
        ({"optimization": {"gradient_checkpointing": True}, "remat": "none"}, "remat=block_wise, but remat=none"),
        ({"optimization": {"gradient_checkpointing": "full"}, "remat": "dots"}, "=full asks for remat=full, but rem"),
        ({"optimization": {"gradient_checkpointing": False}, "remat": "full"}, "false asks for remat=none"),
        ({"optimization": {"use_pjit": False}, "mesh": {"fsdp": 2}}, "use_pjit=false asks for one device, but the sec"),
        ({"optimization": {"use_fp": True}}, "unknown key optimization.use_fp; did you mean optimization.use_fp8"),
        ({"optimization": {"block_size": -1}}, "block_size is -1"),
    ],
)
def test_a_training_file_that_contradicts_its_section_names_both(keys, words):
    with pytest.raises(ConfigError, match=words):
        from_dict(keys)


def test_a_dict_may_be_the_section_alone(tmp_path):
    keys = {"optimization": {"use_fp8": True, "kv_cache_fp8": True}}
    assert Optimization.of(keys) == Optimization(use_fp8=True, kv_cache_fp8=True)
    assert "precision=fp8" in str(explain_optimization(keys))
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    arguments = ["explain", "vishwamai:rms_norm", "--args", "f32[8,16]", "--optimization", str(tmp_path / "keys.json")]
    assert main([*arguments, "--optimization", "block_size=64"]) == 0
    with pytest.raises(ConfigError, match="unknown key 'optimization'"):
        Optimization.of(keys | {"use_fp8": True})


def test_a_training_file_is_read_back_as_it_is_printed():
    config = from_dict({"optimization": {"use_fp8": True, "gradient_checkpointing": "full"}})
    assert (config.precision, config.remat) == ("fp8", "full")
    assert from_dict(load_yaml(describe(config))) == config == from_dict(to_dict(config))
    assert from_dict({"optimization": {"use_fp8": True}, "precision": "fp8"}).precision == "fp8"
    with pytest.raises(ConfigError, match="gradient_checkpointing=full asks for remat=full, but remat=dots"):
        dataclasses.replace(config, remat="dots")  # in Python too


@pytest.mark.parametrize("purpose", ["training", "serving", "function"])
def test_every_key_is_explained_for_every_purpose(purpose):
    keys = dict.fromkeys(KEYS, True) | {"block_size": 256}
    report = explain_optimization(keys, purpose, devices=8)
    assert [one.key for one in report.effects] == list(KEYS)
    for one in report.effects:
        assert one.words and (one.sets is not None or one.words.startswith("no effect: ")), one
        assert f"{one.key}=" in str(report)
    alike = {"attention_memory_efficient", "block_size"}  # those of kernels have an effect everywhere
    silent = {one.key for one in report.effects if one.sets is None}
    expected = {"training": {"kv_cache_fp8"}, "serving": {"gradient_checkpointing"}, "function": set(KEYS) - alike}
    assert silent == expected[purpose]
    assert ("all devices (8)" in str(report)) == (purpose != "function")


def run_files(folder, **changes):
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    values = {
        "model": {"config": {k: value for k, value in LLAMA.items() if k != "vocab_size"}, "compute_dtype": "float32"},
        "tokenizer": {"vocab_size": 300},
        "data": {"sources": [{"paths": [str(folder / "text.txt")]}], "sequence_length": 16},
        "steps": 1,
        "batch_size": 8,
    }
    return from_dict(values | changes)


@pytest.mark.long
def test_training_runs_as_the_keys_say(tmp_path):
    keys = {"attention_memory_efficient": False, "block_size": 96, "use_pjit": True, "kv_cache_fp8": True}
    chosen, plain = Choices(), Choices()
    with watching(chosen):
        (record,) = train(run_files(tmp_path, optimization=keys), tmp_path / "run")
    with watching(plain):
        (same,) = train(run_files(tmp_path), tmp_path / "plain")
    assert chosen.of("attention") == {("xla", 96)} and plain.of("attention") == {(None, None)}
    assert {size for _, _, size in chosen.seen} == {96}
    assert record.loss == pytest.approx(same.loss, rel=1e-4)
    assert f"fsdp: {jax.device_count()} " in (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=f"all {jax.device_count()} devices, but the section mesh has 2"):
        next(train(run_files(tmp_path, optimization={"use_pjit": True}, mesh={"data": 2}), tmp_path / "third"))


@pytest.mark.long
def test_train_says_what_each_key_does(tmp_path, capsys):
    config = to_dict(run_files(tmp_path))
    del config["remat"]
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    arguments = ["train", str(tmp_path / "run.yaml"), "optimization.gradient_checkpointing=true"]
    assert main([*arguments, "--output", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("optimization, training:") and "remat=block_wise" in said
    # What a run wrote is a configuration of its own.
    assert main(["train", str(tmp_path / "run" / "config.yaml"), "--output", str(tmp_path / "again")]) == 0


def small_decoder():
    return Decoder(ModelConfig.from_dict(LLAMA), rngs=nnx.Rngs(0))


@pytest.mark.long
def test_an_engine_runs_as_the_keys_say():
    limits = Limits(max_sequences=1, max_tokens=4, max_length=16, page_size=4)
    keys = {"attention_memory_efficient": False, "block_size": 96, "kv_cache_fp8": True}
    chosen = Choices()
    with watching(chosen):
        engine = Engine(small_decoder(), limits=limits, optimization=keys)
    assert {size for _, _, size in chosen.seen} == {96}
    assert chosen.of("paged_attention") == {("xla", 96)}
    assert engine.programs.pages[0].pool.dtype == jnp.float8_e4m3fn
    (answer,) = engine.generate([[1, 2, 3]], Sampling(max_new_tokens=3))
    assert len(answer.token_ids) == 3
    with pytest.raises(ConfigError, match="kv_cache_fp8=true asks for kv_dtype=fp8, but kv_dtype=int8"):
        Engine(small_decoder(), limits=limits, kv_dtype="int8", optimization={"kv_cache_fp8": True})
    with pytest.raises(UnsupportedError, match="use_fp8 takes effect while a model is loaded"):
        Engine(small_decoder(), limits=limits, optimization={"use_fp8": True})


@pytest.fixture
def directory(tmp_path):
    save_pretrained(small_decoder(), tmp_path / "model")
    return tmp_path / "model"


def test_loading_reads_the_keys(directory, capsys):
    found = plan_load(directory, optimization={"use_fp8": True, "kv_cache_fp8": True, "block_size": 128})
    assert (found.quantize, found.kv_dtype, found.mesh, found.optimization.block_size) == ("fp8", "fp8", None, 128)
    assert plan_load(directory, quantize="int8", optimization={"use_fp8": False}).quantize == "int8"
    assert plan_load(directory, optimization={"use_pjit": True}).mesh == f"tensor={jax.device_count()}"
    for keys, options, words in (
        ({"use_fp8": True}, {"quantize": "int8"}, "use_fp8=true asks for quantize=fp8, but quantize=int8"),
        ({"kv_cache_fp8": False}, {"kv_dtype": "fp8"}, "kv_cache_fp8=false asks for kv_dtype=none"),
        ({"use_pjit": False}, {"mesh": "tensor=2"}, "use_pjit=false asks for one device, but mesh=tensor=2 has 2"),
        ({"user_fp8": True}, {}, "unknown key 'user_fp8'; did you mean use_fp8"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan_load(directory, optimization=keys, **options)  # pyright: ignore

    arguments = ["generate", str(directory), "--token-ids", "1,2", "--max-new-tokens", "1", "--max-length", "16"]
    assert main([*arguments, "--optimization", "use_fp9=true"]) == 2
    assert "unknown key 'use_fp9'; did you mean use_fp8?" in capsys.readouterr().err
    assert main([*arguments, "--optimization", "nothing.json"]) == 2
    assert "--optimization nothing.json: No such file" in capsys.readouterr().err


@pytest.mark.long
def test_generate_says_what_each_key_does(directory, tmp_path, capsys):
    (tmp_path / "keys.json").write_text(json.dumps({"kv_cache_fp8": True, "gradient_checkpointing": "full"}))
    arguments = ["generate", str(directory), "--token-ids", "1,2", "--max-new-tokens", "1", "--max-length", "16"]
    arguments += ["--step-tokens", "8", "--optimization", str(tmp_path / "keys.json"), "--optimization", "use_fp8=true"]
    assert main(arguments) == 0
    said = capsys.readouterr().err
    for words in ("kv_dtype=fp8", "quantize=fp8", "no effect: only training takes gradients", "block_size  "):
        assert words in said
    assert "in fp8 (other arrays bfloat16)" in said


def test_explain_runs_a_function_under_the_keys(capsys):
    arguments = ["explain", "vishwamai:flash_attention", "--args", "f32[1,2,256,64], f32[1,2,256,64], f32[1,2,256,64]"]
    assert main([*arguments, "--target", "v5e", "--optimization", "attention_memory_efficient=false"]) == 0
    out = capsys.readouterr().out
    assert "-> xla" in out and out.count("KernelConfig.use_flash=false") == 3
    assert main([*arguments, "--target", "v5e"]) == 0
    out = capsys.readouterr().out
    assert "-> pallas_tpu" in out and "optimization" not in out


def planned(**changes):
    model = {"config": LLAMA | {"num_hidden_layers": 2}, "compute_dtype": "bfloat16"}
    return from_dict({"model": model, "data": {"sequence_length": 64}, "batch_size": 8, **changes})


@pytest.mark.long
def test_formulas_of_training_read_the_section():
    plain = planned(mesh={"fsdp": 4}, remat="block_wise")
    keys = {"use_pjit": True, "gradient_checkpointing": True, "kv_cache_fp8": True}
    assert training_memory(planned(optimization=keys), "v5e:2x2") == training_memory(plain, "v5e:2x2")
    with pytest.raises(ConfigError, match="all 4 devices, but the section mesh has 2"):
        training_memory(planned(optimization={"use_pjit": True}, mesh={"data": 2}), "v5e:2x2")
    wide = planned(optimization={"attention_memory_efficient": False})  # the scores are kept
    assert training_memory(wide, "v5e").total.value > training_memory(planned(), "v5e").total.value


def test_a_search_keeps_what_the_section_sets():
    keys = {"use_pjit": True, "gradient_checkpointing": True}
    config = planned(optimization=keys)
    found = list(candidates(config, "v5e:2x2"))
    assert {one.remat for one in found} == {"block_wise"}
    assert {one.mesh for one in found} == set(meshes(config, "v5e:2x2")) and len({one.mesh.fsdp for one in found}) == 3
    with pytest.raises(ConfigError, match="use_pjit=false asks for one device"):
        list(candidates(planned(optimization={"use_pjit": False}), "v5e:2x2"))


def test_a_plan_of_serving_counts_fp8_weights_and_pages():
    config = ModelConfig.from_dict(LLAMA | {"hidden_size": 256, "intermediate_size": 1024})
    plain = serving_memory(Serving(config, 2, 64), "v5e").parts
    fp8 = serving_memory(Serving(config, 2, 64, kv_dtype="fp8", quantize="fp8"), "v5e").parts
    weights = 4 * 256 * 256 + 3 * 256 * 1024
    scales = 4 * (4 * 256 + 2 * 1024 + 256)
    assert plain["parameters"].value - fp8["parameters"].value == 2 * weights - weights - scales
    assert fp8["kv"].value == plain["kv"].value / 2 + 2 * 8 * 4  # a scale for each head's keys and values


def test_a_plan_of_serving_counts_4_bits_as_half_a_byte():
    """As the `QTensor`s of the model do."""
    config = ModelConfig.from_dict(LLAMA | {"hidden_size": 256, "intermediate_size": 1024})
    int8, int4 = (serving_memory(Serving(config, 2, 64, quantize=name), "v5e").parts for name in ("int8", "int4"))
    weights = 4 * 256 * 256 + 3 * 256 * 1024
    columns, blocks = 4 * 256 + 2 * 1024 + 256, weights // 32
    assert int8["parameters"].value - int4["parameters"].value == weights // 2 - 4 * (blocks - columns)
    model = Decoder(config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16, stacked=True)
    held = (entry.get_value() for *_, entry in parameter_variables(quantized(model, "int4")))
    assert int4["parameters"].value == sum(value.nbytes for value in held)


def test_the_command_plans_under_the_keys(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert main(["plan", str(tmp_path), "--target", "v5e:2x2", "--optimization", "use_pjit=true"]) == 2
    assert "use_pjit=true splits a served model over the 4 devices of v5e:2x2" in capsys.readouterr().err
    (tmp_path / "run.yaml").write_text("{precision: plain}")
    assert main(["plan", str(tmp_path / "run.yaml"), "--target", "v5e", "--optimization", "use_fp8=true"]) == 2
    assert "use_fp8=true asks for precision=fp8, but precision=plain" in capsys.readouterr().err


def test_keys_of_kernels_keep_the_rest_of_the_ambient_configuration():
    with kernel_config(strict=True, block_size=512), Optimization(attention_memory_efficient=False).kernels():
        found = current_config()
    assert (found.strict, found.block_size, found.use_flash) == (True, 512, False)
