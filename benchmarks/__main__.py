"""``python -m benchmarks``: the same as ``ifcomp bench``."""

import sys

from ifcomp.cli.main import app

if __name__ == "__main__":
    app(["bench", *sys.argv[1:]], prog_name="ifcomp")
