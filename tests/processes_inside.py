"""What the tests of several processes compute, in one process or in many: `python processes_inside.py NAME FILE`.

Every function takes the number of devices and gives NumPy arrays, the same ones whatever the number of processes.
"""

import functools
import math
import sys
import tempfile
import unittest.mock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import vishwamai
from vishwamai.models import Decoder, ModelConfig, from_pretrained, save_pretrained
from vishwamai.models.shards import Stored
from vishwamai.parallel import (
    LogicalRules,
    PipelineScheduler,
    from_zigzag,
    initialize,
    make_mesh,
    pipelined_loss,
    place_parts,
    ring_attention,
    shard,
    shardings,
    to_zigzag,
)
from vishwamai.training.together import fetched


def whole(tree: Any) -> list[np.ndarray]:
    """The leaves of a tree, on every process."""
    if jax.process_count() == 1:
        return [np.asarray(x) for x in jax.tree.leaves(tree)]
    return [np.asarray(multihost_utils.process_allgather(x, tiled=True)) for x in jax.tree.leaves(tree)]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def pieces(devices: int) -> list[np.ndarray]:
    """Arrays that lie on all devices, fetched in pieces as a run's model is at its end."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))
    made = [normal(1, 16, 8, 3), normal(2, 4, 16), normal(3, 7, 5), np.float32(2)]
    places = [PartitionSpec("fsdp"), PartitionSpec(None, "fsdp"), PartitionSpec(), PartitionSpec()]
    found = [
        jax.make_array_from_callback(np.shape(x), NamedSharding(mesh, place), lambda index, x=x: x[index])
        for x, place in zip(made, places)
    ]
    return [np.asarray(fetched(x, piece=300)) for x in found]


def fsdp(devices: int) -> list[np.ndarray]:
    """Loss and gradients of a few layers: weights and batch split over all devices, weights gathered where they run."""
    mesh = make_mesh({"fsdp": devices}, devices=jax.devices()[:devices])
    rules = LogicalRules({"embed": "fsdp", "mlp": None})
    axes = {"up": ("embed", "mlp"), "down": ("mlp", "embed"), "scale": (None,)}
    weights = {
        str(i): {"up": normal(i, 32, 48) / 6, "down": normal(10 + i, 48, 32) / 7, "scale": 1 + normal(20 + i, 32) / 9}
        for i in range(2)
    }
    specs = jax.tree.map(lambda s: s.spec, shardings(weights, mesh, rules, axes))
    rows = PartitionSpec("fsdp")

    def gathered(x: Any, spec: PartitionSpec) -> Any:
        split = [i for i, entry in enumerate(spec) if entry is not None]
        return jax.lax.all_gather(x, "fsdp", axis=split[0], tiled=True) if split else x

    def local(weights: Any, x: Any, y: Any) -> Any:
        for name, layer in weights.items():
            layer = jax.tree.map(gathered, layer, specs[name])
            inner = jnp.tanh(vishwamai.rms_norm(x, layer["scale"]) @ layer["up"])
            x = x + inner @ layer["down"]
        return jax.lax.psum(jnp.sum((x - y) ** 2), "fsdp") / (devices * x.size)

    loss = jax.shard_map(local, mesh=mesh, in_specs=(specs, rows, rows), out_specs=PartitionSpec())
    batch = jax.device_put((normal(30, 16, 32), normal(31, 16, 32)), NamedSharding(mesh, rows))
    return whole(jax.jit(jax.value_and_grad(loss))(shard(weights, mesh, rules, axes), *batch))


def ring(devices: int) -> list[np.ndarray]:
    """Attention over a split sequence, with its gradients."""
    mesh = make_mesh({"sequence": devices}, devices=jax.devices()[:devices])
    split = PartitionSpec(None, None, "sequence")
    attend = functools.partial(ring_attention, axis="sequence", causal=True, placement="zigzag")
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=split, out_specs=split)
    arrays = [np.asarray(to_zigzag(jnp.asarray(normal(seed, 1, 2, 64, 16)), devices)) for seed in range(4)]
    q, k, v, g = jax.device_put(arrays, NamedSharding(mesh, split))

    def weighed(q: Any, k: Any, v: Any, g: Any) -> Any:
        out = mapped(q, k, v)
        return jnp.sum(out * g), out

    run = jax.jit(jax.value_and_grad(weighed, argnums=(0, 1, 2), has_aux=True))
    (value, out), gradients = run(q, k, v, g)
    placed = whole((out, gradients))
    return [*whole(value), *(np.asarray(from_zigzag(jnp.asarray(x), devices)) for x in placed)]


def pipeline(devices: int) -> list[np.ndarray]:
    """Loss and gradients of a pipeline, a stage on each device."""
    mesh = make_mesh({"stage": devices}, devices=jax.devices()[:devices])
    schedules = PipelineScheduler("zb_v").schedule_microbatches(num_stages=devices, batch_size=2 * devices)

    def part(weights: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ weights)

    def loss(head: Any, y: Any, targets: Any) -> Any:
        return jnp.mean((y @ head - targets) ** 2)

    run = pipelined_loss(part, loss, schedules, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    arguments = (normal(0, 2 * devices, 16, 16) / 9, normal(1, 16), normal(2, 2 * devices, 16), normal(3, 2 * devices))

    def step(weights: Any, head: Any, x: Any, targets: Any) -> Any:
        return run(place_parts(weights, schedules), head, x, targets)

    compute = jax.jit(jax.value_and_grad(step, argnums=(0, 1)))
    return whole(compute(*jax.device_put(arguments, everywhere)))


def experts(devices: int) -> list[np.ndarray]:
    """Experts split over all devices: their outputs, and the gradients of tokens and weights."""
    return _experts({"expert": devices})


def experts_of_slices(devices: int) -> list[np.ndarray]:
    """As `experts`, whose tokens travel within a slice first, and then between two slices."""
    return _experts({"slice": 2, "expert": devices // 2})


def experts_ragged(devices: int) -> list[np.ndarray]:
    """As `experts`, where only the rows travel that there are, by what stands in for it on CPUs."""
    from ragged import gathered_ragged_all_to_all

    with unittest.mock.patch.object(jax.lax, "ragged_all_to_all", gathered_ragged_all_to_all):
        return _experts({"expert": devices}, exchange="ragged")


def _experts(sizes: dict[str, int], **options: Any) -> list[np.ndarray]:
    devices, axes = math.prod(sizes.values()), tuple(sizes)
    mesh = make_mesh(sizes, devices=jax.devices()[:devices])
    split, whole_of = PartitionSpec(axes), PartitionSpec()
    arrays = (normal(0, 4 * devices, 16), normal(1, 16, devices), *(normal(i, devices, 16, 16) / 4 for i in (2, 3, 4)))

    def local(tokens: Any, *weights: Any) -> Any:
        return vishwamai.moe_layer(tokens, *weights, top_k=2, expert_axis=axes, **options).out

    specs = (split, whole_of, split, split, split)
    layer = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=split)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]

    def weighed(*arrays: Any) -> Any:
        out = layer(*arrays)
        return jnp.sum(jnp.sin(out)), out

    return whole(jax.jit(jax.value_and_grad(weighed, argnums=range(5), has_aux=True))(*placed))


def loading(devices: int) -> list[np.ndarray]:
    """A checkpoint over all devices, of which each process reads the parts of its own ones."""
    config = ModelConfig.from_dict(
        {
            "model_type": "llama",
            "vocab_size": 64,
            "hidden_size": 128,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "max_position_embeddings": 64,
        }
    )
    read: list[int] = []
    mapped = Stored.read

    class Counted(np.ndarray):
        def __getitem__(self, at: Any) -> np.ndarray:
            found = np.asarray(self)[at]
            read.append(found.nbytes)
            return found

    mesh = make_mesh({"tensor": devices}, devices=jax.devices()[:devices])
    rules: dict[str, Any] = dict.fromkeys(("vocab", "heads", "kv_heads", "mlp"), "tensor")
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(Decoder(config, rngs=nnx.Rngs(0)), folder)
        with unittest.mock.patch.object(Stored, "read", lambda one: mapped(one).view(Counted)):
            model = from_pretrained(folder, dtype=jnp.float32, mesh=mesh, rules=rules)
    leaves = jax.tree.leaves(nnx.state(model))
    own = sum(shard.data.nbytes for x in leaves for shard in x.addressable_shards)
    every = sum(x.nbytes for x in leaves)
    assert 0 < sum(read) <= own, (sum(read), own)
    assert sum(read) < 1.05 * every / jax.process_count(), (sum(read), every)
    return whole(leaves)


if __name__ == "__main__":
    processes = initialize(timeout=120)
    found = globals()[sys.argv[1]](jax.device_count())
    if processes.index == 0:
        np.savez(sys.argv[2], *found)
