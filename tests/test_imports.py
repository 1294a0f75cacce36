"""Importing the library is fast, imports no package of reports and does not change the process."""

import json
import subprocess
import sys

import pytest

#: Packages for reports, plots, images and tasks.
LATE = ("matplotlib", "PIL", "jinja2", "sklearn", "scipy", "typer")

STATE = """
import json, locale, logging, os, signal, sys, warnings
import numpy as np
import pandas as pd
import torch

def state():
    return repr([
        sorted(os.environ.items()),
        os.getcwd(),
        sys.path,
        warnings.filters,
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        locale.getlocale(),
        logging.getLogger().handlers,
        logging.getLogger().level,
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.random.get_rng_state().sum(),
        torch.backends.cudnn.benchmark,
        torch.get_float32_matmul_precision(),
        np.geterr(),
        np.random.get_state()[1].sum(),
        pd.options.display.max_rows,
    ])
"""


def run(code: str) -> object:
    """Run the code in a fresh process and return the JSON that it prints."""
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("statement", ["import ifcomp", "from ifcomp import IFComp", "import ifcomp.data.sources"])
def test_packages_for_reports_are_not_imported(statement: str) -> None:
    code = f"import json, sys\n{statement}\nprint(json.dumps([name for name in {LATE} if name in sys.modules]))"
    assert run(code) == []


def test_the_package_is_imported_without_torch() -> None:
    assert run("import json, sys, ifcomp; print(json.dumps('torch' in sys.modules))") is False


def test_the_import_takes_less_than_a_second_beyond_torch() -> None:
    code = "import json, time, torch; start = time.process_time(); from ifcomp import IFComp"
    assert min(float(str(run(f"{code}; print(json.dumps(time.process_time() - start))"))) for _ in range(3)) < 1


def test_the_import_does_not_change_the_process() -> None:
    code = f"{STATE}\nbefore = state()\nfrom ifcomp import IFComp\nprint(json.dumps([before, state()]))"
    before, after = run(code)  # type: ignore[misc]
    assert before == after
