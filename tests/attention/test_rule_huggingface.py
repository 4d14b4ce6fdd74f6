"""Models of transformers, with sliding windows and without, are found unchanged, whichever attention they choose."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewriting import rewritten

pytestmark = pytest.mark.slow(reason="builds and traces whole models")
transformers = pytest.importorskip("transformers")
SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
WINDOW = {**SMALL, "sliding_window": 32}


def made(name: str, config: str, settings: dict[str, Any]) -> Callable[[str], torch.nn.Module]:
    """What makes a model of random weights for an implementation of attention."""
    return lambda attention: getattr(transformers, name)(
        getattr(transformers, config)(**settings, attn_implementation=attention)
    ).eval()


MODELS = {
    "mistral": made("MistralForCausalLM", "MistralConfig", WINDOW),
    "gemma3": made("Gemma3ForCausalLM", "Gemma3TextConfig", {**WINDOW, "head_dim": 16}),
    "qwen2": made("Qwen2ForCausalLM", "Qwen2Config", {**WINDOW, "use_sliding_window": True, "max_window_layers": 0}),
    "llama": made("LlamaForCausalLM", "LlamaConfig", SMALL),
}
CASES = [*((name, how) for name in MODELS for how in ("sdpa", "eager")), ("gemma2", "eager")]
MODELS["gemma2"] = made("Gemma2ForCausalLM", "Gemma2Config", {**WINDOW, "head_dim": 16})  # its scores are capped


@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_model_of_random_weights(name: str, how: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name](how)
    tokens = torch.randint(64, (2, 300))
    with torch.no_grad():
        found, report = rewritten(lambda tokens: model(tokens, use_cache=False).logits, tokens, strict=True)
        right = model(tokens, use_cache=False).logits
    sites = [one for one in report.sites if one.rule == "block_attention"]
    assert [one.rewritten for one in sites] == [True, True], [one.reason for one in sites]
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_padding_is_scanned_once_for_all_layers(how: str, left: bool) -> None:
    """Queries of padding before a sequence have the least number added to all of their scores."""
    torch.manual_seed(0)
    model = MODELS["mistral"](how)
    tokens = torch.randint(64, (2, 300))
    there = (torch.arange(300) < torch.tensor([[300], [200]])).long()
    there = there.flip(1) if left else there
    with torch.no_grad():
        found, report = rewritten(
            lambda x, there: model(x, attention_mask=there, use_cache=False).logits, tokens, there, strict=True
        )
        right = model(tokens, attention_mask=there, use_cache=False).logits
    assert [one.rewritten for one in report.sites if one.rule == "block_attention"] == [True, True]
    assert report.graph_after.count("sparsecomp.scanned_mask.default(") == 1
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)
