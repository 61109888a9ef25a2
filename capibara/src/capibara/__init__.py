"""Capibara's kernels: `vishwamai` under other names. Los núcleos de Capibara: `vishwamai` con otros nombres."""
