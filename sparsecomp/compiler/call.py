"""How every verb is told of a model, its inputs and its options: `verb(model_or_function, *args, **keywords)`.

The inputs stand as in a call of the model. A keyword with the name of an option is an option, any other one the
model's; where both have that name, only the user can say which is meant.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sparsecomp import _compat
from sparsecomp.compiler.snapshot import undone
from sparsecomp.errors import InputError, OptionError, nearest
from sparsecomp.options import Options

_OPTIONS = frozenset(item.name for item in fields(Options))


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a model, and what the user asks of the compiler for it.

    Attributes:
        model: the module; a function became a `FunctionModule`.
        args, kwargs: its inputs, none of either if the user gave none.
        options: parsed.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: Options

    @classmethod
    def of(
        cls,
        target: Any,
        args: tuple[Any, ...],
        options: Mapping[str, Any] | Options | None,
        kwargs: Mapping[str, Any] | None,
        keywords: Mapping[str, Any],
        own: Iterable[str] = (),
    ) -> "Call":
        """What `verb(target, *args, options=options, kwargs=kwargs, **keywords)` means.

        Args:
            own: keywords of the verb itself that the user gave.

        Raises:
            InputError: `target` cannot be called, a keyword may be meant for both the verb and the model, or `kwargs`
                is no dict of inputs by name.
            OptionError: an unknown option or value.
        """
        model = _module(target)
        _check_kwargs(kwargs)
        names, takes_any = _inputs(model.forward)
        if kwargs is None:
            given = {*keywords, *own, *(("options",) if options is not None else ())}
            _refuse_both(given & names & {*_OPTIONS, *own, "options"}, model)
            kwargs = {name: value for name, value in keywords.items() if name not in _OPTIONS}
            _refuse_unknown([name for name in kwargs if not (takes_any or name in names)], model)
        else:
            _refuse_unknown([name for name in keywords if name not in _OPTIONS], model)
        asked = {name: value for name, value in keywords.items() if name in _OPTIONS}
        return cls(model, args, dict(kwargs), Options.parse(options=options, over=asked))

    @property
    def has_inputs(self) -> bool:
        """Whether there is anything to call the model with."""
        return bool(self.args or self.kwargs)

    @property
    def function(self) -> Callable[..., Any]:
        """What to compile: the module, or the function that became one."""
        return self.model.forward if isinstance(self.model, FunctionModule) else self.model

    def run(self, function: Callable[..., Any] | None = None) -> Any:
        """Call the model, or `function` in its place, and leave the model and the inputs as they were."""
        with undone(self.model, self.args, self.kwargs):
            return (self.model if function is None else function)(*self.args, **self.kwargs)

    def accepted(self) -> "Call":
        """This call, which the model takes as it is; one tuple of all inputs, the old spelling, is taken apart.

        Raises:
            InputError: a tensor of the model or an input has no values to run with.
            Exception: what the model itself raises.
        """
        self._refuse_valueless()
        if any(map(is_lazy, self.model.parameters())):
            with torch.no_grad():  # a first run gives it its shapes, which cannot be undone
                self.model(*self.args, **self.kwargs)
        try:
            self.run()
            return self
        except Exception:
            apart = self._apart()
            if apart is None:
                raise
        message = "a tuple of all inputs is the old spelling: give them one by one, as in a call of the model"
        warnings.warn(message, FutureWarning, stacklevel=3)
        return apart

    def _refuse_valueless(self) -> None:
        """Densities, times and kernels are measured on values, which tensors of the meta device do not have."""
        inputs = {f"input {place}": value for place, value in enumerate(self.args)} | self.kwargs
        for name, value in (*self.model.named_parameters(), *self.model.named_buffers(), *inputs.items()):
            if isinstance(value, torch.Tensor) and (value.is_meta or _compat.is_fake(value)):
                kind = "on the meta device" if value.is_meta else "a fake tensor"
                raise InputError(
                    f"{name} of {_title(self.model)} is {kind}, so that it has no values, which this call needs: give "
                    "real inputs and a real model, such as model.to_empty(device='cpu') with its weights loaded"
                )

    def _apart(self) -> "Call | None":
        if len(self.args) != 1 or self.kwargs or not isinstance(self.args[0], tuple | list):
            return None
        apart = replace(self, args=tuple(self.args[0]))
        try:
            apart.run()
        except Exception:
            return None  # what the model says of the call as it was written counts
        return apart


class FunctionModule(nn.Module):
    """A function that passes for a module, whose submodules are those that the function reaches by name.

    Modules that it reaches otherwise, such as out of a list, are not put back as they were after a trial run.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function
        self._modules.update(_modules_of(function, set()))


def _module(target: Any) -> nn.Module:
    if isinstance(target, nn.Module):
        return target
    if isinstance(target, type):
        raise InputError(f"{target.__name__} is a class: make an object of it first")
    if not callable(target):
        raise InputError(f"{type(target).__name__} is neither a module nor a function: give what is to be called first")
    return FunctionModule(target)


def _modules_of(function: Any, seen: set[int]) -> dict[str, nn.Module]:
    """The modules that a function is bound to, closes over, or names, and those of functions that it names."""
    found: dict[str, nn.Module] = {}
    for name, value in _named_by(function).items():
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found.setdefault(name, value)
        elif isinstance(value, FunctionType | MethodType | partial) and not _is_torchs(value):
            found |= {inner: module for inner, module in _modules_of(value, seen).items() if inner not in found}
    return found


def _named_by(function: Any) -> dict[str, Any]:
    if isinstance(function, partial):
        bound = {f"argument{place}": value for place, value in enumerate(function.args)}
        return {"function": function.func, **bound, **function.keywords}
    if not isinstance(function, FunctionType | MethodType):
        return {"call": function.__call__}
    names = inspect.getclosurevars(function)
    owner = getattr(function, "__self__", None)
    held = {} if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {})
    return {**names.globals, **names.nonlocals, **held, "self": owner}


def _is_torchs(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").partition(".")[0] == "torch"


def _inputs(forward: Callable[..., Any]) -> tuple[set[str], bool]:
    """Names that can be given by keyword, and whether any name can."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # a function of C
        return set(), True
    names = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    return names, any(one.kind is one.VAR_KEYWORD for one in parameters)


def _check_kwargs(kwargs: object) -> None:
    is_named = isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
    if kwargs is not None and not is_named:
        raise InputError(f"kwargs is a {type(kwargs).__name__}, not a dict of the model's inputs by name: give one")


def _refuse_both(names: set[str], model: nn.Module) -> None:
    for name in sorted(names):
        raise InputError(
            f"{name}= may be meant for sparsecomp or be the input {name!r} of {_title(model)}: put inputs that are "
            f"given by name into kwargs={{...}}; every other keyword is an option then"
        )


def _refuse_unknown(names: list[str], model: nn.Module) -> None:
    if "example_inputs" in names:
        raise InputError("example_inputs= is the old spelling: give the inputs as in a call of the model")
    if names:
        known = [item.name for item in fields(Options)]
        meant = nearest(names, [*known, *_inputs(model.forward)[0]])
        raise OptionError(
            f"unknown options {names}{meant}, and no inputs of {_title(model)}; the options are {', '.join(known)}"
        )


def _title(model: nn.Module) -> str:
    is_function = isinstance(model, FunctionModule)
    return getattr(model.forward, "__name__", "the function") if is_function else type(model).__name__
