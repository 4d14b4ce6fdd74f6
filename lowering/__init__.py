"""Kernel templates and the code that picks and launches one; imported as `sparsecomp.lowering`."""
