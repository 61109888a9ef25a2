"""A kind of layer that is not the library's: one class here and one line of a family; everything else takes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models_peer
from vishwamai import UnsupportedError
from vishwamai.models import Decoder, ModelConfig, from_pretrained, read_config, save_pretrained
from vishwamai.models.attend import attend_pages, attend_sequences
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.blocks import linear
from vishwamai.models.families import FAMILIES
from vishwamai.models.layers.feed_forward import FeedForward
from vishwamai.models.layers.mixer import Arrays, Mixer, Rows, Step
from vishwamai.models.parameters import PREFIX, Parameter, Tensor, matrix, split_units
from vishwamai.training.flops import flops_per_token


@dataclasses.dataclass(frozen=True)
class Mean(Mixer):
    """The mean of a few features of all tokens so far."""

    width: int = 4

    tensors: ClassVar[Mapping[str, Tensor]] = {
        name: Tensor(f"{PREFIX}mean.{name}.weight", True) for name in ("mean_in", "mean_out")
    }

    @property
    def layer_type(self) -> str:
        return "mean"

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        hidden = config.hidden_size
        return {
            "mean_in": matrix(hidden, self.width, ("embed", None)),
            "mean_out": matrix(self.width, hidden, (None, "embed")),
        }

    def __call__(self, config: ModelConfig, arrays: Arrays, x: Any, rows: Rows) -> Any:
        value = linear(x, arrays["mean_in"])[..., None, :]
        zero = jnp.zeros_like(value)  # equal logits: attention is a mean
        mixed = attend_sequences(config, None, zero, zero, value, None, rows.segment_ids, rows.axes)
        return linear(mixed[..., 0, :], arrays["mean_out"])

    def step(self, config: ModelConfig, arrays: Arrays, x: Any, step: Step, pool: Any, first: Any) -> tuple[Any, Any]:
        value = linear(x, arrays["mean_in"])[..., None, :]
        zero = jnp.zeros_like(value)
        mixed, pool = attend_pages(config, None, zero, zero, value, None, step.batch, pool, first)
        return linear(mixed[..., 0, :], arrays["mean_out"]), pool

    def page_row(self, config: ModelConfig) -> tuple[int, ...]:
        return 2, self.width

    def units(self, config: ModelConfig) -> dict[str, tuple[str, int]]:
        return {}

    def mixing_flops(self, config: ModelConfig, length: int) -> float:
        return 4.0 * self.width * length

    def ring_features(self, config: ModelConfig) -> int:
        return 2 * self.width


@dataclasses.dataclass(frozen=True)
class Square(FeedForward):
    """`down(up(x)^2)`."""

    tensors: ClassVar[Mapping[str, Tensor]] = {
        name: Tensor(f"{PREFIX}square.{name}.weight", True) for name in ("up", "down")
    }

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        hidden, inner = config.hidden_size, config.intermediate_size
        return {"up": matrix(hidden, inner, ("embed", "mlp")), "down": matrix(inner, hidden, ("mlp", "embed"))}

    def __call__(
        self, config: ModelConfig, arrays: Arrays, x: Any, axes: MeshAxes = ONE_DEVICE, token_mask: Any = None
    ) -> tuple[Any, None]:
        return linear(jnp.square(linear(x, arrays["up"])), arrays["down"]), None


VALUES: dict[str, Any] = {
    "model_type": "toy",
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "layer_types": ["mean", "full_attention", "mean"],
    "mean_width": 6,
}


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelConfig]:
    llama = FAMILIES["llama"]
    toy = dataclasses.replace(
        llama,
        keys={**llama.keys, "mean_width": "mean.width"},
        layer_types="list",
        mixers={**llama.mixers, "mean": Mean},
        feed_forward=Square(),
    )
    monkeypatch.setitem(FAMILIES, "toy", toy)  # pyright: ignore[reportArgumentType]
    yield ModelConfig.from_dict(VALUES)


@pytest.mark.turns(2)
def test_a_layer_of_ones_own_trains_and_serves(config: ModelConfig, tmp_path: Path) -> None:
    model = Decoder(config, rngs=nnx.Rngs(0), stacked=True)
    tokens = np.random.default_rng(0).integers(3, 96, (1, 20))
    logits = model.logits(model(jnp.asarray(tokens)))
    answer = models_peer.greedy(model, [tokens[0, :9].tolist(), tokens[0].tolist()], 2)
    assert answer[1][0] == int(jnp.argmax(logits[0, -1]))  # over pages as over whole rows
    save_pretrained(model, tmp_path)
    assert read_config(tmp_path) == config
    loaded = from_pretrained(tmp_path, dtype=jnp.float32)
    np.testing.assert_allclose(loaded.logits(loaded(jnp.asarray(tokens))), logits, atol=1e-5)
    gradient = nnx.grad(lambda m: jnp.sum(jnp.square(m.logits(m(jnp.asarray(tokens))))))(loaded)
    assert all(float(jnp.abs(gradient.layers[0][name].get_value()).max()) > 0 for name in ("mean_in", "up"))


def test_figures_of_a_layer_of_ones_own(config: ModelConfig) -> None:
    assert set(split_units(config)) == {"heads", "kv_heads", "mlp", "vocab"}
    mean, square, attention = 2 * 24 * 6, 2 * 24 * 40, 4 * 24 * 24
    products = 96 * 24 + 2 * mean + attention + 3 * square
    assert flops_per_token(config, 10) == 6 * products + 12 * 10 * (2 * 6 + 24)


def test_a_layer_type_of_no_mixer_is_declined(config: ModelConfig) -> None:
    with pytest.raises(UnsupportedError, match=r"`layer_types` has 'median'; the decoder has .*mean"):
        ModelConfig.from_dict({**VALUES, "layer_types": ["median"] * 3})
