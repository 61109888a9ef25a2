"""Answers of compilers on disk, one small JSON file each, with a digest. A cache that cannot be read or written is no
error, nor is a damaged file: the answer is then asked for again.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from vishwamai.core import caches


def _file(folder: str, key: str) -> pathlib.Path | None:
    root = caches.cache_directory("aot")
    return None if root is None else root / folder / f"{key}.json"


def read(folder: str, key: str) -> dict[str, Any] | None:
    """The answer of a key in a folder of the cache `aot`; None where there is none that can be read."""
    path = _file(folder, key)
    if path is None:
        return None
    try:
        return json.loads(caches.opened(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def write(folder: str, key: str, value: Mapping[str, object]) -> bool:
    """Keeps an answer, all of it or nothing; a `CacheWarning` says once why none is kept.

    Returns:
      Whether it could be written.
    """
    path = _file(folder, key)
    if path is None:
        caches.warn_once(f"the compiler's answers are not kept: {caches.no_directory('aot')}.")
        return False
    try:
        caches.write(path, caches.sealed(json.dumps(value)))
    except OSError as error:
        caches.warn_once(f"the compiler's answers are not kept: {error}; {caches.OTHER_DIRECTORY['aot']}.")
        return False
    return True
