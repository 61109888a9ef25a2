"""From a checked request to what the engine computes: prompts in tokens, options, a grammar and the reply's form."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.inference.barred import Barred
from vishwamai.inference.engine import Engine
from vishwamai.inference.sampling import Sampling
from vishwamai.inference.scoring import Scorer
from vishwamai.inference.server import forms, schema, tools
from vishwamai.inference.server.errors import HttpError, declined
from vishwamai.inference.server.job import GrammarSource, Job
from vishwamai.inference.server.older_forms import current
from vishwamai.inference.server.options import length_penalty_of, processors_of
from vishwamai.inference.server.pieces import Pieces
from vishwamai.inference.server.reading import Reader
from vishwamai.inference.server.replies import Prompt, Reply
from vishwamai.inference.server.settings import Settings
from vishwamai.inference.sharding import mesh_of
from vishwamai.inference.thinking import Thinking
from vishwamai.models.messages import Message

_OFFERED = ("name", "description", "parameters")
_LOG = logging.getLogger("vishwamai.server")
_TAIL = 16
"""Tokens at the end of a prompt that say whether the answer begins with reasoning."""

FORM_HELP = "its chat template writes them in a form that is not read; --tool-parser names another"


class Chat(NamedTuple):
    """A conversation as the model reads it: token ids, how its answer is read, the functions that it offers, and the
    number of tokens that another conversation with the same system message and functions begins with, too.
    """

    ids: tuple[int, ...]
    reader: Reader
    offers: list[dict[str, object]]
    shared: int = 0


class Jobs:
    """Makes jobs for one engine; any thread may call it.

    Args:
      engine: whose tokenizer and limits hold.
      settings: the server's settings.
    """

    def __init__(self, engine: Engine, settings: Settings):
        self.engine, self.settings = engine, settings
        split = mesh_of(engine.model) is not None
        self.scorer = Scorer(engine.model, engine.limits.max_length, engine.optimization, split)
        self.pieces = Pieces(engine.tokenizer)

    @functools.cached_property
    def _added(self) -> Mapping[str, int]:
        """Ids of the tokens that tokenizers match as a text of their own, special or not."""
        tokens = self.engine.tokenizer.encoder.get_added_tokens_decoder()
        return {token.content: id for id, token in tokens.items()}

    def completion(self, body: schema.Completion) -> Job:
        """The job of /v1/completions."""
        if body.best_of is not None:
            if body.best_of < (body.n or 1):
                raise HttpError(
                    400, f"`best_of` is {body.best_of} and `n` {body.n}; pass as many or more answers.", "best_of"
                )
            if body.stream and body.best_of > (body.n or 1):
                raise HttpError(400, "`best_of` comes with whole answers; leave out `stream`.", "best_of")
        if body.suffix:
            raise HttpError(
                400, "`suffix` is not served; leave it out, or write the model's own marks into `prompt`.", "suffix"
            )
        grammar = self._grammar(dict(self._sources(body)))
        many: Any = (
            body.prompt if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int) else [body.prompt]
        )
        special = True if body.add_special_tokens is None else body.add_special_tokens
        tokenizer = self.engine.tokenizer
        prompts = []
        with declined("prompt"):
            for prompt in many:
                if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
                    self.engine.prompts.check_text(len(prompt))
                if isinstance(prompt, str) and not special and tokenizer is not None:
                    ids = tuple(tokenizer.encode(prompt, add_special=False))
                else:
                    ids = self.engine.encode(prompt)
                cut = self._truncated(body, ids)
                echo = None
                if body.echo:
                    text = prompt if isinstance(prompt, str) and cut == ids else None
                    echo = text if text is not None else "" if tokenizer is None else tokenizer.decode(cut)
                prompts.append(Prompt(cut, echo))
        return self._job(body, "completion", prompts, grammar)

    def chat(self, body: schema.Chat) -> Job:
        """The job of /v1/chat/completions."""
        chat = self.chat_prompt(body)
        choice, offers = body.choice, chat.offers
        named = [offer for offer in offers if isinstance(choice, str) or offer["name"] == choice.name]
        if choice not in ("auto", "none") and not named:
            raise HttpError(400, "`tool_choice` asks for a call of a tool that `tools` lacks.", "tool_choice")
        grammar = self._chat_grammar(body, choice, chat.reader.form, named)
        prompt = Prompt(self._truncated(body, chat.ids))
        job = self._job(body, "chat", [prompt], grammar, chat.reader)
        forced = choice not in ("auto", "none")
        thinking = self._thinking(body, chat.reader, grammar is not None, forced)
        return dataclasses.replace(job, thinking=thinking, shared=chat.shared if prompt.ids == chat.ids else 0)

    def _thinking(self, body: schema.Chat, reader: Reader, guided: bool, forced: bool) -> Thinking | None:
        """What holds for the reasoning of an answer, if anything does."""
        marks, budget = reader.marks, body.thinking_budget
        if marks is None or (budget is None and not guided):
            return None
        harmony = reader.thinking == "gpt_oss"
        if guided and not reader.inside and not harmony:
            return None  # the grammar is that of the answer from its start
        encode = functools.partial(self.engine.tokenizer.encode, add_special=False)
        begin, end = tuple(encode(marks.begin)), tuple(encode(marks.end))
        behind = ""
        if harmony and guided:
            behind = "<|start|>assistant" + ("" if forced else "<|channel|>final<|message|>")
        free = () if reader.inside or (harmony and guided) else begin
        lead = begin if harmony and guided else ()
        words = -(-self.engine.programs.vocab // 32)
        return Thinking(free, end, tuple(encode(behind)), words, lead, budget)

    def chat_prompt(self, body: schema.Chat) -> Chat:
        """A conversation in tokens."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None or tokenizer.template is None:
            lacks = "tokenizer" if tokenizer is None else "chat template"
            raise HttpError(400, f"the model has no {lacks}; use /v1/completions.", "messages")
        offers = [] if body.choice == "none" else [function.model_dump(exclude_none=True) for function in body.offers]
        reads = bool(offers) and tokenizer.template.reads_tools
        program = tokenizer.template.program(tools=reads)
        form = None
        if offers:
            form = self.settings.tool_parser or (forms.form_of(program) if reads else "hermes")
            form = None if form == "none" else form
            if form is None:
                once(f"the calls of this model stay text: {FORM_HELP}")
        thinking = self.settings.reasoning_parser or forms.thinking_of(program)
        thinking = None if thinking == "none" else thinking
        messages = [current(message.model_dump(exclude_unset=True)) for message in body.messages]
        thinks = body.thinks
        values = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
        values |= body.chat_template_kwargs or {}
        values |= {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
        values |= {} if body.add_generation_prompt is None else {"add_generation_prompt": body.add_generation_prompt}
        values |= {} if not body.continue_final_message else {"continue_final_message": True}
        offered = [
            {"type": "function", "function": {key: offer[key] for key in _OFFERED if key in offer}} for offer in offers
        ]

        def tokens(messages: Sequence[Message]) -> list[int]:
            if reads:
                return tokenizer.chat(messages, **values, tools=offered)
            if offers:
                return self._described(messages, offered, values)
            return tokenizer.chat(messages, **values)

        with declined("messages"):
            if body.truncate_prompt_tokens is None:
                self.engine.prompts.check_text(_characters(messages))
            prompt = tokens(messages)
        tail = tokenizer.decode(prompt[-_TAIL:], skip_special=False)
        shared = 0 if self.engine.scheduler.states is None else shared_beginning(tokens, messages, prompt)
        return Chat(tuple(prompt), Reader.of(form, thinking, tail, offers), offers, shared)

    def _described(
        self, messages: Sequence[Message], offered: Sequence[Mapping[str, object]], values: Mapping[str, object]
    ) -> list[int]:
        """A chat for a template that does not read `tools`: the messages offer them."""
        once("the chat template does not read `tools`; messages offer them, and the model writes calls as Hermes does")
        tokenizer = self.engine.tokenizer
        try:
            return tokenizer.chat(tools.in_messages(messages, offered), **values)
        except UnsupportedError:
            if messages[0]["role"] == "system":
                raise
            return tokenizer.chat(tools.in_messages(messages, offered, "user"), **values)

    def _chat_grammar(
        self, body: schema.Chat, choice: object, form: str | None, functions: Sequence[Mapping[str, object]]
    ) -> GrammarSource | None:
        sources = dict(self._sources(body))
        if choice not in ("auto", "none"):
            if form is None:
                raise HttpError(
                    400,
                    "`tool_choice` asks for a call, but the model's chat template writes calls in a form that the "
                    "server does not read; leave `tool_choice` out to get the model's text, or start the server with "
                    "--tool-parser.",
                    "tool_choice",
                )
            # Clients send the form of their last answer along with a call that they force.
            sources.pop("response_format", None)
            with declined("tool_choice"):
                source = tools.grammar(form, functions, self._added)
            return self._grammar({**sources, "tool_choice": source}, "tools")
        if form is not None and functions:
            # Harmony's channels come between a call and what is before it.
            strict = form != "gpt_oss" and any(function.get("strict") for function in functions)
            kind, content = sources.get("response_format", (None, None))
            if strict or (kind == "json_schema" and form != "gpt_oss"):
                sources.pop("response_format", None)
                with declined("tools"):
                    source = tools.grammar(
                        form,
                        functions,
                        self._added,
                        forced=False,
                        content=content if isinstance(content, Mapping) else None,
                    )
                return self._grammar({**sources, "tools": source})
        return self._grammar(sources)

    def _sources(self, body: schema.Common) -> list[tuple[str, tuple[str, schema.Grammar]]]:
        return [(name, (kind, source)) for name, kind, source in body.grammars()]

    def _grammar(
        self, sources: Mapping[str, tuple[str, schema.Grammar]], param: str | None = None
    ) -> GrammarSource | None:
        if len(sources) > 1:
            names = " and ".join(f"`{name}`" for name in sources)
            raise HttpError(400, f"an answer cannot follow {names} at once; pass one of them.", list(sources)[0])
        for name, source in sources.items():
            return GrammarSource(*source, param or name)
        return None

    def _truncated(self, body: schema.Common, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The last tokens of a prompt, where the request bounds them."""
        count = body.truncate_prompt_tokens
        if count is None:
            return ids
        if count == -1:
            count = self.engine.limits.max_length - max(1, body.limit or 1)
        return ids[-count:] if count > 0 else ()

    def _job(
        self,
        body: schema.Common,
        kind: Literal["completion", "chat"],
        prompts: Sequence[Prompt],
        grammar: GrammarSource | None,
        reader: Reader | None = None,
    ) -> Job:
        with declined(None):
            options = body.sampling(self.settings.defaults, self.settings.max_new_tokens)
        choices, best_of = options.n, getattr(body, "best_of", None) or options.n
        if best_of > choices:
            options = dataclasses.replace(options, n=best_of, logprobs=options.logprobs or 0)
        computes = body.limit != 0
        if not computes and kind == "chat":
            raise HttpError(400, "`max_tokens` is 0; pass at least 1.", "max_tokens")
        if grammar is not None and options.min_new_tokens:
            raise HttpError(400, "`min_tokens` and a grammar may contradict; leave one of them out.", "min_tokens")
        if body.prompt_logprobs is not None and body.stream:
            raise HttpError(400, "`prompt_logprobs` come with whole answers; leave out `stream`.", "prompt_logprobs")
        for prompt in prompts:
            with declined("prompt" if kind == "completion" else "messages"):
                if computes:
                    self.engine.check(prompt.ids, options)
                elif not 0 < len(prompt.ids) <= self.engine.limits.max_length:
                    raise ShapeError(
                        f"the prompt has {len(prompt.ids)} tokens; pass 1 to {self.engine.limits.max_length} "
                        "(--max-length)."
                    )
        self._check_entries(body, prompts, options)
        tokenizer = self.engine.tokenizer
        special: frozenset[int] = frozenset()
        if tokenizer is not None and reader is not None:
            special = forms.marks_of(reader.form, reader.thinking, tokenizer.special_ids)
        if tokenizer is not None and body.skip_special_tokens is False:
            special |= frozenset(tokenizer.special_ids.values())
        scores = [body.prompt_logprobs]
        if isinstance(body, schema.Completion) and body.echo:
            scores.append(body.logprobs)
        counts = [count for count in scores if count is not None]
        adapter = None if body.model in (None, *self.settings.names) else body.model
        if adapter is not None and counts:
            raise HttpError(
                400, "log probabilities of prompts are not computed with an adapter; leave them out.", "model"
            )
        reply = Reply(
            kind,
            body.model or self.settings.name,
            Pieces(tokenizer, as_ids=True) if body.return_tokens_as_token_ids else self.pieces,
            tuple(prompts),
            options.n,
            token_ids=tokenizer is None if body.return_token_ids is None else body.return_token_ids,
            logprobs=body.count_logprobs is not None,
            prompt_logprobs=body.prompt_logprobs is not None,
            reader=None if reader is None or reader.plain else reader,
            reasoning=not isinstance(body, schema.Chat) or body.include_reasoning is not False,
            single=isinstance(body, schema.Chat) and body.parallel_tool_calls is False,
            legacy=isinstance(body, schema.Chat) and not body.tools and bool(body.functions),
            best=choices,
            usage_each=body.continuous_usage if body.include_usage else None,
        )
        return Job(
            tuple(prompt.ids for prompt in prompts),
            options if computes else None,
            reply,
            max(counts, default=None),
            min(body.priority or 0.0, self.settings.max_priority),
            body.timeout,
            grammar,
            special,
            bool(body.stream),
            body.include_usage,
            barred=self._barred(body),
            adapter=adapter,
            length_penalty=length_penalty_of(body, options, grammar is not None),
        )

    def _barred(self, body: schema.Common) -> Barred | None:
        """What holds for the words of `bad_words`, each at the beginning of a text and behind a blank, and for
        `logits_processors`.
        """
        tokenizer, processors = self.engine.tokenizer, processors_of(body, self.settings)
        words = -(-self.engine.programs.vocab // 32)
        if not body.bad_words:
            return Barred((), words, processors=processors) if processors else None
        if tokenizer is None:
            raise HttpError(400, "the model has no tokenizer; pass `logit_bias` in place of `bad_words`.", "bad_words")
        with declined("bad_words"):
            texts = [blank + word.lstrip() for word in body.bad_words for blank in ("", " ")]
            ids = {tuple(tokenizer.encode(text, add_special=False)) for text in texts} - {()}
        return Barred(tuple(sorted(ids)), words, processors=processors) if ids or processors else None

    def _check_entries(self, body: schema.Common, prompts: Sequence[Prompt], options: Sampling) -> None:
        """Declines a reply of too many log probabilities, which is built in memory."""
        count = 0
        if options.logprobs is not None:
            lengths = (self.engine.check(prompt.ids, options) - len(prompt.ids) for prompt in prompts)
            count += options.n * sum(lengths) * (1 + options.logprobs)
        if body.prompt_logprobs is not None or getattr(body, "echo", None):
            count += sum(len(prompt.ids) for prompt in prompts) * (1 + (body.prompt_logprobs or 1))
        if count > self.settings.max_entries:
            raise HttpError(
                400,
                f"the answers may have {count} log probabilities; the most is {self.settings.max_entries}. Ask for "
                "fewer answers, tokens (`max_tokens`) or likely tokens.",
                "logprobs",
            )


def _characters(value: Sequence[Message]) -> int:
    """Characters of all texts of messages; what a template writes of them may be less than their names and ids."""
    contents = (message.get("content") for message in value)
    lists = ([content] if isinstance(content, str) else content for content in contents)
    parts = (part for entries in lists if isinstance(entries, Iterable) for part in entries)
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return sum(len(text) for text in texts if isinstance(text, str))


@functools.lru_cache(maxsize=4096)
def once(text: str) -> None:
    """Logs a warning, once."""
    _LOG.warning("%s", text)


def shared_beginning(
    tokens: Callable[[Sequence[Message]], list[int]], messages: Sequence[Message], prompt: Sequence[int]
) -> int:
    """Tokens that a chat begins with whatever its first user says: those of its system message and its functions.

    Args:
      tokens: function from messages to their tokens.
      messages: list of the messages of the chat.
      prompt: list of its tokens.
    """
    first = next((i for i, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0)
    text = "-" if str(messages[first].get("content")).startswith("+") else "+"
    try:
        variant = tokens([*messages[:first], {"role": "user", "content": text}])
    except (ShapeError, UnsupportedError):
        return 0
    return next((i for i, (a, b) in enumerate(zip(prompt, variant)) if a != b), min(len(prompt), len(variant)))
