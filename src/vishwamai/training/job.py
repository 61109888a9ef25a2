"""A training program filled with arrays: the data, the initial state, and the jitted functions of a run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from tokenizers import Tokenizer

from vishwamai.core.config import local_platform
from vishwamai.core.execute import only_for
from vishwamai.core.hardware import tpu_for
from vishwamai.core.types import PyTree
from vishwamai.measure.measurement import program_bytes
from vishwamai.training.config import TrainConfig
from vishwamai.training.data import Batch, Corpus, prepare, training_batches
from vishwamai.training.exported import export, export_adapter, files_next_to_weights
from vishwamai.training.facts import RunFacts, run_facts
from vishwamai.training.flops import flops_per_token, peak_flops
from vishwamai.training.lora import attach, initial_adapters, merge_adapters
from vishwamai.training.model import ModelParts, host_memory, make_model
from vishwamai.training.optimizers import schedule
from vishwamai.training.pipeline.stages import rearrange
from vishwamai.training.preferences import with_reference
from vishwamai.training.program import TrainingProgram, training_program
from vishwamai.training.remat import fitting_policy, memory_limit
from vishwamai.training.sharding import Layout
from vishwamai.training.step import TrainState
from vishwamai.training.together import first_alone, on_host

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class TrainingJob:
    """A program with its data.

    Attributes:
      program: step, shardings and compiler options.
      corpus: rows to train on.
      folder: directory of the run.
      files: files next to the exported weights: text by name.
      frozen: parameters below adapters; None without adapters.
      policy: policy of `remat` that fits.
    """

    program: TrainingProgram
    corpus: Corpus
    folder: Path
    files: dict[str, str]
    frozen: PyTree
    policy: str

    @property
    def config(self) -> TrainConfig:
        """The configuration."""
        return self.program.config

    @property
    def layout(self) -> Layout:
        """Where batches and state lie."""
        return self.program.layout

    @functools.cached_property
    def jitted_step(self) -> jax.stages.Wrapped:
        """State, batch and frozen parameters to the next state and what the step shows; it takes the state's memory."""
        return jitted_step(self.program, self.policy)

    @functools.cached_property
    def _evaluate(self) -> jax.stages.Wrapped:
        return jax.jit(_traced(self.config, self.program.evaluation()))

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, PyTree]]:
        """The next state, and scalars of the step by name. It takes the memory of `state`."""
        return self.jitted_step(state, batch, self.frozen)

    def compile(self, state: TrainState, batch: Batch) -> jax.stages.Compiled:
        """Compiles `step` for a state and a batch."""
        return self.jitted_step.lower(state, batch, self.frozen).compile()

    def facts(self, state: TrainState, compiled: jax.stages.Compiled) -> RunFacts:
        """What the run trains, by its first state and the compiled step."""
        rates = self.flops_per_token, self.peak_flops
        return run_facts(self.config, self.corpus, state.params, self.frozen, compiled, *rates)

    def evaluate(self, params: PyTree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """The sum of the loss of a batch, and over how many tokens or pairs."""
        return self._evaluate(params, batch, self.frozen)

    def place(self, state: TrainState) -> TrainState:
        """A state in the form of checkpoints as the stages of a pipeline hold it."""
        return rearrange(self.program.shapes.stages, state, self.layout, placed=True)

    def unplace(self, state: PyTree) -> PyTree:
        """A state, or parameters, in the form of checkpoints."""
        return rearrange(self.program.shapes.stages, state, self.layout, placed=False)

    @functools.cached_property
    def rate(self) -> optax.Schedule:
        """The learning rate as a function of the step."""
        return schedule(self.config.optimizer, self.config.steps)

    @property
    def flops_per_token(self) -> float:
        """Operations of a step for each token."""
        return flops_per_token(self.program.shapes.parts.config, self.config.data.sequence_length)

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of all devices for products of `model.compute_dtype`; None where it is not known."""
        peak = peak_flops(self.config.model.compute_dtype)
        return None if peak is None else peak * self.layout.devices

    def export(self, params: PyTree) -> None:
        """Writes the parameters, in Hugging Face's form, into the run's directory."""
        frozen, section = self.frozen, self.config.lora
        thin = None if frozen is None else on_host(self.unplace(params))

        def merged(params: PyTree, frozen: PyTree) -> PyTree:
            return merge_adapters(attach(section, frozen, params))

        if frozen is not None:
            places = self.layout.shardings(jax.eval_shape(merged, params, frozen))
            params = jax.jit(merged, out_shardings=places)(params, frozen)
        host = on_host(self.unplace(params))
        parts, base = self.program.shapes.parts, self.config.model.start_from
        first_alone(lambda: export(parts, host, self.files, self.folder / "model"))
        if thin is not None:
            first_alone(lambda: export_adapter(parts, thin, section, base, self.folder / "adapter"))


def make_job(config: TrainConfig, folder: Path) -> tuple[TrainingJob, TrainState]:
    """Prepares the data, makes the model, and fills the program of a run: with its initial state.

    Args:
      config: checked by `checks.check`.
      folder: directory of the run, which exists.
    """
    prepared = first_alone(lambda: prepare(config, folder / "data"))
    corpus = prepare(config, folder / "data") if prepared is None else prepared  # the others read what it wrote
    tokenizer = Tokenizer.from_file(str(folder / "data" / "tokenizer.json"))
    files = files_next_to_weights(config, tokenizer, folder / "data")
    model = make_model(config, tokenizer)
    program = training_program(config, model.described, tpu_for(jax.devices()[0].device_kind))
    layout = program.layout
    params, frozen = _initial_parameters(program, model), None
    del model  # its arrays lie on the devices now
    if config.lora.rank:
        params, frozen = layout.create(lambda: program.shapes.place(_initial_adapters(program))), params
    start = frozen
    if config.objective == "dpo" and start is None:
        start = jax.tree.map(jnp.copy, params)  # the state's are given away
    state = layout.create(functools.partial(program.shapes.initial, update=program.update), params)
    if config.objective == "dpo":
        score = functools.partial(jax.jit(_traced(config, program.reference(start))), start)
        corpus = with_reference(corpus, score, layout, config.batch_size, folder / "data")
    policy = _fitting_policy(program, corpus, state, frozen)
    return TrainingJob(program, corpus, folder, files, frozen, policy), state


def jitted_step(program: TrainingProgram, policy: str) -> jax.stages.Wrapped:
    """The step of a program under a policy of `remat`, for the devices of this process."""
    step = _traced(program.config, program.step(policy))
    return jax.jit(step, donate_argnums=0, compiler_options=program.options)


def _initial_parameters(program: TrainingProgram, parts: ModelParts) -> PyTree:
    """The parameters that a run begins with, as its devices hold them."""
    new, place = parts.new, program.shapes.place
    if new is not None:
        return program.layout.create(lambda: place(new()))
    with host_memory(program.config):
        return program.layout.put(place(parts.params))


def _initial_adapters(program: TrainingProgram) -> PyTree:
    """The adapters that a run begins with, in the form of checkpoints."""
    config, parts = program.config, program.shapes.parts
    return initial_adapters(config.lora, parts.params, jax.random.key(config.seed), parts.ranks)


def _fitting_policy(program: TrainingProgram, corpus: Corpus, state: TrainState, frozen: PyTree) -> str:
    """`remat`; where it is automatic, the first policy whose compiled step fits its limit."""
    config, layout = program.config, program.layout
    limit = memory_limit(config.remat)
    if limit is None:
        return config.remat
    batches = training_batches(corpus, config.seed, config.batch_size, *layout.reader)
    first = layout.put_batch(next(iter(batches)))

    def needs(policy: str) -> int:
        total = program_bytes(jitted_step(program, policy).lower(state, first, frozen).compile())
        assert total is not None  # every backend of jax that compiles gives it
        return total

    return fitting_policy(limit, needs)


def _traced(config: TrainConfig, function: Callable[..., Result]) -> Callable[..., Result]:
    """The function with the kernels that the configuration asks for, traced for these devices alone."""

    def call(*args: PyTree) -> PyTree:
        with config.optimization.kernels(), only_for(local_platform()):
            return function(*args)

    return call
