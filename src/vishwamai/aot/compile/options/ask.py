"""What the installed JAX and libtpu say of options: asked in a process of its own, and kept on disk by version."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from vishwamai.aot.compile import answers, child, libtpu
from vishwamai.core import caches
from vishwamai.core.errors import KernelError

FORMAT = 1
"""Counts up when what the worker answers changes."""

COMMAND = ("-m", "vishwamai.aot.compile.options.worker")
"""What Python runs as the worker."""

TIMEOUT_S = 600.0

Question = dict[str, Any]


def ask(questions: Sequence[Question]) -> list[dict[str, Any]]:
    """The answers to the worker's questions, in their order.

    Returns:
        for each what the worker answers; {"refused": words} where the worker's process ended over it.

    Raises:
        DeviceError: a question about the compiler, and libtpu is not installed.
        KernelError: the worker cannot start, or takes too long.
    """
    keys = [_key(question) for question in questions]
    replies = [answers.read("options", key) for key in keys]
    missing = [i for i, reply in enumerate(replies) if reply is None]
    incomplete = bool(missing)
    while missing:
        got, ending = _run([questions[i] for i in missing])
        for index, reply in zip(missing, got):
            replies[index] = reply
            answers.write("options", keys[index], reply)
        missing = missing[len(got) :]
        if missing and ending is not None:  # the first without an answer ended the process
            replies[missing.pop(0)] = {"refused": f"it ends libtpu's process: {ending}"}
    if incomplete:
        caches.trim("aot")
    return [reply or {} for reply in replies]


def _key(question: Question) -> str:
    about_jax = "setting" in question
    versions = {"jax": importlib.metadata.version("jax")} if about_jax else libtpu.versions()
    text = json.dumps([FORMAT, versions, question], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _run(questions: Sequence[Question]) -> tuple[list[dict[str, Any]], str | None]:
    """The answers of one worker, and how its process ended where some are missing."""
    try:
        worker = subprocess.run(
            [sys.executable, *COMMAND],
            input="".join(json.dumps(question) + "\n" for question in questions),
            env=child.environment(without=("LIBTPU_INIT_ARGS", "XLA_FLAGS")),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise KernelError(f"asking the compiler about options took longer than {TIMEOUT_S:g} s.") from None
    got = [json.loads(line) for line in worker.stdout.splitlines() if line.endswith("}")]
    for reply in got:
        if "crashed" in reply:
            raise KernelError(f"asking about options failed: {reply['crashed']}")
    if len(got) == len(questions):
        return got, None
    ending = f"status {worker.returncode}: {worker.stderr.strip()[-500:] or 'it gave no reason'}"
    if "Traceback" in worker.stderr:
        raise KernelError(f"asking about options failed: {ending}")
    return got, ending
