"""How much memory a directory takes as an engine, known before a weight is read."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from vishwamai.core.arguments import checked
from vishwamai.core.errors import DeviceError, ShapeError, UnsupportedError
from vishwamai.core.numbers import human
from vishwamai.core.target import Target
from vishwamai.inference.drafting import check_draft
from vishwamai.inference.head_memory import hidden_bytes, pool_dtype
from vishwamai.inference.limits import Limits
from vishwamai.inference.load import Draft, Load, devices_of_target, form_of_directory, packed_form, quantizes_head
from vishwamai.inference.memory import (
    adapter_bytes,
    default_states,
    page_bytes,
    ring_pages,
    rings_of,
    state_bytes,
    weight_bytes,
)
from vishwamai.inference.pools import kv_dtype_of
from vishwamai.inference.sharding import serving_mesh
from vishwamai.models.adapters import AdapterSizes
from vishwamai.models.attend import NO_STEPS
from vishwamai.models.config import ModelConfig, read_config
from vishwamai.models.generation import read_generation_config
from vishwamai.models.gguf import model_directory
from vishwamai.models.next_token import check_head, head_config
from vishwamai.models.shards import read_index
from vishwamai.parallel.optimization import Optimization


@checked
def plan_load(
    directory: str | Path,
    *,
    dtype: str = "bfloat16",
    quantize: str | None = None,
    kv_dtype: str | None = None,
    max_sequences: int = 32,
    max_tokens: int = 512,
    max_length: int | None = None,
    page_size: int = 16,
    memory: int | None = None,
    drafts: int = 0,
    mixed_tokens: int | None = None,
    token_seconds: float | None = None,
    mesh: str | None = None,
    optimization: Optimization | Mapping[str, Any] | None = None,
    draft_model: str | Path | None = None,
    draft_head: bool = False,
    prefix_cache: bool = True,
    keep_packed: bool = False,
    adapters: AdapterSizes | None = None,
    num_states: int | None = None,
    num_pages: int | None = None,
    target: str | None = None,
) -> Load:
    """What loading a Hugging Face directory takes; reads its headers only.

    Args:
      directory: the model's directory, or a name of the Hugging Face Hub, "ORG/NAME@REVISION".
      dtype: dtype of the parameters.
      quantize: argument of `from_pretrained`; "keep" is for a draft model only where that is published quantized.
      kv_dtype: dtype of keys and values, a name of `pools.KV_DTYPES`; None: `dtype`.
      max_sequences, max_tokens, mixed_tokens, token_seconds, page_size: fields of `Limits`.
      max_length: tokens of a sequence; None: the model's own, as far as the pages of `max_sequences` sequences of 4096
        tokens hold one. With a draft model or layers with a window: at most 4096.
      memory: bytes that all may take; None: 90 % of what is available.
      drafts: argument of `Engine`.
      draft_model: a directory of a smaller model with the same tokenizer, which makes the guesses (`drafting`). It is
        loaded with the same dtypes, quantization and mesh.
      draft_head: bool, True lets the model's own head guess, which its checkpoint has next to the layers
        (`models.next_token`).
      prefix_cache: argument of `Engine`.
      keep_packed: bool, True keeps, on one CPU device, the packed weights beside the checkpoint
        (`models.packed_files`), and map
        them where they were kept before: the next start reads, rounds and packs nothing.
      mesh: split the model over the first devices, "tensor=2" or "expert=4,tensor=2"; None: one device.
      adapters: places for adapters; their bytes count as weights.
      num_states: slots of states, in a model whose layers have them; None: three for each of `max_sequences`, or fewer
        where those take more than a quarter of what the weights leave.
      num_pages: pages of keys and values; None: as many as fit, and at most those of `max_sequences` sequences at their
        longest.
      target: a TPU or a slice of TPUs that need not be there, "v6e:2x2": what a server there would load
        (`program_sets`).
      optimization: the dict of `vishwamai.performance.explain_optimization`: `use_fp8` and `kv_cache_fp8` set
        `quantize` and `kv_dtype`, `use_pjit` splits over all devices by the axis tensor.

    Raises:
      ConfigError: `optimization` has an unknown key, or contradicts another option.
      ShapeError: the directory is not a whole model, or an option or the draft model contradicts it.
      UnsupportedError: as `from_pretrained`, or the layers of the draft model have states.
      DeviceError: it does not fit; the text says what would.
    """
    keys = Optimization.of(optimization)
    chosen = keys.settings("serving", {"quantize": quantize, "kv_dtype": kv_dtype})
    quantize, kv_dtype = chosen.get("quantize", quantize), chosen.get("kv_dtype", kv_dtype)
    all_devices, on_cpu = devices_of_target(target), target is None and jax.default_backend() == "cpu"
    if keys.use_pjit is not None:
        count = 1 if mesh is None else serving_mesh(mesh, all_devices).size
        if keys.over(len(all_devices), count, f"mesh={mesh}"):
            mesh = f"tensor={len(all_devices)}"
    directory = model_directory(Path(directory), weights=True)
    config, generation = _read(directory), read_generation_config(directory)
    own_length = max_length is None
    if max_length is None:
        max_length = min(4096, config.max_positions)
    elif max_length > config.max_positions:
        raise ShapeError(
            f"max_length is {max_length}, but {directory / 'config.json'} describes a model of {config.max_positions} "
            "positions; pass no more."
        )
    limits = Limits(
        max_sequences,
        max(max_tokens, max_sequences + 1),
        max_length,
        page_size,
        mixed_tokens=mixed_tokens,
        token_seconds=token_seconds,
    )
    if num_pages is not None and num_pages < limits.pages_per_sequence:
        raise ShapeError(f"num_pages is {num_pages}; pass at least {limits.pages_per_sequence}, those of one sequence.")
    kv_dtype = kv_dtype or dtype
    stored = kv_dtype_of(kv_dtype)
    devices = None if mesh is None else serving_mesh(mesh, all_devices)
    copies = devices.size if devices is not None and on_cpu else 1
    itemsize, head = jnp.dtype(dtype).itemsize, on_cpu and mesh is None and quantizes_head(quantize)

    rings = rings_of(config, limits)

    def sizes(of: Path, config: ModelConfig, rings: dict[int, int], stored: jnp.dtype = stored) -> tuple[int, int, int]:
        """Bytes of the weights, of a page of the layers that share `num_pages`, and of the pools of windows."""
        form = form_of_directory(quantize, of, directory)
        if on_cpu and devices is None:
            form = packed_form(form)
        place: dict[str, Any] = {"mesh": devices, "directory": of, "on_cpu": on_cpu}
        weights = weight_bytes(config, itemsize, quantize=form, int8_head=head, **place)
        none, all_rings = dict.fromkeys(rings, 0), ring_pages(rings, limits)
        sized: dict[str, Any] = {"mesh": devices, "on_cpu": on_cpu}
        page = page_bytes(config, page_size, stored, window_pages=none, **sized)
        ring = page_bytes(config, page_size, stored, num_pages=0, window_pages=all_rings, **sized)
        return copies * weights, copies * page, copies * ring

    read_index(directory)  # every file is there, and whole
    weights, page, ring = sizes(directory, config, rings)
    weights += 0 if adapters is None else copies * adapter_bytes(config, adapters, dtype, devices)
    draft, draft_page, draft_ring, rows = None, 0, 0, (drafts + 1) * max_sequences
    if draft_model is not None and draft_head:
        raise ShapeError("plan_load: `draft_model` and `draft_head` both guess the next tokens; pass one of them.")
    if draft_head:
        small = _read_head(directory, config, drafts, max_length)
        sizes_of_head = sizes(directory, small, {}, pool_dtype(stored, dtype))
        hidden = [copies * count for count in hidden_bytes(config, limits, drafts, itemsize)]
        draft_page, draft_ring = sizes_of_head[1] + hidden[0], sizes_of_head[2] + hidden[1]
        draft = Draft(directory, small, sizes_of_head[0], 0)
        rows += drafts * max_sequences
    if draft_model is not None:
        draft_model = model_directory(Path(draft_model), weights=True)
        small = _read_draft(Path(draft_model), directory, config, drafts, max_length)
        of_draft = rings_of(small, limits)
        draft_weights, draft_page, draft_ring = sizes(Path(draft_model), small, of_draft)
        draft = Draft(Path(draft_model), small, draft_weights, 0)
        rows += drafts * max_sequences  # what the guesses were drawn from
    width = config.vocab_size * rows * 4 + limits.max_tokens * (config.hidden_size + config.intermediate_size)
    step = copies * 4 * width
    available = _available() if target is None else Target.parse_chip(target).hbm_usable_bytes
    # A chip may have a little less than its kind: a server there has to hold what is planned here.
    share = 0.9 if target is None else 0.85
    budget = memory if memory is not None else None if available is None else int(share * available)
    most = max_sequences * limits.pages_per_sequence if num_pages is None else num_pages
    fixed = weights + step + ring + draft_ring + (0 if draft is None else draft.weights)
    # Kept states get a quarter of what is left, where that is less than their number would take.
    of_sequence, states = copies * state_bytes(config), default_states(config, max_sequences, prefix_cache)
    if num_states is not None:
        if num_states < 1 or not states:
            reason = "pass at least 1, the states of one sequence" if states else "the model's layers have none"
            raise ShapeError(f"num_states is {num_states}; {reason}.")
        states = num_states
    elif budget is not None and states:
        states = min(states, max(max_sequences, (budget - fixed) // (4 * of_sequence)))
    fixed += states * of_sequence
    growing = page + draft_page
    left = most if budget is None else (budget - fixed) // max(growing, 1)
    pages = min(most, left)
    if own_length and draft_model is None:
        longest = dataclasses.replace(limits, max_length=max(max_length, min(config.max_positions, pages * page_size)))
        limits = limits if rings_of(config, longest) else longest
    load = Load(
        directory,
        config,
        generation,
        jnp.dtype(dtype).name,
        quantize,
        kv_dtype,
        limits,
        max(pages, 0),
        drafts,
        weights,
        max(pages, 0) * page + ring,
        step,
        available,
        mesh,
        keys,
        None if draft is None else dataclasses.replace(draft, pages=max(pages, 0) * draft_page + draft_ring),
        prefix_cache,
        keep_packed,
        memory,
        adapters,
        states,
        states * of_sequence,
        target,
    )
    if pages < limits.pages_per_sequence:
        least = fixed + limits.pages_per_sequence * growing
        assert budget is not None
        raise DeviceError(
            f"{load}. That does not fit: one sequence of {max_length} tokens needs {human(least)} in all, and "
            f"{human(budget)} may be used{'' if memory is None else ' (--memory)'}. Choose a smaller --max-length or "
            f"--max-sequences{_smaller(quantize)}{'' if memory is None else ', or a larger --memory'}."
        )
    return load


def _smaller(quantize: str | None) -> str:
    """The rounding that would take less memory, as a choice of the user's."""
    smaller = {None: "int8", "fp8": "int4", "int8": "int4"}.get(quantize)
    return "" if smaller is None else f", or --quantize {smaller}"


