"""What a TPU measured next to what was estimated: a file that can be sent in, and the factor that it gives.

`vishwamai calibrate` writes it. The file of a chip that was taken into use, or that ships in `data/calibration`,
corrects the kernels' part of every step time on that chip.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from vishwamai.core import caches
from vishwamai.core.errors import ConfigError, DeviceError
from vishwamai.core.figures import LEVELS
from vishwamai.core.hardware import TPUS

FORMAT = 1
LEAST = 3
"""Kernels that a factor is made of, at least."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation's case, or a layer, on the device.

    Attributes:
      name: "gemm: Llama 3 8B". implementation: which one ran. gradients: forward and backward together.
      seconds: measured median of a call. spread: distance between the quartiles, as a share of it.
      estimate: seconds that were estimated; None where there is no model. level: "verified" (the kernel's schedule) or
        "analytic" (the roofline). bound: what the roofline says limits it, "compute" or "memory".
      note: why it has no time, or no part in the factor.
    """

    name: str
    implementation: str
    gradients: bool
    seconds: float | None
    spread: float = 0.0
    estimate: float | None = None
    level: str = ""
    bound: str = ""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over estimated."""
        return None if self.seconds is None or not self.estimate else self.seconds / self.estimate


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What one device measured.

    Attributes:
      device: its name. chip: the TPU as this library calls it; None for others.
      versions: versions of the packages. rows: measured cases.
    """

    device: str
    chip: str | None
    versions: Mapping[str, str | None]
    rows: tuple[Row, ...]

    def ratios(self, bound: str | None = None) -> list[float]:
        """Measured over estimated of the kernels whose schedule was estimated; of those with one bound."""
        return [
            row.ratio
            for row in self.rows
            if row.level == "verified" and row.ratio is not None and not row.note and bound in (None, row.bound)
        ]

    @property
    def factor(self) -> float | None:
        """The geometric mean of `ratios`; None where fewer than `LEAST` kernels are in it."""
        ratios = self.ratios()
        return statistics.geometric_mean(ratios) if len(ratios) >= LEAST else None

    def text(self) -> str:
        """As JSON."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n"


def parse(text: str, source: str) -> Calibration:
    """Reads a calibration.

    Raises:
      ConfigError: it is not one; the text says what is wrong.

    >>> made = Calibration("TPU v5e", "v5e", {}, (Row("gemm: a", "pallas_tpu", False, 2e-3, 0.0, 1e-3, "verified"),))
    >>> parse(made.text(), "here") == made, made.ratios(), made.factor
    (True, [2.0], None)
    """
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ConfigError(f"calibrate: {source} has format {document['format']!r}; this version reads {FORMAT}.")
        rows = tuple(Row(**row) for row in document["rows"])
        calibration = Calibration(str(document["device"]), document["chip"], dict(document["versions"]), rows)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"calibrate: {source} is not a calibration ({type(error).__name__}: {error}); pass a file that `vishwamai "
            "calibrate` wrote."
        ) from error
    for row in rows:
        figures = [value for value in (row.seconds, row.estimate) if value is not None]
        sound = all(isinstance(v, int | float) and math.isfinite(v) and v > 0 for v in figures)
        if not sound or row.level not in ("", *LEVELS):
            raise ConfigError(f"calibrate: {source}: {row.name!r} has figures that are not positive seconds.")
    if calibration.chip is not None and calibration.chip not in TPUS:
        raise ConfigError(f"calibrate: {source}: chip {calibration.chip!r} is unknown; known are {', '.join(TPUS)}.")
    return calibration


def use(path: Path) -> tuple[Calibration, Path]:
    """Takes a file into use for its chip: later estimates are corrected by its factor.

    Returns:
      The calibration, and where it is kept.

    Raises:
      ConfigError: the file cannot be read, is not one, or has no factor.
      DeviceError: there is no directory to keep it in.
    """
    try:
        calibration = parse(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"calibrate: {path} cannot be read: {error}") from error
    if calibration.chip is None or calibration.factor is None:
        raise ConfigError(
            f"calibrate: {path} was measured on {calibration.device} and has {len(calibration.ratios())} kernels "
            f"with an estimate; a correction needs a TPU and {LEAST} kernels."
        )
    stored = _user_path(calibration.chip)
    if stored is None:
        raise DeviceError(f"calibrate: {caches.no_directory('tuning')}.")
    try:
        caches.write(stored, calibration.text())
    except OSError as error:
        raise DeviceError(
            f"calibrate: {stored} cannot be written: {error}; {caches.OTHER_DIRECTORY['tuning']}."
        ) from error
    return calibration, stored


def in_use(chip: str) -> Calibration | None:
    """The calibration of a chip: the user's own, else the shipped one; None where there is none."""
    user, shipped = _user_path(chip), Path(str(resources.files("vishwamai") / "data" / "calibration" / f"{chip}.json"))
    for path in (user, shipped):
        if path is not None and path.is_file():
            return _read(path, path.stat().st_mtime_ns)
    return None


@functools.lru_cache(maxsize=16)
def _read(path: Path, changed: int) -> Calibration:
    return parse(path.read_text(), str(path))


def _user_path(chip: str) -> Path | None:
    directory = caches.cache_directory("tuning")
    return None if directory is None else directory / f"calibration-{chip}.json"


def table(calibration: Calibration) -> list[str]:
    """Rows of at most 80 columns: measured next to estimated, with the ratio."""
    lines = [
        f"{calibration.device}: measured next to estimated; ratio = measured / estimated",
        f"  {'case':<38}{'measured':>10}{'estimated':>11}{'ratio':>7}  level",
    ]
    for row in calibration.rows:
        name = row.name if not row.gradients else f"{row.name}, with backward"
        seconds = "-" if row.seconds is None else f"{row.seconds * 1e3:.3f} ms"
        estimate = "none" if row.estimate is None else f"{row.estimate * 1e3:.3f} ms"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(f"  {name[:37]:<38}{seconds:>10}{estimate:>11}{ratio:>7}  {row.level}".rstrip())
        if row.note:
            lines.append(f"      {row.note}")
    if calibration.chip is None:
        lines.append("  no estimate: no compiler's schedule is known for this device")
    for bound in ("compute", "memory"):
        ratios = calibration.ratios(bound)
        if ratios:
            mean = statistics.geometric_mean(ratios)
            lines.append(
                f"  kernels bound by {bound}: {mean:.3f}, {min(ratios):.2f} to {max(ratios):.2f} ({len(ratios)} cases)"
            )
    if calibration.factor is not None:
        lines.append(f"  factor of kernels on {calibration.chip}: {calibration.factor:.3f}")
    return lines
