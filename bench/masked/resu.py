"""RESU on a GPU: the effective weight, training steps and folded masks beside eager PyTorch, Inductor and dense layers.

Times are of CUDA graph replays. A floor is the bytes that must move over the bandwidth of a copy on the same machine:
of a gathered operand those of its whole rows, since at 70 % of 4-byte elements (1 - 0.3^8) every sector of 32 bytes
holds a pruned one. A row that fails says why and stops no other.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsecomp
from bench.timing import bandwidth, graph_ms, guarded, host_us, loop_ms
from sparsecomp import ops
from sparsecomp.lowering.tuning.trial import first_line
from sparsecomp.nn import RESULinear, masked_weights, wrap_module
from sparsecomp.ops.masked.selective_step import step_reference
from sparsecomp.runtime import RESUAdamW

SPARSITY = 0.7
COPIES = 3
"""Sets of operands rotated through, where one of them would fit the L2 cache."""
STEP: dict[str, Any] = {
    "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "tau": 0.5, "delta": 1e-12, "warm_up": 10,
}  # fmt: skip
_REST: dict[str, Any] = {key: value for key, value in STEP.items() if key != "betas"} | {"beta": 0.9, "beta2": 0.999}
"""The same for the reference."""

Row = dict[str, Any]
Call = Callable[[], Any]


def run() -> Iterator[Row]:
    """All rows, as they are measured; milliseconds unless said otherwise."""
    for case in cases():
        torch.manual_seed(0)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        try:
            row = case()
        except Exception as error:
            row = {"case": f"{case.func.__name__.strip('_')} {case.args}", "failed": first_line(error)}
        print(row, flush=True)
        yield row


def cases() -> list[partial[Row]]:
    """What `run` measures, one callable a row."""
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    found = [partial(_effective_weight, size, dtype) for dtype in (f32, bf16) for size in (4096, 8192)]
    found += [partial(_its_gradients, size) for size in (4096, 8192)]
    found += [partial(_forward, dtype) for dtype in (bf16, f32)]
    found += [partial(_selective_step, size, dtype) for dtype in (f32, bf16) for size in (4096, 8192)]
    found += [partial(_selection, dtype) for dtype in (f32, bf16)]
    found += [partial(_backward_and_step, dtype) for dtype in (bf16, f32)]
    found += [partial(_training, "mask", 4096, dtype) for dtype in (bf16, f32)]
    found += [partial(_training, "theta", size, dtype) for size in (2048, 4096, 8192) for dtype in (bf16, f32)]
    found += [partial(_constant, share, dtype) for dtype in (f16, bf16, f32) for share in (0.5, 0.7, 0.9)]
    found += [partial(_two_of_four, rows, dtype) for dtype in (f16, bf16) for rows in (1024, 2048, 4096)]
    return [*found, partial(_memory), partial(_host)]


def _masked(size: int, dtype: torch.dtype = torch.float32, sparsity: float = SPARSITY) -> tuple[Tensor, ...]:
    """A weight, its mask, theta and the flat positions of its pruned elements."""
    mask = torch.rand(size, size, device="cuda") > sparsity
    pruned = (~mask).reshape(-1).nonzero().reshape(-1).int()
    weight = torch.randn(size, size, device="cuda").to(dtype) / size**0.5
    return weight, mask, torch.randn(pruned.numel(), device="cuda").to(dtype), pruned


def _slots(pruned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third = (torch.rand(pruned.numel(), device="cuda") for _ in range(3))
    return first, second, third


def _clock() -> tuple[Tensor, Tensor]:
    """The number of steps and the learning rate."""
    return torch.full((), 20, device="cuda"), torch.full((), 1e-3, device="cuda", dtype=torch.float64)


def _row(case: str, **variants: Call | Sequence[Call]) -> Row:
    return _timed({"case": case, "ms": {}}, **variants)


def _timed(row: Row, **variants: Call | Sequence[Call]) -> Row:
    """Each variant's time; the names' underscores are spaces. One that cannot run is left out with its reason."""
    for key, calls in variants.items():
        name, rotated = key.replace("_", " "), [calls] * 3 if callable(calls) else list(calls)
        guarded(row, name, partial(_time, row["ms"], name, rotated))
    return row


def _time(times: dict[str, float], name: str, rotated: list[Call]) -> None:
    for call in rotated * 2:
        call()
    times[name] = graph_ms(rotated, 10)


def _against(row: Row, rival: str, floor_bytes: float | None = None) -> Row:
    """How many times as fast as a rival ours is, and how many times the floor it takes."""
    times = row["ms"]
    if "ours" in times and rival in times:
        row[f"gain over {rival}"] = round(times[rival] / times["ours"], 3)
    if floor_bytes is not None:
        times["floor"] = floor_bytes / bandwidth() * 1e3
        if "ours" in times:
            row["over floor"] = round(times["ours"] / times["floor"], 3)
    return row


def _effective_weight(size: int, dtype: torch.dtype) -> Row:
    weight, mask, theta, pruned = _masked(size, dtype)
    shares, where = mask.to(dtype), pruned.long()

    def eager() -> Tensor:
        phi = torch.zeros_like(weight).view(-1).index_copy(0, where, theta).view_as(weight)
        return shares * weight + (1 - shares) * phi

    def ours() -> Tensor:
        with ops.frozen_weights():
            return ops.effective_weight(weight, theta, mask)

    row = _row(
        f"effective weight {size}x{size} {_name(dtype)}, {SPARSITY:.0%}", ours=ours,
        ours_with_the_mask_packed_in_each_call=lambda: ops.effective_weight(weight, theta, mask), eager=eager,
        inductor=torch.compile(eager, dynamic=False),
    )  # fmt: skip
    row["error"] = float((ours() - eager()).abs().max())
    item = weight.itemsize
    return _against(row, "inductor", mask.numel() * (2 * item + 1 / 8) + theta.numel() * item)


def _its_gradients(size: int) -> Row:
    grad, mask, theta, pruned = _masked(size)
    shares, where = mask.float(), pruned.long()

    def eager() -> tuple[Tensor, Tensor]:
        return grad * shares, (grad * (1 - shares)).view(-1)[where]

    def ours() -> tuple[Tensor, Tensor]:
        with ops.frozen_weights():
            return ops.split_pruned(grad, mask, theta.numel())

    row = _row(
        f"gradients of the effective weight {size}x{size} float32, {SPARSITY:.0%}", ours=ours, eager=eager,
        inductor=torch.compile(eager, dynamic=False),
    )  # fmt: skip
    row["error"] = float((ours()[1] - eager()[1]).abs().max())
    return _against(row, "inductor", mask.numel() * (8 + 1 / 8) + theta.numel() * 4)


def _resu_linear(size: int, dtype: torch.dtype) -> RESULinear:
    layer = wrap_module(nn.Linear(size, size, bias=False, device="cuda", dtype=dtype))
    assert isinstance(layer, RESULinear)
    layer.masked.prune_(layer.weight, torch.rand(size, size, device="cuda") > SPARSITY)
    layer.masked.enter_resu_(layer.weight)
    return layer


def _forward(dtype: torch.dtype) -> Row:
    dense = [nn.Linear(4096, 4096, bias=False, device="cuda", dtype=dtype) for _ in range(COPIES)]
    resu = [_resu_linear(4096, dtype) for _ in range(COPIES)]
    x = torch.randn(1024, 4096, device="cuda").to(dtype)
    with torch.no_grad():
        row = _row(
            f"RESU linear forward, 4096x4096, 1024 rows, {_name(dtype)}", ours=[partial(layer, x) for layer in resu],
            dense_linear=[partial(layer, x) for layer in dense],
        )  # fmt: skip
    return _against(row, "dense linear")


def _selective_step(size: int, dtype: torch.dtype) -> Row:
    """Behind a backward pass that is the dense layer's: theta lies in the weight, its gradient in the weight's."""
    weight, mask, _, pruned = _masked(size, dtype)
    grad = torch.randn(size, size, device="cuda").to(dtype)
    slots = _slots(pruned)
    steps, rate = _clock()

    def eager(count: Tensor | None = None) -> None:
        step_reference(weight, grad, pruned, *slots, steps, rate, **_REST, count=count)

    def ours(count: Tensor | None = None) -> None:
        ops.selective_step(weight, grad, pruned, *slots, steps, lr=rate, **STEP, count=count)

    moments = [torch.rand(size, size, device="cuda") for _ in range(2)]

    def in_moments() -> None:
        own = moments[0], slots[1], moments[1]
        ops.selective_step(weight, grad, pruned, *own, steps, lr=rate, **STEP, whole=True)

    averages, gone = torch.rand(size, size, device="cuda"), ~mask

    def by_mask() -> None:
        own = moments[0], averages, moments[1]
        ops.selective_step(weight, grad, gone, *own, steps, lr=rate, **STEP, whole=True)

    tenth = torch.tensor(pruned.numel() // 10, device="cuda")
    row = _row(
        f"selective AdamW step on theta {size}x{size} {_name(dtype)}, {SPARSITY:.0%}",
        ours=ours, eager=eager, inductor=torch.compile(eager, dynamic=False), in_AdamW_moments=in_moments,
        by_mask=by_mask, top_tenth=partial(ours, tenth), top_tenth_eager=partial(eager, tenth),
    )  # fmt: skip
    floor = 28 * pruned.numel() + 3 * weight.itemsize * mask.numel()
    return _against(_against(row, "eager"), "inductor", floor)


def _selection(dtype: torch.dtype) -> Row:
    """A tenth of a step's consistencies, which are as many as 70 % of a weight of 4096x4096."""
    numel = 11_700_000
    scores = [torch.rand(numel, device="cuda").to(dtype) for _ in range(COPIES)]
    count = numel // 10
    row = _row(
        f"selection of a tenth of {numel} {_name(dtype)}", ours=[partial(ops.select_largest, x, count) for x in scores],
        sort=[partial(torch.sort, x, descending=True, stable=True) for x in scores],
        topk=[partial(torch.topk, x, count, sorted=False) for x in scores],
    )  # fmt: skip
    return _against(_against(row, "topk"), "sort", numel * (scores[0].itemsize + 1))


