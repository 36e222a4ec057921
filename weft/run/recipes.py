"""Recipes: settings under a name. Each is a YAML file whose head says what it is, what it costs, what to expect."""

from pathlib import Path
from typing import Any

from weft.config import read_yaml
from weft.errors import WeftError, did_you_mean
from weft.tasks import policy

AUTO, AUTO_LINE = "auto", "What a run does where nobody says: fitted to pictures, machine and time"
FOLDER = Path(__file__).parents[1] / "recipes"


def recipe_names() -> list[tuple[str, str]]:
    """Every recipe's name, and the first line of its head."""
    return [(file.stem, _first_line(file)) for file in sorted(FOLDER.glob("*.yaml"))]


def recipe_text(name: str) -> str:
    """A recipe as it is shown: its file, or the rule of `auto`."""
    return f"{policy.__doc__}" if name == AUTO else recipe_file(name).read_text(encoding="utf-8")


def find_recipe(name: str) -> dict[str, Any]:
    """The "section.key" values of a recipe, by its name or as a path to a YAML file."""
    return read_yaml(recipe_file(name))


def decide_length(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that override a recipe's or a run's: who asks for epochs does not want its steps."""
    return {"run.steps": 0, **settings} if "run.epochs" in settings else settings


def recipe_file(name: str) -> Path:
    """Where a recipe lies: one of Weft's by its name, or any YAML file by its path."""
    names = [name for name, _ in recipe_names()]
    if name == AUTO:
        raise WeftError("The recipe auto depends on data, machine and time, and is for `weft train` alone.")
    if name in names:
        return FOLDER / f"{name}.yaml"
    if Path(name).is_file():
        return Path(name)
    if Path(name).suffix in (".yaml", ".yml"):
        raise WeftError(f"{name} does not exist; give a YAML file, or a name that `weft recipes` lists.")
    raise WeftError(f"No recipe is called {name!r}; `weft recipes` lists them." + did_you_mean(name, names))


def _first_line(file: Path) -> str:
    with file.open(encoding="utf-8") as lines:
        return next(lines).lstrip("# ").rstrip().rstrip(".")
