"""The tokenizer of a GGUF file as one of the library `tokenizers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from vishwamai.core.errors import ShapeError, UnsupportedError

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EXPRESSIONS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "gpt-4o": _O200K,
}
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens: special ones, and added ones that are text."""


def read_encoder(values: Mapping[str, Any], source: str) -> tokenizers.Tokenizer:
    """The tokenizer that a file's metadata describe.

    Args:
      source: the file, for errors.

    Raises:
      ShapeError: a key is missing or of another form.
      UnsupportedError: a kind of tokenizer, or a way to split texts, that is not known.
    """
    tokens = values.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ShapeError(f"{source}: `tokenizer.ggml.tokens` is missing; expected a list of texts.")
    kinds = values.get("tokenizer.ggml.token_type", [1] * len(tokens))
    kind = values.get("tokenizer.ggml.model")
    vocab = {token: id for id, token in enumerate(tokens)}
    if kind == "gpt2":
        encoder = _byte_level(values, vocab, source)
    elif kind == "llama":
        encoder = _sentencepiece(values, vocab, tokens, kinds, source)
    else:
        raise UnsupportedError(f"{source}: `tokenizer.ggml.model` is {kind!r}; gpt2 and llama are read.")
    for type, add in ((_CONTROL, encoder.add_special_tokens), (_USER_DEFINED, encoder.add_tokens)):
        added = [token for token, number in zip(tokens, kinds) if number == type and token]
        add([tokenizers.AddedToken(token, normalized=False, special=type == _CONTROL) for token in added])
    begin = values.get("tokenizer.ggml.bos_token_id")
    if values.get("tokenizer.ggml.add_bos_token", kind == "llama") and begin is not None:
        text = tokens[begin]
        single = processors.TemplateProcessing(
            single=[text, "$A"], pair=[text, "$A", "$B"], special_tokens=[(text, begin)]
        )
        encoder.post_processor = single
    return encoder


def _byte_level(values: Mapping[str, Any], vocab: dict[str, int], source: str) -> tokenizers.Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in values.get("tokenizer.ggml.merges", [])]
    pre = values.get("tokenizer.ggml.pre", "gpt-2")
    encoder = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in ("llama-bpe", "llama3", "llama-v3")))
    if pre in _EXPRESSIONS:
        pattern = tokenizers.Regex(_EXPRESSIONS[pre])
        first, regex = [pre_tokenizers.Split(pattern, "isolated")], False
    elif pre in _DIGITS:
        first, regex = [pre_tokenizers.Digits(individual_digits=True)], True
    elif pre in ("gpt-2", "default"):
        first, regex = [], True
    else:
        names = ", ".join((*_EXPRESSIONS, *_DIGITS, "gpt-2"))
        raise UnsupportedError(f"{source}: `tokenizer.ggml.pre` is {pre!r}; read are {names}.")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    encoder.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        encoder.normalizer = normalizers.NFC()
    return encoder


def _sentencepiece(
    values: Mapping[str, Any], vocab: dict[str, int], tokens: Sequence[str], kinds: Sequence[int], source: str
) -> tokenizers.Tokenizer:
    scores = values.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ShapeError(f"{source}: `tokenizer.ggml.scores` is missing; expected one number a token.")
    unknown = values.get("tokenizer.ggml.unknown_token_id")
    merges = _merges(vocab, {t: s for t, s, kind in zip(tokens, scores, kinds) if kind in (1, _USER_DEFINED)})
    model = models.BPE(
        vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=None if unknown is None else tokens[unknown]
    )
    encoder = tokenizers.Tokenizer(model)
    prefix = values.get("tokenizer.ggml.add_space_prefix", True)
    blank = normalizers.Replace(" ", "▁")
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blank]) if prefix else blank
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    encoder.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return encoder


def _merges(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours whose union scores most: pairs in the order of the scores of their unions."""
    pairs = []
    for union, score in scores.items():
        splits = ((union[:i], union[i:]) for i in range(1, len(union)))
        parts = [(left, right) for left, right in splits if left in scores and right in scores]
        pairs += [(score, *pair) for pair in sorted(parts, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))]
    return [(left, right) for _, left, right in sorted(pairs, key=lambda pair: -pair[0])]
