"""The plan of `weft search`, decided at its beginning, and its results: networks, and how far their scores agree."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.documents import read_json
from weft.errors import WeftError
from weft.files import write_text
from weft.models.registry import check_name
from weft.study.cells.setup import Say, prepare_study
from weft.study.search.pareto import front, kendall_tau
from weft.study.search.space import Point, Space, read_space

MAY_GROW = ("trials", "keep")


@dataclass(frozen=True)
class SearchPlan:
    """The space that is searched, and all else that decides the results."""

    data: str
    model: str
    choices: dict[str, Any]  # of the space
    args: dict[str, Any]  # of the model, beside those that are searched
    shape: dict[str, Any]  # arguments that the data decide: classes, channels, size
    input_size: tuple[int, int, int]
    recipe: str
    settings: dict[str, Any]  # of every training, by their full names
    validated: int  # pictures that the trained networks are measured by
    objective: str = "macs"  # or "parameters": what should be little
    most_parameters: float = 0  # 0: no limit
    most_macs: float = 0
    trials: int = 60
    keep: int = 6
    epochs: int = 20
    minutes: float = 0
    supernet: bool = True
    inherit: bool = False
    seed: int = 0

    @property
    def space(self) -> Space:
        return Space(self.model, self.choices, {**self.args, **self.shape})


@dataclass
class Trial:
    """A network that was judged."""

    point: Point
    parameters: int
    macs: int
    judged: float  # its validation score, found cheaply
    stopped: int = 0  # after so many epochs, where that training was not worth its end
    trained: float | None = None  # and after a whole training
    run: str = ""  # the folder of that, below the search's
    what: str = ""  # "as it is" for the model that was searched from

    def score_and_cost(self, objective: str, score: str = "judged") -> tuple[float, float]:
        return getattr(self, score), getattr(self, objective)


@dataclass(frozen=True)
class SearchResult:
    """The networks of a search so far."""

    plan: SearchPlan
    trials: list[Trial]
    score: str  # what networks are judged by, such as top1
    epochs: int = 0  # of each training at the end
    part: float = 1.0  # of the pictures in these
    stopped: bool = False
    interrupted: bool = False  # stopped by Ctrl-C

    @property
    def judged(self) -> list[Trial]:
        """Without those that were stopped early."""
        return [trial for trial in self.trials if not trial.stopped]

    @property
    def trained(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.trained is not None]

    @property
    def failed(self) -> list[Trial]:
        """Those whose whole training failed."""
        return [trial for trial in self.trials if trial.run and trial.trained is None]

    def front(self) -> list[Trial]:
        """The networks that none of the trained ones beats in both, or, before any is trained, of the judged ones."""
        score, among = ("trained", self.trained) if self.trained else ("judged", self.judged)
        return [among[i] for i in front([trial.score_and_cost(self.plan.objective, score) for trial in among])]

    @property
    def tau(self) -> float | None:
        """How the order of the first judgement agrees with that after training."""
        return kendall_tau([t.judged for t in self.trained], [t.trained or 0.0 for t in self.trained])

    @property
    def trust(self) -> str:
        """A sentence on what the agreement of both orders means."""
        if self.tau is None:
            return ""
        words = {0.7: "the first judgement can be trusted", 0.3: "the first judgement is a rough guide"}
        said = next(
            (text for least, text in words.items() if self.tau >= least), "the first judgement says nothing here"
        )
        return f"Kendall's tau of both orders is {self.tau:.2f} over {len(self.trained)} networks: {said}."


def make_plan(
    data: str, model: str, given: dict[str, Any], *, recipe: str, space: str, say: Say, **how: Any
) -> SearchPlan:
    """Opens the data and fills in what nobody said, once for all trainings. `how`: the other fields of SearchPlan."""
    if model:
        check_name(model)
        read_space(space, model, {})  # before the pictures are read
    if given.get("data.protocol") == "published":
        raise WeftError("A search chooses by its scores, which test pictures are not for; leave out data.protocol.")
    common = prepare_study(data, [model] if model else [], given, recipe, say)
    if common.head and how["supernet"]:
        raise WeftError("A supernet is a classifier; search networks for masks and boxes with --no-supernet.")
    if common.head:
        say("parameters and MACs are those of the backbone: all networks have the same head")
    ((model, args),) = common.models.items()
    return SearchPlan(
        data=common.data,
        model=model,
        choices=read_space(space, model, {}).choices,
        args=args,
        shape=common.shape(model),
        input_size=(common.channels, *common.size),
        recipe=common.recipe,
        settings=common.settings,
        validated=common.validated,
        **how,
    )


def save_plan(folder: Path, plan: SearchPlan) -> None:
    """Writes the plan down, or compares it with the one that is there, which may only grow."""
    file = folder / "plan.json"
    new = json.loads(json.dumps(asdict(plan)))
    if file.exists():
        old = read_json(file)
        changed = [name for name in new if new[name] != old.get(name) and name not in MAY_GROW]
        if changed:
            raise WeftError(
                f"{folder} holds another search: its {changed[0]} is {old.get(changed[0])!r}; choose another --out."
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(new, indent=2))


def short_number(number: float) -> str:
    """18209192 -> 18.2 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g}"
