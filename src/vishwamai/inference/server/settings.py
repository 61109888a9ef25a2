"""Limits and names of a server."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Settings:
    """Limits and names of a server.

    Args:
      name: what clients call the model.
      keys: API keys; none: no key is asked for.
      max_queue: answers that may wait; beyond it a request is declined (429).
      max_body: bytes of a request's body.
      max_new_tokens: of an answer; None: as many as a sequence has room for.
      defaults: options of sampling where a request has none.
      encoder: what clients call the encoder of /v1/embeddings; None: as the model.
      decline_unknown_keys: decline requests with keys that no interface documents, in place of a line in the log.
    """

    name: str
    keys: tuple[str, ...] = ()
    max_queue: int = 256
    max_body: int = 4 * 2**20
    max_new_tokens: int | None = None
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    encoder: str | None = None
    decline_unknown_keys: bool = False
