"""Helpers of the tasks' metrics."""

from collections.abc import Collection, Sequence

import numpy as np


def mean_over(values: np.ndarray, which: np.ndarray) -> float:
    """Mean of the values at `which`; 0 where there is none."""
    return float(values[which].mean()) if which.any() else 0.0


def are_measured(classes: Sequence[str], unlearned: Collection[str]) -> np.ndarray:
    """(classes,) bool: those that training had examples of; an answer to the others says nothing about a model."""
    return np.array([name not in unlearned for name in classes], bool)
