"""Steps of training next to plain `jax.nn` and torch: the same weights, batch, AdamW and precision, on this machine.

    python benchmarks/cpu.py training                  # 4 layers, 512 hidden, vocab of 32,000 tokens, 4 x 512 tokens
    python benchmarks/cpu.py training --quick          # a small model, for a test of this file
    python benchmarks/cpu.py training --dtypes bfloat16 --rounds 5
    python benchmarks/cpu.py training --model mixtral  # 8 experts of half the features, 2 of them for each token
    python benchmarks/cpu.py training --packed         # rows of several documents, which do not see one another

Every contestant runs in a process of its own, in turns, `--rounds` times; its best step and the median over rounds are
printed. Losses of the first and the last step must agree, or the program ends with an error and prints no speed.
torch computes bfloat16 by autocast; the others keep float32 parameters and cast them where they are used. Of experts
and packed rows there is no plain `jax.nn`; torch gets the mask of packed rows ready made.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "vocab_size": 32000}
QUICK = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
MODELS = ("llama", "mixtral")
IGNORED = -100
RATE, B1, B2, DECAY = 3e-4, 0.9, 0.999, 0.01
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}

Go = Callable[[], float]
"""One step, to its loss."""


def contestants(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Who takes part."""
    plain = arguments.model == "llama" and not arguments.packed
    return ("ours", "jax.nn", "torch") if plain else ("ours", "torch")


def described(arguments: argparse.Namespace) -> dict[str, Any]:
    """The config.json of the model."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    positions = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    sizes = QUICK if arguments.quick else SIZES
    config = {"model_type": "llama", "head_dim": sizes["hidden_size"] // 8, "rope_theta": 1e4}
    config |= heads | positions | sizes
    if arguments.model == "mixtral":  # as many features for each token as the dense model
        config |= EXPERTS | {"intermediate_size": sizes["intermediate_size"] // EXPERTS["num_experts_per_tok"]}
    return config


def batch(arguments: argparse.Namespace) -> dict[str, np.ndarray]:
    """`tokens`, `labels`, `segment_ids` and `positions`, `[rows, length]`; one document a row, or with `--packed` of an
    eighth to half a row each.
    """
    random, length = np.random.default_rng(1), arguments.length
    tokens = random.integers(0, described(arguments)["vocab_size"], (arguments.rows, length + 1)).astype(np.int32)
    segments = np.ones((arguments.rows, length), np.int32)
    if arguments.packed:
        for row in segments:
            starts = np.cumsum(random.integers(length // 8, length // 2, length))
            row[starts[starts < length]] += 1
        segments = np.cumsum(segments, axis=1) - np.arange(length, dtype=np.int32)
    first = np.diff(segments, axis=1, prepend=0) > 0
    place = np.arange(length, dtype=np.int32)
    positions = place - np.maximum.accumulate(np.where(first, place, 0), axis=1)
    last = np.pad(first[:, 1:], ((0, 0), (0, 1)))
    labels = np.where(last, IGNORED, tokens[:, 1:]).astype(np.int32)
    return {"tokens": tokens[:, :-1], "labels": labels, "segment_ids": segments, "positions": positions}


def ours(arguments: argparse.Namespace) -> Go:
    """The step of `vishwamai train`, compiled as there."""
    import jax
    import jax.numpy as jnp

    from vishwamai.core.host_memory import give_back
    from vishwamai.models import from_pretrained
    from vishwamai.training.config_file import from_dict
    from vishwamai.training.losses import model_loss
    from vishwamai.training.model import split
    from vishwamai.training.optimizers import optimizer
    from vishwamai.training.step import initial_state, train_step

    section = {"learning_rate": RATE, "schedule": "constant", "b1": B1, "b2": B2, "weight_decay": DECAY}
    config = from_dict({"optimizer": section | {"clip_norm": None}, "steps": 100})
    model = from_pretrained(arguments.directory, dtype=jnp.float32)
    model.dtype = jnp.dtype(arguments.child[1])
    parts = split(model)
    update = optimizer(config.optimizer, config.steps, parts.params, parts.ranks)
    loss = model_loss(parts.graph, parts.rest)

    def step_of_run(state: Any, batch: Any) -> Any:
        return train_step(state, batch, loss=loss, optimizer=update, config=config)

    step, tokens = jax.jit(step_of_run, donate_argnums=0), batch(arguments)
    states = [initial_state(parts.params, update)]
    step.lower(states[0], tokens).compile()
    give_back()

    def go() -> float:
        states[0], metrics = step(states[0], tokens)
        return float(metrics["loss"])

    return go


def plain(arguments: argparse.Namespace) -> Go:
    """The model on `jax.numpy` and `jax.nn`, the loss on whole logits, `optax.adamw`; nothing of ours."""
    import jax
    import jax.numpy as jnp
    import optax

    from vishwamai.models import from_pretrained
    from vishwamai.training.model import split

    about, dtype = described(arguments), jnp.dtype(arguments.child[1])
    params = split(from_pretrained(arguments.directory, dtype=jnp.float32)).params
    dim, eps = about["head_dim"], about["rms_norm_eps"]

    def dot(x: Any, w: Any) -> Any:
        return jnp.matmul(x, w.astype(dtype), preferred_element_type=jnp.float32).astype(dtype)

    def norm(x: Any, w: Any) -> Any:
        x = x.astype(jnp.float32)
        return (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * w).astype(dtype)

    def rotated(x: Any) -> Any:
        angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(dim // 2) / (dim // 2))
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(dtype)

    def loss(params: Any, tokens: Any, labels: Any) -> Any:
        x = params["embed"].astype(dtype)[tokens]
        for place in range(about["num_hidden_layers"]):
            layer = params["layers"][place]
            h = norm(x, layer["attention_norm"])
            q, k, v = (dot(h, layer[n]).reshape(*tokens.shape, -1, dim) for n in ("query", "key", "value"))
            mixed = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
            x = x + dot(mixed.reshape(*tokens.shape, -1), layer["output"])
            h = norm(x, layer["mlp_norm"])
            x = x + dot(jax.nn.silu(dot(h, layer["gate"])) * dot(h, layer["up"]), layer["down"])
        logits = jnp.matmul(norm(x, params["norm"]), params["head"].astype(dtype).T, preferred_element_type=jnp.float32)
        right = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - right)

    rule = optax.adamw(RATE, B1, B2, weight_decay=DECAY, mask=jax.tree.map(lambda p: p.ndim >= 2, params))

    def step_of_run(params: Any, state: Any, tokens: Any, labels: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens, labels)
        updates, state = rule.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    step, tokens_and_labels = jax.jit(step_of_run, donate_argnums=(0, 1)), batch(arguments)
    states = [(params, rule.init(params))]

    def go() -> float:
        *after, value = step(*states[0], tokens_and_labels["tokens"], tokens_and_labels["labels"])
        states[0] = tuple(after)
        return float(value)

    return go


def torch_step(arguments: argparse.Namespace) -> Go:
    """transformers' model and torch's fused AdamW."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.directory, dtype=torch.float32).train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    update = torch.optim.AdamW(groups, RATE, (B1, B2), fused=True)
    arrays = batch(arguments)
    tokens, labels = (torch.from_numpy(arrays[name]).long() for name in ("tokens", "labels"))
    packed: dict[str, Any] = {}
    if arguments.packed:
        segments = arrays["segment_ids"]
        sees = np.tril(segments[:, :, None] == segments[:, None, :])[:, None]  # [rows, 1, length, length]
        packed["attention_mask"] = torch.from_numpy(sees)
        packed["position_ids"] = torch.from_numpy(arrays["positions"]).long()

    def go() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.child[1] == "bfloat16"):
            logits = model(tokens, **packed).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
        update.step()
        update.zero_grad(set_to_none=True)
        return loss.item()

    return go


