"""A decoding step of a model as a program for one device: shapes, no arrays."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vishwamai.aot.compile.traced import Program, trace
from vishwamai.core.errors import ShapeError
from vishwamai.core.qtensor import bits
from vishwamai.core.types import PyTree
from vishwamai.inference.pools import kv_dtype_of, with_scales
from vishwamai.inference.sampling import Sampling, all_allowed, empty_rows, sample, set_row
from vishwamai.models import Decoder, ModelConfig, PagedBatch, page_shapes
from vishwamai.models.checkpoint import quantized
from vishwamai.models.pages import has_states, pages_of, ring_table, window_rings
from vishwamai.parallel.optimization import Optimization


@dataclasses.dataclass(frozen=True)
class Serving:
    """What is served, and how many sequences of which length at once.

    Attributes:
      config: the model.
      batch_size: sequences. length: tokens of each, prompt and answer together.
      dtype: dtype of the parameters. kv_dtype: dtype of stored keys and values. page_size: tokens of a page.
      quantize: "int8", "int4" or "fp8" weights of the layers' products; None: `dtype`.
      optimization: whose keys of kernels hold; those of the other fields are in place.
      max_tokens: tokens of one step, which the rings of layers with a window hold next to the window.
    """

    config: ModelConfig
    batch_size: int
    length: int
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    page_size: int = 16
    quantize: str | None = None
    optimization: Optimization = Optimization()
    max_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("batch_size", "length", "page_size"):
            if getattr(self, name) < 1:
                raise ShapeError(f"plan: {name} is {getattr(self, name)}; pass a positive whole number.")
        if self.length > self.config.max_positions:
            raise ShapeError(
                f"plan: length is {self.length}, but the model has {self.config.max_positions} positions; pass no more."
            )

    @property
    def pages_per_sequence(self) -> int:
        """Pages of a sequence at its full length."""
        return -(-self.length // self.page_size)

    def parameters(self) -> tuple[nnx.GraphDef[Decoder], PyTree]:
        """The decoder's structure, and the shapes of its variables."""
        make = functools.partial(Decoder, self.config, dtype=self.dtype, param_dtype=self.dtype, stacked=False)

        def build() -> Decoder:
            model = make(rngs=nnx.Rngs(0))
            return model if self.quantize is None else quantized(model, self.quantize)

        return nnx.split(nnx.eval_shape(build))

    def pages(self, tokens: int | None = None) -> tuple[PyTree, ...]:
        """Pools for every sequence at its full length, or for so many tokens without rings; of 8 bits with their
        scales; of states for every sequence.
        """
        count = self.batch_size * self.pages_per_sequence if tokens is None else -(-tokens // self.page_size)
        sequences = self.batch_size if tokens is None else 0
        rings = {window: sequences * ring for window, ring in self.rings.items()}
        dtype = kv_dtype_of(self.kv_dtype)
        shapes = functools.partial(page_shapes, self.config, page_size=self.page_size, dtype=dtype, stacked=False)
        pools = shapes(num_pages=count, window_pages=rings, num_states=self.batch_size)
        return pools if dtype.itemsize > 1 else tuple(map(with_scales, pools, shapes(num_pages=1, num_states=1)))

    @property
    def rings(self) -> dict[int, int]:
        """Pages of a sequence's ring, by the window of the layers that keep one."""
        return window_rings(self.config, page_size=self.page_size, length=self.length, tokens=self.max_tokens)


def kv_bytes_per_token(serving: Serving) -> int:
    """Bytes of the keys and values of one more token, in all layers but those that keep a ring or a state.

    >>> config = ModelConfig.from_dict({
    ...     "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
    ...     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    ...     "max_position_embeddings": 512})
    >>> kv_bytes_per_token(Serving(config, 1, 16))
    256
    """
    pools = [pages_of(pool) for pool in serving.pages(serving.page_size)]
    return size([getattr(pool, "pool", pool) for pool in pools if pool is not None]) // serving.page_size


def size(tree: PyTree) -> int:
    """Bytes of a tree of shapes, without padding; two 4-bit numbers take one, as a `QTensor` counts them."""
    return sum(-(-math.prod(leaf.shape) * bits(leaf.dtype) // 8) for leaf in jax.tree.leaves(tree))


def trace_serving(
    serving: Serving, target: str, prompt: int | None = None, sampling: Sampling | None = None
) -> Program:
    """One decoding step of every sequence, or the step of a prompt of so many tokens, pages donated, traced for one
    device of a target.

    It takes the largest logit; with `sampling`, it draws as the engine does, and writes the tokens to the history. The
    options are constants of this program, so that the compiler drops the branches that they do not take.

    Raises:
      VishwamaiError: as `program.trace`.
    """
    graph, variables = serving.parameters()
    new, context = (1, serving.length) if prompt is None else (prompt, prompt)
    rows = serving.batch_size if prompt is None else 1
    batch = PagedBatch(*_tables(serving, rows, new, context), max_q_len=new)

    def serving_step(
        variables: PyTree, pages: PyTree, history: jax.Array, tokens: jax.Array, seeds: jax.Array, batch: PagedBatch
    ) -> tuple[PyTree, ...]:
        slots = jnp.arange(rows, dtype=jnp.int32)
        tables = {window: ring_table(slots, ring, batch.page_table.shape[1]) for window, ring in serving.rings.items()}
        with serving.optimization.kernels():
            model = nnx.merge(graph, variables)
            states = jnp.stack([slots, slots]) if has_states(serving.config) else None
            hidden, updated = model.step(tokens, pages, dataclasses.replace(batch, windows=tables, states=states))
            logits = model.logits(hidden[batch.cu_q_lens[1:] - 1])
            if sampling is None:
                return jnp.argmax(logits, -1), updated, history
            vocab = serving.config.vocab_size
            options = empty_rows(rows, rows, vocab)
            for row in range(rows):
                set_row(options, row, sampling)
            options = options._replace(slot=slots, position=batch.kv_lens, seed=seeds)
            draw = sample(logits, options, history, jnp.asarray(all_allowed(rows, vocab)))
            return draw, updated, history.at[slots, batch.kv_lens].set(draw.tokens, mode="drop")

    tokens = jax.ShapeDtypeStruct((rows * new,), jnp.int32)
    history = seeds = None
    if sampling is not None:
        history = jax.ShapeDtypeStruct((rows, serving.length + 1), jnp.int32)
        seeds = jax.ShapeDtypeStruct((rows,), jnp.uint32)
    step = jax.jit(serving_step, donate_argnums=(1, 2))
    arguments = variables, serving.pages(), history, tokens, seeds, batch
    return trace(step, *arguments, target=target.partition(":")[0])


def _tables(serving: Serving, rows: int, new: int, context: int) -> tuple[PyTree, ...]:
    """kv_lens, page_table and cu_q_lens of `rows` sequences of `context` tokens, `new` ones among them, whose pages are
    in random order.
    """
    per_sequence = serving.pages_per_sequence
    pages = np.random.default_rng(0).permutation(rows * per_sequence).reshape(rows, per_sequence)
    tables = np.full(rows, context), pages, new * np.arange(rows + 1)
    return tuple(table.astype(np.int32) for table in tables)
