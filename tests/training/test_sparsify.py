"""`sparsify` and `densify`: the same function before and after, the right elements kept, bad input changes nothing."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import sparsecomp
from sparsecomp import NM, Block, FromMask, Magnitude, SparseGPT, Unstructured, Wanda, densify, sparsify
from sparsecomp.errors import FormatError, InputError, MaskError
from sparsecomp.formats import BSR, CSR
from sparsecomp.nn import RESULinear, SparseEmbedding, SparseLinear, wrap_module

pytestmark = pytest.mark.quick_cases(4)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16, bias=False))


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [one.weight.detach().to_dense() for one in model if hasattr(one, "weight")]


def test_magnitude_keeps_the_largest_of_each_layer() -> None:
    model = _net()
    dense = copy.deepcopy(model)
    assert sparsify(model, Unstructured(0.75)) is model
    for before, after in zip(_weights(dense), _weights(model), strict=True):
        kept = after != 0
        assert int(kept.sum()) == before.numel() // 4
        assert before.abs()[kept].min() >= before.abs()[~kept].max()
        assert torch.equal(before[kept], after[kept])
    assert model[0].bias is not dense[0].bias and torch.equal(model[0].bias, dense[0].bias)


def test_wanda_ranks_by_what_reaches_a_layer() -> None:
    model = _net()
    loud = torch.ones(32)
    loud[:4] = 1000.0
    sparsify(model, Unstructured(0.875, by="wanda"), batches=[torch.randn(64, 32) * loud])
    first = model[0].weight.detach().to_dense() != 0
    assert torch.equal(first.sum(1), torch.full((48,), 4)) and first[:, :4].all()


def test_sparsegpt_makes_up_for_what_is_gone() -> None:
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(1)) @ torch.randn(32, 32)
    errors = {}
    for by in ("magnitude", SparseGPT(damping=0.05)):
        model, dense = _net()[:1], _net()[:1]
        sparsify(model, Unstructured(0.5, by=by), batches=[x])
        errors[by] = (model(x) - dense(x)).square().mean()
    assert errors[SparseGPT(damping=0.05)] < 0.8 * errors["magnitude"]


@pytest.mark.parametrize("by", ["magnitude", "wanda", "sparsegpt"])
def test_n_of_m(by: str) -> None:
    model = sparsify(_net(), NM(2, 4, by=by), batches=[torch.randn(40, 32)])
    for weight in _weights(model):
        assert ((weight.view(-1, 4) != 0).sum(1) == 2).all()


def test_blocks_stay_whole() -> None:
    model = sparsify(_net(), Block(16, 0.5))
    for weight in _weights(model):
        blocks = (weight != 0).unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).sum((1, 3))
        assert set(blocks.flatten().tolist()) == {0, 256} and int((blocks == 0).sum()) == round(blocks.numel() / 2)


def test_a_filter_chooses_layers_by_name() -> None:
    model = sparsify(_net(), Unstructured(0.5), filter=lambda layer, name: name == "2")
    assert type(model[0]) is nn.Linear and type(model[2]) is SparseLinear


def test_the_mask_of_torchs_pruning_is_taken() -> None:
    model = _net()
    prune.l1_unstructured(model[0], "weight", 0.9)
    with torch.no_grad():
        model[0].weight_orig.mul_(2)  # the attribute is stale until the next call
    x = torch.randn(5, 32)
    hidden = torch.relu(x @ (model[0].weight_orig * model[0].weight_mask).T + model[0].bias)
    expected = hidden @ model[2].weight.T
    with pytest.warns(UserWarning, match="leaves layers as they are: 2 .too few zeros"):
        model = sparsify(model, FromMask())
    assert type(model[0]) is SparseLinear and type(model[2]) is nn.Linear
    torch.testing.assert_close(model(x), expected)


def test_the_mask_of_a_parametrization_is_taken() -> None:
    class Mask(nn.Module):
        def __init__(self, mask: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("mask", mask)

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * self.mask

    model = _net()
    mask = torch.rand(48, 32) < 0.2
    parametrize.register_parametrization(model[0], "weight", Mask(mask))
    x = torch.randn(5, 32)
    expected = model(x)
    model = sparsify(model, FromMask(), filter=lambda layer, name: name == "0")
    torch.testing.assert_close(model(x), expected)
    assert model[0].values.numel() == int(mask.sum())


def test_from_resu_to_sparse_to_plain() -> None:
    model = _net()
    keys = list(model.state_dict())
    wrap_module(model)
    for layer in (model[0], model[2]):
        layer.masked.prune_(layer.weight, torch.rand_like(layer.weight) < 0.3)
    x = torch.randn(5, 32)
    expected = model(x)
    plain = densify(copy.deepcopy(model))
    assert type(plain[0]) is nn.Linear and list(plain.state_dict()) == keys
    torch.testing.assert_close(plain(x), expected, rtol=0, atol=0)
    sparse = sparsify(model, FromMask())
    assert type(sparse[0]) is SparseLinear
    torch.testing.assert_close(sparse(x), expected)
    back = densify(sparse)
    assert type(back[0]) is nn.Linear and list(back.state_dict()) == keys
    torch.testing.assert_close(back(x), expected)


def test_parameters_of_resu_layers_stay_the_same_objects() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, groups=2, padding_mode="circular"), nn.Flatten(2),
        nn.MultiheadAttention(36, 4, kdim=20, vdim=12, batch_first=True, add_bias_kv=True),
    )  # fmt: skip
    parameters, keys = dict(model.named_parameters()), list(model.state_dict())
    x = torch.randn(2, 4, 6, 6)
    expected = model[0](x)
    wrap_module(model)
    densify(model)
    assert type(model[0]) is nn.Conv2d and type(model[2]) is nn.MultiheadAttention
    assert list(model.state_dict()) == keys
    assert all(parameters[name] is one for name, one in model.named_parameters())
    torch.testing.assert_close(model[0](x), expected)
    query, key, value = torch.randn(2, 3, 36), torch.randn(2, 5, 20), torch.randn(2, 5, 12)
    assert model[2](query, key, value)[0].shape == query.shape


def test_an_embedding_becomes_plain_again() -> None:
    table = nn.Embedding(50, 12)
    sparse = SparseEmbedding.from_embedding(table, sparsity=0.5)
    index = torch.tensor([3, 49, 3])
    expected = sparse(index)
    assert torch.equal(densify(sparse)(index), expected)


def test_a_layer_of_attention_stays() -> None:
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(2, 5, 32)
    sparsify(model, Unstructured(0.0))
    assert type(model.linear1) is SparseLinear and not isinstance(model.self_attn.out_proj, SparseLinear)
    dense = densify(copy.deepcopy(model))
    with torch.no_grad():
        torch.testing.assert_close(model(x), dense(x))


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 16))
    model[1].weight = model[0].weight
    return model


def _resurrecting() -> nn.Module:
    model = wrap_module(_net())
    layer = model[0]
    assert isinstance(layer, RESULinear)
    layer.masked.prune_(layer.weight, torch.rand_like(layer.weight) < 0.3)
    layer.masked.enter_resu_(layer.weight)
    return model


def _with_nan() -> nn.Module:
    model = _net()
    with torch.no_grad():
        model[2].weight[3, 3] = float("nan")
    return model


@pytest.mark.parametrize(
    ("make", "config", "error", "says"),
    [
        (_tied, Unstructured(0.5), MaskError, "shares its weight with 0"),
        (_resurrecting, FromMask(), MaskError, "0: .*commit it first"),
        (_with_nan, Unstructured(0.5), MaskError, "2: .*NaN"),
        (_net, Unstructured(0.5, by=Wanda()), MaskError, "give batches="),
        (_net, NM(2, 5), MaskError, "groups of 5"),
        (lambda: nn.Sequential(nn.ReLU()), Unstructured(0.5), MaskError, "has no nn.Linear"),
        (_net, Unstructured, MaskError, "give one such as"),
        (_net, 0.9, MaskError, "give one such as"),
        (lambda: _net().to("meta"), Unstructured(0.5), FormatError, "0 is on the meta device"),
        (lambda: _net().to("meta"), FromMask(), FormatError, "0 is on the meta device"),
    ],
)  # fmt: skip
def test_bad_input_changes_nothing(make, config, error, says) -> None:
    model = make()
    modules, state = list(model.modules()), {key: one.clone() for key, one in model.state_dict().items()}
    with pytest.raises(error, match=says):
        sparsify(model, config)
    assert list(model.modules()) == modules
    for key, one in model.state_dict().items():
        torch.testing.assert_close(one, state[key], rtol=0, atol=0, equal_nan=True)


def test_densify_ends_torchs_pruning_of_layers_that_stayed_dense() -> None:
    model, plain = _net(), _net()
    model[2], plain[2] = nn.Linear(48, 16), nn.Linear(48, 16)
    prune.l1_unstructured(model[0], "weight", 0.9)
    prune.random_unstructured(model[2], "weight", 0.1)
    prune.l1_unstructured(model[2], "weight", 0.1)
    prune.l1_unstructured(model[2], "bias", 0.5)
    with pytest.warns(UserWarning, match="2 .too few zeros"):
        sparsify(model, FromMask())
    assert type(model[0]) is SparseLinear and type(model[2]) is nn.Linear
    x, kept = torch.randn(5, 32), model[2].weight_orig
    expected = model(x)
    densify(model)
    assert model.state_dict().keys() == plain.state_dict().keys() and model[2].weight is kept
    torch.testing.assert_close(model(x), expected)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain(x), expected)


def test_densify_refuses_a_resu_phase() -> None:
    with pytest.raises(MaskError, match="0 is in its RESU phase"):
        densify(_resurrecting())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Unstructured(1.0), lambda: Unstructured(-0.1), lambda: Unstructured(0.5, by="best"),
        lambda: Unstructured(1.5), lambda: Unstructured("0.5"), lambda: Unstructured(None), lambda: Unstructured(True),
        lambda: Unstructured(float("nan")), lambda: Unstructured(0.5, by=Wanda), lambda: Unstructured(0.5, by=3),
        lambda: Unstructured(0.5, format="csr"), lambda: Unstructured(0.5, format=BSR), lambda: NM(5, 4),
        lambda: NM(0, 4), lambda: NM(2.0, 4), lambda: NM("2", "4"), lambda: NM(-1, 4), lambda: Block(16, 1.5),
        lambda: Block(0, 0.5), lambda: Block((16,), 0.5), lambda: Block("16", 0.5), lambda: Block((4, -4), 0.5),
        lambda: Block(16, 0.5, format=CSR), lambda: FromMask(1.5), lambda: FromMask("half"),
        lambda: FromMask(format=None), lambda: SparseGPT(damping=0.0), lambda: SparseGPT(damping="much"),
    ],
)  # fmt: skip
def test_configs_are_checked_when_made(make) -> None:
    assert Unstructured(np.float32(0.5)).matrix(nn.Linear(4, 4), ()).nnz == 8
    with pytest.raises((MaskError, FormatError), match="give|needs|must"):
        make()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: NM(k=2), "NM: .*'k'; its settings are n, m, by"), (lambda: NM(2, 4, "wanda"), "NM: too many"),
        (lambda: Wanda(3), "Wanda: too many positional arguments; it has no settings"), (lambda: Magnitude(2), "many"),
        (lambda: SparseGPT(dampng=1.0), "did you mean 'damping'"), (lambda: SparseGPT(damping=True), "damping is True"),
        (lambda: SparseGPT(damping=float("inf")), "damping is inf"),
        (lambda: Unstructured(), "Unstructured: missing a required argument: 'sparsity'"),
        (lambda: Unstructured(0.5, spars=1), "its settings are sparsity, format, by"),
        (lambda: Block(16), "Block: missing"), (lambda: FromMask(lest=0.1), "did you mean 'least'"),
        (lambda: Block(16, 0.5, format=CSR), "format is CSR: give"),
    ],
)  # fmt: skip
def test_arguments_that_a_config_does_not_take_are_told_as_its_other_errors(make, says) -> None:
    with pytest.raises(MaskError, match=says):
        make()


def test_layers_share_a_sparsity_by_the_sum_of_their_sizes() -> None:
    model = nn.Sequential(nn.Linear(10, 90), nn.Linear(90, 60), nn.Linear(60, 2))
    sparsify(model, Unstructured(0.9, by="random", budget="erk"))
    # 642 of 6420 stay; eps * (in + out): 60x2 would have 642 * 62 / 312 > 120, so it is full, and 522 are left for
    # sums of 100 and 150: 208.8 and 313.2
    assert [layer.values.numel() for layer in model] == [209, 313, 120]
    blocks = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 64))
    sparsify(blocks, Block(4, 0.5, budget="erk"))
    # 1536 of 3072 elements by sums of 64 and 96: 614 and 922, in blocks of 16
    assert [layer.values.numel() for layer in blocks] == [38 * 16, 58 * 16]
    for make in (lambda: Unstructured(0.5, budget="global"), lambda: Block(4, 0.5, budget="best")):
        with pytest.raises(MaskError, match="budget is .* uniform, erk"):
            make()


def test_configs_are_values() -> None:
    config = Unstructured(0.5, by=SparseGPT(0.1), format=CSR)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config != Unstructured(0.5)
    assert repr(config) == "Unstructured(by=SparseGPT(damping=0.1), sparsity=0.5, format=CSR, budget='uniform')"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: sparsify([nn.Linear(4, 4)], Unstructured(0.5)), "model is a list"),
        (lambda: sparsify(None, Unstructured(0.5)), "model is a NoneType"),
        (lambda: densify(torch.ones(2, 2)), "model is a Tensor"),
        (lambda: sparsecomp.load_state_dict(_net().state_dict(), {}), "model is a OrderedDict"),
        (lambda: sparsify(_net(), Unstructured(0.5), filter="0"), "filter is '0'"),
        (lambda: sparsify(_net(), Unstructured(0.5), filter=lambda layer, name: None), "filter gave None for '0'"),
        (lambda: sparsify(_net(), Unstructured(0.5), filter=lambda layer, name: layer.weight.sum() > 0), "gave tensor"),
        (lambda: sparsify(_net(), Unstructured(0.5, by="wanda"), batches=3), "batches is a int"),
    ],
)  # fmt: skip
def test_what_is_no_model_filter_or_batches_is_named(call, says) -> None:
    with pytest.raises(InputError, match=says):
        call()


@pytest.mark.parametrize("kind", [tuple, list])
def test_batches_with_labels_need_a_forward_and_the_error_says_so(kind: type) -> None:
    model, batch = _net(), kind((torch.randn(5, 32), torch.zeros(5)))
    with pytest.raises(InputError, match=rf"a batch is a {kind.__name__}.*forward=lambda batch: model\(batch\[0\]\)"):
        sparsify(model, Unstructured(0.5, by="wanda"), batches=[batch])
    assert not any(isinstance(module, SparseLinear) for module in model.modules())
    other = sparsify(copy.deepcopy(model), Unstructured(0.5, by="wanda"), batches=[batch[0]])
    sparsify(model, Unstructured(0.5, by="wanda"), batches=[batch], forward=lambda batch: model(batch[0]))
    assert torch.equal(model[0].values, other[0].values)


def test_a_sparse_model_trains_and_compiles_as_its_dense_form() -> None:
    model = sparsify(_net(), Unstructured(0.8))
    dense = densify(copy.deepcopy(model))
    x = torch.randn(7, 32)
    compiled = torch.compile(model, backend="sparsecomp")
    torch.testing.assert_close(compiled(x), dense(x))
    compiled(x).square().sum().backward()
    dense(x).square().sum().backward()
    stored = dense[0].weight != 0
    torch.testing.assert_close(model[0].values.grad, dense[0].weight.grad[stored])
    assert sparsecomp.last_report() is not None


def test_a_layer_in_several_places_stays_one() -> None:
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    sparsify(model, Unstructured(0.5))
    assert model[0] is model[2] and type(model[0]) is SparseLinear
    densify(model)
    assert model[0] is model[2] and type(model[0]) is nn.Linear


def test_values_and_bias_that_torch_prunes_are_read_as_they_are_now() -> None:
    model = sparsify(nn.Sequential(nn.Linear(8, 8)), Unstructured(0.5))
    layer = model[0]
    prune.l1_unstructured(layer, "values", 0.5)
    prune.l1_unstructured(layer, "bias", 0.5)
    with torch.no_grad():
        layer.values_orig.mul_(3)
    x = torch.randn(4, 8)
    expected = (layer.values_orig * layer.values_mask).detach()
    plain = densify(model)
    torch.testing.assert_close(plain[0].weight.detach().abs().sum(), expected.abs().sum())
    assert plain(x).shape == (4, 8) and int((plain[0].bias == 0).sum()) == 4


def test_a_frozen_bias_stays_frozen_and_its_lost_mask_is_told() -> None:
    model = _net()
    prune.l1_unstructured(model[0], "weight", 0.9)
    prune.l1_unstructured(model[0], "bias", 0.5)
    model[0].bias_orig.requires_grad_(False)
    assert not SparseLinear.from_linear(model[0]).bias.requires_grad
    with pytest.warns(UserWarning, match="bias is applied once"):
        sparsify(model, FromMask())
    assert not model[0].bias.requires_grad and model[0].values.requires_grad


# -- what users added to a layer


class _Calls:
    """Hooks of every kind that a layer's call runs, and what they saw."""

    def __init__(self, layer: nn.Module) -> None:
        self.seen: list[str] = []
        self.handles = [
            layer.register_forward_pre_hook(self._pre, with_kwargs=True),
            layer.register_forward_hook(self._post),
            layer.register_forward_hook(lambda *_: self.seen.append("always"), always_call=True),
            layer.register_full_backward_pre_hook(lambda *_: self.seen.append("before backward")),
            layer.register_full_backward_hook(lambda *_: self.seen.append("backward")),
        ]

    def _pre(self, layer, args, kwargs):
        self.seen.append(type(layer).__name__)
        return (args[0] + 1,), kwargs

    def _post(self, layer, args, out):
        return out * layer.gain + layer.shift


