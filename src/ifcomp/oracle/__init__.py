"""The ground truth that IF-COMP approximates: hindsight models by training, for a few examples.

`hindsight` trains on the Boltzmann proximal Bregman objective, `unrestricted_refit` without its proximal terms. Nothing
here uses the curvature or the influence of this library, so that agreement with them is evidence.
"""

from ifcomp.oracle.hindsight import hindsight
from ifcomp.oracle.precondition import Preconditioner
from ifcomp.oracle.refit import unrestricted_refit
from ifcomp.oracle.results import Hindsight

__all__ = ["Hindsight", "Preconditioner", "hindsight", "unrestricted_refit"]
