"""Rules on sparse weights."""
