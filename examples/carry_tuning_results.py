"""Measure once, use elsewhere: tune a model, export the results, import them on another machine.

The other machine is played by another cache folder. Without a CUDA device there is nothing to measure; then only what
stands in h100.json travels: times of one operation, measured on an H100. Results count for the card and the Triton
version that they were measured with, and do no harm elsewhere.
"""

import os
import tempfile
from pathlib import Path

import torch
from torch import nn

import sparsecomp
from sparsecomp import cache

RESULTS = Path(__file__).with_name("h100.json")


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).to(device).eval()
    model = sparsecomp.sparsify(model, sparsecomp.Unstructured(0.9))
    x = torch.randn(64, 1024, device=device)
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "first.json", Path(folder) / "second.json"

        os.environ["SPARSECOMP_CACHE_DIR"] = str(Path(folder) / "here")
        with torch.no_grad():
            before = model(x)
            chosen = sparsecomp.tune(model, x, effort="quick")
            torch.testing.assert_close(model(x), before)
        print(f"tuned on {device}: {len(chosen)} choices")
        print(f"added {cache.import_(RESULTS)} results from {RESULTS.name}")
        written = cache.export(first)
        print(f"exported {written} results")

        os.environ["SPARSECOMP_CACHE_DIR"] = str(Path(folder) / "elsewhere")
        assert cache.stats().entries == 0
        print(f"imported {cache.import_(first)} results elsewhere")
        assert cache.stats().entries == written == len(chosen) + 4
        cache.export(second)
        assert second.read_bytes() == first.read_bytes()
        cache.import_(first)  # once more changes nothing
        assert cache.stats().entries == written


if __name__ == "__main__":
    main()
