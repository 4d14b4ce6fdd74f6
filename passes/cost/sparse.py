"""Whether a product with a sparse weight is faster sparse or dense: the kernels' own estimates against a roofline.

A training step is three products. On a CPU the same is asked of torch's own products. Where nothing is known of the
dtype, the product stays sparse, as it was written.
"""

from dataclasses import replace
from math import inf, prod
from typing import Any, NamedTuple, Protocol

import torch

from sparsecomp import _compat
from sparsecomp.lowering.cache.signature import NO_TRITON, Device, has_triton
from sparsecomp.lowering.launch.epilogue import described_output
from sparsecomp.lowering.sparse.launcher import launcher_of, multiplied_as, writer_of
from sparsecomp.lowering.tuning import cost, host
from sparsecomp.lowering.tuning.cards import Card
from sparsecomp.lowering.tuning.ceilings import Target, card_of, target_of
from sparsecomp.lowering.tuning.host import Time
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.passes.cost import cpu as cpu_cost
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.dense import DenseWork, time_of
from sparsecomp.reference.frozen import are_frozen
from sparsecomp.reference.patterns import Layout, stored_shape
from sparsecomp.reference.precision import KERNEL_DTYPES
from sparsecomp.report import Estimate
from sparsecomp.tensor.sparse_tensor import SparseTensor


class Product(NamedTuple):
    """A product S (m, k) times dense (k, n), as kernels see it.

    Attributes:
        device: "cuda" or another.
        layout: of S, as the launcher that multiplies it takes it; see `multiplied_as`.
        n, batch: sizes.
        entries: elements or blocks that are stored.
        dtype: of all operands.
        linear: dense's columns lie contiguous, and the result's.
        bias, residual: whether there are such.
        activation: of the epilogue.
        described: for the report.
        constant: whether a dense copy of S can be kept from call to call, since S stays.
        trained: whether gradients are asked for.
        replayed: whether a CUDA graph is replayed, so that the host's time does not count.
        products: of the whole graph, which share what a call takes the host besides.
        target: the card to estimate for, None for that of the device.
        compared: whether a dense copy can be kept that each call compares with S.
        tuned: whether Inductor multiplies one row by a kernel of its own; see `passes.engine.rule.writes_one_row`.
    """

    device: torch.device
    layout: Layout
    n: int
    batch: int
    entries: int
    dtype: torch.dtype
    linear: bool
    bias: bool
    residual: bool
    activation: str
    described: str
    constant: bool = False
    trained: bool = False
    replayed: bool = True
    products: int = 1
    target: Target | None = None
    compared: bool = False
    tuned: bool = False

    @property
    def m(self) -> int:
        """Rows of S."""
        return self.layout.shape[0]

    @property
    def k(self) -> int:
        """Columns of S."""
        return self.layout.shape[1]

    @property
    def stored(self) -> int:
        """Numbers that are stored."""
        return self.entries * prod(self.layout.entry)

    @property
    def card(self) -> Card:
        """Of the estimate."""
        return card_of(self.device) if self.target is None else self.target.card

    def waited(self, time: Time) -> float:
        """Seconds that a caller waits for the product, if it takes this time."""
        return time.waited(self.replayed, host.besides(self.trained, self.products))

    @classmethod
    def of(
        cls, layout: Layout, entries: int, transpose: bool, dense: list[int], linear: bool, out: Any, bias: bool,
        residual: bool, activation: str, *, format: str | None = None, **how: Any,
    ) -> "Product":  # fmt: skip
        """The product of a matrix, or of its transpose, with a tensor of shape `dense`.

        Args:
            layout, transpose, linear: as of `sparsecomp.ops.sparse_linear` and `sparsecomp.ops.sparse_matmul`.
            entries: elements stored, or blocks.
            out: the result, or what stands for it.
            format: for the report; by default that of the layout.
            how: `trained`, `replayed`, `products`, `target`, `tuned`.
        """
        layout, kind = layout._replace(shape=tuple(map(_expected, layout.shape))), layout.kind
        multiplied = multiplied_as(layout, transpose)
        leading = torch.Size(dense[:-1] if linear else dense[:-2]).numel()
        named = format or (getattr(kind, "TWIN", kind) if transpose else kind).__name__
        device = torch.device("cuda") if how.get("target") else out.device
        product = cls(
            device, multiplied, leading if linear else dense[-1], 1 if linear else leading, entries, out.dtype, linear,
            bias, residual, activation, described="", **how,
        )  # fmt: skip
        (m, k), share = multiplied.shape, 1 - product.stored / max(prod(multiplied.shape), 1)
        return product._replace(described=f"{named} {m}x{k} at {share:.1%} sparsity")

    @classmethod
    def of_tensor(cls, sparse: SparseTensor, dense: list[int], *rest: Any, **how: Any) -> "Product":
        """`of` for a SparseTensor."""
        pattern = sparse.pattern
        layout, transpose = pattern.layout, pattern.stored_by_columns(sparse._transpose)
        stored = _expected(sparse._values.numel()) // prod(layout.entry)
        return cls.of(layout, stored, transpose, dense, *rest, format=sparse.format, **how)


