"""What clients may send: OpenAI's requests, and vLLM's extensions, checked before anything else sees them.

A key that is not declared is accepted, and `unknown_keys` names it: clients send many that no server of one model has a
use for. `NO_EFFECT` are those that an interface documents and that change no answer here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from vishwamai.inference.sampling import MAX_BIASES, MAX_LOGPROBS, Sampling
from vishwamai.inference.server.errors import HttpError

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Short = Annotated[str, Field(max_length=65_536)]
Tokens = Annotated[int, Field(ge=0, lt=2**31)]
JsonObject = dict[str, JsonValue]
Grammar = str | Mapping[str, object]
"""A regular expression, a grammar or a JSON schema."""
Sent = TypeVar("Sent", bound=BaseModel)

NO_EFFECT = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention verbosity prediction "
    "cache_control include_obfuscation".split()
)


class Open(BaseModel):
    """An object whose undeclared keys are accepted."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, populate_by_name=True)


class StreamOptions(Open):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Open):
    name: str = "answer"
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Open):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None  # llama.cpp's place of it


class StructuredOutputs(Open):
    """vLLM's `structured_outputs`; the keys `guided_...` are its older form."""

    json_: Annotated[JsonObject | str | None, Field(alias="json")] = None
    regex: Short | None = None
    choice: Annotated[list[Short], Field(fail_fast=True, min_length=1, max_length=1024)] | None = None
    grammar: Short | None = None
    json_object: bool | None = None


class NamedProcessor(Open):
    """A processor of logits with its options; vLLM calls its name `qualname`."""

    name: Annotated[str, Field(max_length=256, validation_alias=AliasChoices("name", "qualname"))]
    kwargs: JsonObject | None = None


class Common(Open):
    """What completions and chats share; the later ones are extensions."""

    model: str | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Short | Annotated[list[Short], Field(fail_fast=True, max_length=16)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    response_format: ResponseFormat | None = None

    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Tokens | None = None
    bad_words: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=64)] | None = None
    logits_processors: Annotated[list[Short | NamedProcessor], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=64)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    priority: Annotated[float, Field(ge=-100, le=100)] | None = None
    timeout: Annotated[float, Field(gt=0, le=86_400)] | None = None
    regex: Annotated[Short | None, Field(validation_alias=AliasChoices("regex", "guided_regex"))] = None
    grammar: Annotated[Short | None, Field(validation_alias=AliasChoices("grammar", "guided_grammar"))] = None
    guided_json: Annotated[
        JsonObject | str | None, Field(validation_alias=AliasChoices("guided_json", "json_schema"))
    ] = None
    guided_choice: Annotated[list[Short], Field(fail_fast=True, min_length=1, max_length=1024)] | None = None
    structured_outputs: StructuredOutputs | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def limit(self) -> int | None:
        """How many new tokens at most."""
        return self.max_tokens

    @property
    def count_logprobs(self) -> int | None:
        """How many log probabilities at each place; None for none."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def sampling(self, defaults: Mapping[str, float], limit: int | None) -> Sampling:
        """The engine's options.

        Args:
          defaults: the model's, where the request says nothing of sampling.
          limit: the server's most new tokens.
        """
        names = ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "n", "seed")
        options = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.top_p == 0:
            options["top_p"] = 1e-6  # the likeliest token alone
        if self.top_k is not None:
            options["top_k"] = max(self.top_k, 0)  # -1 is vLLM's "all"
        limits = [value for value in (self.limit, limit) if value is not None]
        temperature = self.temperature
        if temperature is None:
            temperature = defaults.get("temperature", 1.0)
        return Sampling(
            **{**{key: value for key, value in defaults.items() if key != "temperature"}, **options},
            temperature=temperature,
            max_new_tokens=max(min(limits), 1) if limits else None,
            min_new_tokens=self.min_tokens or 0,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.count_logprobs,
            logit_bias={_token(key): value for key, value in (self.logit_bias or {}).items()},
        )

    def grammars(self) -> Iterator[tuple[str, str, Grammar]]:
        """What the answer must match: (the request's key, the kind of `guided.Vocabulary.grammar`, the source)."""
        for name, kind in (("regex", "regex"), ("grammar", "lark")):
            if (source := getattr(self, name)) is not None:
                yield name, kind, source
        if self.guided_json is not None:
            yield "guided_json", "json_schema", _object("guided_json", self.guided_json)
        if self.guided_choice is not None:
            yield "guided_choice", "lark", _choice(self.guided_choice)
        guide = self.structured_outputs
        if guide is not None:
            name = "structured_outputs"
            if guide.json_ is not None:
                yield name, "json_schema", _object(name, guide.json_)
            if guide.choice is not None:
                yield name, "lark", _choice(guide.choice)
            if guide.json_object:
                yield name, "json_schema", {"type": "object"}
            for kind, source in (("regex", guide.regex), ("lark", guide.grammar)):
                if source is not None:
                    yield name, kind, source
        form = self.response_format
        if form is not None and form.type != "text":
            source = form.schema_ if form.json_schema is None else form.json_schema.schema_
            if source is None and form.type == "json_schema":
                raise HttpError(
                    400, "`response_format` lacks `json_schema.schema`; pass the schema.", "response_format"
                )
            yield "response_format", "json_schema", {"type": "object"} if source is None else source


def _token(key: str) -> int:
    if not key.isascii() or not key.isdecimal() or len(key) > 9:
        raise HttpError(400, f"`logit_bias` has the key {key[:40]!r}; keys are token ids.", "logit_bias")
    return int(key)


def _object(name: str, value: JsonObject | str) -> JsonObject:
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"`{name}` is not JSON: {error}; pass a JSON schema.", name) from error
    if not isinstance(schema, dict):
        raise HttpError(400, f"`{name}` holds a {type(schema).__name__}; pass a JSON schema, an object.", name)
    return schema


