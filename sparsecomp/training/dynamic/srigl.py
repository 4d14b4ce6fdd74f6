"""SRigL: RigL whose neurons all read equally many inputs, and may die."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsecomp.errors import ConfigError
from sparsecomp.formats import Pattern
from sparsecomp.training.dynamic.rigl import RigL


class SRigL(RigL):
    """Lasby et al. 2024, section 3.1: constant fan-in, with neurons that are ablated.

    A layer drops its least magnitudes, wherever they are, and each neuron (row) grows by the largest gradients until
    all have the same fan-in. A weight is salient if RigL would keep or grow it; a neuron with fewer salient weights
    than `gamma` times the fan-in loses all its weights for good, which the others get in equal parts: what is left over
    is not stored. One neuron stays at least.

    Args:
        model, optimizer, settings: as of `DynamicSparsity`; each row of a layer that stores something must store as
            many as the others, as `sparsify(model, ConstantFanIn(0.9, by="random"))` makes them.
        gamma: share of the fan-in that must be salient, 0 to 1; 0 ablates nothing. Published are 0.3 and, for vision
            transformers, 0.95.
        ablate: of a layer and its name, whether its neurons may be ablated; by default those of all sparse layers but
            the model's last, as the outputs must stay.

    Raises:
        ConfigError: as `DynamicSparsity`, a gamma outside its domain, a `sample`, or a layer of another fan-in a row.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, gamma: float = 0.3,
        ablate: Callable[[nn.Module, str], bool] | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, optimizer, **settings)
        if not 0 <= gamma <= 1:
            raise ConfigError(f"gamma is {gamma}: a share of the fan-in, 0 to 1")
        if self.sample != 1:
            raise ConfigError("SRigL looks at all of a row's gradients: leave sample out")
        self.gamma, last = gamma, list(self.managers)[-1]
        self._ablates = {
            name: name != last if ablate is None else ablate(one.layer, name) for name, one in self.managers.items()
        }
        self._budgets: dict[str, int] = {}
        for name, manager in self.managers.items():
            pattern = manager.pattern
            counts = _per_row(pattern)
            if len(found := counts[counts > 0].unique()) > 1:
                raise ConfigError(
                    f"rows of {name or 'the layer'} store {int(found[0])} to {int(found[-1])} weights: make the layers "
                    "by sparsify(model, ConstantFanIn(…))"
                )
            self._budgets[name] = pattern.nnz
        self._reserve()

    def changed(self, name: str) -> Pattern:
        """What the layer of this name is to store from now on: as many in each row that lives."""
        old, kept = self.dropped(name)
        count, alive = old.nnz - kept.nnz, _per_row(old) > 0
        if self._ablates[name] and count:
            grown = self.gradients[name].candidates(count, kept, self.mean, alive)
            alive = self._surviving(alive, _per_row(kept) + _per_row(grown), int(_per_row(old).max()))
            kept = Pattern(kept.keys[alive[kept.row.long()]], kept.shape)
        fan_in = min(self._budgets[name] // max(int(alive.count_nonzero()), 1), old.shape[1])
        counts = (fan_in - _per_row(kept)) * alive
        return kept.union(self.gradients[name].candidates_of_rows(counts, kept, self.mean))

    def _surviving(self, alive: Tensor, salient: Tensor, fan_in: int) -> Tensor:
        """Those neurons that have enough salient weights; the one that has the most, if none has."""
        enough = alive & (salient >= self.gamma * fan_in)
        best = torch.zeros_like(alive)
        best[salient.masked_fill(~alive, -1).argmax()] = True
        return torch.where(enough.any(), enough, best)

    def state_dict(self) -> dict[str, Any]:
        """What a run goes on from, beside the model's and the optimizer's."""
        return super().state_dict() | {"budgets": dict(self._budgets)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state)
        self._budgets = dict(state["budgets"])
        self._reserve()

    def _reserve(self) -> None:
        """Room for what a layer stores before a neuron dies, so that nothing is compiled again then."""
        for name, budget in self._budgets.items():
            if self._ablates[name] and self.gamma:
                self.managers[name].reserve(budget)


def _per_row(pattern: Pattern) -> Tensor:
    """How many elements of each row: int64 (rows,)."""
    ones = torch.ones(pattern.nnz, dtype=torch.int64, device=pattern.device)
    return ones.new_zeros(pattern.shape[0]).index_add_(0, pattern.row.long(), ones)
