"""Holds the pages to plain English: short sentences, and none of the words that CONTRIBUTING.md's word list declines.

The median sentence of a page has at most 20 words. Tables, code blocks, formulas and headings are not counted. A page
for users has no dates. The word list is the table under "## Words" of CONTRIBUTING.md: a word in code font (`words`) is
declined as code only, any other one everywhere outside code. Exit status 1 when a page breaks a rule; each error names
the file, the line and the fix.
"""

import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LIMIT = 20
PAGES = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "docs/**/*.md", "src/vishwamai/ops/*/README.md")
RECORD = "docs/notes/"  # a record of experiments: its words are checked, its sentences are not counted
WORD_LIST = "## Words"
LINES = 200
GENERATED = ("docs/support.md",)  # a table of every implementation, which may be longer than a page

FENCE = re.compile(r"^\s*(```|~~~)")
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
TEXT = re.compile(r"[^\W_]")  # a token with a letter or a digit counts as a word
END = re.compile(r"[.!?][)\"'*_]*\s+(?=[A-Z0-9`*\"'(\[$])")


def prose(page: str) -> Iterator[tuple[int, str]]:
    """The lines of a page that are prose or table rows, with their numbers; all others come as empty lines."""
    fenced = formula = comment = False
    before = ""
    for number, line in enumerate(page.splitlines(), 1):
        if FENCE.match(line):
            fenced = not fenced
            line = ""
        elif not fenced and line.strip() == "$$":
            formula = not formula
            line = ""
        elif line.startswith("<!--"):
            comment = True
        code = line.startswith(("    ", "\t")) and not before.strip()
        hidden = fenced or formula or comment or code or line.startswith(("#", ":::", ">>>", "<"))
        if comment and "-->" in line:
            comment = False
        if not code:  # an indented block goes on until a line that is not indented
            before = line
        yield number, "" if hidden else line


def sentences(page: str) -> Iterator[tuple[int, str]]:
    """The sentences of a page with the line that each begins in. A list item or a paragraph ends a sentence.

    >>> list(sentences("# Title\\n\\nOne is\\nshort. Two: `x.y` has\\n\\n| a | b |\\n\\n- three\\n- four\\n"))
    [(3, 'One is short.'), (4, 'Two: `x.y` has'), (8, 'three'), (9, 'four')]
    """
    paragraph: list[tuple[int, str]] = []
    for number, line in [*prose(page), (0, "")]:
        item = re.match(r"\s*([-*+]|\d+\.)\s+", line)
        table = line.lstrip().startswith("|")
        if item or table or not line.strip():
            yield from _split(paragraph)
            paragraph = []
        if line.strip() and not table:
            paragraph.append((number, line[item.end() :] if item else line.strip()))


def _split(paragraph: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    text, starts = "", []
    for number, line in paragraph:
        starts.append((len(text), number))
        text += line + " "
    begin = 0
    for end in [*(match.end() for match in END.finditer(text)), len(text)]:
        if text[begin:end].strip():
            yield max(number for position, number in starts if position <= begin), text[begin:end].strip()
        begin = end


def length(sentence: str) -> int:
    """The number of words. Code, a formula and the address of a link count as one word or none.

    >>> length("The [page](docs/a b.md) of `f(x, y)` has $a + b$ words.")
    7
    """
    sentence = re.sub(r"\]\([^)]*\)", "]", sentence)
    sentence = re.sub(r"`[^`]*`|\$[^$]*\$", "code", sentence)
    return sum(bool(TEXT.search(word)) for word in sentence.split())


class Declined(NamedTuple):
    """One entry of the word list."""

    word: str
    code: bool  # looked for in code font, and nowhere else
    fix: str

    def occurs_in(self, line: str) -> bool:
        """Whether a line has the word."""
        # "There is no such page" and "is no longer" are good English.
        pattern = rf"(?<!there )(?<![\w-]){re.escape(self.word)}(?![\w-])(?! longer)"
        if self.code:
            return self.word in re.findall(r"`([^`]*)`", line)
        return re.search(pattern, re.sub(r"`[^`]*`|\]\([^)]*\)", " ", line), re.IGNORECASE) is not None


def declined(contributing: str) -> list[Declined]:
    """The word list of CONTRIBUTING.md.

    >>> table = "| Write | Not |\\n|---|---|\\n| fix | mend, mended |\\n| num | `n` |"
    >>> [(entry.word, entry.code, entry.fix) for entry in declined("## Words\\n\\n" + table)]
    [('mend', False, 'fix'), ('mended', False, 'fix'), ('n', True, 'num')]
    """
    section = contributing.split(WORD_LIST + "\n", 1)[-1].split("\n## ")[0]
    words = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 2 and cells[0] != "Write":
            words += [Declined(w.strip("`"), w.startswith("`"), cells[0]) for w in re.split(r",\s*", cells[1])]
    return words


def errors(name: str, page: str, words: list[Declined]) -> Iterator[str]:
    """What is wrong with one page, one line for each error."""
    in_list = False
    for (number, line), raw in zip(prose(page), page.splitlines(), strict=True):
        in_list = raw.startswith(WORD_LIST) or (in_list and not raw.startswith("## "))
        for entry in () if in_list else words:
            if entry.occurs_in(line):
                yield (
                    f"{name}:{number}: {entry.word!r} is a declined word; write: {entry.fix} (CONTRIBUTING.md, "
                    f"{WORD_LIST[3:]})"
                )
    if name.startswith(RECORD):
        return
    for number, line in prose(page):
        if name.startswith("docs/") and (date := DATE.search(line)):
            yield f"{name}:{number}: {date[0]} is a date; write it in {RECORD}dates.md, and here the versions"
    count = len(page.splitlines())
    if name.startswith("docs/") and name not in GENERATED and count > LINES:
        yield f"{name}:{LINES}: the page has {count} lines, and may have {LINES}; split it, or move records to {RECORD}"
    lengths = [(length(sentence), number, sentence) for number, sentence in sentences(page)]
    if lengths and (median := statistics.median(count for count, _, _ in lengths)) > LIMIT:
        count, number, sentence = max(lengths)
        yield (
            f"{name}:{number}: the median sentence of the page has {median:g} words, and may have {LIMIT}; "
            f"split the longest sentences, first this one of {count} words: {sentence[:100]!r}"
        )


def main(root: Path) -> int:
    words = declined((root / "CONTRIBUTING.md").read_text())
    complaints = []
    for pattern in PAGES:
        for path in sorted(root.glob(pattern)):
            complaints += errors(path.relative_to(root).as_posix(), path.read_text(), words)
    print(*complaints, sep="\n", end="\n" if complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent))
