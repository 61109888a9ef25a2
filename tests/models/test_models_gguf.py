"""GGUF files: blocks next to ggml's own Python package, models next to transformers' reading of the same files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import world
from models_peer import Peer
from serving import serving
from vishwamai import ShapeError, UnsupportedError, pack_weight
from vishwamai.cli import main
from vishwamai.core.qtensor import QTensor
from vishwamai.inference import Settings, plan_load
from vishwamai.models import (
    Decoder,
    from_pretrained,
    pack_weights,
    read_config,
    read_generation_config,
    read_tokenizer,
    save_pretrained,
)
from vishwamai.models.gguf import LINK, model_directory
from vishwamai.models.gguf_blocks import BLOCK_TYPES, decoded
from vishwamai.models.gguf_container import BlockTensor, read_container
from vishwamai.models.gguf_parts import block_weights
from vishwamai.models.published import Decoded
from vishwamai.models.shifted_weight import ShiftedWeight
from vishwamai.models.variables import named_parameters

gguf = pytest.importorskip("gguf")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VISHWAMAI_WEIGHTS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("number", BLOCK_TYPES)
def test_blocks_are_those_of_ggml(number: int) -> None:
    kind = BLOCK_TYPES[number]
    type = gguf.GGMLQuantizationType[kind.name]
    assert type.value == number and gguf.GGML_QUANT_SIZES[type] == (kind.numbers, kind.bytes)
    draw = np.random.default_rng(number)
    if kind.numbers == 1:
        values = draw.normal(size=(4, 32)).astype(np.float32)
        data = gguf.quants.quantize(values, type)
    else:
        data = draw.integers(0, 256, (64, kind.bytes)).astype(np.uint8)
        halves = draw.normal(size=(64, kind.bytes // 2)).astype(np.float16).view(np.uint8)
        places = {"Q6_K": [(208, 210)], "MXFP4": []}.get(kind.name, [(0, 2), (2, 4)])
        for start, end in places if kind.name not in ("Q4_0", "Q5_0", "Q8_0") else [(0, 2)]:
            data[:, start:end] = halves[:, start:end]  # finite scales
        if kind.name == "MXFP4":
            data[:, 0] = draw.integers(100, 140, 64)
    expected = gguf.quants.dequantize(data, type)
    found = decoded(kind, data.view(np.uint8).reshape(-1)).reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def write(path: Path, architecture: str, peer: Any, values: dict[str, Any], quantize: str = "F32") -> Path:
    """A GGUF file of a model of transformers, by the names and the order of rows that llama.cpp's converter writes."""
    writer = gguf.GGUFWriter(path, architecture)
    config = peer.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("rope_theta", 10000.0))
    for key, value in values.items():
        getattr(writer, key)(value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    for name, tensor in peer.state_dict().items():
        array = tensor.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        kind = gguf.GGMLQuantizationType[quantize if array.ndim == 2 else "F32"]
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([chr(33 + i) for i in range(config.vocab_size)])
    writer.add_token_merges([])
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("architecture", "name", "options", "values"),
    [
        ("llama", "Llama", {}, {"add_rope_dimension_count": 16}),
        ("qwen2", "Qwen2", {}, {}),
        (
            "qwen3",
            "Qwen3",
            {"head_dim": 32, "tie_word_embeddings": True},
            {"add_key_length": 32, "add_value_length": 32},
        ),
    ],
)
def test_a_file_has_the_logits_of_the_model_it_was_made_of(
    architecture: str, name: str, options: dict[str, Any], values: dict[str, Any], tmp_path: Path
) -> None:
    import torch

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    peer = Peer(name, {**sizes, "num_hidden_layers": 2, "vocab_size": 64, **options}).save(tmp_path / "plain")
    path = write(tmp_path / "model.gguf", architecture, peer, values)
    tokens = np.arange(12)[None] * 5 % 64
    with torch.no_grad():
        expected = peer(torch.tensor(tokens)).logits.float().numpy()
    model = from_pretrained(path, dtype=jnp.float32)
    found = model.logits(model(jnp.array(tokens)))
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())
    assert read_generation_config(path).eos_token_ids == (2,)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(world.SMOLLM2_GGUF, marks=pytest.mark.long),
        pytest.param(world.GEMMA3_GGUF, marks=pytest.mark.soak),  # transformers takes minutes for it
    ],
)
def test_a_real_file_is_read_as_transformers_reads_it(name: str) -> None:
    """Weights and logits of the same file, and its answer to a question."""
    import torch
    from transformers import AutoModelForCausalLM

    path = world.gguf(name)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=name, dtype=torch.float32)
    tokenizer = read_tokenizer(path)
    ids = tokenizer.encode("The capital of France is")
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    del theirs
    model = from_pretrained(path, dtype=jnp.float32)
    found = np.asarray(model.logits(model(jnp.array([ids])))[0])
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()
    if name == world.SMOLLM2_GGUF:
        assert tokenizer.decode([int(found[-1].argmax())]) == " Paris"


