"""The effective weight and its gradients: each element of theta finds its place by counting pruned ones before it."""

import sympy
import triton
import triton.language as tl

from sparsecomp.lowering.cost import Cost, sizes
from sparsecomp.lowering.effective_weight import Effective
from sparsecomp.lowering.launch import Launch
from sparsecomp.lowering.template import Config, Template
from sparsecomp.ops.effective_weight import BLOCK


@triton.jit
def places(mask_ptr, before_ptr, count, B: tl.constexpr):
    """Flat positions of a block, whether each is one and pruned, and theta's element for those that are."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < count
    pruned = inside & (tl.load(mask_ptr + at, mask=inside, other=1) == 0)
    rank = tl.cumsum(pruned.to(tl.int32), 0) - 1
    return at, inside, pruned, tl.load(before_ptr + tl.program_id(0)) + rank


@triton.jit
def effective_weight_kernel(weight_ptr, theta_ptr, mask_ptr, before_ptr, out_ptr, count, B: tl.constexpr):
    """out = weight where the mask says so, else the next of theta."""
    at, inside, pruned, place = places(mask_ptr, before_ptr, count, B)
    theta = tl.load(theta_ptr + place, mask=pruned, other=0.0)
    weight = tl.load(weight_ptr + at, mask=inside & ~pruned, other=0.0)
    tl.store(out_ptr + at, tl.where(pruned, theta, weight), mask=inside)


@triton.jit
def effective_gradients_kernel(grad_ptr, mask_ptr, before_ptr, of_weight_ptr, of_theta_ptr, count, B: tl.constexpr):
    """of_weight = grad at active elements, zero at others; of_theta = grad at those others, in order."""
    at, inside, pruned, place = places(mask_ptr, before_ptr, count, B)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0)
    tl.store(of_weight_ptr + at, tl.where(pruned, 0.0, grad), mask=inside)
    tl.store(of_theta_ptr + place, grad, mask=pruned)


_count, _itemsize, _warps = sizes("count itemsize warps")
# the mask, the weight in and out, and theta for seven in ten; four warps hide loads best
_COST = Cost(bytes=_count * (1 + 2.7 * _itemsize), seconds=sympy.Abs(_warps - 4) * 1e-8)


def _space(problem: Effective, device: object) -> list[Config]:
    return [Config(warps=warps) for warps in (2, 4, 8)]


def _template(name: str, kernel: object) -> Template[Effective]:
    def prepare(problem: Effective, config: Config) -> Launch:
        grid = (triton.cdiv(problem.count, BLOCK),)
        return Launch(kernel, grid, (problem.count,), {"B": BLOCK}, num_warps=config["warps"])

    return Template(name, name, (kernel, places), lambda problem, device: None, _space, _COST, prepare)


EFFECTIVE_WEIGHT = _template("effective_weight", effective_weight_kernel)
EFFECTIVE_GRADIENTS = _template("effective_gradients", effective_gradients_kernel)
