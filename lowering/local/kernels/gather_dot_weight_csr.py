"""The gradient of a layer of fixed fan-in by its weight as a sampled product, whose kernels are measured.

It stands before other kernels until one was measured to be faster: its cost is the least that any can have.
"""

from collections.abc import Callable

from torch import Tensor

from sparsecomp.lowering.local.gather_dot import unsupported
from sparsecomp.lowering.local.gather_dot_weight import GatherDotWeight
from sparsecomp.lowering.sparse.sddmm import sddmm
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template
from sparsecomp.reference.local.gather_dot import pointers_of_rows


def _sample(x: Tensor, grad: Tensor, index: Tensor, out: Tensor) -> None:
    sddmm(pointers_of_rows(index), index.flatten(), grad.mT, x.mT, out.view(-1))


def _prepare(problem: GatherDotWeight, config: Config) -> Callable[..., None]:
    return _sample


_rows, _inputs, _outputs, _fan_in, _itemsize = sizes("rows inputs outputs fan_in itemsize")

GATHER_DOT_WEIGHT_CSR = Template(
    name="gather_dot_weight_csr",
    op="gather_dot_weight",
    sources=(_sample,),
    refuse=lambda problem, device: unsupported(problem),
    cost=Cost(bytes=_rows * (_inputs + _outputs) * _itemsize + _outputs * _fan_in * (4 + _itemsize)),
    prepare=_prepare,
)
