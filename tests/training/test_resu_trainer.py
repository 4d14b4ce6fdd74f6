"""The loop around the cycle: interruptions, data that ends, losses that are no numbers, precision and processes."""

import gc
import logging
import os
import random
import socket
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sparsecomp.errors import CheckpointError, ConfigError, DataError, DivergedError
from sparsecomp.nn.masked.layers import masked_weights, wrap_module
from sparsecomp.training.loop.batches import BatchStream
from sparsecomp.training.loop.callbacks import Callback, CheckpointCallback, LogCallback, ProgressCallback
from sparsecomp.training.loop.resu_trainer import RESUTrainer
from sparsecomp.training.pruning.pruners import PRUNERS, Magnitude, SparseGPT
from sparsecomp.training.resu.config import RESUConfig

pytestmark = pytest.mark.usefixtures("one_thread")

_CONFIG = RESUConfig(cycles=2, train_steps=3, resu_steps=14, finetune_steps=2, pruner="wanda", calibration_batches=2)


def _data():
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(52, 12, generator=generator)
    return TensorDataset(inputs, (inputs[:, :3].sum(1) > 0).long())


def _loader(generator=False):
    return DataLoader(_data(), 8, shuffle=True, generator=torch.Generator().manual_seed(7) if generator else None)


def _model(hidden=20):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(12, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, 2)
    )


def _loss(model, batch):
    # a draw of Python's generator: its state belongs to the run as well
    return nn.functional.cross_entropy(model(batch[0] * (1 + 0.01 * random.random())), batch[1])


def _trainer(config=_CONFIG, model=None, data=None, loss=_loss, callbacks=(), **options):
    random.seed(3)
    model = _model() if model is None else model
    torch.manual_seed(2)
    data = _loader() if data is None else data
    return RESUTrainer(model, config, loss, data, {"lr": 1e-2}, callbacks=callbacks, **options)


def _tensors(value, place=""):
    """All leaves of a state, by place."""
    if isinstance(value, dict):
        return {at: leaf for key, part in value.items() for at, leaf in _tensors(part, f"{place}/{key}").items()}
    if isinstance(value, list | tuple):
        return {at: leaf for key, part in enumerate(value) for at, leaf in _tensors(part, f"{place}/{key}").items()}
    return {place: value}


def _end(trainer):
    history = trainer.fit().to_dict()
    state = [trainer.core.state_dict(), trainer.optimizer.state_dict(), history, trainer.batches.position()]
    rest = [trainer.scaler.state_dict(), trainer.cycle.resurrected()]
    return _tensors([*state, torch.get_rng_state(), random.getstate(), *rest])


def _same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for place, value in ours.items():
        other = theirs[place]
        same = value.equal(other) if isinstance(value, torch.Tensor) else repr(value) == repr(other)
        assert same, f"{place}: {value} and {other}"


class _SaveAll(Callback):
    """A checkpoint between any two things that a trainer does."""

    def __init__(self, folder):
        self.folder, self.places = folder, []

    def on_step(self, trainer):
        trainer.save(self.folder / str(len(self.places)))
        self.places.append(f"{trainer.cycle.cycle} {trainer.cycle.phase} {trainer.cycle.step}")

    def on_phase(self, trainer, ended):
        self.on_step(trainer)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("case", ["plain", "generator", "dsnot", "float16"])