def _extended(layer: nn.Module) -> _Calls:
    layer.gain = nn.Parameter(torch.tensor(3.0))
    layer.register_buffer("shift", torch.tensor(0.5))
    layer.register_buffer("passing", torch.tensor(1.0), persistent=False)
    layer.inner = nn.Dropout().eval()
    layer.note, layer._unknown = "first", [1]
    return _Calls(layer)


@pytest.mark.parametrize("pruned", [False, True])
def test_hooks_and_what_was_added_go_over_to_the_replacement_and_back(pruned) -> None:
    model = _net()
    if pruned:
        prune.l1_unstructured(model[0], "weight", 0.75)
    calls, old = _extended(model[0]), model[0]
    x = torch.randn(5, 32, requires_grad=True)

    def check(kind: str) -> None:
        layer = model[0]
        assert (layer.gain, layer.shift, layer.passing, layer.inner) == (old.gain, old.shift, old.passing, old.inner)
        assert layer.note == "first" and layer._unknown is old._unknown and not layer.inner.training
        assert "0.gain" in dict(model.named_parameters()) and "0.shift" in model.state_dict()
        assert "0.passing" not in model.state_dict()
        weight = layer.weight.detach()
        dense = weight if type(layer) is nn.Linear else weight.to_dense()
        calls.seen.clear()
        out = layer(x)
        torch.testing.assert_close(out, nn.functional.linear(x + 1, dense, layer.bias) * 3 + 0.5)
        out.sum().backward()
        assert calls.seen == [kind, "always", "before backward", "backward"]

    sparsify(model, FromMask() if pruned else Unstructured(0.75))
    check("SparseLinear")
    densify(model)
    check("Linear")
    for handle in calls.handles:
        handle.remove()
    calls.seen.clear()
    model(x)
    # handles reach the layer that torch pruned, not its replacement
    assert calls.seen == (["Linear", "always"] if pruned else [])


