"""The recurrences with a matrix state: random calls against the float64 recurrence, sequences that are cut or packed,
and the code of transformers.
"""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import contract
import draws
import rotation
from vishwamai import ShapeError, explain, gated_delta_rule, linear_attention, state_space
from vishwamai.core import ffi
from vishwamai.ops.catalogue import operations
from vishwamai.ops.delta import PooledStates
from vishwamai.ops.delta.tpu import DeltaConfig

IMPLEMENTATIONS = {impl.name: impl for impl in operations()["gated_delta_rule"].op.implementations}
NATIVE = pytest.param(
    "native_cpu",
    marks=pytest.mark.skipif(
        ffi.why_not(None, "vishwamai_delta") is not None, reason=str(ffi.why_not(None, "vishwamai_delta"))
    ),
)


@pytest.mark.turns(6)
@pytest.mark.parametrize("how", ["xla_chunked", NATIVE])
@pytest.mark.parametrize("seeds", rotation.spans(3, 1000))
def test_random_calls(seeds, how):
    """Values, states and gradients of any legal call are those of the float64 recurrence."""
    for seed in seeds:
        case = draws.draw_case("gated_delta_rule", random.Random(seed).choice, 130)
        got = contract.evaluate(case, IMPLEMENTATIONS[how])
        contract.check_all(got, contract.truth(case), contract.by_reference(case), unit=2.0**-20)


def arrays(seq, heads=2, key_dim=8, value_dim=6, decay=1.0, seed=0):
    rng = np.random.default_rng(seed)
    query, key = (jnp.asarray(rng.standard_normal((1, heads, seq, key_dim)), jnp.float32) for _ in range(2))
    key = key / jnp.linalg.norm(key, axis=-1, keepdims=True)
    value = jnp.asarray(rng.standard_normal((1, heads, seq, value_dim)), jnp.float32)
    log_decay = jnp.asarray(-decay * rng.random((1, heads, seq)), jnp.float32)
    return query, key, value, log_decay, jnp.asarray(rng.random((1, heads, seq)), jnp.float32)


@pytest.mark.parametrize("form", ["xla_chunked", NATIVE])
@pytest.mark.parametrize("seq", [3000, pytest.param(100_000, marks=pytest.mark.long)])
def test_a_long_sequence_keeps_its_digits(seq, form):
    """Repeated keys, betas at 0 and 1 and decays that are weak for long and then strong, against the recurrence."""
    query, key, value, decay, beta = arrays(seq, heads=1, decay=1e-3)
    key = key.at[:, :, 100:200].set(key[:, :, 100:101])
    beta = jnp.round(beta).at[:, :, 100:200].set(1.0)
    decay = decay.at[:, :, 1000:1100].set(-100.0)
    got, expected = (
        jax.jit(lambda *a, how=how: gated_delta_rule(*a, return_state=True, implementation=how))(
            query, key, value, decay, beta
        )
        for how in (form, "xla")
    )
    contract.close(got, expected, 3e-5)


@pytest.mark.turns(3)
def test_a_cut_sequence_passes_its_state_on():
    """Chunks, single tokens and few tokens, in any order, give what one call gives."""
    operands = arrays(80)
    y, state = gated_delta_rule(*operands, return_state=True)
    parts, carried = [], None
    for cut in (slice(0, 33), slice(33, 34), slice(34, 38), slice(38, 80)):
        part, carried = gated_delta_rule(*(x[:, :, cut] for x in operands), initial_state=carried, return_state=True)
        parts.append(part)
    contract.close((jnp.concatenate(parts, 2), carried), (y, state), 1e-5)
    assert state.dtype == jnp.float32


@pytest.mark.turns(4)
@pytest.mark.parametrize("how", ["xla_chunked", NATIVE])
def test_packed_sequences_are_those_alone(how):
    """Runs of ids, an id that returns among them, on both sides of a chunk's edge: values, state and gradients."""
    operands = arrays(40)
    ids = jnp.asarray(np.repeat([3, 1, 3, 8], [5, 17, 1, 17]))[None]

    def loss(*operands, ids=None):
        y, state = gated_delta_rule(*operands, segment_ids=ids, config=16, return_state=True, implementation=how)
        return (y**2).sum() + (state**2).sum() * (ids is None or 1.0), (y, state)

    every = tuple(range(5))
    slopes, (y, state) = jax.grad(loss, every, has_aux=True)(*operands, ids=ids)
    start = 0
    for size in (5, 17, 1, 17):
        run = slice(start, start + size)
        part = tuple(x[:, :, run] for x in operands)
        alone = gated_delta_rule(*part, return_state=True)
        contract.close(y[:, :, run], alone[0], 1e-5)
        start += size
    contract.close(state, alone[1], 1e-5)
    last, _ = jax.grad(loss, every, has_aux=True)(*part)
    contract.close(tuple(x[:, :, run] for x in slopes), last, 1e-4)


def test_it_is_the_rule_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    query, key, value, decay, beta = arrays(70)
    state = jnp.ones((1, 2, 8, 6), jnp.float32)
    moved = [torch.tensor(np.asarray(x.swapaxes(1, 2))) for x in (query, key, value, decay, beta)]
    y, last = torch_chunk_gated_delta_rule(
        *moved, initial_state=torch.tensor(np.asarray(state)), output_final_state=True
    )
    got = gated_delta_rule(query, key, value, decay, beta, initial_state=state, return_state=True)
    np.testing.assert_allclose(got[0], y.numpy().swapaxes(1, 2), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[1], last.numpy(), rtol=1e-4, atol=1e-5)


