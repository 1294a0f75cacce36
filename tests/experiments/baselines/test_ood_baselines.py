"""Every detector against its published formula in numpy, on the network's layers called one by one.

This checks the representations that the detectors of pytorch-ood get (features, head, stages) and the direction.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.special import log_softmax, logsumexp, softmax
from scipy.stats import exponweib, multivariate_normal
from torch import Tensor, nn
from torch.nn import functional

from experiments.baselines import detectors
from experiments.baselines.detectors import LEFT_OUT, OOD_BASELINES
from experiments.baselines.ood import ood_scores
from ifcomp.errors import DataError, EmptyDataError, LabelError, MissingPackageError, ModelError, SettingError

K, D = 3, 4


@dataclass(frozen=True)
class Given:
    """What a formula may use, in float64: training and test features, logits and head."""

    model: nn.Module
    x: Tensor
    y: Tensor
    test: Tensor

    def layer(self, x: Tensor, stop: int) -> np.ndarray:
        with torch.no_grad():
            return self.model[:stop](x).double().numpy()

    @property
    def labels(self) -> np.ndarray:
        return self.y.numpy()

    @property
    def train_z(self) -> np.ndarray:
        return self.layer(self.x, -1)

    @property
    def z(self) -> np.ndarray:
        return self.layer(self.test, -1)

    @property
    def train_logits(self) -> np.ndarray:
        return self.logits_of(self.train_z)

    @property
    def logits(self) -> np.ndarray:
        return self.logits_of(self.z)

    @property
    def w(self) -> np.ndarray:
        return self.model[-1].weight.detach().double().numpy()

    @property
    def b(self) -> np.ndarray:
        return self.model[-1].bias.detach().double().numpy()

    def logits_of(self, z: np.ndarray) -> np.ndarray:
        return z @ self.w.T + self.b


@cache
def prepare() -> Given:
    """A small CNN, trained until it is right but not sure; half of the test images are brighter noise."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(150) % K
    x = torch.randn(150, 1, 6, 6, generator=generator) + 1.5 * torch.eye(6)[y].reshape(150, 1, 6, 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(1, 3, 3, padding=1), nn.Softplus(), nn.AvgPool2d(2), nn.Conv2d(3, 4, 3, padding=1)),
            *(nn.Softplus(), nn.Flatten(), nn.Linear(36, D), nn.Softplus(), nn.Linear(D, K)),
        )
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model[-1].weight.mul_(0.3)
    return Given(model, x[:140], y[:140], torch.cat([x[140:], 1.5 * torch.randn(15, 1, 6, 6, generator=generator)]))


def energy(logits: np.ndarray) -> np.ndarray:
    return -logsumexp(logits, 1)


def msp(g: Given) -> np.ndarray:
    return -softmax(g.logits, 1).max(1)


def max_logit(g: Given) -> np.ndarray:
    return -g.logits.max(1)


def energy_score(g: Given) -> np.ndarray:
    return energy(g.logits)


def entropy(g: Given) -> np.ndarray:
    return -(softmax(g.logits, 1) * log_softmax(g.logits, 1)).sum(1)


def gen(g: Given) -> np.ndarray:
    p = softmax(g.logits, 1)
    return (p**0.1 * (1 - p) ** 0.1).mean(1)


def kl_matching(g: Given) -> np.ndarray:
    seen = softmax(g.train_logits, 1)
    typical = np.stack([seen[seen.argmax(1) == k].mean(0) for k in range(K)])
    p = softmax(g.logits, 1)
    return (p[:, None] * (np.log(p)[:, None] - np.log(typical))).sum(2).min(1)


def openmax(g: Given) -> np.ndarray:
    """The tail of the distances to a class's centre is a Weibull distribution; all classes are revised by rank."""
    unlikely = np.empty_like(g.logits)
    for k in range(K):
        members = g.train_logits[g.labels == k]
        tail = np.sort(np.linalg.norm(members - members.mean(0), axis=1))[-25:] + 10_000
        shift = tail.min() - 10_000
        _, shape, _, scale = exponweib.fit(tail - shift, f0=1, floc=0)
        distance = np.linalg.norm(g.logits - members.mean(0), axis=1)
        unlikely[:, k] = exponweib.cdf(distance + 10_000 - shift, 1, shape, 0, scale)
    rank = (-g.logits).argsort(1).argsort(1)
    removed = unlikely * (K - rank) / K
    revised = np.concatenate([(g.logits * removed).sum(1, keepdims=True), g.logits * (1 - removed)], 1)
    return softmax(revised, 1)[:, 0]


