"""Draws docs/speed.svg, the picture of README.md, from the tables of docs/performance.md; `--check` compares it.

A row of the picture names a row of a table, so a figure that changes there changes here, and one that goes is an error.
"""

import argparse
import html
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE, PICTURE = ROOT / "docs/performance.md", ROOT / "docs/speed.svg"

CPU = {  # what the picture says -> (rows of the table for float32 and bfloat16), all compared with torch
    "attention": ("attention, forward, float32", "attention, forward, bfloat16"),
    "attention, with gradients": ("attention, with gradients",),
    "gemm": ("`gemm` float32", "`gemm` bfloat16"),
    "gemm, packed weights, 1 to 16 rows": ("`gemm`, packed weights, 1 to 16 rows",),
    "norms": ("norms, forward",),
    "norms, with gradients": ("norms, with gradients",),
    "softmax, activations, rope": ("softmax, activations, dropout, rope",),
    "grouped_gemm": ("`grouped_gemm`",),
}
TPU = {
    "attention": "attention, forward, 8 shapes",
    "attention, backward": "attention, backward, 8 shapes",
}
WIDTH, LEFT, TOP, BAR, GAP, LONGEST = 760, 250, 74, 13, 9, 5.2

STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1c2733; }
.title { font-size: 16px; font-weight: 600; } .soft { fill: #566472; } .line { stroke: #566472; stroke-dasharray: 4 3; }
.a { fill: #0f766e; } .b { fill: #2563eb; } .c { fill: #7c5cd6; } .worst { stroke: #ffffff; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e9ef; } .soft { fill: #9aa8b6; } .line { stroke: #9aa8b6; }
  .a { fill: #35c4b5; } .b { fill: #7aa5ff; } .c { fill: #b39dff; } .worst { stroke: #11171d; }
}
"""


class Ratio(NamedTuple):
    """How many times as fast: the geometric mean, and the worst case."""

    mean: float
    worst: float


def cell(page: str, name: str, baseline: str) -> str:
    """What a row of the page says of ours."""
    row = re.search(rf"^\| {re.escape(name)} \| ([^|]*{baseline}[^|]*)\| ([^|]*)\|", page, re.MULTILINE)
    if row is None:
        raise SystemExit(f"{PAGE}: there is no row {name!r} against {baseline!r}; speed_chart.py names it.")
    return row[2]


def ratios(text: str) -> list[Ratio]:
    """
    >>> ratios("1.64 (1.37) / 2.98 (2.33)")
    [Ratio(mean=1.64, worst=1.37), Ratio(mean=2.98, worst=2.33)]
    >>> ratios("1.16 (1.03); 1.15 (0.86) in another run")
    [Ratio(mean=1.16, worst=1.03)]
    """
    once = re.split(r"[;,]", text)[0]
    return [Ratio(float(mean), float(worst)) for mean, worst in re.findall(r"([\d.]+) \(([\d.]+)", once)]


def picture(page: str) -> str:
    cpu = {label: [r for name in names for r in ratios(cell(page, name, "torch"))] for label, names in CPU.items()}
    tpu = {}
    for label, name in TPU.items():
        mean, worst = re.findall(r"\d\.\d+", cell(page, name, "the "))[:2]
        tpu[label] = [Ratio(1 / float(mean), 1 / float(worst))]
    shapes, y = [], TOP
    keys = (("a", "float32"), ("b", "bfloat16"))
    y = group(shapes, y, "CPU, measured: times as fast as torch", cpu, [c for c, _ in keys])
    note = "TPU, estimated from the compiler's schedule: times as fast as the best of jax and Tokamax, bfloat16"
    y = group(shapes, y + 14, note, tpu, ["c"])
    legend = "".join(
        f'<rect class="{style}" x="{LEFT + i * 90}" y="34" width="12" height="12"/>'
        f'<text x="{LEFT + i * 90 + 18}" y="45">{name}</text>'
        for i, (style, name) in enumerate(keys)
    )
    abscissa = LEFT + (WIDTH - LEFT - 60) / LONGEST
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 30}" role="img">'
        f"<title>How many times as fast as the best peer</title><style>{STYLE}</style>"
        f'<text class="title" x="0" y="18">How many times as fast</text>'
        f'<text class="soft" x="{LEFT}" y="18">bar: geometric mean of the cases; notch: the worst case</text>{legend}'
        f'<line class="line" x1="{abscissa:.1f}" x2="{abscissa:.1f}" y1="58" y2="{y}"/>'
        f'<text class="soft" x="{abscissa:.1f}" y="{y + 16}" text-anchor="middle">as fast</text>'
        f"{''.join(shapes)}</svg>\n"
    )


def group(shapes: list[str], y: int, title: str, rows: dict[str, list[Ratio]], styles: list[str]) -> int:
    """Draws rows of bars under a title; where the next may begin."""
    shapes.append(f'<text class="soft" x="0" y="{y + 6}">{html.escape(title)}</text>')
    y += 18
    scale = (WIDTH - LEFT - 60) / LONGEST
    for label, ratios in rows.items():
        height = len(ratios) * (BAR + 2)
        shapes.append(f'<text x="{LEFT - 10}" y="{y + height / 2 + 4}" text-anchor="end">{html.escape(label)}</text>')
        for style, ratio in zip(styles, ratios, strict=True):
            end, worst = LEFT + ratio.mean * scale, LEFT + ratio.worst * scale
            shapes.append(
                f'<rect class="{style}" x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{BAR}" rx="2"/>'
                f'<line class="worst" x1="{worst:.1f}" x2="{worst:.1f}" y1="{y}" y2="{y + BAR}"/>'
                f'<text x="{end + 6:.1f}" y="{y + 11}">{ratio.mean:.2f}</text>'
            )
            y += BAR + 2
        y += GAP
    return y


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the picture is another")
    svg = picture(PAGE.read_text(encoding="utf-8"))
    if parser.parse_args().check:
        if not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != svg:
            print(f"{PICTURE} is not what {PAGE} says; run `make readme`.", file=sys.stderr)
            return 1
        return 0
    PICTURE.write_text(svg, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
