"""Tasks by their names. Whoever has a task asks it; here alone is a name compared with anything."""

from importlib import import_module

from weft.config import Config
from weft.tasks.task import Task, TaskFacts

HOMES = {  # imported where there is need
    "classify": ("weft.tasks.classify.task", "Classify"),
    "segment": ("weft.tasks.segment.task", "Segment"),
    "detect": ("weft.tasks.detect.task", "Detect"),
}
UNNAMED = "classify"  # what folders that name no task hold: timm's layout has none


def task_class(name: str = UNNAMED) -> type[Task]:
    module, kind = HOMES[name]
    return getattr(import_module(module), kind)


def make_task(name: str, config: Config, facts: TaskFacts) -> Task:
    """A task to train, evaluate or use a model with."""
    return task_class(name)(config, facts)
