"""benchmarks/augment.py: the check finds what is wrong; speed is a GPU's affair."""

import pytest

import tools.performance  # noqa: F401  puts benchmarks/ on the path
from weft.kernels.ops.augment import Code, augment_step
from weft.kernels.ops.crop import crop_resize
from weft.kernels.ops.mix import mix_pictures

import augment  # isort: skip


def by_references(monkeypatch: pytest.MonkeyPatch, off: int) -> None:
    """References in the place of kernels, with values that are `off`."""
    crop = crop_resize.reference

    def step(*args):
        found = augment_step.reference(*args)
        found[..., -1, -1] += off
        return found

    monkeypatch.setattr(augment, "ODD", ((5, 7),))
    monkeypatch.setattr(augment, "DEVICE", "cpu")
    monkeypatch.setitem(augment_step.__dict__, "launch", step)
    monkeypatch.setitem(mix_pictures.__dict__, "launch", lambda *args: mix_pictures.reference(*args) + off * 1e-3)
    monkeypatch.setitem(crop_resize.__dict__, "reference", lambda *args: crop(*args) + off)


def test_right_kernels_pass(monkeypatch, capsys):
    by_references(monkeypatch, off=0)
    assert augment.check(seeds=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*(code.name for code in Code), "erase", "with"]


def test_wrong_kernels_do_not(monkeypatch, capsys):
    by_references(monkeypatch, off=1)
    assert not augment.check(seeds=1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(Code) + 2
    assert all("WRONG" in line for line in lines)
