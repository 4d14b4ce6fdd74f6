"""`python -m tests.fuzz --programs N --seed S`: N programs, a reproducer for each kind of failure."""

import argparse
import collections
import logging
import sys
import time
import warnings

import torch

from tests.fuzz.operators import generate
from tests.fuzz.oracle import Broken, case_of, check, minimised, reproducer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=500, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next has the next seed")
    parser.add_argument("--show", type=int, default=5, help="failures of one kind to print")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # torch, too, logs what its stand-ins refuse
    start, found, refused = time.perf_counter(), collections.Counter(), 0
    for seed in range(options.seed, options.seed + options.programs):
        try:
            case = case_of(generate(seed))
            failure = check(case).failure
        except Broken:
            refused += 1
            continue
        if failure is None:
            continue
        found[failure.kind] += 1
        print(f"seed {seed}: {failure.kind}: {failure.detail}", flush=True)
        if found[failure.kind] <= options.show:
            print(reproducer(minimised(case, failure)), "\n", flush=True)
    took = time.perf_counter() - start
    print(f"{options.programs} programs, {refused} that eager refuses, {took:.0f} s; failures: {dict(found) or 'none'}")
    return 1 if found else 0


sys.exit(main())
