"""RESU on a GPU: the effective weight, training steps and folded masks beside eager PyTorch, Inductor and dense layers.

Times are of CUDA graph replays. A floor is the bytes that must move over the bandwidth of a copy of the same machine.
What cannot run is recorded with its reason.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.timing import graph_ms
from sparsecomp import ops
from sparsecomp.lowering.trial import first_line
from sparsecomp.nn import RESULinear, masked_weights, wrap_module
from sparsecomp.ops.effective_weight import pruned_before
from sparsecomp.ops.selective_step import reference
from sparsecomp.runtime import RESUAdamW

SPARSITY = 0.7
Row = dict[str, Any]
STEP: dict[str, Any] = {
    "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "tau": 0.5, "delta": 1e-12, "warm_up": 10,
}  # fmt: skip


def run() -> Iterator[Row]:
    """All rows, as they are measured."""
    torch.manual_seed(0)
    for case in cases():
        torch.cuda.empty_cache()
        yield case()


def cases() -> list[Callable[[], Row]]:
    """What ``run`` measures, one callable a row."""
    found: list[Callable[[], Row]] = [lambda size=size: _effective(size) for size in (4096, 8192)]
    found += [lambda dtype=dtype: _forward(dtype) for dtype in (torch.float32, torch.bfloat16)]
    found += [lambda size=size: _step(size) for size in (4096, 8192)]
    found += [lambda dtype=dtype: _training(dtype) for dtype in (torch.float32, torch.bfloat16)]
    for dtype in (torch.float16, torch.float32):
        found += [lambda share=share, dtype=dtype: _constant(share, dtype) for share in (0.5, 0.7, 0.9)]
    found += [lambda rows=rows: _two_of_four(rows) for rows in (2048, 4096)]
    return [*found, _memory]


def _masked(size: int, dtype: torch.dtype = torch.float32, sparsity: float = SPARSITY) -> tuple[Tensor, ...]:
    """A weight, its mask, theta and the flat positions of its pruned elements."""
    mask = torch.rand(size, size, device="cuda") > sparsity
    pruned = (~mask).reshape(-1).nonzero().reshape(-1).int()
    weight = torch.randn(size, size, device="cuda").to(dtype) / size**0.5
    return weight, mask, torch.randn(pruned.numel(), device="cuda").to(dtype), pruned


def _bandwidth() -> float:
    """Bytes a second of a large copy, both ways counted."""
    one = torch.empty(2**28, device="cuda", dtype=torch.uint8)
    two = torch.empty_like(one)
    return 2 * one.numel() / (graph_ms([lambda: two.copy_(one)] * 3) * 1e-3)


def _timed(row: Row, name: str, call: Callable[[], Any]) -> None:
    try:
        for _ in range(3):
            call()
        row["ms"][name] = graph_ms([call] * 3, 10)
    except Exception as error:
        row.setdefault("left out", {})[name] = first_line(error)


def _finished(row: Row, rival: str, ours: str = "ours", **floors: float) -> Row:
    times = row["ms"]
    if ours in times and rival in times:
        row["gain"] = times[rival] / times[ours]
    row |= {f"over {name}": times[ours] / floor for name, floor in floors.items() if ours in times}
    print({key: value for key, value in row.items()}, flush=True)
    return row


def _effective(size: int) -> Row:
    weight, mask, theta, pruned = _masked(size)
    before, shares, where = pruned_before(mask), mask.float(), pruned.long()

    def eager() -> Tensor:
        phi = torch.zeros_like(weight).view(-1).index_copy(0, where, theta).view_as(weight)
        return shares * weight + (1 - shares) * phi

    row: Row = {"case": f"effective weight {size}x{size} float32, 70 %", "ms": {}}
    _timed(row, "ours", lambda: ops.effective_weight(weight, theta, mask, before))
    _timed(row, "eager", eager)
    _timed(row, "inductor", torch.compile(eager, dynamic=False))
    row["error"] = float((ops.effective_weight(weight, theta, mask, before) - eager()).abs().max())
    floor = (mask.numel() * 9 + theta.numel() * 4) / _bandwidth() * 1e3
    return _finished(row, "inductor", floor=floor)


def _forward(dtype: torch.dtype) -> Row:
    layer = nn.Linear(4096, 4096, device="cuda", dtype=dtype)
    resu = wrap_module(nn.Linear(4096, 4096, device="cuda", dtype=dtype))
    assert isinstance(resu, RESULinear)
    resu.masked.prune_(resu.weight, torch.rand_like(resu.weight.float()) > SPARSITY)
    resu.masked.enter_resu_(resu.weight)
    x = torch.randn(1024, 4096, device="cuda").to(dtype)
    row: Row = {"case": f"RESU linear forward, 4096x4096, 1024 rows, {str(dtype)[6:]}", "ms": {}}
    with torch.no_grad():
        _timed(row, "ours", lambda: resu(x))
        _timed(row, "dense linear", lambda: layer(x))
    return _finished(row, "dense linear")


def _step(size: int) -> Row:
    weight, mask, theta, pruned = _masked(size)
    grad, before = torch.randn_like(weight), pruned_before(mask)
    slots = [torch.zeros(pruned.numel(), device="cuda") for _ in range(3)]
    steps = torch.full((), 20, device="cuda")
    held, own = torch.empty_like(theta), [slot.clone() for slot in slots]
    numbers = STEP["lr"], *STEP["betas"], *(STEP[name] for name in ("eps", "weight_decay", "tau", "delta", "warm_up"))
    everything = torch.arange(pruned.numel(), device="cuda")
    def shared() -> None:
        ops.selective_step(weight, grad, pruned, *slots, steps, **STEP)

    def apart() -> None:
        """The separate form: gradients of W and theta, and the step on theta."""
        grad * mask
        held.copy_(grad.view(-1)[pruned.long()])
        reference(theta, held, everything, *own, steps, *numbers)

    row: Row = {"case": f"RESU backward of the weight and selective AdamW step, {size}x{size} float32, 70 %", "ms": {}}
    _timed(row, "ours", shared)
    _timed(row, "eager composition, shared", lambda: reference(weight, grad, pruned, *own, steps, *numbers))
    _timed(row, "eager composition, separate", apart)
    _timed(row, "gradients of the separate form", lambda: ops.split_pruned(grad, mask, theta.numel(), before))
    floor = (pruned.numel() * (4 + 3 * 8) + mask.numel() * 12) / _bandwidth() * 1e3
    return _finished(row, "eager composition, shared", floor=floor)


class _Separate(nn.Module):
    """What a user writes: mask * weight + (1 - mask) * phi, with theta scattered to phi."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        weight, mask, theta, pruned = _masked(size, dtype)
        self.weight, self.theta = nn.Parameter(weight), nn.Parameter(theta)
        self.mask: Tensor
        self.where: Tensor
        self.register_buffer("mask", mask.to(dtype))
        self.register_buffer("where", pruned.long())

    def forward(self, x: Tensor) -> Tensor:
        phi = torch.zeros_like(self.weight).view(-1).index_copy(0, self.where, self.theta).view_as(self.weight)
        return F.linear(x, self.mask * self.weight + (1 - self.mask) * phi)


