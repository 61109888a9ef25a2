"""From a checked plan of memory to an engine: the weights are read, rounded and packed, the programs compiled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from vishwamai.core import ffi
from vishwamai.core.numbers import human
from vishwamai.inference.compiled_function import Store, cached
from vishwamai.inference.limits import Limits
from vishwamai.inference.memory import rings_of
from vishwamai.inference.prompts import Prompts
from vishwamai.inference.sharding import serving_mesh, serving_rules
from vishwamai.models.adapters import AdapterSizes
from vishwamai.models.config import ModelConfig
from vishwamai.models.generation import GenerationConfig
from vishwamai.models.gguf import source_file
from vishwamai.parallel.optimization import Optimization

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from vishwamai.inference.engine import Engine
    from vishwamai.inference.page_tiers import CacheTiers
    from vishwamai.models.decoder import Decoder
    from vishwamai.models.storage import Storage
    from vishwamai.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Draft:
    """A draft model, or the model's own head, that is to be loaded (`drafting`), and the bytes of its parameters and of
    its pages.
    """

    directory: Path
    config: ModelConfig
    weights: int
    pages: int

    def __str__(self) -> str:
        draft = "draft" if self.config.next_token is None else "head of"
        return (
            f"{draft} {self.config.family}, {self.config.num_layers} layers, from {source_file(self.directory)}: "
            f"weights {human(self.weights)}, keys and values {human(self.pages)}"
        )


@dataclasses.dataclass(frozen=True)
class Load:
    """What is to be loaded, and the memory that it takes, in bytes.

    Attributes:
      weights: the parameters.
      pages: keys and values.
      step: logits and activations of the largest step, an estimate.
      available: bytes that the device, or this process on a CPU, can still allocate; None where that is not known.
      mesh: the axes over which the model is split, or None. The bytes are those of each device; on a CPU, whose devices
        share its memory, those of all.
      optimization: the keys that were given, whose settings are in place.
      prefix_cache: argument of `Engine`.
      draft: a draft model, whose bytes `weights` and `pages` do not count, or None.
      keep_packed, adapters: arguments of `plan_load`.
      memory: the bytes that all may take where the caller says so, or None.
      num_states: slots of states, in models whose layers have them.
      states: the bytes of those.
      target: TPUs that need not be there, for which programs are compiled (`program_sets`), or None for the devices of
        this machine.
      store: callable that compiles the programs, or reads them (`programs.Store`).
    """

    directory: Path
    config: ModelConfig
    generation: GenerationConfig
    dtype: str
    quantize: str | None
    kv_dtype: str
    limits: Limits
    num_pages: int
    drafts: int
    weights: int
    pages: int
    step: int
    available: int | None
    mesh: str | None = None
    optimization: Optimization = Optimization()
    draft: Draft | None = None
    prefix_cache: bool = True
    keep_packed: bool = False
    memory: int | None = None
    adapters: AdapterSizes | None = None
    num_states: int = 0
    states: int = 0
    target: str | None = None
    store: Store = cached

    @property
    def total(self) -> int:
        """Bytes in all."""
        draft = 0 if self.draft is None else self.draft.weights + self.draft.pages
        return self.weights + self.pages + self.states + self.step + draft

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The directory's tokenizer; None where it has none."""
        from vishwamai.models import read_tokenizer

        return read_tokenizer(self.directory) if (self.directory / "tokenizer.json").exists() else None

    @property
    def prompts(self) -> Prompts:
        """What a request may be."""
        return Prompts(self.config.vocab_size, self.limits, self.num_pages, self.tokenizer)

    def __str__(self) -> str:
        quantized = {"keep": "its published numbers"}.get(self.quantize or "", self.quantize)
        form = self.dtype if quantized is None else f"{quantized} (other arrays {self.dtype})"
        limit_text = "" if self.available is None else f" of {human(self.available)} available"
        if self.memory is not None:
            limit_text = f" of {human(self.memory)} allowed"
        tokens = self.num_pages * self.limits.page_size
        where = (self.target or jax.default_backend()) + ("" if self.mesh is None else f" split by {self.mesh}")
        return (
            f"{self.config.family}, {self.config.num_layers} layers, from {source_file(self.directory)}, in {form}, on "
            f"{where}: {human(self.total)} planned{limit_text}: weights {human(self.weights)}, keys and "
            f"values {human(self.pages)} ({tokens} tokens in {self.kv_dtype}){self._states()}, a step "
            f"{human(self.step)}{'' if self.draft is None else f', {self.draft}'}{self._rings()}"
        )

    def _states(self) -> str:
        return f", states {human(self.states)} ({self.num_states} sequences or prefixes)" if self.states else ""

    def _rings(self) -> str:
        rings = rings_of(self.config, self.limits)
        of = " and ".join(f"{ring * self.limits.page_size} tokens (window {window})" for window, ring in rings.items())
        return f"; layers with a window keep at most {of} of each sequence" if rings else ""

    def engine(
        self,
        on_program: Callable[[int, int, str], None] | None = None,
        compile: str = "ahead",
        say: Callable[[str], None] = lambda text: None,
        tiers: CacheTiers | None = None,
    ) -> Engine:
        """Loads the weights and compiles the programs; `say` is told of weights that are kept, and the other arguments
        are those of `Engine`.

        Raises:
          ShapeError: a file is missing, damaged or contradicts `config.json`.
        """
        from vishwamai.inference.engine import Engine

        model, draft = self.decoders(say)
        return Engine(
            model,
            self.tokenizer,
            limits=self.limits,
            num_pages=self.num_pages,
            kv_dtype=self.kv_dtype,
            drafts=self.drafts,
            draft=draft,
            prefix_cache=self.prefix_cache,
            tiers=tiers,
            adapters=self.adapters,
            num_states=self.num_states,
            end_tokens=self.generation.eos_token_ids,
            mesh=self.device_mesh,
            optimization=self.optimization.of_kernels,
            compile=compile,
            on_program=on_program,
            store=self.store,
            reload=self.decoders,
        )

    @property
    def devices(self) -> Sequence[Any]:
        """The target's devices, or this machine's."""
        return devices_of_target(self.target)

    @property
    def device_mesh(self) -> Mesh | None:
        """Devices that split the model; None for one device."""
        return None if self.mesh is None else serving_mesh(self.mesh, self.devices)

    def decoders(self, say: Callable[[str], None] = lambda text: None) -> tuple[Decoder, Decoder | None]:
        """`decoder`, and the draft or the head, where there is one."""
        draft = self.draft
        if draft is None:
            return self.decoder(say), None
        return self.decoder(say), self._decoder(draft.directory, draft.config, self.device_mesh, say)

    def decoder(self, say: Callable[[str], None] = lambda text: None) -> Decoder:
        """The weights in the form in which the engine serves them, without its programs and pages.

        Raises:
          ShapeError: as `engine`.
        """
        return self._decoder(self.directory, self.config, self.device_mesh, say)

    def _decoder(self, directory: Path, config: ModelConfig, mesh: Mesh | None, say: Callable[[str], None]) -> Decoder:
        from vishwamai.models import from_pretrained, pack_weights
        from vishwamai.models.packed_files import Form, read_packed, write_packed

        quantize, dtype = form_of_directory(self.quantize, directory, self.directory), jnp.dtype(self.dtype)
        if jax.default_backend() != "cpu" or mesh is not None or ffi.why_not() is not None:
            placed = {} if mesh is None else {"mesh": mesh, "rules": serving_rules(config, mesh.shape)}
            return from_pretrained(directory, dtype=dtype, quantize=quantize, config=config, **placed)
        quantize = packed_form(quantize)
        if config.next_token is not None:  # small, and not the model whose packed weights are kept in this directory
            return pack_weights(from_pretrained(directory, dtype=dtype, quantize=quantize, config=config))
        form = Form(dtype.name, quantize and str(quantize), quantizes_head(self.quantize))
        packed = read_packed(directory, form) if self.keep_packed else None
        if packed is not None:
            return packed
        model = from_pretrained(directory, dtype=dtype, quantize=quantize)
        model = pack_weights(model, quantize_head=form.int8_head)
        if self.keep_packed:
            try:
                folder = write_packed(model, directory, form)
                say(f"packed weights are kept in {folder} for the next start; --no-keep-packed does without")
            except OSError as error:
                say(f"packed weights are not kept for the next start: {error}")
        return model


def devices_of_target(target: str | None) -> Sequence[Any]:
    """The devices of TPUs that need not be there; None: of this machine."""
    from vishwamai.aot.compile import libtpu

    return jax.devices() if target is None else libtpu.devices_for(target)


def quantizes_head(quantize: str | None) -> bool:
    """Whether the head becomes int8 once the weights are loaded, when they are packed for one CPU device."""
    return quantize in ("int8", "int4")


def packed_form(quantize: str | None) -> str | Storage | None:
    """The form of weights that are packed, or the name of another one."""
    from vishwamai.models.storage import PACKED

    return None if quantize is None else PACKED.get(quantize, quantize)


def form_of_directory(quantize: str | None, directory: Path, model: Path) -> str | None:
    """`quantize` of the model, or of its draft: a plain draft has nothing to keep."""
    from vishwamai.models.published.files import is_quantized
    from vishwamai.models.storage import KEEP

    return None if quantize == KEEP and directory != model and not is_quantized(directory) else quantize
