"""One compiled graph serves every batch, and each batch runs the kernel of its bucket."""

from collections import Counter

import pytest
import torch
from kernel_devices import KERNEL_DEVICES
from torch import nn

from sparsecomp.compiler.backend import sparsecomp_backend
from sparsecomp.environment import Settings
from sparsecomp.lowering.cache.signature import device_of, size_bucket
from sparsecomp.lowering.cache.tuning_cache import TuningCache
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.spiking.packing import CAST, Cast, to_bytes
from sparsecomp.lowering.tuning import autotune
from sparsecomp.lowering.tuning.autotune import Tuner


class Spiking(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        return self.layer((x >= 0.5).to(x.dtype))


BATCHES = (1, 2, 3, 7, 64, 65, 511, 512)


@pytest.mark.slow(reason="Inductor compiles")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=KERNEL_DEVICES[1].marks)])
def test_batches_from_1_to_512_compile_at_most_two_graphs(device):
    compilations = Counter()

    def backend(gm, inputs):
        compilations["graphs"] += 1
        return sparsecomp_backend(gm, inputs, options={"implementation": "binary", "precision": "exact"})

    model = Spiking().to(device)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for batch in BATCHES:
            x = torch.rand(batch, 32, generator=torch.Generator().manual_seed(batch)).to(device)
            expected = nn.functional.linear((x >= 0.5).double(), model.layer.weight.double(), model.layer.bias.double())
            torch.testing.assert_close(compiled(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert compilations["graphs"] <= 2


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_each_bucket_runs_its_own_tuned_configuration(device, monkeypatch):
    """Of eight sizes in four buckets, each runs what the cache holds for its bucket, a different one for each."""
    cache = TuningCache(None)
    tuner = Tuner(cache, Settings())
    monkeypatch.setattr(autotune, "tuner", lambda: tuner)
    dispatch.forget()
    where = device_of(torch.device(device, 0) if device == "cuda" else torch.device("cpu"))
    configurations, ran = {}, []
    for index, sizes in enumerate(((100, 128), (129, 256), (300, 512), (513, 1000))):
        for size in sizes:
            problem = Cast(size, 0, False, "float32")
            candidates = CAST.candidates(problem, where)
            configurations[size_bucket(size)] = candidates[index].config
            names = {one.name: 1.0 + abs(place - index) for place, one in enumerate(candidates)}
            cache.put(CAST.signature(problem, where), times=names, verified=frozenset(names))
    prepare = CAST.candidates(problem, where)[0].template.prepare

    def recorded(problem, config):
        ran.append((problem.numel, config))
        return prepare(problem, config)

    object.__setattr__(CAST.candidates(problem, where)[0].template, "prepare", recorded)
    try:
        for size in (100, 128, 129, 256, 300, 512, 513, 1000):
            x = (torch.arange(size, dtype=torch.float32, device=device) % 5).reshape(1, size, 1, 1)
            assert torch.equal(to_bytes(x).reshape(-1), (torch.arange(size, device=device) % 5).to(torch.int8))
    finally:
        object.__setattr__(CAST.candidates(problem, where)[0].template, "prepare", prepare)
        dispatch.forget()
    assert ran == [(size, configurations[size_bucket(size)]) for size, _ in ran]
    assert len({str(config) for _, config in ran}) == 4


@pytest.mark.slow(reason="Inductor compiles")
def test_a_batch_that_is_marked_dynamic_stays_so_in_training():
    model = Spiking()
    compiled = torch.compile(
        model, backend="sparsecomp", fullgraph=True, options={"implementation": "binary"}
    )  # fmt: skip
    for batch in (6, 3):
        x = torch.rand(2, batch, 32)
        torch._dynamo.mark_dynamic(x, 1)  # raises where a size is fixed
        model.zero_grad()
        compiled(x).sum().backward()
        torch.testing.assert_close(model.layer.weight.grad, (x >= 0.5).float().sum((0, 1)).expand(32, 32))