def test_a_run_resumes_with_the_same_bits_from_any_phase_and_step(tmp_path, case):
    settings = {
        "plain": {},
        "generator": {"accumulation": 2, "resu_steps": 3, "pruner": "sparsegpt"},
        "dsnot": {"stabiliser": "dsnot", "resu_steps": 3, "amnesty_end": 0.3},
        "float16": {"precision": "float16", "resu_steps": 3},
    }[case]
    config = RESUConfig.from_dict({**_CONFIG.to_dict(), **settings})

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)

    def make(callbacks=()):
        loader = _loader(case == "generator")
        return _trainer(config, data=loader, callbacks=callbacks, scheduler=scheduler)

    saves = _SaveAll(tmp_path)
    wanted = _end(make([saves]))
    assert {place.split()[1] for place in saves.places} == {
        *("train", "prune", "stabilize", "resu", "commit", "finetune", "done")
    }
    for at, place in enumerate(saves.places):
        trainer = make()
        torch.manual_seed(99), random.seed(99)
        trainer.resume(tmp_path / str(at))
        assert f"{trainer.cycle.cycle} {trainer.cycle.phase} {trainer.cycle.step}" == place
        _same(wanted, _end(trainer))


def test_the_report_and_the_final_model_agree():
    trainer = _trainer()
    history = trainer.fit()
    masks = [masked.mask.mask for _, masked in masked_weights(trainer.core).values()]
    last = history.cycles[-1]
    assert (last.size, last.kept) == (280, 28) == (sum(m.numel() for m in masks), sum(int(m.sum()) for m in masks))
    assert [(record.cycle, record.phase, record.steps) for record in history.phases] == [
        *((0, "train", 3), (0, "resu", 14), (1, "train", 3), (1, "resu", 14), (2, "finetune", 2))
    ]
    assert trainer.steps == _CONFIG.steps == 36
    assert all(value.grad is None for value in trainer.core.parameters()), "memory for gradients would be held"


def test_accumulated_batches_are_one_large_batch():
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    ends = []
    for size, accumulation in ((16, 1), (4, 4)):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 2))
        loader = DataLoader(_data(), size, drop_last=True)
        config = RESUConfig(cycles=1, train_steps=3, resu_steps=0, finetune_steps=0, accumulation=accumulation)
        callbacks = [_Stop(3)]
        with pytest.raises(KeyboardInterrupt):
            _trainer(config, model, loader, loss, callbacks).fit()
        ends.append(model[0].weight.detach())
    torch.testing.assert_close(*ends, atol=1e-5, rtol=1e-4)


class _Stop(Callback):
    def __init__(self, after):
        self.after = after

    def on_step(self, trainer):
        if trainer.steps == self.after:
            raise KeyboardInterrupt


def test_data_that_ends():
    batches = list(DataLoader(_data(), 8))
    with pytest.raises(DataError, match="ended after 7 batches"):
        _trainer(data=iter(batches)).fit()
    with pytest.raises(DataError, match="no batch"):
        _trainer(data=[]).fit()
    with pytest.raises(DataError, match="int"):
        _trainer(data=3)
    assert _trainer(data=batches).fit().cycles, "a list restarts"
    epochs = []
    stream = BatchStream(lambda epoch: epochs.append(epoch) or iter(range(epoch, 3)))
    assert [next(stream) for _ in range(6)] == [0, 1, 2, 1, 2, 2] and epochs == [0, 1, 2]
    with pytest.raises(DataError, match="epoch 3"):
        next(stream)


def test_a_longer_checkpoint_than_the_data_leaves_the_model_alone(tmp_path):
    trainer = _trainer(callbacks=[CheckpointCallback(tmp_path / "run", every=2), _Stop(2)])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    other = _trainer(data=DataLoader(_data(), 52))
    before = {name: value.clone() for name, value in other.core.state_dict().items()}
    with pytest.raises(DataError, match="fewer than the 2 batches"):
        other.resume(tmp_path / "run")
    _same(before, other.core.state_dict())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_and_the_last_checkpoint_is_good(tmp_path, bad):
    calls = []

    def loss(model, batch):
        calls.append(0)
        return _loss(model, batch) * (bad if len(calls) == 9 else 1)

    trainer = _trainer(loss=loss, callbacks=[CheckpointCallback(tmp_path / "run", every=1)])
    # three steps, two batches of calibration, three steps
    with pytest.raises(DivergedError, match="cycle 0, phase resu, step 3"):
        trainer.fit()
    assert trainer.steps == 6 and all(value.grad is None for value in trainer.core.parameters())
    other = _trainer()
    other.resume(tmp_path / "run")
    _same(dict(trainer.core.named_parameters()), dict(other.core.named_parameters()))
    assert other.steps == 6 and other.fit().cycles[-1].kept == 28


