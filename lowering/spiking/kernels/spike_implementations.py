"""A layer on spikes done densely, on int8 tensor cores, without them, event-driven, or on active pixels only.

Each is several launches, or a library's. They are only ever measured, as wholes: what is not measured is the gate's
to estimate, so that no cost is declared here.
"""

from functools import partial
from typing import Any

import sympy
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.lowering.spiking.implementations import SiteInfo, able
from sparsecomp.lowering.spiking.kernels import (
    binary_conv,
    binary_conv_hopper,
    direct_conv,
    event_conv,
    pack_weight,
    prescan,
    skip_conv,
)
from sparsecomp.lowering.spiking.spike_conv import launch_conv
from sparsecomp.lowering.tuning.cost import Cost
from sparsecomp.lowering.tuning.template import Config, Template
from sparsecomp.reference.geometry import convolve

# Templates that a module holds by name are taken for its own: here they stay in tuples.
_BINARY = (
    pack_weight.PACK_WEIGHT, prescan.CAST_FLAT, prescan.CAST_STRIDED, binary_conv.BINARY_CONV,
    binary_conv_hopper.BINARY_CONV_HOPPER,
)  # fmt: skip
_DIRECT = (prescan.CAST_FLAT, prescan.CAST_STRIDED, direct_conv.DIRECT_CONV)
_EVENT = (*_BINARY, event_conv.FIND_EVENTS, event_conv.PACK_EVENTS, event_conv.ACCUMULATE)
_SKIP = (*_BINARY, skip_conv.SCAN_PIXELS, skip_conv.LIST_ROWS)


def _dense(site: SiteInfo, x: Tensor, x8: Tensor, weight: Tensor, out: Tensor) -> None:
    if site.is_linear:
        out.set_(F.linear(x.flatten(1), weight.flatten(1)).view(out.shape))
    else:
        out.set_(convolve(x, weight, None, site.window, site.groups))


def _sparse(implementation: str, site: SiteInfo, x: Tensor, x8: Tensor, weight: Tensor, out: Tensor) -> None:
    _, *window = site.window
    out.set_(launch_conv(x8 if site.fused else x, weight, None, *window, site.groups, site.digits, implementation))


def _template(implementation: str, *kernels: Template[Any]) -> Template[SiteInfo]:
    run = _dense if implementation == "dense" else partial(_sparse, implementation)
    return Template(
        name=implementation,
        op="spike_conv",
        sources=tuple(source for kernel in kernels for source in kernel.sources),
        refuse=lambda site, device: None if implementation in able(site) else "it cannot serve this input",
        space=lambda site, device: [Config()],
        cost=Cost(bytes=sympy.Integer(0)),
        prepare=lambda site, config: partial(run, site),
    )


DENSE = _template("dense")
BINARY = _template("binary", *_BINARY)
DIRECT = _template("direct", *_DIRECT)
EVENT = _template("event", *_EVENT)
SKIP = _template("skip", *_SKIP)
