"""Renders the templates of strangers: in Jinja's sandbox, in a process of their own with a limit of time and memory.

The sandbox keeps a template from what it must not reach. It bounds neither time nor memory (`{{ 'a' * 10**10 }}`), and
a thread cannot be ended; a process can.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vishwamai.core.errors import ShapeError, UnsupportedError

TIME_LIMIT_S = 10.0
"""How long one rendering may take."""

MEMORY_LIMIT = 1 << 30
"""Bytes of address space of a process."""

PROCESSES = 4
"""How many render at once."""


@dataclasses.dataclass(frozen=True)
class Rendering:
    """What a template makes of a chat.

    Attributes:
      text: the prompt.
      spans: (begin, end) of the text in `{% generation %}` blocks, in order.
    """

    text: str
    spans: tuple[tuple[int, int], ...] = ()


def render(template: str, source: str, values: Mapping[str, object]) -> Rendering:
    """Renders a template.

    Args:
      template: the program.
      source: the file that it comes from, for errors.
      values: JSON values that it may read.

    Raises:
      ShapeError: the template is not a program in Jinja, or the values are not JSON.
      UnsupportedError: the template raises an error, does what the sandbox forbids, or exceeds a limit.
    """
    try:
        request = json.dumps({"text": template, "values": values, "now": _now().isoformat()})
    except (TypeError, ValueError, RecursionError) as error:
        raise ShapeError(f"{source}: the messages of a chat are JSON values: {error}.") from error
    answer = _PROCESSES.ask(request.encode())
    if answer is None:
        raise UnsupportedError(
            f"{source}: the chat template was ended: it needs more than {TIME_LIMIT_S:g} s or "
            f"{MEMORY_LIMIT >> 20} MiB for these messages. Use another template."
        )
    if answer.get("kind") == "syntax":
        raise ShapeError(f"{source}: the chat template is not valid Jinja: {answer['error'][:1000]}.")
    if "error" in answer:
        raise UnsupportedError(f"{source}: the chat template rejects these messages: {answer['error'][:1000]}")
    return Rendering(answer["text"], tuple((begin, end) for begin, end in answer["spans"]))


def _now() -> datetime.datetime:
    """The time that `strftime_now` of a template tells."""
    return datetime.datetime.now()


class _Processes:
    """The processes that render, started as they are needed; one that was ended is replaced by the next request's.

    There are several, so that a chat that takes all of its time does not hold up the others.
    """

    def __init__(self) -> None:
        self._owner = 0  # a fork has the pipes of its parent, which it must not use

    def ask(self, request: bytes) -> dict[str, Any] | None:
        """The answer to a request; None where the process ended without one."""
        if os.getpid() != self._owner:
            self._idle: list[subprocess.Popen[bytes]] = []
            self._slots, self._owner = threading.BoundedSemaphore(PROCESSES), os.getpid()
        with self._slots:
            try:
                process = self._idle.pop()  # of a list, whose methods are atomic
            except IndexError:
                process = self._start()
            if process.poll() is not None:
                process = self._start()
            line = self._line(process, request + b"\n")
            if not line.endswith(b"\n"):
                process.kill()
                process.wait()
                return None
            self._idle.append(process)
        return json.loads(line)

    @staticmethod
    def _line(process: subprocess.Popen[bytes], request: bytes) -> bytes:
        """What a process answers; not a whole line where it ended."""
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(TIME_LIMIT_S, process.kill)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(request)
            process.stdin.flush()
            return process.stdout.readline()
        except OSError:
            return b""
        finally:
            timer.cancel()

    @staticmethod
    def _start() -> subprocess.Popen[bytes]:
        program = Path(__file__).with_name("template_process.py")
        # -P: the files next to the program are not modules of the standard library's names
        command = [sys.executable, "-P", str(program), str(MEMORY_LIMIT)]
        paths = os.pathsep.join(path for path in sys.path if path)
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
        )


_PROCESSES = _Processes()
