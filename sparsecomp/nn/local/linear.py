"""A linear layer whose outputs read k inputs each."""

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsecomp import _compat
from sparsecomp.errors import CheckpointError, ConfigError, FormatError
from sparsecomp.nn.derived import moved_whole
from sparsecomp.ops.local.gather_dot import gather_dot
from sparsecomp.ops.sparse.linear import autocast
from sparsecomp.reference.local.connectivity import check_index, effective_fan_in, expand_in_indices_to_edges
from sparsecomp.reference.local.spread import spread_of
from sparsecomp.reference.local.transposed import kept_lists, lists_fit
from sparsecomp.reference.patterns import made_of
from sparsecomp.reference.precision import accumulator

COMPUTE_MODES = ("compiled", "gather", "scatter")
_LISTS = ("transposed_pointers", "transposed_order", "transposed_source")
_SMALL = {False: 2**14, True: 2**17}
"""Products of an input and a weight up to which a CPU gathers, without and with gradients (torch 2.13, one core)."""


class GeoSparseLinear(nn.Module):
    """y[..., o] = bias[o] + the sum of weight[o, j] · x[..., in_index_per_out[o, j]] over j.

    Args:
        in_features, out_features: n_in and n_out.
        in_index_per_out: (n_out, k), int32 or int64, in 0 to n_in - 1; inputs of an output may repeat. Copied as int32.
        bias: whether there is one.
        compute_mode: "compiled", one operator that never holds (..., n_out, k) elements, but on a CPU a few of them;
            "gather" or "scatter", the same in plain torch by gathered inputs or by a list of edges, which do.

    Attributes:
        weight: (n_out, k), a parameter.
        bias: (n_out,), a parameter, or None.
        in_index_per_out: a buffer, part of checkpoints.
        transposed_pointers, transposed_order, transposed_source: buffers that follow from it, of
            `sparsecomp.reference.local.transposed.kept_lists`, and are in no checkpoint.
        spread: how far apart neighbouring outputs read, a word of `sparsecomp.reference.local.spread`.
        adopt_pattern: whether a checkpoint of another pattern is taken, with its pattern; False unless set.

    Raises:
        ConfigError: an unknown mode, or a size that is no positive whole number.
        FormatError: the index does not fit.
    """

    adopt_pattern: bool = False
    bias: nn.Parameter | None
    in_index_per_out: Tensor
    transposed_pointers: Tensor
    transposed_order: Tensor
    transposed_source: Tensor
    spread: str

    def __init__(
        self, in_features: int, out_features: int, in_index_per_out: Tensor, *, bias: bool = True,
        compute_mode: str = "compiled",
    ) -> None:  # fmt: skip
        super().__init__()
        if compute_mode not in COMPUTE_MODES:
            raise ConfigError(f"compute_mode is {compute_mode!r}, needs one of {', '.join(COMPUTE_MODES)}")
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if type(size) is not int or size < 1:
                raise ConfigError(f"{name} is {size!r}, needs a whole number of 1 or more")
        index = check_index(in_index_per_out, in_features, out_features).clone()
        self.in_features, self.out_features, self.compute_mode = in_features, out_features, compute_mode
        self.weight = nn.Parameter(torch.empty(index.shape, device=index.device))
        self.register_parameter("bias", nn.Parameter(self.weight.new_empty(out_features)) if bias else None)
        self.register_buffer("in_index_per_out", index)
        for name in _LISTS:
            self.register_buffer(name, None, persistent=False)
        self._transpose()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias anew, as `torch.nn.Linear` does for k inputs."""
        bound = 1 / math.sqrt(self.k)
        with torch.no_grad():
            for parameter in self.parameters(recurse=False):
                parameter.uniform_(-bound, bound)

    @property
    def k(self) -> int:
        """Inputs of each output, repeated ones counted."""
        return self.in_index_per_out.shape[1]

    @property
    def effective_fan_in(self) -> Tensor:
        """Distinct inputs of each output: (n_out,)."""
        return effective_fan_in(self.in_index_per_out)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features).

        Raises:
            FormatError: x has another number of features or another dtype than the weight.
        """
        if x.shape[-1:] != (self.in_features,):
            raise FormatError(f"x has shape {tuple(x.shape)}, needs (..., {self.in_features})")
        lists = self.lists() if self.compute_mode == "compiled" else None
        if lists is not None and not self._is_small(x):
            return gather_dot(
                x, self.weight, self.in_index_per_out, self.bias, transposed=lists, spread=self.spread
            )
        x, weight = autocast(x, self.weight)
        if x.dtype != weight.dtype:
            raise FormatError(f"x is {x.dtype}, the weight {weight.dtype}: they need one dtype")
        wide = accumulator(x.dtype)
        products = _scattered if self.compute_mode == "scatter" else _gathered
        out = products(x.to(wide), weight.to(wide), self.in_index_per_out)
        return (out if self.bias is None else out + self.bias.to(wide)).to(x.dtype)

    def extra_repr(self) -> str:
        """Sizes, for print."""
        fan_in = "" if self.in_index_per_out.is_meta else f" ({self.effective_fan_in.double().mean():.4g} distinct)"
        return f"{self.in_features}, {self.out_features}, k={self.k}{fan_in}, bias={self.bias is not None}, " \
               f"compute_mode={self.compute_mode}"  # fmt: skip

    def _is_small(self, x: Tensor) -> bool:
        """Whether a CPU gathers, op by op, in less time than a call of the operator takes."""
        if torch.compiler.is_compiling() or x.device.type != "cpu":
            return False
        trained = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        return x.shape[:-1].numel() * self.weight.numel() <= _SMALL[trained]

    # -- what follows from the index

    def lists(self) -> tuple[Tensor, ...]:
        """Of the transpose; each backward sees whether they are of the index. Before, an eager call refuses one that
        reads beyond the inputs, if a version counter or another address tells of it."""
        if torch.compiler.is_compiling() and not torch.is_grad_enabled():
            return ()  # a graph without a backward would check three inputs more in each call, for nothing
        index, lists = self.in_index_per_out, tuple(getattr(self, name) for name in _LISTS)
        if torch.compiler.is_compiling() or index.is_meta:
            return lists
        if _compat.carries_levels(index):  # an ensemble's patterns, which vmap has put in place of the layer's
            return ()
        if self._memory() != self._seen:
            # DistributedDataParallel writes the same again in each forward
            if lists[0].device != index.device or not self._is_transposed(lists):
                self._transpose()
            self._seen = self._memory()
        return tuple(getattr(self, name) for name in _LISTS)

    def _is_transposed(self, lists: tuple[Tensor, ...]) -> bool:
        index = self.in_index_per_out
        return lists_fit(index, self.in_features, lists) and made_of(lists[-1], (index,))

    def _transpose(self) -> None:
        index = check_index(self.in_index_per_out, self.in_features, self.out_features)
        for name, fresh in zip(_LISTS, kept_lists(index, self.in_features), strict=True):
            kept = getattr(self, name)
            if kept is None or (kept.shape, kept.device) != (fresh.shape, fresh.device):
                setattr(self, name, fresh)
            else:
                kept.copy_(fresh)  # a captured graph reads it there
        self.spread = spread_of(index)
        self._seen = self._memory()

    def _memory(self) -> tuple[int, int]:
        """Where the index lies, and how often it was written to as far as torch counts."""
        index = self.in_index_per_out
        return (0, 0) if index.is_meta else (index.data_ptr(), 0 if index.is_inference() else index._version)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        current = self._memory() == self._seen
        with moved_whole(self, _LISTS, lambda: self.in_index_per_out.device):
            super()._apply(fn, recurse)
        if current:
            self._seen = self._memory()
        return self

    def pattern_of(self, state_dict: Mapping[str, Any], prefix: str = "") -> Tensor | None:
        """The index of a checkpoint that may be loaded here; None where it has none.

        Raises:
            CheckpointError: it has another pattern than the layer, and `adopt_pattern` is not set.
            FormatError: it is no index of the layer's sizes.
        """
        key, own = f"{prefix}in_index_per_out", self.in_index_per_out
        if key not in state_dict:
            return None
        given = check_index(state_dict[key], self.in_features, self.out_features)
        known = not given.is_meta and not own.is_meta
        if known and not self.adopt_pattern and not _are_equal(given, own):
            raise CheckpointError(
                f"the checkpoint's {key}, k={given.shape[1]}, is another pattern than the layer's, k={own.shape[1]}, "
                "such as that of another seed: build the model with the checkpoint's settings, or call "
                "sparsecomp.nn.adopt_patterns(model) to take the checkpoint's"
            )
        return given

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        """Take a checkpoint of the same pattern, or of any if `adopt_pattern` is set; see `pattern_of`."""
        given = self.pattern_of(state_dict, prefix)
        if given is not None:
            state_dict = {**state_dict, f"{prefix}in_index_per_out": given}
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._transpose()


def adopt_patterns(model: nn.Module) -> None:
    """Have a model's layers of fixed fan-in take the patterns of checkpoints that are loaded into it from now on."""
    for layer in model.modules():
        if isinstance(layer, GeoSparseLinear):
            layer.adopt_pattern = True


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.to(other.device), other)


def _gathered(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    # the gradient of a gather takes a CPU a tenth of the time of an index_select's, and half that of x[..., index]'s
    places = index.flatten().long().expand(*x.shape[:-1], -1)
    return (x.gather(-1, places).unflatten(-1, index.shape) * weight).sum(-1)


def _scattered(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    inputs, outputs = expand_in_indices_to_edges(index)
    messages = x.index_select(-1, inputs) * weight.flatten()
    return x.new_zeros(*x.shape[:-1], index.shape[0]).index_add(-1, outputs, messages)
