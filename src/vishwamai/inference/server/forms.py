"""How families of models write tool calls and reasoning: data, found by the text of a chat template.

`reading` reads an answer by it, `tools` makes grammars of it. The marks may be special tokens of the model or text.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

Kind = Literal["json", "object", "pairs", "python", "braces", "harmony"]


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Arguments that are written one by one, between marks.

    Attributes:
      begin: a regular expression of what comes before a value; `key` is its name, `string` "true" or "false" where the
        family says whether the value is a text.
      end: the mark behind a value.
      pad: around a value, and no part of it.
      template: text before a value, with `{key}` and `{string}`, for grammars.
      gap: text behind the end, for grammars.
    """

    begin: str
    end: str
    pad: str = ""
    template: str = ""
    gap: str = ""


@dataclasses.dataclass(frozen=True)
class Form:
    """How one family writes calls.

    Attributes:
      sections: (begin, end) of what holds calls. An empty begin stands for the start of an answer that `lead` begins;
        an empty end: nothing ends it.
      header: a regular expression of what comes before the arguments; `name` is the function's.
      arguments: "json": a JSON text; "object": the JSON object that has the name, too; "pairs": one by one; "python":
        Python's keyword arguments; "braces": Gemma's objects with bare names; "harmony": OpenAI's channels.
      between: a regular expression of what may come before, between and behind calls.
      lead: characters that begin a call where nothing marks it.
      pairs: marks of "pairs".
      quotes: delimiters of texts in "python" and "braces".
      template: (before, after) the arguments of a call, for grammars; `{name}` is the function's. None: no grammar.
      wrap: (before, between, after) all calls of a section, for grammars.
      several: a section may have several calls.
      ids: template of the calls' ids, with `{name}` and `{index}`, where the model reads them again; "" for any.
    """

    sections: tuple[tuple[str, str], ...]
    header: str
    arguments: Kind
    between: str = r"\s+"
    lead: str = ""
    pairs: Pairs | None = None
    quotes: tuple[str, ...] = ('"',)
    template: tuple[str, str] | None = None
    wrap: tuple[str, str, str] = ("", "", "")
    several: bool = False
    ids: str = ""

    @property
    def literals(self) -> str:
        """All that calls may consist of, for a search of marks."""
        parts = [mark for section in self.sections for mark in section] + [*(self.template or ()), *self.quotes]
        pairs = [] if self.pairs is None else [self.pairs.begin.replace("\\", ""), self.pairs.end]
        return "\n".join([*parts, *pairs, self.header.replace("\\", ""), self.between.replace("\\", "")])


@dataclasses.dataclass(frozen=True)
class Thinking:
    """The marks around a family's reasoning; `ends` are further marks that end it, and are read again."""

    begin: str
    end: str
    ends: tuple[str, ...] = ()


