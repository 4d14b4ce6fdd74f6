"""Generation with sparse weights: a LLaMA-shaped model is pruned by SparseGPT, stored sparse, and generates compiled.

Needs transformers (`pip install transformers`). The model is tiny and its weights are random: what is shown is that the
tokens are those of the dense model with the same zeros, not that they say anything.
"""

import copy

import torch
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

import sparsecomp
from sparsecomp import SparseGPT, Unstructured
from sparsecomp.formats import NARROW

NEW = 12
"""Tokens to generate."""


def build() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    # what does not train keeps no transpose
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def mebibytes(model: torch.nn.Module) -> float:
    return sum(one.nbytes for one in (*model.parameters(), *model.buffers())) / 2**20


def main() -> None:
    torch.manual_seed(0)
    model = build()
    before = mebibytes(model)
    batches = [torch.randint(0, 256, (8, 32)) for _ in range(4)]  # of a real model: text
    config = Unstructured(0.8, by=SparseGPT(), format=NARROW)
    sparsecomp.sparsify(model, config, batches=batches, filter=lambda layer, name: name != "lm_head")
    print(f"weights: {before:.2f} MiB dense, {mebibytes(model):.2f} MiB sparse")

    prompt = torch.randint(0, 256, (1, 8))
    given = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    plain = sparsecomp.densify(copy.deepcopy(model))  # type: ignore[var-annotated]
    expected = plain.generate(prompt, **given)

    # with a static cache transformers compiles the step that decodes, on a GPU; by a backend of our choice
    how = CompileConfig(backend="sparsecomp", mode="default", fullgraph=False)
    how._compile_all_devices = True  # on a CPU too, for this example
    found = model.generate(prompt, **given, cache_implementation="static", compile_config=how)
    print(f"tokens: {found[0, 8:].tolist()}")
    assert torch.equal(found, expected), "the sparse model says something else than the dense one"
    report = sparsecomp.last_report()
    assert report is not None and any(site.rule == "sparse_linear" for site in report.sites)
    print("the tokens are those of the dense model with the same zeros")


if __name__ == "__main__":
    main()
