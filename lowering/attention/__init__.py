"""Attention over a part of the pairs: launchers, and their kernels."""
