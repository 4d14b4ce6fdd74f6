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
from sparsecomp.lowering.tuning.template import of_operation
from sparsecomp.lowering.tuning.trial import fault
from sparsecomp.nn import GeoSparseLinear, build_geo_connectivity
from sparsecomp.reference.local.spread import SPREADS, spread_of
from sparsecomp.reference.local.stencil import steps_of
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
    GatherDot(5, 70, 90, 3, 70, 3, (), "float32", output(90)),
    GatherDot(33, 64, 40, 7, 71, 32, (), "float16", output(40, "float16", activation="relu")),
    GatherDot(9, 130, 65, 37, 130, 10, (), "bfloat16", output(65, "bfloat16", residual=False, activation="none")),
    GatherDot(1, 8, 1, 1, 8, 32, (), "float32", output(1, bias=False, activation="silu")),
    GatherDot(19, 130, 110, 3, 130, 3, (-9, 0, 40), "float32", output(110)),
    GatherDot(7, 64, 64, 1, 80, 3, (1,), "bfloat16", output(64, "bfloat16", bias=False, residual=False)),
]


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_tuner_can_check_every_candidate(problem, device):
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    candidates = GATHER_DOT.candidates(problem, device_of(where))
    assert {one.template.name for one in candidates} >= {"gather_dot_rows"}
    assert not problem.steps or {one.template.name for one in candidates} >= {"gather_dot_stencil"}
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
    assert {one.template.name for one in candidates} == {f"{operation.name}_csr", f"{operation.name}_slabs"}
    for candidate in candidates[:: 1 if device == "cuda" else 5]:
        assert fault(operation, problem, where, candidate) is None, candidate.name
    signature = operation.signature(problem, H100)
    assert operation.signature(operation.representative(signature), H100).key == signature.key
    assert not operation.candidates(problem._replace(dtype="float64"), H100)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("kind", ["csr", "slabs"])
