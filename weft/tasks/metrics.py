"""Helpers of the tasks' metrics."""

import numpy as np


def mean_over(values: np.ndarray, which: np.ndarray) -> float:
    """Mean of the values at `which`; 0 where there is none."""
    return float(values[which].mean()) if which.any() else 0.0
