"""benchmarks/kernels.py: all but the speed of a GPU."""

import pytest
import torch

import tools.performance  # noqa: F401  puts benchmarks/ on the path
from weft.kernels.ops import op
from weft.kernels.ops.op import define
from weft.kernels.tuning import launches

import kernels  # isort: skip

SPEEDS = {"slow": 4e-6, "fast": 1e-6, "wrong": 1e-7, "nothing": 1e-7}


def test_the_fastest_right_candidate_is_chosen(monkeypatch):
    def run(x: torch.Tensor) -> torch.Tensor:
        how = launches._forced.get("how")
        y = torch.relu(x)
        y[3] += {"wrong": 9.0, "nothing": torch.nan}.get(how or "", 0.0)  # an edge that drowns in a mean
        return y

    operation = define("fake", torch.relu, "none.such")
    operation.run = run  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(kernels, "time_call", lambda call: SPEEDS.get(launches._forced.get("how", ""), 8e-6))
    case = kernels.Case("64", operation, lambda: (torch.randn(64),), [{"how": how} for how in SPEEDS])
    row = kernels.measure(case, kernels.Rates(copy=1e9, matrix=1e12))
    assert (row["launch"], row["best"], row["reference"]) == ({"how": "fast"}, 1e-6, 8e-6)
    assert row["floor"] == pytest.approx(512e-9)
    assert [line.split(":")[0] for line in row["wrong"]] == ["how=wrong", "how=nothing"]


def test_cases_of_kernels(monkeypatch):
    """Their references take them; the CPU has no other."""
    for name, value in dict(DEVICE="cpu", TRAIN=1, INFER=1).items():
        monkeypatch.setattr(kernels, name, value)
    monkeypatch.setattr(op, "has_triton", lambda: False)
    found = list(kernels.cases())
    for case in found:
        assert kernels.tensors_in(case.operation.run(*case.inputs())), case
    parameters = {key for default, *_ in launches.TABLE.values() for key in default}
    assert {key for case in found for launch in case.candidates for key in launch} <= parameters
