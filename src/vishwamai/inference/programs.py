"""The device's side of the engine: a few programs of fixed shapes, compiled before the first request or on demand.

The tokens of every running sequence lie on the device (`history`, a row for each slot): a step reads its tokens there,
and sampling writes the new ones there. So a step can be sent off before the host has read what the last one drew.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vishwamai.core.execute import only_for, platform_of
from vishwamai.core.host_memory import give_back
from vishwamai.core.qtensor import bits
from vishwamai.inference import kept_programs
from vishwamai.inference.drafting import DraftPages, computed, draft_step
from vishwamai.inference.limits import Limits
from vishwamai.inference.pools import zeros
from vishwamai.inference.sampling import Proposals, Rows, Sampled, all_allowed, empty_rows, sample
from vishwamai.inference.sharding import gathered, on_mesh, place_of, put, replicated
from vishwamai.models import Decoder, PagedBatch
from vishwamai.models.adapters import AdapterSizes, adapt
from vishwamai.models.pages import has_states


@dataclasses.dataclass(frozen=True, order=True)
class StepShape:
    """The sizes of a step's arrays: its tokens, its sequences, the rows of logits, and most tokens of one sequence."""

    tokens: int
    sequences: int
    rows: int
    longest: int


COMPILE = ("ahead", "lazy")
"""When programs are compiled: all before the first request, or most of them on demand."""


Kernels = Callable[[], contextlib.AbstractContextManager[Any]]
"""Puts a configuration of kernels in force, such as `Optimization.kernels`."""


Store = Callable[[str, Any, tuple[Any, ...], Callable[[], None], "Mesh | None"], Any]
"""Gives the compiled program of (its name, the jitted function, the arguments, what is called where it is read, the
mesh).
"""


def cached(
    name: str, function: Any, arguments: tuple[Any, ...], on_read: Callable[[], None], mesh: Mesh | None = None
) -> Any:
    """The `Store` of each start: the program is compiled, or read where an earlier start kept it."""
    return kept_programs.compiled(function, arguments, on_read)


class Tables(dict[str, Any]):
    """Host arrays of one step, by name; see `host_tables`."""


def step_shapes(limits: Limits, drafts: int = 0) -> tuple[StepShape, ...]:
    """The shapes of every step: decodes of 1, 2, 4, ... sequences, guesses for as many, prompts alone, and mixed steps
    of `Limits.mixed_sizes`.

    >>> [(s.tokens, s.sequences) for s in step_shapes(Limits(max_sequences=3, max_tokens=128))]
    [(1, 1), (2, 2), (3, 3), (32, 3), (128, 3)]
    """
    most = limits.max_sequences
    counts = sorted({min(2**i, most) for i in range(most.bit_length() + 1)})
    shapes = [StepShape(n, n, n, 1) for n in counts]
    if drafts:
        shapes += checking_shapes(limits, drafts)
    shapes += [StepShape(n, most, most, n) for n in limits.mixed_sizes]
    return tuple(sorted(shapes))


def checking_shapes(limits: Limits, drafts: int) -> tuple[StepShape, ...]:
    """The shapes of steps that check guesses: of 1, 2, 4, ... sequences."""
    most = limits.max_sequences
    counts = sorted({min(2**i, most) for i in range(most.bit_length() + 1)})
    return tuple(StepShape(n * (drafts + 1), n, n * (drafts + 1), drafts + 1) for n in counts)


def _forward(
    model: Decoder,
    pages: Any,
    draft: Decoder | None,
    draft_pages: Any,
    matrices: Any,
    history: Any,
    slots: Any,
    kv_lens: Any,
    lengths: Any,
    cu_q_lens: Any,
    table: Any,
    windows: Any,
    rows: Any,
    adapters: Any = None,
    states: Any = None,
    *,
    shape: Any,
    mesh: Any,
    sizes: AdapterSizes | None = None,
) -> tuple[Any, Any, Any]:
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
    logits: Any, rows: Rows, history: Any, allowed: Any, proposals: tuple[Proposals, ...] = ()
) -> tuple[Sampled, Any]:
    joined = None if not proposals else jax.tree.map(lambda *parts: jnp.concatenate(parts), *proposals)
    sampled = sample(logits, rows, history, allowed, joined)
    return sampled, history.at[rows.slot, rows.position].set(sampled.tokens, mode="drop")


def _place(history: Any, slot: Any, start: Any, tokens: Any) -> Any:
    """`tokens` `[length]` into a slot from `start` on; what goes past the end is dropped."""
    return history.at[slot, start + jnp.arange(tokens.shape[0])].set(tokens, mode="drop")


