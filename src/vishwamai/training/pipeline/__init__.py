"""Pipelines of a training step: which layers each stage holds (`stages`), and the loss through the stages (`loss`)."""
