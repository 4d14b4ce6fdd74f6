"""Kernels for layers of fixed fan-in."""
