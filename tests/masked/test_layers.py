"""Masked weights and their layers: phases, identity, and all the ways a mask could get lost or be bypassed."""

import copy
import gc

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from sparsecomp.errors import InputError, MaskError
from sparsecomp.nn import RESUConv2d, RESULinear, RESUMultiheadAttention, masked_weights, wrap_module
from sparsecomp.runtime import MaskedWeight, Mode, ResurrectionEmbedding

pytestmark = pytest.mark.quick_cases(3)


def half(weight, seed=0):
    return torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def pruned(model, seed=0):
    for weight, masked in masked_weights(model).values():
        masked.prune_(weight, half(weight, seed))
    return model


def layers():
    torch.manual_seed(0)
    return wrap_module(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 4)))


IMAGES = torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(1))


def test_the_phases_of_a_weight_and_what_each_refuses():
    weight = nn.Parameter(torch.arange(1.0, 7).view(2, 3))
    masked, mask = MaskedWeight(weight), torch.tensor([[1, 0, 1], [0, 1, 0]])
    assert masked.mode is Mode.DENSE and masked.effective(weight) is weight
    for call in (
        lambda: masked.enter_resu_(weight),
        lambda: masked.theta(weight),
        lambda: masked.commit_(weight, mask),
    ):
        with pytest.raises(MaskError, match="the weight is DENSE"):
            call()
    masked.prune_(weight, mask)
    assert weight.tolist() == [[1, 0, 3], [0, 5, 0]] and masked.mode is Mode.SPARSE
    masked.enter_resu_(weight)
    assert masked.theta(weight).tolist() == [0, 0, 0] and masked.effective(weight) is weight
    with pytest.raises(MaskError, match="commit_ ends"):
        masked.prune_(weight, mask)
    with pytest.raises(MaskError, match="the weight has no gradient, so theta has none: call backward first"):
        masked.theta_grad(weight)
    weight.grad = torch.arange(10.0, 16).view(2, 3)
    assert masked.theta_grad(weight).tolist() == [11, 13, 15]
    with torch.no_grad():
        weight[0, 1] = 9
    masked.commit_(weight, torch.tensor([[0, 1, 1], [0, 1, 0]]))
    assert weight.tolist() == [[0, 9, 3], [0, 5, 0]]
    masked.enter_resu_(weight, torch.tensor([7.0, 8.0, 6.0]))
    assert weight.tolist() == [[7, 9, 3], [8, 5, 6]]
    masked.densify_(weight)
    assert masked.mode is Mode.DENSE and weight.tolist() == [[7, 9, 3], [8, 5, 6]]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.ones(3, 2), "shape"),
        (torch.full((2, 3), 0.5), "other than 0 and 1"),
        (torch.ones(2, 3, device="meta"), "meta"),
    ],
)
def test_a_bad_mask_changes_nothing(bad, message):
    weight = nn.Parameter(torch.randn(2, 3))
    masked, before = MaskedWeight(weight), weight.detach().clone()
    with pytest.raises(MaskError, match=message):
        masked.prune_(weight, bad)
    assert masked.mode is Mode.DENSE and torch.equal(weight, before) and masked.mask.mask.all()
    frozen = nn.Parameter(torch.randn(2, 3), requires_grad=False)
    masked.prune_(frozen, half(frozen))
    masked.enter_resu_(frozen)
    with pytest.raises(MaskError, match="requires_grad is False"):
        masked.theta_grad(frozen)


@pytest.mark.parametrize("shape", [(0,), (5,), (4, 0), (3, 4), (1,)])
def test_weights_of_any_shape_and_whole_ones_pruned(shape):
    weight = nn.Parameter(torch.randn(shape))
    masked = MaskedWeight(weight)
    masked.prune_(weight, torch.zeros(shape, dtype=torch.bool))
    masked.enter_resu_(weight)
    assert masked.theta(weight).shape == (weight.numel(),) and not weight.any()
    masked.commit_(weight, torch.ones(shape, dtype=torch.bool))
    assert masked.mask.sparsity == 0


