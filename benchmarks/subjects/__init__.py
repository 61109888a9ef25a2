"""The subjects of the scripts, a module of this package each: `benchmarks/tpu.py attention` runs `tpu/attention.py`."""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from pathlib import Path


def summary(path: Path) -> str:
    """The first sentence of a module's docstring, which is not imported."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".:")


def run(script: str, doc: str | None) -> int | None:
    """Runs the subject that the command line names; its options are the subject's.

    Args:
      script: name of the script, and of the folder of its subjects.
      doc: text of the script's help.
    """
    folder = Path(__file__).with_name(script)
    modules = {path.stem: path for path in sorted(folder.glob("*.py")) if "def main(" in path.read_text()}
    lines = "\n".join(f"  {name:<11}{summary(path)}" for name, path in modules.items())
    parser = argparse.ArgumentParser(
        description=f"{doc}\n\nsubjects, each with its own --help:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"{script}.py SUBJECT [options]",
    )
    parser.add_argument("subject", choices=modules)
    options = parser.parse_args(sys.argv[1:2])
    sys.argv[:2] = [f"{script}.py {options.subject}"]
    return importlib.import_module(f"subjects.{script}.{options.subject}").main()
