"""``python -m ifcomp`` is the ``ifcomp`` command."""

import os
import sys

if __name__ == "__main__":
    if sys.path[0] in ("", os.getcwd()):
        del sys.path[0]  # Python puts the current folder first; its files must not replace installed modules
    from ifcomp.cli.main import app

    app(prog_name="ifcomp")
