"""Capibara's kernels: a face of `vishwamai` under other names. Los núcleos de Capibara: una cara de `vishwamai` con otros nombres."""
