"""llama.cpp as a contestant of `serve.py`: `python benchmarks/serve.py DIR --contestant serve_llama --format q8_0`.

DIR has `bf16.gguf` next to the Hugging Face files, with the same weights: llama.cpp's `convert_hf_to_gguf.py DIR
--outtype bf16 --outfile DIR/bf16.gguf` writes it. The other formats are llama.cpp's own quantization of that file, made
once and kept in DIR. Needs `llama-cpp-python`, and nothing of this package.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np

_TYPES = {"q8_0": 7, "q4_0": 2}  # llama_ftype of llama.h
FORMATS = ("bf16", *_TYPES)
_BATCH = 512


class LlamaCpp:
    """A model and its context: sequences side by side in one cache."""

    def __init__(self, path: Path, threads: int, max_sequences: int, max_tokens: int):
        model = llama_cpp.llama_model_default_params()
        model.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_seq_max = max_sequences * max_tokens, max_sequences
        context.n_batch = context.n_ubatch = _BATCH
        context.n_threads = context.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self._lengths: dict[int, int] = {}
        self.bytes = path.stat().st_size

    def _run(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """A batch of rows: token, position, sequence, whether logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, with_logits) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, with_logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode gave {code} for {len(rows)} tokens")

    def _logits(self, row: int) -> np.ndarray:
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, row), (self._vocab,))

    def prefill(self, sequence: int, tokens: Sequence[int]) -> np.ndarray:
        """The logits after a prompt."""
        last = len(tokens) - 1
        for start in range(0, len(tokens), _BATCH):
            part = enumerate(tokens[start : start + _BATCH], start)
            self._run([(token, position, sequence, position == last) for position, token in part])
        self._lengths[sequence] = len(tokens)
        return self._logits(last % _BATCH).copy()

    def decode(self, tokens: dict[int, int]) -> dict[int, int]:
        """One more token of each sequence, the largest logit."""
        self._run([(token, self._lengths[sequence], sequence, True) for sequence, token in tokens.items()])
        for sequence in tokens:
            self._lengths[sequence] += 1
        return {sequence: int(self._logits(row).argmax()) for row, sequence in enumerate(tokens)}

    def reset(self) -> None:
        """Forgets all sequences."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._lengths.clear()


def load(folder: str, format: str, threads: int, max_sequences: int, max_tokens: int) -> LlamaCpp:
    """llama.cpp on a directory with GGUF files."""
    llama_cpp.llama_backend_init()
    path = Path(folder, f"{format}.gguf")
    if not path.exists():
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype, options.nthread = _TYPES[format], threads
        temporary = f"{path}.{os.getpid()}"
        if llama_cpp.llama_model_quantize(str(path.with_name("bf16.gguf")).encode(), temporary.encode(), options):
            raise RuntimeError(f"{path.with_name('bf16.gguf')} was not quantized to {format}; is it there?")
        os.replace(temporary, path)
    return LlamaCpp(path, threads, max_sequences, max_tokens)
