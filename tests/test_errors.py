"""Bad input: each kind has its own error, which says what was given, what is allowed and what to do."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from cases import Apply, Attention, Positions, mean, seeded
from ifcomp import IFComp, Relative
from ifcomp.data.batches import as_batch
from ifcomp.data.checks import check_inputs
from ifcomp.errors import (
    DataError,
    EmptyDataError,
    FingerprintError,
    LabelError,
    LengthChangedError,
    LogitsError,
    ModelError,
    NonFiniteError,
    NotFittedError,
    PrecisionError,
    SettingError,
    UncoveredParametersError,
)
from ifcomp.estimation import estimate

NAN, INF = math.nan, math.inf

Call = Callable[[IFComp], object]


def net() -> nn.Module:
    """Four features, three classes, BatchNorm in the middle."""

    def build() -> nn.Module:
        parts = {"body": nn.Linear(4, 5), "norm": nn.BatchNorm1d(5), "act": nn.Tanh(), "head": nn.Linear(5, 3)}
        return nn.Sequential(OrderedDict(parts))

    return seeded(build)()


def data(size: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator)


X, Y = data()


def ready(**options: Any) -> IFComp:
    """A fitted predictor."""
    return IFComp(net(), **options).fit([(X, Y)])


def says(caught: pytest.ExceptionInfo[BaseException], *words: str) -> None:
    """The message has every one of these words."""
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


def ids(rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Rows whose first entry is their name, as parameters of a test."""
    return [pytest.param(*row[1:], id=row[0]) for row in rows]


# Every way to score -------------------------------------------------------------------------------------------------

SCORING: list[tuple[str, Call]] = [
    ("influence", lambda ifc: ifc.influence(X)),
    ("logit_kernel", lambda ifc: ifc.logit_kernel(X)),
    ("predict_proba", lambda ifc: ifc.predict_proba(X)),
    ("parametric_complexity", lambda ifc: ifc.parametric_complexity(X)),
    ("parametric_complexity_probes", lambda ifc: ifc.parametric_complexity(X, probes=2)),
    ("stochastic_complexity", lambda ifc: ifc.stochastic_complexity(X, Y)),
    ("score", lambda ifc: ifc.score([(X, Y)])),
]


@pytest.mark.parametrize("call", ids([*SCORING, ("save", lambda ifc: ifc.save("never-written"))]))
def test_nothing_is_scored_before_a_fit(call: Call) -> None:
    with pytest.raises(NotFittedError) as caught:
        call(IFComp(net()))
    says(caught, "fit(", "load(")


@pytest.mark.parametrize("call", ids(SCORING))
def test_nothing_is_scored_after_a_failed_fit(call: Call) -> None:
    ifc = IFComp(net())
    with pytest.raises(LengthChangedError):
        ifc.fit(Passes([X], [X[:5]]))
    with pytest.raises(NotFittedError):
        call(ifc)


def test_a_failed_second_fit_leaves_the_first() -> None:
    ifc = ready()
    before = ifc.influence(X)
    with pytest.raises(LengthChangedError):
        ifc.fit(Passes([X[:8]], [X[:5]]))
    assert torch.equal(ifc.influence(X), before)


def test_a_second_fit_replaces_the_first_also_when_other_layers_are_trainable() -> None:
    model = net()
    model.get_submodule("body").requires_grad_(False)
    ifc = IFComp(model).fit([X])
    model.requires_grad_(True)
    assert_close(ifc.fit([X]).influence(X), ready().influence(X), rtol=1e-5, atol=0)


# Settings -----------------------------------------------------------------------------------------------------------

SETTINGS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("beta_negative", {"beta": -1.0}, ("beta", "-1.0", "at least 0")),
    ("beta_nan", {"beta": NAN}, ("beta", "nan", "at least 0")),
    ("beta_infinite", {"beta": INF}, ("beta", "inf", "finite")),
    ("beta_text", {"beta": "1"}, ("beta", "1", "number")),
    ("beta_auto", {"beta": "auto"}, ("beta", "'auto'", "IFComp.calibrate(held_out)", "number")),
    ("damping_negative", {"damping": -0.1}, ("damping", "-0.1", "at least 0")),
    ("damping_nan", {"damping": NAN}, ("damping", "nan", "at least 0")),
    ("damping_infinite", {"damping": INF}, ("damping", "inf")),
    ("damping_text", {"damping": "small"}, ("damping", "'small'", "number", "Relative")),
    ("damping_none", {"damping": None}, ("damping", "None")),
    ("damping_bool", {"damping": True}, ("damping", "True")),
    ("relative_negative", {"damping": Relative(-0.1)}, ("damping", "-0.1", "at least 0")),
    ("relative_nan", {"damping": Relative(NAN)}, ("damping", "nan")),
    ("relative_text", {"damping": Relative("0.1")}, ("damping", "'0.1'")),
    ("label_samples_zero", {"label_samples": 0}, ("label_samples", "at least 1", "0")),
    ("label_samples_negative", {"label_samples": -2}, ("label_samples", "at least 1", "-2")),
    ("label_samples_fraction", {"label_samples": 1.5}, ("label_samples", "1.5")),
    ("label_samples_text", {"label_samples": "2"}, ("label_samples", "2")),
    ("seed_text", {"seed": "a"}, ("seed", "'a'")),
    ("fisher_unknown", {"fisher": "true"}, ("fisher", "'true'", "'sampled'", "'exact'", "'empirical'")),
    ("sua_text", {"sua": "yes"}, ("sua", "'yes'", "True", "False", "'auto'")),
    ("sua_none", {"sua": None}, ("sua", "None", "'auto'")),
    ("sua_two", {"sua": 2}, ("sua", "2", "'auto'")),
    ("sua_one", {"sua": 1}, ("sua", "1", "'auto'")),
    ("layers_unmatched", {"layers": "conv*"}, ("layers", "conv*", "body", "norm", "head", "'last'")),
    ("layers_one_unmatched", {"layers": ["body", "nothing"]}, ("layers", "nothing", "body", "norm", "head")),
    ("layers_none_named", {"layers": []}, ("layers", "body", "norm", "head")),
    ("layers_number", {"layers": 3}, ("layers", "3")),
]


