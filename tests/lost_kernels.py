"""Tables in which some kernels have lost to their twins, and what operators must give all the same."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernel_checks import as_list
from weft.kernels import choose

QUICK_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")  # opcheck's others take seconds


def lose(monkeypatch: pytest.MonkeyPatch, *operations: str, **launch: int) -> None:
    """The twins of these `operations` were measured to be faster; all others win with these `launch` parameters."""

    def nearest(gpu: str, operation: str, shape: Any) -> dict[str, Any]:
        return dict(shape=dict(shape), launch=launch, gain=0.9 if operation in operations else 2.0)

    monkeypatch.setattr(choose, "_nearest", nearest)
    monkeypatch.setattr(choose, "_chosen", {})


def check_promise(name: str, *args: Any) -> None:
    """The operator gives the shapes and types that its fake promises, in one piece."""
    operator = getattr(torch.ops.weft, name)
    fake = FakeTensorMode()
    with fake:
        promised = operator(*[fake.from_tensor(value) if isinstance(value, Tensor) else value for value in args])
    for found, wanted in zip(as_list(operator(*args)), as_list(promised), strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
        assert found.is_contiguous(), name
        assert wanted.is_contiguous(), name
