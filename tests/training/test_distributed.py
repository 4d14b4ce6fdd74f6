"""Several processes train as one does with all the data: DistributedDataParallel, ZeRO, FSDP2, and what they refuse."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import assert_same, batch, dense_network, masked_network, network, start, train
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import sparsecomp
from sparsecomp.distributed import SparseColwise, SparseRowwise
from sparsecomp.errors import CheckpointError, FormatError, MaskError, PatternError, ReplicaError
from sparsecomp.formats import CSC, CSR
from sparsecomp.nn import SparseLinear, masked_weights
from sparsecomp.reference.sharding import mesh_of
from sparsecomp.runtime import GradualPruning, PatternManager, RESUAdamW, RESUConfig, RESUCycle, RESUTrainer, RigL
from sparsecomp.training.distributed import Replicas, agreed, hashed, patterns_of

# ---- what is compared, in this process ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
def test_a_fingerprint_tells_of_values_and_their_order(dtype):
    torch.manual_seed(0)
    array = torch.randint(0, 2, (5, 7)).to(dtype)
    seen = {int(hashed(array)), int(hashed(torch.zeros_like(array)))}
    for place in range(array.numel()):
        other = array.clone()
        other.view(-1)[place] = 1 - other.view(-1)[place].long()
        seen.add(int(hashed(other)))
        seen.add(int(hashed(array.flatten().roll(place + 1))))
    rolls = {tuple(array.flatten().roll(place).tolist()) for place in range(array.numel())}
    assert len(seen) == 1 + array.numel() + len(rolls)
    assert hashed(array) == hashed(array.long())


def test_long_patterns_are_taken_in_pieces(monkeypatch):
    array = torch.arange(100)
    wanted = hashed(array)
    monkeypatch.setattr("sparsecomp.training.distributed._PIECE", 7)
    assert hashed(array) == wanted


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, True])
def test_patterns_are_sent_no_more_and_other_buffers_still_are(alone, compiled):
    shared = DistributedDataParallel(nn.Sequential(network(), nn.BatchNorm1d(8), masked_network()[0].requires_grad_()))
    model: Any = torch.compile(shared, backend="eager") if compiled else shared
    assert {"0.0.indices", "2.masked.mask.mask"} < set(shared.named_module_buffers)
    agreed(model)
    left = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert len(shared.modules_buffers) == len(left)
    shared._sync_buffers()
    assert set(shared.named_module_buffers) == left
    assert patterns_of(shared.module).keys() >= {"0.0.pointers", "0.0.indices", "2.masked.code", "2.masked.mask.mask"}


def test_one_process_agrees_with_itself():
    replicas = agreed(network())
    assert (replicas.group, replicas.rank, replicas.count) == (None, 0, 1)
    with pytest.raises(ZeroDivisionError), replicas.as_one(torch.device("cpu")):
        _ = 1 / 0


# ---- DistributedDataParallel ----------------------------------------------------------------------------------------


def differing_patterns_are_refused(rank: int, count: int, folder: Path) -> None:
    model = network(seed=rank)
    shared = DistributedDataParallel(model, init_sync=False)
    with pytest.raises(ReplicaError, match=r"0\.indices, 2\.pointers|0\.pointers"):
        agreed(shared)
    with pytest.raises(ReplicaError, match="differ"):
        RigL(shared, torch.optim.SGD(model.parameters()), end=10)
    model = masked_network()
    if rank:
        model[0].masked.mask.mask[0, 0] ^= True
    with pytest.raises(ReplicaError, match=r"^0\.masked\.mask\.mask differ"):
        agreed(DistributedDataParallel(model, init_sync=False))
    plain = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 8))  # the same parameters, and no mask
    with pytest.raises(ReplicaError, match="other names"):
        agreed(DistributedDataParallel(plain if rank else masked_network(), init_sync=False))


def differing_settings_are_refused(rank: int, count: int, folder: Path) -> None:
    model = network()
    shared, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters())
    with pytest.raises(ReplicaError, match="other settings"):
        RigL(shared, optimizer, end=10, every=2 + rank)
    with pytest.raises(ReplicaError, match="other settings"):  # and another number of layers
        RigL(shared, optimizer, end=10, filter=lambda layer, name: name == "0" or rank == 0)
    masked = DistributedDataParallel(masked_network())
    with pytest.raises(ReplicaError, match="other settings"):
        GradualPruning(masked, sparsity=0.9, start=0, end=rank, every=1)


def a_change_that_differs_changes_nothing(rank: int, count: int, folder: Path) -> None:
    model = network()
    shared, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.0)
    rule = RigL(shared, optimizer, end=10, every=1)
    rule.update()
    with torch.no_grad():
        model[0].values[:20] *= 1 + 10 * rank  # as a step would that only one process takes
    before = [one.clone() for one in patterns_of(model).values()]
    with pytest.raises(ReplicaError, match="^0 differ"):
        with rule.watch():
            F.mse_loss(shared(batch(0)[0]), batch(0)[1]).backward()
        rule.update()
    assert rule.steps == 1
    for one, other in zip(before, patterns_of(model).values(), strict=True):
        assert torch.equal(one, other)


def what_fails_in_one_fails_in_all(rank: int, count: int, folder: Path) -> None:
    model = masked_network()
    shared = DistributedDataParallel(model)
    pruning = GradualPruning(shared, sparsity=0.9, start=0, end=0)
    if rank:
        with torch.no_grad():
            model[0].weight[0] = torch.nan
    before = model[0].masked.mask.mask.clone()
    with pytest.raises(MaskError if rank else ReplicaError, match="NaN" if rank else "another process"):
        pruning.update()
    assert torch.equal(before, model[0].masked.mask.mask)


def rigl_with_zero_and_accumulation(rank: int, count: int, folder: Path) -> None:
    """The state of parameters of which another process takes the step follows the pattern, too."""
    model, alone = network(), network()
    shared = DistributedDataParallel(model, gradient_as_bucket_view=True)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    plain = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    compiled = torch.compile(shared, backend="sparsecomp")
    for forward, optimizer, place in ((compiled, zero, (rank, count)), (alone, plain, (0, 1))):
        rule = RigL(forward, optimizer, every=2, end=20)
        for step in range(7):
            optimizer.zero_grad()
            with rule.watch():
                if forward is compiled:
                    with shared.no_sync():
                        x, y = batch(step + 100, *place)
                        F.mse_loss(forward(x), y).backward()
                else:
                    F.mse_loss(forward(batch(step + 100)[0]), batch(step + 100)[1]).backward()
                x, y = batch(step, *place)
                F.mse_loss(forward(x), y).backward()
            if not rule.update():
                optimizer.step()
    assert_same(model, alone)
    assert not torch.equal(model[0].indices, network()[0].indices)


def mixed_precision(rank: int, count: int, folder: Path) -> None:
    model, alone = network(), network()
    shared: Any = DistributedDataParallel(torch.compile(model, backend="sparsecomp"))  # pyright: ignore
    assert agreed(shared).count == count and not shared.modules_buffers
    for forward, module, place in ((shared, model, (rank, count)), (alone, alone, (0, 1))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            x, y = batch(step, *place)
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(forward(x).float(), y)
            loss.backward()
            optimizer.step()
    assert model[0].values.dtype is torch.float32
    assert_same(model, alone, rtol=0, atol=3e-3)  # one rounding of bfloat16 of gradients near 0.2, times the rates


def rigl_goes_on_with_the_same_bits(rank: int, count: int, folder: Path) -> None:
    def run() -> tuple[nn.Module, Any, Any, RigL]:
        model = network()
        shared, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, shared, optimizer, RigL(shared, optimizer, every=2, end=20)

    model, shared, optimizer, rule = run()
    train(shared, optimizer, (rank, count), 3, rule)
    saved = [one.state_dict() for one in (model, optimizer, rule)]
    path = folder / f"rigl{count}.{rank}"
    torch.save(saved, path)
    train(shared, optimizer, (rank, count), 4, rule)
    again = run()
    for one, state in zip((again[0], again[2], again[3]), torch.load(path), strict=True):
        one.load_state_dict(state)
    train(again[1], again[2], (rank, count), 4, again[3])
    assert_same(again[0], model, rtol=0, atol=0)


# ---- FSDP2 ----------------------------------------------------------------------------------------------------------


def sharded(model: nn.Sequential, mesh: DeviceMesh | None = None, **options: Any) -> nn.Sequential:
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh, **options)
    return model


def sharded_values_train_as_whole_ones(
    rank: int, count: int, folder: Path, mesh: DeviceMesh | None = None
) -> None:  # fmt: skip
    model, alone = sharded(network(), mesh), network()
    compiled: Any = torch.compile(model, backend="sparsecomp")
    train(compiled, torch.optim.AdamW(model.parameters(), lr=0.01), (rank, count))
    train(alone, torch.optim.AdamW(alone.parameters(), lr=0.01))
    assert_same(model, alone)


def sharded_values_in_half_precision(rank: int, count: int, folder: Path) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, alone = sharded(network(), mp_policy=policy), network()
    for module, place in ((model, (rank, count)), (alone, (0, 1))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            x, y = batch(step, *place)
            F.mse_loss(module(x).float(), y).backward()
            optimizer.step()
    assert model[0].values.dtype is torch.float32
    assert_same(model, alone, rtol=0, atol=3e-3)


def sharded_patterns_change_as_whole_ones(
    rank: int, count: int, folder: Path, mesh: DeviceMesh | None = None
) -> None:  # fmt: skip
    model, alone = sharded(network(), mesh), network()
    for module, place in ((model, (rank, count)), (alone, (0, 1))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        rule = RigL(module, optimizer, every=2, end=20)
        assert Replicas(module).count == place[1]
        train(module, optimizer, place, 7, rule)
    assert_same(model, alone)
    manager = PatternManager(model[0])
    with pytest.raises(PatternError, match="sharded, and their number cannot become"):
        manager.become(manager.pattern.complement(400))
    with torch.no_grad():
        model[0].unshard()
    with pytest.raises(PatternError, match="call reshard"):
        manager.become(manager.pattern)
    model[0].reshard()


def sharded_masks(
    rank: int, count: int, folder: Path, mesh: DeviceMesh | None = None
) -> None:  # fmt: skip
    """Masked weights through all phases, by the optimizer that knows them."""
    model, alone = sharded(masked_network(), mesh), masked_network()
    for module, place in ((model, (rank, count)), (alone, (0, 1))):
        optimizer = RESUAdamW(module, lr=0.01)
        train(module, optimizer, place)
        for weight, masked in masked_weights(module).values():
            masked.enter_resu_(weight)
        train(module, optimizer, place, 14)  # theta moves from the eleventh step on
    assert_same(model, alone)
    thetas = [masked.theta(weight) for weight, masked in masked_weights(model).values()]
    assert all(one.count_nonzero() for one in thetas)
    torch.testing.assert_close(model(batch(9)[0]), alone(batch(9)[0]), rtol=1e-4, atol=1e-5)
    with pytest.raises(MaskError, match="each process has a part"):
        train(model, RESUAdamW(model, lr=0.01, select="top"), steps=1)
    model.eval()  # which zeroes what is pruned, in memory


def sharded_cycle(
    rank: int, count: int, folder: Path, mesh: DeviceMesh | None = None
) -> None:  # fmt: skip
    histories = []
    for model, place in ((sharded(dense_network(), mesh), (rank, count)), (dense_network(), (0, 1))):
        config = RESUConfig(
            cycles=2, train_steps=5, resu_steps=15, finetune_steps=5, sparsity_end=0.7, pruner="magnitude",
            stabiliser="none",
        )  # fmt: skip
        data = [batch(step, *place) for step in range(50)]
        trainer = RESUTrainer(model, config, lambda m, b: F.mse_loss(m(b[0]), b[1]), data, {"lr": 0.01})
        histories.append((model, trainer.fit()))
        if len(histories) == 1:
            with pytest.raises(CheckpointError, match=r"torch\.distributed\.checkpoint"):
                trainer.save(folder / "run")
    (model, history), (alone, wanted) = histories
    assert_same(model, alone)
    assert [one.resurrected for one in history.cycles] == [one.resurrected for one in wanted.cycles]
    assert history.cycles[0].resurrected


def sharded_gradual_pruning(
    rank: int, count: int, folder: Path, mesh: DeviceMesh | None = None
) -> None:  # fmt: skip
    model, alone = sharded(dense_network(), mesh), dense_network()
    for module in (model, alone):
        pruning = GradualPruning(module, sparsity=0.8, start=0, end=2, every=1, budget="global")
        for _ in range(3):
            pruning.update()
    assert_same(model, alone)


def shards_in_replicas_train_as_one(rank: int, count: int, folder: Path) -> None:
    """HSDP: all that FSDP2 alone does, on a mesh of replicas × shards."""
    mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("replica", "shard"))
    for check in (
        sharded_values_train_as_whole_ones, sharded_patterns_change_as_whole_ones, sharded_masks, sharded_cycle,
        sharded_gradual_pruning,
    ):  # fmt: skip
        check(rank, count, folder, mesh)


def replicas_of_a_part_of_the_processes(rank: int, count: int, folder: Path) -> None:
    meshes = init_device_mesh("cpu", (2, 1, count // 2), mesh_dim_names=("run", "replica", "shard"))
    replicas = Replicas(sharded(network(), meshes["replica", "shard"]))
    assert (replicas.count, replicas.rank) == (2, rank % 2)
    assert replicas.mean(torch.tensor(float(rank))) == rank - rank % 2 + 0.5
    split = distribute_tensor(torch.zeros(4, 4), meshes["run", "shard"], (Shard(0), Shard(1)))
    with pytest.raises(ReplicaError, match="split in several dimensions"):
        mesh_of(split)


# ---- tensor parallel ------------------------------------------------------------------------------------------------


def split_network(format: Any) -> nn.Sequential:
    """Rows of very different counts, so that processes store other numbers of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 8))
    for name, bias in (("0", True), ("2", True), ("4", False)):
        layer = model.get_submodule(name)
        mask = torch.rand(layer.weight.shape) < torch.linspace(0.1, 0.8, layer.weight.shape[0])[:, None]
        linear = nn.Linear(layer.in_features, layer.out_features, bias)
        model.set_submodule(name, SparseLinear.from_linear(linear, format, mask=mask))
    return model