def _backward_and_step(dtype: torch.dtype) -> Row:
    """Both products of the backward pass included; the eager composition keeps theta apart, as people write it."""
    weight, mask, theta, pruned = _masked(4096, dtype)
    x, out = (torch.randn(1024, 4096, device="cuda").to(dtype) for _ in range(2))
    shares, where, everything = mask.to(dtype), pruned.long(), torch.arange(pruned.numel(), device="cuda")
    slots, apart = _slots(pruned), _slots(pruned)
    steps, rate = _clock()

    def products() -> tuple[Tensor, Tensor]:
        return out @ weight, out.mT @ x

    def ours() -> None:
        ops.selective_step(weight, products()[1], pruned, *slots, steps, lr=rate, **STEP)

    def eager() -> Tensor:
        whole = products()[1]
        of_theta = (whole * (1 - shares)).view(-1)[where]
        step_reference(theta, of_theta, everything, *apart, steps, rate, **_REST, count=None)
        return whole * shares

    case = f"RESU backward and selective AdamW step, 4096x4096, 1024 rows, {_name(dtype)}, {SPARSITY:.0%}"
    row = _row(case, ours=ours, eager=eager, products_alone=products)
    times = row["ms"]
    if {"ours", "eager", "products alone"} <= times.keys():
        gain = (times["eager"] - times["products alone"]) / max(times["ours"] - times["products alone"], 1e-6)
        row["gain over eager without the products"] = round(gain, 3)
    return _against(row, "eager")


