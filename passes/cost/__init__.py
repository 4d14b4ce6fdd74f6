"""Whether a rewrite pays."""