@pytest.mark.parametrize(("options", "words"), ids(SETTINGS))
def test_bad_settings_are_refused_at_once(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(SettingError) as caught:
        IFComp(net(), **options)
    says(caught, *words)


WITH_DAMPING: list[tuple[str, Callable[[IFComp, Any], object]]] = [
    ("influence", lambda ifc, damping: ifc.influence(X, damping=damping)),
    ("logit_kernel", lambda ifc, damping: ifc.logit_kernel(X, damping=damping)),
    ("predict_proba", lambda ifc, damping: ifc.predict_proba(X, damping=damping)),
    ("parametric_complexity", lambda ifc, damping: ifc.parametric_complexity(X, damping=damping)),
    ("stochastic_complexity", lambda ifc, damping: ifc.stochastic_complexity(X, Y, damping=damping)),
    ("score", lambda ifc, damping: ifc.score([X], damping=damping)),
]


@pytest.mark.parametrize("call", ids(WITH_DAMPING))
@pytest.mark.parametrize("damping", [-1.0, NAN, "small", Relative(-1.0), Relative(NAN)], ids=repr)
def test_bad_damping_of_a_call_is_refused(call: Callable[[IFComp, Any], object], damping: Any) -> None:
    with pytest.raises(SettingError) as caught:
        call(ready(), damping)
    value = damping.multiple if isinstance(damping, Relative) else damping
    says(caught, "damping", repr(value), "at least 0")


WITH_ALPHA: list[tuple[str, Callable[[IFComp, Any], object]]] = [
    ("predict_proba", lambda ifc, alpha: ifc.predict_proba(X, alpha=alpha)),
    ("parametric_complexity", lambda ifc, alpha: ifc.parametric_complexity(X, alpha=alpha)),
    ("stochastic_complexity", lambda ifc, alpha: ifc.stochastic_complexity(X, Y, alpha=alpha)),
    ("score", lambda ifc, alpha: ifc.score([X], alpha=alpha)),
]


@pytest.mark.parametrize("call", ids(WITH_ALPHA))
@pytest.mark.parametrize("alpha", [-0.1, NAN], ids=repr)
def test_bad_alpha_is_refused(call: Callable[[IFComp, Any], object], alpha: Any) -> None:
    with pytest.raises(SettingError) as caught:
        call(ready(), alpha)
    says(caught, "alpha", "at least 0", repr(alpha))


@pytest.mark.parametrize("alpha", [INF, "1"], ids=repr)
def test_alpha_that_is_no_finite_number_is_refused(alpha: Any) -> None:
    with pytest.raises(SettingError) as caught:
        ready().predict_proba(X, alpha=alpha)
    says(caught, "alpha")


@pytest.mark.parametrize("probes", [0, -1, 4, 2.5], ids=repr)
def test_probes_out_of_range_are_refused(probes: Any) -> None:
    for call in (lambda: ready().parametric_complexity(X, probes=probes), lambda: ready().score([X], probes=probes)):
        with pytest.raises(SettingError) as caught:
            call()
        says(caught, "probes", "from 1", "3", str(probes))


def test_probes_do_not_serve_unseen_labels() -> None:
    with pytest.raises(SettingError) as caught:
        ready().score([(X, Y)], seen=False, probes=2)
    says(caught, "seen=False", "probes", "label")


@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_beta_zero_is_the_limit(fisher: Any) -> None:
    zero, small = (
        IFComp(net().double(), beta=beta, fisher=fisher, damping=1e-3).fit([X.double()]) for beta in (0.0, 1e-7)
    )
    assert_close(zero.influence(X.double()), small.influence(X.double()), rtol=1e-5, atol=0)
    assert_close(zero.predict_proba(X.double(), alpha=0.0), torch.full((len(X), 3), 1 / 3, dtype=torch.float64))


# Which layers -------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Attention, a norm, a bare parameter and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attn(x, x, x, need_weights=False)[0]
        return self.head(torch.tanh(self.norm(h) * self.scale).mean(1))


PARTS = ["attn.q", "attn.k", "attn.v", "attn.out_proj", "norm", "head", "scale"]

CHOICES: list[tuple[str, Any, list[str]]] = [
    ("all", None, PARTS),
    ("star", "*", PARTS),
    ("last", "last", ["head"]),
    ("one", "norm", ["norm"]),
    ("other", "scale", ["scale"]),
    ("list", ["norm", "head"], ["norm", "head"]),
    ("tuple", ("norm", "head"), ["norm", "head"]),
    ("pattern", "attn.*", PARTS[:4]),
    ("attention_value", "attn.v", ["attn.v"]),
    ("attention_output", "attn.out_proj", ["attn.out_proj"]),
    ("attention_two", ["attn.q", "attn.v"], ["attn.q", "attn.v"]),
    ("overlapping", ["*a*", "head"], [*PARTS[:4], "head", "scale"]),
]


def tokens(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, 5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scaled(layers: Any) -> IFComp:
    model = seeded(Scaled)().double()
    return IFComp(model, layers=layers, fisher="exact", damping=1e-2).fit([tokens(9)])


@pytest.mark.parametrize(("layers", "expected"), ids(CHOICES))
def test_layers_selects_blocks(layers: Any, expected: list[str]) -> None:
    ifc = scaled(layers)
    assert ifc.factors is not None
    assert sorted(ifc.factors.blocks) == sorted(expected)
    assert sorted(row.name for row in ifc.coverage.rows if row.covered) == sorted(expected)
    whole = scaled(None)
    assert whole.factors is not None
    for name in expected:
        assert_close(ifc.factors.blocks[name].second_moments, whole.factors.blocks[name].second_moments)


@pytest.mark.parametrize("layers", ["attn.v", ["attn.q", "scale"], "last", ["norm", "attn.out_proj"]], ids=str)
def test_influence_of_some_layers_and_of_the_rest_add_up(layers: Any) -> None:
    some = scaled(layers)
    assert some.factors is not None
    rest = scaled([name for name in PARTS if name not in some.factors.blocks])
    x = tokens(4, seed=1)
    assert_close(some.influence(x) + rest.influence(x), scaled(None).influence(x), rtol=1e-9, atol=0)


class HeadFirst(nn.Module):
    """The head is registered before the body."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.body = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class UsedTwice(nn.Module):
    """The head's weight is also used by a function call, so that the rule of its layer does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return self.head(h) + functional.linear(h.square(), self.head.weight)


def test_the_last_layer_is_the_last_to_run() -> None:
    ifc = IFComp(seeded(HeadFirst)(), layers="last").fit([X])
    assert [row.name for row in ifc.coverage.rows if row.covered] == ["head"]


@pytest.mark.parametrize(
    ("make", "x", "layers", "covered"),
    [
        pytest.param(UsedTwice, X, "last", {"head.weight", "head.bias"}, id="last"),
        pytest.param(UsedTwice, X, "head", {"head.weight", "head.bias"}, id="name"),
        pytest.param(
            lambda: Positions(leading=False),
            torch.randint(4, (8, 5), generator=torch.Generator().manual_seed(0)),
            ["position", "head"],
            {"position.weight", "head"},
            id="embedding",
        ),
    ],
)
def test_layers_still_means_a_layer_whose_rule_does_not_hold(
    make: Callable[[], nn.Module], x: Tensor, layers: Any, covered: set[str]
) -> None:
    ifc = IFComp(seeded(make)(), layers=layers).fit([x])
    assert {row.name for row in ifc.coverage.rows if row.covered} == covered


class Nested(nn.Module):
    """A frozen layer, a parameter without a rule, a layer whose rule does not hold, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.inner, self.scale = nn.Linear(4, 4), UsedTwice(), nn.Parameter(torch.ones(4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = (self.frozen(x) * self.scale).unsqueeze(1)
        return self.inner(self.attention(h, h, h)[0].squeeze(1))


@pytest.mark.parametrize("make", [Nested, lambda: nn.Linear(4, 3), UsedTwice])
def test_layers_accepts_every_name_of_the_coverage(make: Callable[[], nn.Module]) -> None:
    whole = IFComp(seeded(make)()).fit([X])
    for printed in (IFComp(seeded(make)()).coverage, whole.coverage):
        for row in printed.rows:
            if not row.covered:
                with pytest.raises(SettingError, match="frozen"):
                    IFComp(seeded(make)(), layers=row.name)
                continue
            ifc = IFComp(seeded(make)(), layers=[row.name]).fit([X])
            assert row.name in {other.name for other in ifc.coverage.rows if other.covered} | {"inner.head", "head"}
            assert {other.name for other in ifc.coverage.rows} == {other.name for other in whole.coverage.rows}
            for other in ifc.coverage.rows:
                if other.treatment == "not in layers=":
                    IFComp(seeded(make)(), layers=[other.name]).fit([X])


def test_a_demoted_parameter_is_selected_alone(tmp_path: Path) -> None:
    ifc = IFComp(seeded(UsedTwice)(), layers=["head.weight"]).fit([X])
    assert [row.name for row in ifc.coverage.rows if row.covered] == ["head.weight"]
    ifc.save(tmp_path / "fit.safetensors")
    loaded = IFComp.load(tmp_path / "fit.safetensors", seeded(UsedTwice)())
    assert torch.equal(loaded.influence(X), ifc.influence(X))


def test_frozen_layers_are_named() -> None:
    for layers in ("frozen", "frozen.*", "frozen.bias"):
        with pytest.raises(SettingError, match=r"not covered: .*frozen\.bias \(frozen\)"):
            IFComp(seeded(Nested)(), layers=layers)
    assert IFComp(seeded(Nested)(), layers="*").coverage.covered


# Labels -------------------------------------------------------------------------------------------------------------

FITS_OR_SCORES: list[tuple[str, Callable[[Any], object]]] = [
    ("fit", lambda batches: IFComp(net()).fit(batches)),
    ("empirical_fit", lambda batches: IFComp(net(), fisher="empirical").fit(batches)),
    ("score", lambda batches: ready().score(batches)),
]

LABELS: list[tuple[str, Any, tuple[str, ...]]] = [
    ("too_large", torch.tensor([0, 1, 3, 0]), ("label 3", "example 2", "0 ... 2", "3 logits")),
    ("negative", torch.tensor([0, -1, 2, 0]), ("label -1", "example 1", "0 ... 2")),
    ("float", torch.tensor([0.0, 1.0, 2.0, 0.0]), ("integers", "float32", "[4]", "labels.long()")),
    ("column", torch.tensor([[0], [1], [2], [0]]), ("integers", "[4, 1]", "labels.flatten().long()")),
    ("float_column", torch.tensor([[0.0], [1.0], [2.0], [0.0]]), ("float32", "labels.flatten().long()")),
    ("regression", torch.tensor([0.5, 1.5, -2.0, 0.0]), ("integers", "regression targets", "classifiers")),
    ("regression_column", torch.tensor([[0.5], [1.5], [-2.0], [0.0]]), ("regression targets",)),
    (
        "regression_rows",
        torch.tensor([[0.5, 1.5], [-2.0, 0.0]]).repeat(2, 1),
        ("regression targets", "several outputs"),
    ),
    ("one_hot", torch.eye(3)[[0, 1, 2, 0]].long(), ("integers", "[4, 3]", "one-hot", "labels.argmax(1)")),
    ("float_one_hot", torch.eye(3)[[0, 1, 2, 0]], ("float32", "one-hot", "labels.argmax(1)")),
    ("multi_label", torch.tensor([[1.0, 1.0, 0.0]]).repeat(4, 1), ("multi-label targets", "sigmoids")),
    ("multi_label_none", torch.eye(4)[:, :3], ("multi-label targets", "none per example")),
    ("multi_label_integers", torch.eye(4).long()[:, :3], ("multi-label targets",)),
    ("multi_label_booleans", torch.eye(4).bool()[:, :3], ("multi-label targets", "bool")),
    ("multi_label_smoothed", torch.tensor([[0.9, 0.9, 0.1]]).repeat(4, 1), ("multi-label targets",)),
    ("soft", torch.tensor([[0.2, 0.5, 0.3]]).repeat(4, 1), ("soft labels", "labels.argmax(1)")),
    ("several", torch.tensor([[0, 2, 5]]).repeat(4, 1), ("several labels per example", "one class per example")),
    ("pixels", torch.zeros(4, 3, 3, dtype=torch.long), ("several positions", "one class per example")),
    ("scalar", torch.tensor(1), ("integers", "Number the classes")),
    ("bool", torch.tensor([True, False, True, False]), ("integers", "bool", "labels.long()")),
    ("too_few", torch.tensor([0, 1, 2]), ("3 labels", "4 examples")),
    ("too_many", torch.tensor([0, 1, 2, 0, 1]), ("5 labels", "4 examples")),
    ("text", ["cat", "dog", "cat", "dog"], ("labels", "integers")),
    ("dict", {"boxes": 1}, ("labels", "integers")),
]


@pytest.mark.parametrize(("labels", "words"), ids(LABELS))
@pytest.mark.parametrize("run", ids(FITS_OR_SCORES))
def test_bad_labels_are_refused(run: Callable[[Any], object], labels: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(LabelError) as caught:
        run([(X[:4], Y[:4]), (X[4:8], labels)])
    says(caught, *words)


@pytest.mark.parametrize(("labels", "words"), ids(LABELS))
def test_bad_labels_of_stochastic_complexity_are_refused(labels: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(LabelError) as caught:
        ready().stochastic_complexity(X[:4], labels)
    says(caught, *words)


@pytest.mark.parametrize("run", ids(FITS_OR_SCORES))
def test_a_label_out_of_range_is_located(run: Callable[[Any], object]) -> None:
    with pytest.raises(LabelError) as caught:
        run([(X[:4], Y[:4]), (X[4:8], torch.tensor([0, 1, 3, 0]))])
    says(caught, "batch 1", "example 2")


def test_labels_are_needed_by_the_empirical_fisher() -> None:
    with pytest.raises(LabelError) as caught:
        IFComp(net(), fisher="empirical").fit([X])
    says(caught, "labels are needed", "(x, y)", "'labels'")


def test_labels_are_needed_in_every_batch_by_the_empirical_fisher() -> None:
    with pytest.raises(LabelError) as caught:
        IFComp(net(), fisher="empirical").fit([(X[:4], Y[:4]), X[4:]])
    says(caught, "batch 1", "labels are needed")


def test_labels_are_needed_by_stochastic_complexity() -> None:
    with pytest.raises(LabelError) as caught:
        ready().stochastic_complexity(X, None)
    says(caught, "labels are needed")


@pytest.mark.parametrize("first", [True, False])
def test_labels_in_some_batches_only_are_refused(first: bool) -> None:
    batches: list[Any] = [(X[:4], Y[:4]), X[4:]]
    with pytest.raises(DataError) as caught:
        ready().score(batches if first else batches[::-1])
    says(caught, "labels", "all or for none")


def test_labels_may_be_missing_where_they_are_not_used() -> None:
    expected = IFComp(net()).fit([X]).influence(X)
    assert torch.equal(IFComp(net()).fit([(X, None)]).influence(X), expected)


class Untouched(nn.Module):
    """A model that must not run."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the model runs")


@pytest.mark.parametrize("targets", [torch.rand(6), torch.rand(6, 3), torch.ones(6, 3), torch.eye(3).repeat(2, 1)])
def test_other_targets_are_refused_before_the_model_runs(targets: Tensor) -> None:
    data = [(torch.randn(6, 4), targets)]
    for run in (
        lambda: IFComp(Untouched()).fit(data),
        lambda: estimate(Untouched(), data),
        lambda: IFComp(Untouched()).fit([{"x": data[0][0], "labels": targets}]),
    ):
        with pytest.raises(LabelError):
            run()


# Numbers that are not finite ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["body.weight", "head.bias", "norm.running_var"])
def test_weights_that_are_not_finite_are_named(name: str, value: float) -> None:
    model = net()
    model.state_dict()[name].view(-1)[1] = value
    with pytest.raises(NonFiniteError) as caught:
        IFComp(model)
    says(caught, name, "NaN or infinite")


def test_all_weights_that_are_not_finite_are_named() -> None:
    model = net()
    for name in ("body.bias", "head.weight"):
        model.state_dict()[name].fill_(NAN)
    with pytest.raises(NonFiniteError) as caught:
        IFComp(model)
    says(caught, "body.bias", "head.weight")


def test_weights_that_lose_their_finiteness_before_the_fit_are_named() -> None:
    model = net()
    ifc = IFComp(model)
    model.state_dict()["head.weight"].fill_(NAN)
    with pytest.raises(NonFiniteError) as caught:
        ifc.fit([X])
    says(caught, "head.weight")


def spoiled(value: float, example: int) -> Tensor:
    x = X.clone()
    x[example, 1] = value
    return x


INPUT_RUNS: list[tuple[str, Callable[[Any], object], str]] = [
    ("fit_first", lambda bad: IFComp(net()).fit([bad, X]), "batch"),
    ("fit_later", lambda bad: IFComp(net()).fit([X, X, bad]), "batch 2"),
    ("score_first", lambda bad: ready().score([bad, X]), "batch 0"),
    ("score_later", lambda bad: ready().score([X, (bad,)]), "batch 1"),
    ("influence", lambda bad: ready().influence(bad), "batch"),
    ("logit_kernel", lambda bad: ready().logit_kernel(bad), "batch"),
    ("probes", lambda bad: ready().parametric_complexity(bad, probes=1), "batch"),
    ("stochastic_complexity", lambda bad: ready().stochastic_complexity(bad, Y), "batch"),
]


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(("run", "batch"), ids(INPUT_RUNS))
def test_inputs_that_are_not_finite_are_located(run: Callable[[Any], object], batch: str, value: float) -> None:
    with pytest.raises(NonFiniteError) as caught:
        run(spoiled(value, 7))
    says(caught, batch, "example 7", "NaN or infinite", "input")


def test_infinities_that_cancel_are_found() -> None:
    x = spoiled(INF, 7)
    x[8, 1] = -INF
    with pytest.raises(NonFiniteError, match="example 7"):
        check_inputs(as_batch(x))


def test_inputs_whose_sum_overflows_are_finite() -> None:
    check_inputs(as_batch(torch.full((4, 4), 3e38)))
    check_inputs(as_batch(torch.full((4, 4), 6e4, dtype=torch.float16)))


def overflowing() -> Tensor:
    x = X.clone()
    x[5] = 3e38
    return x


def steep() -> nn.Module:
    layer = nn.Linear(4, 3)
    nn.init.constant_(layer.weight, 2.0)
    return layer


@pytest.mark.parametrize(
    "run",
    ids(
        [
            ("fit", lambda model: IFComp(model).fit([X, overflowing()])),
            ("score", lambda model: IFComp(model).fit([X]).score([X, overflowing()])),
        ]
    ),
)
def test_logits_that_overflow_are_located(run: Callable[[nn.Module], object]) -> None:
    with pytest.raises(NonFiniteError) as caught:
        run(steep())
    says(caught, "batch 1", "logits", "example 5", "overflow", "float64")


# Logits -------------------------------------------------------------------------------------------------------------


class Returning(nn.Module):
    """A Linear whose output is passed through a function."""

    def __init__(self, function: Callable[[Tensor], object], outputs: int = 3) -> None:
        super().__init__()
        self.fc = nn.Linear(4, outputs)
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(self.fc(x))


OUTPUTS: list[tuple[str, Callable[[], nn.Module], tuple[str, ...]]] = [
    ("one_class", lambda: Returning(lambda z: z, 1), ("one logit", "at least 2", "sigmoid", "torch.cat")),
    ("rank_one", lambda: Returning(lambda z: z[:, 0]), ("[12, K]", "[12]")),
    ("rank_three", lambda: Returning(lambda z: z[:, None]), ("[12, K]", "[12, 1, 3]")),
    ("wrong_batch", lambda: Returning(lambda z: z.reshape(-1, 2), 4), ("[12, K]", "[24, 2]")),
    ("tuple", lambda: Returning(lambda z: (z, z)), ("tensor of logits", ".logits", "tuple")),
    ("dict", lambda: Returning(lambda z: {"logits": z}), (".logits", "dict")),
    ("none", lambda: Returning(lambda z: None), (".logits", "NoneType")),
]


@pytest.mark.parametrize(("make", "words"), ids(OUTPUTS))
def test_outputs_that_are_no_logits_are_refused(make: Callable[[], nn.Module], words: tuple[str, ...]) -> None:
    model = make()
    with pytest.raises(LogitsError) as caught:
        IFComp(model).fit([X])
    expected = [word.replace("12", "3").replace("24", "6") for word in words]  # as seen on the first few examples
    message = str(caught.value)
    assert all(word in message for word in words) or all(word in message for word in expected), message


def test_logits_without_a_graph_are_refused() -> None:
    with pytest.raises(ModelError) as caught:
        IFComp(Returning(Tensor.detach)).fit([X])
    says(caught, "gradient", "logits")


# Precision ----------------------------------------------------------------------------------------------------------

FIRST_LAYERS: list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = [
    ("linear", lambda: nn.Sequential(nn.Linear(4, 3)), (4,)),
    ("conv", lambda: nn.Sequential(nn.Conv2d(2, 3, 2), mean(2, 3)), (2, 3, 3)),
    ("batchnorm", lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), (4,)),
    ("layernorm", lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)), (4,)),
    ("attention", lambda: Attention(batch_first=True), (5, 4)),
]


