"""Models of transformers, with sliding windows and without, are found unchanged, whichever attention they choose."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rewriting import rewritten
from torch import Tensor, fx

from sparsecomp.compiler.capture import Graph
from sparsecomp.options import Options
from sparsecomp.report import Report

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


class Rewriting:
    """A backend that runs what a model's graphs are rewritten to, op by op."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        options = Options.parse(None, {"implementation": "binary", "verify": True, "strict": True})
        self.reports.append(Graph.of_dynamo(gm, inputs, {}, options).rewrite(options))
        return gm.forward

    def assert_all_read_what_masks_keep(self, masks: int) -> None:
        """Both layers of each graph attend over the cache itself, by so many masks."""
        assert self.reports
        for report in self.reports:
            sites = [one for one in report.sites if one.rule == "decode_attention"]
            assert [one.rewritten for one in sites] == [True, True], [one.reason for one in sites]
            assert report.graph_after.count("kept_range.default(") == masks
            assert ".reshape(2, 4, " not in report.graph_after.replace(".reshape(2, 4, 1,", "")


def decoded(model: torch.nn.Module, step: Callable[..., Tensor], steps: int = 20) -> Tensor:
    """Tokens of a prompt's continuation by a static cache, each the likeliest, with steps beyond the window."""
    tokens = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1))
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    found = [model(tokens, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)]
    for _ in range(steps):
        found.append(step(found[-1], cache)[:, -1:].argmax(-1))
    return torch.cat(found, 1)


@pytest.mark.parametrize(("name", "how"), CASES)
@pytest.mark.slow_cases(2)
def test_a_step_with_a_static_cache(name: str, how: str) -> None:
    """The position is on its device, that of a sliding window's cache a number of the host's; the mask is computed."""
    torch.manual_seed(0)
    model, backend = MODELS[name](how), Rewriting()

    def step(tokens: Tensor, cache: Any) -> Tensor:
        return model(tokens, past_key_values=cache, use_cache=True).logits

    torch._dynamo.reset()
    with torch.no_grad():
        right = decoded(model, step)
        assert torch.equal(decoded(model, torch.compile(step, backend=backend)), right)
    backend.assert_all_read_what_masks_keep(2 if name == "gemma2" else 1)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generate_makes_the_mask_outside(name: str) -> None:
    """Of padding, too: it is an input of the compiled step."""
    torch.manual_seed(0)
    model, backend = MODELS[name]("sdpa"), Rewriting()
    tokens, there = torch.randint(1, 64, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    there[1, :7] = 0

    def run(gm: fx.GraphModule, inputs: Sequence[Any], **how: object) -> Callable[..., Any]:
        return backend(gm, inputs)  # transformers copies a backend that is an object

    how = transformers.CompileConfig(backend=run, mode=None, fullgraph=False, dynamic=False)
    how._compile_all_devices = True  # a CPU, too
    given = {"attention_mask": there, "max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    torch._dynamo.reset()
    right = model.generate(tokens, **given, pad_token_id=0)
    assert torch.equal(model.generate(tokens, **given, pad_token_id=0, compile_config=how), right)
    backend.assert_all_read_what_masks_keep(1)
