"""The compiler's child process: its environment, its questions and answers, and its last words.

libtpu can end the process that it runs in, and reads some options only when it is loaded. So whatever may end it, or
needs such options, runs in a child, `aot.worker`: probes, compilations with a dump, and trials of options. Another
backend that compiles without its chip needs a worker of its own and nothing else here.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import selectors
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import vishwamai
from vishwamai.core.environment import libtpu_environment

COMMAND = ("-m", "vishwamai.aot.worker")
"""What Python runs as the compiler's process."""

Question = dict[str, Any]
Answer = dict[str, Any]


class Ended(Exception):
    """The process ended or failed over a question, which has no answer; the text says how.

    Args:
      words: end of a sentence about the compiler.
      fault: True where Python code of the process raised, so that the question is not to blame.
    """

    def __init__(self, words: str, fault: bool = False):
        super().__init__(words)
        self.fault = fault


class Child:
    """The compiler's process: a question starts it, also after it died; a context manager ends it.

    Args:
      timeout: seconds after which a question fails.
      options: options of libtpu in addition to those of the user.
      without: names of variables that the process does not get.
    """

    def __init__(self, timeout: float = 900.0, options: str = "", without: Sequence[str] = ()):
        self.timeout, self.options, self.without = timeout, options, without
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[str] | None = None
        self._files = contextlib.ExitStack()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._files.close()

    def ask(self, question: Question) -> Answer:
        """The answer to a question.

        Raises:
          Ended: there is none.
        """
        process = self.started()
        first = os.fstat(self._noise.fileno()).st_size  # what the process wrote before is of other questions
        try:
            line = self._exchange(process, json.dumps(question))
        except TimeoutError:
            self.stop()
            raise Ended(f"the compiler took longer than {self.timeout:g} s and was stopped.") from None
        if line is None:
            status = process.wait()
            self.stop()
            self._noise.seek(first)
            noise = self._noise.read()
            words = last_words(noise) or "it gave no reason"
            raise Ended(
                f"the compiler ended its process {ending(status)}, an error of libtpu: {words}", "Traceback" in noise
            )
        answer = json.loads(line)
        if "crashed" in answer:
            raise Ended(answer["crashed"], True)
        return answer

    def _exchange(self, process: subprocess.Popen[str], line: str) -> str | None:
        """The process's answer to a line, None where it died; TimeoutError where it is too slow."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return None
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            if not ready.select(self.timeout):
                raise TimeoutError
        return process.stdout.readline() or None

    @property
    def running(self) -> bool:
        """Whether there is a process."""
        return self._process is not None

    def started(self) -> subprocess.Popen[str]:
        """The process, started where there is none."""
        with self._lock:
            if self._closed:
                raise InterruptedError("the call that asked for it has ended")
            if self._process is None:
                self._noise = self._files.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
                self._process = subprocess.Popen(
                    [sys.executable, *COMMAND],
                    env=environment(self.options, self.without),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._noise,
                    text=True,
                )
            return self._process

    def kill(self) -> None:
        """Ends the process, from another thread than the one that asks, and lets none start."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def stop(self) -> None:
        """Ends the process; the next question starts another."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()  # does nothing to one that has ended
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()


def environment(options: str = "", without: Sequence[str] = ()) -> dict[str, str]:
    """The variables of a child that imports this package and needs no device.

    Args:
      options: options of libtpu in addition to those of the user.
      without: names of variables that the child does not get.
    """
    source = str(pathlib.Path(vishwamai.__file__).parents[1])
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    variables = inherited | libtpu_environment()
    if options:
        variables["LIBTPU_INIT_ARGS"] = f"{inherited.get('LIBTPU_INIT_ARGS', '')} {options}".strip()
    path = os.pathsep.join([source, inherited.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return variables | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}


def answer_lines(answer: Callable[[Question], Answer]) -> None:
    """Answers every line of standard input, a question in JSON, with a line on standard output: {"crashed": traceback}
    where `answer` raises. What C++ code prints goes to standard error.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception:  # the parent raises it
            reply = {"crashed": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")


def last_words(stderr: str) -> str:
    """The lines of standard error that say why a child ended; "" where it wrote none.

    >>> last_words("loading\\nF1128 12:00 Check failed: x == y\\n")
    'F1128 12:00 Check failed: x == y'
    """
    lines = stderr.splitlines()
    telling = [line for line in lines if re.search(r"Check fail|F\d{4}|Error|error|SIG", line)]
    return "\n".join(telling or lines)[-1500:]


def ending(status: int) -> str:
    """The exit status of a child in words.

    >>> ending(-6), ending(1)
    ('by signal 6', 'with status 1')
    """
    return f"by signal {-status}" if status < 0 else f"with status {status}"
