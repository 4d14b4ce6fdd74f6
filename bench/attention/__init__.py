"""Benchmarks of attention over a part of the pairs."""
