"""Data and settings that all trainings of a study share: opened once, and decided once where nobody said."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.config import Config, override
from weft.engine.device import World, pick_device
from weft.errors import WeftError
from weft.models.registry import check_name, takes_size
from weft.run.choose import check_settings, choose_recipe, fill
from weft.run.data import RunData, absolute_paths, open_data
from weft.run.recipes import find_recipe
from weft.study.cells.cell import PROTOCOL
from weft.tasks.registry import task_class

Say = Callable[[str], None]
OF_EACH_TRAINING = (
    *("data.source", "model.name", "model.args", "run.seed", "run.device"),
    *("run.epochs", "run.steps", "run.minutes"),
)


@dataclass(frozen=True)
class StudyData:
    """The data of a study, and what a run would decide for them."""

    given: dict[str, Any]  # settings by their full names, with paths that lead there from any folder
    data: RunData
    device: torch.device

    @property
    def pictures(self) -> int:
        """How many of them train."""
        return len(self.data.split.train)

    def recipe(self) -> str:
        return choose_recipe(override(Config(), self.given), self.data.source.task, self.pictures)

    def filled(self, recipe: str, network: dict[str, Any], more: dict[str, Any] | None = None) -> Config:
        """The configuration of a run; `network`: model.name and model.args; `more`: settings beside those given."""
        settings = {**find_recipe(recipe), **self.given, **(more or {})}
        config = override(Config(), {**settings, **network})
        return fill(config, settings, self.data.report, self.pictures, self.device)[0]

    def shared(self, base: Config) -> dict[str, Any]:
        """The settings that all trainings take over from the first."""
        shared = {"augment.img_size": base.augment.img_size, "run.batch": base.run.batch, "run.minutes": 0.0}
        return shared | ({"data.workers": 0} if self.device.type == "cpu" else {})  # trainings share the cores


def open_study_data(given: dict[str, Any], recipe: str, device: torch.device, say: Say) -> StudyData:
    """Opens the data of a study; `given`: settings by their full names, among them data.source."""
    config = override(Config(), {**(find_recipe(recipe) if recipe else {}), **PROTOCOL, **given})
    check_settings(config)
    given = {**given, **absolute_paths(config)}
    return StudyData(given, open_data(override(config, given), World(device), say), device)


@dataclass(frozen=True)
class StudySetup:
    """How every model of a study is trained, and the pictures it is trained on."""

    data: str
    recipe: str
    settings: dict[str, Any]  # by their full names; all but model, seed and length
    models: dict[str, dict[str, Any]]  # by name, the arguments that a run would give them on these data
    classes: int
    channels: int
    size: tuple[int, int]
    pictures: int  # that train
    validated: int  # and that one is judged by
    head: str = ""  # over the models, where masks or boxes are asked for
    head_args: dict[str, Any] = field(default_factory=dict)

    def shape(self, model: str) -> dict[str, Any]:
        """The arguments of a model that the data decide; under a head it has no classes of its own."""
        sized = {"img_size": self.size} if takes_size(model) else {}
        return {"num_classes": 0 if self.head else self.classes, "in_chans": self.channels, **sized}


def prepare_study(data: str, models: list[str], given: dict[str, Any], recipe: str, say: Say) -> StudySetup:
    """Opens the data and decides, once for all models, what nobody said.

    Args:
        data: as for `weft train`.
        models: names; without any, the model that a run would choose is the only one.
        given: settings by their full names.
        recipe: a name or a file; "": chosen from the data.
        say: takes lines for the user.
    """
    for model in models:
        check_name(model)
    given = {**given, "data.source": data}
    study = open_study_data(given, recipe, pick_device(override(Config(), given).run.device), say)
    source, split = study.data.source, study.data.split
    if not len(split.reported):
        raise WeftError(f"{data} has no validation pictures to compare by; name some with --data.val.")
    recipe = recipe or study.recipe()
    base = study.filled(recipe, {"model.name": models[0]} if models else {})
    own = {
        key: value
        for key, value in study.given.items()
        if key not in OF_EACH_TRAINING and not key.startswith("model.args.")
    }
    dense = not task_class(source.task).whole_pictures
    head: dict[str, Any] = {"head": base.model.head, "head_args": base.model.head_args} if dense else {}
    settings, size = study.shared(base) | own, base.augment.img_size
    settings |= {f"model.{key}": value for key, value in head.items()}
    names = models or [base.model.name]
    return StudySetup(
        data=study.given["data.source"],
        recipe=recipe,
        settings=settings,
        models={name: study.filled(recipe, {"model.name": name}, settings).model.args for name in names},
        classes=len(source.classes),
        channels=base.data.channels,
        size=(size, size),
        pictures=study.pictures,
        validated=len(split.reported),
        **head,
    )
