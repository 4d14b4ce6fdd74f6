"""Layers whose weight is masked, with θ at the pruned places in a RESU phase."""
