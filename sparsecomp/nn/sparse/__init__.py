"""Layers whose weight is a sparse matrix."""
