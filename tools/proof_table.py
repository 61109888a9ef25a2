"""Writes the table of docs/models-proofs.md: which tests run on which family, as pytest's parameters name them.

python tools/proof_table.py
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vishwamai.models.families import FAMILIES
from vishwamai.models.text_part import WRAPPERS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models-proofs.md"
TABLE_AT = "<!-- proofs: tools/proof_table.py -->", "<!-- end of proofs -->"

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "models")]

families, forms, renamed, published = (
    importlib.import_module(f"test_models_{name}") for name in ("families", "forms", "renamed", "world")
)

PROOFS: Mapping[str, tuple[Callable[..., None], ...]] = {
    "logits": (
        families.test_logits_are_those_of_transformers,
        renamed.test_a_published_file_gives_the_logits_of_its_like,
        published.test_the_text_part_of_a_vision_model_loads,
    ),
    "files": (
        families.test_logits_are_those_of_transformers,
        renamed.test_a_published_file_gives_the_logits_of_its_like,
    ),
    "pages": (families.test_tokens_over_pages_and_states_are_those_of_transformers,),
    "engine": (families.test_the_engine_gives_the_tokens_of_transformers,),
    "gradients": (forms.test_gradients_are_those_of_transformers,),
    "LoRA": (forms.test_adapters_of_peft_give_its_logits,),
    "int8, int4": (forms.test_rounded_weights_give_the_logits_of_what_they_stand_for,),
    "two devices": (forms.test_two_devices_give_the_logits_of_transformers,),
}
"""Tests by the column that they fill."""


def cases(test: Callable[..., None]) -> set[str]:
    """Families that a test runs on: the first of each of its parameters, without the variant after a comma."""
    marks: list[Any] = getattr(test, "pytestmark", [])
    (names,) = (mark.args[1] for mark in marks if mark.name == "parametrize")
    firsts = (getattr(name, "values", (name,))[0].split(",")[0] for name in names)
    return {WRAPPERS.get(name, name) for name in firsts}


def table() -> str:
    """A row of each family, with the tests that run on it."""
    columns: dict[str, set[str]] = {title: set().union(*map(cases, tests)) for title, tests in PROOFS.items()}
    columns["published"] = published.sized_families()
    rows = [
        f"| `{family}` | {' | '.join('yes' if family in column else '' for column in columns.values())} |"
        for family in sorted(FAMILIES)
    ]
    return "\n".join([f"| `model_type` | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|", *rows])


def replaced(text: str) -> str:
    """The page with the table between its two comments."""
    first, rest = text.split(TABLE_AT[0])
    return f"{first}{TABLE_AT[0]}\n\n{table()}\n\n{TABLE_AT[1]}{rest.split(TABLE_AT[1])[1]}"


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text()))
