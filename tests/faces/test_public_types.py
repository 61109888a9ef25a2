"""The types of public functions: overloads say of every parameter what the function itself says, but for their flag;
and the names that docs/api.md promises are there, at most fifteen a package.
"""

import importlib
import inspect
import re
import typing
from pathlib import Path

import pytest

import vishwamai

FLAGS = {
    "apply_rope": "x",
    "flash_attention": "return_lse",
    "flash_attention_varlen": "return_lse",
    "layer_norm": "residual",
    "linear_cross_entropy": "return_logsumexp",
    "ragged_paged_attention": "return_lse",
    "rms_norm": "residual",
}
PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text()
SECTIONS = dict(re.findall(r"^## `(vishwamai\.\w+)`[^\n]*\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_overloads_say_what_the_function_says(name):
    function = inspect.unwrap(getattr(vishwamai, name))
    declared = inspect.signature(function).parameters
    overloads = typing.get_overloads(function)
    results = [inspect.signature(one).return_annotation for one in overloads]
    assert results[:2].count("Any") == 0 and results[0] != results[1]
    assert results[2:] == (["Any"] if FLAGS[name].startswith("return") else [])  # a flag that is not known
    for one in overloads:
        parameters = inspect.signature(one).parameters
        assert list(parameters) == list(declared)
        assert [p for p in parameters.values() if p.name != FLAGS[name]] == [
            p for p in declared.values() if p.name != FLAGS[name]
        ]


def test_each_package_promises_at_most_fifteen_names_that_exist():
    assert set(SECTIONS) == {
        f"vishwamai.{name}" for name in ("inference", "models", "parallel", "planning", "training")
    }
    for module, text in SECTIONS.items():
        names = re.findall(r"^\| `(\w+)` \|", text, re.M)
        assert 5 <= len(names) <= 15 and len(set(names)) == len(names), module
        package = importlib.import_module(module)
        assert all(hasattr(package, name) for name in names), module
        if module != "vishwamai.parallel":  # whose other names serve the pages of their own
            assert set(names) == set(package.__all__), module
        assert "```python" in text, module
