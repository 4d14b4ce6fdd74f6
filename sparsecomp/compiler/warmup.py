"""Tunes ahead of time: what a model will launch, or what another machine's tuning results name."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sparsecomp import _compat
from sparsecomp.compiler.backend import sparsecomp_backend
from sparsecomp.compiler.call import Call
from sparsecomp.environment import Effort, check_effort
from sparsecomp.errors import InputError, SignatureError, TuningError
from sparsecomp.lowering.cache.signature import Device, KernelSignature, Rows, device_of
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.sparse.random_sparse import SKEWS
from sparsecomp.lowering.tuning import autotune
from sparsecomp.lowering.tuning.autotune import Chosen, effort_scope
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.options import Options

Signatures = Iterable[KernelSignature | Mapping[str, str]]

NO_CUDA = "nothing to tune: there is no CUDA device, and on a CPU each layer has one implementation, its reference"
_OF_DEVICE = ("gpu", "capability", "triton")


def tune(
    model: Callable[..., Any],
    /,
    *args: Any,
    effort: Effort = "full",
    options: Mapping[str, Any] | Options | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> list[Chosen]:
    """Measure the kernels that a model uses on this machine, so that no later call has to.

    Compiles the model in its present mode, runs it once and leaves it as it was. On a CPU layers run references, of
    which there is one each: nothing is measured, and a warning says so.

    Args:
        model: any module or function.
        *args: its inputs.
        effort: `"quick"` measures a few promising candidates, `"full"` all; `SPARSECOMP_AUTOTUNE` overrides it.
        options: as for the backend; see `Options`.
        kwargs: inputs by name. Needed only for those that have the name of an option.
        **keywords: options, and inputs by name if `kwargs` is not given.

    Returns:
        What was chosen for each signature that has several candidates.

    Raises:
        InputError: no inputs, or a keyword that is both an option and an input.
        OptionError: an unknown option, value or effort.
        TuningError: as `Tuner.choose`.
        Exception: what `model` itself raises on the inputs.
    """
    check_effort(effort)
    call = Call.of(model, args, options, kwargs, keywords, ("effort",) if effort != "full" else ())
    if not call.has_inputs:
        raise InputError("tuning needs inputs to run the model on: give them after the model")
    call = call.accepted()
    dispatch.forget()  # defaults that are prepared already
    with effort_scope(effort) as chosen:
        call.run(_compat.isolated_compile(call.function, partial(sparsecomp_backend, options=call.options)))
    if not chosen and not torch.cuda.is_available():
        warnings.warn(NO_CUDA, stacklevel=2)
    return chosen


def tune_signatures(signatures: Signatures, effort: Effort = "full") -> list[Chosen]:
    """Measure the kernels that signatures name, or their fields as in exported tuning results, of any device.

    Raises:
        InputError: what is given holds something else.
        OptionError: an unknown effort.
        TuningError: an operation that is not tuned, or a signature that stands for no problem, before anything is
            measured; or as `Tuner.choose`.
        SignatureError: fields that are no signature's.
    """
    check_effort(effort)
    known = _listed_signatures(signatures)
    dispatch.forget()
    with effort_scope(effort) as chosen:
        _tune(known)
    return chosen


def _listed_signatures(given: Signatures) -> list[KernelSignature]:
    if isinstance(given, str | bytes | Mapping | torch.Tensor) or not isinstance(given, Iterable):
        raise InputError(f"{type(given).__name__} is no list of signatures: give a model and its inputs, or a list")
    return [signature_of(item) for item in given]


def _tune(signatures: list[KernelSignature]) -> None:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    problems = [_problem(replace(signature, device=device_of(device))) for signature in signatures]
    for operation, problem in problems:
        autotune.tuner().choose(operation, problem, device)


def _problem(signature: KernelSignature) -> tuple[Operation[Any], Any]:
    operation = _operations().get(signature.op)
    if operation is None or operation.representative is None:
        tuned = sorted(name for name, operation in _operations().items() if operation.representative is not None)
        raise TuningError(f"{signature.op!r} is no operation that is tuned; these are: {', '.join(tuned)}")
    try:
        problem = operation.representative(signature)
    except (KeyError, ValueError) as error:
        raise TuningError(f"{dict(signature.fields)} stands for no problem of {signature.op}: {error!r}") from None
    if operation.signature(problem, signature.device).fields != signature.fields:
        raise TuningError(f"{dict(signature.fields)} stands for no problem of {signature.op}: it gives {problem}")
    return operation, problem


def _operations() -> Mapping[str, Operation[Any]]:
    from sparsecomp.lowering.tuning.operations import all_operations  # needs Triton

    return all_operations()


def signature_of(fields: KernelSignature | Mapping[str, str]) -> KernelSignature:
    """The signature whose :attr:`KernelSignature.fields` are ``fields``; a signature is one already.

    Raises:
        InputError: ``fields`` are no fields by name.
        SignatureError: no signature has them.
    """
    if isinstance(fields, KernelSignature):
        return fields
    if not isinstance(fields, Mapping) or not all(isinstance(text, str) for pair in fields.items() for text in pair):
        raise InputError(f"{fields!r} is no signature: give one, or its fields as in an exported file")
    try:
        signature = _parsed(dict(fields))
        if signature.fields == fields:
            return signature
    except KeyError as error:
        raise SignatureError(f"{dict(fields)} are no signature's fields: {error} is missing or unknown") from None
    except ValueError as error:
        raise SignatureError(f"{dict(fields)} are no signature's fields: {error}") from None
    raise SignatureError(f"{dict(fields)} are no signature's fields: they would read {dict(signature.fields)}")


def _parsed(fields: dict[str, str]) -> KernelSignature:
    return KernelSignature(
        fields["op"], Device(*(fields[name] for name in _OF_DEVICE)), _listed(fields["dtypes"]), fields["accumulator"],
        _listed(fields["formats"]), fields["index"], _listed(fields["layouts"]), fields["epilogue"],
        sizes=tuple((name, int(text)) for name, text in _below("size.", fields)),
        parameters=tuple((name, _number(text)) for name, text in _below("parameter.", fields)),
        density=_density(fields["density"]), rows=_rows(fields["rows"]),
    )  # fmt: skip


def _density(text: str) -> float | None:
    if text == "unknown":
        return None
    return 2.0 ** int(text[2:]) if text.startswith("2^") else float(text)


def _rows(text: str) -> Rows | None:
    mean, _, evenness = text.partition(" ")
    return None if text == "unknown" else Rows(int(mean), SKEWS[evenness])


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _below(prefix: str, fields: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name.removeprefix(prefix), text) for name, text in fields.items() if name.startswith(prefix)]


def _number(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdecimal() else text