def knn(g: Given) -> np.ndarray:
    train, z = (value / np.linalg.norm(value, axis=1, keepdims=True) for value in (g.train_z, g.z))
    return np.sort(np.linalg.norm(z[:, None] - train, axis=2), 1)[:, 49]


def class_distances(g: Given) -> np.ndarray:
    centres = np.stack([g.train_z[g.labels == k].mean(0) for k in range(K)])
    inside = g.train_z - centres[g.labels]
    precision = np.linalg.inv(inside.T @ inside + 1e-6 * np.eye(D))
    offsets = g.z[:, None] - centres
    return np.einsum("nki,ij,nkj->nk", offsets, precision, offsets)


def mahalanobis(g: Given) -> np.ndarray:
    return class_distances(g).min(1) / 2


def rmd(g: Given) -> np.ndarray:
    inside = g.train_z - g.train_z.mean(0)
    precision = np.linalg.inv(inside.T @ inside + 1e-6 * np.eye(D))
    offset = g.z - g.train_z.mean(0)
    return class_distances(g).min(1) - np.einsum("ni,ij,nj->n", offset, precision, offset)


def gmm(g: Given) -> np.ndarray:
    terms = []
    for k in range(K):
        members = g.train_z[g.labels == k]
        covariance = np.cov(members.T, bias=True) + 1e-6 * np.eye(D)
        terms.append(
            np.log(len(members) / len(g.labels)) + multivariate_normal.logpdf(g.z, members.mean(0), covariance)
        )
    return -logsumexp(terms, 0)


def vim(g: Given) -> np.ndarray:
    origin = -np.linalg.pinv(g.w) @ g.b
    _, _, directions = np.linalg.svd(g.train_z - origin)
    rest = directions[D // 2 :]
    seen, new = (np.linalg.norm((value - origin) @ rest.T, axis=1) for value in (g.train_z, g.z))
    return g.train_logits.max(1).mean() / seen.mean() * new + energy(g.logits)


def dice(g: Given) -> np.ndarray:
    contribution = g.train_z.mean(0) * g.w
    kept = np.where(contribution > np.quantile(contribution, 0.9), g.w, 0)
    return energy(g.z @ kept.T + g.b)


def fdbd(g: Given) -> np.ndarray:
    scores = []
    for z, logits in zip(g.z, g.logits, strict=True):
        top = logits.argmax()
        others = [k for k in range(K) if k != top]
        distances = [(logits[top] - logits[k]) / np.linalg.norm(g.w[top] - g.w[k]) for k in others]
        scores.append(-np.mean(distances) / np.linalg.norm(z - g.train_z.mean(0)))
    return np.array(scores)


def nci(g: Given) -> np.ndarray:
    centred = g.z - g.train_z.mean(0)
    return -(centred * g.w[g.logits.argmax(1)]).sum(1) / np.linalg.norm(centred, axis=1)


def nnguide(g: Given) -> np.ndarray:
    bank = -energy(g.train_logits)[:, None] * g.train_z / np.linalg.norm(g.train_z, axis=1, keepdims=True)
    similarity = g.z / np.linalg.norm(g.z, axis=1, keepdims=True) @ bank.T
    return np.sort(similarity, 1)[:, -10:].mean(1) * energy(g.logits)


def pnml(g: Given) -> np.ndarray:
    train, z = (value / np.linalg.norm(value, axis=1, keepdims=True) for value in (g.train_z, g.z))
    projection = np.einsum("ni,ij,nj->n", z, np.linalg.inv(train.T @ train), z)
    exponent = (projection / (1 + projection))[:, None]
    p = softmax(g.logits_of(z), 1)
    return np.log((p / (p + (1 - p) * p**exponent)).sum(1)) / np.log(K)


def she(g: Given) -> np.ndarray:
    right = g.train_logits.argmax(1) == g.labels
    patterns = np.stack([g.train_z[right & (g.labels == k)].mean(0) for k in range(K)])
    return -(g.z * patterns[g.logits.argmax(1)]).sum(1)


#: Of four features ASH and SCALE keep the largest: 65 % are pruned.
KEPT = 1


def sharpened(z: np.ndarray, kept: int) -> np.ndarray:
    """All activation over that of the largest units."""
    return z.sum(1) / np.sort(z, 1)[:, -kept:].sum(1)


def lts(g: Given) -> np.ndarray:
    return energy(g.logits * sharpened(g.z, 1)[:, None] ** 2)


def ash(g: Given) -> np.ndarray:
    kept = np.where(g.z >= g.z.max(1, keepdims=True), g.z, 0)
    return energy(g.logits_of(kept * np.exp(sharpened(g.z, KEPT))[:, None]))


def scale(g: Given) -> np.ndarray:
    return energy(g.logits_of(g.z * np.exp(sharpened(g.z, KEPT))[:, None]))


def react(g: Given) -> np.ndarray:
    return energy(g.logits_of(np.minimum(g.z, np.quantile(g.train_z, 0.9))))


def vra(g: Given) -> np.ndarray:
    lower, upper = np.quantile(g.train_z, [0.01, 0.99], axis=0)
    return energy(g.logits_of(np.clip(g.z, lower, upper)))


def gradnorm(g: Given) -> np.ndarray:
    """The gradient of the weight is an outer product."""
    return -np.abs(softmax(g.logits, 1) - 1 / K).sum(1) * np.abs(g.z).sum(1)


def grad_uncertainty(g: Given) -> np.ndarray:
    return -((K * softmax(g.logits, 1) - 1) ** 2).sum(1) * ((g.z**2).sum(1) + 1)


def moved(g: Given, loss: Callable[[Tensor], Tensor], size: float) -> Tensor:
    x = g.test.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x), x)
    return (x - size * gradient.sign()).detach()


