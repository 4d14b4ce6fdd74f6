"""Every way to write to a model's tensors, seen by a version counter or not, and every optimizer, beside eager.

What a compiled model keeps of its weights must survive all of them. A test gives models (`Form`); `check` trains one,
writes to it in every way of `WRITES` and in one of `CHANGES`, and compares it with eager after each step.
"""

import copy
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsecomp.ops import frozen_weights


class Form(NamedTuple):
    """A kind of model.

    Attributes:
        make: the model, the same each time.
        x: its input.
        masks: names of buffers that may be flipped; they are written to beside the parameters.
        dtypes: that `.to` may convert it to.
    """

    make: Callable[[], nn.Module]
    x: Tensor
    masks: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.bfloat16)


# ---- ways to write to a tensor ----------------------------------------------------------------------------------


def _counted(tensor: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(value)


def _by_data(tensor: Tensor, value: Tensor) -> None:
    tensor.data.copy_(value)


def _new_data(tensor: Tensor, value: Tensor) -> None:
    tensor.data = value.clone()


def _through_numpy(tensor: Tensor, value: Tensor) -> None:
    tensor.detach().cpu().numpy()[...] = value.numpy()


def _through_dlpack(tensor: Tensor, value: Tensor) -> None:
    torch.from_dlpack(tensor.detach()).copy_(value)


def _through_a_flat_buffer(tensor: Tensor, value: Tensor) -> None:
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    flat.set_(storage, 0, (storage.nbytes() // tensor.itemsize,))
    flat[tensor.storage_offset() :][: tensor.numel()] = value.flatten()


def _by_foreach(tensor: Tensor, value: Tensor) -> None:
    if tensor.is_floating_point():
        torch._foreach_lerp_([tensor.detach()], [value], 1.0)
    else:
        torch._foreach_copy_([tensor.detach()], [value])


WRITES: dict[str, Callable[[Tensor, Tensor], None]] = {
    "copy_": _counted,
    ".data": _by_data,
    ".data of its own": _new_data,
    "numpy": _through_numpy,
    "DLPack": _through_dlpack,
    "flat buffer": _through_a_flat_buffer,
    "foreach": _by_foreach,
}
"""By name: write a value to a tensor."""


def write(model: nn.Module, masks: Sequence[str], way: Callable[[Tensor, Tensor], None]) -> None:
    """Write other values to the parameters and the masks of a model."""
    for parameter in model.parameters():
        way(parameter, parameter.detach().mul(-0.9).add(0.05))
    for name in masks:
        buffer = model.get_buffer(name)
        way(buffer, buffer.flip(0).clone())


# ---- other changes of a model -----------------------------------------------------------------------------------


class Subject:
    """A model, compiled without and under a promise, and what is compared with eager."""

    def __init__(self, model: nn.Module, form: Form, backend: Any) -> None:
        self.model, self.form, self.x, self.backend = model, form, form.x, backend
        # by two backends, since Dynamo gives what one made to every compilation of the same code by it
        self.plain, self.promised = (
            torch.compile(model, backend=lambda gm, inputs: backend(gm, inputs)) for _ in range(2)
        )

    def evaluate(self) -> None:
        """Compare both with eager, without gradients."""
        with torch.no_grad():
            wanted = self.model(self.x)
            agree(self.plain(self.x), wanted)
            with frozen_weights():
                agree(self.promised(self.x), wanted)
                agree(self.promised(self.x), wanted)
            agree(self.promised(self.x), wanted)

    def train(self, optimizers: Sequence[Any], scaler: Any) -> None:
        """One step, whose gradients are compared with eager ones under the same weights."""
        self.model.train()
        parameters = [one for one in self.model.parameters() if one.requires_grad]
        wanted = torch.autograd.grad(self.loss(self.model), parameters, allow_unused=True)
        for run, promise in ((self.plain, nullcontext()), (self.promised, frozen_weights())):
            with promise:
                self.backward(run, scaler)
            for parameter, gradient in zip(parameters, wanted, strict=True):
                assert (parameter.grad is None) == (gradient is None)
                if gradient is not None and parameter.grad is not None:
                    agree(parameter.grad, gradient * (scaler.get_scale() if scaler else 1))
        for optimizer in optimizers:
            if scaler:
                scaler.step(optimizer)
            elif isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(lambda: self.backward(self.plain, None))
            else:
                optimizer.step()
        if scaler:
            scaler.update()
        self.model.eval()

    def backward(self, run: Callable[[Tensor], Tensor], scaler: Any) -> Tensor:
        self.model.zero_grad()
        loss = self.loss(run)
        (scaler.scale(loss) if scaler else loss).backward()
        return loss

    def loss(self, run: Callable[[Tensor], Tensor]) -> Tensor:
        return (run(self.x) - 1).square().mean()

    def beside(self, model: nn.Module) -> "Subject":
        """Another model of the kind."""
        return Subject(model, self.form, self.backend)


def agree(found: Tensor, wanted: Tensor) -> None:
    """Equal but for the order of sums."""
    tolerance = 3e-2 if wanted.dtype in (torch.float16, torch.bfloat16) else 1e-4
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance / 10)


def _load_state_dict(subject: Subject) -> None:
    for assign in (False, True):
        other = subject.form.make()
        write(other, subject.form.masks, _counted)
        subject.model.load_state_dict(other.state_dict(), assign=assign)
        subject.evaluate()


def _ema(subject: Subject) -> None:
    for averaging in ({}, {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.7)}):
        averaged = torch.optim.swa_utils.AveragedModel(subject.model, use_buffers=False, **averaging)
        shadow = subject.beside(averaged.module)
        for _ in range(3):
            averaged.update_parameters(subject.model)
            shadow.evaluate()
            write(subject.model, subject.form.masks, _by_data)
    for kept, new in zip(shadow.model.parameters(), subject.model.parameters(), strict=True):
        kept.data.mul_(0.9).add_(new.data, alpha=0.1)  # the usual line
    shadow.evaluate()


def _functional_call(subject: Subject) -> None:
    given = {name: value.detach() * -2 for name, value in subject.model.named_parameters()}
    named = {f"_orig_mod.{name}": value for name, value in given.items()}
    with torch.no_grad():
        wanted = torch.func.functional_call(subject.model, given, subject.x)
        agree(torch.func.functional_call(subject.plain, named, subject.x), wanted)
        with frozen_weights():
            agree(torch.func.functional_call(subject.promised, named, subject.x), wanted)
            agree(subject.promised(subject.x), subject.model(subject.x))


def _deepcopy(subject: Subject) -> None:
    other = subject.beside(copy.deepcopy(subject.model))
    for one in (other, subject):
        one.train([torch.optim.SGD(one.model.parameters(), lr=0.1)], None)
        other.evaluate()
        subject.evaluate()


def _to(subject: Subject) -> None:
    before = subject.form.x.dtype
    for dtype in (*subject.form.dtypes, before):
        subject.model.to(dtype)
        subject.x = subject.form.x.to(dtype)
        subject.evaluate()


CHANGES: dict[str, Callable[[Subject], None]] = {
    "load_state_dict": _load_state_dict,
    "EMA": _ema,
    "functional_call": _functional_call,
    "deepcopy": _deepcopy,
    "to": _to,
}
"""By name: what else may happen to a model after it was compiled."""

# ---- optimizers -------------------------------------------------------------------------------------------------

_RATES = {"SGD": 0.1, "Rprop": 0.01, "Adadelta": 1.0, "LBFGS": 0.1}
OPTIMIZERS = [
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and kind is not torch.optim.Optimizer and name != "SparseAdam"  # of sparse gradients
]
VARIANTS = ["default", "foreach", "fused", "compiled step", "GradScaler"]


def optimizers(name: str, variant: str, model: nn.Module) -> tuple[list[Any], Any]:
    """Optimizers for a model's parameters, and a gradient scaler or None; in the default variant where a class has no
    such one."""
    kind, rate = getattr(torch.optim, name), _RATES.get(name, 0.02)
    parameters = list(model.parameters())
    flat = [one for one in parameters if name == "Muon" and one.dim() != 2]
    mine = [one for one in parameters if not any(one is other for other in flat)]
    try:
        made = [kind(mine, lr=rate, **{variant: True} if variant in ("foreach", "fused") else {})]
    except (TypeError, RuntimeError):
        made = [kind(mine, lr=rate)]
    made += [torch.optim.SGD(flat, lr=rate)] if flat else []
    if variant == "compiled step" and name != "LBFGS":
        for one in made:
            one.step = torch.compile(one.step, backend="eager")
    scaled = variant == "GradScaler" and name != "LBFGS"
    return made, torch.amp.GradScaler(parameters[0].device.type, init_scale=8.0) if scaled else None


# ---- the matrix -------------------------------------------------------------------------------------------------


def pairs(*axes: Sequence[Any], seed: int = 0) -> Iterator[tuple[Any, ...]]:
    """Few tuples, one value of each axis, in which every two values of two axes meet."""
    places = list(itertools.combinations(range(len(axes)), 2))
    left = {(i, j, a, b) for i, j in places for a in axes[i] for b in axes[j]}
    draw = random.Random(seed)
    while left:
        i, j, a, b = min(left, key=repr)
        fixed = {i: a, j: b}
        drawn = ([fixed.get(place, draw.choice(axis)) for place, axis in enumerate(axes)] for _ in range(40))
        met = lambda case: {(i, j, case[i], case[j]) for i, j in places}  # noqa: E731
        best = max(drawn, key=lambda case: len(left & met(case)))
        left -= met(best)
        yield tuple(best)


def check(form: Form, optimizer: str, variant: str, change: str, backend: Any) -> None:
    """Train, write in every way, change in one, and compare with eager after each."""
    torch._dynamo.reset()
    subject = Subject(form.make(), form, backend)
    made, scaler = optimizers(optimizer, variant, subject.model)
    subject.evaluate()
    for way in WRITES.values():
        subject.train(made, scaler)
        subject.evaluate()
        write(subject.model, form.masks, way)
        subject.evaluate()
    CHANGES[change](subject)
    subject.evaluate()
