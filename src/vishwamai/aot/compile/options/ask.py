"""What the installed JAX and libtpu say of options: asked in a process of its own, and kept on disk by version."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence

from vishwamai.aot.compile import answers, libtpu
from vishwamai.aot.compile.child import Answer, Child, Ended, Question
from vishwamai.core import caches
from vishwamai.core.errors import KernelError

FORMAT = 1
"""Counts up when what the worker answers changes."""

TIMEOUT_S = 600.0


def ask(questions: Sequence[Question]) -> list[Answer]:
    """The answers to the worker's questions, in their order.

    Returns:
        for each what the worker answers; {"refused": words} where the worker's process ended over it.

    Raises:
        DeviceError: a question about the compiler, and libtpu is not installed.
        KernelError: the worker cannot start, or takes too long.
    """
    replies, missing = [], 0
    with Child(TIMEOUT_S, without=("LIBTPU_INIT_ARGS", "XLA_FLAGS")) as child:
        for question in questions:
            key = _key(question)
            reply = answers.read("options", key)
            if reply is None:
                missing += 1
                try:
                    reply = child.ask(question)
                    answers.write("options", key, reply)
                except Ended as end:
                    if end.fault:
                        raise KernelError(f"asking about options failed: {end}") from None
                    reply = {"refused": f"it ends libtpu's process: {end}"}
            replies.append(reply)
    if missing:
        caches.trim("aot")
    return replies


def _key(question: Question) -> str:
    about_jax = "setting" in question
    versions = {"jax": importlib.metadata.version("jax")} if about_jax else libtpu.versions()
    text = json.dumps([FORMAT, versions, question], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
