"""Options of requests that need more than a type: beam searches, and processors by name."""

from __future__ import annotations

from vishwamai.core.errors import ShapeError
from vishwamai.inference.beams import MAX_WIDTH
from vishwamai.inference.processors import PROCESSORS, Processor
from vishwamai.inference.sampling import Sampling
from vishwamai.inference.server import schema
from vishwamai.inference.server.errors import HttpError
from vishwamai.inference.server.settings import Settings


def length_penalty_of(body: schema.Common, options: Sampling, guided: bool) -> float | None:
    """The exponent of the lengths where a request asks for a beam search, or None.

    Args:
      body: the request.
      options: its options of sampling.
      guided: flag, its answer follows a grammar.

    Raises:
      HttpError: 400, another key does not go with a beam search.
    """
    if not body.use_beam_search:
        return None
    rivals = {name: getattr(body, name, None) for name in ("stream", "bad_words", "best_of", "min_tokens")}
    rivals |= {"logits_processors": body.logits_processors, "response_format": guided, "max_tokens": body.limit == 0}
    for name, value in rivals.items():
        if value:
            raise HttpError(400, f"`use_beam_search` does not go with `{name}`; leave one of them out.", name)
    if options.n > MAX_WIDTH:
        raise HttpError(400, f"`n` is {options.n}; a beam search has at most {MAX_WIDTH} beams.", "n")
    return 1.0 if body.length_penalty is None else body.length_penalty


def processors_of(body: schema.Common, settings: Settings) -> tuple[Processor, ...]:
    """The processors that a request names.

    Raises:
      HttpError: 400, the server has none of that name, or it does not take these options.
    """
    factories = {**PROCESSORS, **settings.processors}
    processors = []
    for entry in body.logits_processors or ():
        name, options = (entry, {}) if isinstance(entry, str) else (entry.name, entry.kwargs or {})
        if name not in factories:
            text = f"`logits_processors` has {name[:100]!r}; the processors of this server are {', '.join(factories)}."
            raise HttpError(400, text, "logits_processors")
        try:
            processors.append(factories[name](**options))
        except (ShapeError, TypeError, ValueError) as error:
            raise HttpError(400, f"`logits_processors`: {error}", "logits_processors") from error
    return tuple(processors)
