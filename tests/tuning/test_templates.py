"""Every template keeps its promises: what it offers runs, is right, and is told apart from other code."""

from dataclasses import replace

import pytest
import torch
from kernel_devices import KERNEL_DEVICES

from sparsecomp.compiler.warmup import signature_of
from sparsecomp.lowering.cache.signature import Device, device_of
from sparsecomp.lowering.sparse.stored_places import WRITE_OUT, WriteOut
from sparsecomp.lowering.spiking.binary_conv import BINARY_CONV, binary_conv_problem
from sparsecomp.lowering.spiking.conv_lif import CONV_LIF, conv_lif_problem
from sparsecomp.lowering.spiking.conv_neuron import CONV_NEURON, Described, conv_neuron_problem
from sparsecomp.lowering.spiking.convolution import Convolution, Maps, OutputStrides
from sparsecomp.lowering.spiking.direct_conv import DIRECT_CONV, direct_conv_problem
from sparsecomp.lowering.spiking.event_conv import ACCUMULATE, Accumulate
from sparsecomp.lowering.spiking.implementations import SPIKE_CONV, SiteInfo
from sparsecomp.lowering.spiking.lif import LIF, Lif
from sparsecomp.lowering.spiking.neuron import NEURON, Axis, Neurons
from sparsecomp.lowering.spiking.packing import CAST, CAST_STRIDED, PACK_WEIGHT, Cast, CastStrided, PackWeight
from sparsecomp.lowering.spiking.spike_matmul import SPIKE_MATMUL, BatchStrides, SpikeMatmul
from sparsecomp.lowering.spiking.transposed_conv import TRANSPOSED_CONV, transposed_conv_problem
from sparsecomp.lowering.tuning.operations import all_operations
from sparsecomp.lowering.tuning.template import Config, of_operation
from sparsecomp.lowering.tuning.trial import fault
from sparsecomp.reference.geometry import TransposedWindow, Window
from sparsecomp.reference.neuron import neuron_of

pytest.importorskip("triton")  # templates hold their kernels

pytestmark = pytest.mark.quick_cases(4)

