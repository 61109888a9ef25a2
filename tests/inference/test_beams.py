"""Beam search: the beams of transformers, and those of an exhaustive search where tokens end answers."""

import asyncio
import itertools
import math
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers

from serving import serving, write_model
from vishwamai.inference import Settings, plan_load
from vishwamai.inference.answers import TokenLogprobs
from vishwamai.inference.beams import beam_search


def test_a_wide_search_is_exhaustive():
    draw = np.random.default_rng(0)
    tables = {}

    def logprobs(tokens):
        if tokens not in tables:
            tables[tokens] = draw.normal(size=4)
        return tables[tokens] - np.log(np.exp(tables[tokens]).sum())

    async def likeliest(prompts):
        entries = []
        for prompt in prompts:
            top = sorted(enumerate(logprobs(prompt).tolist()), key=lambda pair: -pair[1])
            entries.append(TokenLogprobs(*top[0], tuple(top)))
        return entries

    prompt, end, scores = (7, 8), 3, {}
    for length in (1, 2, 3):
        for tokens in itertools.product(range(4), repeat=length):
            if end in tokens[:-1] or (length < 3 and tokens[-1] != end):
                continue
            total = sum(logprobs((*prompt, *tokens[:i]))[token] for i, token in enumerate(tokens))
            scores[tokens] = total / (2 + length - (tokens[-1] == end)) ** 0.7
    best = sorted(scores, key=lambda tokens: -scores[tokens])
    beams = asyncio.run(beam_search(likeliest, prompt, 64, 3, {end}, 0.7))
    assert [beam.tokens for beam in beams] == best and len(best) == 40
    assert math.isclose(beams[0].score(2, 0.7), scores[best[0]])
    narrow = asyncio.run(beam_search(likeliest, prompt, 2, 3, {end}, 0.7))
    assert len(narrow) == 2 and {beam.tokens for beam in narrow} <= {*best}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("beams")
    write_model(path)
    return path


@pytest.mark.turns(2)
def test_beams_are_those_of_transformers(path):
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    prompt = [40, 50, 60]
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=5, num_beams=3, num_return_sequences=3, do_sample=False,
        eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    tokens = expected.sequences[:, len(prompt) :].tolist()
    planned = plan_load(path, dtype="float32", max_sequences=4, max_tokens=32, max_length=64, page_size=8)
    with serving(planned.engine(compile="lazy"), Settings("tiny")) as address:

        def complete(**options):
            body = {"prompt": prompt, "max_tokens": 5, "ignore_eos": True, "use_beam_search": True, **options}
            return httpx.post(f"{address}/v1/completions", json=body, timeout=120)

        answer = complete(n=3, logprobs=1, return_token_ids=True).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == tokens
        totals = [sum(choice["logprobs"]["token_logprobs"]) / 5 for choice in answer["choices"]]
        np.testing.assert_allclose(totals, expected.sequences_scores.numpy(), atol=1e-4)
        assert answer["usage"]["completion_tokens"] == 15
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "use_beam_search": True}
        both = httpx.post(f"{address}/v1/chat/completions", json={**chat, "n": 2}, timeout=120).json()["choices"]
        assert [choice["index"] for choice in both] == [0, 1] and all("content" in c["message"] for c in both)
        for options, name in (({"stream": True}, "stream"), ({"regex": "a+"}, "response_format"), ({"n": 11}, "n")):
            declined = complete(**options)
            assert declined.status_code == 400 and declined.json()["error"]["param"] == name
