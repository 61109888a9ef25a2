"""The Triton kernels on a GPU, compared with torch's own, and what the host spends on a call."""

from __future__ import annotations

import sys

from subjects import run

if __name__ == "__main__":
    sys.exit(run("gpu", __doc__))
