"""Operators on layers of fixed fan-in."""
