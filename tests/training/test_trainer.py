"""The plain loop: patterns that change within it, runs that go on with the same bits, and what it refuses."""

import gc
import random
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sparsecomp
from sparsecomp import ConstantFanIn, Unstructured
from sparsecomp.errors import CheckpointError, ConfigError, DataError, DivergedError
from sparsecomp.nn import SparseLinear, wrap_module
from sparsecomp.runtime import (
    SET,
    Callback,
    CheckpointCallback,
    GradualPruning,
    LogCallback,
    ProgressCallback,
    RandomGrowth,
    RESUConfig,
    RESUTrainer,
    RigL,
    SRigL,
    Trainer,
    sr_ste,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 7


def loader() -> DataLoader:
    inputs = torch.randn(40, 12, generator=torch.Generator().manual_seed(5))
    labels = (inputs[:, :3].sum(1) > 0).long()
    return DataLoader(TensorDataset(inputs, labels), 8, shuffle=True)


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0] * (1 + 0.01 * random.random())), batch[1])


def dense() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(12, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 16), nn.ReLU(),
        nn.Linear(16, 2),
    )  # fmt: skip


def grown(kind, layout=Unstructured, **settings):
    """A sparse model, and what grows it."""
    def make(model: nn.Module, optimizer_of):
        sparsecomp.sparsify(model, layout(0.7, by="random"))
        optimizer = optimizer_of(model)
        return model, optimizer, [kind(model, optimizer, end=6, every=2, fraction=0.5, **settings)]

    return make


def pruned(model: nn.Module, optimizer_of):
    model = wrap_module(model)
    return model, optimizer_of(model), [GradualPruning(model, sparsity=0.8, start=1, end=5, every=2)]


def masked(model: nn.Module, optimizer_of):
    sr_ste(model, Unstructured(0.5))
    return model, optimizer_of(model), []


WAYS = {
    "RigL": grown(RigL), "SET": grown(SET), "random": grown(RandomGrowth), "gradual": pruned, "SR-STE": masked,
    "SRigL": grown(SRigL, ConstantFanIn, gamma=0.99),  # so that neurons die, and with them entries
}  # fmt: skip


