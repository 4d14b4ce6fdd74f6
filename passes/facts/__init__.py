"""What is known of each value of a graph."""
