"""The loop around a training: optimizer steps, patterns that change, checkpoints, and a stop when the loss is no
longer a number."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sparsecomp.errors import ConfigError, DivergedError
from sparsecomp.training.distributed import Replicas, bare
from sparsecomp.training.dynamic.stepped import Stepped
from sparsecomp.training.loop.batches import BatchStream, Data
from sparsecomp.training.loop.callbacks import Callback
from sparsecomp.training.loop.resume import check_savable, restore_run, save_run

LossFunction = Callable[[nn.Module, Any], torch.Tensor]
PRECISIONS = ("float32", "bfloat16", "float16")


class Trainer:
    """Train `model` for `steps` optimizer steps.

        sparsecomp.sparsify(model, Unstructured(0.9, by="random"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        trainer = Trainer(model, loss_fn, loader, optimizer, 10_000, changes=[RigL(model, optimizer, end=7500)])
        trainer.fit()

    Args:
        model: on its device, perhaps compiled or within DistributedDataParallel.
        loss_fn: takes the model and a batch, moves the batch to the device, and returns a scalar loss.
        data: a DataLoader, which restarts when it ends; a function of the epoch that gives an iterable; or an
            iterator, whose early end is a DataError.
        optimizer: that trains the model, in its place.
        steps: of the whole training; a step that changes patterns in place of the optimizer's counts.
        changes: what changes patterns or masks, such as `RigL` and `GradualPruning`, made for this model and optimizer.
        scheduler: of the learning rate; it steps with each step.
        callbacks: called in order.
        precision: "float32", or the dtype of autocast, of which "float16" scales the loss.
        accumulation: batches a step.
        check_every: steps between two looks at whether the loss is finite. Each look waits for the device.

    Attributes:
        steps: that were taken so far.
        loss: of the last step, on the device.

    Under DistributedDataParallel each process gives its own share of the data and calls everything alike. Raises
    ConfigError for a setting outside its domain, a change that is none or of another model, or a scheduler that steps
    by a metric.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, data: Data, optimizer: torch.optim.Optimizer, steps: int, *,
        changes: Iterable[Stepped] = (), scheduler: LRScheduler | None = None, callbacks: Sequence[Callback] = (),
        precision: str = "float32", accumulation: int = 1, check_every: int = 1,
    ) -> None:  # fmt: skip
        if not callable(loss_fn):
            raise ConfigError(f"loss_fn is a {type(loss_fn).__name__}, needs a function of the model and a batch")
        if min(steps, accumulation - 1, check_every - 1) < 0 or precision not in PRECISIONS:
            raise ConfigError(
                f"steps {steps}, accumulation {accumulation}, check_every {check_every}, precision {precision!r}: "
                f"needs 0 or more, 1 or more, 1 or more, and one of {', '.join(PRECISIONS)}"
            )
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError("ReduceLROnPlateau steps by a metric, of which a step has none: step it in a callback")
        self.model, self.loss_fn, self.batches, self.core = model, loss_fn, BatchStream(data), bare(model)
        self.optimizer, self.total, self.changes = optimizer, steps, list(changes)
        self.scheduler, self.callbacks = scheduler, list(callbacks)
        self.precision, self.accumulation, self.check_every = precision, accumulation, check_every
        for change in self.changes:
            if not isinstance(change, Stepped):
                raise ConfigError(f"changes has a {type(change).__name__}, needs such as RigL or GradualPruning")
        self.replicas = Replicas(model)
        self.device = next(self.core.parameters()).device
        self.scaler = GradScaler(self.device.type, enabled=precision == "float16")
        self.steps = 0
        self.loss = torch.zeros((), device=self.device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)

    # -- what there is to do

    @property
    def done(self) -> bool:
        """Whether the training is at its end."""
        return self.steps >= self.total

    @property
    def label(self) -> str:
        """What is being done, in a word, for a progress bar."""
        return "training"

    @property
    def settings(self) -> dict[str, Any]:
        """What a run that goes on must share with this one."""
        return {"precision": self.precision, "accumulation": self.accumulation}

    def fit(self) -> Any:
        """Train to the end, from where the run stands.

        Raises:
            DataError: the data ended early, or an epoch has no batch.
            DivergedError: the loss is NaN or infinite. The step with it is not taken, if `check_every` is 1;
                batch norm's statistics have seen its batch.
        """
        self.model.train()
        self._call("on_start")
        try:
            while not self.done:
                self._next()
        finally:
            self._call("on_stop")

    def save(self, path: str | PathLike[str]) -> None:
        """Write a checkpoint of the whole run; under DistributedDataParallel all processes call it, and each writes
        its random states and place in the data beside the first one's file.

        Raises:
            CheckpointError: weights are sharded by FSDP2, or layers split, whose parts are in no one file.
            DivergedError: a weight is NaN or infinite, so that the file before stays.
            OSError: it cannot be written.
        """
        check_savable(self.core)
        finite = torch.stack([value.detach().isfinite().all() for value in self.core.parameters()]).all()
        if self.replicas.any(~finite):
            raise DivergedError(f"a weight is NaN or infinite {self._place()}: {path} was not written")
        save_run(self, path)

    def resume(self, path: str | PathLike[str]) -> None:
        """Go to where a checkpoint was saved; what follows has the same bits as without the interruption.

        The model, settings, optimizer, changes and data are made as they were for the run that saved it.

        Raises:
            CheckpointError: it is damaged, or of another model, other settings or changes; the model is unchanged.
            DataError: the data is shorter than the checkpoint's position; the model is unchanged.
            OSError: it cannot be read.
        """
        restore_run(self, path)

    # -- what a checkpoint holds

    def own_state(self) -> dict[str, Any]:
        """Where this process stands: numbers and texts that tell it, alike in all processes."""
        return {"steps": self.steps}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Stand there."""
        self.steps = state["steps"]

    def shared_state(self) -> dict[str, Any]:
        """What all processes have in common, beside the model and the optimizer."""
        return {}

    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""

    # -- a step

    def _next(self) -> None:
        self._step()
        self._call("on_step")

    def _step(self) -> None:
        total = torch.zeros((), device=self.device)
        with ExitStack() as watched:
            for change in self.changes:
                watched.enter_context(change.watch())
            for last in [False] * (self.accumulation - 1) + [True]:
                with nullcontext() if last else self._no_sync():
                    with self._autocast():
                        loss = self.loss_fn(self.model, next(self.batches)) / self.accumulation
                    self.scaler.scale(loss).backward()
                total += loss.detach()
            self._check(total)
        # each is told of the step, whether or not another has taken its place
        replaced = [change.update() for change in self.changes if change.replaces_step]
        if any(replaced):
            self._schedule()
        else:
            self._optimize()
        for change in self.changes:
            if not change.replaces_step:
                change.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = total
        self.loss_sum += total
        self.steps += 1

    def _optimize(self) -> None:
        # the scale waits for the device
        before = 0.0 if self.scheduler is None else self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # a step that the scaler skipped lowers its scale
        if self.scheduler is not None and self.scaler.get_scale() >= before:
            self._schedule()

    def _schedule(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def _check(self, loss: torch.Tensor) -> None:
        """Stop before the step of a loss that is not finite."""
        if self._checks() and self.replicas.any(~(loss + self.loss_sum).isfinite()):
            self.optimizer.zero_grad(set_to_none=True)
            raise DivergedError(
                f"the loss is NaN or infinite {self._place()}: go back to the last checkpoint with a lower learning "
                "rate, or look for bad batches"
            )

    def _checks(self) -> bool:
        """Whether this step looks at its loss."""
        return (self.steps + 1) % self.check_every == 0 or self.steps + 1 == self.total

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.precision))

    def _no_sync(self) -> AbstractContextManager[Any]:
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext()

    def _place(self) -> str:
        return f"in step {self.steps}"

    def _call(self, name: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(self, *arguments)
