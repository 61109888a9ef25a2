"""Files of tests that run as programs in processes of their own."""

import os
import sys


def environment() -> dict[str, str]:
    """The environment of a process that imports what its parent can: the modules of tests/, which is a folder above."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
