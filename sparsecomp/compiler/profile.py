"""`profile`: where a model spends its time, and how sparse what it works on is.

Density says whether event-driven kernels could pay, the share of empty blocks whether skipping could, the time whether
either matters.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from rich.table import Table
from rich.text import Text

from sparsecomp.compiler.call import Call
from sparsecomp.compiler.layer_calls import LayerCalls
from sparsecomp.compiler.profile_plot import figure
from sparsecomp.errors import InputError
from sparsecomp.lowering.tuning.progress import Progress
from sparsecomp.options import Options
from sparsecomp.report import rendered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLOCKS = ((56, 16), (14, 8), (8, 4))


@dataclass(slots=True, eq=False)
class LayerProfile:
    """One layer.

    Attributes:
        name, kind: its path in the model and its class; of a function the path of the module that calls it and its
            name, with a number where a module calls it at several lines, and `F.` before the name.
        calls: calls in one forward pass.
        milliseconds: time of all its calls in one forward pass (mean over the repetitions).
        samples_per_second: throughput, counting the first dimension of its inputs.
        density: share of non-zero elements of its inputs in [0, 1].
        block: side of the blocks counted in `empty_blocks`; None where the map is too small.
        empty_blocks: share of blocks (one image, all channels) without any non-zero element.
    """

    name: str
    kind: str
    calls: int = 0
    milliseconds: float = 0.0
    samples_per_second: float = 0.0
    density: float | None = None
    block: int | None = None
    empty_blocks: float | None = None


@dataclass(slots=True)
class Profile:
    """All layers of a model, in the order of their first call.

    Attributes:
        device: device type of the inputs.
        repetitions: forward passes that were timed.
        layers: one entry a module without submodules, a neuron, or a function of torch that does the work of one.
    """

    device: str
    repetitions: int
    layers: list[LayerProfile] = field(default_factory=list)

    def to_json(self) -> str:
        """Everything as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def to_table(self) -> Table:
        """A rich table, one row a layer; without the columns in which none has anything."""
        columns = {
            "layer": [layer.name for layer in self.layers],
            "kind": [layer.kind for layer in self.layers],
            "calls": [str(layer.calls) for layer in self.layers],
            "ms": [f"{layer.milliseconds:.3f}" for layer in self.layers],
            "samples/s": [f"{layer.samples_per_second:,.0f}" for layer in self.layers],
            "density": [_percent(layer.density) for layer in self.layers],
            "block": [str(layer.block or "") for layer in self.layers],
            "empty blocks": [_percent(layer.empty_blocks) for layer in self.layers],
        }
        shown = {title: cells for title, cells in columns.items() if any(cells)}
        table = Table(title=self._title)
        for title in shown:
            table.add_column(title, justify="left" if title in ("layer", "kind") else "right", overflow="fold")
        for cells in zip(*shown.values(), strict=True):
            table.add_row(*map(Text, cells))
        return table

    def plot(self) -> "Figure":
        """Time, density and empty blocks of each layer as a figure of matplotlib.

        Raises:
            ExtraError: matplotlib is missing, which `pip install 'sparsecomp[plot]'` brings.
        """
        shares = {
            "non-zero inputs": [layer.density or 0.0 for layer in self.layers],
            "empty blocks": [layer.empty_blocks or 0.0 for layer in self.layers],
        }
        names = [f"{layer.name} ({layer.kind})" for layer in self.layers]
        return figure(self._title, names, [layer.milliseconds for layer in self.layers], shares)

    @property
    def _title(self) -> str:
        return f"{self.device}, mean of {self.repetitions}"

    def __str__(self) -> str:
        return rendered(self.to_table()) if self.layers else f"{self._title}: the model called no layer"


