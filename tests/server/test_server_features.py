"""The table of features: what it says of this server has a test, and its routes and options exist."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from vishwamai.cli import command_parser
from vishwamai.inference import Settings, make_app
from vishwamai.inference.server import routes

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("serving*.md"))
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/serving-features.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| Feature")
]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_shown_by_a_test(row):
    feature, here, *others, source = row
    assert here in ("yes", "no") and all(mark in ("yes", "no", "part", "-") for mark in others)
    assert (source == "-") == (here == "no")
    if here == "yes":
        file, _, name = source.strip("`").partition("::")
        tree = ast.parse((ROOT / file).read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in names if name else any(test.startswith("test_") for test in names)


def test_routes_and_options_of_the_table_exist():
    words = {word for row in ROWS for word in re.findall(r"`([^`]+)`", row[0])}
    options = {option for action in command_parser("serve")._actions for option in action.option_strings}
    assert {word for word in words if word.startswith("--")} <= options
    app: Any = make_app(None, Settings("tiny"))
    source = Path(routes.__file__).read_text()
    paths = {route.path for route in app.routes} | set(re.findall(r'"(/[\w/]+)"', source))
    assert {word for word in words if word.startswith("/")} <= paths


def test_pages_are_short_and_in_the_contents():
    contents = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert len(page.read_text().splitlines()) <= 200 and page.name in contents, page.name