@pytest.mark.parametrize(
    ("of_model", "of_data"), [(torch.float64, torch.float32), (torch.float32, torch.float64)], ids=str
)
@pytest.mark.parametrize(("make", "shape"), ids(FIRST_LAYERS))
def test_precision_of_model_and_data_must_agree(
    make: Callable[[], nn.Module], shape: tuple[int, ...], of_model: torch.dtype, of_data: torch.dtype
) -> None:
    with pytest.raises(PrecisionError) as caught:
        IFComp(seeded(make)().to(of_model)).fit([torch.ones(4, *shape, dtype=of_data)])
    says(caught, str(of_model), str(of_data), "Convert")


def test_precision_must_agree_when_scoring() -> None:
    with pytest.raises(PrecisionError) as caught:
        ready().score([X, X.double()])
    says(caught, "batch 1", "float32", "float64")


# Data ---------------------------------------------------------------------------------------------------------------


class Passes:
    """Other batches each time it is iterated."""

    def __init__(self, *passes: list[Any]) -> None:
        self.left = iter(passes)

    def __iter__(self) -> Iterator[Any]:
        yield from next(self.left)


EMPTY: list[tuple[str, Any]] = [
    ("list", []),
    ("empty_batches", [X[:0], (X[:0], Y[:0])]),
    ("empty_dict_batch", [{"input": X[:0]}]),
    ("loader", DataLoader(TensorDataset(X[:0], Y[:0]), batch_size=4)),
]


