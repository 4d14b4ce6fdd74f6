"""A layer on spikes done densely, on int8 tensor cores, event-driven, or on active pixels only.

Each is several launches, or a library's. They are only ever measured, as wholes: what is not measured is the gate's
to estimate, so that no cost is declared here.
"""

from functools import partial

import sympy
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.lowering import spike_conv, strategies
from sparsecomp.lowering.cost import Cost
from sparsecomp.lowering.strategies import SiteInfo, padding
from sparsecomp.lowering.template import Config, Template


def _dense(site: SiteInfo, x: Tensor, x8: Tensor, weight: Tensor, out: Tensor) -> None:
    if site.h == site.w == site.r == site.s == 1:
        out.set_(F.linear(x[:, :, 0, 0], weight[:, :, 0, 0])[:, :, None, None])
    else:
        out.set_(F.conv2d(x, weight, None, list(site.stride), padding(site), 1, site.groups))


def _sparse(strategy: str, site: SiteInfo, x: Tensor, x8: Tensor, weight: Tensor, out: Tensor) -> None:
    window = (list(site.stride), padding(site), [1, 1], site.groups)
    out.set_(spike_conv.conv2d(x8 if site.fused else x, weight, None, *window, site.digits, strategy))


def _template(strategy: str) -> Template[SiteInfo]:
    run = _dense if strategy == "dense" else partial(_sparse, strategy)
    return Template(
        name=strategy,
        op="spike_conv2d",
        sources=(),
        refuse=lambda site, device: None if strategy in strategies.able(site) else "it cannot serve this input",
        space=lambda site, device: [Config()],
        cost=Cost(bytes=sympy.Integer(0)),
        prepare=lambda site, config: partial(run, site),
    )


DENSE, BINARY, EVENT, SKIP = map(_template, ("dense", "binary", "event", "skip"))