_NAME = r"(?P<name>[\w.\-]+)"
_OBJECT = (
    r'\{\s*(?:"(?:type|id|tool_call_id)"\s*:\s*"[^"\\]*"\s*,\s*)*"(?:name|tool_name)"\s*:\s*'
    rf'"{_NAME}"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
_WRITTEN = ('{"name": "{name}", "arguments": ', "}")
_LIST = r"[\s,\[\]]+"


def _objects(begin: str, end: str = "", **options: object) -> Form:
    """JSON objects with name and arguments, in a list or not."""
    return dataclasses.replace(Form(((begin, end),), _OBJECT, "object", _LIST, template=_WRITTEN), **options)


def _invocations(begin: str, end: str, before: str, string: bool = False) -> Form:
    """`<invoke name="f"><parameter name="k">v</parameter></invoke>`."""
    typed, string_mark = (r' string="(?P<string>true|false)"', ' string="{string}"') if string else ("", "")
    pairs = Pairs(
        rf'\s*<{before}parameter name="(?P<key>[^"]+)"{typed}>',
        f"</{before}parameter>",
        template=f'<{before}parameter name="{{key}}"{string_mark}>',
        gap="\n",
    )
    return Form(
        ((begin, end),),
        rf'<{before}invoke name="{_NAME}">',
        "pairs",
        rf"(?:\s|</{before}invoke>)+",
        pairs=pairs,
        template=(f'<{before}invoke name="{{name}}">\n', f"</{before}invoke>\n"),
        wrap=("\n", "", ""),
        several=True,
    )


def _functions(begin: str, end: str, pad: str = "\n") -> Form:
    """`<function=f><parameter=k>v</parameter></function>`."""
    pairs = Pairs(
        r"\s*<parameter=(?P<key>[^>\n]+)>", "</parameter>", pad, template=f"<parameter={{key}}>{pad}", gap="\n"
    )
    return Form(
        ((begin, end),),
        rf"<function={_NAME}>",
        "pairs",
        r"(?:\s|</function>)+",
        pairs=pairs,
        template=("<function={name}>\n", "</function>\n"),
        wrap=("\n", "", ""),
    )


def _deepseek(header: str, before: str, after: str, **options: object) -> Form:
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    between, texts = r"(?:\s|```|<｜tool▁call▁end｜>)+", (before, f"{after}<｜tool▁call▁end｜>")
    return dataclasses.replace(Form(((begin, end),), header, "json", between, template=texts, several=True), **options)


FORMS: Mapping[str, Form] = {
    "hermes": _objects("<tool_call>", "</tool_call>", between=r"\s+", wrap=("\n", "", "\n")),
    "llama3_json": Form(
        (("<|python_tag|>", ""), ("<|python_start|>", "<|python_end|>"), ("", "")),
        _OBJECT,
        "object",
        r"(?:[\s;]|<\|python_end\|>)+",
        lead="{",
        template=('{"name": "{name}", "parameters": ', "}"),
    ),
    "pythonic": Form(
        (("<|python_start|>", "<|python_end|>"), ("<|tool_call_start|>", "<|tool_call_end|>"), ("", "")),
        rf"\[?\s*{_NAME}\(",
        "python",
        r"[\s,\]]+",
        lead="[",
        quotes=('"', "'"),
    ),
    "mistral": _objects("[TOOL_CALLS]", wrap=("[", ", ", "]"), several=True),
    "mistral_args": Form(
        (("[TOOL_CALLS]", ""),),
        rf"{_NAME}(?:\[CALL_ID\]\w+)?\[ARGS\]",
        "json",
        template=("{name}[ARGS]", ""),
    ),
    "qwen3_coder": _functions("<tool_call>", "</tool_call>"),
    "seed_oss": _functions("<seed:tool_call>", "</seed:tool_call>", ""),
    "functionary": Form((("<function=", "</function>"),), rf"{_NAME}>", "json", template=("{name}>", "")),
    "deepseek_v3": _deepseek(
        rf"<｜tool▁call▁begin｜>\s*function\s*<｜tool▁sep｜>{_NAME}\s*```json\s*",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```",
    ),
    "deepseek_v31": _deepseek(
        rf"<｜tool▁call▁begin｜>\s*{_NAME}<｜tool▁sep｜>", "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", ""
    ),
    "deepseek_object": _objects(
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", between=r"(?:\s|<｜tool▁call▁(?:begin|end)｜>)+",
        template=None,
    ),
    "deepseek_v32": _invocations("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜", string=True),
    "deepseek_v4": _invocations("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", "｜DSML｜", string=True),
    "glm": Form(
        (("<tool_call>", "</tool_call>"),),
        rf"{_NAME}(?=\s*<)",
        "pairs",
        pairs=Pairs(
            r"\s*<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>",
            "</arg_value>",
            template="<arg_key>{key}</arg_key>\n<arg_value>",
            gap="\n",
        ),
        template=("{name}\n", ""),
    ),
    "kimi_k2": Form(
        (("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
        rf"<\|tool_call_begin\|>\s*(?:functions\.)?{_NAME}(?::\d+)?\s*<\|tool_call_argument_begin\|>",
        "json",
        r"(?:\s|<\|tool_call_end\|>)+",
        template=(
            "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        several=True,
        ids="functions.{name}:{index}",
    ),
    "gpt_oss": Form(
        (("<|channel|>", ""),),
        "<|channel|><|message|><|constrain|><|start|><|end|><|call|>",
        "harmony",
        template=("commentary to=functions.{name} <|constrain|>json<|message|>", ""),
    ),
    "phi4_mini": Form(
        (("<|tool_call|>", "<|/tool_call|>"), ("functools", "")),
        _OBJECT,
        "object",
        _LIST,
        template=_WRITTEN,
        wrap=("[", ", ", "]"), several=True,
    ),
    "granite": _objects("<|tool_call|>", wrap=("[", ", ", "]"), several=True),
    "cohere": _objects("<|START_ACTION|>", "<|END_ACTION|>", template=None),
    "jamba": _objects("<tool_calls>", "</tool_calls>", wrap=("[", ", ", "]"), several=True),
    "gigachat": _objects("<|function_call|>"),
    "gemma4": Form(
        (("<|tool_call>", "<tool_call|>"),), rf"call:{_NAME}(?=\{{)", "braces", quotes=('<|"|>',)
    ),
    "function_gemma": Form(
        (("<start_function_call>", "<end_function_call>"),), rf"call:{_NAME}(?=\{{)", "braces", quotes=("<escape>",)
    ),
    "minimax_m2": _invocations("<minimax:tool_call>", "</minimax:tool_call>", ""),
}  # fmt: skip
"""By the names that `--tool-parser` takes."""

_SIGNS: tuple[tuple[str, str | None], ...] = (
    (r"\]<\]minimax\[>\[|<\|tools_prefix\|>|<atem:", None),  # nested marks, names as keys
    (r"<\|channel\|>(?:commentary|analysis)|commentary to=", "gpt_oss"),
    (r"｜DSML｜(?s:.*)tool_calls>", "deepseek_v4"),
    (r"｜DSML｜", "deepseek_v32"),
    (r"<｜tool▁sep｜>(?s:.*)```json|function<｜tool▁sep｜>", "deepseek_v3"),
    (r"<｜tool▁sep｜>", "deepseek_v31"),
    (r"<｜tool▁call▁begin｜>", "deepseek_object"),
    (r"<\|tool_calls_section_begin\|>", "kimi_k2"),
    (r"minimax:tool_call", "minimax_m2"),
    (r"<seed:tool_call>|seed:tool_call", "seed_oss"),
    (r"<arg_key>", "glm"),
    (r"<tool_call>(?s:.*)<function=|<function=(?s:.*)<tool_call>", "qwen3_coder"),
    (r"<function=", "functionary"),
    (r"<\|tool_call>", "gemma4"),
    (r"<start_function_call>", "function_gemma"),
    (r"\[ARGS\]", "mistral_args"),
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"<\|tool_call_start\|>|\[func_name1\(", "pythonic"),
    (r"<\|START_ACTION\|>", "cohere"),
    (r"<tool_calls>", "jamba"),
    (r"<\|function_call\|>", "gigachat"),
    (r"<tool_call>", "hermes"),
    (r"<\|tool_call\|>", "granite"),
    (r"<\|tool\|>| functools\[", "phi4_mini"),
    (r'"name": function name,\s*"parameters":', "llama3_json"),
)
"""What a chat template has of a family, the first that fits."""


THINKING: Mapping[str, Thinking] = {
    "think": Thinking("<think>", "</think>"),
    "kimi_k2": Thinking("<think>", "</think>", ("<|tool_calls_section_begin|>",)),
    "mistral": Thinking("[THINK]", "[/THINK]"),
    "seed_oss": Thinking("<seed:think>", "</seed:think>"),
    "gemma4": Thinking("<|channel>thought", "<channel|>"),
    "cohere": Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
    "minimax_m3": Thinking("<mm:think>", "</mm:think>"),
    "apriel": Thinking("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    "gpt_oss": Thinking("<|channel|>analysis<|message|>", "<|end|>"),
}
"""By the names that `--reasoning-parser` takes."""


def form_of(template: str) -> str | None:
    """The name of the form in which a model with this chat template writes calls; None for one that is not read.

    >>> form_of("<tool_call>"), form_of("[TOOL_CALLS]{{ name }}[ARGS]"), form_of("{{ messages }}")
    ('hermes', 'mistral_args', None)
    """
    return next((name for sign, name in _SIGNS if re.search(sign, template)), None)


def thinking_of(template: str) -> str | None:
    """The name of the marks around reasoning; None where a chat template has none.

    >>> thinking_of("{{ content.split('</think>')[-1] }}")
    'think'
    """
    if form_of(template) == "gpt_oss":
        return "gpt_oss"
    if "<|tool_calls_section_begin|>" in template and "</think>" in template:
        return "kimi_k2"
    return next((name for name, marks in THINKING.items() if name != "gpt_oss" and marks.end in template), None)


def opened(marks: Thinking, prompt: str) -> bool:
    """Whether a prompt ends inside of reasoning, which the answer continues.

    >>> opened(THINKING["think"], "assistant<think>"), opened(THINKING["think"], "<think></think>")
    (True, False)
    """
    begin = prompt.rfind(marks.begin)
    return begin >= 0 and marks.end not in prompt[begin:] and not prompt[begin + len(marks.begin) :].strip()


def marks_of(form: str | None, thinking: str | None, added: Mapping[str, int]) -> frozenset[int]:
    """Ids of the tokens that calls and reasoning are marked by: the text of an answer must have them.

    Args:
      form, thinking: names of `FORMS` and `THINKING`.
      added: ids of tokens that are a text of their own, by text.
    """
    literals = "" if form is None else FORMS[form].literals
    if thinking is not None:
        marks = THINKING[thinking]
        literals = "\n".join((literals, marks.begin, marks.end, *marks.ends))
    if thinking == "gpt_oss":
        literals = "\n".join((literals, FORMS["gpt_oss"].literals))
    return frozenset(id for text, id in added.items() if text and text in literals)
