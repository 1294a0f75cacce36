"""``python -m ifcomp`` is the ``ifcomp`` command."""

from ifcomp.cli.main import app

if __name__ == "__main__":
    app(prog_name="ifcomp")
