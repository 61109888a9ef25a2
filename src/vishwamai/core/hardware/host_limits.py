"""What the system allows this process: CPU time and memory of its control group, huge pages, clock governors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT = 1 << 60
"""Version 1 states a number of about 2^63 bytes where there is no limit."""


def cpu_quota(root: str = "/") -> float | None:
    """Processors' worth of time that the control groups of this process may use; None for no limit.

    Args:
      root: directory with `proc` and `sys`, for tests.
    """
    quotas = []
    for folder in _groups(root, ""):
        quotas += _share(_text(folder / "cpu.max").split())
    for folder in _groups(root, "cpu"):
        quotas += _share([_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")])
    return min(quotas, default=None)


def memory_limit(root: str = "/") -> int | None:
    """Bytes that the control groups of this process may use; None for no limit."""
    limits = [_text(folder / "memory.max") for folder in _groups(root, "")]
    limits += [_text(folder / "memory.limit_in_bytes") for folder in _groups(root, "memory")]
    return min((int(text) for text in limits if text.isdigit() and int(text) < _NO_LIMIT), default=None)


def huge_pages(root: str = "/") -> str | None:
    """Mode of transparent huge pages: "always", "madvise" or "never"; None where the system does not say."""
    mode = re.search(r"\[(\w+)\]", _text(Path(root, "sys/kernel/mm/transparent_hugepage/enabled")))
    return None if mode is None else mode[1]


def governors(root: str = "/") -> tuple[str, ...]:
    """Names of the governors that set the clocks; empty where the system does not say, as in most virtual machines."""
    paths = Path(root, "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    return tuple(sorted({text for path in paths if (text := _text(path))}))


def available_memory(root: str = "/") -> int | None:
    """Bytes that a new process may take without others being swapped out; None where the system does not say."""
    free = re.search(r"^MemAvailable:\s*(\d+) kB", _text(Path(root, "proc/meminfo")), re.M)
    return None if free is None else 1024 * int(free[1])


def _groups(root: str, controller: str) -> Iterator[Path]:
    """Directories of a controller's groups of this process, from its own to the root; "" for version 2.

    In a container the path may be that of the host, which is not there: the root then is the container's own group.
    """
    for line in _text(Path(root, "proc/self/cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        if controller not in names.split(","):
            continue
        top = Path(root, "sys/fs/cgroup")
        top = top / (names if (top / names).is_dir() else controller) if controller else top
        group = top / path.strip("/")
        while group != top and top in group.parents:
            yield group
            group = group.parent
        yield top


def _share(words: list[str]) -> list[float]:
    """Processors of a quota and its period, in microseconds; none without a limit."""
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
        return [int(words[0]) / int(words[1])]
    return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
