"""Settings and peaks of a machine for tests of `bench`."""

from vishwamai.bench import runner
from vishwamai.measure.machine_peaks import MachinePeaks

PEAKS = MachinePeaks({"float32": {"jax": 1e11}, "bfloat16": {"jax": 1e11}}, {"jax": 1e10}, "made up for a test")
SETTINGS = runner.BenchSettings(seconds=0.1, spread=float("inf"), others=float("inf"))
