"""Kernels on masked weights."""
