"""Change what a sparse layer stores, while it is trained, and take it back.

Values, gradients and the optimizer's state follow by position, and a new element has the state that a new optimizer
gives it. Where the number of elements stays, everything is written into the memory that is there: a compiled or
captured graph goes on with the new pattern, nothing is compiled again, and a GPU is not waited for.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsecomp import _compat
from sparsecomp.errors import PatternError
from sparsecomp.formats import CSC, CSR, Pattern
from sparsecomp.formats.indices import pointers_of
from sparsecomp.nn.sparse.stored_weight import StoredWeight
from sparsecomp.reference.sharding import is_sharded, parted, whole
from sparsecomp.training.dynamic.delta import PatternDelta
from sparsecomp.training.dynamic.told import tell

_REFUSED = {
    "static": ("additions", "removals"),
    "grow": ("removals",),
    "shrink": ("additions",),
    "free": (),
}


@dataclass(frozen=True)
class PatternChange:
    """A change that was made.

    Attributes:
        delta: what came and went.
        removed: the values that went, in the order of the layer's.
    """

    delta: PatternDelta
    removed: Tensor


class PatternManager:
    """The pattern of a sparse layer in CSR or CSC, as it changes.

    Args:
        layer: such as `SparseLinear`.
        optimizers: those that train its values; their state follows the pattern.
        policy: what may change: "static" nothing, "grow" and "shrink" in one direction, "free" all.
        keep: how many changes `undo` can take back.
        by: what makes the changes, for the compiler's report.

    Attributes:
        history: the last changes, oldest first.

    Raises:
        PatternError: a layer in another format, an unknown policy, or an optimizer whose state follows no pattern.
    """

    def __init__(
        self, layer: StoredWeight, optimizers: Iterable[Optimizer] = (), policy: str = "free", keep: int = 8,
        by: str = "a PatternManager's",
    ) -> None:  # fmt: skip
        if policy not in _REFUSED:
            raise PatternError(f"policy is {policy!r}, needs one of {', '.join(_REFUSED)}")
        if layer.format not in ("CSR", "CSC"):
            raise PatternError(f"the layer is in {layer.format}: the pattern of one in CSR or CSC can change")
        # ZeroRedundancyOptimizer has another within, which has the state of this process's parameters
        inner = [getattr(one, "optim", one) for one in optimizers]
        self.layer, self.optimizers, self.policy = layer, inner, policy
        if any(isinstance(one, torch.optim.LBFGS) for one in self.optimizers):
            raise PatternError("LBFGS keeps all parameters in one vector, which no pattern can change: use another one")
        self.history: deque[PatternChange] = deque(maxlen=keep)
        self._queue: list[PatternDelta] = []
        self._by, self._sharded = by, is_sharded(layer.values)
        self._tell()

    def __repr__(self) -> str:
        return f"PatternManager({self.layer!r}, policy={self.policy!r}, {len(self.history)} changes)"

    @property
    def matrix(self) -> CSR | CSC:
        """What the layer holds now; its size is read from the device where there is room for more alone."""
        matrix = self.layer.weight.matrix
        assert isinstance(matrix, CSR | CSC)
        return (matrix.with_values(whole(matrix.values)) if is_sharded(matrix.values) else matrix).known_compact()

    @property
    def pattern(self) -> Pattern:
        """What the layer stores now."""
        matrix = self.layer.weight.matrix
        if is_sharded(matrix.values):  # they do not matter, and other processes need not be asked for theirs
            matrix = matrix.with_values(torch.empty(matrix.values.shape, dtype=matrix.dtype, device=matrix.device))
        return Pattern.of(matrix.known_compact().to(CSR).known_compact())

    def queue(self, delta: PatternDelta) -> None:
        """Have `apply` make this change, after those that wait.

        Raises:
            PatternError: the policy refuses it.
        """
        self._allow(delta)
        self._queue.append(delta)

    def apply(self, start: Callable[[int], Tensor] | None = None) -> None:
        """Make the changes that wait, as one: what one of them removes and a later one adds stays as it is.

        Args:
            start: as of `become`.

        Raises:
            PatternError: a change does not fit the pattern, or as `become`. The layer is as it was, and nothing waits
                any more.
        """
        queue, self._queue = self._queue, []
        check_moment(self.layer.values.device)
        new = self.pattern
        for delta in queue:
            new = delta.of(new)
        self.become(new, start)

    def become(self, new: Pattern, start: Callable[[int], Tensor] | None = None) -> None:
        """Store the elements of `new` from now on.

        Args:
            new: of the layer's shape, on its device.
            start: gives the values (count,) of so many new elements, in the order of the layer's values; by default 0.

        Raises:
            PatternError: another shape or device, the policy refuses it, or a backward or the capture of a CUDA graph
                is under way. The layer is as it was.
        """
        check_moment(self.layer.values.device)
        old = self.pattern
        # a delta waits for the device, so only who needs one finds it
        delta = PatternDelta.between(old, new) if self.history.maxlen or self.policy != "free" else None
        if delta is not None:
            self._allow(delta)
        removed = None if delta is None else self._values_of(old, delta.removals)
        self._write(old, new, start)
        if delta is not None and removed is not None:
            self.history.append(PatternChange(delta, removed))

    def undo(self) -> None:
        """Take the last change back, with the values that it removed; their gradients and state begin at 0.

        Raises:
            PatternError: there is none, or as `become`.
        """
        if not self.history:
            raise PatternError("there is no change to take back")
        check_moment(self.layer.values.device)
        last, old = self.history[-1], self.pattern
        self._write(old, last.delta.inverse.of(old), lambda count: last.removed)
        self.history.pop()

    def reserve(self, capacity: int) -> None:
        """Have the layer `reserve` this capacity, with the gradient and the optimizers' state.

        Raises:
            FormatError: less than the layer stores, or values that are computed.
        """
        beside = list(self._beside())
        self.layer.reserve(capacity)
        for kept, put, _ in beside:
            put(_padded(kept, self.layer.values))
        self._tell()

    def _tell(self) -> None:
        if self.policy != "static":
            tell(self.layer, self._by)

    def _allow(self, delta: PatternDelta) -> None:
        for name in _REFUSED[self.policy]:
            if len(getattr(delta, name)):
                raise PatternError(f"the pattern is {self.policy}: a change may bring no {name}")

    def _values_of(self, pattern: Pattern, part: Pattern) -> Tensor:
        """A copy of the values of a part of what is stored, in the layer's order."""
        places = self._by_rows(pattern).places_of(self._by_rows(part))
        return whole(self.layer.values.detach()).index_select(0, places)

    def _write(self, old: Pattern, new: Pattern, start: Callable[[int], Tensor] | None) -> None:
        """Store `new` in place of `old`."""
        layer = self.layer
        if not isinstance(layer.values, nn.Parameter):
            raise PatternError("the layer's values are computed, by a parametrization: remove it first")
        if self._sharded and not is_sharded(layer.values):
            raise PatternError("the layer's values are gathered for a forward: call reshard() on what fully_shard made")
        # of inference tensors nothing could be trained
        with torch.inference_mode(layer.values.is_inference()), torch.no_grad():
            after = self._by_rows(new)
            places = self._by_rows(old).places_of(after)
            came = None if start is None else _started(start, int((places < 0).count_nonzero()))
            values = _moved(whole(layer.values.detach()), places, came)
            # all is worked out before anything is written
            moved = [(kept, _moved(whole(kept), places, fresh=fresh), put) for kept, put, fresh in self._beside()]
            dtype = layer.indices.dtype
            if self._sharded:
                values = self._part_of(values)
            layer.store(values, pointers_of(after.row, after.shape[0], dtype), after.col.to(dtype))
            for kept, tensor, put in moved:
                padded = _padded(tensor, layer.values)
                kept.copy_(parted(padded, kept)) if kept.shape == padded.shape else put(padded)
        self._tell()

    def _beside(self) -> Iterator[tuple[Tensor, Callable[[Tensor], None], Any]]:
        """What else has a number for each stored one, how to put another tensor in its place, and a new one's start."""
        values = self.layer.values
        if values.grad is not None:
            yield values.grad, partial(setattr, values, "grad"), 0
        for optimizer in self.optimizers:
            state = optimizer.state.get(values, {})
            for name, kept in state.items():
                if isinstance(kept, Tensor) and kept.dim() and kept.shape == values.shape:
                    yield kept, partial(state.__setitem__, name), _start_of(optimizer, values, name)

    def _part_of(self, values: Tensor) -> Tensor:
        """What this process stores of the values of a layer that is sharded."""
        size, own = values.numel(), self.layer.values
        if size > own.numel() or size < own.numel() and not self.layer.capacity:
            raise PatternError(
                f"the layer's {own.numel()} values are sharded, and their number cannot become {size}: reserve(…) as "
                "many as it may have, before fully_shard"
            )
        return parted(_padded(values, own), own)

    def _by_rows(self, pattern: Pattern) -> Pattern:
        """In the order of the layer's values."""
        return pattern.mT if self.layer.format == "CSC" else pattern


