"""Kernels, layers and steps on TPUs you do not have, compared with their peers: by the compiler's schedules."""

from __future__ import annotations

import sys

from subjects import run

if __name__ == "__main__":
    sys.exit(run("tpu", __doc__))
