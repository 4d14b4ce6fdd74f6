"""Training with sparse weights: pruning, RESU and the loop around them."""
