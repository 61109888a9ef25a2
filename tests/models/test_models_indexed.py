"""Layers that choose tokens by an index: their types in files, and what is declined."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

import world
from models_families import TINY
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models import ModelConfig, PagedBatch, read_config
from vishwamai.models.attend_index import attend_chosen_pages
from vishwamai.models.layers.indexed import FullIndexAttention, SharedIndexAttention
from vishwamai.models.layers.mixer import Rows
from vishwamai.models.pages import QuantizedPages


def types(config: ModelConfig) -> list[str]:
    return [kind.mixer.layer_type for kind in config.layers]


def test_types_of_indexers_are_those_of_transformers() -> None:
    """By period and start, by letters, by a list, and left out."""
    import transformers

    values = TINY["glm_moe_dsa"].config().to_dict()
    del values["indexer_types"], values["mlp_layer_types"]
    values["num_hidden_layers"] = 9
    values["layer_types"] = ["indexed_attention"] * 9
    forms: list[dict[str, Any]] = [{}, {"index_topk_freq": 3}, {"index_topk_freq": 4, "index_skip_topk_offset": 3}]
    forms += [{"index_topk_freq": 0}, {"index_topk_pattern": "FFSSFSSSF"}, {"index_topk_pattern": ["full"] * 9}]
    forms += [{"indexer_types": ["full", *["shared"] * 8]}]
    for form in forms:
        expected = transformers.GlmMoeDsaConfig(**{**values, **form}).indexer_types
        assert types(ModelConfig.from_dict({**values, "model_type": "glm_moe_dsa", **form})) == expected, form


def test_wrong_values_are_named() -> None:
    values = TINY["glm_moe_dsa"].config().to_dict()
    for key, value, text in (
        ("q_lora_rank", None, "`q_lora_rank` is null"),
        ("index_head_dim", 4, "`index_head_dim` is 4"),
        ("indexer_types", ["full", "other"] * 2, "`indexer_types` has 'other'"),
        ("indexer_types", ["full"], "`indexer_types` has 1 entries"),
        ("indexer_rope_interleave", False, "`indexer_rope_interleave`"),
    ):
        with pytest.raises((ShapeError, UnsupportedError), match=text):
            ModelConfig.from_dict({**values, key: value})


def test_a_shared_layer_needs_the_one_before_it() -> None:
    """A row of more tokens than the index has, in a part of a pipeline that begins there; and 8-bit pages."""
    config = ModelConfig.from_dict(TINY["glm_moe_dsa"].config().to_dict())
    mixer: Any = next(kind.mixer for kind in config.layers if isinstance(kind.mixer, SharedIndexAttention))
    shapes = {name: p.shape for name, p in mixer.parameters(config).items()}
    arrays = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    shared = SharedIndexAttention(rope=mixer.rope)
    with pytest.raises(UnsupportedError, match="mesh.pipeline=1"):
        shared(config, arrays, jnp.zeros((1, 12, config.hidden_size)), Rows())
    pages = QuantizedPages(jnp.zeros((2, 4, 128), jnp.int8), jnp.ones((1, 1)), jnp.ones((1, 1)))
    batch = PagedBatch(jnp.ones(1, jnp.int32), jnp.zeros((1, 2), jnp.int32), jnp.arange(2, dtype=jnp.int32))
    rows = jnp.zeros((1, 1, 1, 60))
    with pytest.raises(UnsupportedError, match="8-bit"):
        attend_chosen_pages(config, rows, rows, lambda pool: pool, batch, pages, 0, 32)


def test_pages_hold_the_key_of_the_indexer_where_a_layer_has_one() -> None:
    config = ModelConfig.from_dict(TINY["glm_moe_dsa"].config().to_dict())
    wide = ModelConfig.from_dict({**TINY["glm_moe_dsa"].config().to_dict(), "index_head_dim": 100})
    assert [kind.mixer.page_row(wide) for kind in wide.layers] == [(256,), (256,), (128,), (256,)]
    assert [kind.mixer.page_row(config) for kind in config.layers] == [(128,)] * 4


def test_published_configurations_share_indexes() -> None:
    config = read_config(world.folder("configs/zai-org--GLM-5.2"))
    assert types(config)[:8] == ["full", "full", "full", "shared", "shared", "shared", "full", "shared"]
    assert isinstance(config.layers[0].mixer, FullIndexAttention)
    assert types(read_config(world.folder("configs/zai-org--GLM-5"))) == ["full"] * 78
    assert len(read_config(world.folder("configs/deepseek-ai--DeepSeek-V3.2")).layers) == 61
