"""Child processes for the TPU compiler: their environment, their loop over questions, and their last words.

libtpu can end the process that it runs in, and reads some options only when it is loaded. So whatever may end it, or
needs such options, runs in a child: `options.worker`, `schedule.worker`, `planning.worker` and `vishwamai check`.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import vishwamai
from vishwamai.core.environment import libtpu_environment


def environment(options: str = "", without: Sequence[str] = ()) -> dict[str, str]:
    """The variables of a child that imports this package and needs no device.

    Args:
      options: options of libtpu in addition to those of the user.
      without: names of variables that the child does not get.
    """
    source = str(pathlib.Path(vishwamai.__file__).parents[1])
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    variables = inherited | libtpu_environment()
    if options:
        variables["LIBTPU_INIT_ARGS"] = f"{inherited.get('LIBTPU_INIT_ARGS', '')} {options}".strip()
    path = os.pathsep.join([source, inherited.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return variables | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}


def answer_lines(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answers every line of standard input, a question in JSON, with a line on standard output: {"crashed": traceback}
    where `answer` raises. What C++ code prints goes to standard error.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception:  # the parent raises it
            reply = {"crashed": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")


def last_words(stderr: str) -> str:
    """The lines of standard error that say why a child ended; "" where it wrote none.

    >>> last_words("loading\\nF1128 12:00 Check failed: x == y\\n")
    'F1128 12:00 Check failed: x == y'
    """
    lines = stderr.splitlines()
    telling = [line for line in lines if re.search(r"Check fail|F\d{4}|Error|error|SIG", line)]
    return "\n".join(telling or lines)[-1500:]


def ending(status: int) -> str:
    """The exit status of a child in words.

    >>> ending(-6), ending(1)
    ('by signal 6', 'with status 1')
    """
    return f"by signal {-status}" if status < 0 else f"with status {status}"
