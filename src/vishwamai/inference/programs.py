"""The device's side of the engine: a few programs of fixed shapes, compiled before the first request or on demand.

The tokens of every running sequence lie on the device (`history`, a row for each slot): a step reads its tokens there,
and sampling writes the new ones there. So a step can be sent off before the host has read what the last one drew.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vishwamai.core.host_memory import give_back
from vishwamai.core.types import PyTree
from vishwamai.inference.compiled_function import CompiledFunction, Kernels, Store, cached
from vishwamai.inference.drafting import DraftPages, computed, draft_step
from vishwamai.inference.limits import Limits
from vishwamai.inference.pools import zeros
from vishwamai.inference.sampling import Proposals, Rows, Sampled, all_allowed, empty_rows, sample
from vishwamai.inference.sharding import gathered, place_of, put, replicated
from vishwamai.inference.step_shapes import StepShape, Tables, checking_shapes, host_tables, step_shapes
from vishwamai.models import Decoder, PagedBatch
from vishwamai.models.adapters import AdapterSizes, adapt
from vishwamai.models.pages import has_states

if TYPE_CHECKING:
    pass


def _forward(
    model: Decoder,
    pages: tuple[PyTree, ...],
    draft: Decoder | None,
    draft_pages: DraftPages,
    matrices: PyTree,
    history: jax.Array,
    slots: jax.Array,
    kv_lens: jax.Array,
    lengths: jax.Array,
    cu_q_lens: jax.Array,
    table: jax.Array,
    windows: Mapping[int, jax.Array] | None,
    rows: jax.Array,
    adapters: PyTree = None,
    states: jax.Array | None = None,
    *,
    shape: StepShape,
    mesh: Mesh | None,
    sizes: AdapterSizes | None = None,
) -> tuple[jax.Array, tuple[PyTree, ...], DraftPages]:
    """Logits `[rows, vocab]` of the step's tokens at `rows`, and the pages; a draft's get the same tokens."""
    batch = PagedBatch(kv_lens, table, cu_q_lens, shape.longest, lengths, windows, states)
    if sizes is not None:
        adapt(model, matrices, sizes.choice(adapters[batch.sequences(shape.tokens)]))
    tokens = history[slots[batch.sequences(shape.tokens)], batch.positions(shape.tokens)]
    hidden, pages = model.step(tokens, pages, batch)
    if draft is not None:
        draft_pages = computed(draft, draft_pages, tokens, hidden, batch, slots, mesh)
    return gathered(model.logits(hidden[rows]), mesh), pages, draft_pages


def _draw(
    logits: jax.Array, rows: Rows, history: jax.Array, allowed: jax.Array, proposals: tuple[Proposals, ...] = ()
) -> tuple[Sampled, jax.Array]:
    joined = None if not proposals else jax.tree.map(lambda *parts: jnp.concatenate(parts), *proposals)
    sampled = sample(logits, rows, history, allowed, joined)
    return sampled, history.at[rows.slot, rows.position].set(sampled.tokens, mode="drop")


def _place(history: jax.Array, slot: jax.Array, start: jax.Array, tokens: jax.Array) -> jax.Array:
    """`tokens` `[length]` into a slot from `start` on; what goes past the end is dropped."""
    return history.at[slot, start + jnp.arange(tokens.shape[0])].set(tokens, mode="drop")


class Programs:
    """The compiled programs and the arrays that they hand on: pages and history.

    Args:
      model: the decoder.
      limits: sizes of steps.
      pages: the pools (`pools.make_pools`).
      drafts: guesses of a step for each sequence.
      on_program: called with (how many are compiled, of how many, the next one's name) before each.
      mesh: mesh of the models and the pools; logits and history are whole on each of its devices.
      draft: a model that guesses, or None (`drafting`).
      draft_pages: its pools, or the `HeadMemory` of a head.
      windows: window sizes whose layers have separate page tables (`windows.WindowPages`).
      lazy: compile the programs of one sequence's token and of prompts only; each other one when a step first needs it.
      kernels: the configuration of kernels for which programs are traced.
      sizes: places of adapters, or None for none.
      store: callable that compiles each program, or reads it.

    Attributes:
      matrices: the pairs of `adapters.Adapters`, for the next steps.
      mesh: devices of the models and the pools, or None for one device.
      compiled, total: programs that are compiled, and all that may be.
      from_cache: number of them that were read, not compiled.
    """

    def __init__(
        self,
        model: Decoder,
        limits: Limits,
        pages: tuple[PyTree, ...],
        drafts: int = 0,
        on_program: Callable[[int, int, str], None] | None = None,
        mesh: Mesh | None = None,
        draft: Decoder | None = None,
        draft_pages: DraftPages = (),
        windows: Iterable[int] = (),
        lazy: bool = False,
        kernels: Kernels = contextlib.nullcontext,
        sizes: AdapterSizes | None = None,
        matrices: PyTree = None,
        store: Store = cached,
    ):
        self.sizes, self.matrices, self.mesh = sizes, matrices, mesh
        self.model, self.limits, self.draft, self.drafts, self.windows = model, limits, draft, drafts, tuple(windows)
        self.vocab = model.config.vocab_size
        self.shapes = step_shapes(limits, drafts)
        self.pages: PyTree = pages
        self.draft_pages: PyTree = draft_pages
        # One column more than tokens: the draw after the last guess may fall there.
        history = jax.ShapeDtypeStruct((limits.max_sequences, limits.max_length + drafts + 1), jnp.int32)
        rows = sorted({shape.rows for shape in self.shapes})
        masks: dict[int, np.ndarray] = {n: all_allowed(n, self.vocab) for n in rows}
        place = place_of(model)
        if place is None:
            self.history: PyTree = replicated(zeros([history])[0], mesh)
            self._all_allowed = {
                n: replicated(jax.device_put(mask, may_alias=False), mesh) for n, mask in masks.items()
            }
        else:
            described = history, {n: jax.ShapeDtypeStruct(mask.shape, mask.dtype) for n, mask in masks.items()}
            self.history, self._all_allowed = put(described, place) if mesh is None else replicated(described, mesh)
        drafting = () if draft is None else checking_shapes(limits, drafts)
        single = sorted({shape.rows for shape in self.shapes if shape not in drafting})
        self.total, self.compiled = len(self.shapes) + len(single) + 2 * len(drafting) + 1, 0
        self.from_cache = 0
        first = (min(self.shapes), max(self.shapes))  # a token of one sequence, and prompts

        def report(name: str) -> None:
            if on_program is not None:
                on_program(self.compiled, self.total, name)
            self.compiled += 1

        def program(
            name: str, early: bool, function: Callable[..., PyTree], donated: int | tuple[int, ...], *arguments: PyTree
        ) -> CompiledFunction:
            jitted = jax.jit(function, donate_argnums=donated)
            compiled_program = CompiledFunction(name, jitted, mesh, kernels, report, store)
            if early or not lazy:
                compiled_program.compile(*arguments)
                self.from_cache += compiled_program.from_cache
            return compiled_program

        self._forward: dict[StepShape, CompiledFunction] = {}
        self._draw: dict[int, CompiledFunction] = {}
        self._checked: dict[StepShape, CompiledFunction] = {}
        self._propose: dict[StepShape, CompiledFunction] = {}
        for shape in self.shapes:
            name = f"step of {shape.tokens} tokens, {shape.sequences} sequences"
            function = partial(_forward, shape=shape, mesh=mesh, sizes=sizes)
            arguments = *self._state(), self.history, *self.tables(shape).values()
            # The pools are written in place.
            self._forward[shape] = program(name, shape in first, function, (1, 3), *arguments)
        for n in single:
            arguments = *self._sampling(n), self._all_allowed[n]
            # The history is written in place, too.
            self._draw[n] = program(f"sampling of {n}", n in {shape.rows for shape in first}, _draw, 2, *arguments)
        for shape in drafting:
            n, logits_dtype = shape.sequences, jnp.float32
            proposal = Proposals(
                jax.ShapeDtypeStruct((n,), jnp.int32), jax.ShapeDtypeStruct((n, self.vocab), logits_dtype)
            )
            arguments = *self._sampling(shape.rows), self._all_allowed[shape.rows], (proposal,) * drafts
            self._checked[shape] = program(f"check of {shape.rows}", False, _draw, 2, *arguments)
            arguments = self._drafting(self.tables(shape), empty_rows(n, limits.max_sequences, self.vocab))
            function = partial(draft_step, mesh=mesh)
            self._propose[shape] = program(f"guesses of {n}", False, function, (1, 2), *arguments)
        scalar, tokens = np.int32(0), np.zeros(limits.max_length, np.int32)
        self._place = program("new prompts", True, _place, 0, self.history, scalar, scalar, tokens)
        give_back()  # what the compiler has left
        if on_program is not None:
            on_program(self.compiled, self.total, "")

    @property
    def summary(self) -> str:
        """How many programs there are, and where they come from."""
        read = f", {self.from_cache} of them compiled earlier" if self.from_cache else ""
        return f"{self.compiled} programs{read}"

    @property
    def intact(self) -> bool:
        """Whether the arrays that steps hand on are there: a program that failed may have taken them with it."""
        arrays = jax.tree.leaves((self.pages, self.draft_pages, self.history))
        return not any(x.is_deleted() for x in arrays if isinstance(x, jax.Array))

    def _state(self) -> tuple[PyTree, ...]:
        return self.model, self.pages, self.draft, self.draft_pages, self.matrices

    def _sampling(self, rows: int) -> tuple[PyTree, ...]:
        logits = jax.ShapeDtypeStruct((rows, self.vocab), jnp.float32)
        return logits, empty_rows(rows, self.limits.max_sequences, self.vocab), self.history

    def _drafting(
        self, tables: Tables, rows: Rows, guesses: np.ndarray | None = None, place: int = 0
    ) -> tuple[PyTree, ...]:
        count = len(tables["slots"])
        guesses = np.zeros(count, np.int32) if guesses is None else guesses
        # As of the step of one token that comes before the first guess.
        before = {name: tables[name] - guesses for name in ("kv_lens", "lengths")}
        named = {**tables, **before}
        of = (named[name] for name in ("slots", "kv_lens", "lengths", "table", "windows"))
        allowed = self._all_allowed[count]
        return self.draft, self.draft_pages, self.history, *of, rows, allowed, guesses, np.int32(place)

    def shape_for(self, needed: StepShape, checks: bool = False) -> StepShape:
        """The smallest shape that holds a step; `checks`: it checks guesses of the draft model."""
        sizes = dataclasses.astuple(needed)
        shapes = [shape for shape in self.shapes if (shape in self._propose) == checks]
        return min(s for s in shapes if all(has >= needs for has, needs in zip(dataclasses.astuple(s), sizes)))

    def tables(self, shape: StepShape) -> Tables:
        """The arrays of an empty step."""
        return host_tables(shape, self.limits, self.windows, self.sizes is not None, has_states(self.model.config))

    def place(self, slot: int, start: int, tokens: Sequence[int] | np.ndarray) -> None:
        """Writes a sequence's tokens, from position `start` on, into its slot."""
        padded = np.zeros(self.limits.max_length, np.int32)  # one shape for all prompts: one program
        padded[: len(tokens)] = tokens
        self.history = self._place(self.history, np.int32(slot), np.int32(start), padded)

    def propose(self, shape: StepShape, tables: Tables, rows: Rows, guesses: np.ndarray) -> tuple[Proposals, ...]:
        """Sends the draft's guesses off, which get their places in the history: entry `p * sequences + i` of all
        proposals is guess p of sequence i.

        Args:
          rows: sampling rows of each sequence's first guess.
          guesses: `[sequences]` int32, how many of each, most first.
        """
        drawn_proposals: list[Proposals] = []
        for place in range(int(guesses.max())):
            arguments = self._drafting(tables, rows, guesses, place)
            proposals, self.draft_pages, self.history = self._propose[shape](*arguments)
            drawn_proposals.append(proposals)
        # The check takes `drafts` proposals: the rest repeat the last one, and no row refers to them.
        return tuple(drawn_proposals) + (drawn_proposals[-1],) * (self.drafts - len(drawn_proposals))

    def step(
        self,
        shape: StepShape,
        tables: Tables,
        rows: Rows,
        allowed: np.ndarray | None,
        proposals: tuple[Proposals, ...] = (),
    ) -> Sampled:
        """Sends a step off; the arrays that it returns may not be computed yet."""
        forward = self._forward[shape](*self._state(), self.history, *tables.values())
        logits, self.pages, self.draft_pages = forward
        mask = self._all_allowed[shape.rows] if allowed is None else allowed  # on the device since the start
        if proposals:
            sampled, self.history = self._checked[shape](logits, rows, self.history, mask, proposals)
        else:
            sampled, self.history = self._draw[shape.rows](logits, rows, self.history, mask)
        return sampled