def split_layers_compute_as_whole_ones(rank: int, count: int, folder: Path) -> None:
    for format in (CSR, CSC):
        mesh = init_device_mesh("cpu", (count,))
        alone, model = split_network(format), split_network(format)
        plan = {"0": SparseColwise(), "2": SparseRowwise(), "4": SparseColwise()}
        parallelize_module(model, mesh, plan)
        assert model[0].values.numel() < alone[0].values.numel()
        compiled: Any = torch.compile(model, backend="sparsecomp") if format is CSR else model
        optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, alone)]
        for step in range(3):
            x, wanted = (batch(step)[0].requires_grad_() for _ in range(2))
            found, whole = compiled(x), alone(wanted)
            share = slice(rank * 8 // count, (rank + 1) * 8 // count)
            torch.testing.assert_close(found, whole[:, share])
            found.square().sum().backward()
            whole.square().sum().backward()
            torch.testing.assert_close(x.grad, wanted.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        state, its = model.state_dict(), alone.state_dict()
        assert state.keys() == its.keys()
        for name, tensor in its.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5)
        other = parallelize_module(split_network(format), mesh, plan)
        for load in (other.load_state_dict, partial(sparsecomp.load_state_dict, other)):
            with torch.no_grad():
                other[0].values.zero_()
            load(its)
            for name, tensor in other.state_dict().items():
                assert torch.equal(tensor, its[name]), name


def sparse_layers_go_with_dense_ones_that_are_split(rank: int, count: int, folder: Path) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        models.append(sparsecomp.sparsify(model, sparsecomp.Unstructured(0.5), filter=lambda layer, name: name == "2"))
    model, alone = models
    parallelize_module(model, init_device_mesh("cpu", (count,)), {"0": ColwiseParallel(), "2": SparseRowwise()})
    for one in models:
        one(batch(0)[0]).square().sum().backward()
    torch.testing.assert_close(model(batch(0)[0]), alone(batch(0)[0]))
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), alone[0].weight.grad)


