"""One target under atheris in a separate process: ``python -m fuzz.child TARGET [options of libFuzzer]``."""

import contextlib
import sys
import tempfile
import time
import warnings
from pathlib import Path

import atheris

# Imported before the library and not instrumented, so that only branches of the library guide the fuzzer.
import pandas  # noqa: F401
import PIL.Image  # noqa: F401
import pyarrow.parquet  # noqa: F401
import safetensors.torch  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch.utils.data  # noqa: F401
import typer  # noqa: F401

#: Limit of processor time per input in seconds.
CPU_LIMIT = 5.0


def main() -> None:
    """Fuzz one target until the number of inputs is reached or an input fails."""
    with atheris.instrument_imports(include=["ifcomp", "fuzz"]):
        from fuzz.targets import TARGETS
        from ifcomp.errors import IfcompError
    warnings.simplefilter("ignore")
    target = TARGETS[sys.argv[1]]
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # fast temporary files
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory) as scratch:
        folder, corpus = Path(scratch), Path(scratch) / "corpus"
        corpus.mkdir()

        def run_input(data: bytes) -> None:
            start = time.process_time()
            with contextlib.suppress(IfcompError):
                target.run(data, folder)
            seconds = time.process_time() - start
            if seconds > CPU_LIMIT:
                raise TimeoutError(f"this input took {seconds:.1f} s")

        for index, seed in enumerate(target.seeds()):
            (corpus / str(index)).write_bytes(seed)
        atheris.Setup([sys.argv[0], *sys.argv[2:], f"-max_len={target.max_bytes}", str(corpus)], run_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
