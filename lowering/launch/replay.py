"""What an operator does on a GPU, noted in one call and done again by address in the next.

An implementation describes its problem, finds the launch of it and shapes its operands. That takes the host longer than
many a kernel takes the GPU, and comes to the same where operands look the same, as in a compiled graph of static
shapes they do. So an early call is watched: what it allocated, what it launched, and what it asked of torch.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp import _compat
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.launch import ALIGNMENT, Launch
from sparsecomp.lowering.launch.watch import watched_by

_ATTEMPTS = 3
"""Calls that are watched before a site is given up: the first one compiles its kernels, and may measure them."""
_ATEN = torch.ops.aten
_FRESH = frozenset({
    _ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.empty_like.default, _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
})  # fmt: skip
_UNKNOWABLE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Replayed:
    """An implementation on a GPU, of operands that look the same in each call; their memory and contents may change.

    Args:
        implementation: what it returns and launches follows from how its operands look. It calls torch, launches by
            `Launch`, allocates by torch or `watch.allocate`, and tells of what is kept for an operand by `note_kept`. A
            tensor of another origin, such as the memo, is seen, and each call goes to the implementation then; of what
            else it does it tells by `do_not_note`.
    """

    def __init__(self, implementation: Callable[..., Any]) -> None:
        self._implementation = implementation
        self._again: Callable[[tuple[Any, ...]], Any] | None = None
        self._attempts = _ATTEMPTS

    def __call__(self, *arguments: Any) -> Any:
        """The implementation's result."""
        if self._again is not None:
            result = self._again(arguments)
            return self._implementation(*arguments) if result is _NOT_NOW else result
        if not self._attempts:
            return self._implementation(*arguments)
        self._attempts -= 1
        chosen_by, watch = dispatch.chosen_by(), _Watch(arguments)
        with _compat.below_autograd(), watch, watched_by(watch):
            result = self._implementation(*arguments)
        self._again = watch.again(chosen_by, result)
        return result


_NOT_NOW = object()
"""In place of a result: this call must go to the implementation."""


class _Unknown(Exception):
    """A call reads or does what does not follow from its operands."""


class _Call(NamedTuple):
    """A call of an operator of torch that was seen.

    Attributes:
        is_view: it only looked at its operand otherwise.
    """

    operator: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    result: Tensor
    is_view: bool


class _Kernel(NamedTuple):
    """A launch that was seen."""

    launch: Launch
    tensors: list[Tensor]


