"""Layers of fixed fan-in: launchers, and their kernels."""
