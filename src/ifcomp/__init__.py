"""Stochastic data complexity with Boltzmann influence functions: one fit of a trained classifier's curvature tells how
far a prediction can be trusted, which training labels are wrong, and which inputs are unlike anything the model knows.
"""

from ifcomp._version import __version__
from ifcomp.curvature.factors import Factors, Relative
from ifcomp.predictor import IFComp
from ifcomp.scores import ScoreTable

__all__ = ["Factors", "IFComp", "Relative", "ScoreTable", "__version__"]
