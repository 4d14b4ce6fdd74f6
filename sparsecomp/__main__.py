"""`python -m sparsecomp`: see :mod:`sparsecomp.cli`."""

import sys

from sparsecomp.cli import main

if __name__ == "__main__":
    sys.exit(main())
