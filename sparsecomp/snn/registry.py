"""Neuron classes whose output domain a graph does not show.

When a neuron is traced through, the analysis finds its spikes by structure. When it stays one opaque node (a leaf
module of `torch.fx.symbolic_trace`, a graph break in a library), this registry says what comes out. Classes are
registered by name, so that no library has to be imported; the modules beside this one know those of libraries.

    @register_neuron(domain=binary())
    class MyLIF(nn.Module): ...

    register_neuron("my_package.MyTernaryLIF", domain=integers(-1, 1))
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, TypeAlias, TypeVar, overload

from torch import nn

from sparsecomp.discovery import modules_within
from sparsecomp.errors import InputError
from sparsecomp.reference.facts import SparsityFact, check_bounds
from sparsecomp.snn.spec import NeuronSpec, NotASource

__all__ = ["Verdict", "domain_of", "inspect", "is_neuron", "register_neuron"]

Domain: TypeAlias = SparsityFact | NotASource | Callable[[Any], SparsityFact | NotASource]
NeuronClass = TypeVar("NeuronClass", bound=type[nn.Module])

_SPECS: dict[str, NeuronSpec] = {}
for _module in modules_within("sparsecomp.snn"):
    _SPECS.update(getattr(import_module(_module), "NEURONS", {}))

_HARMLESS_OVERRIDES = frozenset({
    "__init__", "__repr__", "__setattr__", "__getattr__", "__delattr__", "__deepcopy__", "__dir__",
    "extra_repr", "reset",
    "neuronal_charge", "neuronal_adaptive_charge", "neuronal_reset", "init_leaky", "reset_mem", "initial_state",
    "supported_backends", "store_v_seq",
})  # fmt: skip
"""What a subclass may redefine without changing which values its spikes take."""


@dataclass(frozen=True)
class Verdict:
    """What a module's output obeys, or why nothing is known about it.

    Attributes:
        fact: the domain of the spikes, None if they are not a source.
        reason: why there is no fact.
        returns_tuple: the spikes are item 0 of a tuple.
        writes_input: the module writes to its input.
    """

    fact: SparsityFact | None
    reason: str = ""
    returns_tuple: bool = False
    writes_input: bool = False


@overload
def register_neuron(
    target: str,
    *,
    domain: Domain,
    returns_tuple: bool | Callable[[Any], bool] = False,
    writes_input: bool = False,
) -> None: ...


@overload
def register_neuron(
    target: NeuronClass,
    *,
    domain: Domain,
    returns_tuple: bool | Callable[[Any], bool] = False,
    writes_input: bool = False,
) -> NeuronClass: ...


@overload
def register_neuron(
    target: None = None,
    *,
    domain: Domain,
    returns_tuple: bool | Callable[[Any], bool] = False,
    writes_input: bool = False,
) -> Callable[[NeuronClass], NeuronClass]: ...


def register_neuron(
    target: Any = None,
    *,
    domain: Domain,
    returns_tuple: bool | Callable[[Any], bool] = False,
    writes_input: bool = False,
) -> Any:
    """Registers a neuron class, by itself, by its qualified name, or as a decorator.

    Args:
        target: the class, or its name as users import it (`package.Class` also covers `package.module.Class`).
        domain: what its spikes obey: a fact, such as `sparsecomp.snn.binary()` or `integers(lo, hi)`,
            `NotASource(reason)`, or a function of the module that gives either. It is believed: a wrong one gives wrong
            results.
        returns_tuple: the spikes are item 0 of a tuple; or a function of the module that says so.
        writes_input: the module writes to its input tensor.

    Raises:
        InputError: an argument is none of these, or the domain's bounds hold no value. A function of a module that
            fails or gives no domain leaves that neuron unknown.
    """
    if not _is_function(domain):
        _check_domain(domain)
    if not (target is None or isinstance(target, type) or (isinstance(target, str) and target.strip())):
        raise InputError(f"target is {target!r}: give a class or its name")
    if not (isinstance(returns_tuple, bool) or _is_function(returns_tuple)):
        raise InputError(f"returns_tuple is {returns_tuple!r}: give True, False or a function of the module")
    if not isinstance(writes_input, bool):
        raise InputError(f"writes_input is {writes_input!r}: give True or False")
    spec = NeuronSpec(domain, returns_tuple, writes_input)
    if target is None:
        return lambda cls: register_neuron(cls, domain=domain, returns_tuple=returns_tuple, writes_input=writes_input)
    if isinstance(target, str):
        _SPECS[target] = spec
        return None
    _SPECS[f"{target.__module__}.{target.__qualname__}"] = spec
    return target


def _is_function(given: object) -> bool:
    return callable(given) and not isinstance(given, type)


def _check_domain(domain: object) -> None:
    if isinstance(domain, SparsityFact):
        check_bounds(domain.lo, domain.hi, domain.integral)
    elif not isinstance(domain, NotASource):
        raise InputError(f"domain is {domain!r}: give one of sparsecomp.snn, such as binary(), or a function")


def is_neuron(module: nn.Module) -> bool:
    """Whether the module's class, or one that it derives from, is registered (as a source of spikes or not)."""
    return _find(module) is not None


def domain_of(module: nn.Module) -> SparsityFact | None:
    """What the module's spikes obey, None if it is no known source of spikes."""
    return inspect(module).fact


def inspect(module: nn.Module) -> Verdict:
    """As `domain_of`, with the reason and the form of the result."""
    found = _find(module)
    if found is None:
        return Verdict(None, f"{_name(type(module))} is not a registered neuron")
    owner, spec = found
    redefined = _redefined(module, owner)
    if redefined:
        message = f"{_name(type(module))} redefines {', '.join(sorted(redefined))} of {_name(owner)}"
        return Verdict(None, message, writes_input=True)
    declared = spec.domain
    try:
        domain = declared(module) if callable(declared) else declared
        returns_tuple = spec.returns_tuple(module) if callable(spec.returns_tuple) else spec.returns_tuple
        _check_domain(domain)
    except Exception as error:  # of somebody's function
        reason = f"what is registered for {_name(owner)} failed: {type(error).__name__}: {error}"
        return Verdict(None, reason, writes_input=spec.writes_input)
    if isinstance(domain, NotASource):
        return Verdict(None, domain.reason, returns_tuple, spec.writes_input)
    return Verdict(replace(domain, source=type(module).__name__), "", returns_tuple, spec.writes_input)


def _find(module: nn.Module) -> tuple[type, NeuronSpec] | None:
    """The nearest registered class among the module's class and its bases."""
    for cls in type(module).__mro__:
        for name in _import_names(cls):
            if name in _SPECS:
                return cls, _SPECS[name]
    return None


def _import_names(cls: type) -> Iterable[str]:
    """`a.b.c.Class`, `a.b.Class`, `a.Class`: packages re-export what their modules define."""
    package = cls.__module__
    while package:
        yield f"{package}.{cls.__qualname__}"
        package = package.rpartition(".")[0]


def _redefined(module: nn.Module, owner: type) -> set[str]:
    """Methods of `owner` that a subclass, or the instance itself, replaces."""
    found: set[str] = set()
    for cls in type(module).__mro__:
        if cls is owner:
            break
        found |= {
            name
            for name, value in vars(cls).items()
            if (callable(value) or isinstance(value, property | staticmethod | classmethod)) and hasattr(owner, name)
        }
    found |= {name for name in vars(module) if callable(getattr(owner, name, None))}
    return found - _HARMLESS_OVERRIDES - {"__class__"}


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
