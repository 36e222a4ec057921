"""What a model does with one picture, watched from outside: which modules run, on what, and what feeds what.

`watch(model)` runs a picture through a model on the meta device and returns a tree of `Node`s in the order of
execution. Nothing about a family is written here: calls come from forward hooks, the flow of data from a mode that sees
every torch function, and costs from torch's own counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from weft.catalog.cost import count_parameters
from weft.models.layers import StochasticDepth

Shape = tuple[int, ...]
SILENT = (nn.Identity, nn.Dropout, DropPath, StochasticDepth)  # do nothing when a trained model runs
PRODUCTS = {
    "scaled_dot_product_attention": "scaled dot-product attention",
    "matmul": "matmul",
    "__matmul__": "matmul",
    "bmm": "matmul",
    "einsum": "einsum",
    "softmax": "softmax",
}
SUMS = ("add", "__add__", "__iadd__", "add_", "__radd__")


@dataclass(eq=False, repr=False)
class Node:
    """One call of a module ("module"), or a step between them: "product", "sum", "concat", or a bare "parameter"."""

    type: str
    name: str  # the attribute under which the caller knows it
    title: str  # the class, or what the step computes
    module: nn.Module | None = None
    path: str = ""  # the module's name in the model
    inputs: list[Shape] = field(default_factory=list)
    outputs: list[Shape] = field(default_factory=list)
    sources: dict[Node, set[bool]] = field(default_factory=dict)  # where its inputs were made; True: a class token
    children: list[Node] = field(default_factory=list)
    ends: dict[Node, set[bool]] = field(default_factory=dict)  # the children (or itself: its input) it returns
    parameters: int = 0
    macs: int = 0
    kind: str = "other"  # what colour means
    members: list[Node] = field(default_factory=list)  # the calls that `inside` put into this node
    group: Node | None = None  # the node that `inside` put this call into

    @property
    def times(self) -> int:
        return max(len(self.members), 1)

    @property
    def steps(self) -> list[Node]:
        """The children that are modules."""
        return [child for child in self.children if child.type == "module"]

    @cached_property
    def inside(self) -> list[Node]:
        """The children, with neighbours that are built alike as one node."""
        return _collapse(self.children)

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            yield from child.walk()


class Watch(TorchFunctionMode):
    """Follows tensors from call to call. One frame per running module knows which child made which tensor."""

    def __init__(self, model: nn.Module, counter: FlopCounterMode):
        super().__init__()
        self.model, self.counter = model, counter
        self.class_token = bool(getattr(model, "num_prefix_tokens", 0))
        self.paths = {module: path for path, module in model.named_modules()}
        self.stack: list[tuple[Node, dict[int, dict[Node, set[bool]]]]] = []
        self.started: list[int] = []
        self.alive: list[Tensor] = []  # so that no id is given twice
        self.counted: set[nn.Module] = set()
        self.root: Node | None = None

    # Modules ----------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = list(_tensors((args, kwargs)))
        path = self.paths[module]
        node = Node("module", path, type(module).__name__, module, path, [tuple(t.shape) for t in tensors])
        if self.stack:
            caller = self.stack[-1][0]
            if path.startswith(caller.path):
                node.name = path[len(caller.path) :].lstrip(".")
            node.sources = self._origins(tensors)
            previous = caller.steps[-1] if caller.steps else None
            if previous is not None and previous.module is module and previous not in node.sources:
                _merge(previous.sources, node.sources)  # a norm that sees first the map and then the class token
                previous.inputs += node.inputs
                node.sources = previous.sources
        frame = {id(t): {node: {self._is_class_token(t)}} for t in tensors}
        self.alive += tensors
        self.stack.append((node, frame))
        self.started.append(self._flops())

    def leave(self, output: Any) -> None:
        node, _ = self.stack[-1]
        tensors = list(_tensors(output))
        node.ends = self._origins(tensors)
        self.stack.pop()
        node.outputs = [tuple(t.shape) for t in tensors]
        node.macs = (self._flops() - self.started.pop()) // 2
        assert node.module is not None
        node.parameters = self._count(node.module)
        if not node.steps or isinstance(node.module, NORMS):
            node.children = []  # what a leaf computes inside is its own business
        if not self.stack:
            self.root = node
            return
        caller, frame = self.stack[-1]
        previous = caller.steps[-1] if caller.steps else None
        if previous is not None and previous.module is node.module and previous.sources is node.sources:
            previous.outputs += node.outputs
            previous.macs += node.macs
            node = previous
        else:
            caller.children.append(node)
        for tensor in tensors:
            frame[id(tensor)] = {node: {self._is_class_token(tensor)}}
        self.alive += tensors

    def _count(self, module: nn.Module) -> int:
        """Parameters of a module, counted at its first call."""
        first = module not in self.counted
        self.counted.add(module)
        return count_parameters(module) if first else 0

    # Functions --------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._flops()
        output = func(*args, **(kwargs or {}))
        made = list(_tensors(output))
        if not self.stack or not made:
            return output
        macs = (self._flops() - before) // 2
        node, frame = self.stack[-1]
        operands = list(_tensors((args, kwargs or {})))
        origins = self._origins(operands)
        if any(True for _ in node.module.children()):  # pyright: ignore[reportOptionalMemberAccess]
            origins = self._step(getattr(func, "__name__", ""), operands, origins, made, macs)
        for tensor in made:
            frame[id(tensor)] = origins
        self.alive += made
        return output

    def _step(
        self, name: str, operands: list[Tensor], origins: dict[Node, set[bool]], made: list[Tensor], macs: int
    ) -> dict[Node, set[bool]]:
        """A node for a function that deserves one; else what it makes comes from where its operands came."""
        caller = self.stack[-1][0]
        each = [sources for t in operands if (sources := self._origins([t]))]
        if name in PRODUCTS:
            step = self._grow(origins) or self._new(caller, "product", "", origins)
            label = PRODUCTS[name]
            step.title = f"{step.title}, {label}" if step.title else label
        elif name in SUMS and len({frozenset(sources) for sources in each}) > 1:
            learned = all(source.type in ("parameter", "product") for source in origins)  # a bias of attention scores
            step = self._grow(origins) if learned else None
            if step is None:
                known = [c for c in caller.children if c.type == "sum" and c.sources.keys() == origins.keys()]
                step = known[0] if known else self._new(caller, "sum", "+", origins)
        elif name == "cat" and len({frozenset(s) for s in each if True not in set().union(*s.values())}) > 1:
            step = self._new(caller, "concat", "concat", origins)
        else:
            return origins
        step.outputs += [tuple(t.shape) for t in made]
        step.macs += macs
        return {step: {self._is_class_token(made[0])}}

    def _grow(self, origins: dict[Node, set[bool]]) -> Node | None:
        """The product that this operation continues: products without a module between them are one step."""
        for last in origins:
            others = [source for source in origins if source is not last]
            if last.type == "product" and not any(last in _ancestors(other) for other in others):
                _merge(last.sources, {source: origins[source] for source in others})
                return last
        return None

    def _new(self, caller: Node, type: str, title: str, origins: dict[Node, set[bool]]) -> Node:
        kind = "attention" if type == "product" else "other"
        step = Node(type, "", title, sources={s: set(flags) for s, flags in origins.items()}, kind=kind)
        caller.children.append(step)
        return step

    def _origins(self, tensors: Iterable[Tensor]) -> dict[Node, set[bool]]:
        node, frame = self.stack[-1]
        origins: dict[Node, set[bool]] = {}
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter) and id(tensor) not in frame:
                self._parameter(node, frame, tensor)
            _merge(origins, frame.get(id(tensor), {}))
        return origins

    def _parameter(self, node: Node, frame: dict[int, dict[Node, set[bool]]], tensor: Tensor) -> None:
        """A parameter that the running module itself owns, such as a class token, is where data comes from, too."""
        assert node.module is not None
        if not any(True for _ in node.module.children()):
            return
        for name, parameter in node.module.named_parameters(recurse=False):
            if parameter is tensor:
                chip = Node("parameter", name, "learned", outputs=[tuple(tensor.shape)], parameters=tensor.numel())
                chip.kind = "token"
                node.children.append(chip)
                frame[id(tensor)] = {chip: {self._is_class_token(tensor)}}

    def _is_class_token(self, tensor: Tensor) -> bool:
        return self.class_token and tensor.dim() == 3 and tensor.shape[1] == 1

    def _flops(self) -> int:
        return sum(self.counter.flop_counts["Global"].values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)


def _merge(into: dict[Node, set[bool]], more: dict[Node, set[bool]]) -> None:
    for node, flags in more.items():
        into[node] = into.get(node, set()) | flags


def _ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    waiting = list(node.sources)
    while waiting:
        source = waiting.pop()
        if source not in found:
            found.add(source)
            waiting += source.sources
    return found


def watch(model: nn.Module, input_size: Shape) -> Node:
    """The tree of calls that a (C, H, W) picture causes in `model`, which lives on the meta device."""
    model.eval().requires_grad_(False)
    counter = FlopCounterMode(display=False)
    watching = Watch(model, counter)
    hooks = []
    for module in model.modules():
        if not isinstance(module, SILENT):
            hooks.append(module.register_forward_pre_hook(lambda m, a, k: watching.enter(m, a, k), with_kwargs=True))
            hooks.append(module.register_forward_hook(lambda m, a, output: watching.leave(output)))
    picture = torch.empty(1, *input_size, device="meta")
    try:
        with counter, watching:
            model(picture)
    finally:
        for hook in hooks:
            hook.remove()
    assert watching.root is not None
    _name_kinds(watching.root, model, attention=False)
    return watching.root


# Meaning --------------------------------------------------------------------------------------------------------

NORMS = (nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm)
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _name_kinds(node: Node, model: nn.Module, attention: bool) -> None:
    """Kinds by what a module is and where it stands: a Linear is attention inside attention, else MLP or head."""
    if node.module is getattr(model, "head", None):
        node.kind = "head"
    elif isinstance(node.module, CONVS):
        node.kind = "convolution"
    elif isinstance(node.module, NORMS):
        node.kind = "norm"
    elif isinstance(node.module, nn.Linear):
        node.kind = "attention" if attention else "mlp"
    elif not node.steps and node.macs:
        node.kind = "attention"  # products of its own
    elif not node.steps and node.parameters:
        node.kind = "token"  # a leaf with parameters of its own: positions
    attention = attention or _is_attention(node)
    products = [c for c in node.children if c.type == "product" or (not c.steps and _is_attention(c))]
    for child in node.steps:
        touches = any(child in p.sources for p in products) or bool(child.sources.keys() & set(products))
        single = sum(isinstance(leaf.module, (*CONVS, nn.Linear)) for leaf in child.walk()) == 1
        _name_kinds(child, model, attention or (touches and single))


def _is_attention(node: Node) -> bool:
    words = f"{node.name.split('.')[-1]} {node.title}".lower()
    return any(word in words for word in ("attn", "attention"))


def costs_by_kind(node: Node) -> dict[str, int]:
    """MACs of a node by kind; parameters where it has no MACs."""
    for cost in ("macs", "parameters"):
        total: dict[str, int] = {}
        for part in node.walk():
            if not part.children:
                total[part.kind] = total.get(part.kind, 0) + getattr(part, cost)
        if any(total.values()):
            return {kind: value for kind, value in total.items() if value}
    return {node.kind: 1}


def describe(node: Node) -> str:
    """A layer in a few words: what it is, its kernel, its widths."""
    m: Any = node.module
    if isinstance(m, CONVS):
        words = ["Conv " + " × ".join(map(str, m.kernel_size))]
        if max(m.stride) > 1:
            words.append(f"stride {max(m.stride)}")
        if max(m.dilation) > 1:
            words.append(f"dilation {max(m.dilation)}")
        if m.groups > 1:
            words.append("depth-wise" if m.groups == m.in_channels == m.out_channels else f"{m.groups} groups")
        widths = f"{m.in_channels} → {m.out_channels}" if m.in_channels != m.out_channels else f"{m.in_channels}"
        return ", ".join([*words, widths])
    if isinstance(m, nn.Linear):
        return f"{node.title} {m.in_features} → {m.out_features}"
    if isinstance(m, NORMS):
        act = getattr(m, "act", None)  # timm's norms bring the activation along
        name = node.title.removesuffix("2d").removesuffix("1d").removesuffix("Act")
        return name if act is None or isinstance(act, SILENT) else f"{name}, {type(act).__name__}"
    shapes = [f"{name} {sizes(p.shape)}" for name, p in m.named_parameters(recurse=False)] if m is not None else []
    stride = getattr(m, "stride", None)
    return ", ".join([node.title] + ([f"stride {stride}"] if isinstance(stride, int) and stride > 1 else []) + shapes)


def sizes(shape: Iterable[int]) -> str:
    return " × ".join(str(n) for i, n in enumerate(shape) if n > 1 or i) or "1"


def chain(node: Node) -> list[Node] | None:
    """The layers of a module that are run one after the other, each on what the one before made; else None."""
    if not node.steps:
        return [node]
    leaves: list[Node] = []
    previous = node
    for child in node.children:
        inner = chain(child) if child.type == "module" else None
        if inner is None or set(child.sources) != {previous}:
            return None
        leaves += inner
        previous = child
    return leaves if set(node.ends) == {previous} else None


def facts(node: Node) -> str:
    """Heads and kernels of a module too rich to be told in a line."""
    heads = [getattr(part.module, "num_heads", 0) for part in node.walk() if part.module is not None]
    kernels: dict[str, None] = {}
    for part in node.walk():
        if isinstance(part.module, CONVS) and max(part.module.kernel_size) > 1:
            kernels[describe(part).split(",")[0].replace("Conv ", "")] = None
    words = [f"{max(heads)} head{'s' * (max(heads) > 1)}"] if any(heads) else []
    return " · ".join(words + ([f"convolutions {', '.join(kernels)}"] if kernels else []))


# Repetition -----------------------------------------------------------------------------------------------------


def signature(node: Node) -> tuple[Any, ...]:
    own = sorted((n, tuple(p.shape)) for n, p in node.module.named_parameters()) if node.module is not None else ()
    layers = tuple(describe(leaf) for leaf in node.walk() if leaf.module is not None and not leaf.steps)
    return (node.title, tuple(own), layers, tuple(node.inputs), tuple(node.outputs), node.macs)


def _collapse(nodes: list[Node]) -> list[Node]:
    """Neighbours "blocks.0", "blocks.1", ... that are built alike become one node that stands for all."""
    groups: list[list[Node]] = []
    for node in nodes:
        last = groups[-1] if groups else []
        follows = bool(last) and last[-1] in node.sources and _base(node) != "" and _base(node) == _base(last[0])
        if follows and signature(node) == signature(last[0]):
            last.append(node)
        else:
            groups.append([node])
    stands_for: dict[Node, Node] = {}
    for group in groups:
        first = group[0]
        if len(group) > 1:
            first = replace(first)
            first.members = group
            first.name = f"{group[0].name}–{group[-1].name.split('.')[-1]}"
            first.parameters = sum(node.parameters for node in group)
            first.macs = sum(node.macs for node in group)
            first.outputs = group[-1].outputs
        for node in group:
            node.group = stands_for[node] = first
    result = [stands_for[group[0]] for group in groups]
    for group, node in zip(groups, result, strict=True):
        sources: dict[Node, set[bool]] = {}
        for member in group:
            _merge(sources, {stands_for.get(s, s): flags for s, flags in member.sources.items()})
        sources.pop(node, None)
        node.sources = sources
    return result


def _base(node: Node) -> str:
    name, _, index = node.name.rpartition(".")
    return f"{name}." if index.isdigit() and node.type == "module" else ""
