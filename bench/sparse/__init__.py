"""Products with sparse weights."""
