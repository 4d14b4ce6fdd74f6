"""Benchmarks against peers: `python -m bench NAME`; every figure comes with the machine that gave it."""
