"""Which layers a model calls: modules without submodules, neurons, and functions of torch that do a layer's work."""

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from sparsecomp.passes.graph.operators import Trait, record_of, spelling_of
from sparsecomp.snn.registry import is_neuron

_TORCH = str(Path(torch.__file__).parent)


class Meter(Protocol):
    """Is told when a layer's call begins and ends; a layer is what `LayerCalls` was given for it."""

    def before(self, layer: Any, x: Any) -> None:
        """A call with first argument `x` begins."""

    def after(self, layer: Any, x: Any) -> None:
        """It has ended."""


class LayerCalls:
    """The calls of a model's layers.

    Attributes:
        layers: those called so far, in the order of their first call.
    """

    def __init__(self, model: nn.Module, layer: Callable[[str, str], Any]) -> None:
        """`layer(name, kind)` makes what stands for a layer."""
        self.layers: dict[Hashable, Any] = {}
        self._layer = layer
        self._names = {module: name for name, module in model.named_modules()}
        self._leaves = {module for module in self._names if _is_leaf(module, model)}
        self._open: list[nn.Module] = []
        # of the open calls of modules, how many there were when that of a leaf began; 0 outside of any
        self._depth = 0

    @contextmanager
    def told_to(self, meter: Meter) -> Iterator[None]:
        """Within it every call of a layer is told to a meter.

        A watch over torch's functions costs each of them a microsecond or two: once a model has run, it is kept only if
        the model calls layers so.
        """
        with ExitStack() as stack:
            for module in self._names:
                stack.callback(module.register_forward_pre_hook(self._entering(meter)).remove)
                stack.callback(module.register_forward_hook(self._leaving(meter), always_call=True).remove)
            if not self.layers or any(isinstance(key, tuple) for key in self.layers):
                stack.enter_context(_Functions(self, meter))
            yield

    def _entering(self, meter: Meter) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._open.append(module)
            if not self._depth and module in self._leaves:
                self._depth = len(self._open)
                layer = self.layers.get(module)
                if layer is None:
                    layer = self.layers[module] = self._layer(self._names[module], type(module).__name__)
                meter.before(layer, args[0] if args else None)

        return enter

    def _leaving(self, meter: Meter) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._depth == len(self._open):
                self._depth = 0
                meter.after(self.layers[module], args[0] if args else None)
            self._open.pop()

        return leave

    @property
    def inside_leaf(self) -> bool:
        """Whether the call of a module that is a layer has begun and not ended."""
        return self._depth > 0

    def function(self, name: str) -> Any:
        """What stands for the layer that a function is, called where the user's code does now."""
        path = self._names[self._open[-1]] if self._open else ""
        key = path, name, _users_line()
        if key not in self.layers:
            called = f"{path}.{name}" if path else name
            again = sum(isinstance(other, tuple) and other[:2] == key[:2] for other in self.layers)
            self.layers[key] = self._layer(
                f"{called}_{again}" if again else called, f"F.{name}" if hasattr(F, name) else name
            )  # fmt: skip
        return self.layers[key]


class _Functions(TorchFunctionMode):
    """Tells a meter of torch's functions that are layers."""

    def __init__(self, calls: LayerCalls, meter: Meter) -> None:
        super().__init__()
        self._calls, self._meter = calls, meter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if self._calls.inside_leaf or not _does_a_layers_work(func, name):
            return func(*args, **kwargs)
        layer, x = self._calls.function(name), args[0] if args else kwargs.get("input")
        self._meter.before(layer, x)
        result = func(*args, **kwargs)
        self._meter.after(layer, x)
        return result


def _does_a_layers_work(func: Any, name: str) -> bool:
    """What `torch.nn.functional` has, and products of matrices."""
    return getattr(F, name, None) is func or Trait.PRODUCT in record_of(spelling_of(name)[0]).traits


def _is_leaf(module: nn.Module, model: nn.Module) -> bool:
    if is_neuron(module):
        return True
    if any(module.children()):
        return False
    # of a model that is all functions, those are the layers
    return module is not model or type(module).__module__.startswith(("torch.nn.modules.", "sparsecomp.nn."))


def _users_line() -> tuple[str, int]:
    """File and line of the innermost frame outside torch and this file."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
