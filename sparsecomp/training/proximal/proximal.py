"""Proximal steps behind an optimizer's own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sparsecomp.errors import ConfigError
from sparsecomp.nn import SparseLinear
from sparsecomp.training.distributed import bare
from sparsecomp.training.proximal.penalties import Penalty

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, SparseLinear)


class Proximal:
    """Has an optimizer take a penalty's proximal step after each of its own, at its learning rate.

    The step does not pass through the optimizer's moments, as AdamW's weight decay does not. Weights become exactly 0,
    so that `sparsecomp.sparsify(model, FromMask())` then stores the rest.

    Args:
        optimizer: of torch.optim; its steps stay its own, for schedulers and GradScaler too.
        model: perhaps compiled or within DistributedDataParallel; its linear and convolution weights, and values of
            sparse layers, pay the penalty.
        penalty: such as `L1(1e-4)` or `GroupLasso(1e-4, "rows")`; sparse layers can pay `L1` and `Hoyer` alone.
        filter: of a layer and its name in the model, whether it pays; all by default.

    Attributes:
        weights: what pays, by the layers' names.

    Raises:
        ConfigError: a penalty that fits a weight not, or no weight that the optimizer trains.
    """

    def __init__(
        self, optimizer: Optimizer, model: nn.Module, penalty: Penalty,
        filter: Callable[[nn.Module, str], bool] | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(penalty, Penalty) or isinstance(penalty, type):
            raise ConfigError(f"penalty is {penalty!r}: give one such as L1(1e-4)")
        self.penalty = penalty
        trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
        layers = {
            name: layer for name, layer in bare(model).named_modules()
            if isinstance(layer, _LAYERS) and (filter is None or filter(layer, name))
        }  # fmt: skip
        found = {name: _weight(layer) for name, layer in layers.items()}
        self.weights = {name: weight for name, weight in found.items() if id(weight) in trained}
        if not self.weights:
            raise ConfigError("the optimizer trains no weight of a linear or convolution layer that the filter takes")
        for name, weight in self.weights.items():
            try:
                penalty.value(weight.detach())
            except ConfigError as error:
                raise ConfigError(f"{name or 'the layer'}: {error}; a filter can leave it out") from error
        self._paying = {id(weight) for weight in self.weights.values()}
        self._handle: RemovableHandle = optimizer.register_step_post_hook(self._step)

    def remove(self) -> None:
        """End the penalty."""
        self._handle.remove()

    def value(self) -> Tensor:
        """λ · Ω of all weights, each once, a scalar that gradients flow through."""
        once = {id(weight): weight for weight in self.weights.values()}
        return torch.stack([self.penalty.value(weight) for weight in once.values()]).sum()

    @torch.no_grad()
    def _step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # GradScaler has fused optimizers leave out a step themselves
        overflow = getattr(optimizer, "found_inf", None)
        for group in optimizer.param_groups:
            for weight in group["params"]:
                # what got no gradient took no step
                if id(weight) in self._paying and weight.grad is not None:
                    new = self.penalty.prox(weight, group["lr"])
                    weight.copy_(new if overflow is None else new.where(overflow.to(weight.device) == 0, weight))


def _weight(layer: nn.Module) -> Tensor:
    return layer.values if isinstance(layer, SparseLinear) else layer.weight  # pyright: ignore[reportReturnType]
