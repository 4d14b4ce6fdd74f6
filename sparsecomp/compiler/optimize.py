"""`optimize`: a rewritten nn.Module that looks and behaves like the one it was made from."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from sparsecomp import _compat
from sparsecomp.compiler.backend import compile_graph
from sparsecomp.compiler.call import Call
from sparsecomp.compiler.capture import capture, tell_breaks
from sparsecomp.compiler.trace import Assumptions, CaptureError, share_attributes, trace
from sparsecomp.errors import SparsecompError
from sparsecomp.options import Options
from sparsecomp.passes.engine.rule import Density
from sparsecomp.report import Compilations, Report, remember

log = logging.getLogger("sparsecomp")

_NEWLINE = "\n"
_SHARED = ("_parameters", "_buffers", "_modules")


def optimize(
    model: Callable[..., Any],
    /,
    *args: Any,
    options: Mapping[str, Any] | Options | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> nn.Module:
    """A module that computes what `model` computes, rewritten for sparsity.

    With inputs the model is traced with its neurons as leaves, and the result runs op by op. Where that is not faithful
    (state kept outside neurons), or nothing was rewritten, or there are no inputs, and for a function, the model runs
    under `torch.compile(backend="sparsecomp")`. `result.report.capture` says which way was taken.

    Args:
        model: any module or function; it is left as it is, and shares its parameters, buffers and submodules with the
            result.
        *args: inputs like those it will get, which also measure densities; none compiles it at its first call.
        options: as for the backend; see `Options`.
        kwargs: inputs by name. Needed only for those that have the name of an option.
        **keywords: options, and inputs by name if `kwargs` is not given.

    Returns:
        A module with the same state_dict keys, buffers, hooks and submodules. It can be copied and pickled if `model`
        can. In another mode (train or eval) than `model` has now, under autocast, or once its layers have other hooks,
        children or plain attributes than now, the traced form steps aside for the original `forward`.

    Raises:
        OptionError: an unknown option or value.
        InputError: a keyword that is both an option and an input.
        RuleError: a rule failed, under `strict=True`.
        Exception: what `model` itself raises on the inputs.
    """
    call = Call.of(model, args, options, kwargs, keywords)
    if not call.has_inputs:
        waiting = Report("torch.compile (no inputs)", graphs=0, notes=["it is compiled in its first call"])
        return Optimized(call, waiting).use_compile({})
    call = call.accepted()
    try:
        graph = trace(call)
    except CaptureError as error:
        return _compiled(call, Report(capture=f"torch.compile ({error})"))
    report = graph.rewrite(call.options)
    if not report.changed:
        return _compiled(call, Report("torch.compile (nothing to rewrite at the level of modules)", report.sites))
    report.capture = "symbolic trace, neurons as leaves"
    remember(report)
    return Optimized(call, report).use_graph(graph.gm, len(call.args))


class Optimized(nn.Module):
    """Stands in for `original`, whose parameters, buffers, submodules and hooks are its own.

    Attributes:
        report: what was rewritten.
    """

    def __init__(self, call: Call, report: Report) -> None:
        super().__init__()
        self.__dict__.update(
            _original=call.model, _options=call.options, _densities={}, _graph=None, _inputs=0, _assumed=None,
            _compiled=None, _backend=None, _report=report, training=call.model.training,
        )  # fmt: skip
        self._share()

    @property
    def report(self) -> Report:
        """What was rewritten; under torch.compile, in every graph compiled so far."""
        if self._backend is None:
            return self._report
        compiled = self._backend.compilations.report(self._report.capture)
        # where Dynamo's graphs have no site, those that the modules' graph named are what can be told
        told = compiled.sites or (compiled.graphs and not self._report.sites)
        return compiled if told else self._report

    def use_graph(self, gm: fx.GraphModule, inputs: int) -> "Optimized":
        """Run `gm` for calls with `inputs` positional arguments."""
        self.__dict__.update(_graph=gm, _inputs=inputs, _assumed=Assumptions(gm, self._original))
        return self

    def use_compile(self, densities: Mapping[str, Density]) -> "Optimized":
        """Run the original under torch.compile with our backend."""
        backend = _Backend(self._options, densities)
        compiled = _compat.compile_apart(self._original.forward, backend)
        self.__dict__.update(_densities=dict(densities), _backend=backend, _compiled=compiled)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the original's `forward` returns."""
        if self._compiled is not None:
            return self._compiled(*args, **kwargs)
        if self._graph is not None and not kwargs and len(args) == self._inputs and self._as_captured(args):
            return self._graph(*args)
        return self._original.forward(*args, **kwargs)

    def train(self, mode: bool = True) -> "Optimized":
        """As the original's `train`."""
        self._original.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the original's `state_dict`."""
        return self._original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the original's `load_state_dict`."""
        return self._original.load_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> "Optimized":
        self._original._apply(*args, **kwargs)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_original" not in self.__dict__:
                raise
            return getattr(self.__dict__["_original"], name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": self._compiled is not None, "_backend": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_compiled": None})
        self._share()
        if state["_compiled"]:
            self.use_compile(self._densities)

    def _share(self) -> None:
        for name, value in self._original.__dict__.items():
            if name in _SHARED or "_hooks" in name:
                self.__dict__[name] = value
        if self._graph is not None:
            share_attributes(self._graph, self._original)

    def _as_captured(self, args: Sequence[Any]) -> bool:
        devices = {value.device.type for value in args if isinstance(value, torch.Tensor)}
        if _compat.inside_transform() or any(torch.is_autocast_enabled(device) for device in devices):
            return False
        return self._assumed.hold()


class _Backend:
    """Our backend with options already parsed and densities already measured."""

    def __init__(self, options: Options, densities: Mapping[str, Density]) -> None:
        self._options = options
        self._densities = densities
        self.compilations = Compilations()

    @_compat.passes_errors(SparsecompError)
    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph(gm, example_inputs, self._options, self._densities, self.compilations)


def _compiled(call: Call, report: Report) -> Optimized:
    """The model under torch.compile, compiled for the inputs; as it is if that fails, since eager takes them."""
    optimized = Optimized(call, report)
    try:
        graphs, breaks = capture(call)
        report.graphs = 0  # it is the report as long as Dynamo makes none
        tell_breaks(report, breaks)
        optimized.use_compile({key: density for graph in graphs for key, density in graph.densities.items()})
        call.run(optimized)
        return optimized
    except Exception as error:
        if call.options.strict:
            raise
        cause = getattr(error, "inner_exception", error)  # what a backend raised
    reason = f"torch.compile failed: {type(cause).__name__}: {str(cause).strip().partition(_NEWLINE)[0]}"
    log.warning("optimize: the model runs as it was, %s", reason)
    return Optimized(call, Report("none: the model runs as it was", report.sites, notes=[reason]))
