"""The time of a step on chips that you do not have.

By formulas: `speed`, `pace`. By the compiled program: `program_time`, with `timeline` and `collectives`; `stage_times`
of a pipeline. Against measurements: `calibrate`, `calibration`, `published` (the range of published steps).
"""
