"""A program as a user writes it: `make types` checks it in strict mode, and nothing runs it."""

# pyright: strict

from typing import assert_type

import jax
import jax.numpy as jnp

import vishwamai
from vishwamai.inference import Delta, Engine, Limits, Request, Sampling, Settings, make_app, plan_load, serving_rules
from vishwamai.models import ModelConfig, SentenceEncoder, from_pretrained, read_config, save_pretrained
from vishwamai.parallel import make_mesh
from vishwamai.planning import Plan, StepTime, plan_training, step_time
from vishwamai.training import Record, TrainConfig, train
from vishwamai.training import read_config as read_training


def block(x: jax.Array, scale: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    normed, total = vishwamai.rms_norm(assert_type(vishwamai.layer_norm(x), jax.Array), scale, residual=x)
    query = vishwamai.gemm(normed, weight).reshape(2, 128, 8, 64).swapaxes(1, 2)
    query, key = vishwamai.apply_rope((assert_type(vishwamai.apply_rope(query), jax.Array), query))
    out = assert_type(vishwamai.flash_attention(query, key, key, causal=True), jax.Array)
    out, lse = vishwamai.flash_attention(query, key, out, return_lse=True)
    loss = assert_type(vishwamai.linear_cross_entropy(total, weight, labels), jax.Array)
    return vishwamai.softmax(out + lse[..., None], axis=-1) + vishwamai.silu(total).sum() + loss


def serve(directory: str) -> list[int]:
    config: ModelConfig = read_config(directory)
    model = from_pretrained(directory, dtype=jnp.float32)
    engine = Engine(model, limits=Limits(max_sequences=4, max_tokens=64, max_length=128), num_pages=64)
    deltas: list[Delta] = []
    engine.submit(Request((1, 2, 3), Sampling(max_new_tokens=4, temperature=0.0), deltas.append))
    while not engine.idle:
        engine.step()
    save_pretrained(model, "copy")
    print(plan_load(directory), make_app(engine, Settings("copy")), serving_rules(config, {"tensor": 2}))
    print(SentenceEncoder.from_pretrained(directory).max_tokens, make_mesh({"data": 2}))
    return [token for delta in deltas for token in delta.token_ids]


def learn(path: str) -> float:
    config: TrainConfig = read_training(path, ["steps=10"])
    records: list[Record] = list(train(config, "run"))
    plan: Plan = plan_training(config, "v5e:2x2", verify=False)
    x = jax.ShapeDtypeStruct((2, 128, 512), jnp.bfloat16)
    time: StepTime = step_time(block, x, x, x, x, target="v5e")
    print(plan.chosen, time.step.value, vishwamai.explain(block, x, x, x, x, target="v5e"))
    return records[-1].loss
