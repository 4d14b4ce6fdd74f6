"""Triton kernels, one family a file. Importing a template imports Triton; importing this package does not."""
