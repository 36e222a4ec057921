"""`weft.export(run)`: a trained model as a file that takes pictures as they are and needs neither torch nor Weft.

    weft.export("runs/mine", "mine-onnx")

`weft.export.export.export` says all of it. The package, which is called here, has

export.py      the whole way from a run to a folder
form.py        what is exported: a model from pictures to answers; classify.py segment.py detect.py, one for each task
preprocess.py  the preprocessing as a part of the graph
suppress.py    suppression of boxes that overlap surer ones, in a graph for every batch
graph.py       a form as ONNX or as torch's package; weights.py the weights alone; quantise.py ONNX in eight bits
hub.py         the model on the Hugging Face hub, with a card
agreement.py   whether the file answers as the run does; page.py that as a page
"""

import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.export.export import Exported


class _Export(types.ModuleType):
    """A package that is also the function of its name."""

    def __call__(self, *args: Any, **options: Any) -> "Exported":
        from weft.export.export import export

        return export(*args, **options)


sys.modules[__name__].__class__ = _Export
