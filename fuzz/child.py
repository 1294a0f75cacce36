"""One target under atheris, in a process of its own: ``python -m fuzz.child TARGET [options of libFuzzer]``."""

import sys
import tempfile
import warnings
from pathlib import Path

import atheris

#: Whose branches guide the fuzzer.
GUIDES = ["ifcomp", "zipfile", "json", "numpy.lib", "torch._weights_only_unpickler", "PIL", "fuzz"]


def main() -> None:
    """Fuzz until libFuzzer has made enough inputs, or one of them fails."""
    with atheris.instrument_imports(include=GUIDES):
        from fuzz.targets import TARGETS
        from ifcomp.errors import IfcompError
    warnings.simplefilter("ignore")
    target = TARGETS[sys.argv[1]]
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(target.seeds()):
        (corpus / str(number)).write_bytes(seed)

    def once(data: bytes) -> None:
        try:
            target.run(data, folder)
        except IfcompError:
            pass

    atheris.Setup([sys.argv[0], *sys.argv[2:], f"-max_len={target.longest}", str(corpus)], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
