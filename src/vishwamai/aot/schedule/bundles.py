"""Reads the final VLIW bundles that libtpu writes for every program: the text of the dump into instructions and basic
blocks.

A bundle is what one TensorCore issues in one cycle; a line of the dump is one bundle::

    0x16   :  { %322 = sbr.rel (%p483_p0) target = $region114  ;;  %s324_s8 = sld [smem:[#allocation12]] /* core id */ }

Names carry two parts: `s324` is the value, `s8` the register it lies in. Branches name a region, whose first bundle is
marked by a comment `Start region 114`; they take effect some bundles later, as many as the generation has delay slots.
Only the scalar unit, the matrix units and the cross-lane units are kept as instructions; how busy the other units are,
the compiler says itself in a second file, one row a bundle.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

UNITS = ("MATMUL", "MATPUSH", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL", "SALU")
"""Columns of the utilisation file, in its order."""


@dataclasses.dataclass(frozen=True, slots=True)
class BundleOperand:
    """An operand of a scalar instruction.

    kind "register" (value: its name), "constant" (int), "symbol" ("#allocation3"), "sum" (tuple of operands: an
    address) or "other" (text).
    """

    kind: str
    value: str | int | tuple[BundleOperand, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Predicate:
    """The register that decides whether an instruction acts, and the value that its result takes where it does not."""

    register: str
    negated: bool
    otherwise: BundleOperand | None


@dataclasses.dataclass(frozen=True, slots=True)
class Scalar:
    """An instruction of the scalar unit (arithmetic, branches, DMA, calls).

    Attributes:
        op: the opcode; `result`: name of the value it defines, or None.
        target: region of a branch, operand index of `operand`, name of a called program, the queue ("thread") of a
          copy, what a division is popped for ("kDiv", "kRem", "kDivAndRem").
    """

    op: str
    result: str | None
    predicate: Predicate | None
    operands: tuple[BundleOperand, ...] = ()
    target: int | str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Matrix:
    """A product issued to a matrix unit, or a result popped from one.

    Attributes:
        pop: bool, True for a pop; `unit`: number of the matrix unit; `buffer`: its result buffer where the generation
          has addressable ones.
        bits: width of the operands, 32, 16 or 8; `floating8`: an 8-bit float.
    """

    pop: bool
    unit: int
    buffer: int | None
    bits: int = 32
    floating8: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle:
    """What one cycle issues."""

    regions: tuple[int, ...]
    scalars: tuple[Scalar, ...]
    matrices: tuple[Matrix, ...]
    crosslane: int


_KEY_END = "= control target key end"
_HEAD = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s*(?:[A-Z]{2})?\s*:\s*>*\s*\{", re.M)
_COMMENT = re.compile(r"/\*(.*?)\*/", re.S)
_REGION = re.compile(r"(?:Start/End empty|Start) region (\d+)")
# Comments carry what the instructions mean; they are folded into marks that cannot occur in an instruction.
_MARK = re.compile(r"\x01(.*?)\x02")
_INSTRUCTION = re.compile(r"^(?:%(\S+)\s*=\s*)?([A-Za-z_][\w.\-]*)\s*(.*)$", re.S)
_ATTRIBUTE = re.compile(r"^\[(?:thread|resolvable)[^\]]*\]\s*")
_PREDICATE = re.compile(r"^\((!?)%(p\w+)(?:,\s*([^)]+))?\)$")
_IGNORED = frozenset("cld vdelay cfence sfence compiler-scheduling-barrier shalt.err vsyncpa vsyncadd vsettm".split())
_EIGHT_BITS = re.compile(r"\.(u8|s8|f8\w*|e4m3\w*|e5m2\w*|u4|s4|c\w*8)")
_FLOAT8 = re.compile(r"\.(f8\w*|e4m3\w*|e5m2\w*)")


def _fold_comment(match: re.Match[str]) -> str:
    text = match[1]
    marks = [f"\x01region {number}\x02" for number in _REGION.findall(text)]
    if "core id" in text:
        marks.append("\x01core id\x02")
    copied = re.fullmatch(r"\s*(\w+)-to-(\w+)\s*", text)
    if copied:
        marks.append(f"\x01copy dma.{copied[1]}_to_{copied[2]}\x02")
    if text.strip() in ("kDiv", "kRem", "kDivAndRem"):
        marks.append(f"\x01divide {text.strip()}\x02")
    called = re.match(r"\s*%(\S+) = ", text)
    if called:
        marks.append(f"\x01call {called[1]}\x02")
    elif text.strip().startswith("<") and text.strip().endswith(">"):
        marks.append(f"\x01call {text.strip()}\x02")
    return " ".join(marks)


def parse(text: str) -> list[Bundle]:
    """The bundles of a `...-final_bundles.txt`.

    Example:
        >>> bundle, = parse("   0x16 : { %p2_p0 = scmp.eq.s32.totalorder %s1_s6, 7 } /* Start region 3 */")
        >>> bundle.regions, bundle.scalars[0].op, bundle.scalars[0].operands[1].value
        ((3,), 'scmp.eq.s32.totalorder', 7)
    """
    if _KEY_END in text:
        text = text[text.find(_KEY_END) :]
    text = _COMMENT.sub(_fold_comment, text)
    heads = list(_HEAD.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return [_bundle(text[head.end() : end]) for head, end in zip(heads, ends)]


def _bundle(text: str) -> Bundle:
    regions = tuple(int(mark.split()[1]) for mark in _MARK.findall(text) if mark.startswith("region"))
    close = text.rfind("}")
    scalars: list[Scalar] = []
    matrices: list[Matrix] = []
    crosslane = 0
    for part in (text[:close] if close >= 0 else text).split(";;"):
        marks = [mark for mark in _MARK.findall(part) if not mark.startswith("region")]
        match = _INSTRUCTION.match(_MARK.sub("", part).strip())
        if match is None:
            continue
        result, op, rest = match[1], match[2], match[3].strip()
        if op.startswith("vmatmul") or (op.startswith("vpop") and ("mrf" in op or "mrb" in part)):
            matrices.append(_matrix(op, part))
        elif ".xlu" in op and not op.startswith("vpop"):
            crosslane += 1
        elif (op[0] == "v" and not op.startswith("vsync")) or op in _IGNORED:
            continue
        else:
            scalars.append(_scalar(op, result, rest, marks))
    # Phis read what the bundle before left; a cast may rename a value that the same bundle defines.
    scalars.sort(key=lambda s: 0 if s.op in ("sphi", "pphi") else 2 if s.op.startswith("int_to_ptr") else 1)
    return Bundle(regions, tuple(scalars), tuple(matrices), crosslane)


def _matrix(op: str, text: str) -> Matrix:
    unit = re.search(r"mxu(\d)", text)
    buffer = re.search(r"mrb\[(\d+)\]", text)
    bits = 16 if ".bf16" in op or ".f16" in op else 8 if _EIGHT_BITS.search(op) else 32
    return Matrix(
        pop=op.startswith("vpop"),
        unit=int(unit[1]) if unit else 0,
        buffer=int(buffer[1]) if buffer else None,
        bits=bits,
        floating8=bool(_FLOAT8.search(op)),
    )


def _scalar(op: str, result: str | None, rest: str, marks: Sequence[str]) -> Scalar:
    named = re.match(r"\[thread:\$(\d+)\]", rest)
    thread = int(named[1]) if named else None
    predicate, rest = _predicate(rest)
    called = next((mark.split(maxsplit=1)[1] for mark in marks if mark.startswith("call")), None)
    if op == "dma.general":  # strided; between which memories, only the comment says
        op = next((mark.split()[1] for mark in marks if mark.startswith("copy")), op)
    if op == "sbr.rel":
        region = re.search(r"region(\d+)", rest)
        return Scalar(op, None, predicate, target=int(region[1]) if region else None)
    if op.startswith("inlined_call_operand"):
        index = re.search(r"index: (\d+)", rest)
        space = "register" if "no memory space" in rest else op.rsplit(".", 1)[-1]
        return Scalar(f"operand.{space}", result, predicate, target=int(index[1]) if index else -1)
    if op == "inlined_call":
        return Scalar(op, result, predicate, tuple(_operands(rest)), called)
    if op in ("sphi", "pphi"):
        return Scalar(op, result, predicate)
    if op.startswith("sdivrem"):
        division = next((mark.split()[1] for mark in marks if mark.startswith("divide")), "kDivAndRem")
        return Scalar(op, result, predicate, tuple(_operands(rest)), division)
    if op == "sld" and "core id" in marks:
        return Scalar("core id", result, predicate)
    return Scalar(op, result, predicate, tuple(_operands(rest)), thread)


def _predicate(rest: str) -> tuple[Predicate | None, str]:
    """Takes the predicate off the operands: leading `(!%p3, %s4)`, or trailing as in `vld [...] (%p1)`."""
    rest = _ATTRIBUTE.sub("", rest)
    predicate = None
    if rest.startswith("("):
        end = rest.find(")")
        match = _PREDICATE.match(rest[: end + 1])
        if match:
            predicate = Predicate(match[2], match[1] == "!", _operand(match[3]) if match[3] else None)
            rest = rest[end + 1 :].lstrip(" ,")
    rest = _ATTRIBUTE.sub("", rest)
    trailing = re.search(r"\((!?)%(p\w+)\)", rest)
    if trailing and predicate is None:
        predicate = Predicate(trailing[2], trailing[1] == "!", None)
        rest = (rest[: trailing.start()] + rest[trailing.end() :]).replace(" ,", ",")
    return predicate, rest


def _split(text: str) -> list[str]:
    """Splits at the commas that stand outside brackets."""
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char in "[(") - (char in "])")
        if char == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    return [*parts, current.strip()] if current.strip() else parts


def _closing(text: str) -> int:
    """Index of the bracket that closes the first one in `text`."""
    depth = 0
    for index, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth == 0 and char == "]":
            return index
    return len(text) - 1


def _operands(text: str) -> list[BundleOperand]:
    operands = []
    for part in _split(text):
        part = re.sub(r"\s+sm:.*$", "", part)
        if part.startswith("[smem:") and "]" in part:
            end = _closing(part)
            operands.append(_operand(part[: end + 1]))
            if part[end + 1 :].strip():
                operands.append(_operand(part[end + 1 :]))
        else:
            operands.append(_operand(_ATTRIBUTE.sub("", part)))
    return operands


def _operand(text: str) -> BundleOperand:
    text = text.strip()
    if re.fullmatch(r"%\w+", text):
        return BundleOperand("register", text[1:])
    if re.fullmatch(r"-?\d+", text):
        return BundleOperand("constant", int(text) & 0xFFFFFFFF if text[0] == "-" else int(text))
    match = re.fullmatch(r"\$?(0x[0-9a-f]+)", text)
    if match:
        return BundleOperand("constant", int(match[1], 16))
    match = re.fullmatch(r"\[(?:\w+:)?\[?(.*?)\]?\]", text)
    if match:
        return BundleOperand("sum", tuple(_operand(part) for part in match[1].split(" + ")))
    if text.startswith("#"):
        return BundleOperand("symbol", text)
    if re.fullmatch(r"\$\w+", text):
        return BundleOperand("constant", int(text[1:], 0))
    return BundleOperand("other", text)


@dataclasses.dataclass(frozen=True)
class Utilisation:
    """How the compiler fills its units: capacity per bundle, and one row of counts for every bundle, both in the order
    of `UNITS`.
    """

    capacity: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]


def parse_utilisation(text: str, bundles: int) -> Utilisation:
    """Reads a `...hlo-static-per-bundle-utilization.txt`; missing rows count nothing.

    The columns go by the names that the file has. Before 0.0.51, libtpu had one for products and weights pushed, "MXU",
    which counts as the products' here. Where another unit of `UNITS` has no column, rows are as the file has them.
    """
    names: list[str] = []
    table: list[list[int]] = []  # the capacity, then a row for each bundle
    for line in text.splitlines():
        if re.fullmatch(r"[\d\s]+", line) and line.strip():
            table.append([int(number) for number in line.split()])
        elif not names and not line.startswith("=="):
            names = [name.strip() for name in line.split(",")]
    if "MXU" in names:
        names[names.index("MXU")] = "MATMUL"
        names, table = [*names, "MATPUSH"], [[*row, 0] for row in table]
    if set(UNITS) <= set(names):
        places = [names.index(unit) for unit in UNITS]
        table = [[row[place] for place in places] for row in table if len(row) == len(names)]
    capacity, *rows = (tuple(row) for row in table) if table else ((0,) * len(UNITS),)
    rows = rows[:bundles] + [(0,) * len(capacity)] * (bundles - len(rows))
    return Utilisation(capacity, tuple(rows))


def block_starts(bundles: Sequence[Bundle], branch_delay: int) -> tuple[list[int], dict[int, int]]:
    """Where basic blocks begin, in ascending order, and the bundle at which each region begins.

    `branch_delay` bundles after a branch still issue.
    """
    region_at: dict[int, int] = {}
    for index, bundle in enumerate(bundles):
        for region in bundle.regions:
            region_at.setdefault(region, index)
    starts = {0}
    for index, bundle in enumerate(bundles):
        for scalar in bundle.scalars:
            if scalar.op == "sbr.rel":
                starts.add(index + 1 + branch_delay)
                if isinstance(scalar.target, int) and scalar.target in region_at:
                    starts.add(region_at[scalar.target])
    return sorted(start for start in starts if start < len(bundles)), region_at
