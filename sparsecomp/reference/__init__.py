"""What kernels and operators both need and that needs neither: references, geometry, patterns, facts, the memo."""