def test_wrapping_keeps_parameters_hooks_and_the_function():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4, bias=False), "c": nn.Conv2d(1, 2, 3), "d": nn.ReLU()}
    )
    model["b"].weight = model["a"].weight
    calls, before = [], dict(model.named_parameters())
    model["a"].register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(3, 4)
    expected = model["a"](x)
    assert wrap_module(model.eval(), skip=["c"]) is model
    assert [type(module) for module in model.values()] == [RESULinear, RESULinear, nn.Conv2d, nn.ReLU]
    assert dict(model.named_parameters()) == before and not model["a"].training
    assert torch.equal(model["a"](x), expected) and len(calls) == 2
    assert model["a"].masked is model["b"].masked and list(masked_weights(model)) == ["a.weight"]
    wrap_module(model)
    assert type(model["c"]) is RESUConv2d and model["a"].masked is model["b"].masked
    with pytest.raises(MaskError, match="'x'"):
        wrap_module(model, skip=["x"])


def test_layers_that_cannot_be_wrapped_are_refused_and_the_model_stays():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.MultiheadAttention(4, 2))
    torch.nn.utils.spectral_norm(model[1])
    with pytest.raises(MaskError, match="weight of 1 is no parameter"):
        wrap_module(model)
    with pytest.raises(MaskError, match="part of an attention"):
        wrap_module(model, skip=["1", "2.out_proj"])
    assert [type(module) for module in model] == [nn.Linear, nn.Linear, nn.MultiheadAttention]
    wrap_module(model, skip=["1", "2"])
    assert list(masked_weights(model)) == ["0.weight"]


def test_classes_derived_from_the_layers_and_shared_projections_keep_what_they_are():
    class Own(RESUMultiheadAttention):
        pass

    attention = Own(8, 2, kdim=6, vdim=6)
    assert type(attention) is Own and len(masked_weights(attention)) == 4
    tied = nn.MultiheadAttention(8, 2, kdim=6, vdim=6)
    tied.v_proj_weight = tied.k_proj_weight
    weights = wrap_module(tied).masked_weights()
    assert weights["k_proj_weight"][1] is weights["v_proj_weight"][1] and len(masked_weights(tied)) == 3


@pytest.mark.parametrize("optimizer", [
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.Adam(p, 0.1),
    lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1),
])  # fmt: skip
def test_momentum_of_any_optimizer_revives_no_pruned_weight(optimizer):
    model, target = layers(), torch.randn(5, 4)
    stepper = optimizer(model.parameters())

    def step():
        stepper.zero_grad()
        F.mse_loss(model(IMAGES), target).backward()
        stepper.step()

    step()
    pruned(model)
    for _ in range(3):
        step()
    plain = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        for (weight, masked), (name, other) in zip(
            masked_weights(model).values(), ((n, p) for n, p in plain.named_parameters() if "weight" in n), strict=True
        ):  # fmt: skip
            other.copy_(weight.masked_fill(~masked.mask.mask, 0))
            assert torch.equal(masked.effective(weight), other), name
            assert not weight.grad[~masked.mask.mask].any()
        for name, bias in plain.named_parameters():
            if "bias" in name:
                bias.copy_(model.get_parameter(name))
    torch.testing.assert_close(model(IMAGES), plain(IMAGES))
    # as a plain model loads it
    saved = model.state_dict()
    assert all(torch.equal(saved[name], parameter) for name, parameter in plain.named_parameters())
    step()
    model.eval()
    assert all(not weight[~masked.mask.mask].any() for weight, masked in masked_weights(model).values())


def test_resu_entry_with_zeros_is_the_same_function_and_theta_has_its_own_gradient():
    model = pruned(layers())
    before = model(IMAGES)
    references = {}
    for name, (weight, masked) in masked_weights(model).items():
        masked.enter_resu_(weight)
        references[name] = ResurrectionEmbedding(masked.mask)
    out = model(IMAGES)
    assert torch.equal(out, before)
    out.square().sum().backward()
    weights = {name: references[name](weight.detach()) for name, (weight, _) in masked_weights(model).items()}
    apart = torch.func.functional_call(model, weights, (IMAGES,))
    assert torch.equal(apart, out)
    apart.square().sum().backward()
    for name, (weight, masked) in masked_weights(model).items():
        theta = references[name].theta
        assert theta.grad.abs().sum() > 0
        assert torch.equal(masked.theta_grad(weight), theta.grad), name


