"""`--fit`: the choice fits the memory, and no better one does."""

import pytest

from models_peer import Peer
from vishwamai.core.errors import DeviceError
from vishwamai.inference import plan_load
from vishwamai.inference.fit import fit_load, reason


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("fit")
    sizes = {"vocab_size": 262, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 32768}
    Peer("Llama", sizes).save(path)
    return path


def whole(path, dtype, count, length):
    """Bytes of so many sequences at their full length."""
    return plan_load(path, kv_dtype=dtype, max_sequences=count, max_length=length, memory=2**40).total


@pytest.mark.parametrize(
    "fits, dtype, count, length",
    [
        (("bfloat16", 32, 4096), "bfloat16", 32, 32768),
        (("bfloat16", 16, 4096), "bfloat16", 16, 32768),
        (("bfloat16", 4, 4096), "bfloat16", 4, 16384),
        (("int8", 4, 4096), "int8", 4, 16384),
        (("int8", 4, 2048), "int8", 4, 2048),  # as many bytes as four in bfloat16 of 1024 tokens
        (("int8", 4, 512), "int8", 4, 512),
        (("int8", 1, 512), "int8", 1, 512),
    ],
)
def test_the_choice_is_the_first_that_fits(path, fits, dtype, count, length):
    memory = whole(path, *fits)
    load = fit_load(path, memory=memory)
    assert load.total <= memory
    assert (load.kv_dtype, load.limits.max_sequences) == (dtype, count)
    assert load.limits.max_length == length or length < load.limits.max_length <= 32768
    text = reason(load, 32)
    assert text.startswith(f"fits: {count} sequences of up to {load.limits.max_length} tokens")
    assert ("do not fit" in text) == (count < 32 or dtype == "int8")


def test_bounds_hold(path):
    memory = whole(path, "bfloat16", 4, 4096)
    load = fit_load(path, memory=memory, kv_dtype="float32", max_sequences=2, max_length=1000)
    assert (load.kv_dtype, load.limits.max_sequences, load.limits.max_length) == ("float32", 2, 1000)
    with pytest.raises(DeviceError, match="one sequence of 512 tokens needs"):
        fit_load(path, memory=whole(path, "int8", 1, 512) - 10_000)
