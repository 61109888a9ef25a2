"""Tokens that each turn of a conversation computes, with the prefix cache and without; counts, so any machine will do.

Answers are greedy, and user messages are random tokens.
"""

from __future__ import annotations

import numpy as np

from vishwamai.inference import Engine, Sampling, plan_load


def conversation(engine: Engine, turns: int, sizes: tuple[int, int, int]) -> list[tuple[int, int, int, int]]:
    """For every turn the tokens of the prompt, of what is new of it, those computed, and those of the answer.

    Args:
      engine: the engine, of which the conversation is the only client.
      turns: number of turns.
      sizes: tokens of the system prompt, of a user's message and of an answer.
    """
    system, message, new = sizes
    draw = np.random.default_rng(0)
    options = Sampling(max_new_tokens=new, ignore_eos=True)
    text, rows = draw.integers(3, engine.programs.vocab, system).tolist(), []
    for _ in range(turns):
        prompt = [*text, *draw.integers(3, engine.programs.vocab, message).tolist()]
        before = engine.statistics.computed_tokens
        (answer,) = engine.generate([prompt], options)
        earlier = len(text) if rows else 0
        rows.append((len(prompt), len(prompt) - earlier, engine.statistics.computed_tokens - before, new))
        text = [*prompt, *answer.token_ids]
    return rows


def table(folder: str, turns: int, sizes: tuple[int, int, int] = (300, 60, 40)) -> str:
    """A table of the turns, and their sum."""
    tables = []
    for prefix_cache in (True, False):
        load = plan_load(folder, dtype="float32", max_sequences=2, max_length=2048, prefix_cache=prefix_cache)
        tables.append(conversation(load.engine(compile="lazy"), turns, sizes))
    lines = ["| Turn | Tokens of the prompt | of them new | Computed, with the answer | Without prefix cache |"]
    lines.append("|---|---|---|---|---|")
    for turn, (row, plain) in enumerate(zip(*tables), 1):
        lines.append(f"| {turn} | {row[0]:,} | {row[1]} | {row[2]} | {plain[2]:,} |")
    total, plain_total = (sum(row[2] for row in table) for table in tables)
    return "\n".join([*lines, f"| all | | | {total:,} | {plain_total:,} |"])
