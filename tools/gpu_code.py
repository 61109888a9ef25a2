"""Writes the table of the Triton kernels' machine code, for every model's shape, between two markers of
docs/notes/gpu_code.md.

It compiles for Hopper with the triton package alone and needs no GPU; it takes a few minutes.
"""

from pathlib import Path

from vishwamai.aot.compile.gpu_survey import model_cases, survey, table

PAGE = Path(__file__).parent.parent / "docs" / "notes" / "gpu_code.md"
BEGIN, END = "<!-- gpu code: begin -->", "<!-- gpu code: end -->"


def main() -> None:
    rows = []
    for name, code in survey(model_cases()):
        rows.append((name, code))
        print(name, code, flush=True)
    head, rest = PAGE.read_text().split(BEGIN)
    tail = rest.split(END)[1]
    PAGE.write_text(f"{head}{BEGIN}\n{table(rows)}\n{END}{tail}")


if __name__ == "__main__":
    main()
