"""Masked weights: pruning, RESU and training with them."""
