"""A form as a graph for every batch and size, and that as a file: ONNX, or torch's own package."""

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import WeftError
from weft.export.form import ExportForm
from weft.export.suppress import suppress_by_name

OPSET = 20  # GELU is one operation from here on; attention, from 23 on, is not yet known to many runtimes
AXES = ("batch", "height", "width")  # of the pictures that vary
EXAMPLE = (2, 96, 160)  # of no size that the graph might take for a special one
SEEN = (160, 224)  # likewise, of what the network sees; at stride 64 more than one
PREPROCESSING = "preprocessing/"  # how the names of its nodes begin

Lengths = Mapping[int, Any]  # of an input's axes, by their numbers: what torch.export is told of them


def to_graph(module: nn.Module, given: Mapping[Tensor, Lengths]) -> torch.export.ExportedProgram:
    """A module as a graph for inputs like those that are `given`, whose axes that are named may have other lengths."""
    shapes: Any = tuple(given.values())
    fixed = not any(shapes)
    with quiet(), torch.no_grad():
        try:
            return torch.export.export(module.eval(), tuple(given), dynamic_shapes=shapes, strict=False)
        except Exception as error:  # whatever a model of timm's does that no graph can be made of
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            hint = "" if fixed else "; --fixed makes one for a single size"
            raise WeftError(f"torch.export makes no graph of this model{hint}: {why}") from error


def examples(form: ExportForm, fixed: tuple[int, int, int] | None) -> dict[Tensor, Lengths]:
    """Pictures that a graph is made with and what was prepared of them, each with its axes that may vary."""
    rules = form.preprocessing.rules
    dtype = torch.uint8 if rules.depth == 8 else torch.float32
    pictures = torch.zeros(*(fixed or EXAMPLE), rules.channels, dtype=dtype)
    if fixed:
        with torch.no_grad():
            return {given: {} for given in (pictures, *form.prepared(pictures))}
    free = torch.export.Dim.DYNAMIC
    whole = rules.crop_mode == "fit"  # then the network sees pictures of any size, too
    x = torch.zeros(len(pictures), rules.channels, *(SEEN if whole else rules.size))
    given = {pictures: dict.fromkeys(range(len(AXES)), free), x: dict.fromkeys((0, 2, 3) if whole else (0,), free)}
    if form.multiple > 1:
        rows, columns = (form.multiple * torch.export.Dim(name) for name in ("rows", "columns"))
        given[form.padded(x)] = {0: free, 2: rows, 3: columns} if whole else {0: free}
    return given


def write_torch(form: ExportForm, path: Path, fixed: tuple[int, int, int] | None, facts: dict[str, Any]) -> None:
    """A package that `torch.export.load(path).module()` opens; detectors need torchvision to be imported."""
    pictures, *_ = (given := examples(form, fixed))
    program = to_graph(form, {pictures: given[pictures]})
    with quiet():
        torch.export.save(program, package := io.BytesIO(), extra_files={"weft.json": json.dumps(facts)})
    path.write_bytes(package.getbuffer())  # torch's own writer has no error for a full disk, but a RuntimeError


class _Before(nn.Module):
    """A form's preprocessing."""

    def __init__(self, form: ExportForm):
        super().__init__()
        self.form = form

    def forward(self, pictures: Tensor) -> tuple[Tensor, ...]:
        return self.form.prepared(pictures)


class _Behind(nn.Module):
    """A form without its preprocessing."""

    def __init__(self, form: ExportForm):
        super().__init__()
        self.form = form

    def forward(self, pictures: Tensor, x: Tensor, padded: Tensor | None = None) -> tuple[Tensor, ...]:
        return self.form.answer(pictures, x) if padded is None else self.form.answer(pictures, x, padded)


def write_onnx(form: ExportForm, path: Path, fixed: tuple[int, int, int] | None, facts: dict[str, Any]) -> None:
    """A file for onnxruntime and others, with the facts as the entry "weft" of its metadata.

    It is made of two graphs: behind the preprocessing the size of what the network sees is a symbol of its own, or 32
    times one. As a formula of the picture's size it would stand in every shape of the network, which takes torch
    minutes to simplify.
    """
    onnx = onnx_library()
    pictures, *prepared = (given := examples(form, fixed))
    names = ["x", "padded"][: len(prepared)]
    if hasattr(form, "suppress"):
        form.suppress = suppress_by_name  # pyright: ignore[reportArgumentType]
    first = _translated(to_graph(_Before(form), {pictures: given[pictures]}), ["pictures"], names)
    second = _translated(to_graph(_Behind(form), given), ["pictures", *names], [*form.outputs])
    model = _joined(first, second)
    if not fixed:
        _name_axes(model)
    onnx.helper.set_model_props(model, {"weft": json.dumps(facts)})
    model.producer_name, model.producer_version = "weft", facts["weft"]
    onnx.save(model, path)


