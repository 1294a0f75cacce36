"""One target under atheris, in a process of its own: ``python -m fuzz.child TARGET [options of libFuzzer]``."""

import contextlib
import sys
import tempfile
import time
import warnings
from pathlib import Path

import atheris

# Imported before the library, so that they are not instrumented: the fuzzer is to learn from our branches.
import pandas  # noqa: F401
import PIL.Image  # noqa: F401
import pyarrow.parquet  # noqa: F401
import safetensors.torch  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch.utils.data  # noqa: F401
import typer  # noqa: F401

#: Seconds of processor time that one input may take.
MOST_SECONDS = 5.0


def main() -> None:
    """Fuzz until libFuzzer has made enough inputs, or one of them fails."""
    with atheris.instrument_imports(include=["ifcomp", "fuzz"]):
        from fuzz.targets import TARGETS
        from ifcomp.errors import IfcompError
    warnings.simplefilter("ignore")
    target = TARGETS[sys.argv[1]]
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # files there cost the least
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory) as scratch:
        folder, corpus = Path(scratch), Path(scratch) / "corpus"
        corpus.mkdir()

        def once(data: bytes) -> None:
            began = time.process_time()
            with contextlib.suppress(IfcompError):
                target.run(data, folder)
            taken = time.process_time() - began
            if taken > MOST_SECONDS:
                raise TimeoutError(f"this input took {taken:.1f} s")

        for number, seed in enumerate(target.seeds()):
            (corpus / str(number)).write_bytes(seed)
        atheris.Setup([sys.argv[0], *sys.argv[2:], f"-max_len={target.longest}", str(corpus)], once)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
