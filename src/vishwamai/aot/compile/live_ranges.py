"""The live ranges of a program in a TPU's memory at its peak, as the compiler writes them.

libtpu writes them as text when it is asked to dump a program, before it declines one that does not fit: which arrays
are alive at the peak, where each lies, and the program whose instructions made them. The forms were collected from
libtpu 0.0.51; texts of another form are an error that says so.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from vishwamai.core.errors import KernelError
from vishwamai.core.hlo import Instruction, parse_module

OPTIONS = {"xla_dump_hlo_as_text": True}
"""Options of the compiler with which `read_dump` finds what it needs; `xla_dump_to` names the directory."""

_SUFFIXES = ("live-range.txt", "buffer-assignment.txt", "")
_VALUE = re.compile(r"^ value: <\d+ (.+?) @\d+> \(size=(\d+),offset=(\d+)\): (\S+)", re.M)
_ALLOCATION = re.compile(r"^allocation (\d+): size \d+,(?: color (\d+),)?.*$", re.M)
_OURS = ("core", "ops", "aot", "planning")  # what traces and compiles a function of the caller's, or of a library
_FRAMEWORK = ("/jax/", "/jaxlib/", "/flax/", "/optax/", *(f"/vishwamai/{package}/" for package in _OURS))


def read_dump(directory: pathlib.Path) -> list[dict[str, Any]]:
    """The arrays in HBM at the peak: bytes, shape, number of the argument or None, source, line, and the pass that made
    it, "forward", "backward" or "".

    Raises:
      KernelError: the compiler wrote no live ranges, or in another form.
    """
    texts = {}
    for suffix in _SUFFIXES:
        name = f"after_optimizations-{suffix}" if suffix else "after_optimizations.txt"
        matches = sorted(directory.glob(f"*.{name}"))
        if not matches:
            raise KernelError(f"the installed libtpu wrote no {name}, from which the peak would be read.")
        texts[suffix] = matches[-1].read_text(errors="replace")
    peak = re.search(r"Live ranges at \d+ \(peak\):\n((?:    .*\n?)*)", texts["live-range.txt"])
    live = re.findall(r"^    (\S+): (\d+) bytes", peak[1], re.M) if peak else []
    if not live:
        raise KernelError("the installed libtpu wrote live ranges in an unknown form, so the peak is not read.")
    places = _places(texts["buffer-assignment.txt"])
    program = _Origins(texts[""], places)
    arrays = []
    for shape_name, size in live:
        name = shape_name.removesuffix("{}")
        place = places.get(name)
        if place is not None and place.hbm and int(size):
            arrays.append({"nbytes": int(size), "shape": place.shape, **program.origin(name)})
    return arrays


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a value lies: its allocation, offset and size; `shape` without its layout."""

    allocation: str
    offset: str
    size: str
    shape: str
    hbm: bool


def _places(text: str) -> dict[str, _Place]:
    places = {}
    starts = [*_ALLOCATION.finditer(text)]
    for start, end in zip(starts, [*(s.start() for s in starts[1:]), len(text)]):
        for name, size, offset, shape in _VALUE.findall(text, start.end(), end):
            short = re.sub(r"\{[^}]*\}", "", shape)
            hbm = start[2] is None and not re.search(r"S\([1-9]", shape)
            places[name.removesuffix("{}")] = _Place(start[1], offset, size, short, hbm)
    return places


_PASSES = {"get-tuple-element", "bitcast", "copy", "copy-start", "copy-done"}
"""Opcodes whose result is their operand, or a part of it."""