def _translated(program: torch.export.ExportedProgram, inputs: list[str], outputs: list[str]) -> Any:
    from weft.export.translations import TRANSLATIONS

    _copy_before_views(program.graph)
    with quiet():
        try:
            made: Any = torch.onnx.export(
                program,
                (),
                dynamo=True,
                verbose=False,
                optimize=False,
                opset_version=OPSET,
                input_names=inputs,
                output_names=outputs,
                custom_translation_table=TRANSLATIONS,
            )
        except torch.onnx.OnnxExporterError as error:
            first: BaseException = error
            while first.__cause__ is not None:
                first = first.__cause__
            why = (str(first).strip().splitlines() or [type(first).__name__])[0]
            raise WeftError(f"torch makes no ONNX of this model; try --to torch: {why}") from error
    return _lean(made)


def _lean(made: Any) -> Any:
    """The model without what is known beforehand.

    The exporter's own optimiser also looks for patterns of nodes. It takes longer for a detector than all else, and
    runtimes look for the same ones.
    """
    import onnx_ir.passes.common as passes
    from onnxscript import optimizer

    optimizer.inline(made.model)
    optimizer.fold_constants(made.model)
    optimizer.remove_unused_nodes(made.model)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(made.model)
    passes.DeduplicateInitializersPass()(made.model)
    passes.CommonSubexpressionEliminationPass()(made.model)
    return made.model_proto


def _copy_before_views(graph: torch.fx.Graph) -> None:
    """A view holds for the strides that torch's own operations give; the exporter's decompositions give others.

    ONNX has no strides, and the copies are gone from the file.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.view.default:
            with graph.inserting_before(node):
                copy = graph.call_function(
                    torch.ops.aten.clone.default, (node.args[0],), {"memory_format": torch.contiguous_format}
                )
                copy.meta = {"val": node.args[0].meta["val"].contiguous()}
            node.args = (copy, *node.args[1:])


def _joined(first: Any, second: Any) -> Any:
    """Two models as one: the second takes what the first gives, by its name, and otherwise the same inputs."""
    import onnx.compose

    shared = {value.name for value in (*first.graph.input, *first.graph.output)}
    first = onnx.compose.add_prefix(first, PREPROCESSING, rename_inputs=False, rename_outputs=False)
    given = {value.name for value in first.graph.output}
    inputs = [value for value in second.graph.input if value.name not in given]
    assert shared >= {value.name for value in second.graph.input}
    nodes, tensors = [*first.graph.node, *second.graph.node], [*first.graph.initializer, *second.graph.initializer]
    graph = onnx.helper.make_graph(nodes, "weft", inputs, second.graph.output, tensors)
    functions = [*first.functions, *second.functions]
    model = onnx.helper.make_model(graph, opset_imports=second.opset_import, functions=functions)
    model.ir_version = second.ir_version
    return model


def _name_axes(model: Any) -> None:
    """Says batch, height and width instead of torch's symbols."""
    symbols = [d.dim_param for d in model.graph.input[0].type.tensor_type.shape.dim[: len(AXES)]]
    names = dict(zip(symbols, AXES, strict=True))
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in names:
                dim.dim_param = names[dim.dim_param]


def onnx_library() -> Any:
    try:
        import onnx
        import onnx.helper
        import onnxruntime  # noqa: F401  the file is tried with it
        import onnxscript  # noqa: F401  torch's exporter is written in it
    except ImportError as error:
        raise WeftError(f"ONNX needs {error.name}: pip install weft[export].") from None
    return onnx


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps what torch's exporters say to their developers from users; what is wrong is an exception."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "torch")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


class TorchFile:
    """A package of torch's that is used."""

    def __init__(self, path: Path, names: list[str]):
        self.module, self.names = torch.export.load(path).module(), names

    @torch.no_grad()
    def __call__(self, pictures: Any) -> dict[str, Any]:
        found: tuple[Tensor, ...] = self.module(torch.from_numpy(pictures))
        return {name: value.numpy() for name, value in zip(self.names, found, strict=True)}


class OnnxFile:
    """A file that onnxruntime runs on the CPU, with the threads that torch has."""

    def __init__(self, path: Path, names: list[str]):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self.session, self.names = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"]), names

    def __call__(self, pictures: Any) -> dict[str, Any]:
        return dict(zip(self.names, self.session.run(self.names, {"pictures": pictures}), strict=True))
