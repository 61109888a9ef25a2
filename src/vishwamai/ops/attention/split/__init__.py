"""Attention over sequences and keys that are split over devices: rings, the exchange of heads, and the choice."""
