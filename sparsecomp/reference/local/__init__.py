"""Layers of fixed fan-in on a grid: who reads whom, and the products in plain torch."""
