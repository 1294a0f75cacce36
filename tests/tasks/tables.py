"""Score tables from given values, with all columns of real tables."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ifcomp import ScoreTable

SETTINGS = {"beta": 1.0, "damping": "Relative(multiple=1.0)", "alpha": 1.0, "training_examples": 100}


def table_of(
    complexity: Sequence[float], labels: Sequence[int] | None = None, probabilities: Sequence[Sequence[float]] = ()
) -> ScoreTable:
    """Build a table in which every complexity column follows ``complexity``.

    Args:
        complexity: Complexities in nats, [N].
        labels: Given labels, [N]; None leaves out the columns that need labels.
        probabilities: Model distributions, [N, K]; by default 0.6 for class 0 and 0.4 for class 1.
    """
    values = np.array(complexity, dtype=np.float64)
    p = np.array(probabilities or [[0.6, 0.4]] * len(values))
    frame = pd.DataFrame({"index": range(len(values)), "prediction": p.argmax(1), "confidence": p.max(1)})
    frame = frame.assign(expected_influence=100 * values, parametric_complexity=values + 1)
    frame = frame.assign(bounded_complexity=values)
    if labels is not None:
        label_p = p[np.arange(len(p)), labels]
        others = p.copy()
        others[np.arange(len(p)), labels] = -1
        frame["label"], frame["label_probability"] = np.array(labels, dtype=np.int64), label_p
        frame["suggested_label"], frame["suggested_probability"] = others.argmax(1), others.max(1)
        frame["error"] = -np.log(label_p)
        frame["stochastic_complexity"], frame["label_complexity"] = values, values
    return ScoreTable(frame, SETTINGS)
