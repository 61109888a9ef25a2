"""The environment variables that the library reads (docs/environment.md prints their table), and libtpu's."""

from __future__ import annotations

import glob
import os
from typing import NamedTuple


class Variable(NamedTuple):
    """What a variable does.

    Attributes:
      name: the environment variable's name.
      default: value where it is not set.
      meaning: one sentence, in Markdown.
      page: the page of docs that says more, and its section.
    """

    name: str
    default: str
    meaning: str
    page: str


VARIABLES = (
    Variable(
        "VISHWAMAI_TUNING_DIR",
        "`~/.cache/vishwamai/tuning`",
        "The directory of your own tuning tables.",
        "aot.md#tuning-without-the-chip",
    ),
    Variable(
        "VISHWAMAI_AOT_CACHE",
        "`~/.cache/vishwamai/aot`",
        "The directory for answers of the TPU compiler.",
        "aot.md#how-would-it-run",
    ),
    Variable(
        "VISHWAMAI_WEIGHTS_CACHE",
        "`~/.cache/vishwamai/weights`",
        "The directory for weights that `generate` and `serve` have packed for a CPU.",
        "serving-operations.md",
    ),
    Variable(
        "VISHWAMAI_CACHE_MIB",
        "4096",
        "How many MiB the answers of the compiler, and the compiled programs of `generate` and `serve`, may each take.",
        "aot.md#how-would-it-run",
    ),
    Variable(
        "JAX_COMPILATION_CACHE_DIR",
        "`~/.cache/vishwamai/jax`",
        "JAX's own: the directory for compiled programs of `generate` and `serve`.",
        "serving-operations.md",
    ),
    Variable(
        "XDG_CACHE_HOME",
        "`~/.cache`",
        "The directory that holds `vishwamai/`, with the four caches above.",
        "",
    ),
    Variable(
        "VISHWAMAI_CPU_ISA",
        "the best one of the machine",
        "Forces an instruction set of the CPU kernels below the best one, such as `avx2`.",
        "cpu.md#environment",
    ),
    Variable(
        "VISHWAMAI_CPU_THREADS",
        "`OMP_NUM_THREADS`, else all",
        "How many threads may work on one call of a CPU kernel. The commands give it to XLA and OpenMP, too.",
        "cpu.md#threads-and-memory-nodes",
    ),
    Variable(
        "VISHWAMAI_CPU_NODES",
        "`/sys/devices/system/node`",
        "Another directory of that form, with other memory nodes, for tests.",
        "cpu.md#threads-and-memory-nodes",
    ),
    Variable(
        "VISHWAMAI_CPU_KEEP_FREED",
        "1",
        "0 leaves glibc's allocator in its initial state.",
        "cpu.md#environment",
    ),
    Variable(
        "VISHWAMAI_CPU_POISON",
        "0",
        "1 makes scratch memory of the CPU kernels start as NaN, for tests.",
        "cpu.md#environment",
    ),
    Variable(
        "VISHWAMAI_CPU_MODULE",
        "the installed module",
        "The file of another build of the CPU kernels, such as one with sanitizers.",
        "",
    ),
    Variable(
        "VISHWAMAI_CUDA_ARCH",
        "that of the first GPU, or 90",
        "The compute capability that Triton kernels in JAX programs are compiled for, such as `80`.",
        "gpu.md",
    ),
    Variable(
        "VISHWAMAI_NATIVE",
        "",
        "Read by the build: `require` makes a failed build of the CPU kernels an error.",
        "",
    ),
    Variable(
        "VISHWAMAI_REPOSITORY",
        "`origin` of the clone, on GitHub or GitLab",
        "Read by the build: the repository's address for the package's metadata; empty for none.",
        "../CONTRIBUTING.md",
    ),
    Variable(
        "VISHWAMAI_TEST_SEED",
        "the date",
        "Read by the tests: chooses the share of the rotating tests that runs.",
        "../CONTRIBUTING.md",
    ),
    Variable(
        "VISHWAMAI_WORLD",
        "`../shared/world` next to the clone",
        "Read by the tests: the folder of published configurations, templates, requests and schemas.",
        "../CONTRIBUTING.md",
    ),
)
"""Every variable, in the order of the table."""


def table() -> str:
    """The table of docs/environment.md, in Markdown.

    >>> print(table().splitlines()[0])
    | Variable | Default | What it does | More |
    """
    rows = ["| Variable | Default | What it does | More |", "|---|---|---|---|"]
    for variable in VARIABLES:
        page = f"[{variable.page.partition('#')[0].removeprefix('../')}]({variable.page})" if variable.page else ""
        rows.append(f"| `{variable.name}` | {variable.default} | {variable.meaning} | {page} |")
    return "\n".join(rows)


THREADS = ("VISHWAMAI_CPU_THREADS", "OMP_NUM_THREADS", "PJRT_NPROC")
"""The numbers of threads of the CPU kernels, of OpenMP (torch, NumPy's products) and of XLA's pool."""


def share_threads() -> None:
    """Gives the number of threads that is set for the CPU kernels, else for OpenMP, to all that have none."""
    first = next((text for name in THREADS if (text := os.environ.get(name, "").partition(",")[0].strip())), "")
    if first.isascii() and first.isdigit() and int(first) > 0:
        for name in THREADS:
            os.environ.setdefault(name, first)


def libtpu_environment() -> dict[str, str]:
    """What libtpu needs to find in the environment to compile on a machine without a TPU; empty where there is one."""
    quiet = {"TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3"}
    if glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"):
        return quiet  # a TPU host: its own settings stand, and the lock that guards the device stays
    return quiet | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
