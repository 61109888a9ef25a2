"""The memory of a program on chips that you do not have.

By formulas: `analytic`, with `residuals` and `stages`. By the compiler: `compiler` (probed and verified), `peak` (the
arrays at the peak). `allocation` has the doors for a batch of a model.
"""
