"""Eight CPU devices for every test, so that sharding is tested wherever the tests run; and what keeps the tests short.
The root conftest.py sets the rest.
"""

import ctypes
import gc
import hashlib
import os
import resource
import time

# The programs of a test run once or twice and are small: what LLVM makes faster costs more than it saves, a third of
# the time of a jitted function.
_FLAGS = {"xla_force_host_platform_device_count": 8, "xla_backend_optimization_level": 0}
# Without XLA's emitters of fusions through MLIR, and with one module of LLVM for each program, the compiler takes a
# third of the time for the same numbers.
_OF_JAXLIB = {"xla_cpu_use_fusion_emitters": "false", "xla_cpu_parallel_codegen_split_count": 1}


def _flags(**values: object) -> str:
    given = os.environ.get("XLA_FLAGS", "")
    return " ".join([given, *(f"--{name}={value}" for name, value in values.items() if name not in given)]).strip()


os.environ["XLA_FLAGS"] = _flags(**_FLAGS)
# torch's threads wait for one another in loops. Next to another process that computes, such as the other worker of the
# tests, a small model of transformers took twenty times as long with two threads as with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VISHWAMAI_CPU_THREADS", str(os.cpu_count() or 1))  # else those of OpenMP

import jax  # noqa: E402

if jax.__version__.startswith("0.10."):
    # jaxlib reads the variable with the first device, and never again; libtpu reads it too, later, and ends a process
    # whose flags it does not know.
    _common = os.environ["XLA_FLAGS"]
    os.environ["XLA_FLAGS"] = _flags(**_OF_JAXLIB)
    jax.devices()
    os.environ["XLA_FLAGS"] = _common

import hypothesis  # noqa: E402
import pytest  # noqa: E402

import rotation  # noqa: E402
from vishwamai.core import jax_cache  # noqa: E402
from vishwamai.ops import catalogue  # noqa: E402

catalogue.PACKAGES.append("toy_ops")

# The same examples in every run of CI and of `make test`; HYPOTHESIS_PROFILE=explore draws new ones, and more of them.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=20, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=300)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_report_header() -> str:
    return rotation.header()


def pytest_collection_finish() -> None:
    """Takes the modules and the collected tests, which stay, out of the garbage collector's rounds: a tenth of the time
    of tracing.
    """
    gc.collect()
    gc.freeze()


_END = pytest.StashKey[float]()
"""When a run of limited length begins no further test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, help="begin no test after so many minutes, and say which were not run")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests that take turns. With --minutes: the tests in an order that is random by the seed, so that
    whatever time is left takes a share of every kind, and another share under another seed.
    """
    for item in items:
        rotation.turns(item)
    minutes: float | None = config.getoption("--minutes")
    if minutes is None:
        return

    def together(item: pytest.Item) -> str:
        """The variants of a case share its oracle and its shapes; the tests of a module may share a fixture."""
        cases = "case" in getattr(getattr(item, "callspec", None), "params", ())
        return item.nodeid.rpartition("-")[0] if cases else item.nodeid.partition("::")[0]

    # What rotates and is not long ran in `make test`, under the same seed: in the long run it comes last.
    again = "rotating" in config.option.markexpr

    def place(item: pytest.Item) -> tuple[bool, bytes]:
        digest = hashlib.sha1(f"{rotation.SEED} {together(item)}".encode()).digest()
        return again and item.get_closest_marker("long") is None, digest

    items.sort(key=place)
    config.stash[_END] = time.monotonic() + 60 * minutes


_GROWTH = 512 << 20
"""Bytes by which a process may grow until the programs of finished modules are dropped: thousands take 5 GiB."""

_LIBC = ctypes.CDLL(None)


_baseline = 0


def _resident() -> int:
    if not os.path.exists("/proc/self/statm"):
        return 0
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.hookimpl(trylast=True)  # the module's fixtures have ended
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A command that ran in this process has set where JAX keeps programs, and those of several devices must not be
    read from there (`vishwamai.parallel.mesh.compile_collectives_anew`).
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        jax.config.update("jax_compilation_cache_dir", None)
        jax_cache.turn(on=True)
    global _baseline
    _baseline = _baseline or _resident()
    if nextitem is not None and nextitem.path != item.path and _resident() > _baseline + _GROWTH:
        jax.clear_caches()
        gc.collect()
        if hasattr(_LIBC, "malloc_trim"):
            _LIBC.malloc_trim(0)
        _baseline = _resident()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() > item.config.stash.get(_END, float("inf")):
        pytest.skip(f"not run: the {item.config.getoption('--minutes'):g} minutes of --minutes are over")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names and counts what other people's files would have tested, where they could not be fetched."""
    absent: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        _, mark, name = reason.partition("world: ")
        if mark:
            absent[name] = absent.get(name, 0) + 1
    for name, count in sorted(absent.items()):
        terminalreporter.write_line(f"world: {count} tests skipped: {name}")