def _read(directory: Path) -> ModelConfig:
    if not directory.is_dir():
        raise ShapeError(f"{directory}: expected a directory with config.json and safetensors files.")
    config = read_config(directory)
    if config.bidirectional:
        raise UnsupportedError(f"{directory}: {NO_STEPS}")
    return config


def _read_draft(directory: Path, model: Path, config: ModelConfig, drafts: int, max_length: int) -> ModelConfig:
    """The configuration of a draft model, checked against the model that it guesses for."""
    draft = _read(directory)
    check_draft(config, draft, drafts, max_length)
    read_index(directory)
    vocabs = [_vocab(folder) for folder in (model, directory)]
    if None not in vocabs and vocabs[0] != vocabs[1]:
        raise ShapeError(
            f"{directory / 'tokenizer.json'} gives tokens other ids than {model / 'tokenizer.json'}; pass a draft "
            "model with the same tokenizer."
        )
    return draft


def _read_head(directory: Path, config: ModelConfig, drafts: int, max_length: int) -> ModelConfig:
    """The configuration of a model's head, whose tensors are in the checkpoint."""
    head = head_config(config)
    check_draft(config, head, drafts, max_length)
    assert head.next_token is not None
    check_head(directory, head.next_token)
    return head


def _vocab(directory: Path) -> dict[str, int] | None:
    """The ids of a tokenizer's tokens; None where there is no tokenizer."""
    from vishwamai.models import read_tokenizer

    return read_tokenizer(directory).encoder.get_vocab() if (directory / "tokenizer.json").exists() else None


def _available() -> int | None:
    """Bytes that the default device has left, or this process where the device is the CPU."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        statistics = device.memory_stats() or {}
        limit = statistics.get("bytes_limit")
        return None if limit is None else limit - statistics.get("bytes_in_use", 0)
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        limits.append(int(lines["MemAvailable"].split()[0]) * 1024)
    group = Path("/sys/fs/cgroup")
    try:
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no control group of version 2, or no limit ("max")
    if not limits and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=None)
