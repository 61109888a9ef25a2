"""The table of environment variables: whole, and printed as it is."""

import re
from pathlib import Path

from vishwamai.core.environment import VARIABLES, table

ROOT = Path(__file__).parents[2]
# A name in quotes in Python and in C++: macros of the build begin alike.
QUOTED = re.compile(r"""["'](VISHWAMAI_[A-Z0-9_]+)["']""")


def test_every_variable_is_in_the_table():
    files = [path for pattern in ("*.py", "*.cc", "*.h") for path in (ROOT / "src").rglob(pattern)]
    files += [ROOT / "tests" / "rotation.py", *(ROOT / "tools").glob("*.py")]
    read = {name for path in files if path.name != "environment.py" for name in QUOTED.findall(path.read_text())}
    assert read == {variable.name for variable in VARIABLES if variable.name.startswith("VISHWAMAI_")}
    assert len(read) > 8


def test_the_page_prints_the_table():
    page = (ROOT / "docs" / "environment.md").read_text()
    assert table() in page, f"docs/environment.md has another table; this is the present one:\n{table()}"


def test_links_lead_to_sections():
    for variable in VARIABLES:
        name, _, section = variable.page.partition("#")
        if name:
            text = (ROOT / "docs" / name).read_text()
            lines = [line.lstrip("# ").lower() for line in text.splitlines() if line.startswith("#")]
            assert not section or section in [re.sub(r"[^a-z0-9 -]", "", line).replace(" ", "-") for line in lines]
