"""spikingjelly 0.0.0.0.12 and 0.0.0.0.14, which much published code still runs on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.quick_cases(1)

VARIABLE = "SPARSECOMP_OLD_SPIKINGJELLY"
CASES = [
    ("0.0.0.0.14", "spikingjelly.activation_based", "LIFNode"),
    ("0.0.0.0.14", "spikingjelly.activation_based", "ParametricLIFNode"),
    ("0.0.0.0.12", "spikingjelly.clock_driven", "LIFNode"),
    ("0.0.0.0.12", "spikingjelly.clock_driven", "IFNode"),
]


@pytest.mark.parametrize("version,package,kind", CASES)
@pytest.mark.slow_cases(3)
def test_exact_and_both_layers_on_spikes_are_rewritten(version, package, kind):
    folder = Path(os.environ.get(VARIABLE, "")) / version
    if VARIABLE not in os.environ or not folder.is_dir():
        pytest.skip(f"spikingjelly {version} is not there: .ci/install-snn-libraries puts it where {VARIABLE} says")
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), str(here.parent)))}
    command = [sys.executable, str(here / "old_spikingjelly_child.py"), package, kind]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    result = json.loads(child.stdout.splitlines()[-1])
    assert result["rate"] > 0.05
    assert (result["exact"], result["flips"], result["training flips"]) == (True, 0, 0)
    # Dynamo of torch 2.11 traces each layer of 0.0.0.0.14 alone: no graph has a neuron before a layer
    alone = torch.__version__.startswith("2.11.") and version == "0.0.0.0.14"
    layers = 0 if alone else 2
    assert set(result["rewritten"]) == {layers} and result["training rewritten"] == layers
