"""The space of a search: a few arguments of a model, each with its choices, for the model, a stage or a block.

A space is a small YAML file, such as that of CvT-13-NAS in `weft/study/search/spaces/cvt.yaml`:

    block:
      stride_kv: [1, 2]
      mlp_ratio: [2.0, 4.0]

`model:` holds arguments with one value, `stage:` those with a list of one value per stage, `block:` those with a list
of lists. A point of the space has a value for every name such as "lca", "sr_ratios[1]" or "stride_kv[2][4]".
"""

import inspect
import itertools
import math
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import timm
from torch import nn

from weft.documents import read_yaml
from weft.errors import WeftError, did_you_mean
from weft.models.hierarchy import spread
from weft.models.registry import FAMILIES

Point = dict[str, Any]
LEVELS = ("model", "stage", "block")
SPACES = Path(__file__).parent / "spaces"
MOST_UNIFORM = 512  # networks that are built to find the smallest and the largest one


@dataclass(frozen=True)
class Space:
    model: str
    choices: dict[str, dict[str, list[Any]]]  # level to argument to choices
    args: dict[str, Any] = field(default_factory=dict)  # of the model, beside those that are searched

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Blocks of each stage; nothing where no argument has a value per stage or block."""
        if not any(self.choices.get(level) for level in LEVELS[1:]):
            return ()
        stages = getattr(self.build({}, device="meta"), "stages", None)
        if stages is None or not all(hasattr(stage, "blocks") for stage in stages):
            raise WeftError(f"{self.model} has no stages of blocks; move the arguments of its space to `model:`.")
        return tuple(len(stage.blocks) for stage in stages)

    @cached_property
    def parameters(self) -> dict[str, list[Any]]:
        """Every name of a point, with its choices."""
        named = dict(self.choices.get("model", {}))
        for name, choices in self.choices.get("stage", {}).items():
            named |= {f"{name}[{i}]": choices for i in range(len(self.depths))}
        for name, choices in self.choices.get("block", {}).items():
            named |= {f"{name}[{i}][{j}]": choices for i, depth in enumerate(self.depths) for j in range(depth)}
        return named

    @property
    def size(self) -> int:
        return math.prod(len(choices) for choices in self.parameters.values())

    def arguments(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """The model's arguments at a point."""
        found = {name: point[name] for name in self.choices.get("model", {})}
        stages = range(len(self.depths))
        found |= {name: [point[f"{name}[{i}]"] for i in stages] for name in self.choices.get("stage", {})}
        for name in self.choices.get("block", {}):
            found[name] = [[point[f"{name}[{i}][{j}]"] for j in range(self.depths[i])] for i in stages]
        return found

    def point(self, arguments: Mapping[str, Any]) -> Point:
        """The point at which the model has these arguments, written in any way that it takes; undoes the above."""
        point = {name: _listed(arguments[name]) for name in self.choices.get("model", {})}
        for level in LEVELS[1:]:
            for name in self.choices.get(level, {}):
                for i, value in enumerate(spread(name, arguments[name], len(self.depths))):
                    blocks = spread(name, value, self.depths[i]) if level == "block" else []
                    point |= {f"{name}[{i}][{j}]": each for j, each in enumerate(blocks)} or {f"{name}[{i}]": value}
        for name, value in point.items():
            if value not in self.parameters[name]:
                raise WeftError(f"{name}={value!r} is not in the space; choose from {self.parameters[name]}.")
        return point

    @cached_property
    def default(self) -> Point | None:
        """The model as it is, where that is a point of the space."""
        model = self.build({}, device="meta")
        defaults = inspect.signature(type(model)).parameters
        variant = getattr(sys.modules[type(model).__module__], "VARIANTS", {}).get(self.model, {})
        names = [name for level in LEVELS for name in self.choices.get(level, {})]
        known = {name: parameter.default for name, parameter in defaults.items()} | variant | self.args
        try:
            return self.point({name: known[name] for name in names})
        except (WeftError, KeyError):
            return None

    def random(self, rng: random.Random) -> Point:
        return {name: rng.choice(choices) for name, choices in self.parameters.items()}

    def uniform(self) -> Iterator[Point]:
        """The points at which an argument has the same value everywhere: the extremes of cost are among them."""
        by_name = {name: choices for level in LEVELS for name, choices in self.choices.get(level, {}).items()}
        count = math.prod(map(len, by_name.values()))
        if count > MOST_UNIFORM:
            raise WeftError(f"The space has {count:,} combinations of choices; reduce them to at most {MOST_UNIFORM}.")
        for values in itertools.product(*by_name.values()):
            chosen = dict(zip(by_name, values, strict=True))
            yield {name: chosen[name.split("[")[0]] for name in self.parameters}

    def all(self) -> Iterator[Point]:
        for values in itertools.product(*self.parameters.values()):
            yield dict(zip(self.parameters, values, strict=True))

    def build(self, point: Mapping[str, Any], **how: Any) -> nn.Module:
        """The network at a point, or for {} the model as it is; `how`: the device, for one."""
        arguments = self.arguments(point) if point else {}
        return create_network(self.model, {**self.args, **arguments, **how})


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value  # as YAML has it


def create_network(model: str, args: Mapping[str, Any]) -> nn.Module:
    """A model of timm's registry; raises a WeftError for an argument that it does not take."""
    try:
        return timm.create_model(model, **args)
    except TypeError as error:
        known = inspect.signature(type(timm.create_model(model, device="meta"))).parameters
        near = "".join(did_you_mean(name, known) for name in args if f"'{name}'" in str(error))
        raise WeftError(f"{model} does not take these arguments: {str(error).splitlines()[0]}.{near}") from None


def read_space(file: str, model: str, args: Mapping[str, Any]) -> Space:
    """The space in a YAML file or, where none is named, that of the model's family."""
    path = Path(file) if file else SPACES / f"{family_of(model)}.yaml"
    if not path.is_file():
        raise WeftError(
            f"{path} does not exist; --space takes a YAML file with, say, `block:` and below it `mlp_ratio: [2, 4]`."
        )
    return Space(model, check_choices(read_yaml(path), str(path)), dict(args))


def check_choices(content: Any, where: str) -> dict[str, dict[str, list[Any]]]:
    """The content of a file, if it is a space."""
    if not isinstance(content, dict) or not content or not all(isinstance(part, dict) for part in content.values()):
        raise WeftError(f"{where} must hold `model:`, `stage:` or `block:`, and below each ARGUMENT: [CHOICE, ...].")
    for level, part in content.items():
        if level not in LEVELS:
            raise WeftError(f"{where}: {level!r} is not one of {', '.join(LEVELS)}." + did_you_mean(str(level), LEVELS))
        for name, choices in part.items():
            if not isinstance(choices, list) or not choices or any(choices.count(c) > 1 for c in choices):
                raise WeftError(f"{where}: {name} needs a list of distinct choices, not {choices!r}.")
    return content


def family_of(model: str) -> str:
    bare = model.split(".")[0]
    for family in FAMILIES:
        if bare in timm.list_models(module=family) and (SPACES / f"{family}.yaml").is_file():
            return family
    known = ", ".join(sorted(path.stem for path in SPACES.glob("*.yaml")))
    raise WeftError(f"Weft has no search space for {model}; give one with --space FILE (it has spaces for {known}).")