@pytest.mark.parametrize("empty", ids(EMPTY))
def test_data_without_examples_is_refused(empty: Any) -> None:
    with pytest.raises(EmptyDataError) as caught:
        IFComp(net()).fit(empty)
    says(caught, "fit", "at least one example")
    with pytest.raises(EmptyDataError) as caught:
        ready().score(empty)
    says(caught, "score", "at least one example")


EMPTY_CALLS: list[tuple[str, Call, tuple[int, ...]]] = [
    ("influence", lambda ifc: ifc.influence(X[:0]), (0, 3)),
    ("logit_kernel", lambda ifc: ifc.logit_kernel(X[:0]), (0, 3, 3)),
    ("predict_proba", lambda ifc: ifc.predict_proba(X[:0]), (0, 3)),
    ("parametric_complexity", lambda ifc: ifc.parametric_complexity(X[:0]), (0,)),
    ("stochastic_complexity", lambda ifc: ifc.stochastic_complexity(X[:0], Y[:0]), (0,)),
]


@pytest.mark.parametrize(("call", "shape"), ids(EMPTY_CALLS))
def test_no_inputs_give_no_outputs_or_their_own_error(call: Call, shape: tuple[int, ...]) -> None:
    try:
        found = call(ready())
    except EmptyDataError:
        return
    assert isinstance(found, Tensor)
    assert tuple(found.shape) == shape


