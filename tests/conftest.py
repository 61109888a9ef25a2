"""Eight CPU devices for every test, so that sharding is tested wherever the tests run; and what keeps the tests short. The root conftest.py sets the rest."""

import gc
import os
import time
import zlib

# The programs of a test run once or twice and are small: LLVM's dearer passes cost more than they save, a quarter of a simulated kernel's time.
_FLAGS = {"xla_force_host_platform_device_count": 8, "xla_backend_optimization_level": 1}
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(
    [_given, *(f"--{name}={value}" for name, value in _FLAGS.items() if name not in _given)]
).strip()

import hypothesis  # noqa: E402
import pytest  # noqa: E402

# The same examples in every run of CI and of `make test`; HYPOTHESIS_PROFILE=explore draws new ones, and more of them.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=20, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=300)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_finish() -> None:
    """Takes the modules and the collected tests, which stay, out of the garbage collector's rounds: a tenth of the time of tracing."""
    gc.collect()
    gc.freeze()


_END = pytest.StashKey[float]()


# --- A run of limited length -----------------------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, help="begin no test after so many minutes, and say which were not run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --minutes: the tests in an order that is random and always the same, so that whatever time is left takes a share of every kind."""
    minutes: float | None = config.getoption("--minutes")
    if minutes is None:
        return

    def together(item: pytest.Item) -> str:
        """The variants of a case share its oracle and its shapes; the tests of a module may share a fixture."""
        cases = "case" in getattr(getattr(item, "callspec", None), "params", ())
        return item.nodeid.rpartition("-")[0] if cases else item.nodeid.partition("::")[0]

    items.sort(key=lambda item: zlib.crc32(together(item).encode()))
    config.stash[_END] = time.monotonic() + 60 * minutes


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() > item.config.stash.get(_END, float("inf")):
        pytest.skip(f"not run: the {item.config.getoption('--minutes'):g} minutes of --minutes are over")