def test_tokenizers_of_real_files() -> None:
    """SmolLM2's next to transformers' reading, Gemma 3's next to the published tokenizer.json."""
    texts = [
        "The capital of France is Paris.",
        "  two\n\n\ttabs x**2 12345",
        "grüß Gott 你好 🤷🏽‍♀️",
        "<|im_start|>user\nhi",
    ]
    texts += (world.WORLD / "README.md").read_text(encoding="utf-8").splitlines()[:60]
    published = read_tokenizer(world.smollm2())
    smollm2 = read_tokenizer(world.gguf(world.SMOLLM2_GGUF))
    assert smollm2.template is not None and published.template is not None
    chat = [{"role": "user", "content": "Hello"}]
    assert smollm2.chat(chat) == published.chat(chat)
    for text in texts:
        assert smollm2.decode(smollm2.encode(text), skip_special=False) == text
        if not any(character.isdigit() for character in text):  # which transformers leaves together
            assert smollm2.encode(text) == published.encode(text), text
    digits = smollm2.encode("12345")
    assert [smollm2.decode([id]) for id in digits] == list("12345")  # as SmolLM2's own tokenizer, llama.cpp's "smollm"


@pytest.mark.long
def test_the_tokenizer_of_a_sentencepiece_file_is_the_published_one() -> None:
    published, gemma = read_tokenizer(world.tokenizer("gemma3")), read_tokenizer(world.gguf(world.GEMMA3_GGUF))
    texts = ["The capital of France is Paris.", "  two\n\n\ttabs x**2 12345", "grüß Gott 你好 🤷🏽‍♀️ \u200b", ""]
    texts += (world.WORLD / "README.md").read_text(encoding="utf-8").splitlines()[:80]
    for text in texts:
        assert gemma.encode(text) == published.encode(text), text
        ids = published.encode(text)
        assert gemma.decode(ids) == published.decode(ids)
    assert gemma.special["bos_token"] == "<bos>"


SHIFTED = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


