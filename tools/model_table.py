"""Writes the tables of docs/models.md: families, and what becomes of published `config.json` files.

    python tools/model_table.py [WORLD]

WORLD is the folder whose `configs/*/config.json` are read; `VISHWAMAI_WORLD`, or `../shared/world` next to the clone.
"""

from __future__ import annotations

import collections
import json
import os
import re
import sys
from pathlib import Path

from vishwamai import ShapeError, UnsupportedError
from vishwamai.models import ModelConfig

ROOT = Path(__file__).parents[1]
WORLD = Path(os.environ.get("VISHWAMAI_WORLD", ROOT.parent / "shared" / "world"))
PAGE = ROOT / "docs" / "models.md"
START, END = "<!-- published configurations: tools/model_table.py -->", "<!-- end -->"


def result(path: Path) -> str:
    """The family that a published file loads as, or the key that is declined."""
    try:
        return f"`{ModelConfig.from_dict(json.loads(path.read_text())).family}`"
    except (ShapeError, UnsupportedError) as error:
        return f"declined: `{re.findall('`([^`]*)`', str(error))[0]}`"


def table(world: Path) -> str:
    """The table of the files in a world folder."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for path in sorted((world / "configs").glob("*/config.json")):
        values = json.loads(path.read_text())
        kind = f"`{values.get('model_type')}`"
        nested = (values.get("text_config") or {}).get("model_type")
        counts[kind if nested is None else f"{kind} with `{nested}`", result(path)] += 1
    rows = [f"| {kind} | {count} | {outcome} |" for (kind, outcome), count in sorted(counts.items())]
    return "\n".join(["| `model_type` | Files | Loads as |", "|---|---|---|", *rows])


def main() -> None:
    text = PAGE.read_text()
    first, rest = text.split(START)
    world = Path(sys.argv[1]) if len(sys.argv) > 1 else WORLD
    PAGE.write_text(f"{first}{START}\n\n{table(world)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
