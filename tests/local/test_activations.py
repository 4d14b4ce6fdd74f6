"""Learned sines, held against their formula in float64, with every name of a keyword."""

import math

import pytest
import torch

from sparsecomp.errors import ConfigError
from sparsecomp.nn.local.activations import ACTIVATION_TYPES, PhaseSineParam, SineParam, activation_of

DECAYS = {"abs": abs, "relu": lambda z: max(z, 0.0), "none": lambda z: 0.0}


@pytest.mark.parametrize("mode", DECAYS)
def test_the_formula(mode):
    act = PhaseSineParam(3, amplitude_init=1.5, frequency_init=0.7, decay_init=0.2, phase_init=0.3, decay_mode=mode)
    z = torch.tensor([[-2.0, 0.0, 0.5], [1.0, 3.0, -0.1]], dtype=torch.float64)
    wanted = [1.5 * math.exp(-0.2 * DECAYS[mode](one)) * math.sin(0.7 * one + 0.3) for one in z.flatten().tolist()]
    torch.testing.assert_close(act.double()(z).flatten(), z.new_tensor(wanted), rtol=1e-6, atol=1e-7)
    plain = SineParam(3, amplitude_init=1.5, frequency_init=0.7, decay_init=0.2, decay_mode=mode)
    assert plain(torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2


def test_gradients_by_finite_differences():
    for kind in ("psann", "phase_psann"):
        act = activation_of(kind, 3).double()
        names, start = zip(*act.named_parameters(), strict=True)

        def call(z, *given, act=act, names=names):
            return torch.func.functional_call(act, dict(zip(names, given, strict=True)), z)

        z = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(call, (z, *start))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mode", DECAYS)
def test_large_inputs_stay_finite(mode, dtype):
    act = activation_of("phase_psann", 5, {"decay_mode": mode, "freq": 40.0, "amp": 9.0, "damp": 3.0})
    most = torch.finfo(dtype).max
    z = torch.tensor([-most, -1e4, 0.0, 1e4, most], dtype=dtype, requires_grad=True)
    out = act(z)
    assert out.dtype is dtype and out.isfinite().all() and (out.abs() <= 9.01).all()
    out.sum().backward()
    assert z.grad.isfinite().all()
    if mode == "abs":
        assert all(one.grad.isfinite().all() for one in act.parameters())
    infinite = act(torch.tensor([math.inf] * 5, dtype=dtype))
    assert infinite.isfinite().all() and act(torch.full((5,), math.nan, dtype=dtype)).isnan().all()


def test_aliases_bounds_and_what_is_learned():
    act = activation_of("phase_psann", 2, {"amp": 2, "freq": 3.0, "damping": 0.5, "trainable": "freq", "phase": 1.0})
    assert [act.value(name)[0].item() for name in ("amplitude", "frequency", "decay")] == pytest.approx([2, 3, 0.5])
    assert [name for name, _ in act.named_parameters()] == ["frequency", "phase"]
    assert sorted(act.state_dict()) == ["amplitude", "decay", "frequency", "phase"]
    held = activation_of("psann", 2, {"bounds": {"freq": (0.5, 1.5), "amplitude": (None, 4.0)}, "learnable": "all"})
    with torch.no_grad():
        held.frequency.fill_(9.0)
        held.amplitude.fill_(-9.0)
    assert held.value("frequency").tolist() == [1.5, 1.5] and 0 < held.value("amplitude")[0] < 1e-3
    assert [name for name, _ in held.named_parameters()] == ["amplitude", "frequency", "decay"]


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("sine", {}, "needs one of " + ", ".join(ACTIVATION_TYPES)),
        ("relu", {"amp": 1}, "takes nothing"),
        ("psann", {"amplitud": 1}, "takes amplitude_init"),
        ("psann", {"phase": 1}, "takes amplitude_init"),
        ("psann", {"amp": 1, "amplitude": 2}, "gives it twice"),
        ("psann", {"amp": 0}, "above 0"),
        ("psann", {"damp": 0.0}, "decay_mode='none'"),
        ("psann", {"freq": "high"}, "above 0"),
        ("psann", {"learnable": ("gain",)}, "learnable has gain"),
        ("psann", {"bounds": {"gain": (0, 1)}}, "bounds has gain"),
        ("psann", {"bounds": {"freq": 1}}, "bounds of frequency"),
        ("psann", {"bounds": {"freq": (2, 3)}}, "must lie within"),
        ("psann", {"decay_mode": "square"}, "needs one of abs, relu, none"),
        ("phase_psann", {"phase": math.inf}, "phase_init is inf"),
    ],
)
def test_settings_that_cannot_be(kind, config, message):
    with pytest.raises(ConfigError, match=message):
        activation_of(kind, 3, config)
