"""The loop around a RESU cycle: optimizer steps, checkpoints, and a stop when the loss is no longer a number."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sparsecomp.errors import ConfigError, DivergedError
from sparsecomp.nn.masked.layers import masked_weights, wrap_module
from sparsecomp.training.distributed import Replicas, bare
from sparsecomp.training.history import History, PhaseRecord
from sparsecomp.training.loop.batches import BatchStream, Data
from sparsecomp.training.loop.callbacks import Callback
from sparsecomp.training.loop.resume import restore_run, save_run
from sparsecomp.training.pruning.calibration import Statistics, TokenMask, calibrate
from sparsecomp.training.resu.adamw import RESUAdamW
from sparsecomp.training.resu.config import RESUConfig
from sparsecomp.training.resu.cycle import Phase, RESUCycle

LossFunction = Callable[[nn.Module, Any], torch.Tensor]


class RESUTrainer:
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
    ) -> None:
        if not isinstance(config, RESUConfig):
            raise ConfigError(f"config is a {type(config).__name__}, needs a RESUConfig, such as RESUConfig(cycles=3)")
        if not callable(loss_fn):
            raise ConfigError(f"loss_fn is a {type(loss_fn).__name__}, needs a function of the model and a batch")
        self.model, self.config, self.loss_fn, self.token_mask = model, config, loss_fn, token_mask
        self.batches = BatchStream(data)
        self.core = bare(model)
        if not masked_weights(self.core):
            if model is not self.core:
                raise ConfigError("no module is wrapped: call wrap_module before DistributedDataParallel or compile")
            if not masked_weights(wrap_module(model, skip=config.skip)):
                raise ConfigError("the model has no weight to prune: skip less of it, or give one with linear layers")
        self.optimizer = RESUAdamW(self.core, **optimizer)
        self.cycle = RESUCycle(model, self.optimizer, config)
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            raise ConfigError("ReduceLROnPlateau steps by a metric, of which a step has none: step it in a callback")
        self.callbacks = list(callbacks)
        self.replicas = Replicas(model)
        self.device = next(self.core.parameters()).device
        self.scaler = GradScaler(self.device.type, enabled=config.precision == "float16")
        self.steps = 0
        self.loss = torch.zeros((), device=self.device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)

    @property
    def history(self) -> History:
        """The records so far."""
        return self.cycle.history

    def fit(self) -> History:
        """Train to the end, from where the run stands.

        Raises:
            DataError: the data ended early, or an epoch has no batch.
            DivergedError: the loss is NaN or infinite. The step with it is not taken, if `check_every` is 1;
                batch norm's statistics have seen its batch.
        """
        self.model.train()
        self._call("on_start")
        try:
            while not self.cycle.done:
                if self.cycle.steps_left:
                    self._step()
                    self._call("on_step")
                else:
                    self._advance()
        finally:
            self._call("on_stop")
        return self.history

    def save(self, path: str | PathLike[str]) -> None:
        """Write a checkpoint of the whole run; under DistributedDataParallel all processes call it, and each writes
        its random states and place in the data beside the first one's file.

        Raises:
            DivergedError: a weight is NaN or infinite, so that the file before stays.
            OSError: it cannot be written.
        """
        finite = torch.stack([value.detach().isfinite().all() for value in self.core.parameters()]).all()
        if self.replicas.any(~finite):
            raise DivergedError(f"a weight is NaN or infinite {self._place()}: {path} was not written")
        save_run(self, path)

    def resume(self, path: str | PathLike[str]) -> None:
        """Go to where a checkpoint was saved; what follows has the same bits as without the interruption.

        The model, config, optimizer options and data are made as they were for the run that saved it.

        Raises:
            CheckpointError: it is damaged, or of another model or config; the model is unchanged.
            DataError: the data is shorter than the checkpoint's position; the model is unchanged.
            OSError: it cannot be read.
        """
        restore_run(self, path)

    def _step(self) -> None:
        total = torch.zeros((), device=self.device)
        for last in [False] * (self.config.accumulation - 1) + [True]:
            with nullcontext() if last else self._no_sync():
                with self._autocast():
                    loss = self.loss_fn(self.model, next(self.batches)) / self.config.accumulation
                self.scaler.scale(loss).backward()
            total += loss.detach()
        self._check(total)
        # the scale waits for the device
        before = 0.0 if self.scheduler is None else self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        # a step that the scaler skipped lowers its scale
        if self.scheduler is not None and self.scaler.get_scale() >= before:
            self.scheduler.step()
        self.loss = total
        self.loss_sum += total
        self.steps += 1
        self.cycle.count_step()

    def _check(self, loss: torch.Tensor) -> None:
        """Stop before the step of a loss that is not finite."""
        due = (self.cycle.step + 1) % self.config.check_every == 0 or self.cycle.steps_left == 1
        if due and self.replicas.any(~(loss + self.loss_sum).isfinite()):
            self.optimizer.zero_grad(set_to_none=True)
            raise DivergedError(
                f"the loss is NaN or infinite {self._place()}: go back to the last checkpoint with a lower learning "
                "rate, or look for bad batches"
            )

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

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.config.precision))

    def _no_sync(self) -> AbstractContextManager[Any]:
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext()

    def _place(self) -> str:
        return f"in cycle {self.cycle.cycle}, phase {self.cycle.phase}, step {self.cycle.step}"

    def _call(self, name: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(self, *arguments)
