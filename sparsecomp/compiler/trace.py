"""Captures a module by symbolic tracing, with neurons as leaves, and checks that the result is faithful.

Symbolic tracing runs the model's Python once with stand-ins. A hand-written neuron that keeps its state in an attribute
"succeeds" that way and comes out with its state frozen. So a capture counts only if tracing changed no state, and if
the captured graph gives what the model gives, twice in a row.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from sparsecomp import _compat
from sparsecomp.compiler.call import Call, FunctionModule
from sparsecomp.compiler.capture import Graph
from sparsecomp.compiler.density import DensityRecorder
from sparsecomp.compiler.snapshot import undone
from sparsecomp.nn.sparse.stored_weight import StoredWeight
from sparsecomp.passes.graph.canonicalize import has_hooks
from sparsecomp.passes.graph.layers import MODULE_OPS
from sparsecomp.passes.graph.operators import Trait, record_of
from sparsecomp.snn import registry as neurons


class CaptureError(Exception):
    """A module that symbolic tracing cannot capture faithfully; the message says why."""


def trace(call: Call) -> Graph:
    """The module's graph, whose attributes are the module's own, checked on the call's inputs.

    Raises:
        CaptureError: the model cannot be traced, keeps state outside its neurons, or behaves differently once traced.
    """
    if call.kwargs or isinstance(call.model, FunctionModule):
        raise CaptureError("only modules that are called with positional arguments are traced")
    if any(isinstance(module, StoredWeight) for module in call.model.modules()):
        raise CaptureError("a model with sparse layers is not traced")  # they check their input, which a stand-in fails
    gm = _trace(call.model, len(call.args))
    _check(call.model, gm, call.args)
    recorder = _ExampleRecorder(gm)
    call.run(recorder.run)
    return Graph(gm, recorder.attributes, recorder.densities, eager=True)


def share_attributes(gm: fx.GraphModule, model: nn.Module) -> None:
    """Make `gm` look its modules, parameters and buffers up in `model`'s own tables, so that later changes are seen."""
    for table in ("_modules", "_parameters", "_buffers"):
        gm.__dict__[table] = model.__dict__[table]


class Assumptions:
    """What a graph took for granted of a model: its modes, and more of the modules whose Python it does not call.

    Of those, tracing has read the plain attributes, and which children, parameters and hooks there are. Tensors may
    change; the graph looks them up.
    """

    def __init__(self, gm: fx.GraphModule, model: nn.Module) -> None:
        called = [gm.get_submodule(str(node.target)) for node in gm.graph.nodes if node.op == "call_module"]
        opaque = {inner for module in called for inner in module.modules()}
        self._training = [(module, module.training) for module in model.modules()]
        self._read = [
            (module, type(module), module is model, _plain(module), _absent(module), tuple(module._modules.items()))
            for module in model.modules()
            if module not in opaque
        ]

    def hold(self) -> bool:
        """Whether the model still is as it was."""
        return all(module.training is mode for module, mode in self._training) and all(
            type(module) is kind
            and (is_root or not has_hooks(module))
            and "forward" not in module.__dict__
            and _same(module.__dict__, attributes)
            and all(module._parameters.get(name) is None for name in absent)
            and all(module._modules.get(name) is child for name, child in children)
            for module, kind, is_root, attributes, absent, children in self._read
        )


class _Tracer(fx.Tracer):
    """Neurons are leaves; parameters without an example take their defaults."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self._inputs = inputs
        self._modes = _compat.ambient_modes()
        self.record_stack_traces = True

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A node, unless it would forget the context that its call stands in."""
        if _compat.ambient_modes() != self._modes:
            raise CaptureError("the model switches gradients or autocast, which a graph of modules would forget")
        return super().create_node(*args, **kwargs)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a submodule, unless it gives its input itself, or would run hooks once and for all."""
        if args and _is_identity(m):
            return args[0]
        if has_hooks(m) and not self.is_leaf_module(m, self.path_of_module(m)):
            raise CaptureError(f"{self.path_of_module(m)} has hooks")
        return super().call_module(m, forward, args, kwargs)

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


def _is_identity(module: nn.Module) -> bool:
    """Whether a module gives its input itself now, as dropout does in evaluation."""
    kind = type(module)
    name, _ = MODULE_OPS.get(kind, ("", None))
    library = kind.__module__.startswith("spikingjelly.") and kind.__name__ in ("Dropout", "Dropout2d")
    is_off = not module.training and (library or Trait.DROPOUT in record_of(name).traits)
    return (is_off or name == "identity") and not has_hooks(module)


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


def _plain(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    return tuple((name, value) for name, value in module.__dict__.items() if _is_plain(value))


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str | None) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _absent(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, value in module._parameters.items() if value is None)


def _same(found: Mapping[str, Any], expected: tuple[tuple[str, Any], ...]) -> bool:
    # identity first: it is cheap, and true of NaN
    return all((now := found.get(name)) is value or now == value for name, value in expected)


def _trace(model: nn.Module, inputs: int) -> fx.GraphModule:
    with undone(model) as snapshot:
        try:
            graph = _Tracer(inputs).trace(model)
        except CaptureError:
            raise
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
    with undone(model, args), torch.no_grad():
        return [leaf for _ in range(2) for leaf in _compat.tree_leaves(function(*args))]


def _close(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b)
    if not isinstance(b, torch.Tensor) or (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
