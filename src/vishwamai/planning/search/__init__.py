"""The choice of settings for a training step.

`plan` searches among `candidates`, `batch` finds the largest batch, `diagnosis` and `advice` find the changes that make
a program fit, `controller` the settings of the memory, `page` writes HTML.
"""
