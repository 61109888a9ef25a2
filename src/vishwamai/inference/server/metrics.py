"""What the server tells Prometheus: the engine's counters as they are when asked, and the times that clients saw.

Every value has a name of ours, and vLLM's too where vLLM has such a value (`vllm_names`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from vishwamai.inference.adapters import Adapters
from vishwamai.inference.engine import Engine
from vishwamai.inference.page_tiers import PageTiers
from vishwamai.inference.server.vllm_names import renamed
from vishwamai.inference.streams import Stream

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_LONG_SECONDS = (*_SECONDS, 120, 300, 600)
_TOKENS = tuple(2**i for i in range(21))


class Metrics:
    """The metrics of one server, in a registry of its own, so that several servers of a process do not share it.

    Args:
      engine: engine of the server, or None.
      model: its name, a label of the metrics under vLLM's names.
    """

    def __init__(self, engine: Engine | None, model: str):
        self._engine, self._model = engine, model
        self._times = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vishwamai_{name}", text, buckets=buckets, registry=self._times)

        self.first_token = histogram("first_token_seconds", "arrival to first token", _SECONDS)
        self.between_tokens = histogram("between_tokens_seconds", "from one delta to the next", _SECONDS)
        self.answer = histogram("answer_seconds", "arrival to the end of an answer", _LONG_SECONDS)
        self.decode = histogram("decode_seconds", "first token to the end of an answer", _LONG_SECONDS)
        self.answer_prompt = histogram("answer_prompt_tokens", "tokens of an answer's prompt", _TOKENS)
        self.answer_new = histogram("answer_new_tokens", "tokens of an answer", _TOKENS)
        self._registry = CollectorRegistry()
        self._registry.register(self)  # pyright: ignore[reportArgumentType]  (anything with `collect`)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """All metrics; called at each scrape."""
        if self._engine is not None:
            yield from renamed((*self._times.collect(), *self._state(self._engine)), self._model)

    def _state(self, engine: Engine) -> Iterator[Metric]:
        scheduler, statistics = engine.scheduler, engine.statistics
        pool = scheduler.pool
        gauges = {
            "running": ("answers that compute", len(scheduler.running)),
            "waiting": ("answers that wait", len(scheduler.waiting) + engine.pending),
            "pages": ("pages of keys and values", pool.num_pages),
            "pages_held": ("pages that answers hold", pool.num_pages - pool.available),
            "pages_used_share": ("share of the pages that answers hold", 1 - pool.available / max(pool.num_pages, 1)),
            "pages_cached": ("pages that only the prefix cache holds", pool.idle),
            "prefix_cached_share": ("share of the prompts' tokens that the prefix cache had", statistics.cached_share),
            "guesses_accepted_share": ("share of the guesses that were right", statistics.accepted_share),
        }
        gauges["mixed_tokens"] = ("most tokens of a step that decodes too, at present", scheduler.mixed)
        if (pace := engine.core.pace) is not None:
            gauges["between_tokens_target_seconds"] = ("target time of such a step", pace.target)
            gauges["mixed_step_expected_seconds"] = ("its expected time", pace.seconds(pace.tokens))
        if (states := scheduler.states) is not None:
            gauges |= {
                "states": ("slots of states", states.num_states),
                "states_held": ("slots of states that answers hold", states.num_states - states.available),
                "states_cached": ("slots of states that only the prefix cache holds", states.idle),
            }
        sleep = GaugeMetricFamily("vishwamai_sleep_state", "1 at the present one", labels=["sleep_state"])
        for level, state in enumerate(("awake", "weights_offloaded", "discard_all")):
            sleep.add_metric([state], level == engine.sleeping)
        yield sleep
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"vishwamai_{name}", text, value)
        counters = {
            "programs_compiled": ("programs compiled, ahead or on demand", engine.programs.compiled),
            "steps": ("steps sent off", statistics.steps),
            "prompt_tokens": ("tokens of prompts", statistics.prompt_tokens),
            "cached_tokens": ("tokens of prompts found in the prefix cache", statistics.cached_tokens),
            "computed_tokens": ("tokens that went through the model", statistics.computed_tokens),
            "new_tokens": ("tokens of answers", statistics.new_tokens),
            "guesses": ("tokens guessed", statistics.guesses),
            "guesses_accepted": ("guesses that were right", statistics.guesses_accepted),
            "preemptions": ("preempted requests", statistics.preemptions),
        }
        if states is not None:
            counters |= {
                "states_reused": ("answers that went on from a state of the prefix cache", states.reused),
                "states_evicted": ("states that the prefix cache gave up for others or for pages", states.evicted),
            }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"vishwamai_{name}", text, value)
        if (tiers := engine.core.tiers) is not None:
            yield from _tiers(tiers)
        finished = CounterMetricFamily("vishwamai_answers", "answers by how they ended", labels=["finish"])
        for reason, count in sorted(statistics.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        labels = {"pages": str(pool.num_pages), "page_size": str(engine.limits.page_size)}
        yield InfoMetricFamily("vishwamai_cache", "pages of keys and values", labels)
        if engine.adapters is not None:
            yield _adapters(tuple(scheduler.waiting), engine.adapters)


def _adapters(waiting: Iterable[Stream], adapters: Adapters) -> Metric:
    """Adapters as the model server protocol of the Kubernetes gateway's inference extension has them: those on the
    device are ready, and so "running". The value is the time, by which a gateway takes the latest of several samples.
    """
    roots, waiting_roots = adapters.roots, {stream.root for stream in waiting}
    values = {
        "running_lora_adapters": ",".join(roots),
        "waiting_lora_adapters": ",".join(name for name, root in roots.items() if root in waiting_roots),
        "max_lora": str(adapters.sizes.count),
    }
    family = GaugeMetricFamily("vishwamai_adapters", "the time; adapters that are loaded, or wait", labels=[*values])
    family.add_metric([*values.values()], time.time())
    return family


def _tiers(tiers: PageTiers) -> Iterator[Metric]:
    """What host memory and a disk have for the prefix cache, by the label `tier`."""
    stored = GaugeMetricFamily("vishwamai_tier_bytes", "bytes of prefixes", labels=["tier"])
    counters = {
        "hits": CounterMetricFamily("vishwamai_tier_hits", "pages and states that came back", labels=["tier"]),
        "read": CounterMetricFamily("vishwamai_tier_read_bytes", "bytes that came back", labels=["tier"]),
        "stored": CounterMetricFamily("vishwamai_tier_stored_bytes", "bytes that were stored", labels=["tier"]),
    }
    for tier, size in tiers.bytes.items():
        stored.add_metric([tier], size)
        for field, family in counters.items():
            family.add_metric([tier], getattr(tiers.counts[tier], field))
    yield stored
    yield from counters.values()
    yield CounterMetricFamily("vishwamai_tier_dropped", "pages and states not stored for want of time", tiers.dropped)
