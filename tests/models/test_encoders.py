"""Encoders and cross-encoders against transformers and sentence-transformers, on checkpoints of unusual sizes."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import sentence_transformers as st
import tokenizers
import torch
import transformers
from sentence_transformers.sentence_transformer import modules
from starlette.testclient import TestClient

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.inference import Embedder, Settings, make_app, plan_load
from vishwamai.models import SentenceEncoder, minilm
from vishwamai.models.cross_encoder import CrossEncoder
from vishwamai.models.encoders import is_cross_encoder, is_encoder

WORDS = [*("[PAD]", "[UNK]", "[CLS]", "[SEP]"), *"a b c d e f g h i j k l m n o p q r s t u v w x y z".split()]
SIZES = {"vocab_size": 33, "hidden_size": 30, "intermediate_size": 44, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 5, "pad_token_id": 0, "max_position_embeddings": 64}
LLAMA = {**SIZES, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**SIZES, "type_vocab_size": 3}),
    "xlm-roberta": ("XLMRoberta", {**SIZES, "type_vocab_size": 1, "pad_token_id": 1}),
    "roberta": ("Roberta", {**SIZES, "type_vocab_size": 1, "pad_token_id": 1}),
    "modernbert": ("ModernBert", {**SIZES, "local_attention": 6, "num_hidden_layers": 4}),
    "modernbert-biases": (
        "ModernBert",
        {**SIZES, "local_attention": 6, "norm_bias": True, "attention_bias": True, "mlp_bias": True,
         "classifier_bias": True, "classifier_pooling": "mean",
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "gte": ("Gte", {**SIZES, "hidden_size": 40, "type_vocab_size": 1}),
    "gte-types": ("Gte", {**SIZES, "hidden_size": 40, "type_vocab_size": 0, "rope_theta": 500.0}),
    "nomic_bert": ("NomicBert", {**SIZES, "hidden_size": 40, "type_vocab_size": 2}),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", {**SIZES, "hidden_size": 40, "type_vocab_size": 1, "pad_token_id": 1}),
    "qwen3": ("Qwen3", LLAMA),
    "gemma3": (
        "Gemma3Text",
        {**LLAMA, "use_bidirectional_attention": True, "sliding_window": 7, "query_pre_attn_scalar": 11,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}  # fmt: skip
ROTARY = ("gte", "gte-types", "nomic_bert", "jina_embeddings_v3")
TEXTS = ["a b c", "d", "the q r s t u v w x y z a b c d e f g h", "z y"]
PAIRS = [("a b c", "d e"), ("x", "y z a b c d e f g h i"), ("q r s t u v w", "q")]


def write_tokenizer(folder, kind: str, pad: int):
    words = dict(zip(WORDS, range(len(WORDS))))
    if pad == 1:
        words |= {"[PAD]": 1, "[UNK]": 0}
    encoder = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    pair = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
    encoder.post_processor = tokenizers.processors.TemplateProcessing(
        "$A [SEP]" if kind in ("qwen3", "gemma3") else "[CLS] $A [SEP]", pair, special
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if kind == "bert" else [])]
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=encoder, model_max_length=40, model_input_names=inputs, **names
    )
    fast.save_pretrained(folder)


def write(folder, family: str, task: str = "Model", **options: Any):
    """A random checkpoint, with weights large enough that every part counts."""
    name, sizes = FAMILIES[family]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**sizes, **options)
    model = getattr(transformers, name + task)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    write_tokenizer(folder, family, sizes["pad_token_id"])
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_sentence_transformers(family, tmp_path):
    write(tmp_path / "model", family)
    sizes = FAMILIES[family][1]
    transformer = modules.Transformer(str(tmp_path / "model"))
    transformer.max_seq_length = 20
    torch.manual_seed(0)
    parts: list[Any] = [
        transformer,
        modules.Pooling(sizes["hidden_size"], pooling_mode="lasttoken" if family == "qwen3" else "mean"),
    ]
    if family in ("gemma3", "xlm-roberta"):  # as EmbeddingGemma has it
        parts += [modules.Dense(30, 52, bias=False, activation_function=torch.nn.Identity()), modules.Dense(52, 17)]
    parts += [] if family == "bert" else [modules.Normalize()]
    prompts = {"query": "a b ", "document": ""}
    theirs = st.SentenceTransformer(
        modules=parts, prompts=prompts, default_prompt_name="query" if family == "modernbert" else None, device="cpu"
    )
    theirs.save(str(tmp_path / "saved"))
    ours = SentenceEncoder.from_pretrained(tmp_path / "saved")
    assert is_encoder(tmp_path / "saved") and ours.max_tokens == 20
    for name in (None, "query"):
        expected = theirs.encode(TEXTS, prompt_name=name)
        np.testing.assert_allclose(ours.embed(TEXTS, prompt_name=name), expected, atol=2e-5, rtol=2e-5)
    with pytest.raises(ShapeError, match="no prompt 'other'; its prompts are 'query'"):
        ours.embed(TEXTS, prompt_name="other")
    if family == "gemma3":
        with pytest.raises(UnsupportedError, match="use_bidirectional_attention.*serve it as an encoder"):
            plan_load(tmp_path / "model", dtype="float32")
    assert is_encoder(tmp_path / "model") == (family != "qwen3")  # which may also write texts


def write_tasks(model: Any, folder: Path) -> dict[str, Any]:
    """Adapters of two tasks in the model's folder; the models with them by the prompt's name."""
    targets = ["q_proj", "v_proj", "o_proj", "fc1", "fc2", "word_embeddings", "token_type_embeddings", "dense"]
    adapted = {}
    for i, name in enumerate(("retrieval.query", "text-matching")):
        torch.manual_seed(i)
        settings = peft.LoraConfig(r=3, lora_alpha=5 + i, target_modules=targets, init_lora_weights=False)
        adapted[name] = peft.get_peft_model(copy.deepcopy(model), settings).eval()
        adapted[name].save_pretrained(folder / name.replace(".", "_").replace("-", "_"))
    return adapted


def test_adapters_of_tasks_are_chosen_by_the_name_of_the_prompt(tmp_path):
    model = write(tmp_path, "jina_embeddings_v3")
    adapted = write_tasks(model, tmp_path)
    settings = {"prompts": {"retrieval.query": "a b ", "text-matching": ""}, "default_prompt_name": "text-matching"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    ours = SentenceEncoder.from_pretrained(tmp_path)
    served = Embedder.of_encoder(ours)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for name, prompt in (("retrieval.query", "a b "), ("text-matching", ""), (None, "")):
        texts = [prompt + text for text in TEXTS]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            states = adapted[name or "text-matching"](**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        expected = ((states * mask).sum(1) / mask.sum(1)).numpy()
        np.testing.assert_allclose(ours.embed(TEXTS, prompt_name=name), expected, atol=5e-5, rtol=5e-5)
        np.testing.assert_allclose(served(texts, task=name)[0], expected, atol=5e-5, rtol=5e-5)
    path = tmp_path / "text_matching" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_dora": True}))
    with pytest.raises(UnsupportedError, match="`use_dora` is True"):
        SentenceEncoder.from_pretrained(tmp_path)


def test_adapters_of_tasks_are_those_of_jina_alone(tmp_path):
    write_tasks(write(tmp_path, "jina_embeddings_v3"), tmp_path)
    write(tmp_path, "nomic_bert")
    with pytest.raises(UnsupportedError, match="nomic_bert has no adapters by task"):
        SentenceEncoder.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("qwen3", "gemma3", *ROTARY)])
@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity"])
def test_scores_are_those_of_transformers(family, activation, tmp_path):
    model = write(tmp_path, family, "ForSequenceClassification", num_labels=1)
    if activation is not None:
        path = tmp_path / "config.json"
        values = json.loads(path.read_text())
        path.write_text(json.dumps({**values, "sentence_transformers": {"activation_fn": activation}}))
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert is_cross_encoder(tmp_path)
    ours = CrossEncoder.from_pretrained(tmp_path)
    firsts, seconds = zip(*PAIRS)
    batch = tokenizer([*firsts], [*seconds], padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**batch).logits[:, 0]
    expected = (torch.sigmoid(logits) if activation is None else logits).numpy()
    assert np.ptp(expected) > 1e-3
    np.testing.assert_allclose(ours.score(PAIRS), expected, atol=2e-5, rtol=2e-5)
    theirs = st.CrossEncoder(str(tmp_path), device="cpu")
    long = [("a " * 30, "b " * 50), ("c " * 3, "d " * 60)]
    np.testing.assert_allclose(ours.score(long), theirs.predict(long), atol=2e-5, rtol=2e-5)


def test_pairs_are_ranked_by_http(tmp_path):
    write(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    encoder = CrossEncoder.from_pretrained(tmp_path)
    texts = [b for _, b in PAIRS]
    expected = encoder.score([("a b c", text) for text in texts])
    app = make_app(None, Settings("judge"), Embedder.of_cross_encoder(encoder))
    with TestClient(app) as client:
        answer = client.post("/v1/rerank", json={"query": "a b c", "documents": texts, "top_n": 2}).json()
        order = np.argsort(-expected)[:2]
        assert [result["index"] for result in answer["results"]] == order.tolist()
        values = [result["relevance_score"] for result in answer["results"]]
        np.testing.assert_allclose(values, expected[order], rtol=1e-5)
        long = {"text_1": "a b c", "text_2": ["b " * 60, *texts]}
        declined = client.post("/v1/score", json=long)
        assert declined.status_code == 400 and "pair 0 has 66 tokens, but the model takes 40" in declined.text
        cut = client.post("/v1/score", json={**long, "truncate_prompt_tokens": -1}).json()
        np.testing.assert_allclose([entry["score"] for entry in cut["data"][1:]], expected, rtol=1e-5)
        assert client.post("/v1/embeddings", json={"input": "a"}).json()["error"]["param"] == "model"


def test_prompts_by_http(tmp_path):
    write(tmp_path, "bert")
    prompts = {"prompts": {"query": "a b ", "passage": "c "}, "default_prompt_name": None}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    encoder = SentenceEncoder.from_pretrained(tmp_path)
    with TestClient(make_app(None, Settings("vectors"), Embedder.of_encoder(encoder))) as client:

        def vector(**options):
            return client.post("/v1/embeddings", json={"input": "d e", **options}).json()["data"][0]["embedding"]

        np.testing.assert_allclose(vector(), encoder.embed(["d e"])[0], atol=1e-5)
        query = encoder.embed(["d e"], prompt_name="query")[0]
        np.testing.assert_allclose(vector(prompt_name="query"), query, atol=1e-5)
        other = client.post("/v1/embeddings", json={"input": "a", "prompt_name": "other"})
        assert other.status_code == 400 and "'query', 'passage'" in other.text
        score = client.post("/v1/score", json={"text_1": "d e", "text_2": "f"}).json()["data"][0]["score"]
        passage = encoder.embed(["f"], prompt_name="passage")[0]
        cosine = query @ passage / np.linalg.norm(query) / np.linalg.norm(passage)
        assert abs(score - cosine) < 1e-5


def test_what_is_not_computed_is_named(tmp_path):
    write(tmp_path, "bert", "ForSequenceClassification", num_labels=3)
    with pytest.raises(UnsupportedError, match="has 3 labels"):
        CrossEncoder.from_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "sentence_transformers": {"activation_fn": "torch.nn.ReLU"}}))
    (tmp_path / "modules.json").write_text(
        json.dumps([{"type": "a.Transformer", "path": ""}, {"type": "a.LSTM", "path": ""}])
    )
    with pytest.raises(UnsupportedError, match="'LSTM' is not computed"):
        SentenceEncoder.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "modernbert", "hidden_activation": "relu"}))
    (tmp_path / "modules.json").unlink()
    with pytest.raises(UnsupportedError, match="`hidden_activation` is 'relu'"):
        SentenceEncoder.from_pretrained(tmp_path)


@pytest.mark.skipif(minilm.why_not() is not None, reason=str(minilm.why_not()))
def test_the_real_model_is_that_of_sentence_transformers():
    theirs = st.SentenceTransformer(str(minilm.directory()), device="cpu")
    texts = minilm.sentences()[:8]
    np.testing.assert_allclose(minilm.load().embed(texts), theirs.encode(texts), atol=1e-5)
