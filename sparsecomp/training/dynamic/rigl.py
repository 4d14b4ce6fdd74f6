"""RigL: drop the least magnitudes, grow where the dense gradient is largest."""

from sparsecomp.errors import PatternError
from sparsecomp.formats import Pattern
from sparsecomp.training.dynamic.dynamic_sparsity import DynamicSparsity


class RigL(DynamicSparsity):
    """Evci et al. 2020, algorithm 1. What was just dropped may grow again, and then stays as it was."""

    watches = True

    def changing(self) -> list[str]:
        """Those that a backward reached, in any process."""
        reached = [name for name in self.managers if self.reached(name)]
        if not reached:
            raise PatternError("no backward reached the layers: run forward and backward within watch()")
        return reached

    def grown(self, name: str, old: Pattern, kept: Pattern, count: int) -> Pattern:
        """By the largest gradients."""
        return self.gradients[name].candidates(count, kept, self.mean)