def test_a_model_that_is_no_number_is_not_saved(tmp_path):
    trainer = _trainer()
    trainer.save(tmp_path / "run")
    good = (tmp_path / "run").read_bytes()
    with torch.no_grad():
        trainer.core[0].weight[0, 0] = torch.nan
    with pytest.raises(DivergedError, match="was not written"):
        trainer.save(tmp_path / "run")
    assert (tmp_path / "run").read_bytes() == good


def test_rare_looks_at_the_loss_still_find_it(tmp_path):
    config = RESUConfig.from_dict({**_CONFIG.to_dict(), "check_every": 100})
    trainer = _trainer(config, loss=lambda model, batch: _loss(model, batch) * float("nan"))
    with pytest.raises(DivergedError, match="phase train, step 2"):
        trainer.fit()


def test_checkpoints_of_another_run_are_refused(tmp_path):
    trainer = _trainer()
    trainer.save(tmp_path / "run")
    others = [
        (_trainer(model=_model(hidden=21)), "another model"),
        (_trainer(model=nn.Sequential(nn.Linear(12, 2))), "another model"),
        (_trainer(RESUConfig.from_dict({**_CONFIG.to_dict(), "cycles": 3})), r"cycles \(2 in the file, 3 here\)"),
        (_trainer(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5)), "scheduler"),
        (_trainer(data=_loader(generator=True)), "generators"),
    ]
    for other, message in others:
        before = {name: value.clone() for name, value in other.core.state_dict().items()}
        with pytest.raises(CheckpointError, match=message):
            other.resume(tmp_path / "run")
        _same(before, other.core.state_dict())
    with pytest.raises(ConfigError, match="skip"):
        _trainer(RESUConfig(skip=("0", "4")))
    with pytest.raises(ConfigError, match="config is a dict, needs a RESUConfig"):
        _trainer({"cycles": 1})
    with pytest.raises(ConfigError, match="loss_fn is a int, needs a function"):
        RESUTrainer(_model(), _CONFIG, 3, _loader(), {"lr": 1.0})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="metric"):
        _trainer(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)


@pytest.mark.parametrize("scales", [None, [4.0, 4.0], [4.0, 8.0], [4.0, 2.0]])
def test_a_scheduler_steps_with_the_optimizer_but_for_a_step_that_the_scaler_skipped(scales, monkeypatch):
    """The scaler is asked for its scale before and after each step; without one it is 1."""
    steps = _CONFIG.cycles * (_CONFIG.train_steps + _CONFIG.resu_steps) + _CONFIG.finetune_steps
    trainer = _trainer(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9))
    if scales is not None:
        asked = iter(scales * steps)
        monkeypatch.setattr(trainer.scaler, "get_scale", lambda: next(asked))
    trainer.fit()
    taken = 0 if scales == [4.0, 2.0] else steps
    assert trainer.steps == steps and trainer.scheduler.last_epoch == taken
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**taken)


def test_callbacks_say_what_happens(tmp_path, caplog, capsys):
    with caplog.at_level(logging.INFO, "sparsecomp.runtime"):
        _trainer(callbacks=[LogCallback(), ProgressCallback(), CheckpointCallback(tmp_path / "run")]).fit()
    assert "cycle 1: 28 of 280 weights kept (sparsity 0.9000)" in caplog.text
    assert "cycle 0, train: 3 steps, mean loss" in caplog.text and "finetune: 2 steps" in caplog.text
    assert "100%" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_low_precision_prunes_as_exactly():
    for precision in ("bfloat16", "float16"):
        config = RESUConfig.from_dict({**_CONFIG.to_dict(), "precision": precision})
        trainer = _trainer(config)
        assert trainer.fit().cycles[-1].kept == 28
        assert all(value.dtype == torch.float32 for value in trainer.core.parameters())