def check_moment(device: torch.device) -> None:
    """Raise PatternError where a pattern on this device cannot change now; asked before anything waits for it."""
    if _compat.in_backward() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        raise PatternError(
            "a pattern cannot change within a backward or while a CUDA graph is captured: change it between steps"
        )


_STARTS = {(torch.optim.Rprop, "step_size"): "lr", (torch.optim.Adagrad, "sum"): "initial_accumulator_value"}
"""The option that an optimizer's state begins at, where that is not 0."""


def _start_of(optimizer: Optimizer, values: Tensor, name: str) -> Any:
    """What this number of a new element begins at: a number, or a tensor of one."""
    option = next((one for (kind, slot), one in _STARTS.items() if isinstance(optimizer, kind) and slot == name), None)
    if option is None:
        return 0
    groups = (group for group in optimizer.param_groups if any(one is values for one in group["params"]))
    return next((group[option] for group in groups), 0)


def _padded(numbers: Tensor, values: Tensor) -> Tensor:
    """With 0 for the capacity that the values have behind them."""
    return F.pad(numbers, (0, values.numel() - numbers.numel()))


def _started(start: Callable[[int], Tensor], count: int) -> Tensor:
    came = start(count)
    if not isinstance(came, Tensor) or came.shape != (count,):
        given = f"values {tuple(came.shape)}" if isinstance(came, Tensor) else f"a {type(came).__name__}"
        raise PatternError(f"start gave {given}, needs ({count},)")
    return came


def _moved(kept: Tensor, places: Tensor, came: Tensor | None = None, fresh: Any = 0) -> Tensor:
    """The numbers of the new elements: those that were at `places` before, and `came`, or `fresh`, where that is -1."""
    old = kept.index_select(0, places.clamp(min=0)) if kept.numel() else kept.new_zeros(places.shape)
    is_new = places < 0
    return old.masked_fill(is_new, fresh) if came is None else old.masked_scatter(is_new, came.to(old))