class _Masked(nn.Module):
    """A pruned layer as users keep it: a weight and a mask."""

    def __init__(self, weight: Tensor, mask: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.mask: Tensor
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.mask * self.weight)


class _WithTheta(_Masked):
    """mask * weight + (1 - mask) * phi, with theta scattered to phi."""

    def __init__(self, weight: Tensor, mask: Tensor, theta: Tensor, where: Tensor) -> None:
        super().__init__(weight, mask)
        self.theta = nn.Parameter(theta)
        self.where: Tensor
        self.register_buffer("where", where)

    def forward(self, x: Tensor) -> Tensor:
        phi = torch.zeros_like(self.weight).view(-1).index_copy(0, self.where, self.theta).view_as(self.weight)
        return F.linear(x, self.mask * self.weight + (1 - self.mask) * phi)


def _training(form: str, size: int, dtype: torch.dtype) -> Row:
    weight, mask, theta, pruned = _masked(size, dtype)
    user = _Masked(weight, mask.to(dtype))
    if form == "theta":
        user = _WithTheta(weight, mask.to(dtype), theta, pruned.long())
    x = torch.randn(1024, size, device="cuda").to(dtype).requires_grad_()
    out = torch.randn(1024, size, device="cuda").to(dtype)

    def step(layer: Callable[[Tensor], Tensor]) -> Call:
        return lambda: layer(x).backward(out)

    case = f"masked linear ({form}), forward and backward, {size}x{size}, 1024 rows, {_name(dtype)}"
    # what a graph captures may change unseen, but for this promise; without a graph none is needed
    with ops.frozen_weights():
        ours = step(torch.compile(user, backend="sparsecomp", dynamic=False))
        row = _row(case, ours=ours, eager=step(user), resu_layer=step(_resu_linear(size, dtype)))
    row["chosen"] = _choice()
    for name, backend in (("ours", "sparsecomp"), ("inductor", "inductor")):
        torch._dynamo.reset()
        launched = step(torch.compile(user, backend=backend, dynamic=False))
        if name == "inductor":
            _timed(row, inductor=launched)
        guarded(row, name, partial(_launched, row, name, launched))
    return _against(row, "inductor")


