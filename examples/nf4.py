"""NF4 as a format of your own: 16 levels at quantiles of the normal distribution, a scale for 64 neighbours.

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023), section 3. Run it: `python examples/nf4.py`.
"""

import statistics

import jax
import jax.numpy as jnp

import vishwamai

OFFSET = 1 - 0.5 * (1 / 32 + 1 / 30)  # the outermost quantile, between those of 16 and of 15 levels


def levels() -> tuple[float, ...]:
    """Eight levels above 0, seven below, and 0, in units of the largest."""
    quantile = statistics.NormalDist().inv_cdf
    above = [quantile(OFFSET + (0.5 - OFFSET) * i / 8) for i in range(8)]
    below = [-quantile(OFFSET + (0.5 - OFFSET) * i / 7) for i in range(7)]
    return tuple(sorted(value / above[0] for value in (*above, 0.0, *below)))


NF4 = vishwamai.CodeFormat("nf4", bits=4, block_size=64, codebook=levels())

if __name__ == "__main__":
    weight = jax.random.normal(jax.random.key(0), (1024, 512)) / 32
    packed = vishwamai.quantize(weight, NF4, axis=-2)
    x = jax.random.normal(jax.random.key(1), (4, 1024), jnp.bfloat16)
    error = jnp.linalg.norm(packed.dequantize() - weight) / jnp.linalg.norm(weight)
    print(f"{packed}: {packed.nbytes * 8 / weight.size:.2f} bits for each number, error {error:.3f}")
    print("x @ weight:", vishwamai.gemm(x, packed).shape)
    vishwamai.save_codes("/tmp/nf4.safetensors", {"weight": packed})
    print("loaded:", vishwamai.load_codes("/tmp/nf4.safetensors")["weight"])
