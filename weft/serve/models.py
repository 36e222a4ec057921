"""A model that is served: what it says of itself, and its answers as clients get them."""

import os
from collections.abc import Sequence
from pathlib import Path, PurePath
from time import perf_counter
from typing import Any

import torch

from weft.data.loader import Batch
from weft.errors import WeftError
from weft.explain.compare import with_class
from weft.explain.exhibits import Sheet, exhibits, reading, title
from weft.explain.explain import look
from weft.explain.pictures import PictureBatch
from weft.models.weights.release import released_folder
from weft.report.overlay import background, palette
from weft.report.page import data_uri
from weft.run.predictor import Predictor, load
from weft.serve.decoders import DecodedPicture, PictureWay
from weft.serve.refusal import Refusal
from weft.serve.settings import ServeSettings

DEMO, DEMO_MODEL = "demo", "vt_resnet_nano.weft_fashion"  # a name in place of a folder, and what it stands for
PANEL = 224  # pixels of the longer side of an explanation's pictures
PAYS = 1.4  # times as fast: for less, a core has better things to do
TIMED = 4  # answers, of which the first may start threads; fewer, once they have taken
LONG = 0.5  # seconds
SCORES = 2**27  # numbers that a model may give for one picture: of every class at every pixel


class ServedModel:
    """A predictor with a name; its methods but `describe` are called from the thread that computes."""

    def __init__(self, name: str, predictor: Predictor) -> None:
        self.name, self.predictor, self.task = name, predictor.for_inference(), predictor.task
        self.subject = predictor.subject()  # of the model as it is, into which explanations look
        self.parameters = sum(p.numel() for p in predictor.model.parameters())
        self.threads = self.threads_of_batch = 1  # of torch's on a CPU, for a picture alone and for several

    def way(self, settings: ServeSettings) -> PictureWay:
        """How it wants its pictures, within the limits of a server."""
        preprocessing, sized = self.predictor.preprocessing, not self.task.whole_pictures
        seen = settings.seen_pixels
        if self.task.per_pixel:
            seen = min(seen, SCORES // len(self.predictor.classes))
        most = settings.max_places if sized else settings.max_pixels
        return PictureWay(preprocessing, sized, min(most, preprocessing.max_pixels), seen)

    def describe(self) -> dict[str, Any]:
        """Facts for those who choose a model, and for the page."""
        classes = self.predictor.classes
        colours = [f"#{colour.tobytes().hex()}" for colour in palette(classes)]
        return {
            "name": self.name,
            "task": self.task.name,
            "architecture": self.subject.name,
            "parameters": self.parameters,
            "size": list(self.predictor.preprocessing.size),
            "multilabel": self.predictor.multilabel,
            "classes": list(classes),
            "colours": colours,
            "background": background(classes),
        }

    def warm_up(self) -> None:
        """Looks at a grey picture, so that the first client does not pay for what happens only once."""
        self.answers([self._grey()])

    def settle_threads(self, most: int, settings: ServeSettings) -> None:
        """Takes more threads of a CPU only while each doubling pays: other cores decode, and talk with clients.

        A picture alone is timed, and a full batch: what is too little for two threads may be enough for them sixteen
        times. The batch is smaller where a full one would take long, for somebody waits for the server.
        """
        if self.predictor.device.type != "cpu":
            return
        grey = self._grey()
        self.threads, took = self._paying([grey], 1, most)
        fitting = settings.seen_pixels // grey.pixels[0].numel()
        count = min(settings.batch, fitting, int(LONG / took))
        self.threads_of_batch = self._paying([grey] * count, self.threads, most)[0] if count > 1 else self.threads

    def _paying(self, pictures: Sequence[DecodedPicture], threads: int, most: int) -> tuple[int, float]:
        """How many threads pay for these pictures, at least `threads`, and the seconds that they take then."""
        took = self._seconds(pictures, threads)
        while threads < most:
            more = min(2 * threads, most)
            faster = self._seconds(pictures, more)
            if took < PAYS * faster:
                break
            threads, took = more, faster
        return threads, took

    def _seconds(self, pictures: Sequence[DecodedPicture], threads: int) -> float:
        """At best."""
        took: list[float] = []
        while len(took) < TIMED and sum(took) < LONG:
            begun = perf_counter()
            self._infer(pictures, threads)
            took.append(perf_counter() - begun)
        return min(took)

    def _grey(self) -> DecodedPicture:
        way = self.predictor.preprocessing
        dtype = torch.uint8 if way.depth == 8 else torch.float32
        return DecodedPicture(torch.ones((way.channels, *way.fitted(256, 256)), dtype=dtype), (256, 256), ())

    def answers(self, pictures: Sequence[DecodedPicture]) -> list[Any]:
        """The model's answers to a batch, before they are put into words.

        Those for each pixel become masks here: scores of all classes are too large to wait for anything.
        """
        answers = self._infer(pictures, self.threads if len(pictures) == 1 else self.threads_of_batch)
        if not self.task.per_pixel:
            return answers
        pairs = zip(pictures, answers, strict=True)
        return [one if isinstance(one, str) else self._prediction(picture, one) for picture, one in pairs]

    def _infer(self, pictures: Sequence[DecodedPicture], threads: int) -> list[Any]:
        torch.set_num_threads(threads)
        pixels = [picture.pixels for picture in pictures]
        alike = len({one.shape for one in pixels}) == 1
        return self.predictor.answers(torch.stack(pixels) if alike else pixels)

    def words(self, picture: DecodedPicture, answer: Any, *, top: int, score: float) -> dict[str, Any]:
        """An answer as clients get it; raises Refusal where there is none."""
        if isinstance(answer, str):
            raise Refusal(422, answer)
        return self.task.to_dict(
            answer if self.task.per_pixel else self._prediction(picture, answer, top=top, score=score)
        )

    def _prediction(self, picture: DecodedPicture, answer: Any, *, top: int = 1, score: float = 0.5) -> Any:
        sizes = [picture.size] if picture.size is not None else []
        batch = Batch([picture.pixels], [], torch.zeros(1, dtype=torch.int64), [], sizes)
        return self.task.prediction("", answer, batch, 0, top=top, score=score)

    def why(self, name: str, picture: DecodedPicture, of: str) -> dict[str, Any]:
        """Grad-CAM, attention and tokens of a picture, as pictures with a line on how to read them."""
        try:
            subject = with_class(self.subject, of) if of else self.subject
        except WeftError as error:
            raise Refusal(422, str(error)) from None
        torch.set_num_threads(self.threads)
        explanation = look(subject, PictureBatch([name], [-1], picture.pixels[None], None))
        view = explanation.views[0]
        return {
            "of": view.answer,
            "picture": data_uri(view.pixels, PANEL),
            "sheets": [_sheet(one) for one in exhibits([explanation]) if isinstance(one, Sheet)],
            "notes": explanation.notes,
        }


def _sheet(sheet: Sheet) -> dict[str, Any]:
    rows = [
        {
            "name": label,
            "panels": [
                {"picture": data_uri(panel.pixels, PANEL), "caption": panel.caption}
                for panel in panels
                if panel.pixels is not None
            ],
        }
        for label, panels in sheet.rows
    ]
    name = title(sheet).partition(",")[0]
    return {"kind": sheet.kind, "title": name, "reading": reading(sheet), "columns": sheet.columns, "rows": rows}


# Names and folders ----------------------------------------------------------------------------------------------------


def open_models(places: Sequence[str], device: str) -> list[ServedModel]:
    """The models of runs or model folders, or the one that comes with the package, each under a name of its own."""
    if not places:
        raise WeftError("No model given; name runs or model folders, or demo.")
    folders = [released_folder(DEMO_MODEL) if _is_demo(place) else Path(place) for place in places]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise WeftError("The same model is given twice; name each folder once.")
    for folder in folders:
        if not folder.exists():
            raise WeftError(f"{folder} does not exist; give a run or model folder, or demo.")
    names = names_of([PurePath(DEMO) if _is_demo(place) else Path(place).resolve() for place in places])
    return [ServedModel(name, load(folder, device)) for name, folder in zip(names, folders, strict=True)]


def _is_demo(place: str) -> bool:
    return place == DEMO and not os.path.exists(DEMO)


def names_of(paths: Sequence[PurePath]) -> list[str]:
    """The end of each path, as much of it as tells them apart."""
    names = []
    for path in paths:
        others = [other.parts for other in paths if other != path]
        lengths = range(1, len(path.parts) + 1)
        enough = next((n for n in lengths if all(o[-n:] != path.parts[-n:] for o in others)), len(path.parts))
        names.append(PurePath(*path.parts[-enough:]).as_posix())
    return names
