"""The causal convolution: random calls against the oracle, sequences that are cut, torch's own `Conv1d`."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import contract
import draws
import rotation
from vishwamai import ShapeError, causal_conv1d


@pytest.mark.turns(3)
@pytest.mark.parametrize("seeds", rotation.spans(4, 1000))
def test_random_calls(seeds):
    """Values, states and gradients of any legal call are the oracle's."""
    for seed in seeds:
        case = draws.draw_case("causal_conv1d", random.Random(seed).choice, 130)
        contract.check_all(contract.by_reference(case), contract.truth(case), None)


def test_a_cut_sequence_gives_the_same_bits():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 9, 5)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((5, 4)), jnp.float32)
    y, state = causal_conv1d(x, weight, activation="silu", return_state=True)
    parts, carried = [], None
    for cut in (slice(0, 2), slice(2, 3), slice(3, 9)):
        part, carried = causal_conv1d(x[:, cut], weight, activation="silu", initial_state=carried, return_state=True)
        parts.append(part)
    np.testing.assert_array_equal(jnp.concatenate(parts, 1), y)
    np.testing.assert_array_equal(carried, state)


def test_it_is_the_convolution_of_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, weight, bias = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 9, 5), (5, 4), (5,)))
    tensors = (torch.tensor(np.asarray(a)) for a in (x.swapaxes(1, 2), weight[:, None], bias))
    layer = torch.nn.functional.conv1d(*tensors, padding=3, groups=5)
    got = causal_conv1d(x, weight, bias)
    np.testing.assert_allclose(got, layer[..., :9].numpy().swapaxes(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.turns(3)
def test_packed_sequences_are_those_alone():
    """Each run of ids, an id that returns among them, gives what the run by itself gives; so do its gradients."""
    rng = np.random.default_rng(1)
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 8, 3), (3, 4)))
    ids = jnp.array([[4, 4, 4, 0, 4, 4, 9, 9]])
    slope = jax.grad(lambda x, ids: (causal_conv1d(x, weight, segment_ids=ids) ** 2).sum())
    packed, gradient = causal_conv1d(x, weight, segment_ids=ids), slope(x, ids)
    for run in (slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 8)):
        np.testing.assert_allclose(packed[:, run], causal_conv1d(x[:, run], weight), rtol=1e-6)
        np.testing.assert_allclose(gradient[:, run], slope(x[:, run], None), rtol=1e-6)


def test_errors_name_the_argument():
    x, weight = jnp.ones((2, 6, 4)), jnp.ones((4, 3))
    for text, call in {
        r"`weight` has shape \(3, 4\).*`x` has 4 channels": lambda: causal_conv1d(x, weight.T),
        r"`initial_state` has shape \(2, 3, 4\).*\(2, 2, 4\)": lambda: causal_conv1d(
            x, weight, initial_state=jnp.ones((2, 3, 4))
        ),
        "`activation` is 'swish'.*silu": lambda: causal_conv1d(x, weight, activation="swish"),
        "`segment_ids` has dtype float32.*int32": lambda: causal_conv1d(x, weight, segment_ids=jnp.ones((2, 6))),
        r"`bias` has shape \(3,\).*\(4,\)": lambda: causal_conv1d(x, weight, jnp.ones(3)),
    }.items():
        with pytest.raises(ShapeError, match=text):
            call()