def _expected(size: int | torch.SymInt) -> int:
    """A size as it was in the example; 0 if it had none."""
    return _compat.size_hint(size) or 0


def decide(product: Product) -> Decision:
    """The faster way by estimate: dense, or a kernel."""
    kind = product.device.type
    if kind == "cpu" and product.dtype is torch.float32:
        return _compare_on_cpu(product)
    if kind == "cuda" and product.dtype in KERNEL_DTYPES:
        if has_triton():
            return compare(product, *(product.target or target_of(product.device)))
        return Decision(f"spmm_{product.layout.format} (reference)", f"no estimate, sparse as written. {NO_TRITON}")
    reason = f"no estimate of {product.dtype} on {kind}: sparse as written"
    return Decision(f"spmm_{product.layout.format} (reference)", reason)


def compare(product: Product, device: Device, card: Card) -> Decision:
    """`decide` for a CUDA device that is such a card."""
    sparse, kernel = sparse_seconds(product, device, card)
    seconds = {kernel: sparse, "dense": dense_seconds(product, card)}
    decision = _faster(product, seconds, _layer_seconds(product, card))
    return decision._replace(reason=decision.reason + _not_by_library(product, device))


def beside_the_layer(product: Product, decision: Decision) -> Estimate | None:
    """What runs beside the dense layer that could stand in its place, which has no weight to write out."""
    ran = decision.estimate
    return None if ran is None else replace(ran, dense_seconds=dense_layer_seconds(product))


def dense_layer_seconds(product: Product) -> float:
    """Seconds of the dense layer of these sizes."""
    if product.device.type == "cpu":
        return cpu_cost.layer_seconds(_work(product), product.trained)
    return _layer_seconds(product, product.card)


def _faster(product: Product, seconds: dict[str, float], layer: float) -> Decision:
    """The faster of two ways, with the plain dense layer's time too in the reason: the report's gain is over that."""
    if product.constant:
        return fastest(seconds)
    decision = fastest(seconds, rival="by a compared copy" if product.compared else "written out")
    return decision._replace(reason=f"{decision.reason}, {layer * 1e6:.1f} us as a plain dense layer")


def _layer_seconds(product: Product, card: Card) -> float:
    gradients = [_dense_product(product, card)] * 2 * product.trained
    return product.waited(_forward(product, card).plus(*gradients, _by_autograd(product, 3)))


def _by_autograd(product: Product, operators: int) -> Time:
    """What so many operators take more in a training step."""
    return Time(0.0, operators * product.trained * host.AUTOGRAD)


def _work(product: Product) -> cpu_cost.Work:
    p = product
    return cpu_cost.Work(p.layout.format, p.layout.entry, p.m, p.k, p.n * p.batch, p.stored)


def _compare_on_cpu(product: Product) -> Decision:
    p, work = product, _work(product)
    dense, sparse = cpu_cost.dense_on_cpu(work, p.trained, p.constant), cpu_cost.sparse_on_cpu(work, p.trained)
    seconds = {f"spmm_{p.layout.format} (reference)": sparse, "dense": dense}
    return _faster(product, seconds, cpu_cost.layer_seconds(work, p.trained))


