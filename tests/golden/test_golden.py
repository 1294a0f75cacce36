"""Results equal the reference results of an earlier version."""

import pytest
import torch
from reference import FOLDER, RESULTS, Golden, fit, goldens, results
from safetensors.torch import load_file
from torch.testing import assert_close

from ifcomp import IFComp

EXPECTED = load_file(RESULTS)
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}


@pytest.mark.parametrize("golden", goldens(), ids=lambda golden: golden.name)
def test_results_equal_the_reference(golden: Golden) -> None:
    ifc = IFComp.load(FOLDER / f"{golden.name}.ifcomp", golden.model)
    rtol = TOLERANCES[next(golden.model.parameters()).dtype]
    for name, value in results(ifc, golden).items():
        expected = EXPECTED[f"{golden.name}/{name}"]
        atol = rtol * float(expected.abs().max())
        assert_close(value, expected, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "golden", [golden for golden in goldens() if "-exact-" in golden.name], ids=lambda golden: golden.name
)
def test_influence_of_a_new_fit_equals_the_reference(golden: Golden) -> None:
    """Eigenvectors of the null space are arbitrary, so factors are not compared.

    With sampled labels the passes draw different labels, and influence depends on these eigenvectors.
    """
    rtol = TOLERANCES[next(golden.model.parameters()).dtype]
    expected = EXPECTED[f"{golden.name}/influence_damped"]
    assert_close(fit(golden).influence(golden.inputs, damping=0.01), expected, rtol=rtol, atol=0)