def profile(
    model: Callable[..., Any],
    /,
    *args: Any,
    repetitions: int = 10,
    options: Mapping[str, Any] | Options | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Profile:
    """Time and sparsity of every layer of `model` on the given input, without gradients and uncompiled, even if it is
    what `torch.compile` gave.

    The model is left as it was; every repetition starts from its present state. Options are checked and change nothing.

    Args:
        model: any module or function.
        *args: its inputs.
        repetitions: timed forward passes, after one that warms up and measures sparsity.
        options: as for `explain`.
        kwargs: inputs by name. Needed only for those that have the name of an option.
        **keywords: options, and inputs by name if `kwargs` is not given.

    Raises:
        InputError: `repetitions` is no int of at least 1, or a keyword is both an option and an input.
        OptionError: an unknown option or value.
        Exception: what `model` itself raises on the inputs.
    """
    if type(repetitions) is not int or repetitions < 1:
        raise InputError(f"repetitions={repetitions!r}: use an int of at least 1")
    call = Call.of(model, args, options, kwargs, keywords, ("repetitions",) if repetitions != 10 else ())
    with torch.compiler.set_stance("force_eager"):  # a compiled model calls no layer that could be timed
        return _profile(call.accepted(), repetitions)


def _profile(call: Call, repetitions: int) -> Profile:
    tensors = (value for value in (*call.args, *call.kwargs.values()) if isinstance(value, torch.Tensor))
    device = next((value.device.type for value in tensors), "cpu")
    calls, clock = LayerCalls(call.model, _layer), _Clock(device)
    with Progress("profiling", repetitions + 1) as progress:
        for meter in (_Sparsity(), *[clock] * repetitions):
            with torch.no_grad(), calls.told_to(meter):
                call.run()
            progress.advance()
    clock.finish(repetitions)
    return Profile(device, repetitions, list(calls.layers.values()))


def _layer(name: str, kind: str) -> LayerProfile:
    """Named as in the model, without what `torch.compile` wraps it in."""
    return LayerProfile(".".join(part for part in name.split(".") if part != "_orig_mod"), kind)


class _Sparsity:
    """Counts calls and non-zero inputs."""

    def __init__(self) -> None:
        self._counts: dict[LayerProfile, list[int]] = {}

    def before(self, layer: LayerProfile, x: Any) -> None:
        layer.calls += 1
        if not isinstance(x, torch.Tensor) or not x.numel():
            return
        counts = self._counts.setdefault(layer, [0, 0, 0, 0])
        occupied, blocks, layer.block = _blocks(x)
        for index, value in enumerate((int(torch.count_nonzero(x)), x.numel(), blocks - occupied, blocks)):
            counts[index] += value
        layer.density = counts[0] / counts[1]
        layer.empty_blocks = counts[2] / counts[3] if counts[3] else None

    def after(self, layer: LayerProfile, x: Any) -> None:
        pass


class _Clock:
    """Times each call; on CUDA with events, read only at the end."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._open: dict[LayerProfile, Any] = {}
        self._spans: list[tuple[LayerProfile, Any, Any, int]] = []

    def before(self, layer: LayerProfile, x: Any) -> None:
        self._open[layer] = self._now()

    def after(self, layer: LayerProfile, x: Any) -> None:
        samples = x.shape[0] if isinstance(x, torch.Tensor) and x.dim() else 0
        self._spans.append((layer, self._open.pop(layer), self._now(), samples))

    def finish(self, repetitions: int) -> None:
        """Write the times to the layers."""
        if self._cuda:
            torch.cuda.synchronize()
        samples: Counter[LayerProfile] = Counter()
        for layer, start, end, count in self._spans:
            spent = start.elapsed_time(end) if self._cuda else (end - start) * 1e3
            layer.milliseconds += spent / repetitions
            samples[layer] += count
        for layer, count in samples.items():
            if layer.milliseconds:
                layer.samples_per_second = count / repetitions / layer.milliseconds * 1e3

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def block_size(height: int) -> int | None:
    """Side of the blocks that a map of this height is cut into: 16 from 56, 8 from 14, 4 from 8, none below."""
    return next((block for least, block in _BLOCKS if height >= least), None)


def _blocks(x: torch.Tensor) -> tuple[int, int, int | None]:
    """Occupied blocks, all blocks and the block's side of (…, C, H, W)."""
    block = block_size(x.shape[-2]) if x.dim() >= 4 else None
    if block is None:
        return 0, 0, None
    busy = (x.reshape(-1, *x.shape[-3:]) != 0).any(1, keepdim=True).float()
    pooled = F.max_pool2d(busy, block, block, ceil_mode=True)
    return int(pooled.sum()), pooled.numel(), block


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
