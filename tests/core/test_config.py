"""What a `KernelConfig` and the configs of kernels accept: every field is checked where it is made."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vishwamai
from vishwamai import KernelConfig, kernel_config
from vishwamai.core.call_plan import Implementation
from vishwamai.core.errors import DeviceError, KernelError, UnsupportedError
from vishwamai.core.tiles import Tiles
from vishwamai.kernels.decorators import cpu_kernel
from vishwamai.ops import catalogue
from vishwamai.ops.matmul.tpu_tiles import MatmulConfig

FLAGS = [field.name for field in dataclasses.fields(KernelConfig) if "bool" in str(field.type)]
ODD = ("no", "yes", 0, 1, 2.0, [], (), {}, b"", object(), float("nan"), np.ones(2), jnp.ones(2))


def made(**fields: Any) -> KernelConfig:
    return KernelConfig(**fields)


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_true_or_false(name):
    for odd in ODD:
        for make in (made, lambda **fields: kernel_config(**fields).__enter__(), lambda **f: cpu_kernel(abs, **f)):
            with pytest.raises(KernelError, match=f"`{name}` is .*; pass True(,| or) False"):
                make(**{name: odd})
    assert getattr(made(**{name: np.bool_(True)}), name) is True


@pytest.mark.parametrize("odd", [*ODD[:2], True, False, 0, -1, 1.5, 128.0, "128", (128,), np.ones(2), jnp.int32(8)])
def test_a_block_size_is_a_positive_integer(odd):
    with pytest.raises(KernelError, match="`block_size` is .*; pass a positive number of elements"):
        made(block_size=odd)
    if not isinstance(odd, str) and isinstance(odd, int):
        with pytest.raises(KernelError, match="gemm: `config` is .*; pass a positive number of elements"):
            vishwamai.gemm(jnp.ones((8, 8)), jnp.ones((8, 8)), config=odd)
    assert made(block_size=np.int64(64)) == made(block_size=64)


@pytest.mark.parametrize("odd", ["palas_tpu", "", "XLA", 5, ("xla",), True])
def test_an_implementation_is_one_that_an_operation_has(odd):
    with pytest.raises(KernelError, match="`implementation` is .*, which no operation has; pass one of .*'pallas_tpu'"):
        made(implementation=odd)
    with pytest.raises(KernelError, match="`implementation`"), kernel_config(implementation=odd, strict=True):
        pass
    offered = {impl.name for operation in catalogue.operations().values() for impl in operation.op.implementations}
    for name in offered:
        assert name in Implementation.names and made(implementation=name).implementation == name


@pytest.mark.parametrize("odd", [None, "fast", 3, [], ("high",), np.ones(2), b"high"])
def test_a_precision_is_one_of_three(odd):
    with pytest.raises(KernelError, match="`products` is .*; pass one of default, high, highest"):
        made(precision=odd)
    if odd is not None:
        with pytest.raises(KernelError, match="pass one of default, high, highest|pass a string or a PrecisionConfig"):
            vishwamai.gemm(jnp.ones((8, 8)), jnp.ones((8, 8)), precision=odd)


@pytest.mark.parametrize("odd", [5, True, b"v5e", "v5e:0x2"])
def test_a_target_is_one(odd):
    with pytest.raises(DeviceError, match="pass a name|nearest"):
        made(target=odd)


@pytest.mark.parametrize("odd", [5, "strict", {"strict": True}, KernelConfig, True])
def test_the_ambient_config_is_a_kernel_config(odd):
    with pytest.raises(KernelError, match="`config` is .*; pass a KernelConfig"), kernel_config(odd):
        pass


def configs(kind: type[Tiles]):
    for inner in kind.__subclasses__():
        yield inner
        yield from configs(inner)


def test_the_sizes_of_every_config_are_checked():
    """The configs of all kernels: each size is a positive integer."""
    catalogue.operations()
    known = [kind for kind in configs(Tiles) if kind.__module__.startswith("vishwamai.")]
    assert len(known) > 15
    for kind in known:
        fields = dataclasses.fields(kind)
        sized = [f for f in fields if len(f.metadata.get("sizes", ())) == 1]
        for field in sized:
            for odd in (-128, True, 1.5, "128", *([] if field.default == 0 else [0])):
                blank = object.__new__(kind)
                for other in fields:
                    object.__setattr__(blank, other.name, odd if other is field else None)
                with pytest.raises(KernelError, match=f"{kind.__name__}: `{field.name}` is .*; pass a positive"):
                    Tiles.__post_init__(blank)
    with pytest.raises(KernelError, match="MatmulConfig: `block_m` is 0; pass a positive integer, it counts rows"):
        MatmulConfig(0, 128, 128)


def test_a_kernel_of_another_platform_is_an_error_of_ours():
    x = jnp.ones((8, 128))
    with kernel_config(implementation="pallas_tpu"):
        with pytest.raises(UnsupportedError, match="'pallas_tpu' is for tpu, and this program is compiled for another"):
            vishwamai.rms_norm(x)
        with pytest.raises(UnsupportedError, match="'pallas_tpu' is for tpu"):
            jax.grad(lambda x: vishwamai.rms_norm(x).sum())(x)
