"""Types that annotations share, where JAX and NumPy have none."""

from typing import Any

PyTree = Any
"""Nested dicts, lists and tuples whose leaves are arrays, as `jax.tree.map` takes them. Registered classes are nodes,
too, so no type of Python states it.
"""
