"""Esper grows neural networks while they train."""

__version__ = "0.1.0"
