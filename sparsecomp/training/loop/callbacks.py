"""What happens beside a training: its log, its checkpoints and its progress bar."""

import logging
from os import PathLike
from typing import TYPE_CHECKING

from rich.progress import Progress, TaskID

from sparsecomp.training.history import CycleReport
from sparsecomp.training.resu.cycle import Phase

if TYPE_CHECKING:
    from sparsecomp.training.loop.resu_trainer import RESUTrainer
    from sparsecomp.training.loop.trainer import Trainer

_log = logging.getLogger("sparsecomp.runtime")


class Callback:
    """Called by a trainer between steps; it may save, or raise to interrupt. By default it does nothing."""

    def on_start(self, trainer: "Trainer") -> None:
        """Training starts or goes on."""

    def on_step(self, trainer: "Trainer") -> None:
        """A step was taken; `trainer.loss` is its loss, on the device."""

    def on_phase(self, trainer: "RESUTrainer", ended: Phase) -> None:
        """A phase of RESUTrainer ended, and `trainer.cycle.phase` is the next."""

    def on_cycle(self, trainer: "RESUTrainer", report: CycleReport) -> None:
        """A cycle of RESUTrainer was committed."""

    def on_stop(self, trainer: "Trainer") -> None:
        """Training ended or was interrupted."""


class LogCallback(Callback):
    """Log each phase's mean loss and each cycle's report to the logger `sparsecomp.runtime`, at level INFO."""

    def on_phase(self, trainer: "RESUTrainer", ended: Phase) -> None:
        last = trainer.history.phases[-1:]
        if ended in (Phase.TRAIN, Phase.RESU, Phase.FINETUNE) and last:
            _log.info("cycle %d, %s: %d steps, mean loss %.4g", last[0].cycle, ended, last[0].steps, last[0].loss)

    def on_cycle(self, trainer: "RESUTrainer", report: CycleReport) -> None:
        _log.info(
            "cycle %d: %d of %d weights kept (sparsity %.4f), %d resurrected, %d of %d earlier ones survive",
            report.cycle,
            report.kept,
            report.size,
            report.sparsity,
            report.resurrected,
            report.surviving,
            report.earlier,
        )


class CheckpointCallback(Callback):
    """Save to `path` after each phase and each `every` steps; the file before is replaced as a whole."""

    def __init__(self, path: str | PathLike[str], every: int = 1000) -> None:
        self.path, self.every = path, every

    def on_step(self, trainer: "Trainer") -> None:
        if trainer.steps % self.every == 0:
            trainer.save(self.path)

    def on_phase(self, trainer: "RESUTrainer", ended: Phase) -> None:
        trainer.save(self.path)


class ProgressCallback(Callback):
    """A progress bar in the terminal, with what is being done."""

    def __init__(self) -> None:
        self._progress = Progress()
        self._task = TaskID(0)

    def on_start(self, trainer: "Trainer") -> None:
        self._progress = Progress()
        self._task = self._progress.add_task(trainer.label, total=trainer.total, completed=trainer.steps)
        self._progress.start()

    def on_step(self, trainer: "Trainer") -> None:
        self._progress.update(self._task, completed=trainer.steps)

    def on_phase(self, trainer: "RESUTrainer", ended: Phase) -> None:
        self._progress.update(self._task, description=trainer.label)

    def on_stop(self, trainer: "Trainer") -> None:
        self._progress.stop()
