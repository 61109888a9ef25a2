"""What the tests that need a GPU share (`make test-on-gpu`): they skip without one. `VISHWAMAI_REHEARSAL=1` runs them
on the CPU, which shows that they work and nothing of a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

import contract

PRESENT = torch.cuda.is_available()
DEVICE = "cuda" if PRESENT else "cpu"
needs_gpu = pytest.mark.skipif(
    contract.TRITON or not (PRESENT or os.environ.get("VISHWAMAI_REHEARSAL") == "1"), reason="this machine has no GPU"
)