def _training(dtype: torch.dtype) -> Row:
    user = _Separate(4096, dtype)
    resu = wrap_module(nn.Linear(4096, 4096, bias=False, device="cuda", dtype=dtype))
    assert isinstance(resu, RESULinear)
    with torch.no_grad():
        resu.weight.copy_(user.weight)
    resu.masked.prune_(resu.weight, user.mask > 0)
    resu.masked.enter_resu_(resu.weight, user.theta)
    x = torch.randn(1024, 4096, device="cuda").to(dtype)
    out = torch.randn(1024, 4096, device="cuda").to(dtype)

    def step(layer: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        return lambda: layer(x).backward(out)

    row: Row = {"case": f"masked linear, forward and backward, 4096x4096, 1024 rows, {str(dtype)[6:]}", "ms": {}}
    _timed(row, "ours", step(resu))
    _timed(row, "user's code, eager", step(user))
    _timed(row, "user's code, inductor", step(torch.compile(user, dynamic=False)))
    torch._dynamo.reset()
    _timed(row, "user's code, sparsecomp", step(torch.compile(user, backend="sparsecomp", dynamic=False)))
    return _finished(row, "user's code, inductor")


class _Constant(nn.Module):
    """A pruned layer as users keep it: a weight and a mask."""

    def __init__(self, weight: Tensor, mask: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.mask: Tensor
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.linear(x, self.mask * self.weight))


def _folded(case: str, layer: _Constant, rows: int) -> Row:
    dense = nn.Sequential(nn.Linear(4096, 4096, bias=False, device="cuda", dtype=layer.weight.dtype), nn.ReLU())
    with torch.no_grad():
        dense[0].weight.copy_(layer.weight * layer.mask)
    x = torch.randn(rows, 4096, device="cuda").to(layer.weight.dtype)
    row: Row = {"case": case, "ms": {}}
    with torch.no_grad(), ops.frozen_weights():
        ours = torch.compile(layer, backend="sparsecomp", dynamic=False)
        _timed(row, "ours", lambda: ours(x))
        row["chosen"] = _choice()
        stock = torch.compile(dense, dynamic=False)
        _timed(row, "inductor, dense folded", lambda: stock(x))
        unfolded = torch.compile(layer, dynamic=False)
        _timed(row, "inductor, user's code", lambda: unfolded(x))
    return _finished(row, "inductor, dense folded")


def _choice() -> str:
    import sparsecomp

    report = sparsecomp.last_report()
    sites = [site for site in (report.sites if report else []) if site.rule == "masked_weight"]
    return "; ".join(f"{site.implementation}: {site.reason}" for site in sites)


def _constant(sparsity: float, dtype: torch.dtype) -> Row:
    torch._dynamo.reset()
    weight, mask, *_ = _masked(4096, dtype, sparsity)
    case = f"constant mask, inference, {sparsity:.0%}, 4096x4096, 2048 rows, {str(dtype)[6:]}"
    return _folded(case, _Constant(weight, mask), 2048)


def _two_of_four(rows: int) -> Row:
    torch._dynamo.reset()
    weight = torch.randn(4096, 4096, device="cuda").half() / 64
    mask = torch.zeros(4096, 1024, 4, dtype=torch.bool, device="cuda")
    mask.scatter_(-1, weight.view(4096, 1024, 4).abs().topk(2).indices, True)
    layer = _Constant(weight, mask.view(4096, 4096))
    return _folded(f"constant mask, inference, 2:4, 4096x4096, {rows} rows, float16", layer, rows)


def _memory() -> Row:
    def peak(prepare: Callable[[nn.Module], torch.optim.Optimizer]) -> float:
        torch.cuda.empty_cache()
        model = nn.Sequential(*(nn.Linear(4096, 4096, device="cuda") for _ in range(8)))
        optimizer = prepare(model)
        x = torch.randn(256, 4096, device="cuda")
        for count in range(3):
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()
            if not count:
                torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() / 2**20

    def resu(model: nn.Module) -> torch.optim.Optimizer:
        wrap_module(model)
        for weight, masked in masked_weights(model).values():
            masked.prune_(weight, torch.rand_like(weight) > SPARSITY)
            masked.enter_resu_(weight)
        return RESUAdamW(model)

    row: Row = {"case": "peak memory of a training step, 8 layers of 4096x4096, float32, 70 %", "MiB": {}}
    row["MiB"]["dense, AdamW"] = peak(lambda model: torch.optim.AdamW(model.parameters()))
    row["MiB"]["RESU phase, RESUAdamW"] = peak(resu)
    elements = 8 * 4096**2
    row["MiB"]["allowed: two slots a pruned element and a bit an element"] = (
        row["MiB"]["dense, AdamW"] + (elements * SPARSITY * 8 + elements / 8) / 2**20
    )
    print(row, flush=True)
    return row