@pytest.mark.parametrize(
    "once",
    ids(
        [
            ("generator", lambda: (X for _ in range(2))),
            ("iterator", lambda: iter([X])),
            ("map", lambda: map(torch.clone, [X])),
            ("zip", lambda: zip([X], [Y], strict=True)),
        ]
    ),
)
def test_fit_refuses_what_can_be_read_once_only(once: Callable[[], Iterator[Any]]) -> None:
    with pytest.raises(DataError) as caught:
        IFComp(net()).fit(once())
    says(caught, "twice", "DataLoader", "list")


class Counting(list[Any]):
    """A list that counts how often it is iterated, as a loader with workers starts them each time."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return super().__iter__()


def test_fit_iterates_twice_and_score_once() -> None:
    batches = Counting([X])
    ifc = IFComp(net()).fit(batches)
    assert batches.passes == 2
    ifc.score(batches)
    assert batches.passes == 3


def test_score_reads_once() -> None:
    ifc = ready()
    halves = (half for half in ((X[:5], Y[:5]), (X[5:], Y[5:])))
    assert len(ifc.score(halves)) == len(X)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    ids(
        [
            ("shorter", [X, X[:4]], [X], ("16", "12", "same examples")),
            ("longer", [X], [X, X[:4]], ("12", "16", "same examples")),
            ("empty", [X], [], ("12", "0", "same examples")),
        ]
    ),
)
def test_data_of_another_length_in_the_second_pass_is_refused(
    first: list[Tensor], second: list[Tensor], words: tuple[str, ...]
) -> None:
    with pytest.raises(LengthChangedError) as caught:
        IFComp(net()).fit(Passes(first, second))
    says(caught, *words)


BATCHES: list[tuple[str, Any, tuple[str, ...]]] = [
    ("three", (X, Y, X), ("(x, y)", "tuple of length 3", "dict")),
    ("list_of_lists", [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], ("(x, y)", "list of length 3")),
    ("pair_of_lists", [[1.0, 2.0], [3.0, 4.0]], ("tensor", "torch.as_tensor")),
    ("pair_of_arrays", (X.numpy(), Y.numpy()), ("tensor", "torch.as_tensor")),
    ("text", "batch", ("tensor", "str")),
    ("none", None, ("tensor", "NoneType")),
    ("empty_tuple", (), ("(x, y)", "tuple of length 0")),
    ("scalar", torch.tensor(1.0), ("batch axis",)),
    ("dict_without_tensors", {"x": [1, 2]}, ("tensor", "torch.as_tensor")),
]


@pytest.mark.parametrize(("batch", "words"), ids(BATCHES))
def test_batches_of_another_type_are_refused(batch: Any, words: tuple[str, ...]) -> None:
    runs = [lambda: IFComp(net()).fit([batch]), lambda: ready().score([X, batch]), lambda: ready().influence(batch)]
    for run in runs:
        with pytest.raises(DataError) as caught:
            run()
        says(caught, *words)


NO_DATA: list[tuple[str, Any]] = [
    ("none", None),
    ("number", 5),
    ("file_name", "train.npz"),
    ("triple", (X, Y, Y)),
    ("pair_of_batches", ((X, Y), (X, Y))),
    ("dict_of_lists", {"x": [1.0, 2.0]}),
]


@pytest.mark.parametrize("given", ids(NO_DATA))
@pytest.mark.parametrize("run", ids([("fit", lambda d: IFComp(net()).fit(d)), ("score", lambda d: ready().score(d))]))
def test_objects_that_are_no_data_are_refused(run: Callable[[Any], object], given: Any) -> None:
    with pytest.raises(DataError) as caught:
        run(given)
    says(caught, "batches", "(X, y)", "DataFrame", type(given).__name__)


def test_numpy_scalars_are_numbers() -> None:
    expected = ready(beta=0.5, damping=0.25).influence(X)
    assert torch.equal(ready(beta=np.float64(0.5), damping=np.float64(0.25)).influence(X), expected)


# Models -------------------------------------------------------------------------------------------------------------


def batch_dependent(axes: int) -> nn.Module:
    """A model with a BatchNorm that uses the statistics of the batch also in eval mode."""
    if axes == 0:
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3))
    norm = nn.BatchNorm2d(5, track_running_stats=False)
    return nn.Sequential(nn.Conv2d(2, 5, 2), norm, nn.Tanh(), mean(2, 3), nn.Linear(5, 3))


@pytest.mark.parametrize("first", [1, 2, 6])
@pytest.mark.parametrize(("axes", "shape"), [(0, (4,)), (2, (2, 3, 3))])
def test_examples_that_depend_on_each_other_are_refused(axes: int, shape: tuple[int, ...], first: int) -> None:
    x = torch.randn(8, *shape, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ModelError) as caught:
        IFComp(seeded(lambda: batch_dependent(axes))()).fit([x[:first], x])
    says(caught, "BatchNorm", "track_running_stats", "batch")


def test_a_model_that_is_random_in_eval_mode_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6), Apply(lambda x: functional.dropout(x, 0.5)), nn.Linear(6, 3))
    with pytest.raises(ModelError) as caught:
        IFComp(model).fit([X])
    says(caught, "random")


class ChangesInput(nn.Module):
    """Adds to a layer's input in place after the layer has used it."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.side = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.side.weight.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x)) + 0
        y = self.side(h)
        h.add_(1)
        return self.head(h + y)