SQUARE = Window.centred((3, 3), (1, 1))
UPWARD = TransposedWindow((4, 3), (2, 3), (1, 0), (0, 1), (1, 2))
CONV = Convolution.of((2, 64, 6, 5), (64, 64, 3, 3), SQUARE, has_bias=True)
SCALED = {"scale": 0.25, "has_factor": True}
SITE = SiteInfo(
    device="cuda", itemsize=4, n=2, c=32, size=(9, 7), k=16, window=SQUARE, groups=1, digits=3, density=None,
    active=None, tf32=False, channels_last=True, fused=True,
)  # fmt: skip
PROBLEMS = [
    pytest.param(BINARY_CONV, binary_conv_problem(CONV, 3), id="conv"),
    pytest.param(BINARY_CONV, binary_conv_problem(CONV, 3, "rows"), id="conv of listed rows"),
    pytest.param(BINARY_CONV, binary_conv_problem(CONV._replace(**SCALED), 3), id="conv of scaled spikes"),
    pytest.param(BINARY_CONV, binary_conv_problem(CONV, 3, "count", 7), id="conv if many"),
    pytest.param(
        BINARY_CONV,
        binary_conv_problem(Convolution.of((2, 40, 6, 5), (24, 40, 3, 3), SQUARE, has_bias=True), 2),
        id="padded conv",
    ),
    pytest.param(
        BINARY_CONV,
        binary_conv_problem(Convolution.of((3, 64, 7), (32, 64, 3), Window((3,), (2,), (1,), (1,))), 3),
        id="conv of signals",
    ),
    pytest.param(
        TRANSPOSED_CONV,
        transposed_conv_problem(Convolution.of((2, 40, 4, 3), (36,), UPWARD, 2, has_bias=True)._replace(**SCALED), 2),
        id="transposed conv",
    ),
    pytest.param(
        DIRECT_CONV,
        direct_conv_problem(Convolution.of((2, 48, 6, 5), (48,), SQUARE, 48, has_bias=True)._replace(**SCALED)),
        id="depthwise conv",
    ),
    pytest.param(
        DIRECT_CONV, direct_conv_problem(Convolution.of((2, 12, 6, 5), (18,), SQUARE, 6, "float16", False)),
        id="conv of small groups",
    ),
    pytest.param(PACK_WEIGHT, PackWeight.of(torch.empty(16, 40, 3, 3), 3), id="pack_weight"),
    pytest.param(CAST, Cast(5000, 0, False, "float32"), id="cast"),
    pytest.param(CAST, Cast(5000, 3, True, "float16"), id="counted cast"),
    pytest.param(CAST_STRIDED, CastStrided(Maps(2, 40, (7, 5), (1400, 35, 5, 1), "float32")), id="cast_strided"),
    pytest.param(WRITE_OUT, WriteOut(40, 3000, 37_003, "float16", "int32"), id="write_out"),
    pytest.param(
        LIF,
        Lif(960, 960, 960, 16, 60, 0.1, 1e-5, 2.0, 1.0, 0.0, 3, "lif", True, False, True, True, True, True),
        id="lif",
    ),
    pytest.param(
        LIF,
        Lif(960, 960, 960, 16, 1, 0.1, 1e-5, 2.0, 0.5, 0.0, 3, "plif", False, True, False, False, False, False),
        id="plif",
    ),
    pytest.param(
        CONV_LIF,
        conv_lif_problem(
            Convolution.of((8, 64, 6, 5), (48,), SQUARE), 3,
            (0.1, 1e-5, 2.0, 0.7, 0.0, 4, "lif", True, False, True, True, True, True),
        ),
        id="conv_lif",
    ),
    pytest.param(
        CONV_LIF,
        conv_lif_problem(
            Convolution.of((6, 40, 6, 5), (24,), SQUARE, has_bias=True, scale=0.5), 2,
            (0.1, 0.0, 1.5, 0.5, 0.0, 3, "plif", False, True, False, False, False, False), keep=False, connect="add",
            currents=True,
        ),
        id="conv_lif of three steps",
    ),
    pytest.param(
        CONV_NEURON,
        conv_neuron_problem(
            Convolution.of((8, 64, 6, 5), (48,), SQUARE, dtype="float16", has_bias=True), 2,
            Described(
                4, neuron_of("t0 = mul v0 p0; t1 = add t0 x; t2 = float16 t1; t3 = ge t2 p1; spike t3; v0 t2"),
                "float16", 1e-5, (True, *[False] * 5), (0.1, 0.0), (0.3,) * 8, (False, False),
                (True, True, *[False] * 4), True, True, True, "float16",
            ),
            connect="add", added="int8", currents=True,
        ),
        id="conv_neuron",
    ),
    pytest.param(
        NEURON,
        Neurons(
            960, 960, 960, (Axis(16, 60), *[Axis(1, 1)] * 5), (0.0, 0.0), (0.3,) * 8, 3,
            neuron_of("t0 = mul v0 p0; t1 = add t0 x; t2 = ge t1 n0; t3 = float t2; spike t2; v0 t1; v1 t3"),
            (True, False), (True, *[False] * 5), True, states="bfloat16",
        ),
        id="neuron",
    ),
    pytest.param(
        SPIKE_MATMUL,
        SpikeMatmul(70, 20, 40, 2, 3, BatchStrides(8400, 40, 120, 1), BatchStrides(2400, 40, 1, 120), 0.25, "float32"),
        id="spike_matmul",
    ),
    pytest.param(
        SPIKE_MATMUL,
        SpikeMatmul(33, 90, 150, 1, 2, BatchStrides(0, 9900, 300, 2), BatchStrides(0, 13500, 90, 1), 1.0, "int32"),
        id="spike_matmul of many counts",
    ),
    pytest.param(
        ACCUMULATE,
        Accumulate(CONV._replace(k=24, out=OutputStrides(24, 1, 24 * 30), **SCALED), 2 * 64 * 30 // 16, processors=8),
        id="event_conv",
    ),
    pytest.param(
        SPIKE_CONV,
        SITE._replace(window=Window.centred((3, 3), (2, 2)), density=0.04, active=0.5),
        id="implementations of a convolution",
    ),
    pytest.param(SPIKE_CONV, SITE._replace(k=32, groups=32), id="implementations of a depthwise layer"),
    pytest.param(
        SPIKE_CONV,
        SITE._replace(n=6, size=(1, 1), window=Window.centred((1, 1), (1, 1)), fused=False),
        id="implementations of a linear layer",
    ),
]  # fmt: skip


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(("operation", "problem"), PROBLEMS)
def test_configurations_match_the_reference_on_poisoned_results(operation, problem, device, monkeypatch):
    """All of them on a GPU; the first, the middle and the last in the interpreter, which is slow."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # as the problems have it
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    candidates = operation.candidates(problem, device_of(where))
    if device == "cpu":
        candidates = [candidates[0], candidates[len(candidates) // 2], candidates[-1]]
    faults = {candidate.name: fault(operation, problem, where, candidate) for candidate in candidates}
    assert faults == dict.fromkeys(faults)


@pytest.mark.parametrize(("operation", "problem"), PROBLEMS)
def test_the_representative_of_a_signature_has_that_signature(operation, problem):
    signature = operation.signature(problem, Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0"))
    stand_in = operation.representative(signature)
    assert operation.signature(stand_in, signature.device).key == signature.key
    assert type(stand_in) is type(problem)
    from_text = operation.representative(signature_of(signature.fields))
    assert operation.signature(from_text, signature.device).key == signature.key


@pytest.mark.parametrize("select", ["all", "count", "rows"])
def test_a_convolution_is_measured_on_all_that_its_problem_names(select):
    problem = binary_conv_problem(CONV._replace(**SCALED), 3, select, 7)
    *_, factor, _, count, rows = BINARY_CONV.operands(problem, torch.device("cpu"), 0)
    assert factor is not None and float(factor) not in (0.0, 1.0)  # a kernel without it would give something else
    assert count is None if select == "all" else int(count) > 7
    assert rows is None if select != "rows" else rows.tolist() == list(range(2 * 6 * 5))


@pytest.mark.parametrize("capability", ["8.0", "8.6", "9.0", "10.0", ""])
@pytest.mark.parametrize(("operation", "problem"), PROBLEMS)
def test_every_card_has_a_configuration(operation, problem, capability):
    assert operation.candidates(problem, Device("some card", capability, "3.6.0"))


def test_hopper_has_its_own_convolution_and_says_why_others_do_not():
    h100, a100 = Device("H100", "9.0", "3.6.0"), Device("A100", "8.0", "3.6.0")
    whole, padded = (binary_conv_problem(conv, 3) for conv in (CONV, CONV._replace(c=40)))
    assert {one.template.name for one in BINARY_CONV.candidates(whole, h100)} == {"binary_conv_hopper"}
    assert {one.template.name for one in BINARY_CONV.candidates(whole, a100)} == {"binary_conv"}
    assert "compute capability 9" in BINARY_CONV.refusals(whole, a100)["binary_conv_hopper"]
    assert {one.template.name for one in BINARY_CONV.candidates(padded, h100)} == {"binary_conv"}


def test_names_are_unique_and_every_operation_has_a_template():
    found = [template for name in all_operations() for template in of_operation(name)]
    assert len({template.name for template in found}) == len(found)
    assert all(of_operation(name) for name in all_operations())


def test_another_source_is_another_version_of_the_candidate():
    (template,) = of_operation("cast")
    other = replace(template, sources=of_operation("lif")[0].sources)
    assert other.version != template.version == replace(template).version


def test_a_strategy_is_another_version_when_one_of_its_kernels_is():
    dense, *sparse = of_operation("spike_conv")
    assert not dense.sources  # a library's
    shared = {source for op in ("pack_weight", "binary_conv") for one in of_operation(op) for source in one.sources}
    assert all(shared <= set(strategy.sources) for strategy in sparse if strategy.name != "direct")
    assert len({one.version for one in (dense, *sparse)}) == 5


def test_configurations_are_equal_if_their_values_are():
    one = Config(BM=1, warps=4)
    assert one == Config(BM=1, warps=4) and hash(one) == hash(Config(BM=1, warps=4))
    assert one != Config(BM=2, warps=4) and one != Config(BM=1) and one != {"BM": 1, "warps": 4} and one != str(one)
