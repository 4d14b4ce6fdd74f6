"""The gradient of a layer of fixed fan-in by its input as a product with a CSR matrix, whose kernels are measured.

It stands before other kernels until one was measured to be faster: its cost is the least that any can have.
"""

from collections.abc import Callable

from torch import Tensor

from sparsecomp.lowering.local.gather_dot import unsupported
from sparsecomp.lowering.local.gather_dot_input import GatherDotInput
from sparsecomp.lowering.sparse.spmm_csr import spmm_csr
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template
from sparsecomp.reference.local.transposed import outputs_of


def _multiply(grad: Tensor, weight: Tensor, pointers: Tensor, order: Tensor, out: Tensor) -> None:
    values = weight.flatten().index_select(0, order)
    spmm_csr(pointers, outputs_of(order, weight.shape[1]), values, grad.mT, out.mT)


def _prepare(problem: GatherDotInput, config: Config) -> Callable[..., None]:
    return _multiply


_rows, _inputs, _outputs, _fan_in, _itemsize = sizes("rows inputs outputs fan_in itemsize")

GATHER_DOT_INPUT_CSR = Template(
    name="gather_dot_input_csr",
    op="gather_dot_input",
    sources=(_multiply,),
    refuse=lambda problem, device: unsupported(problem),
    cost=Cost(bytes=_rows * (_inputs + _outputs) * _itemsize + _outputs * _fan_in * (4 + _itemsize)),
    prepare=_prepare,
)
