"""Directories that are damaged, or that describe what the decoder does not compute: errors that name the file, the key,
what was expected and what was found.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import rotation
from vishwamai import PackedQTensor, ShapeError, UnsupportedError, kernel_config
from vishwamai.core.observe import record_plans
from vishwamai.models import Decoder, ModelConfig, from_pretrained, pack_weights, save_pretrained
from vishwamai.models.shards import read_index

VALUES = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
QUERY = "model.layers.1.self_attn.q_proj.weight"


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the header of a safetensors file, or a JSON file."""
    data = path.read_bytes()
    if path.suffix == ".json":
        values = json.loads(data)
        change(values)
        path.write_text(json.dumps(values))
        return
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_pretrained(Decoder(ModelConfig.from_dict(VALUES), rngs=nnx.Rngs(0)), tmp_path)
    return tmp_path


def weights(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda path: edit(path / "model.safetensors", change)


def configuration(**values: Any) -> Callable[[Path], None]:
    return lambda path: edit(path / "config.json", lambda found: found.update(values))


def truncate(path: Path, size: int) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no configuration": (
        lambda p: (p / "config.json").unlink(),
        r"config.json: the file cannot be read \(No such file",
    ),
    "half a configuration": (lambda p: (p / "config.json").write_text("{"), "config.json: the file is not JSON"),
    "no weights": (
        lambda p: (p / "model.safetensors").unlink(),
        "expected model.safetensors or model.safetensors.index.json, found neither",
    ),
    "header cut": (lambda p: truncate(p, 100), "the header's length is [0-9]+ bytes, but the file has 100; expected"),
    "a directory in place of the weights": (
        lambda p: ((p / "model.safetensors").unlink(), (p / "model.safetensors").mkdir()),
        r"model.safetensors: the file cannot be read \(Is a directory\); expected a safetensors file",
    ),
    "empty": (lambda p: truncate(p, 0), "the header's length is -1 bytes, but the file has 0"),
    "weights cut": (lambda p: truncate(p, 9000), "ends at byte [0-9]+; expected a longer file, found 9000 bytes"),
    "header lies": (
        weights(lambda h: h[QUERY].update(shape=[99, 16])),
        f"model.safetensors: tensor `{QUERY}` has `data_offsets` = .*; expected 6336 bytes for F32 .99, 16.",
    ),
    "unknown dtype": (weights(lambda h: h[QUERY].update(dtype="F3")), f"`{QUERY}` has `dtype` = 'F3'; expected one of"),
    "tensor missing": (
        weights(lambda h: h.pop(QUERY)),
        f"tensor `{QUERY}` is missing; config.json expects it, of shape .16, 16.",
    ),
    "tensor too many": (
        weights(lambda h: h.update({"extra.weight": h.pop(QUERY)})),
        f"tensor `{QUERY}` is missing",
    ),
    "tensor without a place": (
        weights(lambda h: h.update({"extra.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})),
        "model.safetensors: tensor `extra.weight` is not expected in a llama model",
    ),
    "tensors that overlap": (
        weights(lambda h: h.update({"extra.weight": h[QUERY]})),
        r"model.safetensors: tensors `.*` and `.*` overlap at byte [0-9]+; the header does not describe",
    ),
    "a deep header": (
        lambda p: (p / "model.safetensors").write_bytes(struct.pack("<Q", 100_000) + b"[" * 100_000 + bytes(8)),
        "model.safetensors: the header is (nested too deeply|not JSON)",
    ),
    "dtype is a list": (weights(lambda h: h[QUERY].update(dtype=[])), "has `dtype` = .*; expected one of"),
    "sizes beyond 64 bits": (
        weights(lambda h: h[QUERY].update(shape=[10**30, 0])),
        "has `shape` = .*; expected a list",
    ),
    "a pipe": (
        lambda p: ((p / "model.safetensors").unlink(), os.mkfifo(p / "model.safetensors")),
        "model.safetensors: it is not a regular file",
    ),
    "a shard above": (
        lambda p: (p / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {QUERY: ".."}})),
        "the file cannot be read|it is not a regular file",
    ),
    "other width": (
        configuration(intermediate_size=25),
        r"mlp.gate_proj.weight` has shape \[24, 16\]; config.json expects \[25, 16\]",
    ),
    "other depth": (
        configuration(num_hidden_layers=2),
        "tensor `model.layers.2.input_layernorm.weight` is not expected",
    ),
    "shard missing": (
        lambda p: (p / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {QUERY: "two.safetensors"}})
        ),
        f"two.safetensors: the file is missing; .* expects 1 tensors there, such as `{QUERY}`",
    ),
    "shard elsewhere": (
        lambda p: (p / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {QUERY: "../a"}})),
        "`weight_map` has '../a'",
    ),
    "unknown key": (configuration(attention_chunk=4), "config.json: `attention_chunk` = 4 is not known for llama"),
    "unknown family": (configuration(model_type="xlstm"), "`model_type` is 'xlstm'; the decoder computes "),
    "unknown value": (configuration(pretraining_tp=2), "`pretraining_tp` is 2; the decoder computes llama with 1 only"),
    "unknown activation": (configuration(hidden_act="mish"), "`hidden_act` is 'mish'; the decoder has silu"),
    "unknown rotation": (configuration(rope_parameters={"rope_type": "spiral"}), "rope_type 'spiral'"),
    "missing key": (lambda p: edit(p / "config.json", lambda c: c.pop("hidden_size")), "`hidden_size` is missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, directory: Path) -> None:
    damage, text = DAMAGE[name]
    damage(directory)
    with pytest.raises((ShapeError, UnsupportedError), match=text):
        from_pretrained(directory, dtype=jnp.float32)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("call", ["exists", "open"])
def test_a_file_that_the_system_declines_is_named(
    call: str, number: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = getattr(Path, call)

    def declined(self: Path, *args: Any, **options: Any) -> Any:
        if self.suffix == ".safetensors":
            raise OSError(number, os.strerror(number), str(self))
        return plain(self, *args, **options)

    monkeypatch.setattr(Path, call, declined)
    with pytest.raises(ShapeError, match=rf"model.safetensors: the file cannot be read \({os.strerror(number)}\)"):
        from_pretrained(directory, dtype=jnp.float32)


def test_a_file_that_changes_after_its_header_was_read_is_named(directory: Path) -> None:
    stored = read_index(directory)[QUERY]
    truncate(directory, stored.offset)
    end = stored.offset + 4 * 16 * 16
    text = f"model.safetensors: a tensor ends at byte {end}; expected a longer file, found {stored.offset} bytes"
    with pytest.raises(ShapeError, match=text):
        stored.read()
    (directory / "model.safetensors").unlink()
    with pytest.raises(ShapeError, match=r"the file cannot be read \(No such file"):
        stored.read()


def test_shards_are_read_by_their_index(directory: Path) -> None:
    from safetensors.numpy import load_file, save_file

    whole = load_file(directory / "model.safetensors")
    expected = from_pretrained(directory, dtype=jnp.float32)
    (directory / "model.safetensors").unlink()
    names = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(whole))}
    for file in set(names.values()):
        save_file({name: whole[name] for name in whole if names[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    found = from_pretrained(directory, dtype=jnp.float32)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)))


