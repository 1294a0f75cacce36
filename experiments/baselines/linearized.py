"""Linearised Laplace over the whole network, from the logit kernel that `IFComp` has anyway."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from scipy.optimize import brentq
from torch import Tensor

from experiments.baselines.ekfac import block_matrix, fitted_blocks
from experiments.baselines.interface import check_count, derived_seed, model_logits
from ifcomp.curvature.factors import Factors, check_number
from ifcomp.errors import NotFittedError, SettingError
from ifcomp.predictor import IFComp

Link = Literal["probit", "mc"]


@dataclass(frozen=True)
class LinearizedLaplace:
    """``E[softmax(z)]`` with ``z ~ N(beta f(x), M(x)/n)``, M the logit kernel at damping ``tau / (n beta^2)``.

    This is the model linearised in its weights under the posterior ``N(theta, (n beta^2 F + tau)^-1)``, at the inverse
    temperature beta of the fit.

    Attributes:
        ifc: A fitted predictor; ``fisher="exact"`` is what the Laplace approximation means.
        prior_precision: tau, of a Gaussian prior around zero: the weight decay on the sum of codelengths.
            `evidence_prior_precision` chooses it.
        link: "probit", MacKay's approximation ``softmax(m_k / sqrt(1 + pi/8 S_kk))``, or "mc", a mean over samples.
        samples: Logits drawn for "mc".
        seed: Of them.
    """

    ifc: IFComp
    prior_precision: float
    link: Link = "probit"
    samples: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        check_number("prior_precision", self.prior_precision)
        check_count("samples", self.samples)
        if self.link not in ("probit", "mc"):
            raise SettingError(f"link must be 'probit' or 'mc', but is {self.link!r}.")
        _fitted(self.ifc)

    def predict_proba(self, x: Any) -> Tensor:
        """Predictive probabilities [B, K]. Cost: 2 + 2 K forward passes."""
        mean, covariance = self.logit_distribution(x)
        if self.link == "probit":
            return torch.softmax(mean / (1 + math.pi / 8 * covariance.diagonal(dim1=1, dim2=2)).sqrt(), 1)
        generator = torch.Generator().manual_seed(derived_seed(self.seed, 0))
        draws = torch.randn(self.samples, 1, mean.shape[1], 1, dtype=mean.dtype, generator=generator).to(mean.device)
        values, vectors = torch.linalg.eigh(covariance)  # singular where labels cannot be told apart
        root = vectors * values.clamp(min=0).sqrt().unsqueeze(1) @ vectors.transpose(1, 2)
        return torch.softmax(mean + (root @ draws).squeeze(-1), 2).mean(0)

    def logit_distribution(self, x: Any) -> tuple[Tensor, Tensor]:
        """Mean [B, K] and covariance [B, K, K] of the logits times beta."""
        factors = _fitted(self.ifc)
        weight = factors.count * factors.settings.beta**2
        kernel = self.ifc.logit_kernel(x, damping=self.prior_precision / weight)
        return factors.settings.beta * model_logits(self.ifc.model, x), kernel / factors.count


def evidence_prior_precision(ifc: IFComp) -> float:
    """The prior precision tau that maximises the Laplace approximation of the marginal likelihood.

    It solves MacKay's ``tau |theta|^2 = sum n Lambda / (n Lambda + tau)``: the prior explains as much of the weights as
    the data leaves open. Only covered parameters count, and the data is not needed again.
    """
    factors = _fitted(ifc)
    parameters = {name: value.detach().double() for name, value in ifc.model.named_parameters()}
    blocks = fitted_blocks(ifc.model, factors)
    squares = sum(float(block_matrix(block, parameters).square().sum()) for block in blocks)
    weight = factors.count * factors.settings.beta**2

    def excess(log_precision: float) -> float:
        precision = math.exp(log_precision)
        return precision * squares - factors.effective_parameters(precision / weight)

    if not squares:
        raise SettingError("All covered weights are zero, so no prior precision is best. Give prior_precision=.")
    high = low = math.log(sum(block.size for block in blocks) / squares)
    while excess(low) >= 0:
        low -= math.log(10)
        if low < math.log(1e-30):
            raise SettingError("The curvature is zero, so no prior precision is best. Give prior_precision=.")
    return math.exp(brentq(excess, low, high, xtol=1e-9)) if low < high else math.exp(high)


def _fitted(ifc: IFComp) -> Factors:
    if ifc.factors is None:
        raise NotFittedError("The predictor is not fitted yet: call ifc.fit(train_loader) first.")
    if ifc.factors.settings.beta == 0:
        raise SettingError("At beta = 0 all labels are equally probable: a predictive needs a fit at beta > 0.")
    return ifc.factors