def _own_forward(layer: nn.Module) -> None:
    layer.forward = lambda x: x


def _state_hook(layer: nn.Module) -> None:
    layer.register_state_dict_post_hook(lambda *_: None)


def _load_hook(layer: nn.Module) -> None:
    layer.register_load_state_dict_pre_hook(lambda *_: None)


def _named_as_ours(layer: nn.Module) -> None:
    layer.register_buffer("pointers" if type(layer) is nn.Linear else "weight_scale", torch.ones(1))
    layer.extra_repr = layer.extra_repr


def _other_parametrization(layer: nn.Module) -> None:
    layer.gain = nn.Parameter(torch.ones(2))
    parametrize.register_parametrization(layer, "gain", nn.Identity())


def _old_weight_norm(layer: nn.Module) -> None:
    nn.utils.weight_norm(layer, "weight" if isinstance(layer, nn.Linear) else "values", dim=None)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_own_forward, "its own forward"), (_state_hook, "hooks on its state"), (_load_hook, "hooks on its state"),
        (_named_as_ours, "its own extra_repr"), (_other_parametrization, "parametrizations of gain"),
        (_old_weight_norm, "a hook that computes its (weight|values)"),
    ],
)  # fmt: skip
def test_a_layer_that_would_lose_something_stays_and_the_warning_says_why(change, says) -> None:
    model = _net()
    change(model[2])
    kept = model[2]
    with pytest.warns(UserWarning, match=f"sparsify leaves layers as they are: 2 .{says}"):
        sparsify(model, Unstructured(0.5))
    assert model[2] is kept and type(model[0]) is SparseLinear
    change(model[0])
    kept = model[0]
    with pytest.warns(UserWarning, match=f"densify leaves layers as they are: 0 .{says}"):
        densify(model)
    assert model[0] is kept


