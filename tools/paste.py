"""Runs the Python blocks of pages as a reader would paste them, with the Python that runs this script.

A page's blocks run in order and share their names. Left out, and named with the reason, is a block that imports what
is not installed, and one that needs a name of such a block. `<!--- skip: next -->` above a block leaves it out, as in
the tests.

python tools/paste.py README.md docs/flax.md
"""

import ast
import builtins
import doctest
import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

BLOCK = re.compile(r"^(<!--- skip: next -->\n+)?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE  # those of the tests


def blocks(page: str) -> list[str]:
    """The Python blocks of a page.

    >>> blocks("```python\\n1\\n```\\n```sh\\nls\\n```\\n<!--- skip: next -->\\n```python\\n2\\n```\\n")
    ['1\\n']
    """
    return [text for skipped, text in BLOCK.findall(page) if not skipped]


class Names(NamedTuple):
    """What a block imports (top-level packages), the names that it gives, and those that it takes."""

    imports: set[str]
    gives: set[str]
    takes: set[str]


def names(block: str) -> Names:
    """
    >>> found = names("import jax.numpy as jnp\\nfrom flax import nnx\\ny = jnp.sin(x)\\n")
    >>> sorted(found.imports), sorted(found.gives), sorted(found.takes)
    (['flax', 'jax'], ['jnp', 'nnx', 'y'], ['x'])
    """
    source = block
    if block.startswith(">>>"):
        source = "".join(example.source for example in doctest.DocTestParser().get_examples(block))
    imports, gives, takes = set(), set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imports |= {alias.name.partition(".")[0] for alias in node.names}
            gives |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imports.add((node.module or "").partition(".")[0])
            gives |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            gives.add(node.name)
        elif isinstance(node, ast.arg):
            gives.add(node.arg)
        elif isinstance(node, ast.Name):
            (takes if isinstance(node.ctx, ast.Load) else gives).add(node.id)
    return Names(imports, gives, takes - gives - set(dir(builtins)))


def run(block: str, place: str, scope: dict[str, Any]) -> None:
    """Runs one block; a doctest must print what it shows."""
    if not block.startswith(">>>"):
        exec(compile(block, place, "exec"), scope)
        return
    example = doctest.DocTestParser().get_doctest(block, scope, place, place, 0)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(example, clear_globs=False)
    if runner.failures:
        sys.exit(f"paste: {place} prints something else")
    scope.update(example.globs)


def paste(page: Path) -> str:
    """Runs what a page shows; what was run, and what was left out and why."""
    # A module of its own: dataclasses and pickle look their classes' modules up.
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    missing: set[str] = set()
    reasons: list[str] = []
    page_blocks = blocks(page.read_text(encoding="utf-8"))
    for number, block in enumerate(page_blocks, 1):
        uses = names(block)
        lacking = sorted(name for name in uses.imports if importlib.util.find_spec(name) is None)
        unknown = sorted(uses.takes & missing - set(vars(module)))
        if lacking or unknown:
            why = f"needs {', '.join(lacking)}" if lacking else f"needs {', '.join(unknown)} of a block left out"
            reasons.append(f"block {number} {why}")
            missing |= uses.gives
            continue
        run(block, f"{page.name}, block {number}", vars(module))
    left_out = f"; left out: {'; '.join(reasons)}" if reasons else ""
    return f"{page.name}: {len(page_blocks) - len(reasons)} of {len(page_blocks)} blocks{left_out}"


def main() -> int:
    for page in sys.argv[1:]:
        print(paste(Path(page)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