def test_gradients_beside_a_dense_layers(kind, device):
    """Inputs repeat, some are read by nobody and some by many; the gradient of the result lies by columns."""
    random = torch.Generator().manual_seed(4)
    index = torch.randint(30, (50, 4), generator=random, dtype=torch.int32) // 2 * 2
    index[:20, 0] = 6
    x, weight = torch.randn(9, 31, generator=random), torch.randn(50, 4, generator=random)
    dense = torch.zeros(50, 31, dtype=torch.float64)
    dense.index_put_((torch.arange(50)[:, None], index.long()), weight.double(), accumulate=True)
    grad = torch.randn(50, 9, generator=random).mT
    on = {name: one.to(device) for name, one in (("x", x), ("weight", weight), ("index", index), ("grad", grad))}
    lists = transposed_lists(on["index"], 31)

    def run(operation, problem, *tensors):
        template = next(one for one in of_operation(operation) if one.name == f"{operation}_{kind}")
        template.prepare(problem, template.space(problem, H100)[-1])(*tensors)

    by_x, by_weight = torch.full((9, 31), torch.nan, device=device), torch.full((50, 4), torch.nan, device=device)
    given = on["grad"].contiguous()
    run("gather_dot_input", GatherDotInput(9, 31, 50, 4, 50, "float32"), given, on["weight"], *lists, by_x)
    run("gather_dot_weight", GatherDotWeight(9, 31, 50, 4, 31, 50, "float32"), on["x"], given, on["index"], by_weight)
    torch.testing.assert_close(by_x.cpu().double(), grad.double() @ dense, rtol=1e-5, atol=1e-5)
    wanted = (grad.double().mT @ x.double()).gather(1, index.long())
    torch.testing.assert_close(by_weight.cpu().double(), wanted, rtol=1e-5, atol=1e-5)
    if kind == "csr":  # what comes first by cost, through the launchers
        by_x.fill_(torch.nan), by_weight.fill_(torch.nan)
        lowered_input.gather_dot_input(on["grad"], on["weight"], *lists, by_x)
        lowered_weight.gather_dot_weight(on["x"], on["grad"], on["index"], by_weight)
        torch.testing.assert_close(by_x.cpu().double(), grad.double() @ dense, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(by_weight.cpu().double(), wanted, rtol=1e-5, atol=1e-5)


@needs_triton
def test_what_kernels_do_not_take():
    for stencil in (PROBLEMS[0], PROBLEMS[4]):
        assert not GATHER_DOT.candidates(stencil._replace(dtype="float64"), H100)
    assert set(GATHER_DOT.refusals(PROBLEMS[3], H100)) == {"gather_dot_slabs", "gather_dot_stencil"}
    assert not GATHER_DOT.refusals(PROBLEMS[4], H100)
    assert "64 steps" in GATHER_DOT.refusals(stencil._replace(fan_in=65), H100)["gather_dot_stencil"]


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


GRID = (9, 11)


@pytest.mark.parametrize("wrap_mode", ["wrap", "clamp"])
def test_the_steps_of_a_stencil(wrap_mode):
    offsets = [(0, 0), (-2, 1), (0, 3)]
    index = build_geo_connectivity(GRID, k=3, offsets=offsets, wrap_mode=wrap_mode)
    assert steps_of(index) == tuple(down * GRID[1] + right for down, right in offsets)
    wide = build_geo_connectivity((1200, 256), k=8, wrap_mode=wrap_mode)  # many outputs are sampled
    around = {down * 256 + right for down in (-1, 0, 1) for right in (-1, 0, 1)}
    assert len(set(steps_of(wide))) == 8 and set(steps_of(wide)) < around
    assert steps_of(index.to("meta")) == () == steps_of(index.flip(0)) == steps_of(index[:0])


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("wrap_mode", ["wrap", "clamp"])
def test_a_stencil_sees_edges_and_writes_to_the_index(wrap_mode, device):
    from sparsecomp.lowering.local.kernels.gather_dot_stencil import GATHER_DOT_STENCIL

    n = GRID[0] * GRID[1]
    random = torch.Generator().manual_seed(3)
    index = build_geo_connectivity(GRID, k=5, wrap_mode=wrap_mode)
    steps, x, weight = steps_of(index), *(torch.randn(s, generator=random) for s in ((6, n), (n, 5)))
    assert len(steps) == 5
    index[n // 2, 2], index[n // 2 + 1] = 0, n - 1
    out = torch.full((6, n), torch.nan, device=device)
    described = output(n, bias=False, residual=False, activation="none")
    problem = GatherDot(6, n, n, 5, n, 3, steps, "float32", described)
    config = GATHER_DOT_STENCIL.space(problem, H100)[0]
    on = [one.to(device) for one in (x, weight, index)]
    GATHER_DOT_STENCIL.prepare(problem, config)(*on, None, None, out)
    wanted = (x.double()[:, index.long()] * weight.double()).sum(-1)
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_a_stencil_loads_the_index_of_marked_outputs_alone(device):
    from sparsecomp.lowering.local.kernels.gather_dot_stencil import gather_dot_stencil_kernel

    x, weight = torch.arange(100.0, device=device)[None], torch.ones(64, 2, device=device)
    index = torch.full((64, 2), 99, dtype=torch.int32, device=device)  # as if outputs were written to after the marking
    others = torch.zeros(64, dtype=torch.int8, device=device)
    others[5] = 1
    out = torch.empty(1, 64, device=device)
    gather_dot_stencil_kernel[(1,)](
        x, weight, index, None, None, out, others, 1, 64, 100, 0, 64, 1, 0, 0, 0, 1.0,
        BIAS_ROWS=False, ACTIVATION="none", STEPS=(0, 10), FAN_IN=2, BR=1, BO=64,
    )  # fmt: skip
    wanted = 2 * torch.arange(64.0) + 10
    wanted[5] = 2 * 99
    assert torch.equal(out[0].cpu(), wanted)


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
        from sparsecomp.lowering.local.kernels.gather_dot_stencil import gather_dot_stencil_kernel as stencil
        from sparsecomp.lowering.local.kernels.gather_dot_stencil import mark_others_kernel as mark

        pointers = dict(x_ptr="*fp16", slabs_ptr="*fp16", weight_ptr="*fp16", index_ptr="*i32", bias_ptr="*fp16",
                        residual_ptr="*fp16", out_ptr="*fp16", others_ptr="*i8", grad_ptr="*fp16",
                        pointers_ptr="*i32", order_ptr="*i32")
        names = "ROWS INPUTS OUTPUTS FEATURES FAN_IN SLABS WEIGHTS share x_row x_slab grad_slab " \\
                "out_b out_m out_n res_b res_m res_n"
        numbers = {{name: "i32" for name in names.split()}}
        types = pointers | numbers | dict(scale="fp32")
        tile = dict(BIAS_ROWS=False, ACTIVATION="gelu", BR=16, BO=64)
        by_input = gather_dot_input_slabs.gather_dot_input_slabs_kernel
        by_weight = gather_dot_weight_slabs.gather_dot_weight_slabs_kernel
        steps = dict(STEPS=(-65, -1, 0, 1, 64), FAN_IN=5)
        own = ((rows, tile | dict(K=8)), (slabs, tile | dict(FAN_IN=8)), (write, dict(BR=16, BF=128)),
               (stencil, tile | steps), (mark, steps | dict(BO=256)), (by_input, dict(BR=16, BI=64)),
               (by_weight, dict(BR=16, BW=64)))
        for kernel, constants in own:
            print(build(kernel, types, constants, {capability}, whole=(), num_warps=4).asm["ptx"].count("ld.global"))
        """
    )