def trainer_of(way, callbacks=(), scheduled=True, **settings) -> Trainer:
    random.seed(3)
    model, optimizer, changes = WAYS[way](dense(), lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch.manual_seed(2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9) if scheduled else None
    beside = {"changes": changes, "scheduler": scheduler, "callbacks": callbacks}
    return Trainer(model, loss_of, loader(), optimizer, STEPS, **beside, **settings)


def leaves(value, place=""):
    """All leaves of a state, by place."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if parts is None:
        return {place: value}
    return {at: leaf for key, part in parts for at, leaf in leaves(part, f"{place}/{key}").items()}


def ended(trainer: Trainer):
    trainer.fit()
    changes = [change.state_dict() for change in trainer.changes]
    state = [trainer.core.state_dict(), trainer.optimizer.state_dict(), trainer.scaler.state_dict(), changes]
    return leaves([*state, trainer.batches.position(), torch.get_rng_state(), random.getstate(), trainer.loss_sum])


def check_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for place, value in ours.items():
        other = theirs[place]
        assert value.equal(other) if isinstance(value, torch.Tensor) else value == other, place


class SaveAll(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_start(self, trainer):
        self.on_step(trainer)

    def on_step(self, trainer):
        trainer.save(self.folder / str(trainer.steps))


def stored(model: nn.Module) -> list[int]:
    return [layer.weight.matrix.nnz for layer in model.modules() if isinstance(layer, SparseLinear)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("settings", [{}, {"precision": "float16", "accumulation": 2}], ids=["plain", "float16"])
@pytest.mark.quick_cases(7)
def test_a_run_goes_on_with_the_same_bits_from_any_step(tmp_path, way, settings):
    first = trainer_of(way, [SaveAll(tmp_path)], **settings)
    before = stored(first.core)
    wanted = ended(first)
    assert way != "SRigL" or stored(first.core) != before  # a neuron has died
    for step in range(STEPS + 1):
        trainer = trainer_of(way, **settings)
        torch.manual_seed(99), random.seed(99)
        trainer.resume(tmp_path / str(step))
        assert trainer.steps == step
        check_same(wanted, ended(trainer))


def test_it_is_the_loop_that_a_user_writes():
    trainer = trainer_of("RigL", scheduled=False)
    trainer.fit()
    random.seed(3)
    model, optimizer, (rule,) = WAYS["RigL"](dense(), lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch.manual_seed(2)
    data, step, changed = loader(), 0, 0
    while step < STEPS:
        for batch in data:
            optimizer.zero_grad()
            with rule.watch():
                loss_of(model, batch).backward()
            if rule.update():
                changed += 1
            else:
                optimizer.step()
            if (step := step + 1) == STEPS:
                break
    assert changed == 2
    check_same(leaves(trainer.core.state_dict()), leaves(model.state_dict()))


def test_accumulated_batches_grow_as_one_large_batch():
    """The gradient of the whole weight is that of all batches of a step."""
    found = []
    for parts in (1, 2):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 2)).double()
        sparsecomp.sparsify(model, Unstructured(0.7, by="random"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        whole = [torch.randn(8, 12, generator=torch.Generator().manual_seed(seed)).double() for seed in range(3)]
        data = [part for batch in whole for part in batch.chunk(parts)]
        rule = RigL(model, optimizer, end=10, every=1, fraction=0.5)
        loss = lambda model, x: model(x).square().mean()  # noqa: E731
        Trainer(model, loss, iter(data), optimizer, 3, changes=[rule], accumulation=parts).fit()
        found.append([layer.weight.matrix.to_dense() for layer in (model[0], model[2])])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one != 0, other != 0)
        torch.testing.assert_close(one, other)


def test_a_learning_rate_falls_in_steps_that_change_patterns_too():
    trainer = trainer_of("RigL")
    trainer.fit()
    assert trainer.scheduler.last_epoch == STEPS


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_and_the_run_goes_on_from_before(tmp_path, bad):
    wanted = ended(trainer_of("RigL"))
    broken = trainer_of("RigL", [SaveAll(tmp_path)])
    good = broken.loss_fn
    # in the step that changes patterns, whose gradients must not be remembered
    broken.loss_fn = lambda model, batch: good(model, batch) * (bad if broken.steps == 2 else 1.0)
    with pytest.raises(DivergedError, match="in step 2"):
        broken.fit()
    assert broken.steps == 2
    broken.loss_fn = good
    broken.resume(tmp_path / "2")
    check_same(wanted, ended(broken))


def test_other_runs_are_refused(tmp_path):
    trainer = trainer_of("RigL", [LogCallback(), ProgressCallback(), CheckpointCallback(tmp_path / "run", every=2)])
    trainer.fit()
    others = [
        (trainer_of("SET"), "by \\['SET'\\], the checkpoint's by \\['RigL'\\]"),
        (trainer_of("RigL", accumulation=2), r"accumulation \(1 in the file, 2 here\)"),
        (trainer_of("gradual"), "another model"),
        (trainer_of("RigL", scheduled=False), "scheduler"),
    ]
    for other, message in others:
        before = leaves(other.core.state_dict())
        with pytest.raises(CheckpointError, match=message):
            other.resume(tmp_path / "run")
        check_same(before, leaves(other.core.state_dict()))
    model = dense()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make = partial(Trainer, model, loss_of, loader(), optimizer)
    for wrong, message in (
        ({"steps": -1}, "steps -1"), ({"steps": 1, "precision": "half"}, "'half'"),
        ({"steps": 1, "accumulation": 0}, "accumulation 0"), ({"steps": 1, "check_every": 0}, "check_every 0"),
        ({"steps": 1, "changes": [3]}, "changes has a int"),
        ({"steps": 1, "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)}, "metric"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            make(**wrong)
    with pytest.raises(ConfigError, match="loss_fn is a int"):
        Trainer(model, 3, loader(), optimizer, 1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match="ended"):
        Trainer(model, loss_of, iter(loader()), optimizer, 9).fit()


def test_a_cycle_of_masked_layers_beside_sparse_ones_that_grow(tmp_path):
    config = RESUConfig(cycles=1, train_steps=4, resu_steps=3, finetune_steps=1)

    def make(callbacks=()):
        random.seed(3)
        model = dense()
        sparsecomp.sparsify(model, Unstructured(0.7, by="random"), filter=lambda layer, name: name == "0")
        torch.manual_seed(2)
        return RESUTrainer(
            model, config, loss_of, loader(), {"lr": 1e-2}, callbacks=callbacks,
            changes=lambda optimizer: [RigL(model, optimizer, end=8, every=2, fraction=0.5)],
        )  # fmt: skip

    first = make([SaveAll(tmp_path)])
    before = first.core[0].weight.matrix.to_dense() != 0
    wanted = ended(first)
    assert ((first.core[0].weight.matrix.to_dense() != 0) != before).any()
    for step in range(9):
        trainer = make()
        trainer.resume(tmp_path / str(step))
        check_same(wanted, ended(trainer))


# ---- processes ------------------------------------------------------------------------------------------------------


def in_two(rank: int, callbacks=()) -> Trainer:
    """Of two processes, each with data of its own."""
    random.seed(3 + rank)
    model = dense()
    sparsecomp.sparsify(model, Unstructured(0.7, by="random"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replicated = nn.parallel.DistributedDataParallel(model)
    rigl = RigL(replicated, optimizer, end=6, every=2, fraction=0.5)
    torch.manual_seed(2 + rank)
    return Trainer(replicated, loss_of, loader(), optimizer, STEPS, changes=[rigl], callbacks=callbacks)


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    first = in_two(rank, [SaveAll(Path(folder))])
    before = stored(first.core)
    wanted = ended(first)
    assert stored(first.core) == before
    for step in (2, 3):  # before a change and behind it
        trainer = in_two(rank)
        trainer.resume(Path(folder) / str(step))
        check_same(wanted, ended(trainer))
    for value in first.core.state_dict().values():
        others = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(others, value)
        # a running mean is each process's own, what is trained is the same
        assert value.dtype.is_floating_point or torch.equal(*others)
    for layer in (one for one in first.core.modules() if isinstance(one, SparseLinear)):
        others = [torch.empty_like(layer.values) for _ in range(2)]
        dist.all_gather(others, layer.values.detach())
        assert torch.equal(*others)
    del first, trainer
    gc.collect()  # the last owner of a process group must not be DistributedDataParallel: its end would never come
    dist.destroy_process_group()


@pytest.mark.slow(reason="starts processes")
def test_two_processes_have_one_pattern_and_resume(tmp_path):
    mp.spawn(_process, args=(str(tmp_path),), nprocs=2)
