"""Whether kernels are used: versions of Triton, and the word of the environment."""

import sys
from types import SimpleNamespace

import pytest

from weft.errors import WeftError
from weft.kernels import switch


@pytest.mark.parametrize(
    ("version", "enough"), [("3.6.0", True), ("3.6rc1", True), ("4.0+git1", True), ("3.5.1", False), ("unknown", False)]
)
def test_versions_of_triton(monkeypatch, version, enough):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    monkeypatch.setattr(switch.importlib.util, "find_spec", lambda name: object())
    assert switch.has_triton.__wrapped__() is enough


def test_word_of_the_environment():
    assert switch.parse_switch("On")
    assert not switch.parse_switch("off")
    with pytest.raises(WeftError, match="WEFT_KERNELS='bogus'"):
        switch.parse_switch("bogus")
