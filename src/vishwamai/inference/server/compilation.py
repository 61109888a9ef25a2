"""Grammars of requests, compiled within limits of time, memory and stack.

A grammar is tried first in a process of its own (`compilation_process`). One that stays within the limits is compiled
again in this process, on a thread with a larger stack, and cached. A trial ends when its client leaves.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypedDict

from vishwamai.core.errors import ShapeError
from vishwamai.inference.guided import LIMITS, Grammar, Vocabulary, grammar_text, invalid
from vishwamai.inference.server.errors import HttpError
from vishwamai.inference.threads import roomy_stack
from vishwamai.models.tokenizer import Tokenizer

CPU_SECONDS = 5
"""Time of a processor for one grammar; twice as long by the clock."""

MEMORY = 512 << 20
"""Bytes that one grammar may take while it is compiled."""

STACK = 4 << 20
"""Bytes of stack of a trial. The threads that use a compiled grammar have `threads.STACK`, which is more."""

MOST_AT_ONCE, MOST_WAITING = 2, 32

CACHE_ENTRIES, CACHE_BYTES = 64, 512 << 20
"""Compiled grammars that are cached, and what they take together."""


class Compilation:
    """Compiles grammars for one model.

    Args:
      tokenizer: the model's tokenizer.
      vocab: tokens of the model.
      end_tokens: ids that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, end_tokens: list[int]):
        self._of = (tokenizer, vocab, end_tokens)
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._trials = _Trials()
        self._pool = concurrent.futures.ThreadPoolExecutor(MOST_AT_ONCE, "grammars")
        self._pending = 0
        self._cache: collections.OrderedDict[str, tuple[Grammar, int]] = collections.OrderedDict()

    async def grammar(self, kind: str, source: str | Mapping[str, object]) -> Grammar:
        """The grammar of a request; the arguments are those of `Vocabulary.grammar`. Cancelling ends its trial.

        Raises:
          ShapeError: it is not valid, or exceeds a limit.
          HttpError: 429, too many grammars wait.
        """
        if self._pending >= MOST_AT_ONCE + MOST_WAITING:
            raise HttpError(429, f"{self._pending} grammars wait to be compiled; try again later.", retry_after=1)
        self._pending += 1
        number = self._trials.number()
        try:
            with roomy_stack():  # of the pool's threads, which start here
                future = self._pool.submit(self._compiled, number, kind, source)
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._trials.end(number)
            raise
        finally:
            self._pending -= 1

    def close(self) -> None:
        """Ends the process and the threads."""
        self._trials.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, number: int, kind: str, source: str | Mapping[str, object]) -> Grammar:
        text = grammar_text(kind, source)
        with self._lock:
            if text in self._cache:
                self._cache.move_to_end(text)
                return self._cache[text][0]
            vocabulary = self._vocabulary
            if vocabulary is None:
                self._trials.settings = lambda: _settings(*self._of)
                self._trials.start()  # reads the tokenizer while this process does
                vocabulary = self._vocabulary = Vocabulary.of(*self._of)
        answer = self._trials.run(number, text)
        if answer is None:
            raise ShapeError(
                f"the {kind.replace('_', ' ')} is too complex: compiling it takes more than {CPU_SECONDS} s or "
                f"{MEMORY >> 20} MiB, or its references are nested too deeply. Make it simpler."
            )
        if answer["error"] is not None:
            raise invalid(kind, answer["error"])
        grammar = vocabulary.compiled(kind, text)
        with self._lock:
            self._cache[text] = (grammar, max(answer["bytes"], len(text)))
            while len(self._cache) > CACHE_ENTRIES or sum(size for _, size in self._cache.values()) > CACHE_BYTES:
                self._cache.popitem(last=False)
        return grammar


def _settings(tokenizer: Tokenizer, vocab: int, end_tokens: list[int]) -> dict[str, object]:
    sizes = {"memory": MEMORY, "cpu": CPU_SECONDS, "stack": STACK}
    return {"tokenizer": tokenizer.encoder.to_str(), "vocab": vocab, "end": end_tokens, "limits": LIMITS, **sizes}


class _Trial(TypedDict):
    """A trial: the library's error or None, and the bytes that the grammar takes."""

    error: str | None
    bytes: int


class _Trials:
    """The process that tries grammars, started again by the next trial where it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, concurrent.futures.Future[_Trial | None]] = {}
        self._finished: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self.settings: Callable[[], dict[str, object]] = dict

    def number(self) -> int:
        """The number of a new trial."""
        return next(self._numbers)

    def start(self) -> None:
        """Starts the process unless it runs."""
        with self._lock:
            self._started()

    def run(self, number: int, text: str) -> _Trial | None:
        """What a trial finds: the library's error or None, and the bytes; None where it exceeds a limit."""
        result: concurrent.futures.Future[_Trial | None] = concurrent.futures.Future()
        with self._lock:
            if number in self._finished:
                self._finished.discard(number)
                return None
            process = self._started()
            self._waiting[number] = result
            self._send(process, {"id": number, "text": text})
        return result.result()

    def end(self, number: int) -> None:
        """Ends a trial, whether it runs or not."""
        with self._lock:
            if number in self._waiting and self._process is not None:
                self._send(self._process, {"id": number})
            else:
                self._finished.add(number)

    def close(self) -> None:
        """Ends the process and all trials."""
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()

    def _started(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is not None and process.poll() is None:
            return process
        program = Path(__file__).with_name("compilation_process.py")
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        self._send(process, self.settings())
        threading.Thread(target=self._receive, args=(process,), name="grammar trials", daemon=True).start()
        return process

    @staticmethod
    def _send(process: subprocess.Popen[bytes], message: Mapping[str, object]) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
        except (OSError, ValueError):  # it has ended, which `_receive` notices
            pass

    def _receive(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            with self._lock:
                result = self._waiting.pop(answer["id"], None)
            if result is not None:
                result.set_result(None if "signal" in answer else answer)
        with self._lock:
            process.wait()
            lost, self._waiting = self._waiting, {}
        for result in lost.values():
            result.set_result(None)
