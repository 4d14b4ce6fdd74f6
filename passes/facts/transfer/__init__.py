"""Transfer functions of the fact analysis, one operator family a module.

Importing this package registers all of them.
"""

from sparsecomp.passes.facts.transfer import (
    comparison,
    constants,
    mutation,
    normalisation,
    pointwise,
    pooling,
    reduction,
    shape,
)

__all__ = ["comparison", "constants", "mutation", "normalisation", "pointwise", "pooling", "reduction", "shape"]
