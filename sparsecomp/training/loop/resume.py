"""The state of a whole training run as a checkpoint, and the way back to it, with all checks before any change."""

import sys
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from sparsecomp.errors import CheckpointError
from sparsecomp.nn.loading import load_state_dict
from sparsecomp.reference.sharding import is_sharded
from sparsecomp.training.loop.checkpoint import check_same_model, load_tree, save_tree
from sparsecomp.training.loop.random_state import random_state, set_random_state

if TYPE_CHECKING:
    from sparsecomp.training.loop.trainer import Trainer


def check_savable(model: nn.Module) -> None:
    """CheckpointError where a process has a part of the weights alone."""
    if any(is_sharded(one) for one in model.parameters()):
        raise CheckpointError(
            "the model's weights are sharded: save the state_dict() of model, optimizer and changes by "
            "torch.distributed.checkpoint, which loads in any number of processes"
        )
    # whoever has split a layer has loaded the module, which takes a second
    split = sys.modules.get("sparsecomp.nn.sparse.split")
    if split is not None and any(isinstance(one, split.SplitLinear) for one in model.modules()):
        raise CheckpointError(
            "the model's layers are split: save its state_dict(), which is whole, and the optimizer's for each process"
        )


def save_run(trainer: "Trainer", path: str | PathLike[str]) -> None:
    """Write the run's state to `path`; the processes after the first write only what is their own, beside it."""
    own = {
        **trainer.own_state(),
        "processes": trainer.replicas.count,
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


def restore_run(trainer: "Trainer", path: str | PathLike[str]) -> None:
    """Bring the trainer to the state that `save_run` wrote; CheckpointError or DataError leave the model alone."""
    state = load_tree(path)
    if set(state) != {"own", "run"}:
        raise CheckpointError(f"{path} holds no training run: give a file that Trainer.save wrote")
    own, run = state["own"], state["run"]
    if own["processes"] != trainer.replicas.count:
        raise CheckpointError(f"{path} is of {own['processes']} processes, here are {trainer.replicas.count}")
    if trainer.replicas.rank:
        place = {name: own.get(name) for name in trainer.own_state()}
        own = load_tree(_beside(path, trainer.replicas.rank))
        if place != {name: own.get(name) for name in place}:
            raise CheckpointError(f"{path} and the file beside it are of different steps: a save was interrupted")
    _check(trainer, own, run)
    trainer.batches.resume(own["data"])
    load_state_dict(trainer.core, run["model"])
    trainer.optimizer.load_state_dict(run["optimizer"])
    if trainer.scheduler is not None:
        trainer.scheduler.load_state_dict(run["scheduler"])
    trainer.scaler.load_state_dict(run["scaler"])
    trainer.load_shared_state(run)
    for change, state in zip(trainer.changes, run.get("changes", ()), strict=True):
        change.load_state_dict(state)
    trainer.load_own_state(own)
    trainer.loss_sum.copy_(own["loss_sum"])
    trainer.optimizer.zero_grad(set_to_none=True)
    set_random_state(own["random"], trainer.batches.generators())


def _shared(trainer: "Trainer") -> dict[str, Any]:
    """What all processes have in common."""
    return {
        "config": trainer.settings,
        "model": trainer.core.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": None if trainer.scheduler is None else trainer.scheduler.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "changes": [{"kind": type(change).__name__, **change.state_dict()} for change in trainer.changes],
        **trainer.shared_state(),
    }


def _check(trainer: "Trainer", own: dict[str, Any], run: dict[str, Any]) -> None:
    check_same_model(run["model"], trainer.core)
    ours, theirs = trainer.settings, run["config"]
    if ours != theirs:
        differing = [
            f"{key} ({theirs.get(key)!r} in the file, {ours.get(key)!r} here)"
            for key in ours.keys() | theirs.keys()
            if ours.get(key) != theirs.get(key)
        ]
        raise CheckpointError(f"the checkpoint is of other settings: {', '.join(sorted(differing))}")
    states = (trainer.optimizer.state_dict(), run["optimizer"])
    groups = [[len(group["params"]) for group in state["param_groups"]] for state in states]
    if groups[0] != groups[1]:
        raise CheckpointError(f"the optimizer has groups of {groups[0]} parameters, the checkpoint's {groups[1]}")
    if (trainer.scheduler is None) != (run["scheduler"] is None):
        raise CheckpointError("the run has a learning rate scheduler and the checkpoint none, or the other way round")
    kinds = [type(change).__name__ for change in trainer.changes], [one["kind"] for one in run.get("changes", ())]
    if kinds[0] != kinds[1]:
        raise CheckpointError(f"the run changes patterns by {kinds[0]}, the checkpoint's by {kinds[1]}: make the same")
    if len(own["random"]["given"]) != len(trainer.batches.generators()):
        raise CheckpointError("the data loader has other generators than the checkpoint's: build it as it was")


def _beside(path: str | PathLike[str], rank: int) -> Path:
    return Path(f"{path}.rank{rank}")
