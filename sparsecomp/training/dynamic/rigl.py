"""RigL: drop the least magnitudes, grow where the dense gradient is largest."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from sparsecomp.errors import ConfigError, PatternError
from sparsecomp.formats import Pattern
from sparsecomp.training.dynamic.dynamic_sparsity import DynamicSparsity
from sparsecomp.training.dynamic.random_growth import drawn


class RigL(DynamicSparsity):
    """Evci et al. 2020, algorithm 1. What was just dropped may grow again, and then stays as it was.

    Args:
        model, optimizer, settings: as of `DynamicSparsity`.
        sample: share of the elements that may grow, drawn anew for each change, of which the gradient is looked at; 1
            looks at all, by the gradient of the whole weight. At least as many are looked at as grow.

    Raises:
        ConfigError: as `DynamicSparsity`, or a share outside of (0, 1].
    """

    watches = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, sample: float = 1.0, **settings: Any) -> None:
        super().__init__(model, optimizer, **settings)
        if not 0 < sample <= 1:
            raise ConfigError(f"sample is {sample}: a share of the elements that may grow, above 0 and up to 1")
        self.sample = sample

    def changing(self) -> list[str]:
        """Those that a backward reached, in any process."""
        reached = [name for name in self.managers if self.reached(name)]
        if not reached:
            raise PatternError("no backward reached the layers: run forward and backward within watch()")
        return reached

    def grown(self, name: str, old: Pattern, kept: Pattern, count: int) -> Pattern:
        """By the largest gradients."""
        if self.sample == 1:
            return self.gradients[name].candidates(count, kept, self.mean)
        others = kept.shape[0] * kept.shape[1] - kept.nnz
        looked_at = drawn(max(count, int(self.sample * others)), kept, f"{self.seed} {self.steps} {name}")
        return self.gradients[name].candidates_among(count, looked_at, self.mean)