def test_a_layer_input_that_is_changed_in_place_is_named() -> None:
    with pytest.raises(ModelError) as caught:
        IFComp(ChangesInput(frozen=False)).fit([X])
    says(caught, "in place", "side")


def test_an_input_that_no_gradient_needs_may_be_changed_in_place() -> None:
    assert IFComp(ChangesInput(frozen=True)).fit([X]).influence(X).isfinite().all()


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        IFComp(net().requires_grad_(False))
    says(caught, "trainable", "requires_grad_(True)")


@pytest.mark.parametrize("given", ids([("function", torch.tanh), ("none", None), ("class", nn.Linear)]))
def test_what_is_no_module_is_refused(given: Any) -> None:
    with pytest.raises(ModelError) as caught:
        IFComp(given)
    says(caught, "nn.Module", type(given).__name__)


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = net()
    with pytest.raises(ModelError) as caught:
        IFComp(model).fit([X])
    says(caught, "inference")


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        IFComp(nn.Flatten())
    says(caught, "no parameters")


@pytest.mark.parametrize(
    ("layer", "names"),
    ids(
        [
            ("linear", lambda: nn.LazyLinear(4), ("0.weight", "0.bias")),
            ("conv", lambda: nn.LazyConv2d(4, 3), ("0.weight",)),
            ("batchnorm", lambda: nn.LazyBatchNorm1d(), ("0.weight",)),
            ("batchnorm_statistics", lambda: nn.LazyBatchNorm1d(affine=False), ("0.running_mean",)),
        ]
    ),
)
def test_lazy_parameters_are_named(layer: Callable[[], nn.Module], names: tuple[str, ...]) -> None:
    with pytest.raises(ModelError) as caught:
        IFComp(nn.Sequential(layer(), nn.Linear(4, 3)))
    says(caught, *names, "nitialised", "Run one batch")


