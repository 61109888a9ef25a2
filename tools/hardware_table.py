"""Writes docs/hardware.md from tools/hardware.toml, the one place that says what ran on which hardware.

python tools/hardware_table.py
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "hardware.md"
RAN = {
    "measured": "numbers and speed measured",
    "numbers": "numbers checked",
    "compiled": "compiled, never run",
    "parsed": "sources checked, never linked or run",
}


def page() -> str:
    devices = tomllib.loads((ROOT / "tools" / "hardware.toml").read_text(encoding="utf-8"))["device"]
    rows = [f"| {d['name']} | {RAN[d['ran']]} | {d['what']} | [more]({d['page']}) |" for d in devices]
    return "\n".join(
        [
            "# Hardware",
            "",
            "What ran where. A figure of another page is a measurement only where this table says so.",
            "`tools/hardware_table.py` writes this page from `tools/hardware.toml`.",
            "",
            "| Hardware | State | What | Page |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
