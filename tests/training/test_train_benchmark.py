"""benchmarks/cpu.py training: every contestant takes part, their losses agree, and each has its line."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "cpu.py"


@pytest.mark.long
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
    reason="no torch and transformers to compare with (pip install torch transformers)",
)
@pytest.mark.parametrize("options", [(), ("--model", "mixtral", "--packed")], ids=" ".join)
def test_the_quick_run_times_every_contestant(options):
    command = [sys.executable, str(BENCHMARK), "training", "--quick", "--dtypes", "float32", *options]
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("ours", "torch") if options else ("ours", "jax.nn", "torch"):
        assert re.search(rf"^{re.escape(name)} float32 +[1-9][\d,]* +\d+\.\d\dx +\d+\.\d\d GiB$", done.stdout, re.M), (
            name
        )
