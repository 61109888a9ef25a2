"""Guesses of a model's own head (MTP): its logits are those of a float64 oracle, and answers are those without it.

transformers has no class of the heads. The oracle is what their authors publish: two norms and a product, then a layer
of transformers in float64, which is a model of one layer that reads vectors in place of tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from models_families import TINY
from models_peer import peer_greedy
from test_inference_drafting import continuations, p_value
from test_page_tiers import parts_of
from vishwamai import DeviceError, ShapeError, UnsupportedError
from vishwamai.cli import main
from vishwamai.inference import CacheTiers, Engine, Sampling, memory_release, plan_load
from vishwamai.inference.core import EngineCore
from vishwamai.inference.fit import fit_load
from vishwamai.inference.head_memory import HeadMemory
from vishwamai.inference.prefixes import PAGES
from vishwamai.inference.server.metrics import Metrics
from vishwamai.models import PagedBatch, from_pretrained, page_shapes, read_config
from vishwamai.models.layers.attention import Attention
from vishwamai.models.layers.layer import LayerKind
from vishwamai.models.next_token import NextTokenHead, head_config
from vishwamai.models.pages import pages_of
from vishwamai.models.variables import parameter_variables

ONE_LAYER: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"first_k_dense_replace": 0},
    "deepseek_v32": {"first_k_dense_replace": 0},
    "glm4_moe": {"first_k_dense_replace": 0},
    "glm_moe_dsa": {"indexer_types": ["full"], "mlp_layer_types": ["sparse"], "index_topk_freq": None},
    "glm4_moe_lite": {"mlp_layer_types": ["sparse"]},
    "qwen3_next": {"layer_types": ["full_attention"]},
    "qwen3_5_text": {"layer_types": ["full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["full_attention"]},
}
"""What makes a model of one layer like the head's of each family."""

