"""`python -m modify` is the command `modify`."""

import sys

from modify.cli import main

if __name__ == "__main__":
    sys.exit(main())
