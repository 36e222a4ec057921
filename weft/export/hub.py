"""The way of a run to the Hugging Face hub: the model as timm opens it, and a card that is written from the run."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from weft.config import Config, override, read_yaml
from weft.documents import read_json
from weft.errors import WeftError
from weft.export.weights import write_weights
from weft.models.weights.folder import read_model_config
from weft.report.text import SCORES
from weft.run.predictor import Predictor, load
from weft.version import __version__
from weft.words import clean, many

TAGS = {"classify": "image-classification", "segment": "image-segmentation", "detect": "object-detection"}
CLASSES = 100  # that a card names


def push(
    run: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = False,
    replace: bool = False,
    token: str | None = None,
) -> str:
    """Uploads a trained model to a repository of the hub, which is made if need be; returns its address.

    `weft.load("hub:OWNER/NAME")` opens it; a classifier also timm, as "hf-hub:OWNER/NAME", and transformers. A README
    that lies there stays; weights that do stay as well, but with `replace`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # without a network errors are those of the hub's library for HTTP, which its versions change
    unreachable: Any = (OSError, HfHubHTTPError.__bases__[0])
    run = Path(run)
    if repo_id.count("/") != 1:
        raise WeftError(f"{repo_id!r} is no repository of the hub; name one as owner/name.")
    text = card(run, load(run, "cpu"), repo_id)
    api = HfApi(token=token, library_name="weft", library_version=__version__)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_weights(run, folder / "model.safetensors")
        try:
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if not replace and api.file_exists(repo_id, "model.safetensors"):
                raise WeftError(f"{repo_id} holds a model; add --replace to write over it, or name another repository.")
            if not api.file_exists(repo_id, "README.md"):
                (folder / "README.md").write_text(text, encoding="utf-8")
            api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=f"{run.resolve().name}, by Weft")
        except (HfHubHTTPError, HFValidationError) as error:
            raise WeftError(
                f"The hub does not take {repo_id}: {_line(error)} `hf auth login` says who you are."
            ) from None
        except unreachable as error:
            raise WeftError(f"{api.endpoint} cannot be reached: {_line(error)}") from None
    return f"{api.endpoint}/{repo_id}"


def card(run: Path, predictor: Predictor, repo_id: str) -> str:
    """The README of a model: what it does and how well, on what it learned, how to use it, what not to expect."""
    task, stored = predictor.task, read_model_config(run)
    name, version = stored["architecture"], stored.get("weft", {}).get("version", __version__)
    metrics, data = (_content(run / file) for file in ("evaluation.json", "data_report.json"))
    head = [
        "---",
        f"tags: [{TAGS[task.name]}, weft{', timm' if task.whole_pictures else ''}]",
        f"library_name: {'timm' if task.whole_pictures else 'weft'}",  # timm has no heads for masks and boxes
        f"pipeline_tag: {TAGS[task.name]}",
        *_model_index(repo_id, task.name, metrics, data),
        "---",
    ]
    lines = [*head, f"# {clean(repo_id.split('/')[1])}", ""]
    lines += [
        f"A model to {task.purpose}: `{name}`, {many(len(predictor.classes), 'class')}, trained with Weft {version}.",
        "",
    ]
    lines += [
        "## Use",
        "",
        "```python",
        "import weft",
        "",
        f'model = weft.load("hub:{repo_id}")',
        'print(model.predict("picture.jpg"))',
        "```",
    ]
    if task.whole_pictures:
        lines += ["", "timm opens it once Weft is imported:", "", "```python", "import timm, weft", ""]
        lines += [f'model = timm.create_model("hf-hub:{repo_id}", pretrained=True)', "```"]
        lines += ["", "and transformers, with timm:", "", "```python"]
        lines += ["from transformers import AutoModelForImageClassification", "import weft", ""]
        lines += [f'model = AutoModelForImageClassification.from_pretrained("{repo_id}")', "```"]
    lines += ["", "## How good it is", "", *_metrics(metrics)]
    lines += ["", "## Data and training", "", *_training(run, data, metrics, predictor)]
    lines += ["", "## Limits", "", *LIMITS, "", "## Classes", ""]
    named = ", ".join(f"`{clean(label)}`" for label in predictor.classes[:CLASSES])
    more = len(predictor.classes) - CLASSES
    return "\n".join([*lines, named + (f" and {more} more" if more > 0 else ""), ""])


LIMITS = (
    "- It knows its classes alone, and answers with one of them whatever a picture shows.",
    "- The numbers above are of pictures like those it was trained on; expect less of others.",
    "- Nobody has looked at how it treats people, or groups of them.",
)


def _model_index(repo_id: str, task: str, metrics: dict[str, Any], data: dict[str, Any]) -> list[str]:
    """The metrics where the hub looks for them, in a line of JSON, which is YAML; nothing where none was measured."""
    found = [
        {"type": key, "name": words, "value": round(metrics[key], 4)} for key, words in SCORES.items() if key in metrics
    ]
    if not found:
        return []
    dataset = {"name": clean(str(data.get("layout", "own pictures"))), "type": "own"}
    result = {"task": {"type": TAGS[task]}, "dataset": dataset, "metrics": found}
    index = [{"name": clean(repo_id.split("/")[1]), "results": [result]}]
    return [f"model-index: {json.dumps(index)}"]


def _metrics(metrics: dict[str, Any]) -> list[str]:
    """The numbers that decide about models, as far as the run has them."""
    found = [(words, metrics[key]) for key, words in SCORES.items() if isinstance(metrics.get(key), float)]
    if not found:
        return ["Not measured."]
    rows = [f"| {words} | {100 * value:.1f} % |" for words, value in found]
    return [f"On {metrics['n']:,} pictures that it was not trained on:", "", "| metric | |", "| --- | --- |", *rows]


def _training(run: Path, data: dict[str, Any], metrics: dict[str, Any], predictor: Predictor) -> list[str]:
    lines = []
    if data:
        held_out = f", of which {metrics['n']:,} were kept to measure it" if "n" in metrics else ""
        lines.append(f"- {data['pictures']:,} pictures{held_out}; {clean(data['layout'])}.")
    rules = predictor.preprocessing
    seen = "as large as they are" if rules.size == (0, 0) else f"at {rules.size[0]} x {rules.size[1]} pixels"
    lines.append(f"- It sees pictures {seen}, {rules.channels} channel{'s' * (rules.channels > 1)}.")
    if (run / "config.yaml").is_file():
        config = override(Config(), read_yaml(run / "config.yaml"))
        lines.append(f"- {many(config.run.epochs, 'epoch')} in batches of {config.run.batch}, seed {config.run.seed}.")
    return lines


def _line(error: Exception) -> str:
    return clean((str(error).strip().splitlines() or [type(error).__name__])[0])


def _content(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
