"""Activations of networks on a grid: torch's, and sines whose amplitude, frequency and decay each feature learns."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsecomp.errors import ConfigError
from sparsecomp.reference.local.residual_block import damped_sine
from sparsecomp.reference.precision import accumulator

_PLAIN: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}
_NAMES = ("amplitude", "frequency", "decay")
_SHORT = {"amp": "amplitude", "freq": "frequency", "damp": "decay", "damping": "decay"}
_ALIASES = {
    **{name: f"{name}_init" for name in _NAMES}, **{short: f"{name}_init" for short, name in _SHORT.items()},
    "trainable": "learnable", "phase": "phase_init",
}  # fmt: skip
_DECAYS = ("abs", "relu", "none")
_OPEN = (0.0, math.inf)

Bounds = Mapping[str, tuple[float | None, float | None]]


class SineParam(nn.Module):
    """A · exp(-d · g(z)) · sin(f · z); A, f and d are softplus of raw parameters, one a feature.

    It is computed in float32 at least, and stays finite for every finite input.

    Args:
        out_features: size of the last axis of z.
        amplitude_init, frequency_init, decay_init: A, f and d at the start, above 0.
        learnable: which of "amplitude", "frequency" and "decay" are parameters; the others stay as they are.
        decay_mode: g is "abs" (the magnitude), "relu", or "none" (0: nothing decays).
        bounds: (least, most) of A, f or d by name; None leaves a side open.

    Raises:
        ConfigError: a value is outside its domain, or a name unknown.
    """

    def __init__(
        self, out_features: int, *, amplitude_init: float = 1.0, frequency_init: float = 1.0, decay_init: float = 0.1,
        learnable: Iterable[str] | str = _NAMES, decay_mode: str = "abs", bounds: Bounds | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if decay_mode not in _DECAYS:
            raise ConfigError(f"decay_mode is {decay_mode!r}, needs one of {', '.join(_DECAYS)}")
        self.out_features, self.decay_mode = out_features, decay_mode
        self.bounds = {name: _pair(name, sides) for name, sides in _named(bounds or {}, "bounds").items()}
        learned = _learned(learnable)
        for name, start in zip(_NAMES, (amplitude_init, frequency_init, decay_init), strict=True):
            _check(name, start, self.bounds.get(name, _OPEN))
            raw = torch.full((out_features,), start + math.log(-math.expm1(-start)))  # softplus of this is the start
            if name in learned:
                self.register_parameter(name, nn.Parameter(raw))
            else:
                self.register_buffer(name, raw)

    def value(self, name: str) -> Tensor:
        """A, f or d of each feature, by "amplitude", "frequency" or "decay": (out_features,)."""
        found = F.softplus(getattr(self, name))
        return found.clamp(*self.bounds[name]) if name in self.bounds else found

    def shape(self) -> list[Tensor]:
        """A, f and d of each feature, and what else the sine has."""
        return [self.value(name) for name in _NAMES]

    def forward(self, z: Tensor) -> Tensor:
        """(..., out_features), any floating dtype, which stays."""
        return damped_sine(z.to(accumulator(z.dtype)), self.decay_mode, self.shape()).to(z.dtype)

    def extra_repr(self) -> str:
        """Size and kind, for print."""
        return f"{self.out_features}, decay_mode={self.decay_mode}"


class PhaseSineParam(SineParam):
    """`SineParam` with a phase of each feature within the sine: A · exp(-d · g(z)) · sin(f · z + phi).

    Args:
        phase_init: phi at the start.
        phase_trainable: whether phi is a parameter.
    """

    def __init__(
        self, out_features: int, *, phase_init: float = 0.0, phase_trainable: bool = True, **settings: Any
    ) -> None:
        super().__init__(out_features, **settings)
        if not math.isfinite(phase_init):
            raise ConfigError(f"phase_init is {phase_init}, needs a finite number")
        phase = torch.full((out_features,), float(phase_init))
        if phase_trainable:
            self.phase = nn.Parameter(phase)
        else:
            self.register_buffer("phase", phase)

    def shape(self) -> list[Tensor]:
        """A, f, d and phi of each feature."""
        return [*super().shape(), self.phase]


_SINES: dict[str, type[SineParam]] = {"psann": SineParam, "phase_psann": PhaseSineParam}
ACTIVATION_TYPES = (*_PLAIN, *_SINES)


def activation_of(kind: str, features: int, config: Mapping[str, Any] | None = None) -> nn.Module:
    """An activation by name.

    Args:
        kind: "relu", "tanh", "gelu", "psann" or "phase_psann".
        features: size of the last axis.
        config: keywords of `SineParam` or `PhaseSineParam`, or short ones: amp, freq, damp, trainable, phase.

    Raises:
        ConfigError: an unknown name, a keyword that it does not take or takes once, or a value outside its domain.
    """
    if kind not in ACTIVATION_TYPES:
        raise ConfigError(f"activation_type is {kind!r}, needs one of {', '.join(ACTIVATION_TYPES)}")
    given = dict(config or {})
    if kind in _PLAIN:
        if given:
            raise ConfigError(f"activation_config has {', '.join(given)}, {kind} takes nothing: leave it out")
        return _PLAIN[kind]()
    settings: dict[str, Any] = {}
    known = {*_SETTINGS, *(_PHASE if kind == "phase_psann" else ())}
    for key, value in given.items():
        name = _ALIASES.get(key, key)
        if name not in known or name in settings:
            twice = "gives it twice" if name in settings else f"takes {', '.join(sorted(known))}"
            raise ConfigError(f"activation_config has {key!r}: {kind} {twice}")
        settings[name] = value
    return _SINES[kind](features, **settings)


_SETTINGS = (*(f"{name}_init" for name in _NAMES), "learnable", "decay_mode", "bounds")
_PHASE = ("phase_init", "phase_trainable")


def _learned(learnable: Iterable[str] | str) -> set[str]:
    names = [learnable] if isinstance(learnable, str) else list(learnable)
    return set(_NAMES) if names == ["all"] else set(_named(dict.fromkeys(names), "learnable"))


def _named(given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """By the long names of A, f and d."""
    found = {_SHORT.get(name, name): value for name, value in given.items()}
    if not set(found) <= set(_NAMES):
        raise ConfigError(f"{what} has {', '.join(map(str, given))}, needs names of {', '.join(_NAMES)}")
    return found


def _pair(name: str, sides: Any) -> tuple[float, float]:
    given = tuple(sides) if isinstance(sides, Iterable) else ()
    if len(given) != 2 or not all(side is None or isinstance(side, int | float) for side in given):
        raise ConfigError(f"bounds of {name} are {sides!r}, need (least, most), each a number or None")
    least, most = (open if side is None else float(side) for side, open in zip(given, _OPEN, strict=True))
    return least, most


def _check(name: str, start: float, bounds: tuple[float, float]) -> None:
    if not (isinstance(start, int | float) and 0 < start < math.inf):
        hint = ": decay_mode='none' decays nothing" if name == "decay" else ""
        raise ConfigError(f"{name}_init is {start!r}, needs a finite number above 0{hint}")
    if not bounds[0] <= start <= bounds[1]:
        raise ConfigError(f"{name}_init is {start}, bounds of {name} are {bounds}: it must lie within")
