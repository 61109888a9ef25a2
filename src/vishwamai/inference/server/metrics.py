"""What the server tells Prometheus: the engine's counters as they are when asked, and the times that clients saw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from vishwamai.inference.engine import Engine

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """A registry of its own, so that several servers of a process do not share it."""

    def __init__(self, engine: Engine | None):
        self._engine = engine
        self._registry = CollectorRegistry()
        self._registry.register(self)  # pyright: ignore[reportArgumentType]  (anything with `collect`)
        options: dict[str, Any] = {"buckets": _SECONDS, "registry": self._registry}
        self.first_token = Histogram("vishwamai_first_token_seconds", "arrival to first token", **options)
        self.between_tokens = Histogram("vishwamai_between_tokens_seconds", "from one delta to the next", **options)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Any]:
        """The engine's state; called at each scrape."""
        if self._engine is None:
            return
        scheduler, statistics = self._engine.scheduler, self._engine.statistics
        pool = scheduler.pool
        gauges = {
            "running": ("answers that compute", len(scheduler.running)),
            "waiting": ("answers that wait", len(scheduler.waiting) + self._engine.pending),
            "pages": ("pages of keys and values", pool.num_pages),
            "pages_held": ("pages that answers hold", pool.num_pages - pool.available),
            "pages_cached": ("pages that only the prefix cache holds", pool.idle),
            "guesses_accepted_share": ("share of the guesses that were right", statistics.accepted_share),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"vishwamai_{name}", text, value)
        counters = {
            "programs_compiled": ("programs compiled, ahead or on demand", self._engine.programs.compiled),
            "steps": ("steps sent off", statistics.steps),
            "prompt_tokens": ("tokens of prompts", statistics.prompt_tokens),
            "cached_tokens": ("tokens of prompts found in the prefix cache", statistics.cached_tokens),
            "computed_tokens": ("tokens that went through the model", statistics.computed_tokens),
            "new_tokens": ("tokens of answers", statistics.new_tokens),
            "guesses": ("tokens guessed", statistics.guesses),
            "guesses_accepted": ("guesses that were right", statistics.guesses_accepted),
            "preemptions": ("preempted requests", statistics.preemptions),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"vishwamai_{name}", text, value)
        finished = CounterMetricFamily("vishwamai_answers", "answers by how they ended", labels=["finish"])
        for reason, count in sorted(statistics.finished.items()):
            finished.add_metric([reason], count)
        yield finished