@pytest.mark.parametrize("number", [number for number, kind in BLOCK_TYPES.items() if kind.numbers > 1])
def test_blocks_in_their_own_numbers(number: int, tmp_path: Path) -> None:
    kind, draw = BLOCK_TYPES[number], np.random.default_rng(number)
    data = draw.integers(0, 256, (96, kind.bytes)).astype(np.uint8)
    for start in {"Q6_K": (208,), "MXFP4": (), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(kind.name, (0, 2)):
        data[:, start : start + 2] = draw.normal(size=(96, 1)).astype(np.float16).view(np.uint8)
    if kind.name == "MXFP4":
        data[:, 0] = draw.integers(100, 140, 96)
    (tmp_path / "blocks").write_bytes(data.tobytes())
    shape = (32, 3 * kind.numbers)
    tensor = BlockTensor(tmp_path / "blocks", 0, shape, kind, change=lambda rows: rows[::-1])
    weight = block_weights({"a": tensor})["a"]
    assert isinstance(weight, Decoded) and weight.shape == shape
    storage = weight.check_representable()
    held = storage.tensor(*(jnp.asarray(np.ascontiguousarray(part.read().T)) for part in weight.quantized_parts()))
    assert isinstance(held, ShiftedWeight) == (kind.name in SHIFTED) == storage.shifted
    expected = tensor.read()
    error = 4 * 2.0**-24 * np.abs(expected).max() if kind.name in SHIFTED else 0  # of sums in another order
    for found in (weight.read(), held.dequantize().T):
        np.testing.assert_allclose(found, expected, rtol=0, atol=error)


def test_a_file_is_held_in_its_own_numbers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    peer = Peer("Llama", {**sizes, "num_hidden_layers": 1, "vocab_size": 64}).save(tmp_path / "plain")
    path = write(tmp_path / "a.gguf", "llama", peer, {"add_rope_dimension_count": 16}, "Q8_0")
    plain, held = (from_pretrained(path, dtype=jnp.float32, quantize=how) for how in (None, "keep"))
    formats = set()
    for (name, *_, expected), (*_, value) in zip(named_parameters(plain), named_parameters(held)):
        formats.add(value.format if isinstance(value, QTensor) else None)
        found = value.dequantize() if isinstance(value, QTensor) else value
        np.testing.assert_array_equal(found, expected, err_msg=name)
    assert formats == {None, "int8"}
    load = plan_load(path, quantize="keep", max_length=16, max_sequences=1, dtype="float32")
    assert "in its published numbers" in str(load)
    assert load.weights < plan_load(path, max_length=16, max_sequences=1, dtype="float32").weights


@pytest.mark.parametrize(("kind", "format"), [("Q4_1", "int4"), ("Q5_1", "int8")])
def test_blocks_with_a_least_number_are_held_as_shifted_weights(
    kind: str, format: str, tmp_path: Path, cache: Path
) -> None:
    """Their logits are those of plain weights: as arrays, packed, from the packed file and over two devices."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    peer = Peer("Llama", {**sizes, "num_hidden_layers": 2, "vocab_size": 64}).save(tmp_path / "plain")
    path = write(tmp_path / "a.gguf", "llama", peer, {"add_rope_dimension_count": 16}, kind)
    tokens = jnp.arange(12)[None] * 5 % 64

    def logits(model: Decoder) -> np.ndarray:
        return np.asarray(jax.jit(lambda model, tokens: model.logits(model(tokens)))(model, tokens))

    expected = logits(from_pretrained(path, dtype=jnp.float32))
    held = from_pretrained(path, dtype=jnp.float32, quantize="keep")
    weights = {name: value for name, *_, value in named_parameters(held) if isinstance(value, ShiftedWeight)}
    assert {"query", "key", "value", "output", "gate", "up", "down"} == weights.keys()
    assert {(value.tensor.format, value.tensor.block_size) for value in weights.values()} == {(format, 32)}
    bound = 2e-5 * np.abs(expected).max()
    np.testing.assert_allclose(logits(held), expected, rtol=0, atol=bound)
    with pytest.raises(ShapeError, match="parameter `query` is a ShiftedWeight; save the model that it came from"):
        save_pretrained(held, tmp_path / "again")

    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Explicit,))
    rules = {"heads": "tensor", "kv_heads": "tensor", "mlp": None}
    with jax.set_mesh(mesh):
        split = from_pretrained(path, dtype=jnp.float32, quantize="keep", mesh=mesh, rules=rules)
        np.testing.assert_allclose(logits(split), expected, rtol=0, atol=bound)

    rounded = 0.06 * np.abs(expected).max()  # activations have 8 bits next to packed weights
    options: dict[str, Any] = {"quantize": "keep", "max_length": 32, "max_sequences": 1, "dtype": "float32"}
    load = plan_load(path, **options, keep_packed=True)
    arrays = [load._decoder(model_directory(path), load.config, None, lambda _: None) for _ in range(2)]
    assert any(cache.rglob("weights.bin"))
    for model in arrays:
        np.testing.assert_allclose(logits(model), expected, rtol=0, atol=rounded)
    for one, other in zip(*(jax.tree.leaves(nnx.state(model)) for model in arrays), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert load.weights == sum(x.nbytes for x in jax.tree.leaves(arrays[0]))
    assert load.weights < plan_load(path, **{**options, "quantize": None}).weights


def test_experts_with_shifts_give_the_products_of_what_they_stand_for() -> None:
    """Three experts, one without rows, of 40 inputs in blocks of 16: the last one is short. Packed, too."""
    draw = np.random.default_rng(0)
    values = draw.integers(-8, 8, (3, 40, 24)).astype(np.int8)
    scales, shifts = (draw.normal(size=(3, 3, 24)).astype(np.float32) for _ in range(2))
    weight = ShiftedWeight(QTensor(jnp.asarray(values), jnp.asarray(scales), "int8", -2, 16), jnp.asarray(shifts))
    packed = ShiftedWeight(pack_weight(weight.tensor, activations="exact"), weight.shifts)
    rows, sizes = draw.normal(size=(9, 40)).astype(np.float32), np.array([4, 0, 5])
    wide = np.asarray(weight.dequantize(), np.float64)
    block = np.arange(40) // 16
    np.testing.assert_allclose(wide, values * scales[:, block] + shifts[:, block], rtol=1e-6)
    expected = np.concatenate([part @ matrix for part, matrix in zip(np.split(rows, [4, 4]), wide)])
    for form in (weight, packed):
        found = form.grouped(jnp.asarray(rows), jnp.asarray(sizes))
        np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max())
        one = jax.tree.map(lambda x: x[2], form)
        np.testing.assert_allclose(jnp.asarray(rows) @ one, rows @ wide[2], atol=1e-5 * np.abs(expected).max())


@pytest.mark.long
def test_a_real_file_of_q4_k_is_held_in_its_own_numbers() -> None:
    """Gemma 3 270M: rows of 640 numbers, which blocks of 256 do not divide, are in other types of blocks."""
    path = world.gguf(world.GEMMA3_GGUF)
    tokens = jnp.array([read_tokenizer(path).encode("The capital of France is Paris, and that of Germany is")])

    def logits(model: Decoder) -> np.ndarray:
        return np.asarray(jax.jit(lambda model, tokens: model.logits(model(tokens)))(model, tokens))

    expected, held = (from_pretrained(path, dtype=jnp.float32, quantize=how) for how in (None, "keep"))
    forms = [type(value).__name__ for _, entry, _, value in named_parameters(held) if entry.matrix]
    assert forms.count("ShiftedWeight") == 27 and forms.count("QTensor") == 99
    wide, found = logits(expected), logits(held)
    assert np.abs(found - wide).max() <= 2e-5 * np.abs(wide).max()
    assert (logits(pack_weights(held)).argmax(-1) == wide.argmax(-1)).all()
    sizes = [plan_load(path, quantize=how, max_length=256, max_sequences=1).weights for how in ("keep", None)]
    assert sizes[0] < 0.83 * sizes[1]  # the embedding has two thirds of the parameters


@pytest.mark.long
def test_generate_from_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    path = world.gguf(world.SMOLLM2_GGUF)
    small = ["--max-length", "64", "--max-sequences", "1", "--step-tokens", "16"]
    small += ["--dtype", "float32", "--compile", "lazy"]
    options = ["--max-new-tokens", "2", "--temperature", "0", "--no-keep-packed"]
    assert main(["generate", str(path), "--prompt", "The capital of France is", *options, *small]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(" Paris") and f"loading llama, 30 layers, from {path}, in float32" in output.err


@pytest.mark.long
def test_a_server_of_a_file() -> None:
    path = world.gguf(world.GEMMA3_GGUF)
    planned = plan_load(path, max_sequences=1, max_tokens=64, max_length=128)
    settings = Settings(path.name, max_new_tokens=8, defaults={"temperature": 0.0})
    with serving(planned.engine(compile="lazy"), settings) as address, httpx.Client(base_url=address) as client:
        texts = ["The capital of France is", "Ünïcode 日本 🎉"]
        for text in texts:
            ids = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
            assert ids == read_tokenizer(world.tokenizer("gemma3")).encode(text, add_special=False)
        body = {"prompt": texts[0], "model": path.name}
        answer = client.post("/v1/completions", json=body, timeout=300).json()
        assert "capital" in answer["choices"][0]["text"] and answer["usage"]["prompt_tokens"] == 6


def header(**values: Any) -> bytes:
    """A container without tensors."""
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values))
    for key, value in values.items():
        name = key.replace("__", ".").encode()
        text = str(value).encode()
        data += struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, len(text)) + text
    return data


DAMAGE = {
    "empty": (b"", "the header reads 4 bytes at 0, but the file has 0"),
    "another format": (b"PK\x03\x04" * 20, "does not begin with GGUF"),
    "another version": (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "the version of GGUF is 9"),
    "absurd counts": (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 2**62), "the header counts [0-9]+ entries"),
    "an absurd text": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60) + bytes(64), "the header counts [0-9]+ entries"),
    "another architecture": (header(general__architecture="mamba"), "`general.architecture` is 'mamba'; GGUF files of"),
    "no tensors": (header(general__architecture="llama"), "the number of heads is None"),
    "absurd tensor": (
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"a", 1, 2**60, 0, 0) + bytes(64),
        "does not fit into the file's",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    content, problem = DAMAGE[name]
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises((ShapeError, UnsupportedError), match=f"a.gguf: .*({problem})"):
        read_config(tmp_path / "a.gguf")
    with pytest.raises(ShapeError, match="expected a GGUF file"):
        read_config(tmp_path / "none.gguf")


def test_any_cut_is_an_error(tmp_path: Path) -> None:
    """Every length and 300 changed bytes of a small file's header: an error of ours, or a container."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    peer = Peer("Llama", {**sizes, "num_hidden_layers": 1, "vocab_size": 32}).save(tmp_path / "plain")
    data = write(tmp_path / "a.gguf", "llama", peer, {}, "Q8_0").read_bytes()
    draw = np.random.default_rng(0)
    changed = [data[:size] for size in draw.integers(0, len(data), 100)]
    for place, value in zip(draw.integers(0, 1500, 200), draw.integers(0, 256, 200)):
        changed.append(data[:place] + bytes([value]) + data[place + 1 :])
    for content in changed:
        (tmp_path / "b.gguf").write_bytes(content)
        try:
            model_directory(tmp_path / "b.gguf")
        except (ShapeError, UnsupportedError):
            continue
    assert len(read_container(tmp_path / "a.gguf").tensors) == 12
    folder = model_directory(tmp_path / "a.gguf")
    assert (folder / LINK).resolve() == tmp_path / "a.gguf" and json.loads((folder / "config.json").read_text())
    assert model_directory(folder) == folder