def test_layers_of_resu_keep_what_was_added() -> None:
    model = wrap_module(_net())
    calls = _extended(model[0])
    model[0].masked.prune_(model[0].weight, torch.rand_like(model[0].weight) < 0.3)
    x = torch.randn(5, 32)
    expected = model(x)
    for make, kind in ((lambda: sparsify(model, FromMask()), "SparseLinear"), (lambda: densify(model), "Linear")):
        make()
        calls.seen.clear()
        torch.testing.assert_close(model(x), expected)
        assert calls.seen == [kind, "always"] and model[0].note == "first"
    plain = densify(wrap_module(nn.Sequential(nn.Conv2d(2, 2, 1), nn.MultiheadAttention(4, 2))))
    assert not hasattr(plain[0], "masked") and not hasattr(plain[1], "masked")


def test_layers_that_are_sparse_already_are_told_of() -> None:
    model = sparsify(_net(), Unstructured(0.5))
    modules, values = list(model.modules()), model[0].values.clone()
    with pytest.warns(UserWarning, match="0, 2 .sparse already, .*densify"):
        assert sparsify(model, Unstructured(0.9)) is model
    assert list(model.modules()) == modules and torch.equal(model[0].values, values)
    with pytest.warns(UserWarning, match="0, 2 .sparse already"):  # where the filter knows no other than plain layers
        sparsify(model, Unstructured(0.9), filter=lambda layer, name: isinstance(layer, nn.Linear))
    alone = sparsify(nn.Linear(8, 8), Unstructured(0.5))
    with pytest.warns(UserWarning, match="the model .sparse already"):
        assert sparsify(alone, Unstructured(0.5)) is alone


