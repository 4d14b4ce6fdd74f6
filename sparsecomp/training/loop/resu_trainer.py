"""The loop around a RESU cycle: phases of optimizer steps, and what comes between them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from sparsecomp.errors import ConfigError
from sparsecomp.nn.masked.layers import masked_weights, wrap_module
from sparsecomp.training.distributed import bare
from sparsecomp.training.dynamic.stepped import Stepped
from sparsecomp.training.history import History, PhaseRecord
from sparsecomp.training.loop.batches import Data
from sparsecomp.training.loop.callbacks import Callback
from sparsecomp.training.loop.trainer import LossFunction, Trainer
from sparsecomp.training.pruning.calibration import Statistics, TokenMask, calibrate
from sparsecomp.training.resu.adamw import RESUAdamW
from sparsecomp.training.resu.config import RESUConfig
from sparsecomp.training.resu.cycle import Phase, RESUCycle


class RESUTrainer(Trainer):
    """Train `model` through the cycles of `config` and a last fine-tuning.

    Args:
        model: on its device. Its linear, convolution and attention modules are wrapped in place, where none is yet;
            wrap it yourself before DistributedDataParallel or torch.compile.
        config: phases, sparsities and methods.
        loss_fn: takes the model and a batch, moves the batch to the device, and returns a scalar loss.
        data: a DataLoader, which restarts when it ends; a function of the epoch that gives an iterable; or an
            iterator, whose early end is a DataError. Calibration takes its batches from here too.
        optimizer: arguments of RESUAdamW beside the model, such as `{"lr": 1e-3}`.
        scheduler: makes a learning rate scheduler of the optimizer; it steps with each optimizer step.
        callbacks: called in order.
        token_mask: gives a batch's bool mask of real tokens, so that calibration drops padding.
        changes: makes of the optimizer what changes the patterns of the model's sparse layers, such as `RigL`.

    Under DistributedDataParallel each process gives its own share of the data and calls everything alike; the first
    process decides the masks. Raises ConfigError for what is no config or no loss function, a model without a weight to
    prune, or a scheduler that steps by a metric.
    """

    def __init__(
        self,
        model: nn.Module,
        config: RESUConfig,
        loss_fn: LossFunction,
        data: Data,
        optimizer: Mapping[str, Any],
        scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        callbacks: Sequence[Callback] = (),
        token_mask: TokenMask | None = None,
        changes: Callable[[torch.optim.Optimizer], Iterable[Stepped]] | None = None,
    ) -> None:
        if not isinstance(config, RESUConfig):
            raise ConfigError(f"config is a {type(config).__name__}, needs a RESUConfig, such as RESUConfig(cycles=3)")
        core = bare(model)
        if not masked_weights(core):
            if model is not core:
                raise ConfigError("no module is wrapped: call wrap_module before DistributedDataParallel or compile")
            if not masked_weights(wrap_module(model, skip=config.skip)):
                raise ConfigError("the model has no weight to prune: skip less of it, or give one with linear layers")
        made = RESUAdamW(core, **optimizer)
        super().__init__(
            model, loss_fn, data, made, config.steps, changes=() if changes is None else changes(made),
            scheduler=None if scheduler is None else scheduler(made), callbacks=callbacks, precision=config.precision,
            accumulation=config.accumulation, check_every=config.check_every,
        )  # fmt: skip
        self.config, self.token_mask = config, token_mask
        self.cycle = RESUCycle(model, made, config)

    @property
    def history(self) -> History:
        """The records so far."""
        return self.cycle.history

    @property
    def done(self) -> bool:
        """Whether the training is at its end."""
        return self.cycle.done

    @property
    def label(self) -> str:
        """The cycle and its phase."""
        cycles = self.config.cycles
        return f"cycle {min(self.cycle.cycle + 1, cycles)} of {cycles}, {self.cycle.phase}"

    @property
    def settings(self) -> dict[str, Any]:
        """The config."""
        return self.config.to_dict()

    def fit(self) -> History:
        """Train to the end, from where the run stands. Raises as `Trainer.fit`."""
        super().fit()
        return self.history

    def own_state(self) -> dict[str, Any]:
        """As of `Trainer`, with the phase."""
        return {**super().own_state(), "phase": str(self.cycle.phase), "cycle": self.cycle.cycle}

    def shared_state(self) -> dict[str, Any]:
        """The cycle's state."""
        return {"cycle": self.cycle.state_dict()}

    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.cycle.load_state_dict(state["cycle"])

    def _next(self) -> None:
        if not self.cycle.steps_left:
            return self._advance()
        self._step()
        self.cycle.count_step()
        return self._call("on_step")

    def _checks(self) -> bool:
        return (self.cycle.step + 1) % self.check_every == 0 or self.cycle.steps_left == 1

    def _advance(self) -> None:
        ended, cycle, steps = self.cycle.phase, self.cycle.cycle, self.cycle.step
        self.cycle.advance(self._statistics)
        if ended in (Phase.TRAIN, Phase.RESU, Phase.FINETUNE):
            loss = self.replicas.mean(self.loss_sum) / steps if steps else float("nan")
            self.history.phases.append(PhaseRecord(cycle, str(ended), steps, loss))
            self.loss_sum.zero_()
        if ended is Phase.COMMIT:
            self._call("on_cycle", self.history.cycles[-1])
        self._call("on_phase", ended)

    def _statistics(self) -> Statistics:
        def forward(batch: Any) -> torch.Tensor:
            with self._autocast():
                return self.loss_fn(self.core, batch)

        batches = (next(self.batches) for _ in range(self.config.calibration_batches))
        return calibrate(self.core, batches, forward, self.token_mask, self.config.method.products)

    def _place(self) -> str:
        return f"in cycle {self.cycle.cycle}, phase {self.cycle.phase}, step {self.cycle.step}"
