"""Limits and names of a server."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from vishwamai.inference.processors import Factory
from vishwamai.inference.server.budgets import Key


@dataclasses.dataclass(frozen=True)
class Settings:
    """Limits and names of a server.

    Args:
      name: the model's name for clients.
      aliases: further names of the model.
      keys: API keys, with their budgets or as texts alone; none: no key is asked for.
      max_queue: answers that may wait; beyond it a request is declined (429).
      max_body: bytes of a request's body.
      max_new_tokens: tokens of an answer; None: as many as a sequence has room for.
      defaults: options of sampling where a request has none.
      encoder: the name of the encoder of /v1/embeddings for clients; None: the model's.
      decline_unknown_keys: decline requests with keys that no interface documents, in place of a line in the log.
      allowed_hosts: names of the server in the Host header; none: any (`guards.hosts_of`).
      allowed_origins: pages of other servers that may send requests, such as "https://chat.example".
      body_seconds: time from the headers of a request to the end of its body.
      max_bytes: size of all bodies that arrive at once.
      max_entries: log probabilities that an answer may have.
      adapter_folder: whose folders clients may load as adapters; None: none.
      tool_parser: how calls are read, a name of `forms.FORMS`, or "none"; None: by the chat template.
      reasoning_parser: how reasoning is read, a name of `forms.THINKING`, or "none"; None: by the chat template.
      processors: further processors of logits by name (`processors`).
      traces: flag, each request has a span of OpenTelemetry (`traces`).
      sleep_mode: flag, /sleep, /wake_up and /is_sleeping are served.
      max_priority: the highest priority of a request; a higher one counts as this.
    """

    name: str
    keys: tuple[Key | str, ...] = ()
    max_queue: int = 256
    max_body: int = 4 * 2**20
    max_new_tokens: int | None = None
    defaults: dict[str, float] = dataclasses.field(default_factory=dict)
    encoder: str | None = None
    decline_unknown_keys: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    body_seconds: float = 30.0
    max_bytes: int = 64 * 2**20
    max_entries: int = 2**20
    max_priority: float = 0.0
    aliases: tuple[str, ...] = ()
    adapter_folder: Path | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    traces: bool = False
    sleep_mode: bool = False
    processors: Mapping[str, Factory] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model."""
        return (self.name, *self.aliases)
