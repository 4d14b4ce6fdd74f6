"""A graph read as what it computes: records of operators, canonical calls, aliases, writes."""
