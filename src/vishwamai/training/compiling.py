"""Options with which the step of a run is compiled on TPUs."""

from __future__ import annotations

import warnings

from vishwamai.aot.compile.options.config import compiler_options_of
from vishwamai.core.errors import ConfigError, FallbackWarning
from vishwamai.core.hardware import TpuChip
from vishwamai.training.config import TrainConfig

_COLLECTIVES = "all_gather", "2d_all_gather", "3d_all_gather", "reduce_scatter", "nd_reduce_scatter", "all_reduce"
ON_SPARSE_CORES = {f"xla_tpu_enable_sparse_core_collective_offload_{name}": True for name in _COLLECTIVES}
"""Run collectives on the SparseCores, so that the TensorCores go on meanwhile."""


def compiler_options(config: TrainConfig, chip: TpuChip | None, devices: int) -> dict[str, str]:
    """Those of a configuration for `jax.jit`; none on what is not a TPU.

    Args:
      config: configuration of the run. devices: number of its devices.
      chip: TPU that it runs on; None for another platform.

    Raises:
      ConfigError: the installed libtpu has no such option, or it does not take the value; or there is no TPU.
    """
    if chip is None:
        if config.compiler_options:
            raise ConfigError(
                f"config: compiler_options ({', '.join(config.compiler_options)}) are for the compiler of a TPU, and "
                "there is none here; leave them out."
            )
        return {}
    if config.compiler_options is not None:
        return compiler_options_of("config", config.compiler_options)
    if devices == 1 or not chip.sparse_collectives:
        return {}
    try:
        return compiler_options_of("config", ON_SPARSE_CORES)
    except ConfigError as error:
        warnings.warn(
            f"The step is compiled without collectives on the SparseCores, and waits for them: {error} Set "
            "compiler_options: {} to do so without this warning.",
            FallbackWarning,
            stacklevel=2,
        )
        return {}
