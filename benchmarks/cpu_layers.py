"""The native CPU kernels of whole layers beside torch and XLA: gated units, the linear cross entropy, block-sparse products and attention over blocks.

As `cpu_peers.py` does it, and with its options:

    python benchmarks/cpu_layers.py --suite gated,loss
    taskset -c 1 python benchmarks/cpu_layers.py --clock cpu
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cpu_peers
import jax
import jax.numpy as jnp
import numpy as np
from cpu_peers import OURS, Case, jitted

import vishwamai
from vishwamai.ops.sparse import block_indices, local

GATED = ((1, 2048, 5632), (64, 2048, 5632), (512, 1024, 4096))  # rows, features, hidden
LOSS = ((256, 32000, 768),)  # tokens, words, features
SPARSE = ((512, 4096, 64, 16),)  # rows, width of a square weight, its blocks, blocks of a row that are there
BLOCKS = ((8, 2048, 64, 64, 4),)  # heads, tokens, head_dim, block, blocks on either side of the diagonal


class Layers(cpu_peers.Suites):
    """The suites of this file, and those of `cpu_peers`."""

    def _pair(
        self, name: str, work: float, ours: Any, xla: Any, torch: Any, arrays: Any, theirs: Any, truth: Any, probe: Any
    ) -> Iterator[Case]:
        """A function of some arrays, and its gradients for all of them: three times the work."""
        contestants = {"ours": jitted(ours, *arrays), "torch": lambda: torch(*theirs), "xla": jitted(xla, *arrays)}
        yield Case(name, work, "GFLOP/s", contestants, truth, probe)
        shape = jax.eval_shape(ours, *arrays)
        (w,), (tw,) = self.arrays(str(shape.dtype), shape.shape)
        leaves = [t.clone().requires_grad_() for t in theirs]

        def pulled(function: Any) -> Any:
            return lambda w, *arrays: jax.vjp(function, *arrays)[1](w)

        contestants = {
            "ours": jitted(pulled(ours), w, *arrays),
            "torch": lambda: self.torch.autograd.grad(torch(*leaves), leaves, tw),
            "xla": jitted(pulled(xla), w, *arrays),
        }
        yield Case(f"{name} + grad", 3 * work, "GFLOP/s", contestants)

    def gated(self) -> Iterator[Case]:
        silu = self.torch.nn.functional.silu
        for dtype in self.options.dtypes:
            for rows, features, hidden in GATED:
                arrays, theirs = self.arrays(dtype, (rows, features), (features, hidden), (features, hidden))
                arrays[1:], theirs[1:] = ([x * features**-0.5 for x in some[1:]] for some in (arrays, theirs))
                x, gate, up = (np.asarray(a, np.float64) for a in arrays)
                z = x[:4] @ gate
                truth = z / (1 + np.exp(-z)) * (x[:4] @ up)

                def xla(x: Any, gate: Any, up: Any) -> Any:
                    g, u = (jnp.dot(x, w, preferred_element_type=jnp.float32) for w in (gate, up))
                    return (jax.nn.silu(g) * u).astype(x.dtype)

                yield from self._pair(
                    f"gated {dtype} {rows}x{features}x{hidden}",
                    4.0 * rows * features * hidden,
                    lambda x, gate, up: vishwamai.gated_linear_unit(x, (gate, up), **OURS),
                    xla,
                    lambda x, gate, up: silu(x @ gate) * (x @ up),
                    arrays,
                    theirs,
                    truth,
                    lambda y: y[:4],
                )

    def loss(self) -> Iterator[Case]:
        entropy = self.torch.nn.functional.cross_entropy
        for dtype in self.options.dtypes:
            for tokens, words, features in LOSS:
                arrays, theirs = self.arrays(dtype, (tokens, features), (words, features))
                arrays[1], theirs[1] = (some[1] * features**-0.5 for some in (arrays, theirs))
                labels = self.rng.integers(0, words, tokens).astype(np.int32)
                ours_labels = jnp.asarray(labels)
                their_labels = self.torch.tensor(labels.astype(np.int64))
                x, weight = (np.asarray(a, np.float64) for a in arrays)
                z = x @ weight.T
                truth = (np.log(np.exp(z).sum(-1)) - z[np.arange(tokens), labels]).mean(keepdims=True)

                def xla(x: Any, weight: Any, labels: Any = labels) -> Any:
                    z = jnp.dot(x, weight.T, preferred_element_type=jnp.float32)
                    at_label = jnp.take_along_axis(z, labels[:, None], axis=-1)[:, 0]
                    return (jax.nn.logsumexp(z, axis=-1) - at_label).mean(keepdims=True)

                yield from self._pair(
                    f"loss {dtype} {tokens}x{words}x{features}",
                    2.0 * tokens * words * features,
                    lambda x, weight, labels=ours_labels: vishwamai.linear_cross_entropy(x, weight, labels, **OURS)[
                        None
                    ],
                    xla,
                    lambda x, weight, labels=their_labels: entropy((x @ weight.T).float(), labels)[None],
                    arrays,
                    theirs,
                    truth,
                    lambda y: y,
                )

    def sparse(self) -> Iterator[Case]:
        """torch and XLA multiply by the dense weight: what one would run without blocks. `work` is that of the blocks that are there."""
        for dtype in self.options.dtypes:
            for rows, width, block, row_blocks in SPARSE:
                number = width // block
                live = np.zeros((number, number), bool)
                for i in range(number):
                    live[i, self.rng.choice(number, row_blocks, replace=False)] = True
                indices = block_indices(live)
                (x, values), _ = self.arrays(dtype, (rows, width), (len(indices), block, block))
                dense = np.zeros((number, number, block, block), np.float32)
                dense[indices[:, 0], indices[:, 1]] = np.asarray(values, np.float32)
                weight = dense.transpose(0, 2, 1, 3).reshape(width, width)
                theirs = [
                    self.torch.tensor(np.asarray(a, np.float32)).to(getattr(self.torch, dtype)) for a in (x, weight)
                ]
                truth = np.asarray(x, np.float64)[:4] @ weight
                contestants = {
                    "ours": jitted(
                        lambda x, v, at=indices, n=width: vishwamai.block_sparse_matmul(x, v, at, shape=(n, n), **OURS),
                        x,
                        values,
                    ),
                    "xla": jitted(
                        lambda x, v, at=indices, n=width: vishwamai.block_sparse_matmul(
                            x, v, at, shape=(n, n), implementation="xla"
                        ),
                        x,
                        values,
                    ),
                    "torch dense": lambda theirs=theirs: theirs[0] @ theirs[1],
                }
                share = len(indices) / live.size
                name = f"sparse {dtype} {rows}x{width}x{width} {share:.2f} of {block}x{block}"
                yield Case(
                    name, 2.0 * rows * len(indices) * block * block, "GFLOP/s", contestants, truth, lambda y: y[:4]
                )

    def blocks(self) -> Iterator[Case]:
        """Attention over a band of blocks; torch is given the mask of every position."""
        attention = self.torch.nn.functional.scaled_dot_product_attention
        for dtype in self.options.dtypes:
            for heads, tokens, dim, block, side in BLOCKS:
                live = local(tokens // block, side, side)
                mask = np.kron(live, np.ones((block, block), bool))
                arrays, theirs = self.arrays(dtype, *[(1, heads, tokens, dim)] * 3)
                their_mask = self.torch.tensor(mask)
                q, k, v = (np.asarray(a, np.float64)[0, 0] for a in arrays)
                logits = np.where(mask[:4], q[:4] @ k.T / dim**0.5, -np.inf)
                p = np.exp(logits - logits.max(-1, keepdims=True))

                def ours(q: Any, k: Any, v: Any, live: Any = live, block: int = block, **how: Any) -> Any:
                    return vishwamai.block_sparse_attention(q, k, v, live, block_size=block, **(how or OURS))

                yield from self._pair(
                    f"blocks {dtype} {heads}x{tokens}x{dim} {live.mean():.2f} of {block}",
                    4.0 * heads * mask.sum() * dim,
                    ours,
                    lambda q, k, v, ours=ours: ours(q, k, v, implementation="xla_chunked"),
                    lambda q, k, v, mask=their_mask: attention(q, k, v, attn_mask=mask),
                    arrays,
                    theirs,
                    p / p.sum(-1, keepdims=True) @ v,
                    lambda y: y[0, 0, :4],
                )


if __name__ == "__main__":
    cpu_peers.main(Layers, "gated,loss,sparse,blocks")
