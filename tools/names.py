"""Holds the code to names of the field: none of the pronouns and participles under "## Names" of CONTRIBUTING.md names
a function, parameter, variable or attribute, no entry of `Args:` or `Attributes:` begins with a preposition, and types
are stated: `Any` is counted.

`ceilings.toml` beside this file states how many of each a package still has; a number there may only fall. Exit status
1 when a package has more; each error names the places.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src/vishwamai/*", "capibara", "benchmarks", "tools", "examples")

SECTION = re.compile(r"\s*(Args|Attributes|Returns|Raises|Yields|Example|Examples):\s*$")
PREPOSITIONS = (
    "of as in on at to for with by from where whether what those that after before without under over next".split()
)
ENTRY = re.compile(rf"\s{{2,}}[\w`*, ]+: ({'|'.join(PREPOSITIONS)})\b")


SHOWN = 40
"""Places that an error names at most."""
FIXES = {
    "names": "a noun of the field",
    "entries": "a noun first, then its type, shape or unit",
    "Any": "a type (`vishwamai.core.types` has those of arrays, trees and references)",
}


def declined(contributing: str) -> frozenset[str]:
    """The names in the block of the section "## Names"."""
    return frozenset(contributing.split("## Names", 1)[1].split("```")[1].removeprefix("text").split())


def bound(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every function, parameter, variable and attribute that a module binds.

    >>> list(bound(ast.parse("def run(it, *these): self.own = here = 1")))
    [(1, 'run'), (1, 'it'), (1, 'these'), (1, 'own'), (1, 'here')]
    """
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.name
            if node.name.startswith("__") and node.name.endswith("__") and node.name != "__init__":
                node.args.args = []  # Python's own protocol: `__eq__(self, other)`
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def entries(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every entry under Args or Attributes that begins with a preposition."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            described, indent = False, 0  # continuation lines are indented deeper than entries
            for number, line in enumerate((ast.get_docstring(node, clean=False) or "").splitlines(), node_line(node)):
                if section := SECTION.match(line):
                    described, indent = section[1] in ("Args", "Attributes"), 0
                elif described and line.strip():
                    indent = indent or len(line) - len(line.lstrip())
                    if ENTRY.match(line) and not line[indent].isspace():
                        yield number, line.strip()


def untyped(tree: ast.AST) -> Iterator[int]:
    """Lines that use `Any`, once for each use.

    >>> list(untyped(ast.parse("def f(x: Any, y: dict[str, Any]) -> int: ...")))
    [1, 1]
    """
    return (node.lineno for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "Any")


def node_line(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The line where a node's docstring begins."""
    return node.body[0].lineno if node.body else 1


def packages(root: Path) -> Iterator[tuple[str, list[Path]]]:
    """(name, files) of every package; the modules of the top level together."""
    for pattern in FOLDERS:
        for folder in sorted(path for path in root.glob(pattern) if path.is_dir() and path.name != "__pycache__"):
            yield folder.relative_to(root).as_posix(), sorted(folder.rglob("*.py"))
    yield "src/vishwamai", sorted((root / "src/vishwamai").glob("*.py"))


def complaints(root: Path) -> Iterator[str]:
    """What exceeds the ceilings, with the first places."""
    names = declined((root / "CONTRIBUTING.md").read_text())
    ceilings = tomllib.loads((root / "tools/ceilings.toml").read_text())
    for package, files in packages(root):
        places: dict[str, list[str]] = {"names": [], "entries": [], "Any": []}
        for path in files:
            tree = ast.parse(path.read_text())
            where = path.relative_to(root)
            places["names"] += [f"{where}:{n}: `{name}`" for n, name in bound(tree) if name.strip("_") in names]
            places["entries"] += [f"{where}:{n}: {text}" for n, text in entries(tree)]
            places["Any"] += [f"{where}:{n}" for n in untyped(tree)]
        for kind, fix in FIXES.items():
            ceiling = ceilings[kind].get(package, 0)
            if len(places[kind]) > ceiling:
                yield f"{package}: {len(places[kind])} declined {kind}, {ceiling} allowed; write {fix}:"
                yield from (f"  {place}" for place in places[kind][:SHOWN])


def main() -> int:
    """Prints every complaint."""
    lines = list(complaints(ROOT))
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
