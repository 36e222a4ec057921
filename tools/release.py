"""Makes weights that come with the package out of a run: a folder in weft/models/weights/released, with a card.

    weft train demo:fashion --recipe demo --out runs/clothes
    python -m tools.release runs/clothes weft_fashion --licence MIT --title "Fashion-MNIST, 6,000 pictures"

`timm.create_model("vt_resnet_nano.weft_fashion", pretrained=True)` then finds them, without a network. The card names
the licence of the pictures: weights are no pictures, but who uses them wants to know.
"""

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from weft.config import Config, override, read_yaml
from weft.documents import read_json, to_json
from weft.errors import WeftError
from weft.files import filling, write_tensors, write_text
from weft.models.weights.folder import open_classifier, read_model_config
from weft.models.weights.release import FOLDER
from weft.report.text import SCORES

MOST = 2_500_000  # bytes of one file: the package stays small
OF_THE_MACHINE = {  # nobody's business
    "data": ("source", "val", "masks", "classes", "workers", "keep"),
    "run": ("device", "threads"),
}
PLACES = ("model", "init"), ("loss", "teacher")  # what a reader wants to know, but not where it lay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("tag", help="such as weft_fashion")
    parser.add_argument("--title", required=True, help="of the pictures")
    parser.add_argument("--licence", required=True, help="of the pictures")
    args = parser.parse_args()
    print(f"Wrote {release(args.run, args.tag, args.title, args.licence)}")


def release(run: Path, tag: str, title: str, licence: str, folder: Path = FOLDER) -> Path:
    """Writes weights, configuration and card of a classifier's run, and nothing about where it was made."""
    config = read_model_config(run)
    if config.get("weft", {}).get("head"):
        raise WeftError(f"{run} is no classifier, which are the only models that timm finds by a tag.")
    out = folder / f"{config['architecture']}.{tag}"
    if out.exists():
        raise WeftError(f"{out} exists; choose another tag, or remove it.")
    weights = {name: small(weight) for name, weight in load_file(run / "model.safetensors").items()}
    size = sum(weight.nbytes for weight in weights.values())
    if size > MOST:
        raise WeftError(f"{run} has {size / 1e6:.1f} MB of weights; what comes with the package has at most 2.5 MB.")
    config["pretrained_cfg"]["pool_size"] = last_map(run)
    with filling(out):
        write_tensors(out / "model.safetensors", weights, {"format": "pt"})
        write_text(out / "README.md", card(run, out.name, title, licence))
        write_text(out / "config.json", to_json(config, indent=2))
    return out


def last_map(run: Path) -> list[int]:
    """Height and width of what is pooled, for pictures of the run's size; its configuration has those of another."""
    model: Any = open_classifier(run, read_model_config(run))
    return [math.ceil(side / model.feature_info[-1]["reduction"]) for side in model.pretrained_cfg["input_size"][1:]]


def small(weight: Tensor) -> Tensor:
    """Matrices and filters in bf16; vectors, which are few and steer what is normalised, as they are."""
    return weight.bfloat16() if weight.dtype == torch.float32 and weight.ndim > 1 else weight


def card(run: Path, name: str, title: str, licence: str) -> str:
    """Data and their licence, accuracy, and the settings that the run was made with."""
    metrics: dict[str, Any] = read_json(run / "evaluation.json")
    score = next(key for key in SCORES if key in metrics)
    settings = dataclasses.asdict(override(Config(), read_yaml(run / "config.yaml")))
    for section, keys in OF_THE_MACHINE.items():
        settings[section] = {key: value for key, value in settings[section].items() if key not in keys}
    for section, key in PLACES:
        settings[section][key] = without_folder(settings[section][key])
    return "\n".join(
        [
            f"# {name}",
            "",
            f"- Data: {title}.",
            f"- Licence of the data: {licence}. Of the weights: Apache-2.0.",
            f"- {SCORES[score]}: {metrics[score]:.2%} of {metrics['n']:,} pictures that it was not trained on.",
            f'- `timm.create_model("{name}", pretrained=True)`, once Weft is imported.',
            "",
            "Trained with",
            "",
            "```yaml",
            yaml.safe_dump(settings, sort_keys=False).strip(),
            "```",
            "",
        ]
    )


def without_folder(place: str) -> str:
    """The last part of a path, also of that in `host:PATH`; a mere name stays what it is."""
    kind, colon, path = place.rpartition(":")
    return f"{kind}{colon}{Path(path).name}" if Path(path).is_absolute() else place


if __name__ == "__main__":
    main()