def what_is_split_is_the_first_processs(rank: int, count: int, folder: Path) -> None:
    """As torch's own styles do; a process may have drawn another pattern of as many or more elements."""
    mesh = init_device_mesh("cpu", (count,))
    for zeros in (0.7, 0.7 - 0.2 * rank):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        sparsecomp.sparsify(model, sparsecomp.Unstructured(zeros, by="random"))
        x, first = batch(0)[0], [model(batch(0)[0])]
        parallelize_module(model, mesh, {"0": SparseColwise(), "2": SparseRowwise()})
        dist.broadcast_object_list(first)
        torch.testing.assert_close(model(x), first[0])
    half = sparsecomp.Unstructured(0.5)
    for told, mine in (("cannot be split|is not split", nn.Linear(16, 32)), ("other sizes", nn.Linear(16, 64))):
        model = nn.Sequential(mine if rank else nn.Linear(16, 32))
        if told == "other sizes" or not rank:
            sparsecomp.sparsify(model, half)
        with pytest.raises(FormatError, match=told):
            parallelize_module(model, mesh, {"0": SparseColwise()})


def what_cannot_be_split_is_refused(rank: int, count: int, folder: Path) -> None:
    mesh, model = init_device_mesh("cpu", (count,)), network()
    before = model.state_dict()
    for plan, told in (
        ({"0": SparseColwise()}, "33 outputs"), ({"2": SparseRowwise()}, "33 inputs"), ({"1": SparseRowwise()}, "ReLU"),
    ):  # fmt: skip
        with pytest.raises(FormatError, match=told):
            parallelize_module(model, mesh, plan)
    assert_same(model, network())
    assert model.state_dict().keys() == before.keys() and type(model[0]) is SparseLinear


