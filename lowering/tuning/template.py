"""A kernel as one declared object, and an operation that several kernels can carry out.

A template says which problems its kernel takes, in which configurations, what each would cost, and how to launch it.
Its file in a room's `kernels/` is all that has to change for a new kernel: `of_operation` finds it there.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from sparsecomp.discovery import instances, modules_within
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.tuning.cost import Cost

P = TypeVar("P", bound=NamedTuple)


class Config(Mapping[str, int]):
    """A point of a template's configuration space: hashable, and written `BK=64,BM=128`."""

    def __init__(self, **values: int) -> None:
        self._values = dict(sorted(values.items()))
        self._text = ",".join(f"{name}={value}" for name, value in self._values.items())

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self._text == other._text

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__


@dataclass(frozen=True, eq=False)
class Template(Generic[P]):
    """A kernel.

    Attributes:
        name: unique among all templates.
        op: the operation it carries out.
        sources: the `@triton.jit` or `@gluon.jit` functions it is made of.
        cost: what a configuration costs, as expressions; see :mod:`sparsecomp.lowering.tuning.cost`.
        prepare: what runs a problem in a configuration, called with the operation's tensors; mostly a `Launch`.
        refuse: why it cannot run a problem on a device, or None if it can. Looks at nothing else.
        space: the legal configurations for a problem on a device, within its shared memory and registers.
    """

    name: str
    op: str
    sources: tuple[Any, ...]
    cost: Cost
    prepare: Callable[[P, Config], Callable[..., None]]
    refuse: Callable[[P, Device], str | None] = lambda problem, device: None
    space: Callable[[P, Device], Sequence[Config]] = lambda problem, device: (Config(),)

    @cached_property
    def version(self) -> str:
        """A hash of the kernel's source: a measurement of other code is none of this one."""
        text = "".join(inspect.getsource(getattr(source, "fn", source)) for source in self.sources)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Candidate(Generic[P]):
    """A template in one configuration."""

    template: Template[P]
    config: Config

    @cached_property
    def name(self) -> str:
        """Stable text under which its time is kept, such as `binary_conv@1f…:BK=64,BM=128`."""
        return f"{self.template.name}@{self.template.version}:{self.config}"


@dataclass(frozen=True, eq=False)
class Operation(Generic[P]):
    """What kernels compute, apart from how.

    Two operations are never equal: an operation is a name for its kernels, and one of each stands in its module.

    Attributes:
        name: as in `Template.op`.
        signature: of a problem on a device. A problem is a NamedTuple of numbers, exact and complete: two launches with
            one problem differ in their tensors' addresses only.
        representative: the problem to time for a signature, for tuning ahead of any call.
        operands: fresh random tensors (or None where the problem has none) of a problem on a device from a seed, in the
            kernel's order; results are filled with NaN or a value that no result has.
        results: positions of the tensors that the kernel writes.
        reference: the right results in float64 (or exact integers), from the operands before the kernel ran.
        tolerance: largest relative Frobenius error of a result of a problem; 0 where results are exact.

    The last five are left out of an operation whose problems have one candidate each: there is nothing to measure.
    """

    name: str
    signature: Callable[[P, Device], KernelSignature]
    representative: Callable[[KernelSignature], P] | None = None
    operands: Callable[[P, torch.device, int], tuple[Tensor | None, ...]] | None = None
    results: tuple[int, ...] = ()
    reference: Callable[[P, tuple[Tensor | None, ...]], tuple[Tensor, ...]] | None = None
    tolerance: Callable[[P], float] | None = None

    def candidates(self, problem: P, device: Device) -> list[Candidate[P]]:
        """Every template in every configuration that can run `problem`, in the templates' order."""
        able = [template for template in of_operation(self.name) if template.refuse(problem, device) is None]
        return [Candidate(template, config) for template in able for config in template.space(problem, device)]

    def refusals(self, problem: P, device: Device) -> dict[str, str]:
        """Why each template that cannot run `problem` cannot, by name."""
        reasons = {template.name: template.refuse(problem, device) for template in of_operation(self.name)}
        return {name: reason for name, reason in reasons.items() if reason is not None}


@cache
def of_operation(op: str) -> tuple[Template[Any], ...]:
    """The templates of an operation, from all modules in `kernels/` in the order of their names."""
    return tuple(template for template in all_templates() if template.op == op)


@cache
def all_templates() -> tuple[Template[Any], ...]:
    kernels = [name for name in modules_within("sparsecomp.lowering") if ".kernels." in name]
    return instances(Template, sorted(kernels, key=lambda name: name.rpartition(".")[2]))
