"""Projections of attention by a pattern, pruned and resurrected: the pattern stays, and so do names and checkpoints."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import sparsecomp
from sparsecomp.attention import GlobalTokens, LocalWindow
from sparsecomp.nn import RESUSparseMultiheadAttention, SparseMultiheadAttention, masked_weights, wrap_module
from sparsecomp.runtime import Mode, Phase, RESUAdamW, RESUConfig, RESUCycle
from sparsecomp.training.pruning.calibration import calibrate

PATTERN = LocalWindow(5, 0) | GlobalTokens(1)
SIZES: list[dict[str, int]] = [{}, {"kdim": 10, "vdim": 12}]


def layer_of(**settings: Any) -> SparseMultiheadAttention:
    torch.manual_seed(0)
    return SparseMultiheadAttention(PATTERN, 24, 3, batch_first=True, **settings)


def inputs(sizes: dict[str, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 30, 24, generator=generator)
    return [x] * 3 if not sizes else [
        x, *(torch.randn(2, 30, sizes[name], generator=generator) for name in ("kdim", "vdim"))]  # fmt: skip


def by_torch(layer: nn.MultiheadAttention, weights: dict[str, Tensor], *given: Tensor) -> Tensor:
    """Torch's layer with these weights, by the pattern's mask."""
    plain = nn.MultiheadAttention(24, 3, batch_first=True, kdim=layer.kdim, vdim=layer.vdim)
    own = {name: value for name, value in layer.named_parameters() if not name.startswith("masked")}
    plain.load_state_dict({**own, **weights})
    mask = ~PATTERN.to_dense(30)[0, 0]
    return plain(*given, attn_mask=mask, need_weights=False)[0]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("training", [True, False])
def test_a_wrapped_layer_keeps_pattern_names_and_checkpoints(sizes: dict[str, int], training: bool) -> None:
    layer, given = layer_of(**sizes), inputs(sizes)
    before, right = layer.state_dict(), layer(*given)[0]
    parameters = dict(layer.named_parameters())
    wrap_module(layer)
    assert type(layer) is RESUSparseMultiheadAttention and layer.pattern == PATTERN
    assert all(layer.get_parameter(name) is one for name, one in parameters.items())
    assert torch.equal(layer(*given)[0], right)
    missing, unexpected = layer.load_state_dict(before, strict=False)  # as of any layer that is wrapped
    assert not unexpected and all(name.startswith("masked.") for name in missing)
    pruned: dict[str, Tensor] = {}
    for name, (weight, masked) in masked_weights(layer).items():
        mask = torch.rand(weight.shape, generator=torch.Generator().manual_seed(2)) < 0.4
        masked.prune_(weight, mask)
        pruned[name] = weight.detach() * mask
        with torch.no_grad():
            weight.add_(~mask)  # as a foreign optimizer would
    layer.train(training)
    for needed in (False, True):  # over the pattern's blocks, and over all pairs
        found = layer(*given, need_weights=needed)[0]
        torch.testing.assert_close(found, by_torch(layer, pruned, *given), atol=1e-5, rtol=1e-5)
    found.square().sum().backward()
    for weight, masked in masked_weights(layer).values():
        assert weight.grad is not None and not weight.grad[~masked.mask.mask].any() and weight.grad.any()
    again = wrap_module(layer_of(**sizes))
    again.load_state_dict(layer.state_dict())
    torch.testing.assert_close(again(*given)[0], found, atol=1e-5, rtol=1e-5)
    plain = sparsecomp.densify(layer)
    assert type(plain) is SparseMultiheadAttention and plain.pattern == PATTERN
    assert list(plain.state_dict()) == list(before)
    torch.testing.assert_close(plain(*given)[0], found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("wrapped", [True, False])
def test_statistics_are_those_of_torchs_layer_by_the_mask(sizes: dict[str, int], wrapped: bool) -> None:
    """Of pruners that rank by what reaches a weight; the padding that a token mask drops is left out."""
    ours, given = layer_of(**sizes), inputs(sizes)
    torchs = nn.MultiheadAttention(24, 3, batch_first=True, **sizes)
    torchs.load_state_dict(ours.state_dict())
    mask = ~PATTERN.to_dense(30)[0, 0]
    valid = torch.arange(30).expand(2, 30) < 25
    found = []
    for layer, more in ((ours, {}), (ours, {"attn_mask": torch.zeros(30, 30, dtype=torch.bool)}),
                        (torchs, {"attn_mask": mask})):  # fmt: skip
        if wrapped:
            wrap_module(layer)
        names = None if wrapped else dict(layer.named_parameters())
        names = names and {name: one for name, one in names.items() if name.endswith("weight")}
        found.append(calibrate(layer, [given], lambda batch, layer=layer, more=more: layer(*batch, **more),
                               lambda batch: valid, True, names))  # fmt: skip
    assert found[0].keys() == found[1].keys() == found[2].keys() and "out_proj.weight" in found[0]
    for name, parts in found[2].items():
        for which in found[:2]:
            for one, other in zip(which[name], parts, strict=True):
                assert one.count == other.count == 50
                torch.testing.assert_close(one.mean, other.mean, atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(one.products, other.products, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("pruner", ["magnitude", "wanda", "sparsegpt"])
def test_a_resu_cycle(pruner: str) -> None:
    model = wrap_module(nn.Sequential(nn.TransformerEncoderLayer(24, 3, 32, dropout=0.0, batch_first=True)))
    block: Any = model[0]
    with torch.no_grad():
        block.self_attn = wrap_module(SparseMultiheadAttention.from_attention(nn.MultiheadAttention(
            24, 3, batch_first=True), PATTERN))  # fmt: skip
    optimizer = RESUAdamW(model, lr=1e-2)
    config = RESUConfig(
        cycles=1, train_steps=1, resu_steps=2, finetune_steps=1, sparsity_start=0.5, sparsity_end=0.5, pruner=pruner,
        budget="uniform",
    )
    cycle, x = RESUCycle(model, optimizer, config), inputs({})[0]
    seen = set()
    while not cycle.done:
        seen.add(cycle.phase)
        if cycle.steps_left:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            cycle.count_step()
        else:
            cycle.advance(lambda: calibrate(model, [x], model, products=pruner == "sparsegpt"))
    assert {Phase.PRUNE, Phase.RESU, Phase.COMMIT} <= seen
    found = {name: masked for name, (_, masked) in masked_weights(model).items() if "self_attn" in name}
    assert len(found) == 2 and all(masked.mode is Mode.SPARSE for masked in found.values())
    assert all(0.1 < masked.mask.sparsity <= 0.5 for masked in found.values())
    # what is to come reaches nothing: the pattern is still what it was
    (grad,) = torch.autograd.grad(block.self_attn(*[x.requires_grad_()] * 3)[0][0, 20].sum(), x)
    assert grad[0].abs().sum(-1).nonzero().flatten().tolist() == [0, *range(15, 21)]
    right = block.self_attn(*[x] * 3)[0]
    plain = sparsecomp.densify(copy.deepcopy(model))
    torch.testing.assert_close(plain[0].self_attn(*[x] * 3)[0], right)


def test_torchs_own_pruning() -> None:
    layer, given = layer_of(), inputs({})
    for owner, name in ((layer, "in_proj_weight"), (layer.out_proj, "weight")):
        prune.random_unstructured(owner, name, 0.5)
    weights = {"in_proj_weight": layer.in_proj_weight.detach(), "out_proj.weight": layer.out_proj.weight.detach()}
    found = layer(*given)[0]
    for owner, name in ((layer, "in_proj_weight"), (layer.out_proj, "weight")):
        prune.remove(owner, name)
    torch.testing.assert_close(found, by_torch(layer, weights, *given), atol=1e-5, rtol=1e-5)


def test_sparsify_takes_what_is_beside_the_attention() -> None:
    block = nn.TransformerEncoderLayer(24, 3, 32, dropout=0.0, batch_first=True)
    block.self_attn = SparseMultiheadAttention.from_attention(block.self_attn, PATTERN)
    names = {name for name in block.state_dict() if name.startswith("self_attn")}
    sparsecomp.sparsify(block, sparsecomp.Unstructured(0.5))
    assert {name for name in block.state_dict() if name.startswith("self_attn")} == names
    assert type(block.linear1) is sparsecomp.nn.SparseLinear and block(inputs({})[0]).isfinite().all()
