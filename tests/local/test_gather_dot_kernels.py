"""Kernels of layers of fixed fan-in: every configuration beside float64, layouts, targets, gradients on a GPU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, graph_of, needs_triton

from sparsecomp.lowering.cache.signature import Device, device_of
from sparsecomp.lowering.launch.epilogue import Output
from sparsecomp.lowering.launch.strided import Strides
from sparsecomp.lowering.local import gather_dot as lowered
from sparsecomp.lowering.local import gather_dot_input as lowered_input
from sparsecomp.lowering.local import gather_dot_weight as lowered_weight
from sparsecomp.lowering.local.gather_dot import GATHER_DOT, GatherDot
from sparsecomp.lowering.local.gather_dot_input import GATHER_DOT_INPUT, GatherDotInput
from sparsecomp.lowering.local.gather_dot_weight import GATHER_DOT_WEIGHT, GatherDotWeight
from sparsecomp.lowering.tuning.trial import fault
from sparsecomp.nn import GeoSparseLinear
from sparsecomp.reference.local.spread import SPREADS, spread_of
from sparsecomp.reference.local.transposed import transposed_lists

pytestmark = pytest.mark.quick_cases(2)

H100 = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")
HALVES = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}


def output(outputs, dtype="float32", bias=True, residual=True, activation="gelu"):
    strides = Strides(0, outputs, 1)
    given = strides if residual else Strides(0, 0, 0)
    return Output(strides, dtype, dtype if bias else "", "column" if bias else "", dtype if residual else "", given,
                  activation, 1.0)  # fmt: skip


PROBLEMS = [
    GatherDot(5, 70, 90, 3, 70, 3, "float32", output(90)),
    GatherDot(33, 64, 40, 7, 71, 32, "float16", output(40, "float16", activation="relu")),
    GatherDot(9, 130, 65, 37, 130, 10, "bfloat16", output(65, "bfloat16", residual=False, activation="none")),
    GatherDot(1, 8, 1, 1, 8, 32, "float32", output(1, bias=False, activation="silu")),
    GatherDot(19, 130, 110, 3, 130, 3, "float32", output(110)),
    GatherDot(7, 64, 64, 1, 80, 3, "bfloat16", output(64, "bfloat16", bias=False, residual=False)),
]


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_tuner_can_check_every_candidate(problem, device):
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    candidates = GATHER_DOT.candidates(problem, device_of(where))
    assert {one.template.name for one in candidates} >= {"gather_dot_rows"}
    for candidate in candidates[:: 1 if device == "cuda" else 23]:
        assert fault(GATHER_DOT, problem, where, candidate) is None, candidate.name
    signature = GATHER_DOT.signature(problem, H100)
    assert GATHER_DOT.signature(GATHER_DOT.representative(signature), H100).key == signature.key


GRADIENTS: list[tuple[Any, Any]] = [
    (GATHER_DOT_INPUT, GatherDotInput(19, 70, 90, 3, 90, "float32")),
    (GATHER_DOT_INPUT, GatherDotInput(5, 130, 40, 7, 44, "bfloat16")),
    (GATHER_DOT_INPUT, GatherDotInput(1, 1, 3, 2, 3, "float16")),
    (GATHER_DOT_WEIGHT, GatherDotWeight(19, 70, 90, 3, 70, 90, "float32")),
    (GATHER_DOT_WEIGHT, GatherDotWeight(70, 130, 40, 7, 131, 44, "bfloat16")),
    (GATHER_DOT_WEIGHT, GatherDotWeight(1, 4, 1, 1, 4, 1, "float16")),
]


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(("operation", "problem"), GRADIENTS, ids=lambda one: getattr(one, "name", None))
def test_the_tuner_can_check_every_candidate_of_a_gradient(operation, problem, device):
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    candidates = operation.candidates(problem, device_of(where))
    assert {one.template.name for one in candidates} == {f"{operation.name}_slabs"}
    for candidate in candidates[:: 1 if device == "cuda" else 5]:
        assert fault(operation, problem, where, candidate) is None, candidate.name
    signature = operation.signature(problem, H100)
    assert operation.signature(operation.representative(signature), H100).key == signature.key
    assert not operation.candidates(problem._replace(dtype="float64"), H100)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 23])
def test_gradients_beside_a_dense_layers(rows, dtype, device):
    """Inputs repeat, some are read by nobody and two by nearly all; the gradient of the result lies by columns."""
    random = torch.Generator().manual_seed(4)
    index = torch.randint(30, (50, 4), generator=random, dtype=torch.int32) // 2 * 2
    index[:45, :2], index[3:, 2] = 6, 30
    x, weight = torch.randn(rows, 31, generator=random), torch.randn(50, 4, generator=random)
    grad = torch.randn(50, rows, generator=random).mT
    x, weight, grad, index = (one.to(device) for one in (x.to(dtype), weight.to(dtype), grad.to(dtype), index))
    dense = torch.zeros(50, 31, dtype=torch.float64, device=device)
    dense.index_put_((torch.arange(50, device=device)[:, None], index.long()), weight.double(), accumulate=True)
    by_x = torch.full((rows, 31), torch.nan, device=device, dtype=dtype)
    by_weight = torch.full((50, 4), torch.nan, device=device, dtype=dtype)
    lowered_input.gather_dot_input(grad, weight, *transposed_lists(index, 31), by_x)
    lowered_weight.gather_dot_weight(x, grad, index, by_weight)
    wanted = grad.double() @ dense, (grad.double().mT @ x.double()).gather(1, index.long())
    for one, other in zip((by_x, by_weight), wanted, strict=True):
        assert torch.linalg.vector_norm(one.double() - other) <= HALVES[dtype] * torch.linalg.vector_norm(other)


@needs_triton
def test_what_kernels_do_not_take():
    assert not GATHER_DOT.candidates(PROBLEMS[0]._replace(dtype="float64"), H100)
    assert set(GATHER_DOT.refusals(PROBLEMS[3], H100)) == {"gather_dot_slabs"}
    assert not GATHER_DOT.refusals(PROBLEMS[4], H100)


@pytest.mark.parametrize(
    ("index", "word"),
    [
        (torch.arange(256)[:, None].repeat(1, 3).int(), "near"),
        (torch.randperm(8192, generator=torch.Generator().manual_seed(0))[:4096].view(-1, 1).int(), "far"),
        ((torch.arange(256)[:, None] * 12).int(), "mixed"),
        (torch.zeros(5, 2, dtype=torch.int32), "near"),
    ],
)
def test_the_spread_of_an_index(index, word):
    assert spread_of(index) == word and spread_of(index.to("meta")) == "far"


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("strides", ["rows", "columns", "every second"])
def test_x_of_any_strides(strides, spread, device):
    random = torch.Generator().manual_seed(1)
    x, weight = torch.randn(12, 40, generator=random), torch.randn(20, 3, generator=random)
    index = torch.randint(40, (20, 3), generator=random, dtype=torch.int32)
    x = {"rows": x, "columns": x.t().contiguous().t(), "every second": x.repeat_interleave(2, 1)[:, ::2]}[strides]
    out = torch.full((12, 20), torch.nan, device=device)
    on = [one.to(device) for one in (x, weight, index)]
    lowered.gather_dot(*on, None, None, out, "none", spread)
    wanted = (x.double()[:, index.long()] * weight.double()).sum(-1)
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("spread", SPREADS)
def test_what_no_output_reads_may_be_nan(spread, device):
    """Places beyond the fan-in and rows beyond the last are not multiplied by 0."""
    x, weight = torch.ones(7, 10), torch.ones(5, 3)
    x[:, 0] = torch.nan
    index = torch.arange(1, 4, dtype=torch.int32).expand(5, 3).contiguous()
    out = torch.full((7, 5), torch.nan, device=device)
    lowered.gather_dot(x.to(device), weight.to(device), index.to(device), None, None, out, "none", spread)
    assert out.eq(3).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(0,), (1,), (37,), (3, 5)])
def test_a_layer_on_a_gpu_and_its_gradients(shape, dtype):
    torch.manual_seed(0)
    layer = GeoSparseLinear(300, 210, torch.randint(300, (210, 9))).cuda().to(dtype)
    dense = torch.zeros(210, 300, dtype=torch.float64, device="cuda")
    dense.index_put_(
        (torch.arange(210, device="cuda")[:, None], layer.in_index_per_out.long()), layer.weight.detach().double(),
        accumulate=True,
    )  # fmt: skip
    x = torch.randn(*shape, 300, device="cuda", dtype=dtype, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    out, wanted = layer(x), F.linear(wide, dense.requires_grad_(), layer.bias.detach().double())
    grad = torch.randn_like(out)
    out.backward(grad)
    wanted.backward(grad.double())
    by_weight = dense.grad.gather(1, layer.in_index_per_out.long())
    by_bias = grad.double().flatten(0, -2).sum(0)
    found = (out, x.grad, layer.weight.grad, layer.bias.grad)
    for one, other in zip(found, (wanted, wide.grad, by_weight, by_bias), strict=True):
        assert torch.linalg.vector_norm(one.double() - other) <= HALVES[dtype] * torch.linalg.vector_norm(other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_layer_reads_what_is_there_now():
    layer, x = GeoSparseLinear(64, 48, torch.randint(64, (48, 4))).cuda(), torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        graph, out = graph_of(lambda: layer(x))
        x.mul_(-2)
        layer.weight.add_(1)
        graph.replay()
        torch.testing.assert_close(out, layer(x))


@pytest.mark.slow(reason="compiles all kernels for two targets")
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_a_gpu(capability):
    compile_in_subprocess(
        f"""
        from sparsecomp.lowering.local.kernels.gather_dot_rows import gather_dot_rows_kernel as rows
        from sparsecomp.lowering.local.kernels.gather_dot_slabs import gather_dot_slabs_kernel as slabs
        from sparsecomp.lowering.local.kernels import gather_dot_input_slabs, gather_dot_weight_slabs
        from sparsecomp.lowering.local.kernels.slabs import write_slabs_kernel as write

        pointers = dict(x_ptr="*fp16", slabs_ptr="*fp16", weight_ptr="*fp16", index_ptr="*i32", bias_ptr="*fp16",
                        residual_ptr="*fp16", out_ptr="*fp16", grad_ptr="*fp16",
                        pointers_ptr="*i32", order_ptr="*i32")
        names = "ROWS INPUTS OUTPUTS FEATURES FAN_IN SLABS WEIGHTS x_row x_slab grad_slab " \\
                "out_b out_m out_n res_b res_m res_n"
        numbers = {{name: "i32" for name in names.split()}}
        types = pointers | numbers | dict(scale="fp32")
        walk = dict(FAN_IN=9, UNROLL=8)
        tile = dict(BIAS_ROWS=False, ACTIVATION="gelu", BR=16, BO=64)
        by_input = gather_dot_input_slabs.gather_dot_input_slabs_kernel
        by_weight = gather_dot_weight_slabs.gather_dot_weight_slabs_kernel
        lists = dict(FAN_IN=9, LONG=32, MANY=64, UNROLL=4, BR=16, BI=64)
        own = ((rows, tile | walk), (slabs, tile | walk), (write, dict(BR=16, BF=128)), (by_input, lists),
               (by_weight, dict(BR=16, BW=64)))
        for kernel, constants in own:
            print(build(kernel, types, constants, {capability}, whole=(), num_warps=4).asm["ptx"].count("ld.global"))
        """
    )
