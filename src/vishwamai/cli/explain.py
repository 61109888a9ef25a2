"""Says for every operation in a function which implementation runs, with which tiles, and why the others do not.
Nothing is computed.

vishwamai explain vishwamai:rms_norm --args 'f16[8,4096]' --target v5e
vishwamai explain path/to/model.py:forward
"""

from __future__ import annotations

import argparse
import warnings
from typing import get_args

from vishwamai.cli import function, model_options, options
from vishwamai.cli.console import tell
from vishwamai.core.errors import FallbackWarning


def configure(parser: argparse.ArgumentParser) -> None:
    function.add_arguments(parser)
    model_options.add_optimization(parser)
    chips = 'TPU, GPU or CPU to explain for: "v5e", "v5e:4x4", "h100", "sm_90", "cpu:avx2" ...'
    options.add_target(parser, f"{chips} (default: the machine's own device)")


def run(arguments: argparse.Namespace) -> int:
    from vishwamai.aot.compile import libtpu
    from vishwamai.core.explain import explain
    from vishwamai.parallel.optimization import Purpose, explain_optimization

    if arguments.target is None:
        libtpu.local_devices()
    call = function.load_call(arguments.function, arguments.args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)  # the table below says the same, with every reason
        keys = model_options.optimization(arguments)
        with keys.kernels():
            for target in arguments.target or [None]:
                tell(explain(call.function, *call.args, target=target, **call.kwargs))
        if keys.explicit:
            for purpose in get_args(Purpose):
                tell(explain_optimization(keys, purpose))
    return 0
