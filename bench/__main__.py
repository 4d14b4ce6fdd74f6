"""`python -m bench spmm`: prints every figure as it is measured and writes them as JSON."""

import argparse
import sys
from importlib import import_module
from pathlib import Path

import torch

from bench import documents, plots
from bench.local import verbs
from bench.spiking.networks import PRECISIONS
from bench.suites import SUITES
from bench.timing import MODES

DOCUMENTS = {"table": documents.write, "plots": plots.write}
"""What is made of results, from the folder that they are in."""


def main() -> int:
    """Run the benchmark named on the command line; 2 if it needs a CUDA device and there is none."""
    if sys.argv[1:2] and sys.argv[1] in verbs.VERBS:
        return verbs.main(sys.argv[1], sys.argv[2:])
    arguments = _parser().parse_args()
    arguments.modes = tuple(arguments.modes)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.suite in DOCUMENTS:
        DOCUMENTS[arguments.suite](arguments.out)
        return 0
    suite = SUITES[arguments.suite]
    if suite.needs_gpu and not torch.cuda.is_available():
        print("the benchmarks need a CUDA device; none was found", file=sys.stderr)
        return 2
    module = import_module(f"bench.{suite.module}")
    name = f"snn_{arguments.network}" if arguments.suite == "snn-network" else arguments.suite.replace("-", "_")
    print(suite.told(module, suite.saved(arguments.out / f"{name}.json", suite.rows(module, arguments))))
    return 0


def _parser() -> argparse.ArgumentParser:
    told = f"{', '.join(verbs.VERBS)} have options of their own: python -m bench geo -h"
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, epilog=told)
    parser.add_argument("suite", choices=(*SUITES, *DOCUMENTS))
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the JSON files")
    parser.add_argument("--network", default="sew_resnet34", choices=("sew_resnet34", "spiking_resnet34"))
    parser.add_argument("--precision", nargs="+", choices=(*PRECISIONS, "amp"), help="instead of all")
    parser.add_argument("--sizes", type=int, nargs="+", help="of the layers of `loop`, instead of all")
    parser.add_argument("--names", nargs="+", help="of networks or layers, instead of all")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES, help="of torch.compile")
    parser.add_argument("--steps", type=int, nargs="+", help="time steps of `snn-latency` and `snn-training`")
    parser.add_argument("--batches", type=int, nargs="+", help="of `snn-latency` and `snn-training`")
    parser.add_argument("--workers", type=int, help="processes that compile cases side by side")
    parser.add_argument("--threads", type=int, default=1, help="of each worker of `snn-latency` and `snn-training`")
    parser.add_argument("--data", type=Path, help="folder with spikes/ and matrices/ of real ones, for more cases")
    return parser


if __name__ == "__main__":
    sys.exit(main())
