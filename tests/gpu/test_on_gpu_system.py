"""Models, the engine and training on a GPU, by JAX's programs: next to transformers in float64 on the CPU, and to
training in float32 on the CPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import models_peer  # noqa: E402
from models_families import TINY  # noqa: E402
from on_gpu import DEVICE, needs_gpu  # noqa: E402
from vishwamai.inference import Engine, Limits, Sampling  # noqa: E402
from vishwamai.models import from_pretrained  # noqa: E402

pytestmark = [
    needs_gpu,
    pytest.mark.skipif(
        jax.default_backend() != {"cuda": "gpu"}.get(DEVICE, DEVICE), reason="JAX's programs run on the CPU"
    ),
]
FAMILIES = [
    "llama", "mistral", "qwen3", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3",
    "glm4_moe", "minimax_m2", "granite", "exaone4", "smollm3",
]  # fmt: skip
TOKENS = np.random.default_rng(0).integers(3, 131, (2, 48))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits(name, tmp_path):
    """Float32 within twice transformers' own error on the CPU, whose products are float32; of bfloat16 the mean error,
    for a rounding that changes the choice of an expert changes that token's logits.
    """
    peer = TINY[name].save(tmp_path)
    exact = models_peer.peer_logits(peer, TOKENS, double=True)
    bound = 2 * np.abs(models_peer.peer_logits(peer, TOKENS) - exact).max() + 48 * 2.0**-24 * np.abs(exact).max()
    with torch.no_grad():
        narrow = peer.bfloat16()(torch.as_tensor(TOKENS), use_cache=False).logits.double().numpy()

    def error(dtype):
        model = from_pretrained(tmp_path, dtype=dtype)
        return np.abs(np.asarray(model.logits(model(jnp.asarray(TOKENS))), np.float64) - exact)

    with jax.default_matmul_precision("highest"):
        wide = error(jnp.float32)
    short = error(jnp.bfloat16)
    print(f"{name}: float32 {wide.max():.1e} (allowed {bound:.1e}), bfloat16 mean {short.mean():.1e}")
    assert wide.max() <= bound
    assert short.mean() <= 2 * np.abs(narrow - exact).mean()


@pytest.mark.parametrize("quantize", [None, "int8", "fp8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_greedy_tokens_of_the_engine(name, quantize, tmp_path):
    """In bfloat16, and with rounded weights: every token is the likeliest of transformers in float64, or as close to it
    as this model's own logits are to those of float64; with chunks, a second sequence, and the prefix cache.
    """
    peer = TINY[name].save(tmp_path)
    prompts = [TOKENS[0, :37].tolist(), TOKENS[1, :7].tolist()]
    model = from_pretrained(tmp_path, dtype=jnp.bfloat16, quantize=quantize)
    limits = Limits(max_sequences=2, max_tokens=16, max_length=64, page_size=4)
    engine = Engine(model, limits=limits, compile="lazy")
    sampling = Sampling(max_new_tokens=16, ignore_eos=True)
    peer, equal, texts = peer.double(), 0, []
    for _ in range(2):
        for prompt, answer in zip(prompts, engine.generate(prompts, sampling), strict=True):
            texts.append(answer.token_ids)
            tokens = np.array([prompt + list(answer.token_ids)])
            exact = models_peer.peer_logits(peer, tokens)[0]
            ours = np.asarray(model.logits(model(jnp.asarray(tokens))), np.float64)[0]
            rows = slice(len(prompt) - 1, -1)
            missing = exact[rows].max(-1) - np.take_along_axis(exact[rows], tokens[0, len(prompt) :, None], 1)[:, 0]
            assert (missing <= 2 * np.abs(ours - exact)[rows].max(-1) + 0.02).all(), missing
            equal += int((missing == 0).sum())
    print(f"{name} {quantize}: {equal} of 64 tokens are the likeliest")
    assert equal >= 16


def run(platform, *arguments):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": platform, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-m", "vishwamai", *map(str, arguments)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_commands(tmp_path):
    """`vishwamai train` of the example, 20 steps in each dtype; `vishwamai generate` of what was trained."""
    example = Path(__file__).parents[2] / "examples" / "train_stdlib.yaml"
    common = ["steps=20", "evaluation.every=0", "checkpoint.every=20", "tokenizer.sample_bytes=400000"]
    common += ["batch_size=2", "data.sequence_length=128"]
    expected = None
    for name, platform, dtype in (
        ("wide", "cpu", "float32"), ("float32", DEVICE, "float32"), ("bfloat16", DEVICE, "bfloat16"),
        ("float16", DEVICE, "float16"),
    ):  # fmt: skip
        run(platform, "train", example, *common, f"model.compute_dtype={dtype}", "--output", tmp_path / name)
        loss = losses(tmp_path / name)
        expected = expected or loss
        far = np.abs(np.subtract(loss, expected)).max()
        print(f"{dtype} on {platform}: loss {loss[0]:.4f} to {loss[-1]:.4f}, at most {far:.1e} from float32 on the CPU")
        assert len(loss) == 20 and far <= (2e-3 if dtype == "float32" else 5e-2)
    ask = ["generate", tmp_path / "wide" / "model", "--prompt", "def read(self, size):", "--max-new-tokens", 24]
    ask += ["--temperature", 0, "--ignore-eos", "--json", "--compile", "lazy", "--max-length", 64]

    def tokens(platform, *options):
        return json.loads(run(platform, *ask, *options).splitlines()[-1])["token_ids"]

    right = tokens("cpu", "--dtype", "float32")
    assert tokens(DEVICE, "--dtype", "float32") == right
    for options in (["--dtype", "bfloat16"], ["--dtype", "bfloat16", "--quantize", "int8"]):
        seen = tokens(DEVICE, *options)
        same = next((n for n, (a, b) in enumerate(zip(seen, right, strict=True)) if a != b), len(right))
        print(f"{options}: the first {same} of {len(right)} tokens are those of float32")
        assert same >= 4
