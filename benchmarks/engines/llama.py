"""llama.cpp and ik_llama.cpp as contestants of `serve.py`: `python benchmarks/serve.py DIR --contestant
engines.llama --format q8_0 --setting no-flash`.

DIR has `bf16.gguf` or, of any format, `source.gguf`, with the weights of the Hugging Face files next to it: llama.cpp's
`convert_hf_to_gguf.py DIR --outtype bf16 --outfile DIR/bf16.gguf` writes the first. The other formats are llama.cpp's
own quantization of that file, made once and kept in DIR. Needs `llama-cpp-python` or `ik-llama-cpp-python`, and nothing
of this package. Both have the same functions; which of them runs is what is installed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

if importlib.util.find_spec("llama_cpp") is not None:
    import llama_cpp as api
else:
    from ik_llama_cpp import _ctypes_api as api

_TYPES = {"bf16": 32, "q8_0": 7, "q4_0": 2, "q4_k_m": 15}  # llama_ftype of llama.h
FORMATS = tuple(_TYPES)
SETTINGS = ("flash", "no-flash")
"""Both ways of attention: "flash" is faster or slower by the length of the sequences and the processor. The library's
own choice, "auto", is one of the two.
"""
_BATCH = 512


class LlamaCpp:
    """A model and its context: sequences side by side in one cache."""

    def __init__(self, path: Path, threads: int, max_sequences: int, max_tokens: int, flash: bool):
        model = api.llama_model_default_params()
        model.n_gpu_layers = 0
        self._model = api.llama_model_load_from_file(str(path).encode(), model)
        context = api.llama_context_default_params()
        context.n_ctx, context.n_seq_max = max_sequences * max_tokens, max_sequences
        context.n_batch = context.n_ubatch = _BATCH
        context.n_threads = context.n_threads_batch = threads
        if hasattr(context, "flash_attn_type"):  # of llama_flash_attn_type: -1 auto, 0 off, 1 on
            context.flash_attn_type = int(flash)
        else:
            context.flash_attn = flash
        self._context = api.llama_init_from_model(self._model, context)
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(_BATCH, 0, 1)
        self._lengths: dict[int, int] = {}
        self.bytes = path.stat().st_size

    def _run(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """A batch of rows: token, position, sequence, whether logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, with_logits) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, with_logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if code := api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode gave {code} for {len(rows)} tokens")

    def _logits(self, row: int) -> np.ndarray:
        return np.ctypeslib.as_array(api.llama_get_logits_ith(self._context, row), (self._vocab,))

    def prefill(self, sequence: int, tokens: Sequence[int]) -> np.ndarray:
        """The logits after a prompt."""
        last = len(tokens) - 1
        for start in range(0, len(tokens), _BATCH):
            part = enumerate(tokens[start : start + _BATCH], start)
            self._run([(token, position, sequence, position == last) for position, token in part])
        self._lengths[sequence] = len(tokens)
        return self._logits(last % _BATCH).copy()

    def loss(self, tokens: Sequence[int]) -> float:
        """Mean negative log probability of the tokens after the first, in nats."""
        losses = []
        for start in range(0, len(tokens), _BATCH):
            part = tokens[start : start + _BATCH]
            self._run([(token, start + i, 0, True) for i, token in enumerate(part)])
            for row, target in enumerate(tokens[start + 1 : start + 1 + len(part)]):
                logits = self._logits(row).astype(np.float64)
                losses.append(np.logaddexp.reduce(logits) - logits[target])
        self.reset()
        return float(np.mean(losses))

    def decode(self, tokens: dict[int, int]) -> dict[int, int]:
        """One more token of each sequence, the largest logit."""
        self._run([(token, self._lengths[sequence], sequence, True) for sequence, token in tokens.items()])
        for sequence in tokens:
            self._lengths[sequence] += 1
        return {sequence: int(self._logits(row).argmax()) for row, sequence in enumerate(tokens)}

    def reset(self) -> None:
        """Forgets all sequences."""
        if hasattr(api, "llama_memory_clear"):
            api.llama_memory_clear(api.llama_get_memory(self._context), True)
        else:
            api.llama_kv_cache_clear(self._context)
        self._lengths.clear()


def load(
    folder: str, format: str, threads: int, max_sequences: int, max_tokens: int, setting: str = "flash"
) -> LlamaCpp:
    """llama.cpp on a directory with GGUF files."""
    api.llama_backend_init()
    path = Path(folder, f"{format}.gguf")
    if not path.exists():
        sources = (path.with_name(name) for name in ("bf16.gguf", "source.gguf"))
        source = next((file for file in sources if file.exists()), None)
        if source is None:
            raise SystemExit(f"{folder} has neither {format}.gguf nor bf16.gguf nor source.gguf; write one of them.")
        temporary = f"{path}.{os.getpid()}"
        _quantize(source, temporary, format, threads)
        os.replace(temporary, path)
    return LlamaCpp(path, threads, max_sequences, max_tokens, setting == "flash")


def _quantize(source: Path, target: str, format: str, threads: int) -> None:
    if not hasattr(api, "llama_model_quantize"):  # ik_llama.cpp's wheel has the program
        from ik_llama_cpp import find_quantize_bin

        words: list[Any] = [find_quantize_bin(), "--allow-requantize", source, target, format.upper(), threads]
        subprocess.run(list(map(str, words)), check=True, stdout=subprocess.DEVNULL)
        return
    options = api.llama_model_quantize_default_params()
    options.ftype, options.nthread, options.allow_requantize = _TYPES[format], threads, True
    if api.llama_model_quantize(str(source).encode(), target.encode(), options):
        raise SystemExit(f"{source} was not quantized to {format}; is it a whole GGUF file?")