def dense_seconds(product: Product, card: Card) -> float:
    """Seconds to multiply densely, and to write the weight out if that is not done once for all calls."""
    p, forward = product, _forward(product, card)
    if not p.trained:
        kept = Time(0.0, 0.0) if p.constant else _comparing(p, card) if p.compared else _writing(p, card)
        return p.waited(forward.plus(kept))
    return p.waited(forward.plus(*[_dense_product(p, card)] * 2, *[_writing(p, card)] * 2, _by_autograd(p, 5)))


def dense_layer_time(product: Product) -> Time:
    """What the dense layer of these sizes takes a GPU and its host, in inference."""
    return _forward(product, product.card)


def _forward(product: Product, card: Card) -> Time:
    """The dense product and what follows it."""
    p, forward = product, _dense_product(product, card)
    if p.activation == "relu" and not p.residual and fuses_relu(p, card):
        forward = forward.plus(Time(0.0, host.MATMUL_RELU))
    elif p.residual or p.activation != "none":
        forward = forward.plus(Time(0.0, host.LAUNCH))  # what follows is one kernel of Inductor's
    return forward


def fuses_relu(product: Product, card: Card) -> bool:
    """Whether a dense product does the ReLU: in inference, with a bias.

    In float32 cuBLASLt then is up to 1.2 times slower (H100, 64 rows of 4096), so there only where the device waits
    for the host anyway.
    """
    p = product
    if not p.linear or not p.bias or p.trained:
        return False
    if p.dtype.itemsize == 2:
        return True
    ahead = host.MATMUL + host.besides(p.trained, p.products)
    return p.dtype is torch.float32 and not p.replayed and _WAITS * _dense_product(p, card).device < ahead


_WAITS = 3
"""How many times longer than the device by estimate the host must take, for the device to wait in any case."""


def _dense_product(product: Product, card: Card) -> Time:
    p = product
    elements, ahead = p.m * p.k + p.batch * (p.k + p.m) * p.n, 0.0
    if _is_by_inductor(p):
        elements /= card.one_row
    elif p.batch == 1 and p.n <= _FEW_ROWS:
        large = p.dtype.itemsize == 2 and p.m * p.k >= _LARGE
        reached, ahead = (card.large_rows, card.large_rows_ahead) if large else (card.few_rows, 0.0)
        elements /= reached * (card.long_rows if p.k >= 2 * p.m else 1)
    time = time_of(DenseWork(2.0 * p.m * p.k * p.n * p.batch, elements, p.dtype), card)
    assert time is not None, f"no product of {p.dtype} is estimated"
    return time.plus(Time(ahead, 0.0))


def _is_by_inductor(product: Product) -> bool:
    p = product
    return p.tuned and p.linear and not p.bias and not p.trained and p.n == 1


_FEW_ROWS = 64
"""Rows of a layer's input up to which the weight's bytes are the time."""
_LARGE = 2**22
"""Elements of a half-precision weight from which on what its product takes ahead was measured."""


def _writing(product: Product, card: Card) -> Time:
    """To write the weight out, or to read a gradient at its places."""
    p, size = product, product.dtype.itemsize
    written = p.m * p.k * size + p.stored * (size + 4)
    launches = 1 if p.layout.plain or writer_of(p.layout) else _OTHER_LAUNCHES
    return Time(written / card.bandwidth + launches * card.launch, host.OPERATOR + launches * host.LAUNCH)


def _comparing(product: Product, card: Card) -> Time:
    """To read the weight and find its copy unchanged."""
    p = product
    read = p.stored * (p.dtype.itemsize + 4) + p.m * _COMPARED_ROW
    return Time(read / (card.compared * card.bandwidth) + card.launch, host.OPERATOR + host.LAUNCH)


_COMPARED_ROW = 2048
"""Bytes that are read in the time of a row's program, beside its entries (an H200)."""
_OTHER_LAUNCHES = 8
"""Operators of torch's by which blocks and groups are written out, or sampled."""


def sparse_seconds(product: Product, device: Device, card: Card) -> tuple[float, str]:
    """Seconds of the best candidate by its own cost, and its template's name; loads Triton.

    Infinite if no kernel takes the product.
    """
    forward, kernel = product_time(product, device, card)
    if not product.trained or forward.device == inf:
        return product.waited(forward), kernel
    if not product.layout.kind.ORDERED:
        return inf, kernel  # its values are brought in CSR's order in each step
    flipped = product._replace(
        layout=multiplied_as(product.layout, True), bias=False, residual=False, activation="none"
    )  # fmt: skip
    backward, _ = product_time(flipped, device, card)
    rest = (
        backward, _reordering(product, card), _sampling_time(product, device, card), _by_autograd(product, 3)
    )  # fmt: skip
    return product.waited(forward.plus(*rest)), kernel