@pytest.mark.filterwarnings("error")
def test_layers_are_made_sparse_one_after_another() -> None:
    model = sparsify(_net(), Unstructured(0.5), filter=lambda layer, name: name == "0")
    sparsify(model, Unstructured(0.5), filter=lambda layer, name: name == "2")
    assert type(model[0]) is type(model[2]) is SparseLinear
    assert densify(densify(model)) is model


def test_a_config_that_takes_nothing_says_so() -> None:
    model = _net()
    with pytest.warns(UserWarning, match=r"0, 2 .too few zeros for FromMask\(least=0.5, format=CSR\)"):
        sparsify(model, FromMask())
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("config", [Unstructured(0.5), NM(2, 4), Unstructured(0.5, by="wanda"), Block(4, 0.5)])
def test_in_inference_mode_the_layers_learn_afterwards(config) -> None:
    model, x = _net(), torch.randn(5, 32)
    with torch.inference_mode():
        sparsify(model, config, batches=[torch.randn(5, 32)])
        inside = model(x)
    assert not any(one.is_inference() for one in (*model.parameters(), *model.buffers()))
    model(x).sum().backward()
    assert model[0].values.grad is not None
    with torch.inference_mode():
        densify(model)
    assert not any(one.is_inference() for one in model.parameters())
    torch.testing.assert_close(model(x), inside)
    model(x).sum().backward()
    assert model[0].weight.grad is not None


def test_densify_needs_numbers() -> None:
    model = sparsify(_net(), Unstructured(0.5)).to("meta")
    with pytest.raises(FormatError, match="0 is on the meta device"):
        densify(model)
    assert type(model[0]) is SparseLinear


def test_replacing_layers_draws_no_random_numbers() -> None:
    model = wrap_module(nn.Sequential(nn.Linear(8, 8), nn.Conv2d(2, 2, 1), nn.MultiheadAttention(4, 2)))
    state = torch.get_rng_state()
    densify(sparsify(model, Unstructured(0.5), filter=lambda layer, name: name == "0"))
    assert torch.equal(torch.get_rng_state(), state)
