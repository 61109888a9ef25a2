"""`vishwamai evaluate`: transformers' perplexity of the same text, by the paged path in the form that is served."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import world
from models_families import TINY
from vishwamai.cli import main
from vishwamai.core.errors import ShapeError
from vishwamai.inference import plan_load
from vishwamai.inference.evaluation import Passes, evaluate, windows
from vishwamai.models import Decoder, ModelConfig

TEXT = Path(types.__file__).read_text(encoding="utf-8")[:700]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def one_cache(monkeypatch, cache):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture(scope="module")
def tiny():
    """Llama 2's tokenizer, which begins texts with BOS."""
    return world.tiny("llama2")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def peer_losses(directory, text, most=None):
    """Losses of the tokens after the first, by transformers in one pass in float32."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor([tokenizer(text)["input_ids"][:most]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1)
    return -logprobs.gather(1, ids[0, 1:, None])[:, 0].double().numpy()


def answer(capsys, *words):
    assert main(["evaluate", *map(str, words), "--no-keep-packed", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_perplexity_is_that_of_transformers(tiny, text, capsys):
    losses = peer_losses(tiny, TEXT)
    result = answer(capsys, tiny, "--text", text, "--dtype", "float32", "--step-tokens", "64")
    assert result["tokens"] == len(losses) and result["kv_dtype"] == "float32"
    assert math.isclose(result["perplexity"], math.exp(losses.mean()), rel_tol=1e-5)
    assert math.isclose(result["loss"], losses.mean(), rel_tol=1e-6)


def test_windows_score_each_token_once_with_enough_before_it():
    for count, context, stride in ((10, 6, 3), (100, 7, 1), (5, 8, 4), (64, 16, 15), (2, 2, 1)):
        scored = []
        for window in windows(count, context, stride):
            assert window.end - window.start <= context
            scored += range(window.first, window.end)
            assert window.start == 0 or window.first - window.start >= context - stride
        assert scored == list(range(1, count))


@pytest.mark.parametrize("name", ["llama2", pytest.param("qwen3", marks=pytest.mark.long)])
def test_windows_of_a_long_text_are_passes_of_their_own(name, text, capsys):
    """By transformers, window by window; those of Llama begin with BOS, those of Qwen do not."""
    directory = world.tiny(name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = tokenizer(TEXT)["input_ids"]
    begin = ids[: len(ids) - len(tokenizer(TEXT, add_special_tokens=False)["input_ids"])]
    assert len(begin) == (name == "llama2")
    body, total = ids[len(begin) :], 0.0
    with torch.no_grad():
        for window in windows(len(body), 48 - len(begin), 20):
            part = torch.tensor([[*begin, *body[window.start : window.end]]])
            logprobs = torch.log_softmax(model(part).logits[0, :-1], -1)
            chosen = logprobs.gather(1, part[0, 1:, None])[:, 0].double()
            first = 0 if window.start == 0 else window.first - window.start + len(begin) - 1
            total -= chosen[first:].sum().item()
    words = ("--dtype", "float32", "--context", "48", "--stride", "20", "--step-tokens", "32", "--page-size", "8")
    result = answer(capsys, directory, "--text", text, *words)
    assert result["tokens"] == len(ids) - 1
    assert math.isclose(result["loss"], total / (len(ids) - 1), rel_tol=1e-5)


@pytest.mark.turns(2)
def test_the_distance_from_the_float_model(tiny, text, capsys):
    words = (tiny, "--text", text, "--max-tokens", "40")
    losses = peer_losses(tiny, TEXT, 40)
    same = answer(capsys, *words, "--dtype", "float32", "--against", tiny)["against"]
    assert abs(same["kl"]) < 1e-6 and same["top1_agreement"] == 1.0 and same["dtype"] == "float32"
    worse = answer(capsys, *words, "--quantize", "int4", "--kv-dtype", "int8", "--against", "float32")
    assert worse["quantize"] == "int4" and worse["kv_dtype"] == "int8"
    assert 1e-7 < worse["against"]["kl"] < 0.1 and worse["against"]["top1_agreement"] < 1.0
    assert math.isclose(math.log(worse["against"]["perplexity"]), losses.mean(), rel_tol=1e-5)


def test_what_is_served_is_what_is_evaluated(tiny):
    """Log probabilities that the engine draws from are those of the same passes: int8 weights, head and pages."""
    from vishwamai.inference import Request, Sampling

    planned = plan_load(tiny, quantize="int8", kv_dtype="int8", max_sequences=1, max_tokens=64, max_length=256)
    engine = planned.engine(compile="lazy")
    prompt = [11, 12, 13, 14, 15, 16, 17, 18]
    deltas = []
    engine.submit(Request(tuple(prompt), Sampling(max_new_tokens=1, temperature=0.0, logprobs=1), deltas.append))
    while not engine.idle:
        engine.step()
    (token,) = [token for delta in deltas for token in delta.token_ids]
    logprob = deltas[0].logprobs[0].logprob
    passes = Passes(planned.decoder(), 64, "int8", tokenizer=planned.tokenizer)
    hidden = passes.hidden([*prompt, token], 0)
    logits = passes.model.logits(hidden[len(prompt) - 1]).astype(jnp.float32)
    np.testing.assert_allclose(jax.nn.log_softmax(logits)[token], logprob, atol=1e-3)


def test_several_texts_and_standard_input(tiny, text, capsys, monkeypatch, tmp_path):
    second = tmp_path / "second.txt"
    second.write_text("def main():\n    return 0\n" * 3)
    losses = [peer_losses(tiny, path.read_text()) for path in (text, second)]
    expected = np.concatenate(losses).mean()
    words = (tiny, "--dtype", "float32", "--text", text, "--text")
    assert math.isclose(answer(capsys, *words, second)["loss"], expected, rel_tol=1e-5)
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(second.read_bytes())))
    assert math.isclose(answer(capsys, *words, "-")["loss"], expected, rel_tol=1e-5)
    assert main(["evaluate", *map(str, (*words, second)), "--json", str(tmp_path / "result.json")]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("perplexity ") and said.err.startswith("... loading jax\n")
    assert math.isclose(json.loads((tmp_path / "result.json").read_text())["loss"], expected, rel_tol=1e-5)


def test_wrong_arguments_are_named(tiny, text, capsys, tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for words, said in (
        (["--text", "none.txt"], "--text none.txt: No such file or directory; pass a text file, or - for"),
        (["--text", str(tmp_path)], f"--text {tmp_path}: Is a directory"),
        (["--text", str(tmp_path / "bytes")], "the file is not UTF-8"),
        (
            ["--text", str(tmp_path / "empty")],
            "fewer than 2 tokens, and the first is not predicted;",
        ),
        (["--text", str(text), "--context", "1"], "--context is 1; pass 3 to 2048, the positions of the model."),
        (["--text", str(text), "--context", "9999"], "--context is 9999; pass 3 to 2048"),
        (["--text", str(text), "--context", "32", "--stride", "33"], "--stride is 33; pass 1 to 31"),
        (["--text", str(text), "--max-tokens", "1"], "--max-tokens is 1; pass at least 2"),
        (["--text", str(text), "--page-size", "0"], "--step-tokens and --page-size are at least 1."),
        (["--text", str(text), "--quantize", "keep"], "has no `quantization_config`"),
    ):
        assert main(["evaluate", str(tiny), *words]) == 2, words
        assert said in capsys.readouterr().err, words
    assert main(["evaluate", str(tmp_path / "none"), "--text", str(text)]) == 2
    with pytest.raises(ShapeError, match="fewer than 2 tokens"):
        evaluate(Passes(plan_load(tiny, max_length=16).decoder(), 16), [[1]], context=16, stride=8)


@pytest.mark.long
def test_an_interrupt_ends_it(tiny, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text(TEXT * 2000)
    words = [sys.executable, "-m", "vishwamai", "evaluate", str(tiny), "--text", str(path), "--context", "64"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "... loading jax\n"
        for line in process.stderr:
            if " of " in line and "tokens" in line and "left" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130 and "Traceback" not in rest


@pytest.mark.long
@pytest.mark.parametrize(
    "quantize, kv_dtype, most", [(None, None, 0.002), ("int8", None, 0.006), ("int8", "int8", 0.01)]
)
def test_real_weights_predict_real_text_as_transformers_says(quantize, kv_dtype, most, text, capsys):
    losses = peer_losses(world.smollm2(), TEXT)
    words = [world.smollm2(), "--text", text, "--against", "float32"]
    words += [] if quantize is None else ["--quantize", quantize]
    words += [] if kv_dtype is None else ["--kv-dtype", kv_dtype]
    result = answer(capsys, *words)
    assert math.isclose(result["against"]["perplexity"], math.exp(losses.mean()), rel_tol=1e-4)
    assert result["perplexity"] < (1 + 3 * most) * result["against"]["perplexity"] and result["against"]["kl"] < 0.02


@pytest.mark.turns(2)
def test_layers_with_a_state_begin_anew_in_every_window():
    """Of a model with short convolutions: two texts one after the other, by steps and by whole sequences."""
    config = ModelConfig.from_dict(TINY["lfm2"].config().to_dict())
    model = Decoder(config, rngs=nnx.Rngs(0), stacked=False)
    texts = np.random.default_rng(0).integers(3, 100, (2, 21)).tolist()
    result = evaluate(Passes(model, 21, page_size=4, step_tokens=8), texts, context=21, stride=20)
    logprobs = jax.nn.log_softmax(model.logits(model(jnp.asarray(texts)))[:, :-1])
    losses = -jnp.take_along_axis(logprobs, jnp.asarray(texts)[:, 1:, None], 2)
    assert result.tokens == 40 and math.isclose(result.loss, float(losses.mean()), rel_tol=1e-5)
