"""Writes the support matrix, as `vishwamai matrix --markdown` prints it, between two markers of README.md.

With `--check` nothing is written, and the exit status is 1 when README.md is not current.
"""

import os
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- support matrix: begin -->", "<!-- support matrix: end -->"


def matrix() -> str:
    """The table in Markdown, from the command beside this interpreter; on the CPU, so that every machine prints the same."""
    command = [str(Path(sys.executable).with_name("vishwamai")), "matrix", "--markdown"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def replaced(page: str, table: str) -> str:
    """`page` with `table` between its two markers.

    >>> print(replaced(f"Above\\n{BEGIN}\\nold\\n{END}\\nBelow", "new"))
    Above
    <!-- support matrix: begin -->
    new
    <!-- support matrix: end -->
    Below
    """
    for marker in (BEGIN, END):
        if page.count(marker) != 1:
            raise SystemExit(f"README.md must contain the line {marker} once; it has it {page.count(marker)} times")
    head, rest = page.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def main(arguments: list[str]) -> int:
    page = README.read_text()
    current = replaced(page, matrix())
    if "--check" not in arguments:
        README.write_text(current)
    elif current != page:
        print("README.md: its support matrix is out of date; run `make readme`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
