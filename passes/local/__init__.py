"""Rules on layers of fixed fan-in."""
