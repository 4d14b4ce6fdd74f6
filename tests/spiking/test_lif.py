"""The fused neuron operator against its equations in plain torch, through the interpreter and on the GPU."""

import pytest
import torch
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, interpreted

import sparsecomp.ops as ops
from sparsecomp.errors import InputError

pytestmark = pytest.mark.quick_cases(1)


def sample(layout="contiguous", shape=(3, 2, 5, 4, 3)):
    x = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if layout == "channels_last":
        x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, shape[:2])
    if layout == "time_inside":
        x = x.movedim(0, 1).contiguous().movedim(1, 0)
    if layout == "sliced":
        x = torch.cat((x, x), 3)[:, :, :, ::2]
    return x


def arguments(x, charge="lif", decay=True, reset=0.0, v=False, norm=False, tau=2.0):
    c = x.shape[2]
    statistics = (None, None, None, None, 0.0)
    if norm:
        g = torch.Generator().manual_seed(1)
        mean, weight, bias = (torch.randn(c, generator=g) for _ in range(3))
        statistics = (mean, torch.rand(c, generator=g) + 0.5, weight, bias, 1e-5)
    start = torch.full_like(x[0], 0.3) if v else None
    rate = torch.tensor(0.37) if charge == "plif" else None
    return (x, start, 0.1, *statistics, charge, tau, rate, decay, 0.7, reset)


def on(device, args):
    return tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in args)


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize(
    ("charge", "decay", "reset", "first", "second"),
    [
        # from 0.5, driven by 1 and then 0.25, tau 4 or a rate of 1/2; it fires from 1.5 on
        ("if", False, 0.25, 1.5, 0.5), ("if", False, None, 1.5, 0.25), ("if", True, 0.0, 1.5, 0.25),
        ("lif", True, 0.25, 0.6875, 0.640625), ("lif", False, 0.25, 1.4375, 1.390625),
        ("lif", True, None, 0.625, 0.53125), ("lif", False, None, 1.375, 1.28125),
        ("plif", True, 0.25, 0.875, 0.6875), ("plif", False, 0.25, 1.375, 1.0625),
        ("plif", True, None, 0.75, 0.5), ("plif", False, None, 1.25, 0.875), ("lif", False, 1.0, 1.625, 1.25),
    ],
)  # fmt: skip
def test_two_steps_by_hand(charge, decay, reset, first, second):
    """Charges h of both steps: v + x; v + (x - (v - rest)) / tau with decay of the input; v - (v - rest) / tau + x."""
    x, rate = torch.tensor([1.0, 0.25]).view(2, 1, 1), torch.tensor(0.5)
    for steps, charged in ((1, first), (2, second)):
        spikes, v = ops.lif(x[:steps], None, 0.5, None, None, None, None, 0.0, charge, 4.0, rate, decay, 1.5, reset)
        fired = [charged >= 1.5] if steps == 1 else [first >= 1.5, charged >= 1.5]
        assert spikes.flatten().tolist() == fired
        assert v.item() == (charged if not fired[-1] else charged - 1.5 if reset is None else reset)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("charge", ["if", "lif", "plif"])
@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize("reset", [0.0, 0.1, -0.1, None])
@pytest.mark.parametrize("tau", [3.0, 2.0, 0.25])
def test_kernel_equals_the_equations_bit_by_bit(device, charge, decay, reset, tau):
    """Also where the quotient by a tau that is a power of two is a product."""
    from sparsecomp.lowering.spiking.lif import launch_lif

    args = arguments(sample(), charge, decay, reset, v=True, tau=tau)
    expected, last = ops.lif(*args)
    assert 0 < expected.float().mean() < 1
    spikes, v = launch_lif(*on(device, args))
    assert torch.equal(spikes.cpu(), expected)
    torch.testing.assert_close(v.cpu(), last, rtol=0, atol=0)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "time_inside", "sliced"])
@pytest.mark.parametrize("norm", [False, True])
def test_kernel_in_any_layout(device, layout, norm):
    from sparsecomp.lowering.spiking.lif import launch_lif

    x = sample(layout)
    args = on(device, arguments(x, norm=norm))
    expected, last = ops.lif(*arguments(x, norm=norm))
    spikes, v = launch_lif(*args)
    assert torch.equal(spikes.cpu(), expected)
    torch.testing.assert_close(v.cpu(), last, rtol=1e-5, atol=1e-6)
    assert spikes.dtype is torch.int8 and spikes.stride() == torch.empty_like(args[0]).stride()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("reset", [0.0, -0.0, -0.3, None])
