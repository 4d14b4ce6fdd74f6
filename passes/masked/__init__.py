"""Rules on masked weights."""
