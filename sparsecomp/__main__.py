"""`python -m sparsecomp`, the same as the installed command: see :mod:`sparsecomp.cli`."""

import sys

from sparsecomp.cli import main

if __name__ == "__main__":
    sys.exit(main())