def child(arguments: argparse.Namespace) -> None:
    """One contestant: prints a line of JSON."""
    go = {"ours": ours, "jax.nn": plain, "torch": torch_step}[arguments.child[0]](arguments)
    losses, times = [go()], []
    for _ in range(arguments.steps):
        started = time.perf_counter()
        losses.append(go())
        times.append(time.perf_counter() - started)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print("RESULT " + json.dumps({"seconds": min(times), "losses": [losses[0], losses[-1]], "memory": memory}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and few steps")
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--packed", action="store_true", help="rows of several documents")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(TOLERANCE), default=list(TOLERANCE))
    parser.add_argument("--rounds", type=int, default=None, help="processes of each contestant; 3, or 1 with --quick")
    parser.add_argument("--steps", type=int, default=None, help="timed steps in a process; 5, or 2 with --quick")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.rows, arguments.length = (2, 32) if arguments.quick else (4, 512)
    arguments.steps = arguments.steps or (2 if arguments.quick else 5)
    if arguments.child:
        child(arguments)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return compare(arguments, folder)


def compare(arguments: argparse.Namespace, folder: str) -> int:
    """Runs the contestants in turns and prints a table."""
    from flax import nnx

    from vishwamai.models import Decoder, ModelConfig, save_pretrained

    save_pretrained(Decoder(ModelConfig.from_dict(described(arguments)), rngs=nnx.Rngs(0)), folder)
    names = contestants(arguments)
    entries = [(name, dtype) for dtype in arguments.dtypes for name in names]
    results: dict[tuple[str, str], list[dict[str, Any]]] = {entry: [] for entry in entries}
    for _ in range(arguments.rounds or (1 if arguments.quick else 3)):
        for entry in entries:
            command = [sys.executable, __file__, "--child", *entry, "--directory", folder]
            command += ["--steps", str(arguments.steps), "--model", arguments.model]
            command += [f"--{flag}" for flag in ("quick", "packed") if getattr(arguments, flag)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                print(f"{' '.join(entry)} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
                return 1
            results[entry].append(json.loads(lines[0].removeprefix("RESULT ")))
    for dtype in arguments.dtypes:
        losses = {name: results[name, dtype][0]["losses"] for name in names}
        for name in names:
            if not np.allclose(losses[name], losses["torch"], atol=TOLERANCE[dtype]):
                print(
                    f"{dtype}: the losses of {name} are {losses[name]}, torch's are {losses['torch']}", file=sys.stderr
                )
                return 1
    tokens = arguments.rows * arguments.length
    print(
        f"{'':24}{'tokens/s':>12}{'of torch':>12}{'memory':>12}   "
        f"(median of {len(results[entries[0]])} processes' best)"
    )
    for name, dtype in entries:
        speed, theirs = (tokens / statistics.median(r["seconds"] for r in results[n, dtype]) for n in (name, "torch"))
        memory = statistics.median(r["memory"] for r in results[name, dtype]) / 2**30
        print(f"{name + ' ' + dtype:24}{speed:>12,.0f}{speed / theirs:>11.2f}x{memory:>8.2f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
