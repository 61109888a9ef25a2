"""Each promise of docs/security.md names tests, and they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "security.md"


def test_each_promise_names_tests_that_exist() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    promises = [row for row in rows if not row.startswith("| Promise ")]
    assert len(promises) > 30
    functions: dict[str, set[str]] = {}
    for row in promises:
        names = re.findall(r"`(\w+\.py)?::(\w+)`", row.split("|")[-2])
        assert names, f"no test: {row}"
        file = ""
        for named, function in names:
            file = named or file  # `::name` is of the file before it
            if file not in functions:
                tree = ast.parse(next(TESTS.rglob(file)).read_text(encoding="utf-8"))
                functions[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert function in functions[file], f"{file} has no {function}"