def test_channels_of_one_decay_are_the_decay_of_a_head():
    query, key, value, decay, beta = arrays(40)
    by_channel = jnp.broadcast_to(decay[..., None], key.shape)
    expected = gated_delta_rule(query, key, value, decay, beta)
    contract.close(gated_delta_rule(query, key, value, by_channel, beta), expected, 1e-5)


def test_which_form_runs():
    """Few tokens run one by one, many by chunks; `explain` says why there is no kernel."""
    native = ffi.why_not(None, "vishwamai_delta") is None
    on_cpu = ("cpu", 64, "native_cpu" if native else "xla_chunked")
    for target, seq, name in (("v5e", 1, "xla"), ("v5e", 64, "pallas_tpu"), on_cpu):
        (call,) = explain(gated_delta_rule, *arrays(seq), target=target).calls
        assert call.runs == name
    query, key, value, decay, beta = arrays(64)
    report = explain(gated_delta_rule, query, key, value, decay[..., None] * key**2, beta, target="v5e")
    assert report.calls[0].runs == "xla_chunked" and "each channel has a decay of its own" in str(report)


FORMS = {
    "delta": gated_delta_rule,
    "channels": lambda q, k, v, decay, beta, **how: gated_delta_rule(q, k, v, decay[..., None] * k**2, beta, **how),
    "linear": lambda q, k, v, decay, beta, **how: linear_attention(q, k, v, decay, **how),
    "space": lambda q, k, v, decay, beta, **how: state_space(v, beta, -jnp.ones(2), k, q, jnp.ones(2), **how),
}


@pytest.mark.parametrize("how", ["xla", NATIVE])
@pytest.mark.parametrize("form", FORMS)
def test_states_in_a_pool(form, how):
    """Sequences of one token, several and none; that begin, go on in place, read the slot that another one writes (in a
    circle, too), keep the state before a guess, and write nowhere. Other slots stay, and so do tokens of no sequence.
    """
    lengths = [1, 70, 0, 3, 1, 2, 1]
    read = [4, 1, 0, -1, 2, 2, 5]
    write = [2, 4, 0, 1, 99, 6, 5]
    starts = np.cumsum([0, *lengths])
    operands = arrays(int(starts[-1]) + 2, value_dim=11)
    pool = jnp.asarray(np.random.default_rng(1).standard_normal((8, 2, 8, 11)), jnp.float32)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(pool, *operands):
        slots = jnp.asarray([read, write], jnp.int32)
        states = PooledStates(pool, slots, jnp.asarray(starts, jnp.int32))
        return FORMS[form](*operands, initial_state=states, return_state=True, implementation=how)

    y, after = step(pool + 0, *operands)
    expected = np.array(pool)
    for s, length in enumerate(lengths):
        if length:
            tokens = slice(starts[s], starts[s + 1])
            before = pool[read[s]][None] if read[s] >= 0 else None
            part = (x[:, :, tokens] for x in operands)
            alone, state = FORMS[form](*part, initial_state=before, return_state=True, implementation="xla")
            contract.close(y[:, :, tokens], alone, 1e-5)
            if write[s] < 8:
                expected[write[s]] = state[0]
    contract.close(after, jnp.asarray(expected), 1e-5)
    np.testing.assert_array_equal(after[jnp.array([0, 3, 7])], pool[jnp.array([0, 3, 7])])
    assert not y[:, :, starts[-1] :].any()


@pytest.mark.turns(3)
@pytest.mark.interpreter
@pytest.mark.parametrize("heads", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3, 4))])
def test_heads_that_share_keys_on_tpu(heads):
    """Steps of fewer heads than share a key, of as many, and of more, give the same as the definition."""
    case = operations()["gated_delta_rule"].tagged("contract")[2]
    assert case.name == "two heads to a key"
    expected, _ = contract.by_reference(case)
    with contract.simulated_tpu():
        got = jax.jit(lambda a: case.run(a, implementation="pallas_tpu", config=DeltaConfig(16, heads)))(case.make())
    contract.close(got, expected)


def test_errors_name_the_argument():
    query, key, value, decay, beta = arrays(6)
    ones = jnp.ones((1, 2, 6))
    for text, call in {
        r"`decay` has 2 axes.*\[batch, heads, seq\]": lambda: gated_delta_rule(query, key, value, decay[0]),
        r"`key` has dtype bfloat16.*`value` float32": lambda: linear_attention(query, key.astype("bfloat16"), value),
        r"`beta` has shape \(1, 2, 5\).*\(1, 2, 6\)": lambda: gated_delta_rule(query, key, value, decay, beta[..., :5]),
        "`key` has shape .*`query` has 1 heads": lambda: gated_delta_rule(query[:, :1], key, value),
        "pool of shape .*for 1 rows with `segment_ids`": lambda: gated_delta_rule(
            query,
            key,
            value,
            initial_state=PooledStates(value, jnp.zeros((2, 1), jnp.int32), jnp.array([0, 6], jnp.int32)),
            segment_ids=jnp.zeros((1, 6), jnp.int32),
        ),
        r"state_space: `A` has shape \(3,\)": lambda: state_space(value, ones, jnp.ones(3), key, query),
        r"state_space: `B` has shape": lambda: state_space(value, ones, jnp.ones(2), key[:, :, :3], query),
    }.items():
        with pytest.raises(ShapeError, match=text):
            call()
