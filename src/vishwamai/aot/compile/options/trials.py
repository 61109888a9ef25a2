"""Tries options of JAX and of the TPU compiler, in the compiler's process.

A wrong value can end libtpu's process, and JAX's options are global; so both are tried there alone.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp

from vishwamai.aot.compile import libtpu

TARGET = "v5e"
"""The chip that options are tried for."""

UNREADABLE = "?"
"""A value that no type has: the compiler's refusal of it tells whether the option exists, and its type."""


@functools.cache
def _tiny() -> Any:
    placement = jax.sharding.SingleDeviceSharding(libtpu.describe_device(TARGET))
    return jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=placement))


def _refusal(options: dict[str, str]) -> str | None:
    """Why the compiler refuses to compile a small program with options; None where it does not."""
    try:
        _tiny().compile(compiler_options=options)
    except Exception as error:
        return str(error).strip() or type(error).__name__
    return None


def _is_read(text: str | None) -> bool:
    """Whether the value was understood, whatever came of it."""
    return text is None or not re.search(r"Failed to parse|is not a valid", text)


def _option(name: str, value: str) -> dict[str, object]:
    """What the compiler says of an option: "unknown", or "kind", "choices", whose it is ("xla" or "libtpu"), and what
    it says of the value.
    """
    message = _refusal({name: UNREADABLE})
    if message is not None and "No such compile option" in message:
        return {"unknown": True}
    answer: dict[str, object] = {
        "owner": "xla" if message and "While setting option" in message else "libtpu",
        "choices": [],
    }
    choices = re.search(r"(?:Valid options|Supported values) are: (.*?)\.?$", message or "", re.M)
    if message is None or _is_read(message):
        return answer | {"kind": "anything"}
    if choices:
        words = choices[1].split(", ")
        answer |= {"kind": "auto"} if "auto" in words else {"kind": "choice", "choices": words}
    elif _is_read(_refusal({name: "true"})):
        answer |= {"kind": "bool"}
    elif _is_read(_refusal({name: "1.5"})):
        answer |= {"kind": "float"}
    else:
        answer |= {"kind": "int" if _is_read(_refusal({name: "1"})) else "text"}
    return answer | {"refused": _refusal({name: value})}


def _setting(name: str, value: object) -> dict[str, object]:
    """Why JAX refuses the value of a config option, or None; the value is put back."""
    before = jax.config.values[name]
    if isinstance(before, bool) and not isinstance(value, bool):
        return {"refused": "it takes True or False"}
    try:
        jax.config.update(name, value)
        jax.config.update(name, before)
    except Exception as error:
        return {"refused": str(error).strip() or type(error).__name__}
    return {"refused": None}


def answer(request: dict[str, Any]) -> dict[str, object]:
    """The answer to a request: {"option": name, "value": text} of the compiler, {"setting": name, "value": value} of
    JAX, or {"together": {name: text}}.
    """
    if "option" in request:
        return _option(request["option"], request["value"])
    if "setting" in request:
        return _setting(request["setting"], request["value"])
    return {"refused": _refusal(request["together"])}
