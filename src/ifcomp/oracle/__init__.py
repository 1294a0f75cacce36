"""Ground truth of IF-COMP: hindsight models obtained by training, for a few examples.

`hindsight` trains on the Boltzmann proximal Bregman objective; `unrestricted_refit` trains without its proximal terms.
The package does not use the curvature or the influence code, so it is an independent check of both.
"""

from ifcomp.oracle.hindsight import hindsight
from ifcomp.oracle.precondition import Preconditioner
from ifcomp.oracle.refit import unrestricted_refit
from ifcomp.oracle.results import Hindsight

__all__ = ["Hindsight", "Preconditioner", "hindsight", "unrestricted_refit"]
