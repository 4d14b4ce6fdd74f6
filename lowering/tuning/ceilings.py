"""Which card a device is: one that is known, or its ceilings measured once and kept beside the tuning results."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from functools import cache
from typing import NamedTuple

import torch

from sparsecomp.errors import OptionError
from sparsecomp.lowering.cache.signature import Device, device_of
from sparsecomp.lowering.cache.tuning_cache import default_cache
from sparsecomp.lowering.tuning.cards import H100, KNOWN, Card, Ceilings

_FACT = "ceilings"


class Target(NamedTuple):
    """A card that estimates are made for, which need not be there."""

    device: Device
    card: Card


def known_card(device: torch.device) -> Card | None:
    """The card of a CUDA device if it is known without measuring, for what is not worth it."""
    return _stored(device)


def target_of(device: torch.device) -> Target:
    """The card that a device is."""
    return Target(device_of(device), card_of(device))


def target_named(text: str) -> Target:
    """The known card whose name has the word `text`, such as `h100`, or is it.

    Raises:
        OptionError: there is none, or several have it.
    """
    targets = _targets()
    word = text.lower() if isinstance(text, str) else ""
    found = [name for name in targets if word in (name.lower(), *name.lower().split())]
    if len(found) != 1:
        raise OptionError(
            f"device={text!r} names none of the cards that are known, or several: use a word of "
            f"{', '.join(map(repr, targets))}; another card is known once tuning results of it were imported"
        )
    return targets[found[0]]


def _targets() -> dict[str, Target]:
    """By name: cards with a record, and those whose ceilings another machine has measured and exported."""
    found = {name: Target(Device(name, card.capability, triton=""), card) for name, card in KNOWN.items()}
    for fact in default_cache().facts():
        card = _with_ceilings(fact.device, fact.values) if fact.name == _FACT else None
        if card is not None:
            found[fact.device.name] = Target(replace(fact.device, triton=""), card)
    return found


# Rates that are not measured: for TF32 a switch for the whole process would let anybody's float32 run in it meanwhile,
# and torch's integer product is private. Data sheets say 0.5 and 2; the H100 measured 0.59 and 1.5, by its power limit.
_TF32_OVER_HALF = H100.tf32 / H100.half
_INT8_OVER_HALF = H100.int8 / H100.half


def card_of(device: torch.device) -> Card:
    """The card of ``device``: its ceilings are from the tuning cache, ``KNOWN``, or measured now and stored there.

    Without a GPU it is an H100. Where nothing can be measured (CUDA graph capture, fake tensors, no free memory) it is
    an H100 in proportion to the processors, this once.
    """
    if device.type != "cuda":
        return H100
    traced = type(torch.empty(0)) is not torch.Tensor
    if traced or torch.cuda.is_current_stream_capturing():
        return _stored(device) or _proportional(device)
    try:
        return settled_card(device)
    except torch.OutOfMemoryError:
        return _proportional(device)


@cache
def settled_card(device: torch.device) -> Card:
    stored = _stored(device)
    if stored is not None:
        return stored
    measured, identity = asdict(measure(device)), device_of(device)
    default_cache().put_fact(_FACT, identity, measured)
    return replace(H100, capability=identity.capability, **measured)


def _stored(device: torch.device) -> Card | None:
    identity = device_of(device)
    return _with_ceilings(identity, default_cache().fact(_FACT, identity) or {})


def _with_ceilings(device: Device, measured: Mapping[str, float]) -> Card | None:
    """A device's card, with ceilings that were measured if they are all there; None if nothing is known of it."""
    known = KNOWN.get(device.name)
    complete = measured.keys() == {field.name for field in fields(Ceilings)}
    return replace(known or H100, capability=device.capability, **measured) if complete else known


def _proportional(device: torch.device) -> Card:
    processors = _processors(device)
    share = processors / H100.processors
    rates = {name: getattr(H100, name) * share for name in ("bandwidth", "fp32", "tf32", "half", "int8")}
    return replace(H100, processors=processors, capability=device_of(device).capability, **rates)


def measure(device: torch.device) -> Ceilings:
    """Measure a CUDA device: under half a second, within 1 GB of its memory, and apart from the caller's settings.

    Raises:
        torch.OutOfMemoryError: there is no such memory.
    """
    with torch.cuda.device(device), torch.no_grad(), torch.autocast("cuda", enabled=False), _ieee():
        half = _product_rate(torch.float16)
        fp32 = _product_rate(torch.float32)
        has_tf32 = torch.cuda.get_device_capability(device) >= (8, 0)
        return Ceilings(
            bandwidth=_bandwidth(), fp32=fp32, tf32=_TF32_OVER_HALF * half if has_tf32 else fp32, half=half,
            int8=_INT8_OVER_HALF * half, launch=_launch(), processors=_processors(device),
        )  # fmt: skip


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@contextmanager
def _ieee() -> Iterator[None]:
    """Products of float32 in full precision, whatever the user allows."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _bandwidth() -> float:
    source = torch.ones(2**28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / _median_seconds(lambda: target.copy_(source))


def _product_rate(dtype: torch.dtype) -> float:
    size = 4096
    # random numbers, since zeros need less power and run faster; a generator of our own leaves the user's alone
    random = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(size, size, device="cuda", generator=random).to(dtype)
    return 2 * size**3 / _median_seconds(lambda: a @ a)


def _launch(kernels: int = 64) -> float:
    one = torch.zeros(1, device="cuda")
    large = torch.zeros(2**26, device="cuda")

    def launches() -> None:
        for _ in range(kernels):
            one.add_(1)

    # work in front keeps the device busy until the host has queued them all
    return _median_seconds(launches, ahead=lambda: [large.add_(1) for _ in range(8)]) / kernels


def _median_seconds(call: Callable[[], object], ahead: Callable[[], object] = lambda: None, repeats: int = 5) -> float:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    call()
    for start, end in events:
        ahead()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e-3
