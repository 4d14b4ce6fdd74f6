"""`python -m sparsecomp`: the commands of the package."""

import argparse
import sys
from collections.abc import Sequence

from sparsecomp.errors import OptionError
from sparsecomp.options import Options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m sparsecomp", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a small spiking network on digits, compile it, compare")
    demo.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CUDA where there is one")
    demo.add_argument(
        "--implementation", default="auto", help="auto: what pays, where it pays; binary, event, skip: at every site"
    )
    demo.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parsed = parser.parse_args(arguments)
    try:
        Options(implementation=parsed.implementation)
    except OptionError as error:
        parser.error(str(error))

    from sparsecomp.demo import run  # loads scikit-learn

    return run(device=parsed.device, implementation=parsed.implementation, as_json=parsed.json)


if __name__ == "__main__":
    sys.exit(main())
