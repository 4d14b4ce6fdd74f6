"""RESU layers under every optimizer and every kind of write: compiled, they give what float64 gives of what is there.

Two pruned layers and one in its RESU phase, trained through the compiled model. Between steps somebody writes to
weights or masks, seen by a version counter or not; after each step outputs and gradients are held against the formula
in float64. Optimizer, way of stepping and write are taken in pairs: each way with each optimizer that has it, each
write with each way.
"""

import copy
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sparsecomp.nn import masked_weights, wrap_module
from sparsecomp.runtime import Mode

X = torch.randn(6, 2, 5, 5, generator=torch.Generator().manual_seed(1))
TARGET = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))

HIDDEN = 16

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {}, "Adafactor": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "AdamW": {"weight_decay": 0.1},
    "Adamax": {}, "ASGD": {}, "LBFGS": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {"momentum": 0.5}, "Rprop": {},
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
}  # fmt: skip
"""With settings that move pruned elements, too. Muon takes matrices only and SparseAdam sparse gradients only."""
FUSED = {"Adagrad", "Adam", "AdamW", "SGD"}
NO_FOREACH = {"LBFGS"}
COMPILED = {"Adagrad", "Adam", "RMSprop", "Rprop", "SGD"}
"""Whose steps are compiled, by Inductor for SGD, else by Dynamo alone: that takes a second each."""
WAYS = ("default", "foreach", "fused", "compiled", "scaled")


def random(shape: Any, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(27, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 4))
    for weight, masked in masked_weights(wrap_module(model)).values():
        masked.prune_(weight, random(weight.shape, seed) < 0.5)
    last = model[4]
    last.masked.enter_resu_(last.weight, random(last.masked.mask.pruned.shape, 3))
    return model


