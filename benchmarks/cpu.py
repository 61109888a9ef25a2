"""Kernels, steps of training and programs over several devices on this CPU, compared with torch and XLA."""

from __future__ import annotations

import sys

from subjects import run

if __name__ == "__main__":
    sys.exit(run("cpu", __doc__))
