"""Score tables made by hand, with the columns of real ones."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ifcomp import ScoreTable

SETTINGS = {"beta": 1.0, "damping": "Relative(multiple=1.0)", "alpha": 1.0, "training_examples": 100}


def table_of(
    complexity: Sequence[float], labels: Sequence[int] | None = None, probabilities: Sequence[Sequence[float]] = ()
) -> ScoreTable:
    """A table with these complexities of all kinds; without labels only parametric ones.

    Args:
        complexity: Nats, one for each example.
        labels: The given labels; the columns that need them are left out without.
        probabilities: The model's distributions, [N, K]; if there are none, 0.6 for class 0 and 0.4 for class 1.
    """
    values = np.array(complexity, dtype=np.float64)
    p = np.array(probabilities or [[0.6, 0.4]] * len(values))
    frame = pd.DataFrame({"index": range(len(values)), "prediction": p.argmax(1), "confidence": p.max(1)})
    frame = frame.assign(expected_influence=100 * values, parametric_complexity=values + 1)
    frame = frame.assign(bounded_complexity=values, surprise=values)
    if labels is not None:
        own = p[np.arange(len(p)), labels]
        others = p.copy()
        others[np.arange(len(p)), labels] = -1
        frame["label"], frame["label_probability"] = np.array(labels, dtype=np.int64), own
        frame["suggested_label"], frame["suggested_probability"] = others.argmax(1), others.max(1)
        frame["error"] = -np.log(own)
        frame["stochastic_complexity"], frame["label_complexity"] = values, values
    return ScoreTable(frame, SETTINGS)