@pytest.mark.parametrize("carry", ["state_dict", "deepcopy", "half", "save"])
def test_masks_and_modes_are_carried(carry, tmp_path):
    model = pruned(layers())
    weight, masked = next(iter(masked_weights(model).values()))
    masked.enter_resu_(weight, torch.full_like(masked.mask.pruned, 2, dtype=torch.float32))
    if carry == "deepcopy":
        other = copy.deepcopy(model)
    elif carry == "half":
        other = copy.deepcopy(model).to(torch.float16)
    else:
        other = layers()
        state = model.state_dict()
        if carry == "save":
            torch.save(state, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt", weights_only=True)
        other.load_state_dict(state)
    for (mine, known), (theirs, found) in zip(
        masked_weights(model).values(), masked_weights(other).values(), strict=True
    ):
        assert found.mode is known.mode and torch.equal(found.mask.mask, known.mask.mask)
        assert torch.equal(theirs.float(), mine.to(theirs.dtype).float()) and found is not known
    for code in (torch.tensor(7), torch.tensor(1.5), torch.tensor(torch.nan), torch.tensor([1, 1]), 3):
        with pytest.raises(MaskError, match="code is"):
            other.load_state_dict({**model.state_dict(), "0.masked.code": code})
    for missing in ("0.masked.code", "0.masked.mask.mask"):
        with pytest.raises(MaskError, match="give both"):
            other.load_state_dict({k: v for k, v in model.state_dict().items() if k != missing}, strict=False)
    floats = {k: v.float() if k.endswith("mask.mask") else v for k, v in model.state_dict().items()}
    other.load_state_dict(floats, assign=True)
    assert other[0].masked.mask.mask.dtype is torch.bool and torch.equal(other[0].weight, model[0].weight)
    broken = {"weight": torch.zeros(3, 2, 3, 3), "masked.mask.mask": torch.full((3, 2, 3, 3), 3)}
    layer, bits = other[0], other[0].weight.detach().clone()
    with pytest.raises(MaskError, match="other than 0 and 1"):
        layer.load_state_dict(broken, strict=False)
    assert torch.equal(layer.weight, bits), "refused before anything is taken"
    for bad in (torch.full((3, 2, 3, 3), 0.5), torch.ones(3, 2, 3)):
        with pytest.raises(MaskError):
            layer.masked.mask.load_state_dict({"mask": bad})


def test_modes_follow_buffers_that_others_write():
    model = layers()
    average = torch.optim.swa_utils.AveragedModel(model)
    pruned(model)
    for weight, masked in masked_weights(model).values():
        masked.apply_(weight)
    average.update_parameters(model)
    # an average of dense weights and sparse ones
    average.update_parameters(layers())
    average.update_parameters(model)
    average.eval()
    for (weight, masked), (_, known) in zip(
        masked_weights(average).values(), masked_weights(model).values(), strict=True
    ):
        assert masked.mode is Mode.SPARSE and torch.equal(masked.mask.mask, known.mask.mask)
        assert weight[~masked.mask.mask].eq(0).all() and weight[masked.mask.mask].ne(0).any()
    average.module[0].masked.code.fill_(7)
    with pytest.raises(MaskError, match="code is 7"):
        average.eval()


def test_all_that_a_weight_keeps_is_on_its_device():
    model = wrap_module(nn.Linear(3, 2, device="meta")).train()
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"} and model.mode is Mode.DENSE
    model.load_state_dict(pruned(wrap_module(nn.Linear(3, 2))).state_dict(), assign=True)
    assert model.mode is Mode.SPARSE


@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 10}])
@pytest.mark.parametrize("training", [True, False])
def test_attention_is_pruned_truly_and_in_the_fast_path(sizes, training):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True, **sizes)
    kv = [torch.randn(3, 5, sizes.get(name, 8)) for name in ("kdim", "vdim")]
    q = torch.randn(3, 4, 8) if sizes else kv[0]
    reference = copy.deepcopy(attention)
    wrap_module(attention)
    assert type(attention) is RESUMultiheadAttention and len(masked_weights(attention)) == (4 if sizes else 2)
    kv = kv if sizes else [q, q]
    assert torch.equal(attention(q, *kv)[0], reference(q, *kv)[0])
    pruned(attention)
    with torch.no_grad():
        for name, (weight, masked) in masked_weights(attention).items():
            reference.get_parameter(name).copy_(weight)
            weight.add_(~masked.mask.mask)  # as a foreign optimizer would
    attention.train(training), reference.train(training)
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(attention(q, *kv)[0], reference(q, *kv)[0])
    if training:
        attention(q, *kv)[0].square().sum().backward()
        for weight, masked in masked_weights(attention).values():
            assert weight.grad is not None and not weight.grad[~masked.mask.mask].any()
    assert attention.mode is Mode.SPARSE and RESUMultiheadAttention(8, 2)(q[:, :, :8], q, q)[0].shape == q.shape


