"""The kernel of residual blocks: every configuration beside float64, what a backward reads, targets, a GPU."""

from typing import Any

import pytest
import torch
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, graph_of, needs_triton
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, device_of
from sparsecomp.lowering.local.residual_block import RESIDUAL_BLOCK, ResidualBlock
from sparsecomp.lowering.local.residual_block import residual_block as launch
from sparsecomp.lowering.tuning.cards import H100 as CARD
from sparsecomp.lowering.tuning.cost import rank
from sparsecomp.lowering.tuning.trial import fault
from sparsecomp.nn import GeoSparseResidualBlock, build_geo_connectivity
from sparsecomp.reference.local.residual_block import ACTIVATIONS, activated

pytestmark = pytest.mark.quick_cases(4)

H100 = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}


def block(
    rows: int = 11, features: int = 90, fan: tuple[int, int] = (3, 7), row: int = 90, alike: int = 11,
    norm: str = "rms", activation: str = "sine_abs", operands: tuple[int, int, int, int] = (1, 2, 3, 2),
    kept: bool = True, dtypes: tuple[str, str] = ("float32", "float32"),
) -> ResidualBlock:  # fmt: skip
    return ResidualBlock(rows, features, *fan, row, alike, norm, activation, operands, kept, *dtypes, 1e-3)


