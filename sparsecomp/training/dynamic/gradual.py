"""Gradual pruning: sparsity grows along a schedule while a dense model is trained."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from sparsecomp.errors import ConfigError, MaskError
from sparsecomp.nn import masked_weights
from sparsecomp.nn.masked.masked_weight import Mode
from sparsecomp.reference.selection import select_top
from sparsecomp.reference.sharding import whole
from sparsecomp.training.distributed import agreed, bare
from sparsecomp.training.dynamic.stepped import Stepped
from sparsecomp.training.pruning.budgets import BUDGETS
from sparsecomp.training.schedules import sparsity_at


class GradualPruning(Stepped):
    """Prunes the smallest magnitudes every `every` steps from step `start` to step `end` (Zhu & Gupta 2017).

        model = sparsecomp.nn.wrap_module(model)
        pruning = GradualPruning(model, sparsity=0.9, start=500, end=5000)
        for x, y in data:
            ...
            optimizer.step()
            pruning.update()
        model = sparsecomp.sparsify(model, FromMask())

    What is pruned is 0 in every forward, whatever an optimizer's momentum does to it, and stays pruned: its magnitude
    counts as less than any other's, 0 among them.

    Args:
        model: with masked weights, of `wrap_module`; perhaps compiled or within DistributedDataParallel.
        sparsity: at the end, in [0, 1).
        start, end: steps of the first pruning, behind a warm-up, and of the last, from which on masks stay.
        every: steps between prunings; it divides `end` - `start`.
        initial: sparsity at the start, at most that of the end.
        shape: of the way from there: "cubic", as published, or another of `runtime.sparsity_at`: "cosine", "linear",
            "exponential", "step", "iterative".
        budget: how layers share the sparsity: "uniform", "erk" (Evci et al. 2020), or "global" by magnitudes alone; or
            sparsities of the end by names of masked weights, the others having `sparsity`.
        filter: of a masked weight's name, whether it is pruned; all by default.

    Raises:
        ConfigError: a setting outside its domain, or nothing to prune.
        ScheduleError: a sparsity or shape that there is not.
    """

    def __init__(
        self, model: nn.Module, *, sparsity: float, start: int, end: int, every: int = 100, initial: float = 0.0,
        shape: str = "cubic", budget: str | Mapping[str, float] = "uniform",
        filter: Callable[[str], bool] | None = None,
    ) -> None:  # fmt: skip
        if every < 1 or not 0 <= start <= end or (end - start) % every:
            raise ConfigError(
                f"start is {start}, end {end} and every {every}: end - start must be 0 or more and a multiple of every"
            )
        own = dict(budget) if isinstance(budget, Mapping) else {}
        for one in (sparsity, *own.values()):
            sparsity_at(0, 1, initial, one, shape)
            if initial > one:
                raise ConfigError(f"initial {initial} is above sparsity {one}: what is pruned does not come back")
        if isinstance(budget, str) and budget not in (*BUDGETS, "global"):
            raise ConfigError(f"budget is {budget!r}: give one of {', '.join(BUDGETS)}, global, or sparsities by name")
        self.start, self.end, self.every = start, end, every
        self._settings = (initial, sparsity, shape)
        self._budget, self._own = (self._of_layers if own else BUDGETS.get(str(budget))), own
        self._weights = {
            name: pair for name, pair in masked_weights(bare(model)).items() if filter is None or filter(name)
        }
        if not self._weights:
            raise ConfigError("the model has no masked weight to prune: call sparsecomp.nn.wrap_module")
        if unknown := own.keys() - self._weights.keys():
            named = ", ".join(sorted(unknown))
            raise ConfigError(f"budget names {named}: masked weights are {', '.join(self._weights)}")
        self._replicas = agreed(model, repr(self))

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={getattr(self, name)}" for name in ("start", "end", "every", "steps"))
        return f"GradualPruning({len(self._weights)} weights to sparsity {self._settings[1]}, {told})"

    @property
    def due(self) -> bool:
        """Whether weights are pruned behind this step."""
        return self.start <= self.steps <= self.end and (self.steps - self.start) % self.every == 0

    @property
    def sparsity(self) -> float:
        """That the schedule wants behind this step."""
        return self._reached(self._settings[1])

    def _reached(self, end: float) -> float:
        """The sparsity behind this step of what has `end` at the end."""
        initial, _, shape = self._settings
        count = (self.end - self.start) // self.every + 1
        reached = min(max((self.steps - self.start) // self.every, -1), count - 1)
        return sparsity_at(reached, count, initial, end, shape) if reached >= 0 else 0.0

    def _of_layers(self, shapes: Mapping[str, Sequence[int]], sparsity: float) -> dict[str, int]:
        """How many weights each layer keeps, by sparsities of its own."""
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        ends = {name: self._own.get(name, self._settings[1]) for name in shapes}
        return {name: size - int(self._reached(ends[name]) * size) for name, size in sizes.items()}

    def act(self) -> None:
        """Prune.

        Raises:
            MaskError: a weight holds NaN, or is in a RESU phase; nothing is pruned.
        """
        for name, (_, masked) in self._weights.items():
            if masked.mode is Mode.RESU:
                raise MaskError(f"{name} is in its RESU phase: end it by commit_ before weights are pruned")
        whole_weights = {name: whole(weight.detach()) for name, (weight, _) in self._weights.items()}
        with self._replicas.as_one(next(iter(whole_weights.values())).device):
            masks = self._masks(whole_weights)
        for name, (weight, masked) in self._weights.items():
            masked.prune_(weight, self._replicas.decided(masks[name]))

    def _masks(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        scores = {
            name: weights[name].float().abs().masked_fill(~masked.mask.mask, -1).flatten()
            for name, (_, masked) in self._weights.items()
        }
        shapes = {name: weight.shape for name, (weight, _) in self._weights.items()}
        if self._budget is None:
            every = torch.cat([*scores.values()])
            kept = select_top(every, every.numel() - int(self.sparsity * every.numel()), refuse_nan=True)
            parts = kept.split([one.numel() for one in scores.values()])
            return {name: part.view(shapes[name]) for name, part in zip(scores, parts, strict=True)}
        keep = self._budget(shapes, self.sparsity)
        return {name: select_top(one, keep[name], refuse_nan=True).view(shapes[name]) for name, one in scores.items()}
