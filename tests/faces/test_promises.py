"""The documents that users hold in hand run as written: every Python block of theirs in order, and every signature with
exactly its parameters.

The documents lie next to the repository where it is developed. The lines that no JAX runs, and the nearest forms, are
those of docs/old-documents.md.
"""

import ast
import functools
import inspect
import logging
import re
import time
import types
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vishwamai
from vishwamai import kernels, performance
from vishwamai.kernels import tpu

ROOT = Path(__file__).parents[2]
FOLDER = ROOT.parent / "shared" / "promises"
PAGE = ROOT / "docs" / "old-documents.md"
DOCUMENTS = ("capibara-kernels", "performance-system", "three-platforms", "tpu-kernel-classes", "tpu-kernels")

pytestmark = pytest.mark.filterwarnings("ignore::vishwamai.FallbackWarning")


class Block(NamedTuple):
    """A Python block. `title`: its first line of code."""

    line: int
    title: str
    text: str


def blocks(text: str) -> list[Block]:
    found = []
    for match in re.finditer(r"^```python\n(.*?)(?:^```|\Z)", text, re.DOTALL | re.MULTILINE):
        code = match[1]
        first = next(line for line in code.splitlines() if line.strip() and not line.lstrip().startswith("#"))
        # A signature without a body ends in its colon.
        whole = code if not code.rstrip().endswith(":") else f"{code.rstrip()}\n{' ' * 12}...\n"
        found.append(Block(text.count("\n", 0, match.start()) + 2, first.strip(), whole))
    return found


@functools.cache
def document(name: str) -> list[Block]:
    path = FOLDER / f"{name}.md"
    if not path.exists():
        pytest.skip(f"{name}.md is not next to the repository: its blocks are not run")
    return blocks(path.read_text(encoding="utf-8"))


@functools.cache
def exceptions() -> dict[str, str]:
    """What docs/old-documents.md says of a block, by its first line of code."""
    sections = re.split(r"^### `(.*)`\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return dict(zip(sections[::2], sections[1::2], strict=True))


class Net(nnx.Module):
    """What a reader's model may be."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape, dtype)


def prelude(name: str) -> dict[str, Any]:
    """The names that a reader of a document has."""
    import typing

    import torch

    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "torch": torch, "time": time, "nn": flax.linen}
    names |= {n: getattr(typing, n) for n in ("Any", "Callable", "Dict", "List", "Optional", "Tuple")}
    if name == "performance-system":
        names |= {n: getattr(performance, n) for n in performance.__all__} | {"Mesh": jax.sharding.Mesh}
    elif name == "capibara-kernels":
        names |= {n: normal(1, 2, 64, 16) for n in ("q_tensor", "k_tensor", "v_tensor", "tensor1", "tensor2")}
        names |= {"mask": jnp.ones((1, 1, 64, 64), bool), "matrix_a": normal(32, 48), "matrix_b": normal(24, 48)}
        names |= {"batch_tensors": [normal(4, 16)] * 3, "norm_params": {"weight": jnp.ones(16), "bias": jnp.zeros(16)}}
        names |= {"input_tokens": normal(64, 32), "hidden_states": normal(4, 16), "ffn_intermediate": normal(4, 64)}
        names |= {"norm_weight": jnp.ones(16), "norm_bias": jnp.zeros(16)}
    elif name == "three-platforms":
        names |= {n: getattr(kernels, n) for n in kernels.__all__}
        names |= {"logger": logging.getLogger("promises"), "data": normal(8, 8)}
    elif name == "tpu-kernel-classes":
        names |= {"y": normal(1024, 1024)}
    elif name == "tpu-kernels":
        names |= {n: getattr(tpu, n) for n in ("tpu_kernel", "register_tpu_op", "PrecisionConfig")}
        names |= {"PartitionSpec": jax.sharding.PartitionSpec, "data": normal(128, 128), "expected_shape": (128, 128)}
        names |= {"my_tpu_kernel": tpu.tpu_kernel(lambda x: vishwamai.rms_norm(x))}
        names |= dict.fromkeys(("batch", "height", "width", "channels"), 256)
        names |= {"a": normal(128, 128), "b": normal(128, 128), "devices": np.array(jax.devices()).reshape(4, 2)}
    return names


@functools.cache
def read(name: str) -> types.ModuleType:
    """A document's blocks in order, all but the exceptions, as a module."""
    module = types.ModuleType(name.replace("-", "_"))
    vars(module).update(prelude(name))
    for block in document(name):
        if block.title not in exceptions():
            exec(compile(block.text, f"{name}.md:{block.line}", "exec"), vars(module))
    return module


MEASURES = {"capibara-kernels"}  # benchmark_kernels


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in MEASURES else name for name in DOCUMENTS]
)
def test_every_block_runs(name):
    assert read(name) and len(document(name)) > 1


@pytest.mark.parametrize("name", DOCUMENTS)
def test_an_exception_is_one(name):
    """A block that the page lists does not run as it is written."""
    for block in document(name):
        if block.title in exceptions():
            names = dict(vars(read(name)))
            with pytest.raises(Exception):  # noqa: B017
                exec(compile(block.text, f"{name}.md:{block.line}", "exec"), names)


def test_the_page_lists_nothing_else():
    titles = {block.title for name in DOCUMENTS for block in document(name)}
    assert set(exceptions()) <= titles
    assert all(len(blocks(text)) == 1 for text in exceptions().values())  # the nearest form


def _dense(x: jax.Array) -> jax.Array:
    return jnp.tanh(x) * 2


