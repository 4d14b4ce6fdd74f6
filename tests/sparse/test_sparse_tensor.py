"""SparseTensor as a tensor: products and gradients, state, files, and refusal of whatever would make it dense."""

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from matrices import LAYOUTS
from torch import Tensor, nn
from torch.autograd import forward_ad

from sparsecomp import SparseTensor, formats
from sparsecomp.errors import FormatError, PatternError, SparseOperatorError

pytestmark = pytest.mark.quick_cases(3)

FORMATS = {**LAYOUTS, "BSR": {"block": (2, 2)}, "BCSC": {"block": (2, 2)}, "NM": {"n": 1, "m": 2}}


def masked(rows: int, cols: int, name: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight that the format stores exactly, and its mask."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator)
    if name == "NM":
        kept = weight.view(rows, cols // 2, 2).abs().argmax(-1, keepdim=True)
        mask = torch.zeros(rows, cols // 2, 2).scatter(-1, kept, 1.0).view(rows, cols)
    elif name in ("BSR", "BCSC"):
        blocks = (torch.rand(rows // 2, cols // 2, generator=generator) < 0.5).float()
        mask = blocks.repeat_interleave(2, 0).repeat_interleave(2, 1)
    else:
        mask = (torch.rand(rows, cols, generator=generator) < 0.4).float()
    return weight * mask, mask


def tensor(rows: int = 6, cols: int = 8, name: str = "CSR", **layout: object) -> SparseTensor:
    weight = masked(rows, cols, name)[0]
    return SparseTensor.from_dense(weight, getattr(formats, name), **(layout or FORMATS[name]))


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda w, x: F.linear(x[0], w),
    "linear of a vector": lambda w, x: F.linear(x[0, 0], w),
    "linear of 3 dimensions": lambda w, x: F.linear(x, w, x[0, 0, :6]),
    "w @ x": lambda w, x: w @ x[0].t(),
    "w @ batch": lambda w, x: w @ x.mT,
    "w @ vector": lambda w, x: w @ x[0, 0],
    "x @ w.t": lambda w, x: x @ w.t(),
    "x @ w.mT": lambda w, x: torch.matmul(x, w.mT),
    "vector @ w": lambda w, x: x[0, 0, :6] @ w,
    "x @ w": lambda w, x: x[0, :, :6].matmul(w),
    "w.t @ x": lambda w, x: w.t() @ x[0, :, :6].mT,
    "w.transpose @ x": lambda w, x: w.transpose(-2, 1) @ x[0, :, :6].mT,
    "w.transpose of one axis": lambda w, x: w.transpose(-1, 1) @ x[0].t(),
    "mm": lambda w, x: torch.mm(w, x[0].t()),
    "w.mm": lambda w, x: w.mm(x[0].t()),
    "w.T mm": lambda w, x: w.T.mm(x[0, :, :6].t()),
    "mv": lambda w, x: torch.mv(w, x[0, 0]),
    "addmm": lambda w, x: torch.addmm(x[0, :3, 0], w, x[0].t(), alpha=0.5, beta=2),
    "addmm by row": lambda w, x: torch.addmm(x[0, 0, :6, None], w, x[0].t()),
    "addmm of a matrix": lambda w, x: x[0, :, :6].addmm(x[0], w.t()),
    "addmm of a row, sparse right": lambda w, x: torch.addmm(x[0, :1, :6], x[0], w.t(), beta=0.5),
    "addmm of a scalar": lambda w, x: torch.addmm(x[0, 0, 0], w, x[0].t()),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_spelling_of_a_product_and_its_gradients(product):
    for name in FORMATS:
        weight, mask = masked(6, 8, name)
        sparse = SparseTensor.from_dense(weight, getattr(formats, name), **FORMATS[name]).requires_grad_()
        dense = weight.clone().requires_grad_()
        xs = [torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(2)).requires_grad_() for _ in range(2)]
        out, wanted = PRODUCTS[product](sparse, xs[0]), PRODUCTS[product](dense, xs[1])
        assert type(out) is Tensor and out.shape == wanted.shape
        torch.testing.assert_close(out, wanted)
        out.square().sum().backward()
        wanted.square().sum().backward()
        torch.testing.assert_close(sparse.grad.to_dense(), dense.grad * mask)
        torch.testing.assert_close(xs[0].grad, xs[1].grad)


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_spelling_of_a_product_in_forward_mode(product):
    x, tangent = torch.linspace(-1, 2, 48).view(2, 3, 8), torch.linspace(3, -1, 48).view(2, 3, 8)
    for name in ("CSR", "BCSC"):
        found, wanted = (_tangent(product, weight, x, tangent) for weight in (tensor(name=name), masked(6, 8, name)[0]))
        torch.testing.assert_close(found, wanted)


def _tangent(product: str, weight: Tensor, x: Tensor, tangent: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(PRODUCTS[product](weight, forward_ad.make_dual(x, tangent))).tangent


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_sums_and_means_with_their_gradients(dtype):
    for name in FORMATS:
        dense, mask = masked(6, 8, name)
        for function in (torch.sum, torch.mean):
            weight = SparseTensor.from_dense(dense.to(dtype), getattr(formats, name), **FORMATS[name]).requires_grad_()
            found = function(weight)
            (gradient,) = torch.autograd.grad(found, weight)
            torch.testing.assert_close(found.detach(), function(dense.to(dtype)))
            torch.testing.assert_close(gradient.to_dense(), (mask * (1 if function is torch.sum else 1 / 48)).to(dtype))


def test_an_input_of_addmm_with_beta_0_is_not_read():
    weight = tensor()
    found = torch.addmm(torch.full((3,), float("nan")), weight, torch.ones(8, 3), beta=0)
    torch.testing.assert_close(found, weight.to_dense() @ torch.ones(8, 3))


DENSE_ONLY: dict[str, Callable[[SparseTensor], object]] = {
    "be added to one": lambda w: torch.ones(6, 8).add_(w),
    "exp": lambda w: w.exp(),
    "cos": lambda w: torch.cos(w),
    "divide two": lambda w: w / w,
    "divide a number": lambda w: 2 / w,
    "maximum with a number": lambda w: torch.maximum(w, torch.tensor(2.0)),
    "add a product of other numbers": lambda w: torch.addcmul(w, w, torch.tensor(2.0)),
    "pow -1": lambda w: w**-1,
    "embedding of bounded rows": lambda w: F.embedding(torch.tensor([0]), w, max_norm=1.0),
    "embedding with gradients by frequency": lambda w: F.embedding(torch.tensor([0]), w, scale_grad_by_freq=True),
    "embedding with sparse gradients": lambda w: F.embedding(torch.tensor([0]), w, sparse=True),
    "index": lambda w: w[0],
    "iterate": lambda w: list(w),
    "reshape": lambda w: w.view(-1),
    "stack": lambda w: torch.stack([w]),
    "largest": lambda w: w.max(),
    "where": lambda w: torch.where(torch.ones(6, 8) > 0, w, w),
    "einsum": lambda w: torch.einsum("ij,jk->ik", w, torch.ones(8, 2)),
    "cat with a dense one": lambda w: torch.cat([w, torch.ones(6, 8)]),
    "softmax, which zeros count in": lambda w: w.softmax(1),
    "a dense factor that makes it larger": lambda w: w * torch.ones(2, 6, 8),
    "product with a matrix": lambda w: w.matrix @ w.t(),
    "addmm of two": lambda w: torch.addmm(torch.ones(6), w, w.t()),
    "addmm to one": lambda w: torch.addmm(w, torch.ones(6, 2), torch.ones(2, 8)),
    "linear of two": lambda w: F.linear(w, w),
    "product with torch's sparse": lambda w: w @ torch.ones(8, 2).to_sparse_csr(),
    "sparse input": lambda w: F.linear(w, torch.ones(2, 8)),
    "batched product": lambda w: torch.bmm(torch.ones(1, 2, 6), w.unsqueeze(0)),
    "copy into a dense one": lambda w: torch.zeros(6, 8).copy_(w),
    "copy from a dense one": lambda w: w.copy_(torch.zeros(6, 8)),
    "clamp": lambda w: w.clamp(min=0.5),
    "embedding with options": lambda w: F.embedding(torch.tensor([0]), w, padding_idx=0),
    "pow 0": lambda w: w**0,
}


@pytest.mark.parametrize("what", DENSE_ONLY)
def test_what_would_make_it_dense_raises(what):
    with pytest.raises(SparseOperatorError, match="to_dense"):
        DENSE_ONLY[what](tensor())


def test_elementwise_operators_that_keep_zeros():
    for name in FORMATS:
        weight = tensor(name=name)
        dense = weight.to_dense()
        for function in (
            lambda w: w * 3, lambda w: w / 2, lambda w: -w, lambda w: w + w * 2, lambda w: w - w, lambda w: w.abs(),
            lambda w: w.abs().sqrt(), lambda w: w * w, lambda w: w**2, lambda w: w.clone(), lambda w: w.relu(),
            lambda w: torch.zeros_like(w), lambda w: w.t() * 2, lambda w: w.sum(), lambda w: w.norm(),
            lambda w: torch.linalg.vector_norm(w, float("inf")), lambda w: 3 * w, lambda w: torch.tensor(3.0) * w,
            lambda w: torch.maximum(w, 2 * w), lambda w: torch.addcmul(w, w, 2 * w, value=3), lambda w: w.mean(),
            lambda w: torch.lerp(w, w * 3, 0.25), lambda w: w.sum(dtype=torch.float64), lambda w: w.detach()[2:],
        ):  # fmt: skip
            found, wanted = function(weight), function(dense)
            torch.testing.assert_close(found.to_dense() if isinstance(found, SparseTensor) else found, wanted)


@pytest.mark.parametrize("name", ["CSR", "COO", "NM"])
def test_rows_of_a_table_are_those_of_the_dense_one(name):
    weight, index = tensor(name=name).requires_grad_(), torch.tensor([[0, 5, 2], [2, 2, 4]])
    dense = weight.detach().to_dense().requires_grad_()
    found, wanted = F.embedding(index, weight), F.embedding(index, dense)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    factor = torch.arange(found.numel()).view(found.shape)
    (gradient,) = torch.autograd.grad((found * factor).sum(), weight)
    (expected,) = torch.autograd.grad((wanted * factor).sum(), dense)
    torch.testing.assert_close(gradient.to_dense(), expected * masked(6, 8, name)[1])


@pytest.mark.parametrize("name", ["CSC", "BSR", "BCSC"])
def test_rows_of_columns_and_blocks_are_not_looked_up(name):
    with pytest.raises(SparseOperatorError, match="to_dense"):
        F.embedding(torch.tensor([0]), tensor(name=name))


@pytest.mark.parametrize("name", FORMATS)
def test_a_gradient_of_the_tensors_gradient_is_refused_not_left_out(name):
    weight, x = tensor(name=name).requires_grad_(), torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
    (first,) = torch.autograd.grad(F.linear(x, weight).pow(3).sum(), weight, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        first.to_dense().square().sum().backward()


def test_blocks_and_groups_beyond_the_shape_count_for_nothing():
    dense = torch.randn(5, 7)
    x = torch.randn(3, 7)
    for name, layout in (("BSR", {"block": (2, 3)}), ("BCSC", {"block": (3, 2)}), ("NM", {"n": 4, "m": 4})):
        weight = SparseTensor.from_dense(dense, getattr(formats, name), **layout)
        with torch.no_grad():
            weight.fill_(2.0)
        torch.testing.assert_close(weight.to_dense(), torch.full((5, 7), 2.0))
        torch.testing.assert_close(weight.sum(), torch.tensor(70.0))
        torch.testing.assert_close(F.linear(x, weight), 2 * x.sum(1, keepdim=True).expand(3, 5))
        torch.testing.assert_close(weight.t() @ torch.ones(5, 2), torch.full((7, 2), 10.0))
        weight.matrix.validate()


@pytest.mark.parametrize(
    ("name", "layout"), [("BSR", {"block": (2, 3)}), ("BCSC", {"block": (3, 2)}), ("NM", {"n": 4, "m": 4})]
)
@pytest.mark.parametrize("shape", [(5, 7), (4, 8), (1, 1)])
def test_a_gradient_through_the_dense_form_is_read_within_the_shape(name, layout, shape):
    """What blocks and groups hold beyond the shape has none."""
    weight = SparseTensor.from_dense(torch.ones(shape), getattr(formats, name), **layout).requires_grad_()
    factor = torch.arange(1.0, shape[0] * shape[1] + 1).view(shape)
    (weight.to_dense() * factor).sum().backward()
    torch.testing.assert_close(weight.grad.to_dense(), factor)
    assert weight.grad.values().sum() == factor.sum()


def test_different_patterns_do_not_mix():
    one, other = tensor(), SparseTensor.from_dense(torch.eye(6, 8))
    with pytest.raises(PatternError, match="different elements"):
        one.copy_(other)
    with pytest.raises(PatternError, match="different elements"):
        one.add_(other)
    leaf = one.clone().requires_grad_()
    with pytest.raises(PatternError, match="gradient"):
        leaf.grad = other
    with pytest.raises(PatternError, match="SparseTensor"):
        leaf.grad = torch.zeros(6, 8)
    same = SparseTensor(one.matrix.to(formats.CSR))  # other arrays, the same pattern
    torch.testing.assert_close((one + same).to_dense(), 2 * one.to_dense())


@pytest.mark.parametrize("name", FORMATS)
def test_copies_moves_and_files(name, tmp_path):
    weight = nn.Parameter(tensor(name=name))
    dense = weight.detach().to_dense()
    copied = copy.deepcopy(weight)
    with torch.no_grad():
        copied.mul_(2)
    assert isinstance(copied, nn.Parameter) and copied.requires_grad
    assert torch.equal(copied.detach().to_dense(), 2 * dense)
    assert torch.equal(weight.detach().to_dense(), dense)
    torch.save({"w": weight, "t": weight.detach().t()}, tmp_path / "w.pt")
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)
    again = pickle.loads(pickle.dumps(weight))
    for other in (loaded["w"], again):
        assert isinstance(other, nn.Parameter) and other.format == name and other.same_pattern(weight)
        assert torch.equal(other.detach().to_dense(), dense)
    assert torch.equal(loaded["t"].to_dense(), dense.mT)
    half = weight.detach().to(torch.bfloat16)
    assert half.dtype is torch.bfloat16 and torch.equal(half.to_dense(), dense.bfloat16())
    x = torch.randn(2, 8).bfloat16()
    torch.testing.assert_close(F.linear(x, half), F.linear(x, dense.bfloat16()))
    assert weight.to("meta").device.type == "meta" and weight.to("meta").pattern.arrays[0].device.type == "meta"


def test_a_module_keeps_its_state():
    one, other = (nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 2)) for _ in range(2))
    for model in (one, other):
        model[0].weight = nn.Parameter(tensor())
    with torch.no_grad():
        other[0].weight.mul_(3)
    state = other.state_dict()
    assert isinstance(state["0.weight"], SparseTensor)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    one.load_state_dict(torch.load(buffer, weights_only=True))
    x = torch.randn(3, 8)
    assert torch.equal(one(x), other(x))
    one.double()
    assert isinstance(one[0].weight, nn.Parameter) and one[0].weight.dtype is torch.float64
    torch.testing.assert_close(one(x.double()).float(), other(x))
    one.requires_grad_(False)
    assert not one[0].weight.requires_grad
    one[0].weight = nn.Parameter(SparseTensor.from_dense(torch.eye(6, 8)))
    with pytest.raises(RuntimeError, match="different elements"):
        one.float().load_state_dict(state)
    one.load_state_dict(state, assign=True)
    assert torch.equal(one(x), other(x))


@pytest.mark.slow(reason="starts processes")
def test_a_fresh_process_reads_weights_and_an_optimizers_state_after_import_sparsecomp(tmp_path):
    weight = nn.Parameter(tensor())
    optimizer = torch.optim.Adam([weight])
    (torch.ones(1, 6) @ weight).sum().backward()
    optimizer.step()
    torch.save({"weight": weight, "state": optimizer.state_dict(), "dense": weight.to_dense()}, tmp_path / "w.pt")
    code = """
import sys, torch, sparsecomp
assert "sparsecomp.tensor.sparse_tensor" not in sys.modules
found = torch.load(sys.argv[1], weights_only=True)
moments = found["state"]["state"][0]["exp_avg"]
torch.testing.assert_close(moments.to_dense(), 0.1 * (found["dense"] != 0))
print(torch.equal(found["weight"].to_dense(), found["dense"]))
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "w.pt"], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


def test_a_file_with_wrong_arrays_is_refused():
    from sparsecomp.tensor.sparse_tensor import rebuild

    arrays = dict(tensor().matrix.arrays)
    how = ([6, 8], {}, False, False, False, "exact")
    with pytest.raises(FormatError, match="ascend|lie in the shape"):
        rebuild("CSR", {**arrays, "col": arrays["col"] + 7}, *how)
    with pytest.raises(FormatError, match="cannot be read"):
        rebuild("CSR", {"values": arrays["values"]}, *how)
    with pytest.raises(FormatError, match="cannot be read"):
        rebuild("ELL", arrays, *how)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_products_under_autocast_are_those_of_dense_weights(compiled, dtype):
    """The dtype is what torch's own product has, the error within what rounding to it allows."""
    bound = 2 * torch.finfo(dtype).eps
    weight, mask = masked(6, 8, "CSR")
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(2))
    for product in PRODUCTS.values() if not compiled else [PRODUCTS["linear of 3 dimensions"], PRODUCTS["addmm"]]:
        sparse = nn.Parameter(SparseTensor.from_dense(weight))
        call = torch.compile(product, backend="aot_eager", fullgraph=True) if compiled else product
        exact, dense = weight.double().requires_grad_(), weight.clone()
        wanted = product(exact, x.double())
        with torch.autocast("cpu", dtype):
            out, torchs = call(sparse, x), product(dense, x)
        assert out.dtype is torchs.dtype and out.shape == torchs.shape
        assert (out - wanted).norm() <= bound * wanted.norm()
        out.double().square().sum().backward()
        wanted.square().sum().backward()
        assert sparse.grad.dtype is torch.float32
        grad = exact.grad * mask
        assert (sparse.grad.to_dense() - grad).norm() <= 3 * bound * grad.norm()
    with torch.autocast("cpu", dtype):
        assert F.linear(x.double(), SparseTensor.from_dense(weight.double())).dtype is torch.float64
        assert F.linear(x.half(), SparseTensor.from_dense(weight)).dtype is dtype
        assert F.linear(x.to("meta"), SparseTensor.from_dense(weight).to("meta")).dtype is torch.float32


def test_to_dense_has_a_gradient_at_the_pattern():
    for name in FORMATS:
        weight = tensor(name=name).requires_grad_()
        factor = torch.randn(8, 6)
        (weight.t().to_dense() * factor).sum().backward()
        torch.testing.assert_close(weight.grad.to_dense(), factor.t() * masked(6, 8, name)[1])


def test_values_that_are_a_parameter_already_are_shared():
    values = nn.Parameter(torch.ones(6))
    weight = SparseTensor(formats.CSR.from_dense(torch.eye(6)).with_values(values), requires_grad=True)
    (torch.ones(2, 6) @ weight).sum().backward()
    assert torch.equal(weight.grad.to_dense(), 2 * torch.eye(6)) and weight.pattern.transposed is not None
    assert values.grad is None and weight.values().data_ptr() == values.data_ptr()


def test_a_batch_or_a_dense_tensor_is_no_sparse_tensor():
    with pytest.raises(FormatError, match="from_dense"):
        SparseTensor(torch.eye(3))
    with pytest.raises(FormatError, match="unbatch"):
        SparseTensor(formats.CSR.from_dense(torch.ones(2, 3, 3)))


_MISUSES = {
    "from a list": (FormatError, "dense is a list", lambda one: SparseTensor.from_dense([[1.0]])),
    "from nothing": (FormatError, "dense is a NoneType", lambda one: SparseTensor.from_dense(None)),
    "from torch's own sparse": (FormatError, "layout", lambda one: SparseTensor.from_dense(torch.eye(2).to_sparse())),
    "a format's name": (FormatError, "'csr', needs a class", lambda one: SparseTensor.from_dense(torch.eye(2), "csr")),
    "no format": (FormatError, "needs a class", lambda one: SparseTensor.from_dense(torch.eye(2), None)),
    "a matrix as format": (FormatError, "needs a class", lambda one: SparseTensor.from_dense(torch.eye(2), one.matrix)),
    "values in a list": (FormatError, "values is a list", lambda one: one.with_values([1.0] * 4)),
    "too few values": (FormatError, "the pattern needs", lambda one: one.with_values(torch.ones(3))),
    "values elsewhere": (FormatError, "on meta", lambda one: one.with_values(one.values().to("meta"))),
    "pattern of a dense tensor": (FormatError, "other is a Tensor", lambda one: one.same_pattern(torch.eye(4))),
    "product of two matrices": (SparseOperatorError, "with a CSR", lambda one: one @ one.matrix),
    "addmm by a vector": (FormatError, "addmm takes", lambda one: torch.addmm(torch.eye(4), one, torch.ones(4))),
    "rows by no index": (SparseOperatorError, "NoneType", lambda one: F.embedding(None, one)),
    "rows by a list": (SparseOperatorError, "list", lambda one: F.embedding([0], one)),
    "sparse index": (SparseOperatorError, "indices", lambda one: F.embedding(one, torch.eye(4))),
}


@pytest.mark.parametrize("misuse", _MISUSES)
def test_a_misuse_is_told_as_one(misuse):
    kind, told, wrong = _MISUSES[misuse]
    with pytest.raises(kind, match=told):
        wrong(SparseTensor.from_dense(torch.eye(4)))


def test_one_weight_used_twice_in_a_compiled_graph_and_two_patterns_that_cannot_be_compared():
    weight = nn.Parameter(tensor(8, 8))

    def twice(x: Tensor) -> Tensor:
        return F.relu(F.linear(x, weight)) @ weight

    grads = []
    for call in (torch.compile(twice, backend="aot_eager", fullgraph=True), twice):
        call(torch.ones(3, 8)).square().sum().backward()
        grads.append(weight.grad.to_dense())
        weight.grad = None
    torch.testing.assert_close(*grads)

    def step(optimizer: torch.optim.Optimizer) -> None:
        twice(torch.ones(3, 8)).sum().backward()
        optimizer.step()

    with pytest.raises(Exception, match=r"outside of torch\.compile"):
        torch.compile(step, backend="aot_eager")(torch.optim.SGD([weight], lr=0.1))


@pytest.mark.parametrize("name", FORMATS)
def test_views_and_copies_in_inference_mode_and_training_after_it(name):
    weight, x = tensor(name=name), torch.randn(3, 8)
    dense = weight.to_dense()
    parameter = nn.Parameter(weight)
    with torch.inference_mode():
        torch.testing.assert_close(F.linear(x, parameter), x @ dense.T)
        torch.testing.assert_close(dense @ x.T, parameter.detach() @ x.T)
        torch.testing.assert_close(x[:, :6] @ parameter.t().T, x[:, :6] @ dense)
        assert torch.equal(parameter.to(torch.float64).to_dense(), dense.double())
        with pytest.raises(SparseOperatorError, match="to_dense"):
            torch.exp(parameter)
    x.requires_grad_()
    torch.compiler.reset()
    torch.compile(lambda x: F.linear(x, parameter).sum(), backend="aot_eager", fullgraph=True)(x).backward()
    torch.testing.assert_close(x.grad, dense.sum(0).expand(3, 8))


@pytest.mark.parametrize(
    ("name", "layout"), [("BSR", {"block": (4, 3)}), ("BCSC", {"block": (4, 3)}), ("NM", {"n": 4, "m": 4})]
)
def test_infinities_written_in_place_stay_within_the_shape(name, layout):
    """Ones times infinity are infinity; the filler of blocks and groups, times the padding's zeros, would be NaN."""
    weight = SparseTensor.from_dense(torch.ones(5, 7), getattr(formats, name), **layout).fill_(torch.inf)
    assert (weight @ torch.ones(7, 2) == torch.inf).all() and (torch.ones(2, 5) @ weight == torch.inf).all()
    weight.matrix.validate()


def test_the_largest_of_nothing_stored_is_0():
    weight = nn.Parameter(SparseTensor.from_dense(torch.zeros(4, 6)))
    F.linear(torch.ones(3, 6), weight).sum().backward()
    assert nn.utils.clip_grad_norm_([weight], 1.0, norm_type=torch.inf) == 0


@pytest.mark.parametrize("name", FORMATS)
def test_a_graph_is_compiled_anew_while_a_parameter_holds_a_compiled_gradient(name):
    torch.compiler.reset()
    parameter, x = nn.Parameter(tensor(name=name)), torch.randn(3, 8)
    compiled = torch.compile(lambda x: F.linear(x, parameter).relu(), backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), (x @ parameter.to_dense().T).relu())


def test_caches_of_compiled_graphs_tell_numbers_of_entries_apart():
    """One shape and evenness of rows, other sizes of the arrays: a graph of the first must not run the second."""
    x = torch.randn(3, 8)
    for stored in (2, 3, 5):
        torch.compiler.reset()
        dense = torch.zeros(6, 8)
        dense[:, :stored] = torch.randn(6, stored)
        weight = SparseTensor.from_dense(dense)
        compiled = torch.compile(lambda x, weight: F.linear(x, weight).relu(), backend="inductor", fullgraph=True)
        torch.testing.assert_close(compiled(x, weight), (x @ dense.T).relu())