EXTRA = ("model.layers.{layers}.", "model.layers.{layers}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
QWEN = ("mtp.", "mtp.layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
SIZES: dict[str, Any] = {"max_sequences": 2, "max_tokens": 24, "max_length": 72, "page_size": 4, "num_pages": 24}
TOKENS = np.random.default_rng(3).integers(3, 131, (4, 40)).tolist()
GREEDY = Sampling(max_new_tokens=24, ignore_eos=True)
PROMPTS = [TOKENS[0], TOKENS[0][:22] + TOKENS[1][:9], TOKENS[2][:1], TOKENS[3][:13]]


class Oracle:
    """A checkpoint with a head in a directory, and what the head computes, in float64."""

    def __init__(self, family: str, path: Path):
        self.path, self.qwen = path, family.startswith("qwen")
        peer = TINY[family].save(path)
        one = {**TINY[family].options, "num_hidden_layers": 1, **ONE_LAYER[family]}
        block = dataclasses.replace(TINY[family], options=one).save(path / "block")
        tensors, layer = (load_file(folder / "model.safetensors") for folder in (path, path / "block"))
        names = (
            name.replace("{layers}", str(peer.config.num_hidden_layers)) for name in (QWEN if self.qwen else EXTRA)
        )
        start, inner, token_norm, hidden_norm, join, norm = names
        draws, size = np.random.default_rng(1), 64
        for name, value in layer.items():
            if name.startswith("model.layers.0."):
                tensors[inner + name.removeprefix("model.layers.0.")] = value
        center = 0.0 if self.qwen else 1.0
        self.token_norm, self.hidden_norm = (center + 0.2 * draws.normal(size=size) for _ in range(2))
        self.join = 0.15 * draws.normal(size=(size, 2 * size))
        for name, value in ((token_norm, self.token_norm), (hidden_norm, self.hidden_norm), (join, self.join)):
            tensors[f"{start}{name}.weight"] = value.astype(np.float32)
        tensors[f"{start}{norm}.weight"] = layer["model.norm.weight"]
        if not self.qwen:  # which repeat the model's
            tensors[start + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
            tensors[start + "shared_head.head.weight"] = tensors["lm_head.weight"].copy()
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        self.model, self.block = peer.double(), block.double()

    def logits(self, tokens: Sequence[int], guesses: Sequence[int] = ()) -> np.ndarray:
        """Logits of the token after each pair: the sequence's pairs, then those of guesses, each with the head's own
        hidden state of the pair before it.
        """
        outputs: list[torch.Tensor] = []
        norm = self.block.model.norm
        watch = norm.register_forward_hook(lambda _, inputs, out: outputs.append(out if self.qwen else inputs[0]))
        with torch.no_grad():
            hidden = self.model.model(torch.as_tensor([tokens]), use_cache=False).last_hidden_state[0, :-1]
            x = self._joined(tokens[1:], hidden)
            for place in range(len(guesses) + 1):
                out = self.block.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
                if place < len(guesses):
                    x = torch.cat([x, self._joined(guesses[place : place + 1], outputs[-1][0, -1:])])
            result = self.model.lm_head(out)
        watch.remove()
        return result.numpy()

    def _joined(self, tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        offset = 1.0 if self.qwen else 0.0
        eps = self.model.config.rms_norm_eps

        def norm(x: torch.Tensor, scale: np.ndarray) -> torch.Tensor:
            scaled = torch.as_tensor(scale.astype(np.float32)).double() + offset
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * scaled

        rows = self.model.model.embed_tokens(torch.as_tensor(list(tokens)))
        pair = torch.cat([norm(rows, self.token_norm), norm(hidden, self.hidden_norm)], dim=-1)
        return pair @ torch.as_tensor(self.join.astype(np.float32)).double().T


def read(path: Path) -> tuple[Any, NextTokenHead]:
    model = from_pretrained(path, dtype=jnp.float32)
    head = from_pretrained(path, dtype=jnp.float32, config=head_config(model.config))
    assert isinstance(head, NextTokenHead)
    head.share(model)
    return model, head


@pytest.fixture(scope="module", params=["qwen3_5_text", pytest.param("deepseek_v3", marks=pytest.mark.long)])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(request.param, tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def engine(oracle: Oracle) -> Engine:
    return plan_load(oracle.path, dtype="float32", draft_head=True, drafts=2, **SIZES).engine(compile="lazy")


@pytest.mark.turns(7)
@pytest.mark.parametrize("family", ONE_LAYER)
def test_logits_over_pages_are_those_of_the_oracle(family: str, tmp_path: Path) -> None:
    oracle = Oracle(family, tmp_path)
    model, head = read(tmp_path)
    tokens = TOKENS[0][:30]
    hidden = model(jnp.asarray([tokens]))[0]
    sizes: dict[str, Any] = {"num_pages": 9, "page_size": 4, "dtype": jnp.float32}
    pools = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), page_shapes(head.config, **sizes))
    table, logits = jnp.arange(9, dtype=jnp.int32)[::-1][None], []
    for start, end in ((0, 7), (7, 8), (8, 29)):
        ends = jnp.asarray([0, end - start], jnp.int32)
        batch = PagedBatch(jnp.asarray([end], jnp.int32), table, ends, end - start)
        later = jnp.asarray(tokens[start + 1 : end + 1], jnp.int32)
        out, pools = head.predict(later, hidden[start:end], pools, batch)
        logits.append(np.asarray(head.logits(out)))
    expected = oracle.logits(tokens)
    np.testing.assert_allclose(np.concatenate(logits), expected, atol=1e-4 * np.abs(expected).max(), rtol=0)


def test_every_guess_is_the_oracles_and_changes_no_token(
    oracle: Oracle, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, a prompt of one token, a prefix in the cache, and so few pages that some give theirs up."""
    guessed: list[tuple[list[int], list[int]]] = []
    hand_out = EngineCore._hand_out

    def recorded(core: EngineCore, branch: Any, guesses: Sequence[int], *rest: Any) -> None:
        guessed.append((list(branch.stream.tokens), list(guesses)))
        hand_out(core, branch, guesses, *rest)

    monkeypatch.setattr(EngineCore, "_hand_out", recorded)
    served: list[Any] = []
    for prompts in (PROMPTS, PROMPTS[3:], PROMPTS[3:]):
        expected = [peer_greedy(oracle.model, prompt, 24) for prompt in prompts]
        before, served = len(guessed), engine.generate(prompts, GREEDY)
        assert [list(answer.token_ids) for answer in served] == expected
    assert engine.statistics.preemptions and served[0].cached
    count = 0
    for tokens, guesses in (*guessed[::6], *guessed[before : before + 4]):  # of all, and the first after the prefix
        for place in range(len(guesses)):
            logits = oracle.logits(tokens, guesses[:place])[-1]
            assert logits.max() - logits[guesses[place]] < 1e-3 * np.abs(logits).max(), (tokens, guesses)
            count += 1
    assert count > 20
    statistics = engine.statistics
    assert statistics.guesses_accepted < statistics.guesses
    metrics = {metric.name: metric.samples[0].value for metric in Metrics(engine, "tiny").collect() if metric.samples}
    assert metrics["vishwamai_guesses"] == statistics.guesses
    assert engine.scheduler.pool.available == SIZES["num_pages"]


def test_the_plan_counts_what_the_head_has(oracle: Oracle, engine: Engine) -> None:
    alone = plan_load(oracle.path, dtype="float32", drafts=2, **SIZES)
    load = plan_load(oracle.path, dtype="float32", drafts=2, draft_head=True, **SIZES)
    weights = [variable.get_value() for *_, variable in parameter_variables(read(oracle.path)[1])]
    assert load.draft is not None
    assert load.draft.weights == sum(x.nbytes for x in jax.tree.leaves(weights))
    assert load.draft.pages == sum(x.nbytes for x in jax.tree.leaves(engine.programs.draft_pages))
    assert load.total - alone.total == load.draft.weights + load.draft.pages + load.step - alone.step
    assert f"head of {load.config.family}, 1 layers" in str(load)
    with pytest.raises(DeviceError, match="does not fit"):
        plan_load(oracle.path, dtype="float32", drafts=2, draft_head=True, memory=alone.weights + alone.step, **SIZES)
    fitted = fit_load(oracle.path, dtype="float32", drafts=2, draft_head=True, memory=2**24, max_length=96)
    assert fitted.draft is not None and fitted.draft.pages


def test_models_without_a_head_are_declined_before_loading(tmp_path: Path) -> None:
    for family in ("llama", "glm4_moe", "qwen3_next"):
        TINY[family].save(tmp_path / family)
    with pytest.raises(UnsupportedError, match="llama: no head that predicts a further token"):
        plan_load(tmp_path / "llama", drafts=2, draft_head=True)
    for family, name in (("glm4_moe", r"model\.layers\.3\.eh_proj\.weight"), ("qwen3_next", r"mtp\.fc\.weight")):
        with pytest.raises(ShapeError, match=f"{family}: the checkpoint has no tensor `{name}` of a head"):
            plan_load(tmp_path / family, drafts=2, draft_head=True)
    with pytest.raises(ShapeError, match="both guess the next tokens"):
        plan_load(tmp_path / "glm4_moe", drafts=2, draft_head=True, draft_model=tmp_path / "llama")
    with pytest.raises(ShapeError, match="number of them in a step is 0"):
        plan_load(tmp_path / "glm4_moe", draft_head=True)
    windowed = dataclasses.replace(read_config(tmp_path / "glm4_moe"), layers=(LayerKind(Attention(window=4)),) * 3)
    with pytest.raises(UnsupportedError, match="attends to all tokens, but no layer of this model does"):
        head_config(windowed)


@pytest.mark.long
def test_the_command(
    oracle: Oracle, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = ["generate", str(oracle.path), "--token-ids", "3,4,5", "--dtype", "float32", "--max-length", "48"]
    command += ["--step-tokens", "16", "--max-new-tokens", "12", "--temperature", "0", "--json", "--draft-head"]
    assert main([*command, "--draft-tokens", "1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = peer_greedy(oracle.model, [3, 4, 5], 12)
    assert result["token_ids"] == expected[: len(result["token_ids"])]
    assert "accepted_share" in result


def test_the_command_takes_one_kind_of_guesses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, text in (
        (["--draft-head", "--guesses", "2"], "--guesses and --draft-head both guess the next tokens; pass one of them"),
        (["--draft-tokens", "2"], "pass --draft-model DIR or --draft-head too"),
    ):
        assert main(["generate", str(tmp_path), "--token-ids", "3", *wrong]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.long
def test_answers_without_a_seed_have_the_models_distribution(
    oracle: Oracle, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.urandom", np.random.default_rng(0).bytes)
    options = Sampling(max_new_tokens=3, temperature=1.0, top_k=3, ignore_eos=True, n=128)
    before = engine.statistics.guesses
    drawn = [answer.token_ids for answer in engine.generate([[9, 4]] * 16, options)]
    assert engine.statistics.guesses > before
    expected: dict[Any, float] = dict(continuations(read(oracle.path)[0], options, (), 1.0))
    outcomes = sorted(expected)
    chances = np.array([expected[tokens] for tokens in outcomes])
    numbers = {tokens: number for number, tokens in enumerate(outcomes)}
    assert p_value(np.array([numbers[tokens] for tokens in drawn]), chances) > 1e-3


@pytest.mark.long
def test_seeded_answers_are_those_without_a_head(oracle: Oracle, engine: Engine) -> None:
    plain = plan_load(oracle.path, dtype="float32", **SIZES).engine(compile="lazy")
    options = Sampling(max_new_tokens=20, temperature=0.9, top_p=0.9, seed=4, n=2)
    answers, expected = (served.generate(PROMPTS, options) for served in (engine, plain))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


@pytest.mark.long
def test_a_mesh_splits_the_head_too(oracle: Oracle) -> None:
    options = {**SIZES, "dtype": "float32", "draft_head": True, "drafts": 2, "mesh": "tensor=2"}
    engine = plan_load(oracle.path, **options).engine(compile="lazy")
    answers = engine.generate(PROMPTS[1:], GREEDY)
    assert [list(answer.token_ids) for answer in answers] == [peer_greedy(oracle.model, p, 24) for p in PROMPTS[1:]]
    assert engine.statistics.guesses


@pytest.mark.long
def test_a_head_next_to_8_bits_has_floats(oracle: Oracle) -> None:
    """Weights in int8, keys and values too; the head's own keys and values have no measured scale."""
    sizes = {**SIZES, "dtype": "float32", "quantize": "int8", "kv_dtype": "int8"}
    load = plan_load(oracle.path, draft_head=True, drafts=2, **sizes)
    plain = plan_load(oracle.path, dtype="float32", draft_head=True, drafts=2, **SIZES)
    assert load.draft is not None and plain.draft is not None and load.draft.pages == plain.draft.pages
    engine = load.engine(compile="lazy")
    assert isinstance(engine.programs.draft_pages, HeadMemory)
    assert engine.programs.draft_pages.pools[0].dtype == jnp.float32
    assert [len(answer.token_ids) for answer in engine.generate(PROMPTS, GREEDY)] == [24] * 4
    assert engine.statistics.guesses


@pytest.mark.long
def test_pages_of_a_head_are_stored_with_those_of_the_model(oracle: Oracle, tmp_path: Path) -> None:
    load = plan_load(oracle.path, dtype="float32", draft_head=True, drafts=2, **SIZES)
    answers, parts = [], []
    for _ in range(2):
        engine = load.engine(compile="lazy", tiers=CacheTiers(tmp_path))
        (answer,) = engine.generate(PROMPTS[:1], GREEDY)
        answers.append((answer.token_ids, answer.cached))
        parts.append(parts_of(engine))
        engine.stop()
    assert answers[0][0] == answers[1][0] and (answers[0][1], answers[1][1]) == (0, 36)
    common = parts[0].keys() & parts[1].keys()
    draft = engine.programs.draft_pages
    assert isinstance(draft, HeadMemory)
    of_head = sum(x[0].nbytes for x in jax.tree.leaves((draft.pools, draft.ends)))
    of_model = sum(x[0].nbytes for pool in engine.programs.pages if (x := pages_of(pool)) is not None)
    assert {len(parts[1][part]) for part in common if part.group == PAGES} == {of_model + of_head}
    # The step after the prefix completes the last pair of the head once more.
    assert len(common) >= 9 and sum(parts[0][part] != parts[1][part] for part in common) <= 1


@pytest.mark.long
@pytest.mark.parametrize("level", [1, 2])
def test_a_head_and_states_sleep_with_the_model(oracle: Oracle, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_release, "_shares_host_memory", lambda: False)
    engine = plan_load(oracle.path, dtype="float32", draft_head=True, drafts=2, **SIZES).engine(compile="lazy")
    expected = [answer.token_ids for answer in engine.generate(PROMPTS, GREEDY)]
    accepted = engine.statistics.guesses_accepted
    engine.sleep(level)
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves((engine.model, engine.programs.draft)))
    engine.wake()
    assert [answer.token_ids for answer in engine.generate(PROMPTS, GREEDY)] == expected
    assert engine.statistics.guesses_accepted == 2 * accepted
