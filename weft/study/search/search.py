"""`weft search`: which networks of a space are accurate and cheap, under limits of parameters and MACs.

1. a supernet is trained, in which all networks of the space share their weights (or none: --no-supernet);
2. optuna proposes networks, for much accuracy and little cost at once, and each is judged: within seconds by the
   weights it inherits, or, without a supernet, by a training of a quarter of the epochs, which is stopped early
   (pruned) where it is worse than the median of the networks that cost no more;
3. the best of them are trained for all epochs. Only these numbers are results; how the order of the first judgement
   agrees with theirs (Kendall's tau) says how far it can be trusted.

FOLDER/plan.json         the search as it was asked for; the same command goes on with it
FOLDER/supernet/         a run of `weft train`
FOLDER/trials.sqlite     optuna's study: open it with any of its tools
FOLDER/trained/          the networks of the third step, as cells of a study
FOLDER/search.json       everything found; with search.html, pareto.png, pareto.svg
"""

import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import WeftError
from weft.files import write_text
from weft.study.cells.cell import PROTOCOL, SCORES, Cell, read_curve
from weft.study.cells.setup import Say
from weft.study.cells.workers import run_cells, say_progress
from weft.study.search.pareto import choose_best
from weft.study.search.plan import SearchPlan, SearchResult, Trial, short_number
from weft.study.search.prune import import_optuna, is_below_median
from weft.study.search.space import Point
from weft.study.search.supernet import NAME, Costs, find_extremes
from weft.words import many

if TYPE_CHECKING:
    import optuna

    from weft.run.result import Run
    from weft.study.search.scorer import SupernetScorer

SHARES = {"supernet": 0.4, "trials": 0.2}  # of a time budget; the rest is for the trainings at the end
LEAST_STEPS = 10  # of a training at the end
FIRST_RUNG = 4  # without a supernet a network is judged by this part of the epochs
TRIES = 50  # proposals one after the other that are over the limits, or known: then it is enough


class PrunedTrial(Exception):
    """Raised to stop a training that is not worth finishing."""


