"""Attention over a part of the pairs, as modules."""
