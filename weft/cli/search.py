"""The command that looks for architectures: `weft search`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from weft.cli.options import (
    Flag,
    Keys,
    check_length,
    complain,
    end_as_interrupted,
    print_columns,
    say,
    settings_of,
    study_folder,
)
from weft.cli.outputs import check_outside
from weft.errors import WeftError, check_positive
from weft.words import many

if TYPE_CHECKING:
    from weft.study.search.plan import SearchPlan, SearchResult


def search(
    data: str,
    /,
    *,
    model: str = "",
    space: str = "",
    params: str = "",
    macs: str = "",
    objective: Literal["macs", "params"] = "macs",
    trials: int = 60,
    keep: int = 6,
    epochs: int | None = None,
    minutes: float | None = None,
    supernet: bool = True,
    inherit: Annotated[bool, Flag] = False,
    img_size: int | None = None,
    recipe: str = "",
    fraction: float | None = None,
    seed: int = 0,
    device: str = "auto",
    jobs: int = 0,
    out: str = "",
    keys: Keys = [],  # noqa: B006  cyclopts never changes it
) -> None:
    """Search for networks that are accurate and cheap: CvT's search, or that of any model's arguments.

    The same command goes on where it was stopped.

    Parameters
    ----------
    data
        Pictures with labels, as for `weft train`; with masks or boxes, --no-supernet is needed.
    model
        Where to search from, such as cvt_13; by default chosen from the data.
    space
        A YAML file of arguments and their choices; by default that of the model's family.
    params
        Networks have at most so many parameters, such as 18M.
    macs
        Networks have at most so many multiply-accumulates for a picture, such as 4.1G.
    objective
        What should be little beside much accuracy: macs or params.
    trials
        Networks to judge.
    keep
        The best of them, which are trained for all epochs.
    epochs
        Of the supernet, and of each training at the end; by default 20.
    minutes
        A time budget instead.
    supernet
        Judge by weights that all networks share; --no-supernet: by trainings of a quarter of the epochs, of which
        those that look bad are stopped early.
    inherit
        Begin the trainings at the end with the supernet's weights, not with new ones.
    img_size
        Side of the pictures.
    recipe
        A name of `weft recipes`, or a YAML file; by default chosen from the data.
    fraction
        Train on this part of the training pictures only.
    seed
        Of everything random.
    device
        auto, cpu, cuda (all GPUs) or cuda:N.
    jobs
        Trainings at once, at the end; 0: one for each GPU, or as many as a CPU has cores for.
    out
        The folder of the search; by default runs/search-DATA-MODEL.
    keys
        Other settings of the trainings, more simply written as --optim.lr 0.001.
    """
    check_positive(trials=trials, keep=keep, jobs=jobs or 1)
    check_length(epochs, minutes)
    if not supernet and (minutes is not None or inherit):
        raise WeftError("--minutes and --inherit need a supernet; without one, give --epochs.")
    options = dict(
        objective="parameters" if objective == "params" else "macs",
        most_parameters=_count("params", params),
        most_macs=_count("macs", macs),
        trials=trials,
        keep=keep,
        epochs=epochs or 20,
        minutes=minutes or 0,
        supernet=supernet,
        inherit=inherit,
        seed=seed,
    )

    from weft.run.train import name_settings
    from weft.study.search.plan import make_plan
    from weft.study.search.prune import import_optuna

    import_optuna()
    given = name_settings(settings_of(keys) | dict(img_size=img_size, fraction=fraction, device=device))
    plan = make_plan(data, model, given, recipe=recipe, space=space, say=say, **options)
    folder = study_folder(out, "search", data, plan.model)
    check_outside(folder, [data])
    _run(plan, folder, device, jobs)


def _run(plan: "SearchPlan", folder: Path, device: str, jobs: int) -> None:
    """Searches, or goes on with it, and prints the networks."""
    from weft.engine.lock import locked
    from weft.study.search.plan import save_plan
    from weft.study.search.search import Search

    with locked(folder):
        save_plan(folder, plan)
        found = Search(folder, plan, device=device, jobs=jobs, say=say).run()
    if found.stopped:
        say("Stopped; run the same command to continue.")
        end_as_interrupted(found.interrupted)
        return
    _print_networks(found)
    say(f"Wrote {folder / 'search.html'}, with search.json, pareto.png and pareto.svg beside it.")
    if found.failed:
        complain(f"weft: {many(len(found.failed), 'network')} could not be trained; the same command tries again.")
        sys.exit(1)


def _print_networks(found: "SearchResult") -> None:
    from weft.study.cells.cell import SCORES
    from weft.study.search.page import by_cost, network_row
    from weft.study.search.plan import short_number

    header = ["", SCORES[found.score], "judged", "parameters", "MACs", "choices"]
    rows = []
    for number, trial in enumerate(by_cost(found), start=1):
        row = network_row(found, trial, number)
        mark = ("*" if row["on_front"] else "") + (" as it is" if trial.what else "")
        choices = "; ".join(f"{name} {text}" for name, text in row["choices"].items())
        scores = [f"{trial.trained:.2%}" if trial.trained is not None else "-", f"{trial.judged:.2%}"]
        rows.append([mark, *scores, short_number(trial.parameters), short_number(trial.macs), choices])
    print_columns([header, *rows], right=(1, 2, 3, 4))
    say("* no other network trained is better and cheaper.")
    if found.trust:
        say(found.trust)


def _count(option: str, text: str) -> float:
    """18M, 4.1G or 2e6 as a number; 0 for nothing."""
    units = {"k": 1e3, "M": 1e6, "G": 1e9}
    try:
        value = float(text[:-1]) * units[text[-1]] if text[-1:] in units else float(text or 0)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (text and not value):
        raise WeftError(f"--{option} {text} is not a number such as 18M or 4.1G.")
    return value
