"""Attention re-weightings, their diagnostics, and training runs that live or die by them."""

__version__ = "0.1.0"
