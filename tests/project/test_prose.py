"""tools/prose.py: what it declines in a page, and what its errors say."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "prose.py"
WORDS = (
    "# Contributing\n\n## Words\n\n| Write | Not |\n|---|---|\n| fix | mend, mended |\n| is not a | is no |\n| "
    "keep_mask | `kept` |\n"
)


@pytest.fixture
def check(tmp_path):
    def run(page, name="docs/page.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "CONTRIBUTING.md").write_text(WORDS)
        (tmp_path / name).write_text(page)
        done = subprocess.run([sys.executable, TOOL, tmp_path], capture_output=True, text=True)
        assert done.returncode == bool(done.stdout) and not done.stderr
        return done.stdout.splitlines()

    return run


def test_a_declined_word_is_named_with_its_line_and_fix(check):
    (error,) = check("# Mend\n\nThe kernel is\nmended here.\n")
    assert error == "docs/page.md:4: 'mended' is a declined word; write: fix (CONTRIBUTING.md, Words)"


def test_good_english_and_code_pass(check):
    page = (
        "The mask is `kept_mask`, and it is no longer `mend`. There is no kernel.\n\n```\nmend\n```\n\nWe have kept "
        "it.\n"
    )
    assert check(page) == []
    assert "'kept'" in check("The mask is `kept`.\n")[0]
    assert "'is no'" in check("It is no framework.\n")[0]


def test_the_median_sentence_is_held_to_twenty_words(check):
    short, long = "Short.", "Long" + " word" * 20 + "."
    (error,) = check(f"# Title\n\n{short}\n{long}\n{long}\n")
    assert error.startswith("docs/page.md:5: the median sentence of the page has 21 words, and may have 20; split")
    assert "'Long word word" in error
    assert check(f"{short} {short} {long}\n") == []


def test_tables_code_formulas_and_headings_are_not_counted(check):
    long = " ".join(["word"] * 30)
    page = f"# {long}\n\n| {long} |\n|---|\n\n    {long}\n\n```\n{long}\n```\n\n$$\n{long}\n$$\n\nOne short sentence.\n"
    assert check(page) == []


def test_the_record_of_experiments_is_held_to_the_words_alone(check):
    long = " ".join(["word"] * 30)
    assert check(f"{long}.\n", "docs/notes/gemm.md") == []
    assert "fix" in check("Mend it.\n", "docs/notes/gemm.md")[0]


def test_a_date_belongs_to_the_record(check):
    assert check("It took 3 s on 2026-11-27.\n", "docs/notes/dates.md") == []
    (error,) = check("# Speed\n\nOn 2026-11-27 it took 3 s.\n\n```\n2026-11-27 INFO\n```\n")
    assert error == "docs/page.md:3: 2026-11-27 is a date; write it in docs/notes/dates.md, and here the versions"
