"""Votes of nearest neighbours in the features of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

#: Largest number of neighbours that vote.
NEIGHBOURS = 50

#: Weight m of the class frequencies, in votes.
PRIOR_VOTES = 1.0

#: Number of elements of one block of similarities.
_BLOCK_ELEMENTS = 2**25


@dataclass(frozen=True)
class Neighbours:
    """The k nearest reference examples of n queries.

    Attributes:
        indices: Positions in the reference set, nearest first, [n, k].
        similarities: Cosines between query and neighbour, [n, k].
    """

    indices: Tensor
    similarities: Tensor

    @property
    def distances(self) -> Tensor:
        """Euclidean distances of features of length 1, [n, k]."""
        return (2 - 2 * self.similarities).clamp_min(0).sqrt()


def neighbour_count(labels: Tensor) -> int:
    """Return the number of neighbours that vote: 50, or half the median class size if that is smaller; at least 1."""
    sizes = torch.bincount(labels)
    median = float(np.median(sizes[sizes > 0].numpy()))
    return max(1, min(NEIGHBOURS, int(median / 2), len(labels) - 1))


def find_neighbours(queries: Tensor, reference: Tensor, count: int, own: Tensor | None = None) -> Neighbours:
    """Find the reference examples with the largest cosine.

    Args:
        queries: Centred features [n, d].
        reference: Centred features of the reference set [m, d].
        count: Number of neighbours k.
        own: Position of every query in the reference set, or -1 if it is not in it, [n]. An example is not its own
            neighbour. None if no query is in the reference set.
    """
    queries, reference = (torch.nn.functional.normalize(rows, dim=1) for rows in (queries, reference))
    step = max(1, _BLOCK_ELEMENTS // len(reference))
    indices, similarities = [], []
    for start in range(0, len(queries), step):
        cosines = queries[start : start + step] @ reference.T
        if own is not None:
            position = own[start : start + step]
            inside = (position >= 0).nonzero().flatten()
            cosines[inside, position[inside]] = -torch.inf
        found = cosines.topk(count, dim=1)
        indices.append(found.indices)
        similarities.append(found.values)
    return Neighbours(torch.cat(indices), torch.cat(similarities))


def votes(neighbours: Neighbours, labels: Tensor, num_classes: int) -> np.ndarray:
    """Return the smoothed shares of the labels of k neighbours, [n, K] in float64.

    The share of a label is ``(count + m pi) / (k + m)`` with its frequency pi in the reference and m = `PRIOR_VOTES`.

    Args:
        neighbours: Neighbours in the reference set.
        labels: Labels of the reference set, [m].
        num_classes: Number of classes K.
    """
    frequencies = torch.bincount(labels, minlength=num_classes).double() / len(labels)
    given = labels[neighbours.indices]
    counts = torch.zeros(len(given), num_classes, dtype=torch.float64)
    counts.scatter_add_(1, given, torch.ones_like(given, dtype=torch.float64))
    result: np.ndarray = ((counts + PRIOR_VOTES * frequencies) / (given.shape[1] + PRIOR_VOTES)).numpy()
    return result


def nearest_units(queries: Tensor, reference: Tensor, count: int) -> Neighbours:
    """Find the nearest reference examples of features of length 1.

    Args:
        queries: Features of length 1, [n, d].
        reference: Features of length 1, [m, d].
        count: Number of neighbours k, from 1 to m.
    """
    step = max(1, _BLOCK_ELEMENTS // len(reference))
    found = [(rows @ reference.T).topk(count, dim=1) for rows in queries.split(step)]
    return Neighbours(torch.cat([part.indices for part in found]), torch.cat([part.values for part in found]))
