"""Guesses of the next tokens from the text itself ("prompt lookup", Saxena 2023).

A step computes the guesses together with the last token and draws a token after each of them, with the key of its
position. As long as a draw equals the guess, the next draw counts too. So every token that counts was drawn from the
model's own distribution given true tokens: the result is the one without guesses, and with a seed the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


def lookup(tokens: Sequence[int], most: int, longest: int = 3, back: int = 2048) -> list[int]:
    """What followed the last few tokens where they occurred before.

    Args:
      tokens: prompt and answer so far.
      most: how many guesses at most.
      longest: how many of the last tokens must match; fewer are tried in turn, down to one.
      back: how far back to look, tokens.

    >>> lookup([1, 2, 3, 9, 1, 2, 3], most=2)
    [9, 1]
    >>> lookup([1, 2, 3], most=2)
    []
    """
    if most < 1:
        return []
    tokens = list(tokens[-back:])
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        last = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == last:
                return tokens[start + size : start + size + most]
    return []


def accepted(guesses: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The draws that count: those after right guesses, and the first that differs from its guess.

    >>> accepted([4, 5], [4, 7, 1])
    [4, 7]
    >>> accepted([4, 5], [4, 5, 1])
    [4, 5, 1]
    """
    for i, guess in enumerate(guesses):
        if sampled[i] != guess:
            return list(sampled[: i + 1])
    return list(sampled[: len(guesses) + 1])
