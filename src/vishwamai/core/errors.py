"""The errors that vishwamai raises, all of them before anything is computed.

`KernelError` says that a call cannot be served as written; `DeviceError` that the machine lacks what it needs. The two are siblings, so a caller
can catch them in turn::

    VishwamaiError
      KernelError
        ShapeError         (also a ValueError)  the arguments do not fit one another
        UnsupportedError   (also a NotImplementedError)  they fit, but the implementation asked for cannot serve them
      DeviceError          (also a RuntimeError)  a device, a library or a compiler is missing, or the program does not fit
"""

from __future__ import annotations


class VishwamaiError(Exception):
    """Base class of every error raised on purpose by this library."""


class KernelError(VishwamaiError):
    """A kernel cannot be built or run for these arguments."""


class ShapeError(KernelError, ValueError):
    """The arguments contradict one another or the operation: shapes, dtypes or option values."""


class UnsupportedError(KernelError, NotImplementedError):
    """The arguments are legal, but the implementation that was asked for cannot serve them; the text gives its reason."""


class DeviceError(VishwamaiError, RuntimeError):
    """A device, a library or memory is missing; the text names it and the command or change that mends it."""


class FallbackWarning(UserWarning):
    """A slower implementation runs because the platform's own kernel declined; given once per reason."""
