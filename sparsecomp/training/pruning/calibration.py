"""Statistics of what reaches each masked weight: pruners and stabilisers rank and repair by them.

Hooks see the inputs of linear layers and convolutions. Within an attention only the call that does its arithmetic
knows what reaches the output projection, so that call is watched too.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from sparsecomp.errors import MaskError
from sparsecomp.nn.masked.layers import masked_weights
from sparsecomp.training.pruning.scores import unfolded
from sparsecomp.training.pruning.sparsegpt import input_products

TokenMask = Callable[[Any], torch.Tensor]


class InputStatistics:
    """Count, mean and variance of each of `fan_in` inputs over all tokens, and their products if asked for.

    Sums are float64 over tokens in fp32, by batches (Chan et al. 1983), so that large means cost no digits.
    """

    def __init__(self, fan_in: int, device: torch.device, products: bool) -> None:
        self.count = 0
        self.mean = torch.zeros(fan_in, dtype=torch.float64, device=device)
        self.deviation = torch.zeros_like(self.mean)
        self.products = torch.zeros(fan_in, fan_in, device=device) if products else None

    def add(self, tokens: torch.Tensor) -> None:
        """Take tokens of shape (count, fan_in)."""
        if not tokens.numel():
            return
        variance, mean = torch.var_mean(tokens.float(), 0, correction=0)
        total = self.count + len(tokens)
        way = mean - self.mean
        self.deviation += variance * len(tokens) + way.square() * (self.count * len(tokens) / total)
        self.mean += way * (len(tokens) / total)
        self.count = total
        if self.products is not None:
            self.products += input_products(tokens.float())

    def state_dict(self) -> dict[str, Any]:
        """The statistics without the products."""
        return {"count": self.count, "mean": self.mean, "deviation": self.deviation}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> "InputStatistics":
        """What `state_dict` gave, on a device."""
        statistics = cls(0, device, products=False)
        statistics.count = state["count"]
        statistics.mean, statistics.deviation = state["mean"].to(device), state["deviation"].to(device)
        return statistics

    @property
    def variance(self) -> torch.Tensor:
        """Of each input over the tokens, float64 (fan_in,)."""
        return self.deviation / max(self.count, 1)

    @property
    def norm(self) -> torch.Tensor:
        """The 2-norm of each input over the tokens, float64 (fan_in,)."""
        return (self.deviation + self.count * self.mean.square()).sqrt()


Statistics = dict[str, tuple[InputStatistics, ...]]
"""By a weight's name: one part, or three for the rows of a packed attention projection (query, key, value)."""


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Callable[[Any], Any],
    token_mask: TokenMask | None = None,
    products: bool = False,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> Statistics:
    """Statistics of the inputs of `weights`, by their names; by default a wrapped model's `masked_weights(model)`.

    Runs `forward(batch)` for each batch without gradients and in evaluation mode; training flags come back. Tied
    weights add up. `token_mask(batch)` is a bool tensor, False at padding, which is dropped where a layer's input
    has its leading shape. `products` also sums H = 2 X X^T, of fan_in squared elements a weight. A weight that no
    batch reaches, or a convolution with groups or a named padding, has no entry.
    """
    if weights is None:
        weights = {name: weight for name, (weight, _) in masked_weights(model).items()}
    watch = _Watch(weights, products)
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), watch, watch.hooks(model):
            for batch in batches:
                watch.valid = None if token_mask is None else token_mask(batch)
                forward(batch)
    finally:
        for module, training in flags.items():
            module.training = training
    return {name: parts for name, parts in watch.found.items() if all(part.count for part in parts)}


class _Watch(TorchFunctionMode):
    """Collects inputs from hooks on layers and from the call within an attention."""

    def __init__(self, weights: Mapping[str, torch.Tensor], products: bool) -> None:
        super().__init__()
        self.names = {id(weight): name for name, weight in weights.items()}
        self.products = products
        self.found: Statistics = {}
        self.valid: torch.Tensor | None = None
        self.attention: nn.MultiheadAttention | None = None

    @contextmanager
    def hooks(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention):
                handles.append(module.register_forward_pre_hook(self._enter_attention, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave_attention, always_call=True))
            elif isinstance(module, nn.Linear | nn.Conv2d) and id(module.weight) in self.names:
                # the parameter itself: within a forward pass the attribute may read as the effective weight
                handles.append(module.register_forward_pre_hook(partial(self._layer, module.weight)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _layer(self, weight: torch.Tensor, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        tokens = inputs[0]
        if isinstance(module, nn.Conv2d):
            try:
                tokens = unfolded(tokens if tokens.dim() == 4 else tokens[None], module)
            except MaskError:  # no unfolded form: this layer is ranked by magnitude
                return
        self._add(weight, tokens)

    def _add(self, weight: Any, *parts: torch.Tensor) -> None:
        if id(weight) not in self.names:
            return
        name = self.names[id(weight)]
        if name not in self.found:
            make = [InputStatistics(part.shape[-1], part.device, self.products) for part in parts]
            self.found[name] = tuple(make)
        for statistics, part in zip(self.found[name], parts, strict=True):
            fits = self.valid is not None and part.shape[:-1] == self.valid.shape
            # no -1: a fan-in may be 0
            statistics.add(part[self.valid] if fits else part.reshape(part.shape[:-1].numel(), part.shape[-1]))

    def _enter_attention(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """What reaches the projections of queries, keys and values."""
        assert isinstance(module, nn.MultiheadAttention)
        self.attention = module
        call = inspect.signature(nn.MultiheadAttention.forward).bind(module, *args, **kwargs)
        inputs = [call.arguments[name] for name in ("query", "key", "value")]
        own = dict(module.named_parameters())
        self._add(own.get("in_proj_weight"), *inputs)
        for name, tokens in zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), inputs, strict=True):
            self._add(own.get(name), tokens)

    def _leave_attention(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.attention = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.multi_head_attention_forward and self.attention is not None:
            self._attention(self.attention, inspect.signature(func).bind(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def _attention(self, module: nn.MultiheadAttention, call: inspect.BoundArguments) -> None:
        """What reaches the projection of the result: with the identity in its place, it is returned."""
        width, query = call.arguments["out_proj_weight"].shape[1], call.arguments["query"]
        identity = torch.eye(width, dtype=query.dtype, device=query.device)
        call.arguments.update(out_proj_weight=identity, out_proj_bias=None)
        attended = functional.multi_head_attention_forward(*call.args, **call.kwargs)[0]
        by_batch = module.batch_first and attended.dim() == 3
        # the parameter itself: within a forward pass the attribute may read as the effective weight
        self._add(dict(module.named_parameters())["out_proj.weight"],
                  attended.transpose(0, 1) if by_batch else attended)