def formula(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """What the model means, in float64: pruned elements are zero but in the RESU phase."""
    wide = {name: value.double() for name, value in state.items() if value.is_floating_point()}

    def effective(name: str) -> Tensor:
        mask = state[f"{name}.masked.mask.mask"]
        sparse = int(state[f"{name}.masked.code"]) == Mode.SPARSE
        return torch.where(mask, wide[f"{name}.weight"], 0) if sparse else wide[f"{name}.weight"]

    hidden = F.conv2d(x.double(), effective("0"), wide["0.bias"]).flatten(1)
    hidden = F.linear(hidden, effective("2"), wide["2.bias"]).tanh()
    return F.linear(hidden, effective("4"), wide["4.bias"])


def tensors(model: nn.Module) -> dict[str, Tensor]:
    # state_dict would settle what pruned elements hold
    return dict(model.named_parameters()) | dict(model.named_buffers())


def error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


def check(compiled: Any, model: nn.Module) -> None:
    """Outputs without gradients, and outputs and gradients with them."""
    state = {name: value.detach().clone() for name, value in tensors(model).items()}
    dtype = state["0.weight"].dtype
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    for name, value in state.items():
        value.requires_grad_(value.is_floating_point() and model.get_parameter(name).requires_grad)
    wanted = formula(state, X)
    with torch.no_grad():
        assert error(compiled(X.to(dtype)), wanted) < tolerance
    names = [name for name, value in state.items() if value.requires_grad]
    out = compiled(X.to(dtype))
    assert error(out, wanted) < tolerance
    found = torch.autograd.grad(out.double().square().sum(), [model.get_parameter(name) for name in names])
    right = torch.autograd.grad(wanted.square().sum(), [state[name] for name in names])
    assert all(error(one, other) < tolerance for one, other in zip(found, right, strict=True))


@pytest.fixture(scope="module")
def trained() -> Iterator[Any]:
    """The model, compiled, and a twin that averages it: graphs are made once for all cases."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        model, average = model_of(0), AveragedModel(model_of(0), multi_avg_fn=get_ema_multi_avg_fn(0.5))
        yield model, torch.compile(model, backend="sparsecomp"), average, torch.compile(
            average.module, backend="sparsecomp"
        )  # fmt: skip
    torch.compiler.reset()


# Writes: by whom is their name


def alternating(model: nn.Module, **_: Any) -> None:
    with torch.no_grad():
        model.eval()
        model(X)
        model.train()


def averaged(model: nn.Module, average: AveragedModel, compiled_average: Any, **_: Any) -> None:
    average.update_parameters(model)
    check(compiled_average, average.module)


def data(model: nn.Module, step: int, **_: Any) -> None:
    model[0].weight.data.mul_(0.9)
    model[2].weight.data = model[2].weight.data + 0.01
    mask = model[0].masked.mask.mask
    mask.data.copy_(random(mask.shape, 20 + step) < 0.4)


def numpy(model: nn.Module, step: int, **_: Any) -> None:
    model[2].weight.detach().numpy()[...] *= 1.1
    mask = model[2].masked.mask.mask
    mask.numpy()[...] = (random(mask.shape, 30 + step) < 0.6).numpy()


def dlpack(model: nn.Module, **_: Any) -> None:
    torch.from_dlpack(model[4].weight.detach()).mul_(0.8)


def loaded(model: nn.Module, step: int, **_: Any) -> None:
    model.load_state_dict(model_of(40 + step).state_dict())


def called(model: nn.Module, compiled: Any, step: int, **_: Any) -> None:
    others = tensors(model_of(50 + step))
    with torch.no_grad():
        found = functional_call(compiled, {f"_orig_mod.{name}": value for name, value in others.items()}, (X,))
    assert error(found, formula(others, X)) < 1e-5


def copied(model: nn.Module, **_: Any) -> None:
    twin = copy.deepcopy(model)
    own, optimizer = torch.compile(twin, backend="sparsecomp"), torch.optim.SGD(twin.parameters(), 0.1, fused=True)
    F.mse_loss(own(X), TARGET).backward()
    optimizer.step()
    check(own, twin)


def converted(model: nn.Module, compiled: Any, **_: Any) -> None:
    for dtype in (torch.float16, torch.float32):
        model.to(dtype)
        check(compiled, model)


WRITES: tuple[Callable[..., None], ...] = (
    alternating, averaged, data, numpy, dlpack, loaded, called, copied, converted,
)  # fmt: skip


def _cases() -> list[Any]:
    number, cases = count(), []
    for way in WAYS:
        for name in OPTIMIZERS:
            without = {"fused": name not in FUSED, "compiled": name not in COMPILED}
            if without.get(way, way != "default" and name in NO_FOREACH):
                continue
            write = WRITES[next(number) % len(WRITES)]
            cases.append(pytest.param(name, way, write, id=f"{name}-{way}-{write.__name__}"))
    for way in WAYS:  # the pairs of way and write that this leaves out
        seen = {case.values[2] for case in cases if case.values[1] == way}
        cases += [
            pytest.param("SGD", way, write, id=f"SGD-{way}-{write.__name__}") for write in WRITES if write not in seen
        ]
    return cases


def _stepped(optimizer: Any, way: str, compiled: Any, scaler: Any) -> None:
    def loss() -> Tensor:
        optimizer.zero_grad()
        found = F.mse_loss(compiled(X), TARGET)
        scaler.scale(found).backward()
        return found

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(loss)
    elif way == "compiled":
        loss()
        backend = "inductor" if isinstance(optimizer, torch.optim.SGD) else "eager"
        torch.compile(optimizer.step, backend=backend)()
    else:
        loss()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.slow(reason="every optimizer with every write")
@pytest.mark.parametrize(("name", "way", "write"), _cases())
@pytest.mark.slow_cases(6)
def test_compiled_layers_equal_the_formula_after_each_step_and_write(
    name: str, way: str, write: Callable[..., None], trained: Any
) -> None:
    model, compiled, average, compiled_average = trained
    model.load_state_dict(model_of(0).state_dict())
    model.train().zero_grad()
    options = OPTIMIZERS[name] | ({way: True} if way in ("foreach", "fused") else {})
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05, **options)
    scaler = torch.amp.GradScaler("cpu", enabled=way == "scaled")
    for step in range(2):
        before = model[2].weight.detach().clone()
        _stepped(optimizer, way, compiled, scaler)
        assert not torch.equal(model[2].weight, before)
        check(compiled, model)
        write(model=model, compiled=compiled, average=average, compiled_average=compiled_average, step=step)
        check(compiled, model)


def test_every_optimizer_of_torch_is_in_the_table_or_named_as_left_out() -> None:
    found = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)} - {"Optimizer"}
    assert found - OPTIMIZERS.keys() <= {"Muon", "SparseAdam"}
