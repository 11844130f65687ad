"""`python -m planner_core`: the same as the `shardscope` command."""

import sys

from planner_core.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
