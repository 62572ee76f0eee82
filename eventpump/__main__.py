"""`python -m eventpump`: the command."""

import sys

from eventpump.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
