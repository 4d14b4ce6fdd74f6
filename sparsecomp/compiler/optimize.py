"""`optimize`: a rewritten nn.Module that looks and behaves like the one it was made from."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from sparsecomp import _compat
from sparsecomp.compiler.backend import compile_graph, note_device
from sparsecomp.compiler.capture import Assumptions, CaptureError, capture, share_attributes
from sparsecomp.compiler.explain import measured_densities
from sparsecomp.compiler.snapshot import undone
from sparsecomp.options import Options
from sparsecomp.passes import pipeline
from sparsecomp.passes.engine.rule import Density
from sparsecomp.passes.rules import parse_options
from sparsecomp.report import Report, merge, remember

log = logging.getLogger("sparsecomp")

_SHARED = ("_parameters", "_buffers", "_modules")


def optimize(model: nn.Module, example_inputs: Any = None, *, mode: str | None = None, **options: Any) -> nn.Module:
    """A module that computes what `model` computes, rewritten for sparsity.

    With example inputs the model is traced with its neurons as leaves, and the result runs op by op. Where that is not
    faithful (state kept outside neurons), or nothing was rewritten, or there are no example inputs, the model runs
    under `torch.compile(backend="sparsecomp")`. `result.report.capture` says which way was taken.

    Args:
        model: any module; it is left as it is, and shares its parameters, buffers and submodules with the result.
        example_inputs: a tensor or a tuple of positional arguments of `forward`; also measures densities.
        mode, **options: as for the backend, see `Options`.

    Returns:
        A module with the same state_dict keys, buffers, hooks and submodules. It can be copied and pickled if `model`
        can. In another mode (train or eval) than `model` has now, under autocast, or once its layers have other hooks,
        children or plain attributes than now, the traced form steps aside for the original `forward`.

    Raises:
        OptionError: an unknown option or value.
        RuleError: a rule failed, under `strict=True`.
        Exception: what `model` itself raises on the example inputs.
    """
    parsed = parse_options(mode, options)
    args = _as_tuple(example_inputs)
    refused = Report(capture="no example inputs")
    if args is not None:
        traced = _traced(model, args, parsed)
        if isinstance(traced, nn.Module):
            return traced
        refused = traced
    return _compiled(model, args, parsed, refused)


class Optimized(nn.Module):
    """Stands in for `original`, whose parameters, buffers, submodules and hooks are its own.

    Attributes:
        report: what was rewritten.
    """

    def __init__(self, original: nn.Module, options: Options, report: Report) -> None:
        super().__init__()
        self.__dict__.update(
            _original=original, _options=options, _densities={}, _graph=None, _inputs=0, _assumed=None, _compiled=None,
            _backend=None, _report=report, training=original.training,
        )  # fmt: skip
        self._share()

    @property
    def report(self) -> Report:
        """What was rewritten; under torch.compile, in every graph compiled so far."""
        return self._report if self._backend is None else self._backend.report(self._report)

    def use_graph(self, gm: fx.GraphModule, inputs: int) -> None:
        """Run `gm` for calls with `inputs` positional arguments."""
        self.__dict__.update(_graph=gm, _inputs=inputs, _assumed=Assumptions(gm, self._original))

    def use_compile(self, densities: Mapping[str, Density]) -> None:
        """Run the original under torch.compile with our backend."""
        backend = _Backend(self._options, densities)
        compiled = torch.compile(self._original.forward, backend=backend)
        self.__dict__.update(_densities=dict(densities), _backend=backend, _compiled=compiled)

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
        self._reports: list[Report] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled, report = compile_graph(gm, example_inputs, self._options, self._densities)
        self._reports.append(report)
        return compiled

    def report(self, start: Report) -> Report:
        """`start` with what every compiled graph added to it; its own sites count only where no graph has any."""
        if any(report.sites for report in self._reports):
            start = replace(start, sites=[])
        return merge([start, *self._reports], start.capture)


def _traced(model: nn.Module, args: tuple[Any, ...], options: Options) -> Optimized | Report:
    """The module-level rewrite, or the report of what was refused, with the reason for `capture`."""
    try:
        captured = capture(model, args)
    except CaptureError as error:
        return Report(capture=str(error))
    report = pipeline.run(
        captured.gm, options, values=captured.values, densities=captured.densities, eager=True
    )
    report.capture = "symbolic trace, neurons as leaves"
    if not report.rewritten:
        report.capture = "nothing to rewrite at the level of modules"
        return report
    note_device(report)
    share_attributes(captured.gm, model)
    remember(report)
    optimized = Optimized(model, options, report)
    optimized.use_graph(captured.gm, len(args))
    return optimized


def _compiled(model: nn.Module, args: tuple[Any, ...] | None, options: Options, refused: Report) -> Optimized:
    """The model under torch.compile; as it is, if that fails on the example."""
    report = Report(capture=f"torch.compile ({refused.capture})", sites=refused.sites)
    optimized = Optimized(model, options, report)
    if args is None:
        optimized.use_compile({})
        return optimized
    try:
        optimized.use_compile(measured_densities(model, args))
        with undone(model, args):
            optimized(*args)
    except Exception as error:
        if options.strict:
            raise
        failure = error
    else:
        return optimized
    with undone(model, args):
        model(*args)  # what the model itself refuses is the caller's to see, as it says it
    log.warning("torch.compile failed: the model runs as it was", exc_info=failure)
    report.capture = "none: the model runs as it was"
    report.note(f"torch.compile failed: {type(failure).__name__}: {failure}")
    return Optimized(model, options, report)


def _as_tuple(example_inputs: Any) -> tuple[Any, ...] | None:
    if example_inputs is None:
        return None
    return tuple(example_inputs) if isinstance(example_inputs, tuple | list) else (example_inputs,)
