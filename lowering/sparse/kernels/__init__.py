"""Kernels of products with sparse weights."""
