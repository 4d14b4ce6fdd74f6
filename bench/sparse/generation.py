"""Tokens a second of a pruned language model, a step at a time with a static cache: ours beside stock compile.

A LLaMA-shaped model with random weights, layers of the size of LLaMA-7B's and fewer of them, in float16, with zeros in
all linear layers. Stock compiles the dense model. Both replay CUDA graphs. Ours promises that its weights stay, and
counts the tokens that the dense model of the same zeros would have chosen too, given the same tokens before.
"""

import copy
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import sparsecomp
from bench.parallel import measured
from bench.table import markdown_grid
from bench.timing import guarded, wait
from sparsecomp import Unstructured
from sparsecomp.formats import BITMAP, NARROW, SparseMatrix

STOCK = ("stock", "stock, max-autotune")
OURS: dict[str, tuple[type[SparseMatrix], dict[str, Any]]] = {
    "sparsecomp": (NARROW, {}), "sparsecomp, max-autotune": (NARROW, {"mode": "max-autotune"}),
    "sparsecomp, one weight": (NARROW, {"memory": "low"}), "sparsecomp, one bitmap": (BITMAP, {"memory": "low"}),
}  # fmt: skip
"""Formats, and options beside the promise; by default a layer that is faster dense keeps a dense copy."""
_IN_BOTH_MODES = ("sparsecomp", "sparsecomp, max-autotune")
"""As stock is timed."""
BATCHES = (1, 8)
ZEROS = (0.5, 0.7, 0.9)
PROMPT, CACHE, STEPS = 32, 256, 64
"""Tokens of the prompt, of the cache, and generated in one timing."""
_REPEATS = 3


class Case(NamedTuple):
    """Who generates for how many sequences at once, with which share of zeros."""

    who: str
    batch: int
    zeros: float


CASES = [
    Case(who, batch, zeros)
    for batch in BATCHES for zeros in ZEROS for who in (*STOCK, *OURS) if who in _IN_BOTH_MODES or zeros == 0.7
]  # fmt: skip
"""Stock takes as long whatever is zero."""


def config(layers: int = 8) -> LlamaConfig:
    """1.9 billion parameters with 8 layers."""
    return LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=32, max_position_embeddings=2 * CACHE,
    )  # fmt: skip


def run(workers: int = 6, names: Sequence[str] = (*STOCK, *OURS)) -> Iterator[dict[str, Any]]:
    """A row a case: tokens a second, MiB held, and of ours the share of tokens that dense chooses too.

    Args:
        workers: processes. Each takes 11 to 12 GB of a card while it prepares a case: a process for each of the twenty
            is more than an H200 has.
        names: of who generates.
    """
    for row in measured(prepared, [case for case in CASES if case.who in names], workers, batch=1):
        print(row, flush=True)
        yield row


def prepared(case: Case, device: str = "cuda") -> Callable[[], dict[str, Any]]:
    """What measures a case; one that cannot be prepared is left out with its reason."""
    row: dict[str, Any] = case._asdict()
    ready: list[tuple[nn.Module, Generation]] = []
    guarded(row, _FIGURE, lambda: ready.append(_ready(case, device)))

    def measure() -> dict[str, Any]:
        if ready:
            guarded(row, _FIGURE, lambda: row.update(_figures(case, *ready[0])))
        return row

    return measure


_FIGURE = "tokens a second"


def _ready(case: Case, device: str) -> tuple[nn.Module, "Generation"]:
    model = _model(device)
    format, beside = OURS.get(case.who, (NARROW, {}))
    sparsecomp.sparsify(model, Unstructured(case.zeros, format=format))
    if case.who in OURS:
        options = {"mode": "reduce-overhead", "frozen": True, **beside}
        chosen, how = model, {"backend": "sparsecomp", "options": options}
    else:
        chosen, how = sparsecomp.densify(model), {"mode": case.who.partition(", ")[2] or "reduce-overhead"}
    generate = Generation(chosen, case.batch, device, how)
    generate()  # compiles
    generate()  # records
    gc.collect()
    torch.cuda.empty_cache()  # others prepare on the same card
    return chosen, generate


def _model(device: str) -> LlamaForCausalLM:
    """In float16 from the start: many workers make one at a time."""
    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config()).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(usual)


class Generation:
    """Greedy generation by a compiled step; a call generates `STEPS` tokens behind the same prompt.

    Args:
        model: of transformers.
        batch: sequences.
        device: of the model.
        how: keyword arguments of `torch.compile`.
    """

    def __init__(self, model: Any, batch: int, device: str, how: dict[str, Any]) -> None:
        self.model, self.cache = model, StaticCache(config=model.config, max_cache_len=CACHE)
        random = torch.Generator().manual_seed(1)
        self.prompt = torch.randint(0, model.config.vocab_size, (batch, PROMPT), generator=random).to(device)
        self.step = torch.compile(self._next, **how)
        self.seconds = 0.0

    def _next(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1:].argmax(-1)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The tokens (batch, STEPS); what the steps behind the prompt took is `seconds`."""
        self.cache.reset()
        token = self._next(self.prompt)
        found = [token]
        wait()
        begin = time.perf_counter()
        for _ in range(STEPS - 1):
            torch.compiler.cudagraph_mark_step_begin()
            token = self.step(token).clone()
            found.append(token)
        wait()
        self.seconds = time.perf_counter() - begin
        return torch.cat(found, 1)


@torch.no_grad()
def _figures(case: Case, model: nn.Module, generate: Generation) -> dict[str, Any]:
    seconds, tokens = [], generate.prompt
    for _ in range(_REPEATS):
        tokens = generate()
        seconds.append(generate.seconds)
    row: dict[str, Any] = {_FIGURE: round(case.batch * (STEPS - 1) / min(seconds), 1)}
    row["MiB"] = round(sum(one.nbytes for one in (*model.parameters(), *model.buffers())) / 2**20, 1)
    gc.collect()
    row["MiB held"] = round(torch.cuda.memory_allocated() / 2**20, 1)
    if case.who in OURS:
        dense = sparsecomp.densify(copy.deepcopy(model))
        whole = torch.cat([generate.prompt, tokens], 1)
        choices = dense(input_ids=whole).logits[:, PROMPT - 1 : -1].argmax(-1)
        row["as dense"] = round((choices == tokens).double().mean().item(), 4)
        report = sparsecomp.last_report()
        rules = ("sparse_linear", "gated_pair", "shared_input")
        sites = [] if report is None else [one.implementation for one in report.sites if one.rule in rules]
        row["runs as"] = {name: sites.count(name) for name in dict.fromkeys(sites)}
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Tokens a second, and how many times those of stock's best."""
    rows = [row for row in rows if _FIGURE in row]
    grid = [["batch", "who", _FIGURE, "weights, MiB", "held, MiB", "tokens as dense"]]
    for row in sorted(rows, key=lambda row: (row["batch"], row["who"] not in STOCK, row["who"], row["zeros"])):
        rivals = [one for one in rows if one["batch"] == row["batch"] and one["who"] in STOCK]
        best = max((one[_FIGURE] for one in rivals), default=None)
        gain = "" if best is None or row["who"] in STOCK else f" ({row[_FIGURE] / best:.2f})"
        same = f"{row['as dense']:.1%}" if "as dense" in row else "–"
        who = row["who"] + (f", {row['zeros']:.0%} zeros" if gain else "")
        sizes = [f"{row[name]:.0f}" for name in ("MiB", "MiB held")]
        grid.append([str(row["batch"]), who, f"{row[_FIGURE]:.0f}{gain}", *sizes, same])
    return markdown_grid(grid)
