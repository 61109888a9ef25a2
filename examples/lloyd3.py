"""A codebook of 3 bits: the eight levels with the least squared error for normal numbers, scales in bfloat16.

Max, "Quantizing for Minimum Distortion" (1960); Lloyd, "Least Squares Quantization in PCM" (1982). Run it:
`python examples/lloyd3.py`.
"""

import statistics

import jax

import vishwamai


def levels(count: int = 8, rounds: int = 2000) -> tuple[float, ...]:
    """Lloyd's iteration on the normal density: a level is the mean of the numbers that are nearest to it."""
    normal, infinity = statistics.NormalDist(), float("inf")
    values = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    for _ in range(rounds):
        edges = [-infinity, *((a + b) / 2 for a, b in zip(values, values[1:], strict=False)), infinity]
        pairs = list(zip(edges, edges[1:], strict=False))
        values = [(normal.pdf(a) - normal.pdf(b)) / (normal.cdf(b) - normal.cdf(a)) for a, b in pairs]
    return tuple(values)


LLOYD3 = vishwamai.CodeFormat("lloyd3", 3, block_size=64, scale_dtype="bfloat16", codebook=levels())

if __name__ == "__main__":
    gate, up = (jax.random.normal(jax.random.key(i), (256, 512)) / 16 for i in range(2))
    packed = tuple(vishwamai.quantize(weight, LLOYD3, axis=-2) for weight in (gate, up))
    x = jax.random.normal(jax.random.key(2), (4, 256))
    print(f"{packed[0]}: {packed[0].nbytes * 8 / gate.size:.2f} bits for each number")
    print("silu(x @ gate) * (x @ up):", vishwamai.gated_linear_unit(x, packed).shape)
