"""Training that is sparse from the first step: weights go and others come, while their number stays.

    model = sparsecomp.sparsify(model, Unstructured(0.9, by="random"))
    optimizer = torch.optim.AdamW(model.parameters())
    rigl = RigL(model, optimizer, end=7500)
    for x, y in data:
        optimizer.zero_grad()
        with rigl.watch():
            loss_fn(model(x), y).backward()
        if not rigl.update():
            optimizer.step()
"""

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsecomp.errors import ConfigError
from sparsecomp.formats import CSR, Pattern
from sparsecomp.formats.indices import select_keys
from sparsecomp.nn import SparseLinear
from sparsecomp.ops.masked.elementwise import select_largest
from sparsecomp.reference.sharding import local
from sparsecomp.training.distributed import agreed, bare
from sparsecomp.training.dynamic.gradients import GradientAccumulator
from sparsecomp.training.dynamic.manager import PatternManager, check_moment
from sparsecomp.training.dynamic.stepped import Stepped


class DynamicSparsity(Stepped):
    """Every `every` steps, until step `end`, a share of each layer's weights is replaced by others.

    The share falls along a cosine: fraction / 2 · (1 + cos(π t / end)) (Evci et al. 2020, section 3). A change takes
    the place of that step's optimizer step. The number of weights stays the same to the last one, so nothing is
    compiled again; new weights begin at 0, and so do the optimizer's numbers of them.

    Args:
        model: whose `SparseLinear` layers in CSR or CSC change; it may be compiled, or within DistributedDataParallel,
            whose processes call everything alike.
        optimizer: that trains it; layers that it does not train stay as they are.
        end: the step from which on nothing changes; three quarters of the training are usual.
        every: steps between changes.
        fraction: share of a layer's weights that the first changes replace, 0 to 1.
        filter: of a layer and its name in the model, whether it changes; all by default.
        seed: of what is drawn at random.

    Attributes:
        managers: the layers' patterns, by name.
        gradients: of their whole weights, by name, in a step that changes patterns by them.

    Raises:
        ConfigError: a setting outside its domain, no such layer, or one whose values are another layer's too.
    """

    replaces_step = True
    watches = False
    """Whether gradients outside of the pattern decide."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, end: int, every: int = 100, fraction: float = 0.3,
        filter: Callable[[nn.Module, str], bool] | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        if every < 1 or end < 0 or not 0 <= fraction <= 1:
            raise ConfigError(f"every {every}, end {end}, fraction {fraction}: 1 or more, 0 or more, and a share")
        self.every, self.end, self.fraction, self.seed = every, end, fraction, seed
        trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
        by = f"{type(self).__name__}, every {every} steps to step {end}"
        self.managers = {
            name: PatternManager(layer, [optimizer], keep=0, by=by)
            for name, layer in bare(model).named_modules()
            if isinstance(layer, SparseLinear) and layer.format in ("CSR", "CSC")
            and layer.values.requires_grad and id(layer.values) in trained and (filter is None or filter(layer, name))
        }  # fmt: skip
        if not self.managers:
            raise ConfigError("the optimizer trains no SparseLinear in CSR or CSC: make some by sparsify, before it")
        _check_untied(model, self.managers)
        self._replicas = agreed(model, f"{self!r} of {[*self.managers]}, seed {seed}")
        self.gradients = {name: GradientAccumulator(one.layer) for name, one in self.managers.items()}

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={getattr(self, name)}" for name in ("every", "end", "fraction", "steps"))
        return f"{type(self).__name__}({len(self.managers)} layers, {told})"

    @property
    def due(self) -> bool:
        """Whether this step changes patterns."""
        return 0 < self.steps < self.end and self.steps % self.every == 0

    @property
    def share(self) -> float:
        """Share of the weights that a change replaces now."""
        return self.fraction / 2 * (1 + math.cos(math.pi * self.steps / self.end)) if self.steps < self.end else 0.0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around forward and backward. Where this step changes patterns by gradients, compiled models run eagerly."""
        with ExitStack() as stack:
            if self.due and self.watches:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                for accumulator in self.gradients.values():
                    stack.enter_context(accumulator.watching())
            yield

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; what gradients were seen is forgotten."""
        super().load_state_dict(state)
        for accumulator in self.gradients.values():
            accumulator.clear()

    def act(self) -> None:
        """Change the patterns. A layer that no backward reached stays as it is, if gradients decide.

        Raises:
            PatternError: no backward ran within `watch`, or one is running. Nothing has changed.
        """
        for manager in self.managers.values():
            check_moment(manager.layer.values.device)
        changed = {name: self.changed(name) for name in self.changing()}
        self._replicas.check_alike({name: new.keys for name, new in changed.items()})
        for name, new in changed.items():
            self.managers[name].become(new)
            self.gradients[name].clear()

    def changed(self, name: str) -> Pattern:
        """What the layer of this name is to store from now on."""
        old, kept = self.dropped(name)
        return kept.union(self.grown(name, old, kept, old.nnz - kept.nnz), old.nnz)

    def dropped(self, name: str) -> tuple[Pattern, Pattern]:
        """What the layer of this name stores, and what of it stays."""
        matrix = self.managers[name].matrix.to(CSR).known_compact()
        old = Pattern.of(matrix)
        count = self.count(old)
        return old, Pattern(select_keys(old.keys, self.kept(matrix.values, count), old.nnz - count), old.shape)

    def changing(self) -> Iterable[str]:
        """Names of the layers that this step changes."""
        return self.managers

    def count(self, pattern: Pattern) -> int:
        """How many elements of a pattern a change replaces."""
        return int(self.share * pattern.nnz)

    def kept(self, values: Tensor, count: int) -> Tensor:
        """Which weights stay: bool, all but `count` of `values` (nnz,).

        The largest magnitudes; NaN stays, so that a diverged weight is seen.
        """
        return select_largest(values.detach().abs().nan_to_num(nan=torch.inf), values.numel() - count)

    @abstractmethod
    def grown(self, name: str, old: Pattern, kept: Pattern, count: int) -> Pattern:
        """`count` elements that come, of the layer of this name, which stored `old` and of it has `kept`."""

    def reached(self, name: str) -> bool:
        """Whether a backward reached the layer of this name in any process; to the mean the others give zeros."""
        accumulator, layer = self.gradients[name], self.managers[name].layer
        if self._replicas.group is None:
            return accumulator.reached
        rows, cols = layer.shape
        if found := self._replicas.any(torch.tensor(accumulator.reached, device=layer.values.device)):
            own = local(layer.values.detach())
            accumulator.take(own.new_empty(0, cols), own.new_empty(0, rows))
        return found

    def mean(self, gradient: Tensor) -> Tensor:
        """Over the processes."""
        if self._replicas.group is None:
            return gradient
        dist.all_reduce(gradient, group=self._replicas.group)
        return gradient / self._replicas.count


def _check_untied(model: nn.Module, managers: dict[str, PatternManager]) -> None:
    """Raise ConfigError if a layer's values are in another module too, whose pattern would not follow."""
    held = Counter(id(one) for module in model.modules() for one in module.parameters(recurse=False))
    tied = [name for name, manager in managers.items() if held[id(manager.layer.values)] > 1]
    if tied:
        raise ConfigError(
            f"the values of {', '.join(tied)} are another module's too, whose pattern would not follow: use one module "
            "in both places, or leave it out by filter"
        )
