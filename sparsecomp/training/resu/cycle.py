"""The RESU cycle as an explicit state machine: Train, Prune, Stabilize, RESU, Commit, and a last fine-tuning.

It decides and changes masks, between optimizer steps; the steps themselves are the trainer's, or a loop of one's own:

    while not cycle.done:
        if cycle.steps_left:
            ...  # one optimizer step
            cycle.count_step()
        else:
            cycle.advance(statistics)
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from sparsecomp.errors import ConfigError
from sparsecomp.nn.masked.layers import masked_weights
from sparsecomp.nn.masked.masked_weight import MaskedWeight
from sparsecomp.reference.sharding import parted, whole
from sparsecomp.training.distributed import agreed, bare
from sparsecomp.training.history import CycleReport, History, LayerReport
from sparsecomp.training.pruning.budgets import BUDGETS
from sparsecomp.training.pruning.calibration import InputStatistics, Statistics
from sparsecomp.training.pruning.layer_repair import added_bias, dsnot, lost_output
from sparsecomp.training.pruning.pruners import Parts, Pruned
from sparsecomp.training.resu.adamw import RESUAdamW
from sparsecomp.training.resu.amnesty import amnesty_mask, amnesty_n_of_m
from sparsecomp.training.resu.config import RESUConfig


class Phase(StrEnum):
    """Where a cycle is. TRAIN, RESU and FINETUNE take optimizer steps; the others happen between two steps."""

    TRAIN = "train"
    PRUNE = "prune"
    STABILIZE = "stabilize"
    RESU = "resu"
    COMMIT = "commit"
    FINETUNE = "finetune"
    DONE = "done"


_AFTER = {
    Phase.TRAIN: Phase.PRUNE,
    Phase.PRUNE: Phase.STABILIZE,
    Phase.STABILIZE: Phase.RESU,
    Phase.RESU: Phase.COMMIT,
    Phase.FINETUNE: Phase.DONE,
}


@dataclass
class _Layer:
    """A masked weight, the biases beside it, and what the cycle remembers of it."""

    weight: nn.Parameter
    masked: MaskedWeight
    biases: list[torch.Tensor]
    # the cycle, from 1, in which an active element was resurrected; 0 for all others
    origin: torch.Tensor
    # between Prune and Stabilize: the weight as it was, and the mean input of its rows' parts
    before: torch.Tensor | None = None
    parts: tuple[InputStatistics, ...] = ()
    calibrated: bool = False

    @property
    def mask(self) -> torch.Tensor:
        return self.masked.mask.mask

    def forget(self) -> None:
        """What is no longer active was not resurrected either."""
        self.origin.masked_fill_(~self.mask, 0)


@dataclass
class RESUCycle:
    """The cycle over a wrapped model whose optimizer is RESUAdamW; `model` may be within DistributedDataParallel.

    Raises ConfigError where the model has no masked weight, one that the config's n_of_m does not divide, or one that
    is frozen though there are RESU steps.
    """

    model: nn.Module
    optimizer: RESUAdamW
    config: RESUConfig
    cycle: int = 0
    phase: Phase = Phase.TRAIN
    step: int = 0
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        self._layers = _layers(bare(self.model), self.config.skip)
        if not self._layers:
            raise ConfigError("the model has no masked weight to prune: call sparsecomp.nn.wrap_module, or skip less")
        group = self.config.n_of_m[1] if self.config.n_of_m else 1
        uneven = [name for name, layer in self._layers.items() if layer.weight.shape[1] % group]
        if uneven:
            raise ConfigError(f"groups of {group} do not divide the inputs of {', '.join(uneven)}: put them in skip")
        frozen = [name for name, layer in self._layers.items() if not layer.weight.requires_grad]
        if frozen and self.config.resu_steps:
            raise ConfigError(
                f"{', '.join(frozen)} have requires_grad False, so nothing pruned there could come back: set it to "
                "True, put their modules in skip, or take no RESU steps"
            )
        self._replicas = agreed(self.model, repr(self.config.to_dict()))

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self.phase is Phase.DONE

    @property
    def steps_left(self) -> int:
        """Optimizer steps until `advance` is due."""
        phases = {
            Phase.TRAIN: self.config.train_steps,
            Phase.RESU: self.config.resu_steps,
            Phase.FINETUNE: self.config.finetune_steps,
        }
        return phases.get(self.phase, 0) - self.step

    @property
    def _device(self) -> torch.device:
        return next(iter(self._layers.values())).weight.device

    @property
    def needs_statistics(self) -> bool:
        """Whether the Prune phase reads calibration batches."""
        return self.config.method.calibrated or self.config.stabiliser != "none"

    def count_step(self) -> None:
        """Say that an optimizer step was taken."""
        self.step += 1

    def advance(self, statistics: Callable[[], Statistics]) -> Phase:
        """Do what the phase does between steps, go to the next phase, and return the one that ended.

        `statistics` calibrates the model (with products, if the pruner reads them), in the Prune phase alone.
        RuntimeError while steps of the phase are left.
        """
        if self.steps_left or self.done:
            raise RuntimeError(f"phase {self.phase} has {self.steps_left} steps left: advance when none is, until done")
        ended = self.phase
        match ended:
            case Phase.PRUNE:
                self._prune(statistics() if self.needs_statistics else {})
            case Phase.STABILIZE:
                self._stabilize()
            case Phase.COMMIT:
                self.history.cycles.append(self._commit())
        self.phase, self.step = self._after(ended), 0
        if ended is Phase.COMMIT:
            self.cycle += 1
        return ended

    def resurrected(self) -> dict[str, torch.Tensor]:
        """True at the active elements that a commit brought back, bool of each weight's shape, by its name."""
        return {name: layer.origin > 0 for name, layer in self._layers.items()}

    def _after(self, phase: Phase) -> Phase:
        if phase is Phase.COMMIT:
            return Phase.TRAIN if self.cycle + 1 < self.config.cycles else Phase.FINETUNE
        return _AFTER[phase]

    def _pruned(self, weight: torch.Tensor, keep: int, parts: Parts) -> Pruned:
        """Only n_of_m, whose count is its groups', and sparsegpt, which rounds its blocks', do not keep `keep`."""
        method, groups = self.config.method, self.config.n_of_m
        return method.prune(weight, keep, parts) if groups is None else method.prune_groups(weight, *groups, parts)

    @torch.no_grad()
    def _prune(self, statistics: Statistics) -> None:
        shapes = {name: layer.weight.shape for name, layer in self._layers.items()}
        budget = BUDGETS[self.config.budget]
        keep = budget(shapes, self.config.sparsity(self.cycle))
        pruned = {}
        for name, layer in self._layers.items():
            layer.parts = statistics.get(name, ())
            layer.calibrated = bool(layer.parts)
            layer.before = layer.masked.effective(whole(layer.weight.detach())).clone()
        with self._replicas.as_one(self._device):
            for name, layer in self._layers.items():
                assert layer.before is not None
                pruned[name] = self._pruned(layer.before, keep[name], layer.parts)
        # a layer that cannot be ranked has raised by now, and no other has changed
        for name, (values, mask) in pruned.items():
            layer = self._layers[name]
            layer.weight.copy_(parted(self._replicas.decided(values), layer.weight))
            self._take(layer, self._replicas.decided(mask))

    @torch.no_grad()
    def _stabilize(self) -> None:
        for layer in self._layers.values():
            assert layer.before is not None
            if layer.parts and self.config.stabiliser == "dsnot":
                mask = self._replicas.decided(dsnot(layer.before, layer.mask, layer.parts))
                layer.weight.copy_(parted(layer.before, layer.weight))
                self._take(layer, mask)
            if layer.parts and self.config.stabiliser == "bias_shift":
                shift = self._replicas.decided(lost_output(layer.before - whole(layer.weight), layer.parts))
                for bias in layer.biases:
                    bias.add_(parted(shift, bias))
            layer.before, layer.parts = None, ()
            layer.forget()
            layer.masked.enter_resu_(layer.weight)

    def _take(self, layer: _Layer, mask: torch.Tensor) -> None:
        layer.masked.prune_(layer.weight, mask)
        self.optimizer.reset(layer.weight, layer.masked.mask.pruned)

    @torch.no_grad()
    def _commit(self) -> CycleReport:
        layers, moved = [], 0
        # all before any is taken: a weight of NaN raises
        weights = {name: whole(layer.weight.detach()) for name, layer in self._layers.items()}
        with self._replicas.as_one(self._device):
            masks = {name: self._amnesty(layer, weights[name]) for name, layer in self._layers.items()}
        for name, layer in self._layers.items():
            before = layer.mask.clone()
            moved += int((weights[name].masked_fill(before, 0) != 0).sum())
            mask = self._replicas.decided(masks[name])
            layer.masked.commit_(layer.weight, mask)
            self.optimizer.reset(layer.weight, layer.masked.mask.pruned)
            layer.forget()
            surviving = int((layer.origin > 0).sum())
            back = mask & ~before
            layer.origin.masked_fill_(back, self.cycle + 1)
            layers.append(
                LayerReport(name, mask.numel(), int(mask.sum()), int(back.sum()), surviving, layer.calibrated)
            )
        return CycleReport(
            cycle=self.cycle,
            size=sum(layer.size for layer in layers),
            kept=sum(layer.kept for layer in layers),
            moved=moved,
            resurrected=sum(layer.resurrected for layer in layers),
            earlier=sum(report.resurrected for report in self.history.cycles),
            surviving=sum(layer.surviving for layer in layers),
            layers=tuple(layers),
        )

    def _amnesty(self, layer: _Layer, weight: torch.Tensor) -> torch.Tensor:
        rate = self.config.amnesty(self.cycle)
        if self.config.n_of_m is not None:
            return amnesty_n_of_m(weight, layer.mask, rate, *self.config.n_of_m)
        return amnesty_mask(weight, layer.mask, int(layer.mask.sum()), rate)

    def state_dict(self) -> dict[str, Any]:
        """Where the cycle is and what it remembers, for a checkpoint; the masks are in the model's state_dict."""
        layers = {
            name: {
                "origin": layer.origin,
                "before": layer.before,
                "parts": [part.state_dict() for part in layer.parts],
                "calibrated": layer.calibrated,
            }
            for name, layer in self._layers.items()
        }
        place = {"cycle": self.cycle, "phase": str(self.phase), "step": self.step}
        # a text, since distributed checkpoints look in lists for tensors, and find those alone that a new cycle has
        return {**place, "history": json.dumps(self.history.to_dict()), "layers": layers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the state of a cycle over the same model and config."""
        for name, saved in state["layers"].items():
            layer = self._layers[name]
            device = layer.weight.device
            layer.origin.copy_(saved["origin"])
            layer.before = None if saved["before"] is None else saved["before"].to(device)
            layer.parts = tuple(InputStatistics.from_state(part, device) for part in saved["parts"])
            layer.calibrated = saved["calibrated"]
        self.cycle, self.phase, self.step = state["cycle"], Phase(state["phase"]), state["step"]
        history = state["history"]  # of 0.1, the dictionary itself
        self.history = History.from_dict(json.loads(history) if isinstance(history, str) else history)


def _layers(model: nn.Module, skip: tuple[str, ...]) -> dict[str, _Layer]:
    """The masked weights outside the modules named in `skip`, and the biases of all modules that share them."""
    found = {
        name: _Layer(weight, masked, [], torch.zeros(weight.shape, dtype=torch.int16, device=weight.device))
        for name, (weight, masked) in masked_weights(model).items()
        if not any(name.startswith(f"{module}.") for module in skip)
    }
    by_weight = {id(layer.weight): layer for layer in found.values()}
    for module in model.modules():
        if not isinstance(module, nn.Linear | nn.Conv2d | nn.MultiheadAttention):
            continue
        for name, weight in module.named_parameters():
            layer = by_weight.get(id(weight))
            bias = added_bias(module, name) if layer else None
            # an attention and its output projection are two modules with one bias
            if layer and bias is not None and all(bias is not known for known in layer.biases):
                layer.biases.append(bias)
    return found
