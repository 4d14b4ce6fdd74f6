"""A small GPT with a sliding window, written with dense masks, compiled unchanged: only blocks within the window run.

One layer computes attention by hand and keeps its mask as a buffer; the other computes its mask in each call and gives
it to torch's function. The first needs the promise that the buffer stays.
"""

import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsecomp

TOKENS, WIDTH, HEADS, WINDOW, VOCABULARY = 2048, 256, 4, 128, 256


class ByHand(nn.Module):
    """Attention as a product, a mask, a softmax and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
        self.register_buffer("mask", mask.tril() & mask.triu(-WINDOW), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (one.view(batch, tokens, HEADS, -1).transpose(1, 2) for one in self.inner(x).split(width, dim=2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(~self.mask[:tokens, :tokens], float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.outer(y.transpose(1, 2).contiguous().view(batch, tokens, width))


class ByFunction(nn.Module):
    """Attention by torch's function and a mask of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (one.view(batch, tokens, HEADS, -1).transpose(1, 2) for one in self.inner(x).split(width, dim=2))
        position = torch.arange(tokens, device=x.device)
        distance = position[:, None] - position
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance <= WINDOW))
        return self.outer(y.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = attention, nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def gpt() -> nn.Module:
    """The model."""
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), Block(ByHand()), Block(ByFunction()), nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, VOCABULARY),
    )  # fmt: skip


def seconds(function: nn.Module, tokens: Tensor) -> float:
    """The fastest of a few calls."""
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        function(tokens)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Compile, compare and time."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = gpt().to(device).eval()
    tokens = torch.randint(VOCABULARY, (1, TOKENS), device=device)
    stock = torch.compile(model)
    compiled = torch.compile(model, backend="sparsecomp", options={"frozen": "buffers"})
    with torch.no_grad():
        right, found = stock(tokens), compiled(tokens)
        report = sparsecomp.last_report()
        print(report)
        print("largest difference from stock compile:", float((found - right).abs().max()))
        torch.testing.assert_close(found, right, atol=1e-3, rtol=1e-3)
        times = [seconds(one, tokens) * 1e3 for one in (stock, compiled)]
        print(f"a call: {times[0]:.1f} ms stock, {times[1]:.1f} ms sparsecomp")
    sites = [site for site in report.sites if site.rule == "block_attention"]
    assert len(sites) == 2
    if device == "cpu":
        assert all(site.rewritten for site in sites), "an estimate says otherwise"


if __name__ == "__main__":
    main()
