"""Serving: pages of keys and values, a scheduler, an engine that answers many requests at once, and its server.

Names are imported when they are used: a command says what it loads before flax is imported.

Decisions about plain values: `limits`, `pages`, `windows`, `scheduler`, `answers`, `speculative`. On the device:
`programs` (a few of fixed shapes, `step_shapes`), `compiled_function`, `kept_programs`, `program_sets`, `sampling`,
`pools`, `drafting`, `sharding`.
One `loop` over the steps of `core`; `engine` puts the parts together. `guided` has grammars, `scoring` the scores of
prompts, `server/` the HTTP interface.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vishwamai.inference.answers import Answer, Delta
    from vishwamai.inference.embedding import Embedder
    from vishwamai.inference.engine import Engine, Request
    from vishwamai.inference.limits import Limits
    from vishwamai.inference.load import Load
    from vishwamai.inference.loading import plan_load
    from vishwamai.inference.page_tiers import CacheTiers
    from vishwamai.inference.sampling import Sampling
    from vishwamai.inference.server.app import make_app
    from vishwamai.inference.server.settings import Settings
    from vishwamai.inference.sharding import serving_rules

_MODULES = {
    "Answer": "answers",
    "CacheTiers": "page_tiers",
    "Delta": "answers",
    "Embedder": "embedding",
    "Engine": "engine",
    "Limits": "limits",
    "Load": "load",
    "Request": "engine",
    "Sampling": "sampling",
    "Settings": "server.settings",
    "make_app": "server.app",
    "plan_load": "loading",
    "serving_rules": "sharding",
}

__all__ = [
    "Answer",
    "CacheTiers",
    "Delta",
    "Embedder",
    "Engine",
    "Limits",
    "Load",
    "Request",
    "Sampling",
    "Settings",
    "make_app",
    "plan_load",
    "serving_rules",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'vishwamai.inference' has no attribute {name!r}")
    return getattr(importlib.import_module(f"vishwamai.inference.{_MODULES[name]}"), name)