def _launched(row: Row, name: str, call: Call) -> None:
    """The time without a graph, which is the host's where that is the longer one."""
    row["ms"][f"{name}, no graph"] = loop_ms(call)


def _constant(sparsity: float, dtype: torch.dtype) -> Row:
    weight, mask, *_ = _masked(4096, dtype, sparsity)
    return _folded(f"{sparsity:.0%}", _Masked(weight, mask), 2048)


def _two_of_four(rows: int, dtype: torch.dtype) -> Row:
    weight = (torch.randn(4096, 4096, device="cuda") / 64).to(dtype)
    mask = torch.zeros(4096, 1024, 4, dtype=torch.bool, device="cuda")
    mask.scatter_(-1, weight.view(4096, 1024, 4).abs().topk(2).indices, True)
    return _folded("2:4", _Masked(weight, mask.view(4096, 4096)), rows)


def _folded(pattern: str, masked: _Masked, rows: int) -> Row:
    dtype = masked.weight.dtype
    dense = nn.Linear(4096, 4096, bias=False, device="cuda", dtype=dtype)
    inputs = [torch.randn(rows, 4096, device="cuda").to(dtype) for _ in range(COPIES)]
    layer = nn.Sequential(masked, nn.ReLU())
    with torch.no_grad(), ops.frozen_weights():
        dense.weight.copy_(masked.weight * masked.mask)
        compiled = torch.compile(layer, backend="sparsecomp", dynamic=False)
        case = f"constant mask, inference, {pattern}, 4096x4096, {rows} rows, {_name(dtype)}"
        row = _row(case, ours=[partial(compiled, x) for x in inputs])
        row["chosen"] = _choice()
        stock = {"inductor, dense folded": nn.Sequential(dense, nn.ReLU()), "inductor, as written": layer}
        for name, model in stock.items():
            torch._dynamo.reset()
            theirs = torch.compile(model, dynamic=False)
            _timed(row, **{name: [partial(theirs, x) for x in inputs]})
        row["error"] = float((compiled(inputs[0]) - F.relu(dense(inputs[0]))).abs().max())
    return _against(row, "inductor, dense folded")


def _choice() -> str:
    report = sparsecomp.last_report()
    sites = [site for site in (report.sites if report else []) if site.rule == "masked_weight"]
    return "; ".join(f"{site.implementation}: {site.reason}" for site in sites)


def _memory() -> Row:
    row: Row = {"case": f"peak memory of a training step, 8 layers of 4096x4096, float32, {SPARSITY:.0%}", "MiB": {}}
    figures = row["MiB"]
    figures["dense, AdamW"] = _peak(lambda model: torch.optim.AdamW(model.parameters()))
    figures["RESU phase, RESUAdamW"] = _peak(_in_resu)
    elements = 8 * 4096**2
    figures["allowed: two slots a pruned element and a bit an element"] = (
        figures["dense, AdamW"] + (elements * SPARSITY * 8 + elements / 8) / 2**20
    )
    return row


def _in_resu(model: nn.Module) -> torch.optim.Optimizer:
    wrap_module(model)
    for weight, masked in masked_weights(model).values():
        masked.prune_(weight, torch.rand_like(weight) > SPARSITY)
        masked.enter_resu_(weight)
    return RESUAdamW(model)


def _peak(prepare: Callable[[nn.Module], torch.optim.Optimizer]) -> float:
    """MiB at the worst moment of a step, once all states exist."""
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


def _host() -> Row:
    """Host time of ops on operands so small that the device is never the limit."""
    weight, mask, theta, pruned = _masked(64)
    grad, slots = weight.clone(), _slots(pruned)
    steps, rate = _clock()
    calls: dict[str, Call] = {
        "effective_weight": lambda: ops.effective_weight(weight, theta, mask),
        "split_pruned": lambda: ops.split_pruned(grad, mask, theta.numel()),
        "selective_step": lambda: ops.selective_step(weight, grad, pruned, *slots, steps, lr=rate, **STEP),
        "torch.where": lambda: torch.where(mask, weight, grad),
    }
    return {"case": "host microseconds of one eager call", "us": {name: host_us(call) for name, call in calls.items()}}


def _name(dtype: torch.dtype) -> str:
    return str(dtype)[6:]