class _Origins:
    """Where the values of a program come from."""

    def __init__(self, text: str, places: Mapping[str, _Place]):
        self.every = parse_module(text).by_name
        self.lines = _Lines(text)
        self.sharing: dict[tuple[str, str, str], list[str]] = {}
        for name, place in places.items():
            self.sharing.setdefault((place.allocation, place.offset, place.size), []).append(name)
        self.places = places

    def origin(self, name: str) -> dict[str, Any]:
        """Number of the argument, source, line and pass of a value."""
        instruction = self.every.get(name.partition("{")[0])
        if instruction is None:
            return {"argument": None, "source": "", "where": "", "pass": ""}
        argument = re.match(r"args\[(\d+)\]", instruction.source)
        if instruction.opcode == "parameter" and argument:
            return {"argument": int(argument[1]), "source": "", "where": "", "pass": ""}
        filler, instruction = self._writer(name, instruction)
        direction = "backward" if "transpose(" in filler.source else "forward" if "jvp(" in filler.source else ""
        source = operation(instruction.source) or self._unnamed(instruction)
        return {"argument": None, "source": source, "where": self.lines.of(instruction), "pass": direction}

    def _unnamed(self, instruction: Instruction) -> str:
        """What the compiler made by itself: its opcode, with the argument that it is made of."""
        root, seen = instruction, 0
        while root.opcode != "parameter" and len(root.operands) == 1 and root.operands[0] in self.every and seen < 8:
            root, seen = self.every[root.operands[0]], seen + 1
        match = re.match(r"args\[\d+\]", root.source)
        return f"{instruction.opcode} of {match[0]}" if root.opcode == "parameter" and match else instruction.opcode

    def _writer(self, name: str, instruction: Instruction) -> tuple[Instruction, Instruction]:
        """What fills a value, and what made its content: an empty buffer is filled by the turns of a loop."""
        if not (instruction.target == "AllocateBuffer" or instruction.opcode == "broadcast"):
            return instruction, instruction
        place = self.places[name]
        for value in self.sharing[place.allocation, place.offset, place.size]:
            writer = self.every.get(value.partition("{")[0])
            if writer is None or "dynamic_update_slice" not in writer.source:
                continue
            parts = [self.every[operand] for operand in writer.operands if operand in self.every]
            sizes = [(part.nbytes, self._named(part)) for part in parts if 4 < part.nbytes < instruction.nbytes]
            named = [(nbytes, source) for nbytes, source in sizes if source is not None]
            source = max(named, key=lambda entry: entry[0], default=(0, writer))[1]
            return writer, source
        return instruction, instruction

    def _named(self, instruction: Instruction) -> Instruction | None:
        """The instruction whose source names an operation, through those that only pass its result on."""
        for _ in range(8):
            if operation(instruction.source):
                return instruction
            operands = [self.every[operand] for operand in instruction.operands if operand in self.every]
            if instruction.opcode not in _PASSES or not operands:
                return None
            instruction = operands[0]
        return None


class _Lines:
    """Lines of the source, from the tables at the head of a program's text."""

    def __init__(self, text: str):
        def table(name: str, row: str) -> dict[str, tuple[str, ...]]:
            match = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.M)
            lines = match[1].splitlines() if match else []
            return {line.partition(" ")[0]: m.groups() for line in lines if (m := re.search(row, line))}

        self.files = table("FileNames", r'"(.*)"')
        self.locations = table("FileLocations", r"file_name_id=(\d+) .*? line=(\d+)")
        self.frames = table("StackFrames", r"file_location_id=(\d+)(?: parent_frame_id=(\d+))?")

    def of(self, instruction: Instruction) -> str:
        """The innermost line that is not one of the framework's, such as "blocks.py:123"."""
        frame, seen = instruction.frame, set()
        while frame in self.frames and frame not in seen:
            seen.add(frame)
            location, parent = self.frames[frame]
            file, line = self.locations.get(location, ("", ""))
            name = self.files.get(file, ("",))[0]
            if name and not any(part in name for part in _FRAMEWORK):
                return f"{name.rpartition('/')[2]}:{line}"
            frame = parent
        return ""


@functools.lru_cache(maxsize=4096)
def operation(source: str) -> str:
    """The operation that a source of the compiler names, with its scopes, without what JAX puts around it.

    >>> operation("jit(call)/call_exported/jit(step)/jvp(mixer)/while/body/closed_call/attention_forward/pallas_call")
    'mixer/attention_forward'
    >>> operation("jit(call)/call_exported/jit(f)/transpose(jvp())/while/body/dot_general")
    'dot_general'
    """
    parts = []
    for part in source.split("/"):
        while (wrapped := re.fullmatch(r"(?:jvp|transpose|vmap|checkpoint|remat)\((.*)\)", part)) is not None:
            part = wrapped[1]
        if part and not re.fullmatch(_AROUND, part):
            parts.append(part)
    return "/".join(parts[-3:])


_AROUND = (
    r"jit\(.*\)|call_exported|while|body|cond|closed_call|branch_\d+_fun|checkpoint|remat\d*|rematted_computation|"
    r"pallas_call|custom_[vj][jv]p_call|shard_map|core_call|pjit|args\[\d+\]"
)
