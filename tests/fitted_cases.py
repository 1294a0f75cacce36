"""Fitted predictors of the test cases, for tests of files."""

from typing import Any

import torch

from cases import LAYER_CASES, MODEL_CASES
from comparison import as_type
from ifcomp import IFComp
from oracles import Inputs

CASES = {case.name: case for case in [*LAYER_CASES, *MODEL_CASES]}


def fitted(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> IFComp:
    """Fit a predictor of a test case on seven examples."""
    case = CASES[name]
    return IFComp(case.make().to(dtype), **options).fit([as_type(case.sample(7, seed=1), dtype)])


def inputs_of(name: str, dtype: torch.dtype = torch.float32) -> Inputs:
    """Return five inputs of a test case."""
    return as_type(CASES[name].sample(5), dtype)