MIB = 1 << 20
PLAN = {"parameters": 8 * MIB, "activations": 24 * MIB, "total": 32 * MIB, "free": 32 * MIB}
VALUES: dict[str, dict[str, Any]] = {
    "optimize_kernel_layout": {"kernel": normal(100, 30), "block_size": 128},
    "configure_tpu_mesh": {"num_cores": 8, "topology": "2x2x2"},
    "FP8Optimizer": {"margin": 0.01, "dynamic_scale": True},
    "apply_gradient_checkpointing": {"model": Net(nnx.Rngs(0)), "checkpoint_policy": "block_wise"},
    "allocate": {"batch_size": 8, "sequence_length": 64, "hidden_dim": 128},
    "optimize_memory_usage": {"current_memory": PLAN, "peak_memory": 100 * MIB, "batch_size": 8},
    "flash_attention_forward": dict.fromkeys("qkv", normal(1, 2, 64, 16)) | {"block_size": 128},
    "configure_data_parallel": {"batch_size": 32, "num_devices": 8},
    "schedule_microbatches": {"num_stages": 2, "batch_size": 8},
    "profile_execution": {"model": Net(nnx.Rngs(0)), "input_shape": (4, 16), "warmup_steps": 1, "profile_steps": 2},
    "track_memory_usage": {"step_fn": _dense, "inputs": {"x": normal(16, 16)}},
    "optimize_batch_size": {
        "model_config": {"num_hidden_layers": 1, "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256},
        "memory_budget": 64 * MIB,
        "target_throughput": 1000.0,
    },
    "optimize_memory_layout": {"weights": {"w": normal(64, 64)}, "tpu_topology": "2x2x2"},
    "optimize_xla_compilation": {
        "computation_graph": jax.make_jaxpr(_dense)(normal(4, 4)),
        "target_config": {"target": "v5e"},
    },
    "configure_runtime_options": {"tpu_config": {"jax_default_matmul_precision": "highest"}},
}
CLASSES = {
    "allocate": "MemoryPlanner",
    "schedule_microbatches": "PipelineScheduler",
    "profile_execution": "TPUProfiler",
}


def signatures(name: str) -> list[tuple[str, ast.FunctionDef]]:
    """The public functions and methods that a document writes down, with their names; of `__init__` the class."""
    found = []
    for block in document(name):
        for node in ast.parse(block.text).body:
            members = node.body if isinstance(node, ast.ClassDef) else [node]
            for one in members:
                if isinstance(one, ast.FunctionDef):
                    called = node.name if isinstance(node, ast.ClassDef) and one.name == "__init__" else one.name
                    found.append((called, one))
    return found


SLOW = {"optimize_batch_size"}  # compiles programs for a TPU
RUN = [pytest.param(name, marks=pytest.mark.long) if name in SLOW else name for name in VALUES]


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", RUN)
def test_a_signature_of_the_performance_system_is_taken_as_written(name):
    node = dict(signatures("performance-system"))[name]
    owner = getattr(performance, CLASSES[name])() if name in CLASSES else performance
    function = getattr(owner, name)
    ours = list(inspect.signature(function).parameters.values())
    documented = [one for one in node.args.args if one.arg != "self"]
    assert [one.arg for one in documented] == [one.name for one in ours[: len(documented)]]
    assert all(one.default is not one.empty for one in ours[len(documented) :] if one.kind < one.VAR_KEYWORD)
    defaults = [ast.literal_eval(value) for value in node.args.defaults]
    for one, value in zip(ours[len(documented) - len(defaults) : len(documented)], defaults):
        assert one.default == value or (name, one.default) == ("flash_attention_forward", None)
    by_place, by_name = function(*VALUES[name].values()), function(**VALUES[name])
    assert type(by_place) is type(by_name) and RESULTS[name](by_place)


def test_every_signature_is_called():
    assert {name for name, _ in signatures("performance-system")} == set(VALUES) == set(RESULTS)


def check_layout(found):
    product = normal(5, 100) @ normal(100, 30)
    return np.allclose(vishwamai.gemm(normal(5, 100), found), product, rtol=1e-4, atol=1e-4)


def check_usage(found):
    rows, use = found
    return 1 <= rows <= 8 and use["total"] + use["free"] == 64 * MIB and all(type(v) is int for v in use.values())


def check_checkpointed(found):
    x = normal(4, 16)
    same = (found(x) == VALUES["apply_gradient_checkpointing"]["model"](x)).all()
    return same and "remat" in str(jax.make_jaxpr(lambda x: found(x))(x)) and isinstance(found, Net)


RESULTS: dict[str, Any] = {
    "optimize_kernel_layout": check_layout,
    "configure_tpu_mesh": lambda found: found.devices.size == 8,
    "FP8Optimizer": lambda found: found.margin == 0.01 and found.dynamic_scale is True,
    "apply_gradient_checkpointing": check_checkpointed,
    "allocate": lambda found: isinstance(found, dict) and found["total"] > 0,
    "optimize_memory_usage": check_usage,
    "flash_attention_forward": lambda found: found.shape == (1, 2, 64, 16),
    "configure_data_parallel": lambda found: found.batch_size == 32,
    "schedule_microbatches": lambda found: len(found) == 2,
    "profile_execution": lambda found: len(found.times) == 2,
    "track_memory_usage": lambda found: found.peak.value > 0,
    "optimize_batch_size": lambda found: found > 0,
    "optimize_memory_layout": lambda found: isinstance(found["w"], jax.Array) and len(found["w"].devices()) == 8,
    "optimize_xla_compilation": lambda found: len(found.eqns) > 0,
    "configure_runtime_options": lambda found: found.jax_options,
}
