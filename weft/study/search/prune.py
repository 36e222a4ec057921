"""optuna, and what its pruner says of trainings that are under way."""

from collections.abc import Sequence
from typing import Any

from weft.errors import WeftError


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise WeftError("weft search needs optuna, which proposes the networks: pip install 'weft[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def is_below_median(curve: Sequence[float], peers: Sequence[Sequence[float]]) -> bool:
    """Whether the best score by now is below the median of the peers' after as many epochs: optuna's median pruner.

    That has one aim, and a search has two; so it is asked in a study made for the question, with the peers alone. It
    says no before there are five of them, and after the first epoch.
    """
    optuna = import_optuna()
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner(n_warmup_steps=1))
    for peer in peers:
        if peer:
            scores = dict(enumerate(peer))
            study.add_trial(optuna.trial.create_trial(value=peer[-1], intermediate_values=scores))
    trial = study.ask()
    for epoch, score in enumerate(curve):
        trial.report(score, epoch)
    return trial.should_prune()
