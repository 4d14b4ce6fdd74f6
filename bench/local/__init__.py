"""Layers of fixed fan-in: what networks of them learn, and how fast they are."""