class _Watch(_compat.TorchDispatchMode):
    """Notes the steps of a call. What it has seen stays alive as long as it does, so that no memory serves twice."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        super().__init__()
        self._places = list(_places(arguments))
        self._operands = [arguments[at] if item is None else arguments[at][item] for at, item in self._places]
        self._owner = {id(operand): operand for operand in self._operands}  # whose memory a tensor has
        self._steps: list[Tensor | _Call | _Kernel] = []  # a tensor was allocated
        self._kept: list[tuple[Tensor, Sequence[Tensor]]] = []
        # an operand that comes twice may be two another time
        self._repeatable = len(self._owner) == len(self._operands)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FRESH:
            self.allocated(result)
        elif func is _ATEN.detach.default:  # below autograd it changes nothing
            result = args[0]
        elif isinstance(result, Tensor) and result.layout is torch.strided and not _UNKNOWABLE & set(func.tags):
            self._called(func, args, kwargs or {}, result)
        else:
            self._repeatable = False
        return result

    def _called(self, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> None:
        written = func._schema.is_mutable
        memory = result.untyped_storage().data_ptr()
        owners = [self._owner.get(id(arg)) for arg in args]
        owner = next((one for one in owners if one is not None and one.untyped_storage().data_ptr() == memory), result)
        self._owner.setdefault(id(result), owner)
        self._steps.append(_Call(func, tuple(args), kwargs, result, owner is not result and not written))

    def allocated(self, tensor: Tensor) -> None:
        """An uninitialised tensor was made."""
        if id(tensor) not in self._owner:  # torch may have told of it already
            self._owner[id(tensor)] = tensor
            self._steps.append(tensor)

    def launched(self, launch: Launch, tensors: Sequence[Tensor | None]) -> None:
        """A kernel was launched."""
        self._steps.append(_Kernel(launch, [tensor for tensor in tensors if tensor is not None]))

    def belonged(self, source: Tensor, kept: Sequence[Tensor]) -> None:
        """Tensors are read that are kept for the memory of an operand."""
        self._kept.append((source, kept))
        self._owner.update((id(tensor), tensor) for tensor in kept)

    def gave_up(self) -> None:
        """Something was done that cannot be noted."""
        self._repeatable = False

    def again(self, chosen_by: object, result: Any) -> Callable[[tuple[Any, ...]], Any] | None:
        """A function of arguments that does what was seen in a call with this result; None if there can be none.

        It is Python written for these steps: to walk over them in each call would take as long as some of them.
        """
        launches = [step.launch.direct for step in self._steps if isinstance(step, _Kernel)]
        if not self._repeatable or not launches or None in launches:
            return None
        names = {id(operand): f"t{at}" for at, operand in enumerate(self._operands)}
        scope: dict[str, Any] = {"chosen_by": dispatch.chosen_by, "then": chosen_by, "not_now": _NOT_NOW}
        try:
            body = [*self._beginning(launches, names, scope)]
            for number, step in enumerate(self._needed(result)):
                body += self._lines(step, f"{number}", names, scope)
            body.append(f"return {_written(result, names)}")
        except _Unknown:
            return None
        exec("def again(arguments):\n    " + "\n    ".join(body), scope)
        return scope["again"]

    def _beginning(self, launches: list[Any], names: dict[int, str], scope: dict[str, Any]) -> Iterator[str]:
        """Lines that name the operands and their addresses, and leave if the call must go another way; what is kept for
        one of them gets its name."""
        for at, (place, item) in enumerate(self._places):
            yield f"t{at} = arguments[{place}]" + ("" if item is None else f"[{item}]")
            yield f"at{at} = t{at}.data_ptr()"
        heard = {launch.listeners: launch for launch in launches}
        checks = ["chosen_by() != then", f"({' | '.join(f'at{at}' for at in range(len(self._places)))}) % {ALIGNMENT}"]
        for number, launch in enumerate(heard.values()):
            scope[f"free{number}"] = launch.is_free
            checks.append(f"not free{number}()")
        for source, kept in self._kept:
            checks.append(f"{self._address(source, names)} != {source.data_ptr()}")
            for tensor in kept:
                names[id(tensor)] = name = f"kept{len(names)}"
                scope |= {name: tensor, f"a{name}": tensor.data_ptr()}
        yield f"if {' or '.join(checks)}: return not_now"

    def _needed(self, result: Any) -> list[Tensor | _Call | _Kernel]:
        """The steps that something reads or that write: not views that only launches see, which get addresses, nor
        tensors by which a problem was described."""
        read = {id(tensor) for tensor in _tensors(result)}
        kept = []
        for step in reversed(self._steps):
            if isinstance(step, Tensor):
                if id(step) not in read:
                    continue
            elif isinstance(step, _Call):
                if id(step.result) not in read and not step.operator._schema.is_mutable:
                    continue
                read.update(id(tensor) for tensor in _tensors((step.arguments, tuple(step.keywords.values()))))
            else:
                read.update(id(self._owner.get(id(tensor))) for tensor in step.tensors)
            kept.append(step)
        return kept[::-1]

    def _lines(
        self, step: Tensor | _Call | _Kernel, number: str, names: dict[int, str], scope: dict[str, Any]
    ) -> Iterator[str]:  # fmt: skip
        """A step as lines of Python; what they read besides goes to `scope`, the name of what it makes to `names`."""
        if isinstance(step, _Kernel):
            assert step.launch.direct is not None
            scope[f"launch{number}"] = step.launch.direct.launch
            yield f"launch{number}([{', '.join(self._address(tensor, names) for tensor in step.tensors)}])"
            return
        name = f"m{number}"
        if isinstance(step, Tensor):
            scope |= {f"dtype{number}": step.dtype, f"empty{number}": _compat.empty_of(step.device)}
            yield f"{name} = empty{number}({tuple(step.shape)}, {step.stride()}, dtype{number})"
            names[id(step)] = name
        else:
            scope |= {f"call{number}": step.operator, f"keywords{number}": step.keywords}
            if any(True for _ in _tensors(tuple(step.keywords.values()))):
                raise _Unknown
            arguments = _written(step.arguments, names, scope, number)
            yield f"{name} = call{number}(*{arguments}, **keywords{number})"
            names[id(step.result)] = name
        yield f"a{name} = {name}.data_ptr()"

    def _address(self, tensor: Tensor, names: dict[int, str]) -> str:
        owner = self._owner.get(id(tensor))
        if owner is None or id(owner) not in names:
            raise _Unknown
        offset = tensor.data_ptr() - owner.data_ptr()
        if offset % ALIGNMENT:
            raise _Unknown
        return f"a{names[id(owner)]}" + (f" + {offset}" if offset else "")


def _places(arguments: Sequence[Any]) -> Iterator[tuple[int, int | None]]:
    for at, argument in enumerate(arguments):
        if isinstance(argument, Tensor):
            yield at, None
        elif isinstance(argument, (list, tuple)):
            yield from ((at, item) for item, one in enumerate(argument) if isinstance(one, Tensor))


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value of nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _written(value: Any, names: dict[int, str], scope: dict[str, Any] | None = None, constant: str = "") -> str:
    """A value as an expression of the names of its tensors; of other things in it, of a constant put in `scope`."""
    if isinstance(value, Tensor):
        if id(value) not in names:
            raise _Unknown
        return names[id(value)]
    if type(value) in (list, tuple):
        items = [_written(item, names, scope, f"{constant}_{at}") for at, item in enumerate(value)]
        return f"[{', '.join(items)}]" if type(value) is list else f"({''.join(f'{item}, ' for item in items)})"
    if value is None or type(value) in (int, bool, str):
        return repr(value)
    if scope is None:
        raise _Unknown
    scope[f"constant{constant}"] = value
    return f"constant{constant}"