class Search:
    """A search in its folder: all of its steps, each of which goes on where it was stopped."""

    def __init__(self, folder: Path, plan: SearchPlan, *, device: str = "auto", jobs: int = 0, say: Say = print):
        self.folder, self.plan, self.device, self.jobs, self.say = folder, plan, device, jobs, say
        self.space, self.score = plan.space, ""
        self.curve: list[float] = []  # of the training under way, without a supernet: a score for each epoch
        self.costs = Costs(self.space, plan.input_size)

    def run(self) -> SearchResult:
        """All three steps, or what is left of them."""
        self.check_limits()
        score_of = self.cell_score
        if self.plan.supernet:
            supernet = self.train_supernet()
            if supernet is not None and supernet.stopped:
                return SearchResult(self.plan, [], "", stopped=True, interrupted=supernet.interrupted)
            score_of = self.subnet_score
        trials = self.explore(score_of)
        if not trials:
            raise WeftError(f"None of the {TRIES} networks proposed is within the limits; raise --params or --macs.")
        write_result(self.folder, SearchResult(self.plan, trials, self.score))
        epochs, part, keep = self.final_budget()
        self.train_best(trials, epochs, part, keep)
        found = SearchResult(self.plan, trials, self.score, epochs, part)
        write_result(self.folder, found)
        return found

    def excess(self, point: Point) -> dict[str, float]:
        """By what part of a limit a network is over it; 0 or less where it is not."""
        limits = {"parameters": self.plan.most_parameters, "macs": self.plan.most_macs}
        costs = dict(zip(limits, self.costs.of(point), strict=True))
        return {name: costs[name] / limit - 1 for name, limit in limits.items() if limit}

    def is_within(self, point: Point) -> bool:
        return all(part <= 0 for part in self.excess(point).values())

    def check_limits(self) -> None:
        """Before hours of work: whether any network is within the limits."""
        if not any(self.is_within(point) for point in self.space.uniform()):
            parameters, macs = self.costs.of(self.costs.extremes()[0])
            raise WeftError(
                "No network of the space is within the limits: the smallest has"
                f" {short_number(parameters)} parameters and {short_number(macs)} MACs."
            )

    # The supernet -----------------------------------------------------------------------------------------------

    def train_supernet(self) -> "Run | None":
        """Trains it, or what is left to train of it; None where nothing is."""
        from weft.engine.lock import STATE
        from weft.run.train import train

        run, plan = self.folder / "supernet", self.plan
        if (run / "evaluation.json").exists():
            return None
        if (run / STATE).exists():
            return train(resume=run, device=self.device, allow_changes=True)
        self.say(f"supernet: {self.space.size:,} networks with shared weights")
        length = {"run.minutes": SHARES["supernet"] * plan.minutes} if plan.minutes else {"run.epochs": plan.epochs}
        settings = {**PROTOCOL, **plan.settings, **length}
        settings |= {"run.replay": False, "run.compile": False}  # every step is another network
        ends = [*find_extremes(self.costs)]
        args = {"of": plan.model, "choices": plan.choices, "args": plan.args, "points": ends}
        settings |= {"model": NAME, "model.args": args, "seed": plan.seed, "device": self.device}
        return train(plan.data, recipe=plan.recipe, out=run, **settings)

    def subnet_score(self, point: Point) -> float:
        """The score of a network with the weights of the supernet."""
        return self.take_score(self.inherited(point))

    @cached_property
    def inherited(self) -> "SupernetScorer":
        from weft.study.search.scorer import SupernetScorer

        return SupernetScorer(self.folder / "supernet", self.device, self.plan.seed)

    def take_score(self, metrics: dict[str, Any]) -> float:
        """The score among the metrics, whose name is kept."""
        self.score = next(name for name in SCORES if metrics.get(name) is not None)
        return metrics[self.score]

    # Trials -----------------------------------------------------------------------------------------------------

    def explore(self, score_of: Callable[[Point], float]) -> list[Trial]:
        """Judges one proposal after the other; those of earlier calls are read."""
        study, plan = self.study, self.plan
        known = {_key(trial.point): trial for trial in self.finished(study)}
        wanted = len(self.exhaustive) if self.exhaustive else plan.trials
        budget = 60 * plan.minutes * SHARES["trials"]
        begin, earlier, missed = time.monotonic(), _seconds(study), 0
        while len(known) < wanted and missed < TRIES:
            if budget and len(known) > plan.keep and earlier + time.monotonic() - begin > budget:
                self.say(f"the time for this step is up: {len(known)} networks were judged, not {wanted}")
                break
            missed += 1
            trial, point = self.propose(study)
            excess, costs = self.excess(point), self.costs.of(point)
            cost = self.cost(point)
            for name, part in excess.items():
                trial.set_constraint(name, part)
            if not self.is_within(point):
                study.tell(trial, [0.0, cost])
                continue
            if _key(point) in known:  # proposed again: next comes one drawn at random
                tell_result(study, trial, known[_key(point)], cost)
                study.enqueue_trial(_labels(self.space.random(self.rng(study))))
                continue
            self.curve, missed = [], 0
            try:
                found = Trial(point, *costs, score_of(point))
            except PrunedTrial:
                found = Trial(point, *costs, self.curve[-1], stopped=len(self.curve))
            trial.set_user_attr("score", self.score)
            trial.set_user_attr("curve", self.curve)
            tell_result(study, trial, found, cost)
            known[_key(point)] = found
            self.say(
                f"trial {len(known)}/{wanted}: {self.score} {found.judged:.2%}, {short_number(costs[0])} parameters,"
                f" {short_number(costs[1])} MACs"
                + (f"; stopped after {many(found.stopped, 'epoch')}" if found.stopped else "")
            )
        if missed == TRIES and known:
            self.say(
                f"{TRIES} proposals in a row were over the limits or already known: {len(known)} networks were"
                f" judged, not {wanted}"
            )
        return list(known.values())

    def cost(self, point: Point) -> int:
        """The parameters or the MACs, whichever should be few."""
        return self.costs.of(point)[self.plan.objective == "macs"]

    def should_prune(self, point: Point) -> bool:
        """Whether the training under way is worse than the median of those that cost no more.

        Next to costlier networks all cheap ones would look bad.
        """
        trials = [
            trial for trial in _ended(self.study) if trial.values is not None and trial.values[1] <= self.cost(point)
        ]
        return is_below_median(self.curve, [trial.user_attrs.get("curve") or [] for trial in trials])

    @cached_property
    def study(self) -> "optuna.Study":
        """Optuna's study in the folder. A trial that a kill cut off is proposed first again."""
        optuna = import_optuna()
        study = optuna.create_study(
            storage=f"sqlite:///{(self.folder / 'trials.sqlite').absolute()}",
            study_name="search",
            directions=["maximize", "minimize"],
            load_if_exists=True,
        )
        states = optuna.trial.TrialState
        for trial in study.get_trials(states=(states.RUNNING,)):
            study.tell(trial.number, state=states.FAIL)
            if len(trial.params) == len(self.space.parameters):
                study.enqueue_trial(trial.params)
        if not study.get_trials(deepcopy=False):
            ends = [point for point in (*self.costs.extremes(), self.space.default) if point]
            for point in self.exhaustive or ends:
                study.enqueue_trial(_labels(point), skip_if_exists=True)
        return study

    @cached_property
    def exhaustive(self) -> list[Point]:
        """All networks within the limits, where there are no more than are wanted; else nothing."""
        if self.space.size > self.plan.trials:
            return []
        return [point for point in self.space.all() if self.is_within(point)]

    def propose(self, study: "optuna.Study") -> tuple["optuna.Trial", Point]:
        optuna = import_optuna()
        # A new one for each: what it proposes depends on the trials so far and on nothing that a kill would lose.
        study.sampler = optuna.samplers.TPESampler(seed=self.rng(study).getrandbits(32))
        trial = study.ask()
        choices = self.space.parameters.items()
        return trial, {name: json.loads(trial.suggest_categorical(name, [*map(json.dumps, c)])) for name, c in choices}

    def rng(self, study: "optuna.Study") -> random.Random:
        return random.Random(f"{self.plan.seed} {len(_ended(study))}")

    def finished(self, study: "optuna.Study") -> list[Trial]:
        """The networks judged so far, each once."""
        found = []
        for trial in _ended(study):
            if "score" not in trial.user_attrs:
                continue
            point = {name: json.loads(label) for name, label in trial.params.items()}
            self.score, curve = trial.user_attrs["score"], trial.user_attrs["curve"]
            pruned = trial.values is None
            judged = curve[-1] if pruned else trial.values[0]
            found.append(Trial(point, *self.costs.of(point), judged, stopped=len(curve) if pruned else 0))
        return found

    # Trainings --------------------------------------------------------------------------------------------------

    def final_budget(self) -> tuple[int, float, int]:
        """Epochs and part of the pictures of each training at the end, and how many there are.

        Within a time budget they share what the supernet had. That is decided once: where more are asked for later,
        those trained already stay as they are.
        """
        asked = self.plan.keep
        if not self.plan.minutes:
            return self.plan.epochs, 1.0, asked
        if "last" not in self.study.user_attrs:
            from weft.engine.log import METRICS, read_rows

            rows = read_rows(self.folder / "supernet" / METRICS)
            last = max((row for row in rows if row["kind"] == "step"), key=lambda row: row["step"])
            least = min(1.0, LEAST_STEPS * last["epoch"] / last["step"])  # a part of an epoch
            self.study.set_user_attr("last", [*share_epochs(last["epoch"], asked, least), asked])
        epochs, part, kept, before = self.study.user_attrs["last"]
        if kept < before:
            self.say(f"there is time to train {kept} of {before} networks at the end")
        return epochs, part, kept + max(0, asked - before)

    def cell(self, point: Point, epochs: int, **settings: Any) -> Cell:
        plan = self.plan
        settings = {**plan.settings, "run.epochs": epochs, **settings}
        switches = {**plan.args, **self.space.arguments(point)}
        return Cell(plan.data, plan.model, plan.seed, switches, settings, plan.recipe)

    def cell_score(self, point: Point) -> float:
        """The score of a network after a part of the epochs, without a supernet."""
        study, epochs = self.folder / "trained", max(1, self.plan.epochs // FIRST_RUNG)
        cell = self.cell(point, epochs)

        def watch(states: dict[str, str]) -> None:
            curve = read_curve(study, cell)
            if len(self.curve) < len(curve) < epochs:
                self.curve = curve
                if self.should_prune(point):
                    raise PrunedTrial

        (result,) = run_cells(study, [cell], jobs=1, device=self.device, watch=watch)
        if result.error:
            raise WeftError(f"A network of the space cannot be trained: {result.error}")
        self.curve = read_curve(study, cell)
        return self.take_score(result.metrics)

    def train_best(self, trials: list[Trial], epochs: int, part: float, keep: int) -> None:
        """Trains the front, and beside it the model as it is, where that is a network of the space."""
        judged = [trial for trial in trials if not trial.stopped]
        best = [judged[i] for i in choose_best([trial.score_and_cost(self.plan.objective) for trial in judged], keep)]
        for trial in trials:
            if trial.point == self.space.default:
                trial.what = "as it is"
                best += [trial] if trial not in best else []
        fraction = round(part * float(self.plan.settings.get("data.fraction", 1.0)), 6)
        less = {} if part == 1 else {"data.fraction": fraction}
        cells = [self.cell(trial.point, epochs, **less, **self.initial_weights(trial)) for trial in best]
        length = many(epochs, "epoch") + ("" if part == 1 else f" of {part:.0%} of the pictures")
        self.say(f"training {many(len(cells), 'network')} for {length} each")
        costs = [f"{short_number(trial.parameters)} parameters, {short_number(trial.macs)} MACs" for trial in best]
        names = {cell.key: cost for cell, cost in zip(cells, costs, strict=True)}
        watch = say_progress(self.say, names)
        results = run_cells(self.folder / "trained", cells, jobs=self.jobs, device=self.device, watch=watch)
        if all(result.error for result in results):
            raise WeftError(f"None of the networks could be trained: {results[0].error}")
        for trial, result in zip(best, results, strict=True):
            trial.trained, trial.run = result.score, f"trained/cells/{result.cell.key}/run"

    def initial_weights(self, trial: Trial) -> dict[str, Any]:
        """Where a training begins: at new weights, or at those of the supernet."""
        if not self.plan.inherit:
            return {}
        from weft.models.weights.folder import save_model

        name = hashlib.blake2b(_key(trial.point).encode(), digest_size=6).hexdigest()
        folder = self.folder / "inherited" / name
        if not (folder / "config.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            save_model(self.inherited.supernet.subnet(trial.point), folder)
        return {"model.init": str(folder.absolute())}


# Results ----------------------------------------------------------------------------------------------------------


def share_epochs(epochs: float, among: int, least: float) -> tuple[int, float, int]:
    """Epochs, part of the pictures, and number of the trainings that `epochs` are enough for, each of at least `least`.

    At most `among`, at least one.
    """
    count = min(among, max(1, int(epochs / least)))
    each = max(least, epochs / count)
    return (int(each), 1.0, count) if each >= 1 else (1, round(each, 4), count)


def write_result(folder: Path, found: SearchResult) -> None:
    """search.json, and the pictures of it."""
    from weft.study.search.page import write_page

    best = {id(trial) for trial in found.front()}
    space = found.plan.space
    rows = [
        {**asdict(trial), "arguments": space.arguments(trial.point), "on_front": id(trial) in best}
        for trial in found.trials
    ]
    content = {"plan": asdict(found.plan), "score": found.score, "size_of_space": space.size, "epochs": found.epochs}
    write_text(folder / "search.json", json.dumps({**content, "kendall_tau": found.tau, "trials": rows}, indent=2))
    write_page(folder, found)


def _key(point: Point) -> str:
    return json.dumps(point, sort_keys=True)


def _labels(point: Point) -> dict[str, str]:
    """A point as optuna stores it, whose choices must not be lists."""
    return {name: json.dumps(value) for name, value in point.items()}


def tell_result(study: "optuna.Study", trial: "optuna.Trial", found: Trial, cost: int) -> None:
    """Tells optuna the outcome of a trial; one that was stopped has no values."""
    if found.stopped:
        study.tell(trial, state=import_optuna().trial.TrialState.PRUNED)
    else:
        study.tell(trial, [found.judged, cost])


def _ended(study: "optuna.Study") -> list["optuna.trial.FrozenTrial"]:
    """Trials that came to an end, in all calls; not those that a kill cut off."""
    states = import_optuna().trial.TrialState
    return study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED))


def _seconds(study: "optuna.Study") -> float:
    return sum(trial.duration.total_seconds() for trial in _ended(study) if trial.duration is not None)