def odin(g: Given) -> np.ndarray:
    def loss(x: Tensor) -> Tensor:
        logits = g.model(x) / 1000
        return functional.cross_entropy(logits, logits.argmax(1), reduction="sum")

    return -softmax(g.layer(moved(g, loss, 0.0014), 9) / 1000, 1).max(1)


def mahalanobis_odin(g: Given) -> np.ndarray:
    centres = np.stack([g.train_z[g.labels == k].mean(0) for k in range(K)])
    inside = g.train_z - centres[g.labels]
    precision = torch.tensor(np.linalg.inv(inside.T @ inside + 1e-6 * np.eye(D)))

    def loss(x: Tensor) -> Tensor:
        offsets = g.model[:-1](x).double()[:, None] - torch.tensor(centres)
        return torch.einsum("nki,ij,nkj->nk", offsets, precision, offsets).min(1).values.sum()

    return mahalanobis(Given(g.model, g.x, g.y, moved(g, loss, 0.002)))


#: The layers after which the feature maps have 6 x 6 and 3 x 3 pixels for the last time.
STAGES = (2, 5)


def gram_statistics(maps: np.ndarray, power: int) -> np.ndarray:
    flat = maps.reshape(*maps.shape[:2], -1) ** power
    sums = np.einsum("nip,njp->ni", flat, flat)
    return np.sign(sums) * np.abs(sums) ** (1 / power)


