"""Rival methods, one file per method. They are for comparisons; `ifcomp` itself does not use them.

Predictive distributions implement `interface.Predictive`: ``predict_proba(x)`` returns probabilities [B, K].
Costs are forward passes per example, a backward pass counted as two: K labels, m samples or members, s steps.

| method | needs, beyond the trained model | cost of a prediction |
|---|---|---|
| `temperature.TemperatureScaling` | held-out labels | 1 |
| `ensemble.DeepEnsemble` | m trained models | m |
| `dropout.MonteCarloDropout` | a model trained with dropout | m |
| `swag.Swag`, `swag.swa_model` | checkpoints; with BatchNorm, m passes over the training data | m, 1 |
| `laplace.LastLayerLaplace` | one pass over the labelled training data; laplace-torch | 1 |
| `acnml.Acnml.from_swag` | checkpoints; with BatchNorm, one pass over the training data | K (3 s + 1) |
| `acnml.Acnml.from_ekfac` | a fitted `IFComp` | K (3 s + 1), and s K products with the curvature |

Label scores are functions of models and labelled data that return an array [N]; larger = more suspicious.

| method | needs, beyond the trained model | cost per example |
|---|---|---|
| `ifcomp.tasks.simple_scores`: loss, margin | | 1 |
| `el2n.el2n` | as published, several networks after a few epochs | 1 per network |
| `gradients.grand` | as published, several networks after a few epochs | 1 + 2 K per network |
| `gradients.tracin` | checkpoints with their learning rates | 1 + 2 K per checkpoint |
| `confident.label_suspicion` on in-sample probabilities | cleanlab | 1 |
| `confident.label_suspicion` on out-of-sample probabilities | cleanlab; one training run per fold | 1 |
| column ``influence`` of ``IFComp.score``: Self-IF | a fitted `IFComp` | 1 + 2 K |

Scores of inputs are arrays [N] too; larger = less like the training data.

| method | needs, beyond the trained model | cost per example |
|---|---|---|
| `ifcomp.tasks.simple_scores`: max softmax, energy | | 1 |
| `gradients.gradnorm` | | 1 + 2 K |
| `ood.ood_scores`: the detectors of pytorch-ood | see `detectors` | see `detectors` |
"""