@pytest.mark.parametrize("loaded", [False, True])
def test_a_transformer_layer_reads_no_pruned_weight_in_its_fast_path(loaded):
    torch.manual_seed(0)
    layer = wrap_module(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    pruned(layer)
    reference = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    reference.load_state_dict({k: v for k, v in layer.state_dict().items() if "masked" not in k})
    with torch.no_grad():
        for weight, masked in masked_weights(layer).values():
            weight.add_(~masked.mask.mask)
        x = torch.randn(2, 5, 8)
        if loaded:
            state, layer = layer.state_dict(), wrap_module(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
            layer.eval().load_state_dict(state)
        torch.testing.assert_close((layer if loaded else layer.eval())(x), reference(x))


def test_autocast_scaling_accumulation_and_tied_weights():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    model[1].weight = model[0].weight
    pruned(wrap_module(model))
    weight, masked = masked_weights(model)["0.weight"]
    x = torch.randn(4, 8)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            out = model[1](model[0](x))
        assert out.dtype is torch.bfloat16
        scaler.scale(out.float().square().sum()).backward()
    assert weight.grad.abs().sum() > 0 and not weight.grad[~masked.mask.mask].any()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layers_follow_their_phases(backend):
    model, x = pruned(layers()), IMAGES
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    for weight, masked in masked_weights(model).values():
        masked.enter_resu_(weight)
        with torch.no_grad():
            weight[~masked.mask.mask] = 0.5
    torch.testing.assert_close(compiled(x), model(x))
    for weight, masked in masked_weights(model).values():
        masked.commit_(weight, half(weight, 3))
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.slow(reason="compiles attention in training and out of it")
@pytest.mark.parametrize("backend", ["eager", "sparsecomp"])
def test_compiled_attention_follows_its_phases(backend):
    torch.compiler.reset()
    torch.manual_seed(0)
    layer, x = wrap_module(nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)), torch.randn(2, 5, 8)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    pruned(layer)
    with torch.no_grad():
        for weight, masked in masked_weights(layer).values():
            weight.add_(~masked.mask.mask)
    sparse = compiled(x)
    torch.testing.assert_close(sparse, copy.deepcopy(layer).eval()(x))
    for weight, masked in masked_weights(layer).values():
        masked.enter_resu_(weight)
        with torch.no_grad():
            weight[~masked.mask.mask] = 0.5
    resurrected = compiled(x)
    torch.testing.assert_close(resurrected, copy.deepcopy(layer).eval()(x))
    assert (resurrected - sparse).abs().max() > 0.01


def _replica(rank, path, results):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = wrap_module(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)))
    if rank == 0:
        pruned(model)
    else:
        for weight, masked in masked_weights(model).values():
            masked.prune_(weight, half(weight, 9))
    replicas = nn.parallel.DistributedDataParallel(model)
    replicas(torch.randn(3, 6)).sum().backward()
    results[rank] = [
        (masked.mask.mask.tolist(), weight.grad.tolist()) for weight, masked in masked_weights(model).values()
    ]
    del replicas
    gc.collect()  # the last owner of a process group must not be DistributedDataParallel: its end would never come
    torch.distributed.destroy_process_group()


@pytest.mark.slow(reason="starts processes")
def test_two_processes_have_the_first_one_s_masks(tmp_path):
    with mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        mp.spawn(_replica, (str(tmp_path / "store"), results), nprocs=2)
        assert results[0] == results[1]
        assert results[0][0][0] == half(torch.empty(5, 6)).tolist()


def test_only_a_module_is_wrapped():
    with pytest.raises(InputError, match="model is a list, needs an nn.Module"):
        wrap_module([nn.Linear(2, 2)])