@pytest.mark.parametrize("tau", [2.0, 3.0])
def test_nan_never_fires_and_stays(device, reset, tau):
    from sparsecomp.lowering.spiking.lif import launch_lif

    x = torch.zeros(2, 1, 1, 6)
    x[0, 0, 0] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, -1e-38])
    args = arguments(x, reset=reset, tau=tau)
    args = (args[0], torch.tensor([[[0.0, 0.0, 0.0, -0.0, 3e-45, 1e-38]]]), *args[2:])
    spikes, v = launch_lif(*on(device, args))
    expected, last = ops.lif(*args)
    assert spikes[:, 0, 0].tolist() == expected[:, 0, 0].tolist() == [[0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
    torch.testing.assert_close(v.cpu(), last, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(v.cpu().signbit() & ~last.isnan(), last.signbit() & ~last.isnan())


def test_batch_norm_inside_equals_batch_norm_in_front():
    x = sample()
    args = arguments(x, norm=True)
    mean, var, weight, bias, eps = args[3:8]
    normalised = torch.nn.functional.batch_norm(x.flatten(0, 1), mean, var, weight, bias, False, 0.0, eps)
    inside, _ = ops.lif(*args)
    in_front, _ = ops.lif(*arguments(normalised.view_as(x)))
    assert torch.equal(inside, in_front)


@pytest.mark.parametrize("other_layout", [False, True])
def test_opcheck(other_layout):
    args = arguments(sample("channels_last"), v=True, norm=True)
    start = args[1].contiguous() if other_layout else args[1]
    torch.library.opcheck(torch.ops.sparsecomp.lif.default, (args[0], start, *args[2:]))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_first_membrane_is_broadcast(device):
    from sparsecomp.lowering.spiking.lif import launch_lif

    x = sample(shape=(3, 4, 5, 1, 1))
    rest = arguments(x)[2:]
    start = torch.full((1, 5, 1, 1), 0.3)
    assert start.stride() == x[0].stride()
    expected, last = ops.lif(x, start, *rest)
    spikes, v = launch_lif(*on(device, (x, start, *rest)))
    assert torch.equal(spikes.cpu(), expected)
    torch.testing.assert_close(v.cpu(), last, rtol=1e-5, atol=1e-6)


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("capability", [80, 90])
def test_compiles(capability):
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.spiking.kernels.lif import lif_kernel as kernel
        floats = {{n: "fp32" for n in ("v0", "eps", "tau", "threshold", "reset")}}
        pointers = {{n: "*fp32" for n in kernel.arg_names if n.endswith("_ptr")}} | dict(spikes_ptr="*i8")
        constants = dict(STEPS=4, CHARGE="lif", HALVES=False, DECAY_INPUT=True, SOFT_RESET=False, HAS_V=False,
                         HAS_NORM=True, HAS_WEIGHT=True, HAS_BIAS=True, BLOCK=1024)
        types = {{n: pointers.get(n, floats.get(n, "i32")) for n in kernel.arg_names}}
        built = build(kernel, types, constants, {capability}, num_warps=4)
        wide = [f"extsi %{{step}}" in built.asm["ttir"] for step in ("x_step", "spikes_step")]
        print(built.asm["ptx"].count("st.global"), *wide)
        """
    )
    stores, *wide = printed.split()
    assert int(stores) >= 5
    assert wide == ["True", "True"], "the offset of a time step must not overflow 32 bits"


@interpreted
@pytest.mark.parametrize(
    ("changed", "told"),
    [({"mean": 4, "var": 4}, "5 channels"), ({"mean": 5}, "5 channels"), ({"bias": 9}, "5 channels"),
     ({"charge": "plif"}, "rate is None"), ({"charge": "plif", "rate": 5}, "rate is"), ({"rate": 1}, "rate is")],
)  # fmt: skip
def test_a_kernel_is_not_launched_on_what_does_not_fit(changed, told):
    usual = {
        "x": torch.randn(3, 2, 5, 4), "v": None, "v0": 0.0, "mean": None, "var": None, "weight": None, "bias": None,
        "eps": 1e-5, "charge": "lif", "tau": 2.0, "rate": None, "decay_input": True, "threshold": 1.0, "reset": 0.0,
    }  # fmt: skip
    given = {name: torch.rand(one) if isinstance(one, int) else one for name, one in changed.items()}
    with pytest.raises(InputError, match=told):
        torch.ops.sparsecomp.lif.default.direct_cuda(*{**usual, **given}.values())
