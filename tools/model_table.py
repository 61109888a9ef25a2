"""Writes the tables of docs/models-families.md and docs/models-published.md: families, and what becomes of published
`config.json` files.

    python tools/model_table.py [WORLD]

WORLD is the folder whose `configs/*/config.json` are read; `VISHWAMAI_WORLD`, or `../shared/world` next to the clone.
"""

from __future__ import annotations

import collections
import json
import os
import re
import sys
from pathlib import Path

from vishwamai import ShapeError, UnsupportedError
from vishwamai.models import ModelConfig
from vishwamai.models.families import FAMILIES, Family
from vishwamai.models.layers.attention_and_mamba import AttentionAndMamba
from vishwamai.models.layers.feed_forward import Ungated
from vishwamai.models.layers.gated_delta import GatedDelta
from vishwamai.models.layers.lightning import Lightning
from vishwamai.models.layers.mamba1 import Mamba1
from vishwamai.models.layers.mamba2 import Mamba2
from vishwamai.models.layers.mixture import GatedAndMixture
from vishwamai.models.layers.shared_block import SharedBlockAndMamba
from vishwamai.models.layers.short_conv import ShortConv

ROOT = Path(__file__).parents[1]
WORLD = Path(os.environ.get("VISHWAMAI_WORLD", ROOT.parent / "shared" / "world"))
PAGE = ROOT / "docs" / "models-families.md"
PUBLISHED = ROOT / "docs" / "models-published.md"
FILES = "<!-- published configurations: tools/model_table.py -->", "<!-- end of configurations -->"
FAMILIES_AT = "<!-- families: tools/model_table.py -->", "<!-- end of families -->"


def layers(family: Family) -> list[str]:
    """What a family's layers have beyond those of Llama, by its entry."""
    fields, reads = {*family.keys.values(), *family.fields}, family.reads()
    rotates = not fields & {"learned_positions", "alibi"}
    choices = (meanings.values() for field, meanings in family.choices.values() if field == "norms")
    parallel = {"parallel", "shared"} & {family.fields.get("norms"), *(value for values in choices for value in values)}
    norms = {"post": "norms after blocks", "both": "norms before and after blocks"}
    words = {
        "latent attention": "latent.kv_rank" in fields,
        "tokens chosen by an index": "latent.index_keys" in fields,
        "short convolutions": ShortConv in family.mixers.values(),
        "state spaces": any(issubclass(mixer, (Mamba1, Mamba2)) for mixer in family.mixers.values()),
        "attention and a state space in one layer": AttentionAndMamba in family.mixers.values(),
        "blocks of attention that layers share": SharedBlockAndMamba in family.mixers.values(),
        "lightning attention": Lightning in family.mixers.values(),
        "gated delta nets": any(issubclass(mixer, GatedDelta) for mixer in family.mixers.values()),
        "a gate of attention's output": "output_gate" in fields,
        "a gate of attention's output of its own": "attention_gate" in fields,
        "a gate for each head": "head_gate" in fields,
        "windows": "sliding_window" in reads,
        "attention within blocks": "attention_chunk_size" in reads,
        "a window or none by layer": {"sliding_window", "layer_types"} <= reads,
        "learned positions": "learned_positions" in fields,
        "ALiBi": "alibi" in family.fields,
        "rotation or ALiBi": "alibi" in family.keys,
        "layers without rotation": "no_rope_layers" in reads or (not family.global_rope and rotates),
        "rotation by kind of layer": family.local_theta is not None,
        "sizes of heads by kind of layer": bool(fields & {"full_attention.num_kv_heads", "full_attention.head_dim"}),
        "heads of queries by kind of layer": "sliding_attention.num_heads" in fields,
        "partial rotation": family.partial is not None,
        "neighbouring features rotate": family.fields.get("rope_interleaved", False),
        "queries scaled by position": bool(reads & {"attn_temperature_tuning", "llama_4_scaling_beta"}),
        "values of another width": "value_dim" in fields,
        "norms of queries and keys": "qk_norm" in fields or any(f == "qk_norm" for f, _ in family.choices.values()),
        norms.get(str(family.fields.get("norms")), ""): family.fields.get("norms") in norms,
        "layer norms": "layer_norm" in fields,
        "attention and feed-forward network in parallel": bool(parallel),
        "a norm of embeddings": "embedding_norm" in fields,
        "keys and values shared between layers": "num_kv_shared_layers" in reads,
        "per-layer embeddings": "layer_embedding.size" in fields,
        "several streams (AltUp)": "altup.count" in fields,
        "sparse activations": "activation_sparsity_pattern" in reads,
        "no gate": isinstance(family.feed_forward, Ungated),
        "soft-caps": "final_logit_softcap" in fields,
        "sinks": bool(fields & {"sinks", "sliding_attention.sinks"}),
        "a bias of the head": "head_bias" in fields,
        "a head with normalized rows": "head_norm" in fields,
        "multipliers": bool(fields & {"residual_multiplier", "mlp_multipliers", "mlp_stream_scale"}),
        "experts": "experts.count" in fields,
        "groups of experts": "experts.num_groups" in fields,
        "shared experts": bool(fields & {"experts.shared", "experts.shared_size"}),
        "sigmoid routing": family.fields.get("experts.method") in ("noaux_tc", "sigmoid"),
        "a sparse mixer": family.fields.get("experts.method") == "sparsemixer",
        "experts next to a dense network": isinstance(family.mixture, GatedAndMixture),
        "weights on the experts' input": "experts.weight_inputs" in fields,
    }
    return [word for word, flag in words.items() if flag]


def families() -> str:
    """The table of the families."""
    rows = [
        f"| `{name}` | {', '.join(layers(family)) or 'those of Llama'} |" for name, family in sorted(FAMILIES.items())
    ]
    return "\n".join(["| `model_type` | Layers |", "|---|---|", *rows])


def result(path: Path) -> str:
    """The family that a published file loads as, or the key that is declined."""
    try:
        return f"`{ModelConfig.from_dict(json.loads(path.read_text())).family}`"
    except (ShapeError, UnsupportedError) as error:
        return f"declined: `{re.findall('`([^`]*)`', str(error))[0]}`"


def table(world: Path) -> str:
    """The table of the files in a world folder."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for path in sorted((world / "configs").glob("*/config.json")):
        values = json.loads(path.read_text())
        kind = f"`{values.get('model_type')}`"
        nested = (values.get("text_config") or {}).get("model_type")
        counts[kind if nested is None else f"{kind} with `{nested}`", result(path)] += 1
    rows = [f"| {kind} | {count} | {outcome} |" for (kind, outcome), count in sorted(counts.items())]
    return "\n".join(["| `model_type` | Files | Loads as |", "|---|---|---|", *rows])


def replaced(text: str, places: tuple[str, str], table: str) -> str:
    """The page with a table between two comments."""
    first, rest = text.split(places[0])
    return f"{first}{places[0]}\n\n{table}\n\n{places[1]}{rest.split(places[1])[1]}"


def main(arguments: list[str]) -> None:
    world = Path(arguments[0]) if arguments else WORLD
    if not any((world / "configs").glob("*/config.json")):
        sys.exit(f"{world}: no configs/*/config.json is there; pass the folder of published configurations.")
    PAGE.write_text(replaced(PAGE.read_text(), FAMILIES_AT, families()))
    PUBLISHED.write_text(replaced(PUBLISHED.read_text(), FILES, table(world)))


if __name__ == "__main__":
    main(sys.argv[1:])
