"""Which pairs of query and key attend to one another, and attention over them in plain torch."""