def product_time(product: Product, device: Device, card: Card) -> tuple[Time, str]:
    """Time and template of the best kernel for the product itself; infinite if there is none."""
    operations, problem = problem_of(product)
    candidates = [one for operation in operations for one in operation.candidates(problem, device)]
    return fastest_candidate(candidates, problem, product, card, f"spmm_{product.layout.format}")


class Waiting(Protocol):
    """What a candidate is one of the ways to do."""

    @property
    def replayed(self) -> bool:
        """Whether a CUDA graph is."""
        ...

    def waited(self, time: Time) -> float:
        """Seconds that a caller waits, if it takes this time."""
        ...


def fastest_candidate(
    candidates: list[Any], problem: Any, product: Waiting, card: Card, otherwise: str = ""
) -> tuple[Time, str]:
    """Time and template of the best candidate; infinite without one."""
    best: dict[str, tuple[float, Any]] = {}  # of each template: its launch asks the device's time alone
    for candidate in candidates:
        name, seconds = candidate.template.name, cost.seconds(candidate, problem, card)
        if name not in best or seconds < best[name][0]:
            best[name] = seconds, candidate
    times = [
        (Time(seconds, 0.0 if product.replayed else _host_seconds(candidate, problem)), candidate.template.name)
        for seconds, candidate in best.values()
    ]
    return min(times, key=lambda one: (product.waited(one[0]), one[0].device), default=(Time(inf, inf), otherwise))


def _host_seconds(candidate: Any, problem: Any) -> float:
    return host.OPERATOR + candidate.template.prepare(problem, candidate.config).host_seconds


def _reordering(product: Product, card: Card) -> Time:
    """To bring the values in the order of the transpose, and to see that it is still that of the matrix."""
    p, size = product, product.dtype.itemsize
    return Time((p.stored * 2 * size + p.entries * 12) / card.bandwidth + card.launch, host.LAUNCH)


def _sampling_time(product: Product, device: Device, card: Card) -> Time:
    """The gradient by the values; for blocks and groups torch's products of them."""
    from sparsecomp.lowering.sparse.sddmm import SDDMM, weight_gradient

    p = product
    if not p.layout.plain:
        return _dense_product(p, card).plus(Time(0.0, _OTHER_LAUNCHES * host.LAUNCH))
    problem = weight_gradient(p.n, p.m, p.k, p.entries, p.dtype, torch.int32, p.layout.skews[0])
    return fastest_candidate(SDDMM.candidates(problem, device), problem, p, card)[0]


def _not_by_library(product: Product, device: Device) -> str:
    """For the report: why sparse tensor cores are out of the question for a 2:4 weight; nothing if they are not."""
    (_, *libraries), problem = problem_of(product)
    reasons = [reason for library in libraries for reason in library.refusals(problem, device).values()]
    return "".join(f"; not on sparse tensor cores: {reason}" for reason in reasons)


def problem_of(product: Product) -> tuple[tuple[Operation[Any], ...], Any]:
    """The product as launchers describe it, and the operations that can do it."""
    p = product
    entries = torch.empty(p.entries, dtype=p.dtype, device="meta")
    values = entries.new_empty(stored_shape((entries,) * p.layout.own, p.layout))
    dense, out = (
        values.new_empty(p.batch, p.n, rows).mT if p.linear else values.new_empty(p.batch, rows, p.n)
        for rows in (p.k, p.m)
    )
    dtypes = (p.dtype if p.bias else None, p.dtype if p.residual else None)
    described = described_output(out, "row" if p.linear else "column", *dtypes, p.activation)
    launcher = launcher_of(p.layout)
    operations, problem = launcher.operations(p.layout), launcher.problem_of(values, p.layout, dense, out, described)
    if len(operations) > 1:
        problem = problem._replace(guarded=not are_frozen())
    return operations, problem
