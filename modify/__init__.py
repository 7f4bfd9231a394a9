"""Mixture-of-Depths for pretrained decoder-only transformers."""

__version__ = "0.1.0"
