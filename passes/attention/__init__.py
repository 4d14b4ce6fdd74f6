"""Rules on attention."""
