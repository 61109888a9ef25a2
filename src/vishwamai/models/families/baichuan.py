"""Baichuan 2: Llama with one product of queries, keys and values, and a head with normalized rows."""

from __future__ import annotations

from collections.abc import Mapping

from vishwamai.core.errors import UnsupportedError
from vishwamai.models.families.family import COMMON, SILU, Family, tokens
from vishwamai.models.parameters import PREFIX, Tensor

_FIRST_VOCAB = 64000


def baichuan_values(values: Mapping[str, object], source: str) -> dict[str, object]:
    """The keys of Baichuan 2 with `alibi`: the files of models with 13 billion parameters, which do not rotate, have
    `model_max_length` in place of `max_position_embeddings`.

    Args:
      values: keys and values of the file.
      source: the file's name, for errors.

    Raises:
      UnsupportedError: the file is of the first Baichuan, whose head is plain.

    >>> baichuan_values({"model_max_length": 4096}, "config.json")["alibi"]
    True
    """
    if values.get("vocab_size") == _FIRST_VOCAB:
        raise UnsupportedError(
            f"{source}: `vocab_size` is {_FIRST_VOCAB}, that of the first Baichuan; the decoder computes Baichuan 2."
        )
    result = dict(values)
    if values.get("max_position_embeddings") is None and values.get("model_max_length") is not None:
        result |= {"alibi": True, "max_position_embeddings": values["model_max_length"]}
    return result


BAICHUAN: Mapping[str, Family] = {
    "baichuan": Family(
        "BaichuanForCausalLM",
        {**{key: field for key, field in COMMON.items() if field != "num_kv_heads"}, **SILU, "alibi": "alibi"},
        fields={"head_norm": True},
        defaults={"alibi": False, "tie_word_embeddings": False, **tokens(1, 2, 0)},
        ignored=("_from_model_config", "z_loss_weight"),
        derive=baichuan_values,
        layer_keys=("alibi",),
        tensors={name: Tensor(PREFIX + "self_attn.W_pack.weight", True, name) for name in ("query", "key", "value")},
    ),
}