# ---- checkpoints ----------------------------------------------------------------------------------------------------


CYCLE = RESUConfig(
    cycles=2, train_steps=3, resu_steps=14, finetune_steps=3, sparsity_end=0.7, pruner="magnitude", stabiliser="none"
)


class GrowingRun:
    """RigL, saved between two changes."""

    name, made, saved, end = "rigl", network, 5, 8

    def __init__(self, model: nn.Module) -> None:
        # Adam's first steps are as long for every new weight, which makes ties that rounding breaks
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.rule: Any = RigL(model, self.optimizer, every=2, end=20)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        with self.rule.watch():
            F.mse_loss(self.model(x), y).backward()
        if not self.rule.update():
            self.optimizer.step()

    def has_changed(self) -> bool:
        return not torch.equal(self.model[0].indices, network()[0].indices)  # pyright: ignore[reportIndexIssue]


class ResurrectingRun:
    """A RESU cycle, saved in the second of its phases on theta, when theta has moved."""

    name, made, saved, end = "resu", dense_network, 32, 37

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, RESUAdamW(model, lr=0.01)
        self.rule: Any = RESUCycle(model, self.optimizer, CYCLE)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        while not self.rule.steps_left:
            self.rule.advance(dict)
        self.optimizer.zero_grad()
        F.mse_loss(self.model(x), y).backward()
        self.optimizer.step()
        self.rule.count_step()

    def has_changed(self) -> bool:
        return any(masked.theta(weight).any() for weight, masked in masked_weights(self.model).values())


