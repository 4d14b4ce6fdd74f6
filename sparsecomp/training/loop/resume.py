"""The state of a whole training run as a checkpoint, and the way back to it, with all checks before any change."""

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsecomp.errors import CheckpointError
from sparsecomp.training.loop.checkpoint import check_same_model, load_tree, save_tree
from sparsecomp.training.loop.random_state import random_state, set_random_state

if TYPE_CHECKING:
    from sparsecomp.training.loop.trainer import RESUTrainer


def save_run(trainer: "RESUTrainer", path: str | PathLike[str]) -> None:
    """Write the run's state to `path`; the processes after the first write only what is their own, beside it."""
    own = {
        "processes": trainer.replicas.count,
        "steps": trainer.steps,
        "phase": str(trainer.cycle.phase),
        "cycle": trainer.cycle.cycle,
        "loss_sum": trainer.loss_sum,
        "random": random_state(trainer.batches.generators()),
        "data": trainer.batches.position(),
    }
    if trainer.replicas.rank:
        save_tree(_beside(path, trainer.replicas.rank), own)
    # the first process's file is the checkpoint, so it is written when all others are there
    trainer.replicas.wait()
    if not trainer.replicas.rank:
        save_tree(path, {"own": own, "run": _shared(trainer)})
    trainer.replicas.wait()


def restore_run(trainer: "RESUTrainer", path: str | PathLike[str]) -> None:
    """Bring the trainer to the state that `save_run` wrote; CheckpointError or DataError leave the model alone."""
    state = load_tree(path)
    if set(state) != {"own", "run"}:
        raise CheckpointError(f"{path} holds no training run: give a file that RESUTrainer.save wrote")
    own, run = state["own"], state["run"]
    if own["processes"] != trainer.replicas.count:
        raise CheckpointError(f"{path} is of {own['processes']} processes, here are {trainer.replicas.count}")
    if trainer.replicas.rank:
        place = [own[name] for name in ("steps", "phase", "cycle")]
        own = load_tree(_beside(path, trainer.replicas.rank))
        if place != [own.get(name) for name in ("steps", "phase", "cycle")]:
            raise CheckpointError(f"{path} and the file beside it are of different steps: a save was interrupted")
    _check(trainer, own, run)
    trainer.batches.resume(own["data"])
    trainer.core.load_state_dict(run["model"])
    trainer.optimizer.load_state_dict(run["optimizer"])
    if trainer.scheduler is not None:
        trainer.scheduler.load_state_dict(run["scheduler"])
    trainer.scaler.load_state_dict(run["scaler"])
    trainer.cycle.load_state_dict(run["cycle"])
    trainer.steps = own["steps"]
    trainer.loss_sum.copy_(own["loss_sum"])
    trainer.optimizer.zero_grad(set_to_none=True)
    set_random_state(own["random"], trainer.batches.generators())


def _shared(trainer: "RESUTrainer") -> dict[str, Any]:
    """What all processes have in common."""
    return {
        "config": trainer.config.to_dict(),
        "model": trainer.core.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": None if trainer.scheduler is None else trainer.scheduler.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "cycle": trainer.cycle.state_dict(),
    }


def _check(trainer: "RESUTrainer", own: dict[str, Any], run: dict[str, Any]) -> None:
    check_same_model(run["model"], trainer.core)
    ours, theirs = trainer.config.to_dict(), run["config"]
    if ours != theirs:
        differing = [
            f"{key} ({theirs.get(key)!r} in the file, {ours.get(key)!r} here)"
            for key in ours.keys() | theirs.keys()
            if ours.get(key) != theirs.get(key)
        ]
        raise CheckpointError(f"the checkpoint is of another config: {', '.join(sorted(differing))}")
    states = (trainer.optimizer.state_dict(), run["optimizer"])
    groups = [[len(group["params"]) for group in state["param_groups"]] for state in states]
    if groups[0] != groups[1]:
        raise CheckpointError(f"the optimizer has groups of {groups[0]} parameters, the checkpoint's {groups[1]}")
    if (trainer.scheduler is None) != (run["scheduler"] is None):
        raise CheckpointError("the run has a learning rate scheduler and the checkpoint none, or the other way round")
    if len(own["random"]["given"]) != len(trainer.batches.generators()):
        raise CheckpointError("the data loader has other generators than the checkpoint's: build it as it was")


def _beside(path: str | PathLike[str], rank: int) -> Path:
    return Path(f"{path}.rank{rank}")
