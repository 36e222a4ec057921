"""What all trainings of a study share: the data are opened once, and what nobody said is decided once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.config import Config, override
from weft.engine.build import check_name, takes_size
from weft.engine.choose import check_settings, choose_recipe, fill
from weft.engine.device import World, pick_device
from weft.engine.recipes import find_recipe
from weft.engine.session import absolute_paths, open_data
from weft.errors import WeftError

Say = Callable[[str], None]
EACH = ("data.source", "model.name", "model.args", "run.seed", "run.device", "run.epochs", "run.minutes")


@dataclass(frozen=True)
class Common:
    """How any model is trained in a study."""

    data: str
    recipe: str
    settings: dict[str, Any]  # by their full names; all but model, seed and length
    models: dict[str, dict[str, Any]]  # by name, the arguments that a run would give them on these data
    classes: int
    channels: int
    size: tuple[int, int]
    validated: int  # validation pictures

    def shape(self, model: str) -> dict[str, Any]:
        """The arguments of a model that the data decide."""
        sized = {"img_size": self.size} if takes_size(model) else {}
        return {"num_classes": self.classes, "in_chans": self.channels, **sized}


def settle(data: str, models: list[str], given: dict[str, Any], recipe: str, say: Say) -> Common:
    """`given`: settings by their full names. Without models, a run's own choice is the only one."""
    first = override(Config(), {**(find_recipe(recipe) if recipe else {}), **given, "data.source": data})
    check_settings(first)
    for model in models:
        check_name(model)
    given = {**given, **absolute_paths(first)}
    device = pick_device(first.run.device)
    found = open_data(override(first, given), World(device), say)
    if found.source.task != "classify":
        raise WeftError(f"{data} is data to {found.source.task}; these studies are of classifiers.")
    if not len(found.split.val):
        raise WeftError(f"{data} has no validation pictures to judge by; name some with --data.val.")
    recipe = recipe or choose_recipe(first, found.source.task, len(found.split.train))

    def filled(model: str, more: dict[str, Any]) -> Config:
        settings = {**find_recipe(recipe), **given, **more, **({"model.name": model} if model else {})}
        return fill(override(Config(), settings), settings, found.report, len(found.split.train), device)[0]

    base = filled(models[0] if models else "", {})
    own = {key: value for key, value in given.items() if key not in EACH and not key.startswith("model.args.")}
    size = base.augment.img_size
    common = {"augment.img_size": size, "run.batch": base.run.batch, "run.minutes": 0.0}
    common |= {"data.workers": 0} if device.type == "cpu" else {}  # cells start at once, and share the cores
    common |= own
    names = models or [base.model.name]
    return Common(
        data=given["data.source"],
        recipe=recipe,
        settings=common,
        models={name: filled(name, common).model.args for name in names},
        classes=len(found.source.classes),
        channels=base.data.channels,
        size=(size, size),
        validated=len(found.split.val),
    )
