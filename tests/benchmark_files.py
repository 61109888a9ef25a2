"""Files of benchmarks/ as modules of a test."""

import contextlib
import importlib.util
import sys
from pathlib import Path

import pytest


@contextlib.contextmanager
def loaded(name):
    """The module of a path without its ending; it may import its neighbours."""
    folder = Path(__file__).parent.parent / "benchmarks"
    spec = importlib.util.spec_from_file_location(name.replace("/", "."), folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setitem(sys.modules, spec.name, module)  # its dataclasses look themselves up
        spec.loader.exec_module(module)
        yield module