def gram(g: Given) -> np.ndarray:
    """Deviations from the range of every class, over their mean on a tenth of the training data that is held out."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        orders = [torch.randperm(int((g.y == k).sum())).numpy() for k in range(K)]
    indices = [np.flatnonzero(g.labels == k)[order] for k, order in enumerate(orders)]
    held_out, kept = [i[: len(i) // 10] for i in indices], [i[len(i) // 10 :] for i in indices]
    total = 0
    for stage in STAGES:
        seen_deviation, deviation = np.zeros(len(g.labels)), 0
        for power in (1, 2):
            seen, new = (gram_statistics(g.layer(x, stage), power) for x in (g.x, g.test))
            low, high = np.stack([seen[i].min(0) for i in kept]), np.stack([seen[i].max(0) for i in kept])
            seen_deviation += outside(seen, low[g.labels], high[g.labels])
            top = g.logits.argmax(1)
            deviation = deviation + outside(new, low[top], high[top])
        total = total + deviation / seen_deviation[np.concatenate(held_out)].mean()
    return total


def outside(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    below, above = np.maximum(low - values, 0) / np.abs(low + 1e-6), np.maximum(values - high, 0) / np.abs(high + 1e-6)
    return (below + above).sum(1)


def nac(g: Given) -> np.ndarray:
    """Share of neurons whose state, activation times gradient of KL(uniform || p), was seen 50 times in training."""
    half = np.geomspace(1e-6, 0.5, 26).astype(np.float32)  # in the precision of the states, most of them near 1
    edges = np.concatenate([half, 1 - half[::-1][1:]])
    total = 0
    for stage in STAGES:
        states = (np.clip(neuron_states(g, x, stage), edges[0], edges[-1]) for x in (g.x, g.test))
        seen, new = (np.maximum(np.searchsorted(edges, state) - 1, 0) for state in states)
        counts = (seen == new[:, None]).sum(1)
        total = total - np.minimum(counts / 50, 1).mean(1)
    return total


def neuron_states(g: Given, x: Tensor, stage: int) -> np.ndarray:
    maps = g.model[:stage](x).detach().requires_grad_()
    loss = -g.model[stage:](maps).log_softmax(1).mean(1).sum()
    (gradient,) = torch.autograd.grad(loss, maps)
    return torch.sigmoid(100 * (maps * gradient).mean((2, 3))).detach().numpy()


FORMULAS: dict[str, Callable[[Given], np.ndarray]] = {
    "MSP": msp,
    "MaxLogit": max_logit,
    "Energy": energy_score,
    "Entropy": entropy,
    "GEN": gen,
    "KLMatching": kl_matching,
    "OpenMax": openmax,
    "KNN": knn,
    "Mahalanobis": mahalanobis,
    "RMD": rmd,
    "GMM": gmm,
    "ViM": vim,
    "DICE": dice,
    "fDBD": fdbd,
    "NCI": nci,
    "NNGuide": nnguide,
    "PNML": pnml,
    "SHE": she,
    "LTS": lts,
    "ASH": ash,
    "SCALE": scale,
    "ReAct": react,
    "VRA": vra,
    "GradNorm": gradnorm,
    "GradUncertainty": grad_uncertainty,
    "ODIN": odin,
    "MahalanobisODIN": mahalanobis_odin,
    "Gram": gram,
    "NAC": nac,
}


def batches(x: Tensor, size: int, y: Tensor | None = None) -> list:
    parts = x.split(size)
    return list(parts) if y is None else list(zip(parts, y.split(size), strict=True))


@cache
def all_scores() -> dict[str, dict[str, np.ndarray]]:
    g = prepare()
    train, loaders = batches(g.x, 50, g.y), {"test": batches(g.test, 10)}
    return {name: ood_scores(name, g.model, train, loaders) for name in OOD_BASELINES}


@pytest.mark.parametrize("name", FORMULAS)
def test_scores_follow_the_published_formula(name: str) -> None:
    expected = FORMULAS[name](prepare())
    assert expected.std() > 0
    assert_allclose(all_scores()[name]["test"], expected, rtol=1e-3, atol=1e-4 * expected.std())


@pytest.mark.parametrize("name", OOD_BASELINES)
def test_scores_do_not_depend_on_batches_or_on_other_data(name: str) -> None:
    g = prepare()
    loaders = {"test": batches(g.test, 3), "one": [g.test[:1]]}
    scores = ood_scores(name, g.model, batches(g.x, 50, g.y), loaders)
    assert_allclose(scores["test"], all_scores()[name]["test"], rtol=1e-4)
    assert_allclose(scores["one"], all_scores()[name]["test"][:1], rtol=1e-4)


def test_every_detector_of_the_package_is_a_baseline_or_left_out_for_a_reason() -> None:
    import pytorch_ood.detector as package

    classes = {name for name in package.__all__ if isinstance(getattr(package, name), type)}
    assert {baseline.detector for baseline in OOD_BASELINES.values()} | LEFT_OUT.keys() == classes
    assert FORMULAS.keys() == OOD_BASELINES.keys()
    rows = {line.split("|")[1].strip() for line in detectors.__doc__.splitlines() if line.startswith("| ")}
    assert rows - {"baseline"} == OOD_BASELINES.keys()


def test_parameters_replace_defaults() -> None:
    g = prepare()
    scores = ood_scores("ReAct", g.model, batches(g.x, 50, g.y), {"test": [g.test]}, parameters={"percentile": 0.5})[
        "test"
    ]
    assert_allclose(scores, energy(g.logits_of(np.minimum(g.z, np.quantile(g.train_z, 0.5)))), rtol=1e-4)
    with pytest.raises(SettingError, match="KNN cannot be built"):
        ood_scores("KNN", g.model, [(g.x, g.y)], {"test": [g.test]}, parameters={"neighbours": 3})


def test_the_model_comes_back_as_it_was() -> None:
    g = prepare()
    g.model.train()
    before = {name: value.clone() for name, value in g.model.state_dict().items()}
    for name in ("ODIN", "MahalanobisODIN", "Gram", "NAC", "GradNorm"):
        ood_scores(name, g.model, [(g.x, g.y)], {"test": [g.test]})
    assert g.model.training
    assert all(torch.equal(value, before[name]) for name, value in g.model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in g.model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in g.model.modules())


def test_random_numbers_are_left_alone() -> None:
    g = prepare()
    state = torch.get_rng_state()
    ood_scores("Gram", g.model, [(g.x, g.y)], {"test": [g.test]})
    assert torch.equal(torch.get_rng_state(), state)


def test_a_head_without_bias_and_double_precision() -> None:
    g = prepare()
    model = copy.deepcopy(g.model)
    model[-1].bias = None
    for name in OOD_BASELINES:
        double = ood_scores(name, model.double(), [(g.x.double(), g.y)], {"test": [g.test.double()]})["test"]
        single = ood_scores(name, model.float(), [(g.x, g.y)], {"test": [g.test]})["test"]
        assert_allclose(double, single, rtol=1e-2, atol=1e-2 * single.std())


def test_what_is_refused() -> None:
    g = prepare()
    train, test = [(g.x, g.y)], {"test": [g.test]}
    with pytest.raises(SettingError, match="MSP, MaxLogit"):
        ood_scores("Odin", g.model, train, test)
    with pytest.raises(SettingError, match="MCD needs a network with dropout"):
        ood_scores("MCD", g.model, train, test)
    with pytest.raises(EmptyDataError, match="training data"):
        ood_scores("MSP", g.model, [], test)
    with pytest.raises(EmptyDataError):
        ood_scores("MSP", g.model, train, {"test": []})
    with pytest.raises(EmptyDataError, match="'test' is empty"):
        ood_scores("ODIN", g.model, train, {"test": []})
    with pytest.raises(DataError, match="iterator"):
        ood_scores("MSP", g.model, train, {"test": iter([g.test])})
    with pytest.raises(LabelError, match="labels are needed"):
        ood_scores("KNN", g.model, [g.x], test)
    with pytest.raises(LabelError, match="labels are needed"):
        ood_scores("Gram", g.model, [g.x], test)
    with pytest.raises(DataError, match=r"KNN cannot be fitted .*k=50 exceeds"):
        ood_scores("KNN", g.model, [(g.x[:40], g.y[:40])], test)
    with pytest.raises(DataError, match=r"Mahalanobis cannot be fitted .* each of the 3 classes"):
        ood_scores("Mahalanobis", g.model, [(g.x[g.y > 0], g.y[g.y > 0])], test)


def test_networks_without_feature_maps_and_inputs_that_are_not_images() -> None:
    tokens, labels = torch.randint(5, (90, 4), generator=torch.Generator().manual_seed(0)), torch.arange(90) % K
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, K))
    data = [(tokens, labels)]
    assert ood_scores("KNN", model, data, {"test": [tokens[:7]]})["test"].shape == (7,)
    with pytest.raises(ModelError, match="feature maps"):
        ood_scores("Gram", model, data, {"test": [tokens]})
    with pytest.raises(DataError, match="floating-point tensor"):
        ood_scores("ODIN", model, data, {"test": [tokens]})


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    g = prepare()
    monkeypatch.setitem(sys.modules, "pytorch_ood.detector", None)
    with pytest.raises(MissingPackageError, match=r"ifcomp\[ood\]"):
        ood_scores("MSP", g.model, [(g.x, g.y)], {"test": [g.test]})
