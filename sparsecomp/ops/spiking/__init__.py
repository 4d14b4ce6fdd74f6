"""Operators on spikes: layers, and the neurons that make them."""
