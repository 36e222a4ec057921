"""The command `weft`: the app, made of the commands of this folder, and its entry point.

The commands import what they use only when they run, so that help needs neither torch nor timm.
"""

import os
import re
import signal
import sys

from cyclopts import App, CycloptsError

from weft.cli.ablate import ablate
from weft.cli.bench import bench
from weft.cli.check import check
from weft.cli.explain import explain
from weft.cli.export import export, push
from weft.cli.models import convert, models
from weft.cli.options import complain
from weft.cli.results import evaluate, predict
from weft.cli.search import search
from weft.cli.serve import serve
from weft.cli.train import demo, keys, recipes, train
from weft.errors import WeftError
from weft.version import __version__

app = App(
    name="weft",
    help="Convolutions woven into vision transformers.",
    version=__version__,
    suppress_keyboard_interrupt=False,  # `main` says a line
)

for command in (
    train,
    demo,
    recipes,
    keys,
    check,
    models,
    convert,
    predict,
    explain,
    export,
    push,
    bench,
    search,
    ablate,
    serve,
):
    app.command(command)
app.command(evaluate, name="eval")

SPINS = "2000"  # as fast on two quiet cores as GNU's own 300,000; docs/training.md has what else was measured


def take_keys(arguments: list[str]) -> list[str]:
    """`--optim.lr 0.1` and `--optim.lr=0.1` as `--set=optim.lr=0.1`; a switch without a value is true."""
    taken, waiting = [], list(arguments)
    while waiting:
        word = waiting.pop(0)
        found = re.fullmatch(r"--([a-z]+\.[\w.-]+)(=.*)?", word, re.DOTALL)
        if not found:
            taken.append(word)
            continue
        name, value = found[1].replace("-", "_"), found[2]
        if value is None:
            value = "=" + (waiting.pop(0) if waiting and not waiting[0].startswith("--") else "true")
        taken.append(f"--set={name}{value}")
    return taken


def limit_spinning() -> None:
    """Has torch's threads look for each other some ten microseconds long, and then sleep, unless told otherwise.

    GNU's OpenMP, which reads this when it is loaded, has them spin for milliseconds. Beside another job they may then
    take the time of the very threads they wait for. Where they sleep at once a step takes less beside another job, but
    1.6 times as long where nothing else runs, and whether something does nobody knows beforehand.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def main() -> None:
    """Entry point. Exit codes: 0, 1 where a part failed, 2 with one line for bad input, 130 after a Ctrl-C."""
    limit_spinning()
    try:
        if hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `weft models | head` ends quietly
        app(take_keys(sys.argv[1:]), exit_on_error=False, print_error=False)
    except (WeftError, CycloptsError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":  # all processes of torchrun's have the same error; one says it
            complain(f"weft: {_one_line(error)}")
        sys.exit(2)
    except RuntimeError as error:
        if not str(error).startswith("Symlink loop"):  # which is what Python before 3.13 calls it, and no OSError
            raise
        complain(f"weft: {str(error).partition(' from ')[2]} is a link that leads to itself.")
        sys.exit(2)
    except KeyboardInterrupt:
        complain("weft: interrupted; everything saved so far is intact.")
        sys.exit(130)


def _one_line(error: Exception) -> str:
    """The error as one line; the system's errors without their number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    return " ".join(str(error).splitlines())


if __name__ == "__main__":
    main()
