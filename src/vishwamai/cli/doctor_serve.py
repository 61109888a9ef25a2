"""`vishwamai doctor --serve [MODEL]`: what bounds a server on this CPU, in less than a minute, and options for it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

from vishwamai.cli import options
from vishwamai.cli.console import tell
from vishwamai.cli.progress import say
from vishwamai.core.hardware import binding, host_limits
from vishwamai.core.hardware.nodes import memory_nodes, ranges, usable_processors
from vishwamai.core.numbers import human

if TYPE_CHECKING:
    from vishwamai.inference import Load
    from vishwamai.models.config import ModelConfig

FORMS = ("bfloat16", "int8", "int4")
"""Forms of weights, the best quality first."""
_READING = 10.0
"""Tokens/s that a reader follows: a form of worse quality is not recommended for more."""
_TOKENS, _LENGTH, _MOST = 512, 4096, 32
"""Tokens before the one whose bytes are counted, tokens of a sequence, and sequences at once of `serve`."""


@dataclasses.dataclass(frozen=True)
class Host:
    """What was measured and read.

    Attributes:
      processors: numbers of those that this process may use.
      cores: number of cores that these belong to.
      nodes: processors of each memory node that has some, as Linux lists them, by the node's number.
      copy_one, copy_all: bytes/s that copies read and write, by one processor and by one of each core.
      copy_nodes: the same of each node, by its number, where there are several.
      all_cores, slow: figures of `measure.host.Clocks`.
      huge_pages: mode of transparent huge pages, or None.
      quota: processors' worth of time of the control group, or None.
      memory: bytes that are available, within the control group's limit.
      governors: names of the clocks' governors.
      others: processors that other processes used meanwhile; None where that is not known.
    """

    processors: tuple[int, ...]
    cores: int
    nodes: dict[int, str]
    copy_one: float
    copy_all: float
    copy_nodes: dict[int, float]
    all_cores: float
    slow: float
    huge_pages: str | None
    quota: float | None
    memory: int | None
    governors: tuple[str, ...]
    others: float | None


@dataclasses.dataclass(frozen=True)
class Form:
    """A model in a form of weights.

    Attributes:
      name: one of `FORMS`.
      weights: bytes of the weights.
      token: bytes that a token needs after `_TOKENS` others.
      sequence: bytes of the keys, values and states of a sequence of `_LENGTH` tokens.
      step: bytes of the largest step's activations.
    """

    name: str
    weights: int
    token: int
    sequence: int
    step: int


@dataclasses.dataclass(frozen=True)
class Advice:
    """An option of `serve`, or a setting of the system; `value` None leaves the default."""

    option: str
    value: str | None
    reason: str


def run(directory: Path | None, json: Path | None) -> int:
    say("measuring copies and clocks, about 10 s")
    host = measure()
    forms = []
    if directory is not None:
        say(f"reading the sizes of {directory}")
        forms = sizes(directory)
    advice = recommend(host, forms)
    rates = {form.name: host.copy_all / form.token for form in forms}
    if json != options.STDOUT:
        _show(host, forms, rates, advice)
    if json is not None:
        value = {
            "host": dataclasses.asdict(host),
            "forms": [{**dataclasses.asdict(form), "most_tokens_per_s": rates[form.name]} for form in forms],
            "advice": [dataclasses.asdict(item) for item in advice],
            "command": command(advice, directory),
        }
        options.write_json(value, json)
    return 0


def measure(seconds: float = 2.0) -> Host:
    """The host's figures; `seconds` for each of its measurements."""
    from vishwamai.bench.machine import Usage
    from vishwamai.measure.host import COPY_BYTES, clocks, copy_rate

    usage = Usage()
    nodes = {number: some for number, some in enumerate(usable_processors(memory_nodes())) if some}
    processors = binding.choose(None, None).processors
    cores: dict[str, int] = {}
    for processor in processors:
        cores.setdefault(binding.siblings(processor), processor)
    leaders = tuple(cores.values())
    limits = (host_limits.memory_limit(), host_limits.available_memory())
    memory = min((limit for limit in limits if limit is not None), default=None)
    nbytes = COPY_BYTES if memory is None else min(COPY_BYTES, memory // (8 * len(leaders)))
    steady = clocks(leaders, seconds)
    of_nodes = {n: [p for p in leaders if p in some] for n, some in nodes.items()} if len(nodes) > 1 else {}
    return Host(
        processors=processors,
        cores=len(leaders),
        nodes={number: ranges(tuple(some)) for number, some in nodes.items()},
        copy_one=copy_rate(leaders[:1], seconds, nbytes),
        copy_all=copy_rate(leaders, seconds, nbytes),
        copy_nodes={n: copy_rate(some, seconds / 2, nbytes) for n, some in of_nodes.items() if some},
        all_cores=steady.all_cores,
        slow=steady.slow,
        huge_pages=host_limits.huge_pages(),
        quota=host_limits.cpu_quota(),
        memory=memory,
        governors=host_limits.governors(),
        others=usage.others(),
    )


def sizes(directory: Path) -> list[Form]:
    """Bytes of a model in each form; no weight is read.

    Raises:
      VishwamaiError: the directory is not a whole decoder.
    """
    from vishwamai.aot.compile import libtpu
    from vishwamai.cli import model
    from vishwamai.inference import plan_load

    model.require_packages()
    libtpu.local_devices()
    directory, _ = model.fetch(directory, weights=False)
    forms = []
    for name in FORMS:
        quantize = None if name == "bfloat16" else name
        planned = plan_load(
            directory, quantize=quantize, max_sequences=1, max_length=_length(directory), memory=1 << 60
        )
        forms.append(_form(name, planned))
    return forms


def _length(directory: Path) -> int:
    from vishwamai.models.config import read_config
    from vishwamai.models.gguf import model_directory

    return min(_LENGTH, read_config(model_directory(directory, weights=False)).max_positions)


def _form(name: str, planned: Load) -> Form:
    config, limits = planned.config, planned.limits
    rows = 0 if config.tie_embeddings else 2 * config.vocab_size * config.hidden_size
    cached = planned.pages / (planned.num_pages * limits.page_size) if planned.num_pages else 0.0
    state = planned.states // max(1, planned.num_states)
    token = (planned.weights - rows) * _share_read(config) + cached * _TOKENS + state
    return Form(name, planned.weights, round(token), planned.pages + state, planned.step)


def _share_read(config: ModelConfig) -> float:
    """The share of the weights that a token reads: of the experts only those that it is given to."""
    sizes = [
        (math.prod(parameter.shape), kind.feed_forward.share(config, name))
        for kind in config.layers
        for name, parameter in kind.parameters(config).items()
    ]
    top = config.vocab_size * config.hidden_size
    return (top + sum(size * share for size, share in sizes)) / (top + sum(size for size, _ in sizes))


def recommend(host: Host, forms: list[Form]) -> list[Advice]:
    """Options of `serve`, then settings of the system, each with its reason."""
    advice = [_threads(host), _numa(host)]
    if forms:
        form = _quantize(host, forms)
        advice += [form, _sequences(host, next(f for f in forms if f.name == (form.value or FORMS[0])))]
    if host.huge_pages == "never":
        fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        advice.append(Advice("huge pages", fix, "they are off, so weights and keys take a translation for each 4 KiB"))
    if slow := [name for name in host.governors if name in ("powersave", "conservative", "ondemand")]:
        reason = f"the clocks' governor is {', '.join(slow)}, which may hold them low between steps"
        advice.append(Advice("governor", "cpupower frequency-set -g performance", reason))
    return advice


def _threads(host: Host) -> Advice:
    if host.quota is not None and host.quota < host.cores:
        count = max(1, math.floor(host.quota))
        reason = f"the control group has time for {host.quota:g} processors; more threads are stopped within a step"
        return Advice("--threads", str(count), reason)
    if host.cores < len(host.processors):
        reason = f"{len(host.processors)} processors are {host.cores} cores; second threads of a core share its units"
        return Advice("--threads", str(host.cores), reason)
    return Advice("--threads", None, f"each of the {host.cores} processors is a core, and no quota is below that")


def _numa(host: Host) -> Advice:
    if not host.copy_nodes:
        return Advice("--numa", None, "there is one memory node")
    node, best = max(host.copy_nodes.items(), key=lambda item: item[1])
    gain = host.copy_all / best
    figures = f"all nodes copy {gain:.2f} times as fast as node {node} by itself"
    if gain < 1.3:
        return Advice("--numa", str(node), f"{figures}; one node needs no memory of another")
    return Advice("--numa", None, f"{figures}; work is divided among the nodes by default")


def _quantize(host: Host, forms: list[Form]) -> Advice:
    budget = None if host.memory is None else 0.9 * host.memory
    fits = [form for form in forms if budget is None or form.weights + form.step + form.sequence <= budget]
    if not fits:
        return Advice("--quantize", FORMS[-1], "no form fits into the memory with one sequence; this is the smallest")
    rates = {form.name: host.copy_all / form.token for form in forms}
    best = fits[0]
    if rates[best.name] < _READING and best.name == FORMS[0] and len(fits) > 1:
        best = fits[1]
        reason = f"{FORMS[0]} decodes at most {rates[FORMS[0]]:.1f} tokens/s, below {_READING:g}"
    elif best is forms[0]:
        reason = f"it fits and may decode {rates[best.name]:.1f} tokens/s; a form of fewer bits loses quality"
    else:
        larger = forms[forms.index(best) - 1].name
        reason = f"{larger} does not fit into {human(host.memory or 0)} with one sequence"
    if best.name != FORMS[0]:
        reason += (
            f"; `vishwamai evaluate MODEL --quantize {best.name} --against float32 --text FILE` says what it loses"
        )
    return Advice("--quantize", None if best.name == FORMS[0] else best.name, reason)


def _sequences(host: Host, form: Form) -> Advice:
    if host.memory is None:
        return Advice("--max-sequences", None, "the available memory is not known")
    room = int((0.9 * host.memory - form.weights - form.step) // max(1, form.sequence))
    text = f"{max(0, room)} sequences of {_LENGTH} tokens fit next to the weights in {form.name}"
    if room >= _MOST:
        return Advice("--max-sequences", None, f"{text}; the default is {_MOST}")
    count = 1 << max(0, room).bit_length() - 1 if room > 0 else 1
    return Advice("--max-sequences", str(count), f"{text}; further ones would wait for pages")


def command(advice: list[Advice], directory: Path | None) -> str:
    """The command that the advice gives."""
    words = [f"{item.option} {item.value}" for item in advice if item.option.startswith("--") and item.value]
    return " ".join(["vishwamai serve", str(directory or "MODEL"), *words])


def _show(host: Host, forms: list[Form], rates: dict[str, float], advice: list[Advice]) -> None:
    nodes = "; ".join(f"{number}: {processors}" for number, processors in host.nodes.items())
    others = "not known" if host.others is None else f"{host.others:.2f} processors"
    memory = "not known" if host.memory is None else human(host.memory)
    rows = {
        "processors": f"{ranges(host.processors)}, {host.cores} cores",
        "memory nodes": nodes,
        "copies, one core": f"{host.copy_one / 1e9:.1f} GB/s read and written",
        "copies, all cores": f"{host.copy_all / 1e9:.1f} GB/s",
        **{f"copies, node {number}": f"{rate / 1e9:.1f} GB/s" for number, rate in host.copy_nodes.items()},
        "clocks": f"all cores at once run at {host.all_cores:.0%} of one core's speed; {host.slow:.0%} of the samples "
        "took 1.2 times the median or more",
        "huge pages": host.huge_pages or "not known",
        "CPU quota": "none" if host.quota is None else f"{host.quota:g} processors",
        "memory available": memory,
        "governor": ", ".join(host.governors) or "not known",
        "other processes": others,
    }
    tell("Server")
    for name, text in rows.items():
        tell(f"  {name:22}{text}")
    if host.others is not None and host.others > 0.1 * len(host.processors):
        tell("  Other processes use this machine: the figures above are lower than those of a quiet one.")
    if forms:
        tell(f"\nDecoding one sequence, after {_TOKENS} tokens: at most copies of all cores / bytes of a token")
        for form in forms:
            tell(f"  {form.name:22}{human(form.token)} a token: at most {rates[form.name]:.1f} tokens/s")
    tell("\nRecommended")
    for item in advice:
        tell(f"  {item.option:22}{item.value or 'leave it out'}: {item.reason}")