class Uncoverable(nn.Module):
    """Two parameters that cannot be covered, of 6 * 4 and 4, beside 19 that can."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, max_norm=100.0)
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).mean(1) * self.scale * self.phase.abs())


INDICES = torch.randint(6, (9, 3), generator=torch.Generator().manual_seed(0))


def test_all_uncoverable_parameters_are_listed_at_once() -> None:
    with pytest.raises(UncoveredParametersError) as caught:
        IFComp(Uncoverable())
    says(caught, "table.weight: 24 parameters (51.06 %)", "max_norm", "phase: 4 parameters (8.51 %)", "complex")
    says(caught, "skip_uncovered=True", "requires_grad_(False)", "Linear", "Conv2d", "MultiheadAttention")
    assert "scale" not in str(caught.value)


def test_uncoverable_parameters_can_be_left_out() -> None:
    model, frozen = seeded(Uncoverable)(), seeded(Uncoverable)()
    for name in ("table.weight", "phase"):
        frozen.get_parameter(name).requires_grad_(False)
    ifc = IFComp(model, skip_uncovered=True).fit([INDICES])
    assert torch.equal(ifc.influence(INDICES), IFComp(frozen).fit([INDICES]).influence(INDICES))
    skipped = {row.name: row for row in ifc.coverage.rows if not row.covered}
    assert skipped.keys() == {"table.weight", "phase"}
    assert "max_norm" in skipped["table.weight"].treatment
    assert "complex" in skipped["phase"].treatment
    assert ifc.coverage.covered == 19


# A model that changes after the fit ---------------------------------------------------------------------------------


def optimizer_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    functional.cross_entropy(model(X), Y).backward()
    optimizer.step()


def new_weights(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def new_parameter(model: nn.Module) -> None:
    body = model.get_submodule("body")
    body.weight = nn.Parameter(body.weight.detach() * 2)


def running_statistics(model: nn.Module) -> None:
    model.train()
    model(X)
    model.eval()


def permuted(model: nn.Module) -> None:
    weight = model.get_parameter("body.weight")
    with torch.no_grad():
        weight.copy_(weight.flip(0))


def by_one_bit(model: nn.Module) -> None:
    weight = model.get_parameter("body.weight")
    with torch.no_grad():
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(10.0))


CHANGES: list[tuple[str, Callable[[nn.Module], object], str]] = [
    ("optimizer_step", optimizer_step, "body.weight"),
    ("load_state_dict", new_weights, "body.weight"),
    ("new_parameter", new_parameter, "body.weight"),
    ("permuted", permuted, "body.weight"),
    ("by_one_bit", by_one_bit, "body.weight"),
    ("running_statistics", running_statistics, "norm.running_mean"),
    ("through_data", lambda model: model.get_parameter("body.weight").data.mul_(2), "body.weight"),
    ("new_data", lambda model: setattr(model.get_parameter("head.bias"), "data", torch.ones(3)), "head.bias"),
]


@pytest.mark.parametrize(("change", "name"), ids(CHANGES))
def test_a_model_that_changes_after_the_fit_is_noticed(change: Callable[[nn.Module], object], name: str) -> None:
    ifc = ready()
    change(ifc.model)
    for _, call in SCORING:
        with pytest.raises(FingerprintError) as caught:
            call(ifc)
        says(caught, name, "different values", "fit again")


def test_a_model_whose_precision_changes_after_the_fit_is_noticed() -> None:
    ifc = ready()
    ifc.model.double()
    with pytest.raises(FingerprintError) as caught:
        ifc.influence(X.double())
    says(caught, "body.weight", "fit again")


def test_a_model_that_is_changed_back_is_accepted() -> None:
    ifc = ready()
    before, weights = ifc.influence(X), {name: value.clone() for name, value in ifc.model.state_dict().items()}
    optimizer_step(ifc.model)
    ifc.model.load_state_dict(weights)
    assert torch.equal(ifc.influence(X), before)


def test_a_changed_model_can_be_fitted_again() -> None:
    ifc = ready()
    optimizer_step(ifc.model)
    again = ifc.fit([X]).influence(X)
    assert torch.equal(again, IFComp(ifc.model).fit([X]).influence(X))
