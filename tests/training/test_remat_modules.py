"""Gradient checkpointing of modules of Flax that are not ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from vishwamai.core.errors import ConfigError
from vishwamai.performance import TPUProfiler, apply_gradient_checkpointing


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)

    def __call__(self, x, scaled=False):
        x = 2 * x if scaled else x  # a Python bool, which must not be traced
        return x + self.down(jnp.tanh(self.up(self.norm(x))))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.blocks = nnx.Linear(8, 16, rngs=rngs), nnx.List([Block(rngs) for _ in range(3)])

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, scaled=True)
        return x


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x, scaled=False):
        x = 2 * x if scaled else x
        return x + linen.Dense(16)(jnp.tanh(linen.Dense(64)(x)))


class Encoder(linen.Module):
    @linen.compact
    def __call__(self, x):
        for _ in range(3):
            x = LinenBlock()(x, scaled=True)
        return x


class LinenNet(linen.Module):
    width: int = 16

    @linen.compact
    def __call__(self, x):
        return Encoder()(linen.Dense(self.width)(x))


def kept(loss, argument):
    """Bytes that the backward pass reads of the forward one."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda a: jax.vjp(loss, a)[1], argument))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def agree(x, y):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), x, y)


@pytest.mark.turns(4)
def test_blocks_of_nnx():
    x = jax.random.normal(jax.random.key(0), (64, 8))
    plain, other = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    checkpointed = apply_gradient_checkpointing(other)
    assert checkpointed.blocks[0].up.kernel is other.blocks[0].up.kernel and type(other.blocks[0]) is Block
    gradients = [nnx.grad(lambda net: (net(x) ** 2).sum())(net) for net in (plain, checkpointed)]
    agree(*(jax.tree.leaves(gradient) for gradient in gradients))
    agree(plain.blocks[2].norm.mean[...], other.blocks[2].norm.mean[...])  # statistics pass through

    def loss(net):
        graph, params, rest = nnx.split(net, nnx.Param, ...)
        return lambda params: (nnx.merge(graph, params, rest, copy=True)(x) ** 2).sum(), params

    assert kept(*loss(checkpointed)) < 0.5 * kept(*loss(plain))
    with pytest.raises(ConfigError, match="'offload' is not a policy of a Net; pass one of none, dots, block_wise"):
        apply_gradient_checkpointing(plain, "offload")
    assert apply_gradient_checkpointing(plain, "none") is plain


@pytest.mark.parametrize("policy", ["block_wise", "dots"])
def test_blocks_of_linen(policy):
    x = jax.random.normal(jax.random.key(0), (64, 8))
    plain = LinenNet()
    checkpointed = apply_gradient_checkpointing(plain, policy)
    params = checkpointed.init(jax.random.key(1), x)
    jax.tree.map(np.testing.assert_array_equal, params, plain.init(jax.random.key(1), x))
    losses = [
        lambda params, net=net: jnp.square(jnp.asarray(net.apply(params, x))).sum() for net in (plain, checkpointed)
    ]
    agree(*(jax.grad(loss)(params) for loss in losses))
    assert str(jax.make_jaxpr(losses[1])(params)).count("remat") == 3
    before, after = (kept(loss, params) for loss in losses)
    assert after < before


def test_a_linen_module_is_profiled():
    found = TPUProfiler().profile_execution(LinenNet(), (4, 8), warmup_steps=0, profile_steps=2)
    assert found.name == "LinenNet(float32[4, 8])" and found.flops.total >= 2 * 4 * 16 * (8 + 3 * 128)
