"""The settings of a RESU training cycle, checked once when they are made, so that no phase meets a bad one."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sparsecomp.errors import ConfigError, ScheduleError, typed_arguments
from sparsecomp.training.pruning.budgets import BUDGETS
from sparsecomp.training.pruning.pruners import PRUNERS, Pruner, Wanda
from sparsecomp.training.schedules import amnesty_rate, sparsity_at

STABILISERS = ("bias_shift", "dsnot", "none")
PRECISIONS = ("float32", "bfloat16", "float16")


@typed_arguments(ConfigError)
@dataclass(frozen=True)
class RESUConfig:
    """What a cycle does and for how long; steps are optimizer steps. ConfigError for a value outside its domain.

    Attributes:
        cycles: how often Train, Prune, Stabilize, RESU and Commit run, at least 1.
        train_steps: steps of the Train phase of a cycle; dense in the first, sparse after it.
        resu_steps: steps of the RESU phase of a cycle. Selection starts after a warm-up of about 1 / (1 - beta) steps.
        finetune_steps: sparse steps after the last cycle.
        sparsity_start: share of pruned weights in the first cycle, in [0, 1).
        sparsity_end: share in the last cycle.
        schedule: linear, exponential, cosine or cubic, from one to the other.
        budget: uniform, the same share in each layer; or erk, by Erdos-Renyi-Kernel.
        pruner: magnitude; wanda, ranked in each output row; n_of_m, by Wanda's score in groups along the input;
            sparsegpt, whose blocks of 128 columns round their counts. All but magnitude read calibration batches.
        n_of_m: how many of how many neighbours n_of_m keeps, such as (2, 4). Both sparsities are then 1 - n/m.
        stabiliser: bias_shift, where a layer has a bias; dsnot; or none.
        calibration_batches: batches that each Prune phase takes from the training data for its statistics.
        amnesty_start: share of the kept weights that resurrected ones may take in the first cycle, in [0, 1].
        amnesty_end: share in the last cycle.
        accumulation: batches of one optimizer step; their losses are averaged.
        precision: float32; or bfloat16 or float16, by autocast. float16 scales the loss, and a step that the scaler
            skips counts as a step.
        check_every: steps between two looks at whether the loss is finite. Each look waits for the device.
        skip: names of modules that stay dense.
    """

    cycles: int = 5
    train_steps: int = 500
    resu_steps: int = 200
    finetune_steps: int = 500
    sparsity_start: float = 0.5
    sparsity_end: float = 0.9
    schedule: str = "cubic"
    budget: str = "erk"
    pruner: str = "magnitude"
    n_of_m: tuple[int, int] | None = None
    stabiliser: str = "bias_shift"
    calibration_batches: int = 4
    amnesty_start: float = 0.3
    amnesty_end: float = 0.1
    accumulation: int = 1
    precision: str = "float32"
    check_every: int = 1
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} is {value!r}: give an int of at least {least}")
        for name, choices in {**_CHOICES, "pruner": (*PRUNERS, "n_of_m")}.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: choose one of {', '.join(choices)}")
        for name in ("sparsity_start", "sparsity_end", "amnesty_start", "amnesty_end"):
            if type(getattr(self, name)) not in (int, float):
                raise ConfigError(f"{name} is {getattr(self, name)!r}: give a float")
        try:
            _ = self.sparsity(0), self.amnesty(0)
        except ScheduleError as error:
            raise ConfigError(f"sparsity or amnesty of the cycle: {error}") from error
        if not isinstance(self.skip, tuple) or not all(isinstance(name, str) for name in self.skip):
            raise ConfigError(f"skip is {self.skip!r}: give a tuple of module names")
        self._check_groups()

    def _check_groups(self) -> None:
        if (self.pruner == "n_of_m") != (self.n_of_m is not None):
            raise ConfigError(
                f"pruner {self.pruner!r} with n_of_m={self.n_of_m}: n_of_m needs its numbers, others none"
            )
        # what reads products changes the weights that it keeps, and dsnot begins from those before
        if self.stabiliser == "dsnot" and (self.n_of_m is not None or self.method.products):
            raise ConfigError(f"dsnot would undo what {self.pruner} did: use bias_shift")
        if self.n_of_m is None:
            return
        if not isinstance(self.n_of_m, tuple) or [type(number) for number in self.n_of_m] != [int, int]:
            raise ConfigError(f"n_of_m is {self.n_of_m!r}: give two ints, such as (2, 4)")
        keep, group = self.n_of_m
        if not 1 <= keep <= group:
            raise ConfigError(f"n_of_m is {self.n_of_m}: 1 <= n <= m is needed")
        if not self.sparsity_start == self.sparsity_end == 1 - keep / group:
            share = 1 - keep / group
            raise ConfigError(f"{keep}:{group} is one sparsity: set sparsity_start and sparsity_end to {share}")

    @property
    def method(self) -> Pruner:
        """What ranks the weights."""
        return Wanda() if self.n_of_m is not None else PRUNERS[self.pruner]

    def sparsity(self, cycle: int) -> float:
        """Share of pruned weights in a cycle, from 0."""
        return sparsity_at(cycle, self.cycles, self.sparsity_start, self.sparsity_end, self.schedule)

    def amnesty(self, cycle: int) -> float:
        """Share of the kept weights that resurrected ones may take in a cycle, from 0."""
        return amnesty_rate(cycle, self.cycles, self.amnesty_start, self.amnesty_end)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole training."""
        return self.cycles * (self.train_steps + self.resu_steps) + self.finetune_steps

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON's types."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "RESUConfig":
        """The settings from JSON's types; ConfigError for an unknown key or a bad value."""
        taken: dict[str, Any] = {str(key): value for key, value in settings.items()}
        taken.update((key, tuple(value)) for key, value in settings.items() if isinstance(value, list))
        return cls(**taken)


_COUNTS = {
    "cycles": 1,
    "train_steps": 0,
    "resu_steps": 0,
    "finetune_steps": 0,
    "calibration_batches": 1,
    "accumulation": 1,
    "check_every": 1,
}
_CHOICES = {
    "schedule": ("linear", "exponential", "cosine", "cubic"),
    "budget": BUDGETS,
    "stabiliser": STABILISERS,
    "precision": PRECISIONS,
}
