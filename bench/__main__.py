"""`python -m bench snn`: prints every figure as it is measured and writes them as JSON."""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

from bench import card, cpu, documents, plots, table
from bench.local import verbs
from bench.masked import prune_minilm, resu_mnist
from bench.saving import save, save_each
from bench.sparse import algebra, dynamic
from bench.spiking.networks import PRECISIONS
from bench.timing import MODES

STUDIES = {"prune-minilm": prune_minilm, "resu-mnist": resu_mnist, "algebra": algebra, "dynamic": dynamic}
SUITES = (
    "loop", "loop-networks", "snn", "snn-conv", "snn-network", "tuning", "spmm", "semi-structured", "resu", "cpu",
    "card", "training-step", "snn-training", "attention", "attention-candidates",
    "masked-attention", *STUDIES, "table", "plots",
)  # fmt: skip


def main() -> int:
    """Run the benchmarks named on the command line; 2 if there is no CUDA device."""
    if sys.argv[1:2] and sys.argv[1] in verbs.VERBS:
        return verbs.main(sys.argv[1], sys.argv[2:])
    told = f"{', '.join(verbs.VERBS)} have options of their own: python -m bench geo -h"
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, epilog=told)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the JSON files")
    parser.add_argument("--network", default="sew_resnet34", choices=("sew_resnet34", "spiking_resnet34"))
    parser.add_argument("--precision", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--sizes", type=int, nargs="+", help="of the layers of `loop`, instead of all")
    parser.add_argument("--names", nargs="+", help="of the networks of `loop-networks`, instead of all")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES, help="of torch.compile, of `loop…`")
    parser.add_argument("--workers", type=int, help="processes that compile (1; 8 for `attention…`)")
    parser.add_argument("--data", type=Path, help="folder with spikes/ and matrices/ of real ones, for more cases")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.suite.replace('-', '_')}.json"
    if arguments.suite == "table":
        documents.write(arguments.out)
        return 0
    if arguments.suite == "plots":
        plots.write(arguments.out)
        return 0
    if arguments.suite == "cpu":
        save(path, cpu.run())
        return 0
    if arguments.suite in STUDIES:
        study = STUDIES[arguments.suite]
        rows = list(study.run())
        save(path, rows)
        print(study.table(rows))
        return 0
    if not torch.cuda.is_available():
        print("the benchmarks need a CUDA device; none was found", file=sys.stderr)
        return 2
    # they load Triton
    from bench import loop, loop_networks, tuning
    from bench.attention import block_attention, candidates, masked_models
    from bench.masked import resu
    from bench.sparse import semi_structured, spmm, training_step
    from bench.spiking import snn_conv, snn_network, snn_training

    if arguments.suite in ("loop", "loop-networks"):
        rows = []
        grid = loop.grid(sizes=tuple(arguments.sizes or loop.SIZES))
        names, workers = arguments.names or loop_networks.NETWORKS, arguments.workers or 1
        layers = arguments.suite == "loop"
        modes = tuple(arguments.modes)
        networks = partial(loop_networks.run, names, modes, workers=workers)
        for row in loop.run(grid, modes, workers=workers) if layers else networks():
            if row not in rows:
                rows.append(row)
            save(path, rows)
        print((table.layers_as_called if layers else table.networks_as_called)(rows))
    if arguments.suite in ("snn", "snn-conv"):
        save_each(arguments.out / "snn_conv.json", snn_conv.run(arguments.data and arguments.data / "spikes"))
    if arguments.suite in ("tuning", "spmm"):
        save_each(path, tuning.run() if arguments.suite == "tuning" else spmm.run(arguments.data))
    if arguments.suite == "training-step":
        print(training_step.table(save_each(path, training_step.run(tuple(arguments.modes), arguments.workers or 1))))
    if arguments.suite == "snn-training":
        print(snn_training.table(save_each(path, snn_training.run(tuple(arguments.modes)))))
    if arguments.suite in ("attention", "attention-candidates"):
        save_each(path, (block_attention if arguments.suite == "attention" else candidates).run(arguments.workers or 8))
    if arguments.suite == "masked-attention":
        save_each(path, masked_models.run(tuple(arguments.modes), arguments.workers or 1))
    if arguments.suite == "card":
        rows = save_each(path, card.run())
        print(card.pasted(card.record(rows), torch.cuda.get_device_name(), torch.__version__))
    if arguments.suite in ("semi-structured", "resu"):
        save_each(path, semi_structured.run() if arguments.suite == "semi-structured" else resu.run())
    if arguments.suite in ("snn", "snn-network"):
        for result in snn_network.run(arguments.network, precisions=tuple(arguments.precision)):
            save(arguments.out / f"snn_{arguments.network}.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
