"""Captures a module by symbolic tracing, with neurons as leaves, and checks that the result is honest.

Symbolic tracing runs the model's Python once with stand-ins. A hand-written neuron that keeps its state in an attribute
"succeeds" that way and comes out with its state frozen. So a capture counts only if tracing changed no state, and if
the captured graph gives what the model gives, twice in a row.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from sparsecomp import _compat, neurons
from sparsecomp.density import DensityRecorder
from sparsecomp.passes.rule import Density
from sparsecomp.state import undone


class CaptureError(Exception):
    """A module that symbolic tracing cannot capture faithfully; the message says why."""


@dataclass(slots=True)
class ModuleCapture:
    """A faithful graph of a module.

    Attributes:
        gm: the graph; its attributes are the module's own.
        values: the tensors behind its attributes.
        densities: measured densities by `passes.rule.site_key`.
    """

    gm: fx.GraphModule
    values: Mapping[fx.Node, torch.Tensor]
    densities: Mapping[str, Density]


def capture(model: nn.Module, args: Sequence[Any]) -> ModuleCapture:
    """Trace `model` and check the result on `args`.

    Raises:
        CaptureError: the model cannot be traced, keeps state outside its neurons, or behaves differently once traced.
    """
    gm = _trace(model, len(args))
    _check(model, gm, args)
    with undone(model):
        recorder = _ExampleRecorder(gm)
        recorder.run(*args)
    return ModuleCapture(gm, recorder.attributes, recorder.densities)


def share_attributes(gm: fx.GraphModule, model: nn.Module) -> None:
    """Make `gm` look its modules, parameters and buffers up in `model`'s own tables, so that later changes are seen."""
    for table in ("_modules", "_parameters", "_buffers"):
        gm.__dict__[table] = model.__dict__[table]


class _Tracer(fx.Tracer):
    """Neurons are leaves; parameters without an example take their defaults."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self._inputs = inputs
        self.record_stack_traces = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # spikingjelly's layers test the number of dimensions, which a stand-in does not have
        library_layer = type(m).__module__.startswith("spikingjelly.") and not list(m.children())
        return library_layer or neurons.is_neuron(m) or super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [p.name for p in inspect.signature(root_fn).parameters.values() if p.kind in positional]
        names = names[1 : 1 + self._inputs]
        if len(names) < self._inputs:
            raise CaptureError(f"forward takes {len(names)} positional arguments, the example has {self._inputs}")
        return root_fn, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in names)]


class _Replay(fx.Tracer):
    """Leaves buffers symbolic too: batch-norm statistics must not become constants."""

    proxy_buffer_attributes = True


class _ExampleRecorder(DensityRecorder):
    """Also leaves a fake tensor with each node, for the analysis and the rules."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self._mode = _compat.FakeTensorMode()
        self.attributes: dict[fx.Node, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            n.meta["example_value"] = self._mode.from_tensor(result.detach())
            if n.op == "get_attr":
                self.attributes[n] = result
        return result


def _trace(model: nn.Module, inputs: int) -> fx.GraphModule:
    with undone(model) as snapshot:
        try:
            graph = _Tracer(inputs).trace(model)
        except Exception as error:
            raise CaptureError(f"symbolic tracing failed: {error}") from error
        changed = snapshot.changed()
    if changed:
        raise CaptureError(f"the model changes its state while it is traced ({', '.join(sorted(set(changed)))})")
    gm = fx.GraphModule(model, _replayable(graph))
    share_attributes(gm, model)
    return gm


def _replayable(graph: fx.Graph) -> fx.Graph:
    """A copy that unpickles: a graph module is traced again then, with the tracer that its graph remembers."""
    plain = fx.Graph(tracer_cls=_Replay)
    plain.output(plain.graph_copy(graph, {}))
    return plain


def _check(model: nn.Module, gm: fx.GraphModule, args: Sequence[Any]) -> None:
    expected, found = _twice(model, model, args), _twice(model, gm, args)
    if len(expected) != len(found) or not all(map(_close, expected, found)):
        raise CaptureError("the traced model gives other results than the model itself")


def _twice(model: nn.Module, function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """The outputs of two calls in a row, from the state the model is in."""
    with undone(model), torch.no_grad():
        return [leaf for _ in range(2) for leaf in _compat.tree_leaves(function(*args))]


def _close(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b)
    if not isinstance(b, torch.Tensor) or (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
