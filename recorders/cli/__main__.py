"""`python -m recorders.cli`."""

import sys

from recorders.cli import main

if __name__ == "__main__":
    sys.exit(main())
