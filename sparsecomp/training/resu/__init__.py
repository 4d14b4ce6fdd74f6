"""Weights that come back: phases, optimizers and the cycle."""
