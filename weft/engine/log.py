"""The log of a run: rows in metrics.jsonl for programs, a bar or lines for people, TensorBoard where it is wanted."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress

from weft.documents import parse_json, read_text, to_json
from weft.engine.state import RunProgress
from weft.errors import WeftError
from weft.files import write_text
from weft.words import clean

LINE_SECONDS = 30  # between two lines of one epoch where the output is no terminal
METRICS = "metrics.jsonl"


class MetricsFile:
    """metrics.jsonl: one JSON object per line. Rows a resumed run will write again are cut off first."""

    def __init__(self, run: Path, progress: RunProgress):
        self.path = run / METRICS
        self.truncate(progress)

    def truncate(self, progress: RunProgress) -> None:
        """Leaves what was reported until `progress`; what comes after it will come again."""
        rows = read_rows(self.path) if self.path.exists() else []
        write_text(self.path, "".join(to_json(row) + "\n" for row in rows if _is_before(row, progress)))
        self._file: TextIO = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  open as long as the run

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(to_json(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; the last line may have been cut by a kill, and none before it."""
    lines, rows = read_text(path).splitlines(), []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(_checked(parse_json(line, path)))
        except WeftError:
            if number < len(lines):
                raise WeftError(
                    f"{path}: line {number} is no row of a log; mend or remove that line, or move the file away."
                ) from None
    return rows


def _checked(row: Any) -> dict[str, Any]:
    kind = row.get("kind") if isinstance(row, dict) else None
    if not isinstance(kind, str) or not isinstance(row.get("epoch" if kind == "epoch" else "step"), int | float):
        raise WeftError("no row of a log")
    return row


def _is_before(row: dict[str, Any], progress: RunProgress) -> bool:
    return row["epoch"] <= progress.validated if row["kind"] == "epoch" else row["step"] <= progress.step


class Screen:
    """The run on a terminal: a bar that moves; or, in a pipe or file, a line now and then; or, quiet, nothing."""

    def __init__(self, quiet: bool):
        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True)
        self.total_epochs = 0
        self.bar: Progress | None = None
        self._line_at = time.monotonic()

    def start(self, total_epochs: int) -> None:
        self.close()
        self.total_epochs = total_epochs
        if self.console.is_terminal and not self.console.quiet:
            columns = ("{task.description}", BarColumn(bar_width=24), MofNCompleteColumn(), "{task.fields[news]}")
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.task = self.bar.add_task("starting", total=None, news="")
            self.bar.start()

    def say(self, text: str) -> None:
        self.console.print(clean(text), markup=False, emoji=False)

    def progress(self, what: str) -> Callable[[int, int], None]:
        """A bar for work before the start, on a terminal: call it with how many are done, of how many."""
        if not self.console.is_terminal or self.console.quiet:
            return lambda done, total: None
        columns = ("{task.description}", BarColumn(bar_width=24), MofNCompleteColumn())
        bar = self.bar = Progress(*columns, console=self.console, transient=True)
        task = bar.add_task(what, total=None)
        bar.start()
        return lambda done, total: bar.update(task, completed=done, total=total)

    def step(self, epoch: int, done: int, steps: int, news: dict[str, float], left: float) -> None:
        """`news`: loss, pictures per second and, where there is one, accuracy of the last steps. `left`: seconds.

        Steps before the start, which only find out how long a step takes, are not shown, nor are those without a speed.
        """
        speed = news["pictures_per_second"]
        if not self.total_epochs or not speed:  # a first step has nothing to be timed against
            return
        text = f"loss {news['loss']:.3f}  "
        if "accuracy" in news:
            text += f"accuracy {news['accuracy']:.1%}  "
        text += f"{speed:,.0f} pictures/s" if speed >= 10 else f"{speed:.1f} pictures/s"
        text += f"  {format_duration(left)} left"
        if self.bar:
            self.bar.update(
                self.task, completed=done, total=steps, description=f"epoch {epoch}/{self.total_epochs}", news=text
            )
        elif time.monotonic() - self._line_at >= LINE_SECONDS:
            self._line_at = time.monotonic()
            self.say(f"epoch {epoch}/{self.total_epochs}  {done}/{steps}  {text}")

    def epoch(self, row: dict[str, Any], metrics: Mapping[str, str]) -> None:
        """The line that stays when an epoch is over. `metrics`: what of its validation is shown, and by which name."""
        text = f"epoch {row['epoch']}/{self.total_epochs}  train loss {row['train_loss']:.3f}"
        if "val_loss" in row:
            text += f"  val loss {row['val_loss']:.3f}"
        for key, name in metrics.items():
            if f"val_{key}" in row:
                text += f"  {name} {row[f'val_{key}']:.2%}"
        self.say(f"{text}  {format_duration(row['seconds'])}" + ("  *" if row["best"] else ""))

    def close(self) -> None:
        if self.bar:
            self.bar.stop()
            self.bar = None


def format_duration(seconds: float) -> str:
    """90 -> 1:30, 5400 -> 1:30:00."""
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def tensorboard_writer(run: Path) -> Callable[[dict[str, Any]], None]:
    """A function that writes a row's numbers for TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise WeftError("run.tensorboard needs TensorBoard: pip install tensorboard") from None
    writer = SummaryWriter(str(run / "tensorboard"))

    def write(row: dict[str, Any]) -> None:
        for key, value in row.items():
            if isinstance(value, float) and key != "epoch":
                writer.add_scalar(key, value, row["step"])
        writer.flush()

    return write