RUNS: tuple[Any, ...] = (GrowingRun, ResurrectingRun)


def steps(run: Any, place: tuple[int, int], first: int, end: int) -> None:
    for number in range(first, end):
        run.step(*batch(number, *place))


def save(run: Any, path: Path) -> None:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "rule": run.rule.state_dict(), "optimizer": optimizer}, checkpoint_id=path)


def load(run: Any, path: Path) -> None:
    first = {"model": get_model_state_dict(run.model), "rule": run.rule.state_dict()}
    dcp.load(first, checkpoint_id=path)
    set_model_state_dict(run.model, first["model"])
    run.rule.load_state_dict(first["rule"])
    # behind the masks, that say of which weights a theta is known
    then = {"optimizer": get_optimizer_state_dict(run.model, run.optimizer)}
    dcp.load(then, checkpoint_id=path)
    set_optimizer_state_dict(run.model, run.optimizer, then["optimizer"])


def save_at_two_and_go_on_with_the_same_bits(rank: int, count: int, folder: Path) -> None:
    for kind in RUNS:
        run = kind(sharded(kind.made()))
        steps(run, (rank, count), 0, kind.saved)
        assert run.has_changed()
        save(run, folder / kind.name)
        again = kind(sharded(kind.made()))
        steps(again, (rank, count), 40, 42)  # so that nothing is as it was saved
        load(again, folder / kind.name)
        assert_same(again.model, run.model, rtol=0, atol=0)
        for one in (run, again):
            steps(one, (rank, count), kind.saved, kind.end)
        assert_same(again.model, run.model, rtol=0, atol=0)