class CompiledFunction:
    """A function that is compiled once, for the arguments of one shape: by `compile`, or by its first call.

    Args:
      name: text for the progress report.
      function: jitted, as `kept_programs.compiled` takes it.
      mesh: mesh of the traced program.
      kernels: the configuration of kernels for which it is traced.
      report: called with the name before it is compiled.
      store: callable that compiles it, or reads it.

    Attributes:
      from_cache: it was read, not compiled.
    """

    def __init__(
        self,
        name: str,
        function: Any,
        mesh: Mesh | None,
        kernels: Kernels,
        report: Callable[[str], None],
        store: Store = cached,
    ):
        self.name, self._function, self._mesh, self._kernels, self._report = name, function, mesh, kernels, report
        self._store = store
        self._compiled: Any = None
        self._platform: str | None = None
        self.from_cache = False

    def compile(self, *arguments: Any) -> Any:
        """Compiles it for arguments of these shapes; the compiled function."""
        self._report(self.name)
        self._platform = platform_of(arguments)
        with self._traced():
            if _has_four_bits(arguments):
                self._function.lower(*arguments).compile()
                self._compiled = self._jitted
            else:
                self._compiled = self._store(self.name, self._function, arguments, self._read, self._mesh)
        return self._compiled

    def __call__(self, *arguments: Any) -> Any:
        compiled = self._compiled
        if compiled is None:
            compiled = self.compile(*arguments)
        return compiled(*arguments)

    def _read(self) -> None:
        self.from_cache = True

    def _jitted(self, *arguments: Any) -> Any:
        with self._traced():
            return self._function(*arguments)

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        """What the function is traced under: the same for `compile` and each call, which so find one program."""
        with on_mesh(self._mesh), self._kernels(), only_for(self._platform):
            yield


def _has_four_bits(arguments: Any) -> bool:
    """Whether 4-bit arrays of the CPU are among them. A compiled program declines them where they are committed to
    devices, because JAX reports another layout for them than for its arguments; the jitted function, which finds the
    same program, takes them.
    """
    arrays = (x for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array))
    return jax.default_backend() == "cpu" and any(bits(x.dtype) < 8 for x in arrays)


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
      mesh: as the argument.
      compiled, total: programs that are compiled, and all that may be.
      from_cache: number of them that were read, not compiled.
    """

    def __init__(
        self,
        model: Decoder,
        limits: Limits,
        pages: tuple[Any, ...],
        drafts: int = 0,
        on_program: Callable[[int, int, str], None] | None = None,
        mesh: Mesh | None = None,
        draft: Decoder | None = None,
        draft_pages: DraftPages = (),
        windows: Iterable[int] = (),
        lazy: bool = False,
        kernels: Kernels = contextlib.nullcontext,
        sizes: AdapterSizes | None = None,
        matrices: Any = None,
        store: Store = cached,
    ):
        self.sizes, self.matrices, self.mesh = sizes, matrices, mesh
        self.model, self.limits, self.draft, self.drafts, self.windows = model, limits, draft, drafts, tuple(windows)
        self.vocab = model.config.vocab_size
        self.shapes = step_shapes(limits, drafts)
        self.pages: Any = pages
        self.draft_pages: Any = draft_pages
        # One column more than tokens: the draw after the last guess may fall there.
        history = jax.ShapeDtypeStruct((limits.max_sequences, limits.max_length + drafts + 1), jnp.int32)
        rows = sorted({shape.rows for shape in self.shapes})
        masks: dict[int, Any] = {n: all_allowed(n, self.vocab) for n in rows}
        place = place_of(model)
        if place is None:
            self.history: Any = replicated(zeros([history])[0], mesh)
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
            name: str, early: bool, function: Callable[..., Any], donated: int | tuple[int, ...], *arguments: Any
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

    def _state(self) -> tuple[Any, ...]:
        return self.model, self.pages, self.draft, self.draft_pages, self.matrices

    def _sampling(self, rows: int) -> tuple[Any, ...]:
        logits = jax.ShapeDtypeStruct((rows, self.vocab), jnp.float32)
        return logits, empty_rows(rows, self.limits.max_sequences, self.vocab), self.history

    def _drafting(self, tables: Tables, rows: Rows, guesses: Any = None, place: int = 0) -> tuple[Any, ...]:
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

    def place(self, slot: int, start: int, tokens: Any) -> None:
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


def host_tables(
    shape: StepShape, limits: Limits, windows: Iterable[int], adapters: bool = False, states: bool = False
) -> Tables:
    """The arrays of an empty step, for the caller to fill in.

    Returns:
      slots: `[sequences]` int32, rows of the history.
      kv_lens: `[sequences]` int32, tokens of each sequence, the new ones included.
      lengths: `[sequences]` int32, the lengths that scalings of the rotation go by (`PagedBatch.lengths`).
      cu_q_lens: `[sequences + 1]` int32, where each sequence's new tokens start.
      table: `[sequences, pages_per_sequence]` int32.
      windows: the same, by window, of layers that have page tables of their own.
      rows: `[rows]` int32, the tokens of the step whose logits are wanted.
      adapters: `[sequences]` int32, the place of each sequence's adapter, -1 for none; where there are any.
      states: `[2, sequences]` int32, as of `PagedBatch`, in models that have states.
    """
    table = np.zeros((shape.sequences, limits.pages_per_sequence), np.int32)
    extra: dict[str, Any] = {"adapters": np.full(shape.sequences, -1, np.int32)} if adapters else {}
    if states:
        extra = {"adapters": extra.get("adapters"), "states": np.zeros((2, shape.sequences), np.int32)}
    return Tables(
        slots=np.zeros(shape.sequences, np.int32),
        kv_lens=np.zeros(shape.sequences, np.int32),
        lengths=np.zeros(shape.sequences, np.int32),
        cu_q_lens=np.zeros(shape.sequences + 1, np.int32),
        table=table,
        windows={window: table.copy() for window in windows},
        rows=np.zeros(shape.rows, np.int32),
        **extra,
    )
