"""Pages that give way go to host memory and to files, and come back with the same bytes, in later starts too."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import world
from models_families import TINY
from models_peer import Peer
from vishwamai import ShapeError
from vishwamai.cli import command_parser, model_options
from vishwamai.cli.function import CommandError
from vishwamai.inference import CacheTiers, Engine, Limits, Sampling, page_tiers, plan_load
from vishwamai.inference.answers import Delta
from vishwamai.inference.page_tiers import PageTiers
from vishwamai.inference.prefixes import PAGES, STATES, Part
from vishwamai.inference.requests import Request
from vishwamai.inference.sharding import serving_mesh
from vishwamai.models import Decoder, from_pretrained

LIMITS = Limits(max_sequences=2, max_tokens=24, max_length=96, page_size=4)
PROMPTS = np.random.default_rng(5).integers(3, 131, (4, 60)).tolist()
GREEDY = Sampling(max_new_tokens=6, ignore_eos=True)
CACHED = 56
"""Tokens of a prompt that its full pages hold, without its last token's."""


@dataclasses.dataclass
class Start:
    """Engines of one model, of which the first alone compiles its programs."""

    model: Decoder
    options: dict[str, Any]
    programs: dict[str, Any] = dataclasses.field(default_factory=dict)
    path: Path = Path()

    def engine(self, tiers: CacheTiers | None, **options: Any) -> Engine:
        options = {"num_pages": 24, "compile": "lazy", **self.options, **options}
        return Engine(self.model, limits=LIMITS, tiers=tiers, store=self.compiled, **options)

    def compiled(self, name: str, function: Any, arguments: Any, on_read: Callable[[], None], mesh: Any = None) -> Any:
        if name not in self.programs:
            self.programs[name] = function.lower(*arguments).compile()
        return self.programs[name]


def model_of(family: str, path: Path, **options: Any) -> Decoder:
    TINY[family].save(path)
    return from_pretrained(path, dtype=jnp.float32, **options)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    path = tmp_path_factory.mktemp("llama")
    Peer("Llama").save(path)
    return Start(from_pretrained(path, dtype=jnp.float32), {}, path=path)


def tiers_of(engine: Engine) -> PageTiers:
    assert engine.core.tiers is not None
    return engine.core.tiers


def answered(engine: Engine) -> list[tuple[int, ...]]:
    return [engine.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]


def parts_of(engine: Engine) -> dict[Part, bytes]:
    """The bytes of all prefixes on the device."""
    copies, prefixes = tiers_of(engine)._copies, engine.scheduler.prefixes
    assert prefixes is not None
    return {
        Part(group, digest): copies.data(copies.take(group, [page]), 0).tobytes()
        for group, pool in prefixes.pools.items()
        for page, digest in pool.idle_pages()
    }


def check_restart(start: Start, tiers: CacheTiers, *groups: str) -> None:
    """What a first engine computed comes back in a second one, bit by bit, and is not computed again."""
    first, computed = start.engine(tiers), {}
    answers = []
    for prompt in PROMPTS:
        answers.append(first.generate([prompt], GREEDY)[0].token_ids)
        computed |= parts_of(first)
    first.stop()
    assert {part.group for part in computed} == {PAGES, *groups}
    second = start.engine(tiers)
    for prompt, tokens in zip(PROMPTS, answers):
        before, hits = second.statistics.computed_tokens, tiers_of(second).counts["disk"].hits
        (answer,) = second.generate([prompt], GREEDY)
        assert (answer.token_ids, answer.cached) == (tokens, CACHED)
        assert second.statistics.computed_tokens - before == len(prompt) - CACHED + 6 - 1
        assert tiers_of(second).counts["disk"].hits > hits
        parts = parts_of(second)
        assert len(parts.keys() & computed.keys()) >= CACHED // LIMITS.page_size
        assert all(parts[part] == computed[part] for part in parts.keys() & computed.keys())
    second.stop()


