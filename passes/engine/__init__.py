"""Rules run in order over a graph, and what each may look at."""
