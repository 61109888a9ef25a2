"""How much memory of the host `from_pretrained` takes besides the arrays that it makes."""

import json
import subprocess
import sys

import jax.numpy as jnp
import pytest
import safetensors.numpy
from flax import nnx

from vishwamai.models import Decoder, ModelConfig, save_pretrained

VALUES = {
    "model_type": "llama",
    "vocab_size": 60_000,
    "hidden_size": 256,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
BIGGEST = VALUES["vocab_size"] * VALUES["hidden_size"] * 4  # 61 MB, the embedding and the head; the layers have 81 MB

LOADING = """
import json, sys
import jax
from flax import nnx
from vishwamai.models import from_pretrained

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))

small, large, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
from_pretrained(small, **options)  # what is imported and compiled
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts anew
model = from_pretrained(large, **options)
arrays = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
print(json.dumps({"arrays": arrays, "above": status("VmHWM") - before - arrays}))
"""


def write_shards(config, folder, count):
    """A checkpoint in several files, as large models are published."""
    save_pretrained(Decoder(config, rngs=nnx.Rngs(0), param_dtype=jnp.float32), folder)
    whole = folder / "model.safetensors"
    tensors, places = safetensors.numpy.load_file(whole), {}
    for i in range(count):
        name = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = dict(list(tensors.items())[i::count])
        safetensors.numpy.save_file(part, folder / name)
        places |= dict.fromkeys(part, name)
    whole.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_above_the_arrays_is_that_of_one_tensor(dtype, tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    write_shards(ModelConfig.from_dict({**VALUES, "vocab_size": 64, "num_hidden_layers": 1}), small, 1)
    write_shards(ModelConfig.from_dict(VALUES), large, 3)
    command = [sys.executable, "-c", LOADING, str(small), str(large), json.dumps({"dtype": dtype})]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found["arrays"] > 3 * BIGGEST * jnp.dtype(dtype).itemsize / 4
    # A tensor of the file as it is mapped, and a quarter for what the allocator and the index take.
    assert found["above"] <= 1.25 * BIGGEST, found