def test_a_compiled_model_trains_the_same():
    """Masks and modes change under a compiled graph; the phases' losses and the counts say that it noticed."""

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    config = RESUConfig.from_dict({**_CONFIG.to_dict(), "resu_steps": 12})
    plain, compiled = (
        _trainer(config, make(wrap_module(_model())), loss=loss) for make in (nn.Module.train, _compiled)
    )
    torch.manual_seed(2)
    wanted = plain.fit()
    torch.manual_seed(2)
    found = compiled.fit()
    assert [report.kept for report in found.cycles] == [report.kept for report in wanted.cycles]
    for ours, theirs in zip(found.phases, wanted.phases, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)


def _compiled(model):
    return torch.compile(model, backend="aot_eager")


def _process(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    _train_in_two(rank, folder)
    gc.collect()  # the last owner of a process group must not be DistributedDataParallel: its end would never come
    dist.destroy_process_group()


def _train_in_two(rank: int, folder: str) -> None:
    def make(callbacks=()):
        data = torch.utils.data.Subset(_data(), range(rank, 52, 2))
        config = RESUConfig.from_dict({**_CONFIG.to_dict(), "accumulation": 2, "resu_steps": 5})
        model = nn.parallel.DistributedDataParallel(wrap_module(_model()))
        trainer = _trainer(config, model, DataLoader(data, 8, shuffle=True), callbacks=callbacks)
        torch.manual_seed(rank)
        return trainer

    wanted = _end(make([_Save(f"{folder}/run", 11)]))
    for name, value in wanted.items():
        # everything but batch norm's own statistics and the random states
        if name.startswith(("/0", "/2")) and "running" not in name and isinstance(value, torch.Tensor):
            theirs = value.clone().to(torch.float64)
            dist.broadcast(theirs, 0)
            assert theirs.equal(value.to(torch.float64)), name
    trainer = make()
    trainer.resume(f"{folder}/run")
    assert trainer.steps == 11
    _same(wanted, _end(trainer))
    with pytest.raises(DivergedError):
        _diverging(rank).fit()


def _diverging(rank: int) -> RESUTrainer:
    """A loss that is NaN in the second process alone."""

    def loss(model, batch):
        return _loss(model, batch) * (float("nan") if rank else 1)

    return _trainer(model=nn.parallel.DistributedDataParallel(wrap_module(_model())), loss=loss)


class _Save(Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_step(self, trainer):
        if trainer.steps == self.step:
            trainer.save(self.path)


@pytest.mark.slow(reason="starts processes")
def test_two_processes_have_one_mask_and_resume(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_process, args=(port, str(tmp_path)), nprocs=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.rank1"]


@pytest.mark.parametrize(("calibrated", "products"), [(False, False), (True, False), (True, True)])
def test_a_pruner_of_ones_own_gets_what_its_traits_ask_for(monkeypatch, calibrated, products):
    seen = []

    class Own(Magnitude):
        def prune(self, weight, keep, parts):
            seen.append([part.products is not None for part in parts])
            return super().prune(weight, keep, parts)

    Own.calibrated, Own.products = calibrated, products
    monkeypatch.setitem(PRUNERS, "own", Own())
    _trainer(replace(_CONFIG, pruner="own", stabiliser="none")).fit()
    assert seen and all(given == [products] * calibrated for given in seen)


def test_dsnot_refuses_a_pruner_that_changes_what_it_keeps(monkeypatch):
    monkeypatch.setitem(PRUNERS, "own", SparseGPT(damping=0.1))
    with pytest.raises(ConfigError, match="dsnot would undo what own did"):
        RESUConfig(pruner="own", stabiliser="dsnot")