def _choice(texts: list[str]) -> str:
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


class Completion(Common):
    """A body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=1024)]
        | Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
        | Annotated[
            list[Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]],
            Field(fail_fast=True, min_length=1, max_length=1024),
        ]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @property
    def limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def count_logprobs(self) -> int | None:
        return self.logprobs


class Message(Open):
    """A message; its other keys go to the chat template as they are."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[JsonValue] | None = None
    tool_calls: Annotated[list[JsonObject], Field(fail_fast=True, max_length=1024)] | None = None
    function_call: JsonObject | None = None


class Function(Open):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Open):
    type: Literal["function"]
    function: Function


class Named(Open):
    name: str


class NamedTool(Open):
    type: Literal["function"]
    function: Named


class Allowed(Open):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool | Named], Field(fail_fast=True, min_length=1, max_length=128)]

    @property
    def names(self) -> set[str]:
        """The functions that may be called."""
        return {tool.function.name if isinstance(tool, NamedTool) else tool.name for tool in self.tools}


class AllowedTools(Open):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class Chat(Common):
    """A body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=16_384)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | NamedTool | AllowedTools | None = None
    functions: Annotated[list[Function], Field(fail_fast=True, max_length=128)] | None = None
    function_call: Literal["none", "auto"] | Named | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    thinking_budget: Annotated[
        Tokens | None,
        Field(validation_alias=AliasChoices("thinking_budget", "thinking_token_budget", "thinking_budget_tokens")),
    ] = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: Literal[False] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def count_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to reason; None: as its chat template does."""
        return False if self.enable_thinking is None and self.reasoning_effort == "none" else self.enable_thinking

    @property
    def offers(self) -> list[Function]:
        """The functions that may be called; `functions` is the older form of `tools`."""
        offers = [tool.function for tool in self.tools or ()] or list(self.functions or ())
        if not isinstance(self.tool_choice, AllowedTools):
            return offers
        return [offer for offer in offers if offer.name in self.tool_choice.allowed_tools.names]

    @property
    def choice(self) -> str | Named:
        """ "none", "auto", "required", or the function that is to be called."""
        choice = self.tool_choice or self.function_call or "auto"
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode
        if choice == "any":  # Mistral's word
            return "required"
        return choice.function if isinstance(choice, NamedTool) else choice


class Embedding(Open):
    """A body of /v1/embeddings."""

    model: str | None = None
    input: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=2048)]
        | Annotated[list[int], Field(fail_fast=True, min_length=1)]
        | Annotated[
            list[Annotated[list[int], Field(fail_fast=True, min_length=1)]],
            Field(fail_fast=True, min_length=1, max_length=2048),
        ]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: Annotated[str, Field(max_length=256)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None


def unknown_keys(body: object, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, name) of the keys of a request that are not declared; a message's are the chat template's.

    >>> list(unknown_keys(Embedding.model_validate({"input": "a", "user": "me"})))
    [('user', 'user')]
    """
    if isinstance(body, list):
        for i, value in enumerate(body):
            yield from unknown_keys(value, f"{path}[{i}]")
    if not isinstance(body, BaseModel) or isinstance(body, Message):
        return
    before = f"{path}." if path else ""
    for name in body.model_extra or ():
        yield before + name, name
    for name in body.model_fields_set & type(body).model_fields.keys():
        yield from unknown_keys(getattr(body, name), before + name)


def parse(kind: type[Sent], body: object) -> Sent:
    """The request of a body.

    Raises:
      HttpError: 400, naming the argument at fault.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        where = str(faults[0]["loc"][0]) if faults[0]["loc"] else None
        # One for each form that the argument may have.
        texts = dict.fromkeys(e["msg"] for e in faults if not where or str(e["loc"][0]) == where)
        raise HttpError(400, f"`{where or 'body'}`: {'; '.join(texts)[:1000]}.", where) from error
    except RecursionError as error:
        raise HttpError(400, "the body is nested too deeply.") from error