def test_a_later_start_computes_the_new_tokens_alone(start: Start, tmp_path: Path) -> None:
    check_restart(start, CacheTiers(tmp_path))


CASES: dict[str, tuple[Any, ...]] = {
    "windows": ("gemma3_text", {}, {}, "window-8"),
    "states": ("qwen3_5_text", {}, {"num_states": 5}, STATES),
    "states alone": ("mamba2", {}, {"num_states": 5}, STATES),
    "states next to pages": ("falcon_h1", {}, {"num_states": 5}, STATES),
    "stacked layers": ("qwen3", {"stacked": True}, {}),
    "int8": ("qwen3", {}, {"kv_dtype": "int8"}),
    "fp8": ("qwen3", {}, {"kv_dtype": "fp8"}),
    "bfloat16": ("qwen3", {}, {"kv_dtype": "bfloat16"}),
    "latent rows": ("deepseek_v3", {}, {}),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_pool_comes_back(case: str, tmp_path: Path) -> None:
    family, loading, options, *groups = CASES[case]
    (tmp_path / "model").mkdir()
    start = Start(model_of(family, tmp_path / "model", **loading), options)
    check_restart(start, CacheTiers(tmp_path / "cache"), *groups)


ON_MESHES: dict[str, tuple[Any, ...]] = {
    "heads": ("qwen3", "tensor=2", {}),
    "stacked layers in 8 bits": ("qwen3", "tensor=2", {"kv_dtype": "int8", "stacked": True}),
    "windows": ("gemma3_text", "tensor=2", {}, "window-8"),
    "latent rows": ("deepseek_v3", "expert=2,tensor=2", {}),
    "states next to pages": ("falcon_h1", "tensor=2", {"num_states": 5}, STATES),
}


@pytest.mark.parametrize(
    "case", [case if case == "heads" else pytest.param(case, marks=pytest.mark.long) for case in ON_MESHES]
)
def test_pages_of_a_mesh_come_back(case: str, tmp_path: Path) -> None:
    family, axes, options, *groups = ON_MESHES[case]
    (tmp_path / "model").mkdir()
    model = model_of(family, tmp_path / "model", stacked=options.pop("stacked", False))
    start, tiers = Start(model, {**options, "mesh": serving_mesh(axes)}), CacheTiers(tmp_path / "cache")
    check_restart(start, tiers, *groups)


def test_a_page_of_a_mesh_has_the_heads_of_all_its_devices(start: Start, tmp_path: Path) -> None:
    """The bytes of a page are those of one device; only roundings of sums differ, so the folders are two."""
    model = from_pretrained(start.path, dtype=jnp.float32)
    on_mesh = Start(model, {"mesh": serving_mesh("tensor=2")})
    engines = [starts.engine(CacheTiers(tmp_path)) for starts in (start, on_mesh)]
    pages = []
    for engine in engines:
        engine.generate(PROMPTS[:1], GREEDY)
        pages.append({part: np.frombuffer(data, np.float32) for part, data in parts_of(engine).items()})
        engine.stop()
    single, split = pages
    assert single.keys() == split.keys()
    for part, values in single.items():
        np.testing.assert_allclose(split[part], values, rtol=0, atol=1e-5 * np.abs(values).max())
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.long
def test_the_pages_of_a_draft_model_come_back(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    Peer("Llama").save(tmp_path / "model")
    model, draft = (from_pretrained(tmp_path / "model", dtype=jnp.float32) for _ in range(2))
    start = Start(model, {"draft": draft, "drafts": 2})
    first = start.engine(CacheTiers(tmp_path / "cache"))
    answers = answered(first)
    first.stop()
    second = start.engine(CacheTiers(tmp_path / "cache"))
    assert answered(second) == answers and tiers_of(second).counts["disk"].hits == 14 * len(PROMPTS)
    # A draft that is the model guesses right, which it could not from other keys and values.
    assert second.statistics.accepted_share == first.statistics.accepted_share


@pytest.mark.long
def test_the_real_model_goes_on_after_a_conversation_of_an_earlier_start(tmp_path: Path) -> None:
    load = plan_load(world.smollm2(), max_sequences=2, max_length=256, max_tokens=64)
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nName three colours.<|im_end|>\n"
    )
    text += "<|im_start|>assistant\n"
    options, answers = Sampling(max_new_tokens=16), []
    for _ in range(2):
        engine = load.engine(compile="lazy", tiers=CacheTiers(tmp_path))
        (answer,) = engine.generate([text], options)
        answers.append((answer.text, engine.statistics.computed_tokens + answer.cached, answer.cached))
        engine.stop()
    length = len(engine.encode(text))
    assert answers[0][:2] == answers[1][:2] and answers[0][0]
    assert (answers[0][2], answers[1][2]) == (0, (length - 1) // 16 * 16)


@pytest.mark.turns(3)
def test_host_memory_gives_back_what_gave_way_and_is_bounded(start: Start) -> None:
    def served(size: int) -> tuple[list[Any], PageTiers]:
        engine = start.engine(CacheTiers(host_bytes=size))
        tiers, answers = tiers_of(engine), []
        for _ in range(2):
            answers.append(answered(engine))
            tiers._writer.submit(int).result()  # what gave way is stored
        return answers, tiers

    (first, again), tiers = served(1 << 20)
    assert again == first and tiers.counts["host"].hits >= 14 and tiers.counts["disk"].stored == 0
    assert 0 < tiers.bytes["host"] <= 1 << 20
    size = 3 * tiers._copies.size(PAGES)
    (bounded, again), tiers = served(size)
    assert bounded == again == first and tiers.bytes["host"] == size < tiers.counts["host"].stored


def test_two_engines_share_a_directory(start: Start, tmp_path: Path) -> None:
    tiers = CacheTiers(tmp_path)
    first, second = start.engine(tiers), start.engine(tiers)
    answers = answered(first)
    first.stop()
    assert answered(second) == answers and tiers_of(second).counts["disk"].hits == 14 * len(PROMPTS)
    shutil.rmtree(tmp_path)  # by somebody, while it serves
    assert answered(second) == answers
    second.stop()
    assert len(list(tmp_path.glob("*/*"))) > 14


@pytest.mark.turns(3)
def test_pages_of_another_model_are_never_read(start: Start, tmp_path: Path) -> None:
    tiers = CacheTiers(tmp_path)
    first = start.engine(tiers)
    first.generate(PROMPTS[:1], GREEDY)
    first.stop()
    assert len(list(tmp_path.iterdir())) == 1
    leaves, tree = jax.tree.flatten(start.model)
    largest = max(range(len(leaves)), key=lambda i: leaves[i].size)
    leaves[largest] = leaves[largest].at[(0,) * leaves[largest].ndim].add(1e-3)  # one number of one weight
    other = Start(jax.tree.unflatten(tree, leaves), {}, start.programs)
    second = other.engine(tiers)
    (answer,) = second.generate(PROMPTS[:1], GREEDY)
    assert answer.cached == 0 and tiers_of(second).counts["disk"].hits == 0
    second.stop()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.turns(3)
def test_no_disk_and_no_time_stop_an_answer(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answered(start.engine(None))
    (tmp_path / "file").write_text("")
    engine = start.engine(CacheTiers(tmp_path / "file" / "x"))
    assert answered(engine) == expected
    engine.stop()
    assert len(caplog.records) == 1 and "prefixes cannot be written" in caplog.text
    monkeypatch.setattr(page_tiers, "PENDING", 0)
    engine = start.engine(CacheTiers(tmp_path / "slow"))
    gate, write = threading.Event(), tiers_of(engine)._write
    monkeypatch.setattr(tiers_of(engine), "_write", lambda *batch: gate.wait(60) and write(*batch))
    assert answered(engine) == expected and tiers_of(engine).dropped > 14  # one batch waits to be written
    gate.set()
    engine.stop()
    assert len(list((tmp_path / "slow").glob("*/*"))) > 14
    damaged = CacheTiers(tmp_path / "damaged")
    first = start.engine(damaged)
    answered(first)
    first.stop()
    files = sorted((tmp_path / "damaged").glob("*/*"))
    for i, path in enumerate(files):
        path.write_bytes(path.read_bytes()[: -i % 3 * 40 or None])
    assert answered(start.engine(damaged)) == expected


def test_others_go_on_while_a_prefix_is_read(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = CacheTiers(tmp_path)
    first = start.engine(tiers)
    answers = answered(first)
    first.stop()
    engine = start.engine(tiers)
    read, gate = tiers_of(engine)._read, threading.Event()

    def slow(parts: Any) -> Any:
        assert gate.wait(60)
        return read(parts)

    monkeypatch.setattr(tiers_of(engine), "_read", slow)
    done: dict[str, list[int]] = {"stored": [], "new": [], "cancelled": []}

    def sink(name: str) -> Callable[[Delta], None]:
        return lambda delta: done[name].extend([*delta.token_ids, *([-1] if delta.finish else [])])

    requests = {
        name: Request(tuple(prompt), GREEDY, sink(name))
        for name, prompt in (("stored", PROMPTS[0]), ("new", PROMPTS[0][::-1]), ("cancelled", PROMPTS[1]))
    }
    for request in requests.values():
        engine.submit(request)
    while not done["new"] or done["new"][-1] != -1:
        engine.step()
    engine.cancel(requests["cancelled"])
    for _ in range(3):
        engine.step()
    assert not done["stored"] and done["cancelled"] == [-1]
    assert [stream.tokens for stream in tiers_of(engine)._readings] == [PROMPTS[0]]
    gate.set()
    while not engine.idle:
        engine.step()
    assert done["stored"] == [*answers[0], -1]
    assert engine.statistics.computed_tokens == 60 + 5 + 60 - CACHED + 5


@pytest.mark.turns(3)
def test_choices_of_a_prompt_and_equal_prompts_read_it_once_or_share_it(start: Start, tmp_path: Path) -> None:
    tiers = CacheTiers(tmp_path)
    first = start.engine(tiers)
    answers = answered(first)
    first.stop()
    engine = start.engine(tiers)
    choices = engine.generate([PROMPTS[0]], dataclasses.replace(GREEDY, n=3, temperature=0.0))
    assert {choice.token_ids for choice in choices} == {answers[0]}
    assert tiers_of(engine).counts["disk"].hits == CACHED // 4
    same = engine.generate([PROMPTS[1]] * 3, GREEDY)
    assert {answer.token_ids for answer in same} == {answers[1]} and {answer.cached for answer in same} == {CACHED}


def test_what_cannot_be_is_named(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="`tiers` are of a prefix cache"):
        start.engine(CacheTiers(tmp_path), prefix_cache=False)
    wrong: list[Any] = [{}, {"directory_bytes": 5}, {"host_bytes": -1}, {"directory": tmp_path, "directory_bytes": -1}]
    for options in wrong:
        with pytest.raises(ShapeError, match="CacheTiers: "):
            CacheTiers(**options)


def test_options_of_the_command_that_contradict_each_other(tmp_path: Path) -> None:
    def tiers(*options: str) -> CacheTiers | None:
        return model_options.cache_tiers(command_parser("serve").parse_args(["model", *options]))

    assert tiers() is None
    assert tiers("--cache-dir", str(tmp_path), "--cache-dir-size", "0.5") == CacheTiers(tmp_path, 1 << 29)
    assert tiers("--cache-host", "2", "--mesh", "tensor=2") == CacheTiers(host_bytes=2 << 30)
    for options, text in (
        (["--cache-dir-size", "1"], "--cache-dir-size is about the files"),
        (["--cache-dir", "x", "--no-prefix-cache"], "leave out --no-prefix-cache"),
    ):
        with pytest.raises(CommandError, match=text):
            tiers(*options)
