"""Which weights to prune, and how to mend what was lost."""
