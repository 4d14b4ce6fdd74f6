"""A graph read as what it computes: canonical operators, aliases, writes."""