PROBLEMS = [
    block(),
    block(37, 130, (8, 1), 133, 1, "layer", "sine_relu", (2, 1, 4, 2), False, ("float16", "float16")),
    block(9, 70, (5, 5), 70, 3, "none", "sine_none", (0, 2, 3, 1), True, ("bfloat16", "bfloat16")),
    block(1, 1, (2, 1), 1, 1, "rms", "relu", (0, 2, 0, 2), True),
    block(5, 65, (13, 2), 65, 5, "layer", "gelu", (1, 1, 0, 1), False, ("float32", "bfloat16")),
    block(19, 200, (4, 4), 200, 19, "rms", "tanh", (1, 2, 0, 2), True, ("float32", "float16")),
]


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_tuner_can_check_every_candidate(problem, device):
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    candidates = RESIDUAL_BLOCK.candidates(problem, device_of(where))
    assert {one.config["together"] for one in candidates} == {0, 1}
    for candidate in candidates[:: 1 if device == "cuda" else 7]:
        assert fault(RESIDUAL_BLOCK, problem, where, candidate) is None, candidate.name
    signature = RESIDUAL_BLOCK.signature(problem, H100)
    assert RESIDUAL_BLOCK.signature(RESIDUAL_BLOCK.representative(signature), H100).key == signature.key


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_a_backward_reads_is_what_the_activation_was_given(dtype, device):
    x, weight, bias = drawn(2, 50, 23, dtype=dtype)[0].mT, drawn(50, 3, dtype=dtype, seed=1), drawn(50, dtype=dtype)
    index = torch.randint(50, (50, 3), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    out, before = (torch.full((23, 50), torch.nan, dtype=dtype, device=device) for _ in range(2))
    x, weight, bias, index, scale = (one.to(device) for one in (x, weight, bias, index, drawn(23, dtype=dtype)))
    launch(x, [], [weight, bias], [], [weight], scale, (index, index), out, before, "none", 0.0, "relu")
    wanted = (x.double()[:, index.long()] * weight.double()).sum(-1) + bias.double()
    assert (before.double() - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()
    second = (before.double().relu()[:, index.long()] * weight.double()).sum(-1)
    wanted = x.double() + scale.double()[:, None] * second
    assert (out.double() - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_any_number(activation, device):
    """Each feature of a row is one number, which the layers copy."""
    z = torch.tensor([0.0, 1e-30, -1e-4, 0.2, -0.25, 0.3, 3.0, -30.0, 1e4, -3e38, torch.inf, torch.nan])
    own = torch.arange(len(z), dtype=torch.int32)[:, None]
    ones, sine = torch.ones(len(z), 1), [torch.full((len(z),), number) for number in (1.5, 0.7, 0.1, 0.3)]
    out = torch.full((1, len(z)), torch.nan, device=device)
    given = sine if activation.startswith("sine") else []
    x, one, own, scale, *on = (t.to(device) for t in (z[None], ones, own, ones[:1, 0], *given))
    launch(x, [], [one], on, [one], scale, (own, own), out, None, "none", 0.0, activation)
    wanted = z.double() + activated(z.double(), activation, [number.double() for number in given])
    torch.testing.assert_close(out[0].cpu().double(), wanted, rtol=1e-6, atol=0.0, equal_nan=True)


@needs_triton
def test_float64_is_refused():
    assert not RESIDUAL_BLOCK.candidates(PROBLEMS[0]._replace(dtype="float64"), H100)


@needs_triton
@pytest.mark.parametrize(
    ("rows", "features", "together"), [(1, 16384, 0), (8, 4096, 0), (1024, 4096, 1), (2048, 256, 1)]
)
def test_one_launch_where_slabs_fill_the_card(rows, features, together):
    """By estimate: a few slabs would leave most of its processors idle."""
    problem = block(rows, features, (8, 8), features, rows, dtypes=("bfloat16", "bfloat16"))
    assert rank(RESIDUAL_BLOCK.candidates(problem, H100), problem, CARD)[0].config["together"] == together


gpu: Any = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("settings", [{"activation_type": "phase_psann"}, {"norm": "layer", "activation_type": "tanh"}])
@pytest.mark.parametrize("shape", [(0,), (1,), (37,), (300, 5)])
def test_a_block_on_a_gpu_and_its_gradients(shape, settings, dtype):
    torch.manual_seed(0)
    index = build_geo_connectivity((12, 13), k=8, pattern="random", radius=3, seed=0)
    own = GeoSparseResidualBlock(156, index, residual_alpha_init=0.5, **settings).cuda().to(dtype)
    exact = GeoSparseResidualBlock(156, index, compute_mode="gather", **settings).cuda().double()
    exact.load_state_dict(own.state_dict())
    for one in (own.norm, exact.norm):
        one.eps = 1e-3
    x = torch.randn(*shape, 156, device="cuda", dtype=dtype, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    out, wanted = own(x), exact(wide)
    grad = torch.randn_like(out)
    out.backward(grad)
    wanted.backward(grad.double())
    found = [out, x.grad, *(one.grad for one in own.parameters())]
    right = [wanted, wide.grad, *(one.grad for one in exact.parameters())]
    for one, other in zip(found, right, strict=True):
        assert torch.linalg.vector_norm(one.double() - other) <= 4 * TOLERANCE[dtype] * other.norm() + 1e-12


@pytest.mark.gpu
@gpu
def test_a_captured_block_reads_what_is_there_now():
    own, x = GeoSparseResidualBlock(64, build_geo_connectivity((8, 8), k=4)).cuda(), torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        graph, out = graph_of(lambda: own(x))
        x.mul_(-2)
        own.fc1.weight.add_(1)
        own.alpha.add_(1)
        graph.replay()
        torch.testing.assert_close(out, own(x))


@pytest.mark.slow(reason="compiles the kernel for two targets")
@pytest.mark.parametrize(("capability", "kinds"), [
    (80, [("rms", "sine_abs", "all"), ("none", "gelu", "first"), ("none", "relu", "second")]),
    (90, [("layer", "tanh", "all"), ("layer", "relu", "norm")]),
])  # fmt: skip
def test_the_kernel_compiles_without_a_gpu(capability, kinds):
    compile_in_subprocess(
        f"""
        from sparsecomp.lowering.local.kernels.residual_block_slabs import residual_block_slabs_kernel as kernel

        pointers = {{name: "*fp16" for name in kernel.arg_names if name.endswith("_ptr")}}
        numbers = {{name: "i32" for name in ("ROWS", "FEATURES", "x_row", "alike")}}
        types = pointers | numbers | dict(eps="fp32", first_index_ptr="*i32", second_index_ptr="*i32")
        walk = dict(FIRST=9, UNROLL_FIRST=9, SECOND=8, UNROLL_SECOND=8, BR=8, BO=512, BN=2048)
        for norm, activation, step in {kinds}:
            constants = walk | dict(NORM=norm, ACTIVATION=activation, STEP=step)
            ptx = build(kernel, types, constants, {capability}, whole=(), num_warps=8).asm["ptx"]
            # the cache of constants would not see what other threads wrote; a sine has a table of its own there
            assert "ld.global" in ptx and ("ld.global.nc" not in ptx or activation == "sine_abs")
        """
    )
