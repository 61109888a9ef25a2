"""The engine: prompts go in, answers come out, many at once.

`Engine` puts the parts together, and adds whole answers, streams, adapters and sleep to the loop of `loop.EngineLoop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from vishwamai.core.arguments import check_instances, checked
from vishwamai.core.errors import ShapeError
from vishwamai.inference.adapters import Adapters, Matrices
from vishwamai.inference.answers import Answer, Delta, joined
from vishwamai.inference.assembly import assemble, window_rings_of
from vishwamai.inference.compiled_function import COMPILE, cached
from vishwamai.inference.core import EngineCore
from vishwamai.inference.drafting import check_draft
from vishwamai.inference.limits import Limits
from vishwamai.inference.loop import EngineLoop
from vishwamai.inference.memory import default_states
from vishwamai.inference.memory_release import EngineMemory, Reload
from vishwamai.inference.page_tiers import CacheTiers, PageTiers
from vishwamai.inference.pages import PagePool
from vishwamai.inference.pools import calibration_tokens, kv_dtype_of
from vishwamai.inference.prompts import Prompts
from vishwamai.inference.requests import Request
from vishwamai.inference.sampling import Sampling
from vishwamai.inference.scheduler import Scheduler
from vishwamai.inference.sharding import mesh_of, place_model
from vishwamai.models import Decoder
from vishwamai.models.adapters import AdapterSizes
from vishwamai.models.rotation import rotation_switch
from vishwamai.parallel.optimization import Optimization

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from vishwamai.inference.barred import Barred
    from vishwamai.inference.guided import Grammar
    from vishwamai.inference.thinking import Thinking

_OPTIONAL = {"limits": Limits, "draft": Decoder, "mesh": Mesh, "adapters": AdapterSizes, "tiers": CacheTiers}


@checked
class Engine(EngineLoop):
    """Answers prompts with a decoder, many at once.

    Args:
      model: the decoder.
      tokenizer: result of `vishwamai.models.read_tokenizer`; None: prompts are token ids and answers have no text.
      limits: sizes of steps and sequences.
      num_pages: pages of keys and values; None: enough for every sequence at its longest.
      kv_dtype: dtype of keys and values: "float32", "bfloat16", "float16", "int8" or "fp8"; None: the model's. The
        latter two keep scales: on a CPU for each token and head, elsewhere for each layer and head, measured at the
        start (`pools`).
      drafts: guesses of each step for each sequence; 0: none.
      draft: a smaller decoder of the same vocab that guesses (`drafting`), or the model's own head that predicts
        further tokens (`models.next_token`); None: guesses come from the text itself (`speculative`). It has pages of
        its own, as many and of the same dtype.
      prefix_cache: bool, True shares the pages of a prompt's prefix with later prompts.
      tiers: host memory and a directory for prefixes that give way to others, or None for none.
      end_tokens: ids that end an answer, besides those of the model's configuration and of its tokenizer.
      mesh: devices that split parameters and pages, by explicit axes "tensor" and "expert" (see `mesh`); None: those of
        the model's parameters. It splits the model given, in place.
      adapters: places for adapters (`load_adapter`), or None for none.
      num_states: slots of states, for a model whose layers have them: one of each sequence that runs, and those that
        the prefix cache keeps; None: three for each of `max_sequences`, or one without prefix cache.
      optimization: keys of `vishwamai.performance.Optimization`; `use_fp8` and `use_pjit` belong to `plan_load`.
      compile: when programs are compiled: "ahead", all before the first request; or "lazy", two steps before it and
        each other one when it is first needed, while the requests of that step wait.
      on_program: called with (how many programs are compiled, of how many, the next one's name).
      store: callable that compiles the programs or reads them: a `programs.Store`, such as a `program_sets.ProgramSet`.
      reload: callable that reads the model and its draft again, for `sleep(2)`, or None.

    Raises:
      UnsupportedError: keys and values of that dtype are not served, packed weights are to be split, or the layers of
        the draft have states.
      ShapeError: the mesh does not divide what it is to split, or the draft cannot guess for the model.

    >>> from flax import nnx
    >>> from vishwamai.models import Decoder, ModelConfig
    >>> config = ModelConfig.from_dict({
    ...     "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    ...     "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64})
    >>> limits = Limits(max_sequences=2, max_tokens=8, max_length=32, page_size=4)
    >>> engine = Engine(Decoder(config, rngs=nnx.Rngs(0)), limits=limits)
    >>> answers = engine.generate([[1, 2, 3], [4]], Sampling(max_new_tokens=5))
    >>> [(len(answer.token_ids), answer.finish) for answer in answers]
    [(5, 'length'), (5, 'length')]
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Any = None,
        *,
        limits: Limits | None = None,
        num_pages: int | None = None,
        kv_dtype: DTypeLike | None = None,
        drafts: int = 0,
        draft: Decoder | None = None,
        prefix_cache: bool = True,
        tiers: CacheTiers | None = None,
        end_tokens: Sequence[int] = (),
        mesh: Mesh | None = None,
        adapters: AdapterSizes | None = None,
        num_states: int | None = None,
        optimization: Optimization | Mapping[str, object] | None = None,
        compile: str = "ahead",
        on_program: Callable[[int, int, str], None] | None = None,
        store: Callable[..., object] = cached,
        reload: Reload | None = None,
    ):
        optional = {"limits": limits, "draft": draft, "mesh": mesh, "adapters": adapters, "tiers": tiers}
        check_instances("Engine", _OPTIONAL, optional)
        self.limits = limits or Limits(max_length=min(4096, model.config.max_positions))
        self.optimization = Optimization.of_loaded("Engine", optimization)
        kv_dtype = self.optimization.settings("serving", {"kv_dtype": kv_dtype}).get("kv_dtype", kv_dtype)
        kv_dtype = kv_dtype_of(model.dtype if kv_dtype is None else kv_dtype)
        if num_pages is None:
            num_pages = self.limits.max_sequences * self.limits.pages_per_sequence
        mesh = mesh_of(model) if mesh is None else mesh
        if compile not in COMPILE:
            raise ShapeError(f"Engine: `compile` is {compile!r}; pass {' or '.join(map(repr, COMPILE))}.")
        if drafts >= self.limits.max_tokens:
            raise ShapeError(f"Engine: {drafts} guesses a step do not fit into {self.limits.max_tokens} tokens of it.")
        if draft is not None:
            check_draft(model.config, draft.config, drafts, self.limits.max_length)
        if mesh is not None:
            model, draft = place_model(model, mesh), None if draft is None else place_model(draft, mesh)
        self.model, self.tokenizer, self.drafts = model, tokenizer, drafts
        end = model.config.eos_token_id
        of_tokenizer = None if tokenizer is None else tokenizer.end_token
        ends = (*(end if isinstance(end, Sequence) else (end,)), of_tokenizer)
        self.end_tokens = frozenset(end_tokens) | {token for token in ends if token is not None}
        default_count = default_states(model.config, self.limits.max_sequences, prefix_cache)
        if num_states is None or not default_count:
            num_states = default_count
        elif num_states < 1:
            raise ShapeError(f"Engine: `num_states` is {num_states}; pass at least 1, the states of one sequence.")
        sample = calibration_tokens(model.config.vocab_size, min(256, self.limits.max_length), tokenizer)
        self.adapters = None if adapters is None else Adapters(model, adapters, mesh, self._change)
        if tiers is not None and not prefix_cache:
            raise ShapeError("Engine: `tiers` are of a prefix cache; pass `prefix_cache=True`, or no `tiers`.")
        self.programs = assemble(
            model,
            draft,
            self.limits,
            num_pages=num_pages,
            kv_dtype=kv_dtype,
            sample=sample,
            mesh=mesh,
            num_states=num_states,
            optimization=self.optimization,
            adapters=adapters,
            matrices=None if self.adapters is None else self.adapters.matrices,
            drafts=drafts,
            on_program=on_program,
            lazy=compile == "lazy",
            store=store,
        )
        pool = PagePool(num_pages, prefix_cache)
        windows = window_rings_of(model, draft, self.limits)
        switch = rotation_switch(model.config)
        scheduler = Scheduler(self.limits, pool, switch, windows, num_states, restores=tiers is not None)
        stores = None if tiers is None else PageTiers(tiers, self.programs, repr(self.optimization))
        core = EngineCore(self.programs, scheduler, tokenizer, self.end_tokens, stores)
        super().__init__(core, Prompts(self.programs.vocab, self.limits, num_pages, tokenizer))
        self.statistics = core.statistics
        self._memory = EngineMemory(self.programs, self.adapters, mesh, reload)
        self._sleep_lock = threading.Lock()  # one call of `sleep` or `wake` at a time

    def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """The token ids of a prompt; see `Prompts.encode`."""
        return self.prompts.encode(prompt)

    def sleep(self, level: int = 1) -> None:
        """Frees the memory of pages, states and weights until `wake`. New requests are declined from now on; the call
        waits until those that run or wait have ended. Prefixes are stored where there are `tiers`, and else forgotten.

        Args:
          level: 1, the weights wait in host memory; 2, they are dropped, and read from their files again. Adapters
            wait in host memory at both.

        Raises:
          ShapeError: there is no such level, or the model has no files.
          DeviceError: the engine has stopped.
        """
        with self._sleep_lock:
            self._memory.check(level)
            if self.sleeping:
                return
            with self._lock:
                self.sleeping = level
            try:
                self._when_idle(partial(self._release, level))
            except BaseException:
                self.sleeping = 0
                raise

    def wake(self) -> None:
        """Brings back what `sleep` took off the device; an engine that is awake stays so. Where this fails, the engine
        sleeps on.

        Raises:
          ShapeError: the files of the model are missing, or of another model.
          DeviceError: the engine has stopped.
        """
        with self._sleep_lock:
            if self.sleeping:
                self._when_idle(self._memory.restore)
                self.sleeping = 0

    def _release(self, level: int) -> None:
        self.core.store_prefixes()
        self.scheduler.forget_prefixes()
        self._memory.release(level)

    def load_adapter(self, name: str, directory: str | Path) -> None:
        """Loads an adapter as the library peft writes it; requests name it. Answers that run are not disturbed.

        Raises:
          ShapeError: the engine has no place for it, or it does not fit the model.
          UnsupportedError: it is not LoRA of the layers' products alone.
          DeviceError: the engine sleeps.
        """
        self._check_awake()
        self._adapters.load(name, directory)

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter; its answers go on to their end.

        Raises:
          ShapeError: none has that name.
        """
        self._adapters.unload(name)

    @property
    def _adapters(self) -> Adapters:
        if self.adapters is None:
            raise ShapeError("Engine: it has no places for adapters; pass `adapters` (--max-adapters).")
        return self.adapters

    def _change(self, matrices: Matrices) -> None:
        self.programs.matrices = matrices

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        adapters: Sequence[str | None] | None = None,
    ) -> list[Answer]:
        """The answers to prompts, in their order; with `n` of them for a prompt, one after another.

        Args:
          prompts: texts, or lists of token ids.
          sampling: options of all prompts, or one for each.
          adapters: the name of each prompt's adapter, None for the model alone.

        Raises:
          ShapeError: a request cannot be served; nothing was computed.
        """
        options = [sampling or Sampling()] * len(prompts) if not isinstance(sampling, Sequence) else list(sampling)
        if len(options) != len(prompts):
            raise ShapeError(f"Engine: {len(prompts)} prompts came with {len(options)} samplings; pass one for each.")
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        deltas: dict[tuple[int, int], list[Delta]] = {}
        requests = []
        names = adapters or [None] * len(prompts)
        if len(names) != len(prompts):
            raise ShapeError(f"Engine: {len(prompts)} prompts came with {len(names)} adapters; pass one for each.")

        def sink(i: int, delta: Delta) -> None:
            deltas[i, delta.choice].append(delta)
            if delta.finish is not None:
                done.put(None)

        for i, (prompt, request_options) in enumerate(zip(prompts, options)):
            deltas |= {(i, choice): [] for choice in range(request_options.n)}
            requests.append(Request(self.encode(prompt), request_options, partial(sink, i)))
            self.check(requests[-1].prompt, request_options)
        with self._with_adapters(requests, names):
            for request in requests:
                self.submit(request)
            for _ in deltas:
                while self._thread is None and done.empty():
                    self.step()
                done.get()
        return [joined(requests[i].prompt, parts) for (i, _), parts in deltas.items()]

    async def stream(
        self,
        prompts: str | Sequence[int] | Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        *,
        priority: float = 0.0,
        deadline: float | None = None,
        grammar: Grammar | Thinking | Barred | None = None,
        keep_special: Collection[int] = (),
        adapter: str | None = None,
        shared: int = 0,
    ) -> AsyncGenerator[Delta, None]:
        """Deltas of a request as they come; `start` must have been called. A caller that leaves cancels it.

        Args:
          prompts: a text, token ids, or a list of prompts in token ids: answer `choice` of prompt i has number
            `i * n + choice`.
          sampling: options of the request.
          priority: a unit of it counts as `Limits.aging` seconds of waiting.
          deadline: seconds after which the answers end unfinished.
          grammar: `guided.Grammar` that the answers match, or None.
          keep_special: special tokens that are part of the answers' texts all the same.
          adapter: the name of one that is loaded; None: the model alone.
          shared: number of tokens with which other prompts are expected to begin, too, such as those of a system
            message; models with states keep the states after them for those prompts.
        """
        if self._thread is None:
            raise ShapeError("Engine: the loop does not run; call `start()` before `stream`.")
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Delta] = asyncio.Queue()
        options = sampling or Sampling()

        def sink(i: int, delta: Delta) -> None:
            loop.call_soon_threadsafe(
                arrived.put_nowait, dataclasses.replace(delta, choice=i * options.n + delta.choice)
            )

        many: Any = prompts  # of the three forms, the one with prompts in it
        if isinstance(prompts, str) or not prompts or isinstance(prompts[0], int):
            many = [prompts]
        requests = [
            Request(
                self.encode(prompt),
                options,
                partial(sink, i),
                priority,
                deadline,
                grammar,
                frozenset(keep_special),
                shared=shared,
            )
            for i, prompt in enumerate(many)
        ]
        for request in requests:
            self.check(request.prompt, options)
        left = options.n * len(requests)
        with self._with_adapters(requests, [adapter] * len(requests)):
            for request in requests:
                self.submit(request)
            try:
                while left:
                    delta = await arrived.get()
                    left -= delta.finish is not None
                    yield delta
            finally:
                if left:
                    for request in requests:
                        self.cancel(request)

    @contextlib.contextmanager
    def _with_adapters(self, requests: Sequence[Request], names: Sequence[str | None]) -> Iterator[None]:
        """Gives requests their adapters, whose places stay as they are for so long."""
        holders = contextlib.ExitStack()
        with holders:
            for request, name in zip(requests, names):
                if name is not None:
                    request.adapter = self._adapters.take(name, request.options.n)
                    holders.callback(self._adapters.release, request.adapter, request.options.n)
            yield
