import dataclasses

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from weft import WeftError
from weft.cli.app import take_keys
from weft.config import Config, describe_keys, known_keys, override, read_yaml, split_model, to_yaml
from weft.run.train import SHORT, name_settings


@pytest.mark.parametrize(
    ("text", "name", "args"),
    [
        ("cvt_13", "cvt_13", {}),
        ("cetnet_tiny:ce_unit=dense", "cetnet_tiny", {"ce_unit": "dense"}),
        (
            "a.b:depths=[2,2,6,2],rate=1e-3,on=true,n=3",
            "a.b",
            {"depths": [2, 2, 6, 2], "rate": 1e-3, "on": True, "n": 3},
        ),
        ("a:x=none,y=b,c", "a", {"x": None, "y": "b,c"}),
    ],
)
def test_a_model_and_its_arguments(text, name, args):
    assert split_model(text) == (name, args)


@pytest.mark.parametrize("text", ["a:", "a:x", "a:=1", "a:x=", "a:1x=2", "a:x=,y=1"])
def test_what_is_no_argument_of_a_model(text):
    with pytest.raises(WeftError, match=f"^{text}: .* is not an argument of a model"):
        split_model(text)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("optim.lr", "3e-4", 3e-4),
        ("optim.lr", 1, 1.0),
        ("run.epochs", "12", 12),
        ("run.compile", "true", True),
        ("run.compile", "no", False),
        ("run.fast", "off", False),
        ("augment.scale", "[0.1, 1]", [0.1, 1.0]),
        ("augment.scale", "0.1,1", [0.1, 1.0]),
        ("data.ignore", "11", [11]),
        ("model.drop_path", "none", None),
        ("model.drop_path", "0.3", 0.3),
        ("data.source", "2024", "2024"),  # a folder may be called like a number
        ("model.args", "{ce_unit: dense}", {"ce_unit": "dense"}),
    ],
)
def test_text_becomes_the_type_of_its_key(key, text, value):
    section, name = key.split(".")
    found = getattr(getattr(override(Config(), {key: text}), section), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("optim.lrr", 1, "optim.lr"),
        ("optin.lr", 1, "optim.lr"),
        ("epochs", 1, "run.epochs"),
        ("optim.lr.x", 1, "Unknown"),
        ("run.epochs", "1.5", "whole number"),
        ("run.epochs", True, "whole number"),
        ("optim.lr", "nan", "number"),
        ("optim.lr", -1, "above 0"),
        ("data.fraction", 0, "above 0"),
        ("data.fraction", 1.5, "at most 1"),
        ("loss.smoothing", 1.0, "below 1"),
        ("optim.schedule", "cosin", "cosine"),
        ("augment.scale", "a,b", "number"),
        ("augment.scale", 0.3, "list"),
        ("run.compile", "maybe", "true or false"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(key, value, words):
    with pytest.raises(WeftError, match=words) as error:
        override(Config(), {key: value})
    assert "\n" not in str(error.value)


def test_arguments_of_the_model_are_reached_one_by_one():
    config = override(Config(), {"model.args.ce_unit": "dense", "model.args.depths": "[1, 2]"})
    assert config.model.args == {"ce_unit": "dense", "depths": [1, 2]}
    assert Config().model.args == {}  # the defaults are nobody's to change


values = {
    "optim.lr": st.floats(1e-9, 10),
    "run.epochs": st.integers(1, 10**6),
    "data.source": st.text(),
    "augment.ratio": st.lists(st.floats(0, 9), min_size=2, max_size=2),
    "run.ema": st.floats(0, 0.9999),
    "model.drop_path": st.none() | st.floats(0, 0.9),
    "loss.distill": st.sampled_from(["soft", "hard"]),
}


@given(st.fixed_dictionaries({}, optional=values))
def test_yaml_keeps_every_value(tmp_path_factory, settings):
    config = override(Config(), settings)
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert override(Config(), read_yaml(path)) == config


@pytest.mark.parametrize("text", ["- a\n- b", "a: 1", "{", "optim: [1]", "a: \x00"])
def test_files_that_are_no_settings_are_refused(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(WeftError, match=r"config\.yaml"):
        override(Config(), read_yaml(tmp_path / "config.yaml"))


def test_every_key_has_a_help_line_and_a_default_within_its_limits():
    written = yaml.safe_load(to_yaml(Config()))
    flat = {f"{section}.{key}": value for section, keys in written.items() for key, value in keys.items()}
    assert list(flat) == list(known_keys())
    assert override(Config(), flat) == Config()
    assert all(row[3] for row in describe_keys())


def test_short_options_lead_to_keys_that_exist():
    assert set(SHORT.values()) <= set(known_keys())
    assert name_settings({"epochs": 3, "optim__lr": 0.1, "batch": "auto", "model": None}) == {
        "run.epochs": 3,
        "optim.lr": 0.1,
        "run.batch": 0,
    }


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (["train", "d", "--optim.lr", "0.1"], ["train", "d", "--set=optim.lr=0.1"]),
        (["--optim.lr=-1", "x"], ["--set=optim.lr=-1", "x"]),
        (["--optim.lr", "-1"], ["--set=optim.lr=-1"]),
        (["--run.compile", "--epochs", "3"], ["--set=run.compile=true", "--epochs", "3"]),
        (["--run.save-minutes", "3"], ["--set=run.save_minutes=3"]),
        (["--model", "cvt_13.in1k", "a.b"], ["--model", "cvt_13.in1k", "a.b"]),
        (["--data.source=a=b\nc"], ["--set=data.source=a=b\nc"]),
    ],
)
def test_keys_on_the_command_line(given, taken):
    assert take_keys(given) == taken


def test_settings_cannot_be_changed_behind_our_back():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().run.epochs = 3  # type: ignore[misc]