@pytest.mark.parametrize("quantize", rotation.in_turn(3, ["int8", "int4", "fp8"]))
def test_quantized_weights_stay_close(quantize: str, directory: Path) -> None:
    tokens = jnp.arange(12)[None]
    exact = from_pretrained(directory, dtype=jnp.float32)
    model = from_pretrained(directory, dtype=jnp.float32, quantize=quantize)
    bytes_of = [sum(x.nbytes for x in jax.tree.leaves(m.layers)) for m in (exact, model)]
    assert bytes_of[1] < 0.4 * bytes_of[0]
    difference = jnp.abs(model(tokens) - exact(tokens)).max() / jnp.abs(exact(tokens)).max()
    assert 0 < difference < {"int8": 0.02, "int4": 0.3, "fp8": 0.15}[quantize]
    with pytest.raises(ShapeError, match="parameter `query` is a QTensor; save the model that it came from"):
        save_pretrained(model, directory / "again")
    # One operation has both products of a gated unit where it has a kernel for such weights.
    for target, fused in (("v6e", quantize != "int4"), ("h100", False)):
        with kernel_config(target=target):
            names = {plan.op.name for plan in record_plans(model, tokens)}
        assert ("gated_linear_unit" in names) == fused


@pytest.mark.turns(6)
def test_quantized_experts_stay_close_and_pack(tmp_path: Path) -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    exact = Decoder(ModelConfig.from_dict({**VALUES, **experts}), rngs=nnx.Rngs(0))
    save_pretrained(exact, tmp_path)
    model = from_pretrained(tmp_path, dtype=jnp.float32, quantize="int8", stacked=False)
    assert vars(model.layers[0])["expert_up"].get_value().format == "int8"
    tokens = jnp.arange(12)[None]
    expected = exact(tokens)
    for name, found in (("quantized", model), ("packed", pack_weights(model))):
        difference = jnp.abs(found(tokens) - expected).max() / jnp.abs(expected).max()
        assert 0 < difference < 0.04, name
    assert isinstance(vars(model.layers[0])["expert_up"].get_value(), PackedQTensor)


def test_random_weights_start_as_those_of_transformers() -> None:
    values = {**VALUES, "hidden_size": 64, "vocab_size": 500, "pad_token_id": 3, "initializer_range": 0.05}
    model = Decoder(ModelConfig.from_dict(values), rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    embed = model.embed.get_value()
    assert embed.dtype == jnp.bfloat16
    assert abs(float(embed.astype(jnp.float32).std()) - 0.05) < 0.001
    assert not embed[3].any()
    assert (model.norm.get_value() == 1).all()


def test_saving_over_shards_replaces_them(directory: Path, tmp_path: Path) -> None:
    """An index of shards would be preferred to the file that is written."""
    old = tmp_path / "sharded"
    shutil.copytree(directory, old)
    (old / "model.safetensors").rename(old / "model-00001-of-00001.safetensors")
    names = dict.fromkeys(read_index(directory), "model-00001-of-00001.safetensors")
    (old / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    model = Decoder(ModelConfig.from_dict(VALUES), rngs=nnx.Rngs(1), stacked=False)
    mask = os.umask(0o027)
    try:
        save_pretrained(model, old)
    finally:
        os.umask(mask)
    assert (old / "model.safetensors").stat().st_mode & 0o777 == 0o640
    loaded = from_pretrained(old, dtype=jnp.float32)
    for x, y in zip(jax.tree.leaves(nnx.state(loaded)), jax.tree.leaves(nnx.state(model))):
        assert (x == y).all()


def test_names_of_a_class_without_a_head(directory: Path) -> None:
    expected = from_pretrained(directory, dtype=jnp.float32)

    def bare(header: dict[str, Any]) -> None:
        for name in list(header):
            header[name.removeprefix("model.")] = header.pop(name)

    edit(directory / "model.safetensors", bare)
    loaded = from_pretrained(directory, dtype=jnp.float32)
    for x, y in zip(jax.tree.leaves(nnx.state(loaded)), jax.tree.leaves(nnx.state(expected))):
        assert (x == y).all()