def a_theta_that_was_not_asked_for_is_refused(rank: int, count: int, folder: Path) -> None:
    run = ResurrectingRun(sharded(dense_network()))
    asked = get_optimizer_state_dict(run.model, run.optimizer)
    dcp.load({"optimizer": asked}, checkpoint_id=folder / "resu")
    model = get_model_state_dict(run.model)
    dcp.load({"model": model}, checkpoint_id=folder / "resu")
    set_model_state_dict(run.model, model)
    with pytest.raises(MaskError, match="load the model first"):
        set_optimizer_state_dict(run.model, run.optimizer, asked)


def go_on(kind: Any, model: nn.Module, place: tuple[int, int], folder: Path) -> None:
    """What two processes saved goes on as the uninterrupted run of one process does, within rounding."""
    run, alone = kind(model), kind(kind.made())
    load(run, folder / kind.name)
    steps(alone, (0, 1), 0, kind.saved)
    assert_same(run.model, alone.model)
    for one, its in ((run, place), (alone, (0, 1))):
        steps(one, its, kind.saved, kind.end)
    assert_same(run.model, alone.model)


def who_rounds_otherwise_decides_alike(rank: int, count: int, folder: Path) -> None:
    """As by another kernel, which a process takes that waited too long for the one that tunes."""
    for kind in RUNS:
        model, other = kind.made(), 1 + rank * 2**-20
        model[0].register_forward_hook(lambda layer, inputs, output, other=other: output * other)
        run = kind(DistributedDataParallel(model))
        steps(run, (rank, count), 0, kind.end)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            first = tensor.detach().clone()
            dist.broadcast(first, 0)
            assert torch.equal(tensor, first), name


def load_at_many(rank: int, count: int, folder: Path) -> None:
    for kind in RUNS:
        go_on(kind, sharded(kind.made()), (rank, count), folder)


# ---- the processes --------------------------------------------------------------------------------------------------

SPLIT = [
    split_layers_compute_as_whole_ones, sparse_layers_go_with_dense_ones_that_are_split,
    what_is_split_is_the_first_processs, what_cannot_be_split_is_refused,
]  # fmt: skip
REPLICATED = [
    differing_patterns_are_refused, differing_settings_are_refused, a_change_that_differs_changes_nothing,
    what_fails_in_one_fails_in_all, rigl_with_zero_and_accumulation, mixed_precision, rigl_goes_on_with_the_same_bits,
]  # fmt: skip
SHARDED = [
    sharded_values_train_as_whole_ones, sharded_values_in_half_precision, sharded_patterns_change_as_whole_ones,
    sharded_masks, sharded_cycle, sharded_gradual_pruning,
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.mark.slow(reason="starts processes")
def test_two_processes_train_as_one_and_save(folder):
    checks = [*REPLICATED, *SHARDED, *SPLIT, who_rounds_otherwise_decides_alike]
    checks.append(save_at_two_and_go_on_with_the_same_bits)
    start(2, [*checks, a_theta_that_was_not_asked_for_is_refused], folder)


@pytest.fixture
def saved(folder):
    if not all((folder / kind.name).exists() for kind in RUNS):
        pytest.skip("the test before has saved nothing")
    return folder


@pytest.mark.slow(reason="needs what processes saved")
@pytest.mark.parametrize("kind", RUNS)
def test_one_process_goes_on_from_what_two_saved(saved, kind):
    go_on(kind, kind.made(), (0, 1), saved)


@pytest.mark.slow(reason="starts processes")
def test_four_processes_train_as_one_and_go_on_from_what_two_saved(saved):
    checks = [sharded_patterns_change_as_whole_ones, split_layers_compute_as_whole_ones, load_at_many]
    start(4, [*checks, shards_in_replicas_train_as_one, replicas_of_a_part_of_the_processes], saved)
