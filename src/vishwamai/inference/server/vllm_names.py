"""The names under which vLLM's dashboards and gateways look for the values of `metrics`.

`docs/serving-operations.md` has this table. The values are ours; a label `model_name` is added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

NAMES: Mapping[str, tuple[str, ...]] = {
    "vishwamai_running": ("vllm:num_requests_running",),
    "vishwamai_waiting": ("vllm:num_requests_waiting",),
    "vishwamai_pages_used_share": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "vishwamai_prompt_tokens": ("vllm:prompt_tokens", "vllm:prefix_cache_queries"),
    "vishwamai_cached_tokens": ("vllm:prefix_cache_hits",),
    "vishwamai_new_tokens": ("vllm:generation_tokens",),
    "vishwamai_preemptions": ("vllm:num_preemptions",),
    "vishwamai_guesses": ("vllm:spec_decode_num_draft_tokens",),
    "vishwamai_guesses_accepted": ("vllm:spec_decode_num_accepted_tokens",),
    "vishwamai_answers": ("vllm:request_success",),
    "vishwamai_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "vishwamai_between_tokens_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "vishwamai_answer_seconds": ("vllm:e2e_request_latency_seconds",),
    "vishwamai_decode_seconds": ("vllm:request_decode_time_seconds",),
    "vishwamai_answer_prompt_tokens": ("vllm:request_prompt_tokens",),
    "vishwamai_answer_new_tokens": ("vllm:request_generation_tokens",),
    "vishwamai_cache": ("vllm:cache_config",),
    "vishwamai_sleep_state": ("vllm:engine_sleep_state",),
    "vishwamai_adapters": ("vllm:lora_requests_info",),
}
"""vLLM's names by ours, without the endings `_total`, `_info`, `_bucket`, `_sum` and `_count` of their samples."""

ABSENT = (
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_max_num_generation_tokens",
)
"""Names of vLLM's dashboards that have no value here."""

_LABELS = {"finish": "finished_reason", "pages": "num_gpu_blocks", "page_size": "block_size"}
_FINISHED = {"cancelled": "abort", "deadline": "abort"}


def renamed(families: Iterable[Metric], model: str) -> Iterator[Metric]:
    """The families, each followed by its copies under vLLM's names.

    Args:
      families: metrics by our names.
      model: value of the label `model_name`.
    """
    for family in families:
        yield family
        for name in NAMES.get(family.name, ()):
            copy = Metric(name, family.documentation, family.type)
            totals: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                labels = {_LABELS.get(key, key): value for key, value in sample.labels.items()}
                if "finished_reason" in labels:
                    labels["finished_reason"] = _FINISHED.get(labels["finished_reason"], labels["finished_reason"])
                labels["model_name"] = model
                place = sample.name.replace(family.name, name, 1), tuple(sorted(labels.items()))
                before = totals.get(place)
                value = sample.value + (0.0 if before is None else before.value)
                totals[place] = sample._replace(name=place[0], labels=labels, value=value)
            copy.samples = list(totals.values())
            yield copy
