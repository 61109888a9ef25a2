"""Plans and estimates of training steps, compared with compiled programs, published times and other libraries."""

from __future__ import annotations

import sys

from subjects import run

if __name__ == "__main__":
    sys.exit(run("plans", __doc__))
