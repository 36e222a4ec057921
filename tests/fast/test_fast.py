"""Fused forms against the plain modules: equal numbers and gradients, and they step aside where somebody looks."""

import copy
import io
import pickle
from contextvars import ContextVar
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import weft
from tests.conftest import randomise
from tests.helpers.kernel_checks import DEVICE, random
from tests.helpers.variants import NANO
from weft.fast import swap
from weft.fast.forms.vitae import FusedNormalCell
from weft.fast.inference.on_cpu import FusedTokenBlock
from weft.fast.precompile import dry_run, is_unhooked
from weft.fast.swap import FORMS, PLAIN, Fused, import_forms
from weft.fast.tape import tape
from weft.kernels import switch, switched
from weft.kernels.ops import op
from weft.models import ce, ceit, cetnet, cvt, vitae
from weft.models.vt import VisualTransformer

SWITCHES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in NANO},
    "ceit without norms": ("ceit_nano", dict(leff_norm=False)),
    "ceit with the last GELU": ("ceit_nano", dict(leff_final_act=True, leff_kernel=5)),
    "cvt with GELU": ("cvt_nano", dict(act_layer="gelu", stride_kv=1)),
    "cvt with linear projections": ("cvt_nano", dict(projection="linear")),
    "cvt without class token": ("cvt_nano", dict(class_token=False, global_pool="avg")),
    "cetnet with convolutions in front": ("cetnet_nano", dict(le="pre")),
    "cetnet without local enhancement": ("cetnet_nano", dict(le="none", ce_unit="mbconv", ce_expand=(2, 1))),
    "cetnet with other units": ("cetnet_nano", dict(ce_unit="shuffle")),
    "vitae of the paper": (
        "vitae_nano", dict(class_token=True, global_pool="token", final_norm=True, full_rc3=True, nc_pcm="post"),
    ),
    "vitae with softmax": ("vitae_nano", dict(rc_attention="softmax", rc_heads=2, nc_pcm_convs=2)),
    "vt with bottlenecks": ("vt_resnet_nano", dict(block="bottleneck", bottleneck_stride="1x1", projector="every")),
    "vt carrying tokens": ("vt_resnet_nano", dict(carried_tokens=4, relation="graph", later_tokenizer="recurrent")),
    "swin": ("ce_swin_tiny", dict(embed_dim=24, depths=(1, 2, 1, 1), window_size=4, stem_stride=2)),
}  # fmt: skip
every_switch = pytest.mark.parametrize(("name", "args"), SWITCHES.values(), ids=SWITCHES)


@pytest.fixture
def references(monkeypatch):
    """The paths of a GPU on the CPU, in any type, with references in place of kernels."""
    monkeypatch.setattr(switch, "_usable", lambda x: switch._on)
    monkeypatch.setattr(op, "interpreted", lambda: False)


@pytest.fixture
def interpreter(monkeypatch):
    """The paths of a GPU by the kernels themselves, in Triton's interpreter where there is no GPU."""
    monkeypatch.setattr(switch, "_usable", lambda x: switch._on)


@pytest.fixture(autouse=True)
def _any_size(monkeypatch):
    """Small maps, too."""
    monkeypatch.setattr(swap, "replaying", ContextVar("replaying", default=True))


SHALLOW: dict[str, dict[str, Any]] = dict(
    ceit_nano=dict(depth=1),
    vitae_nano=dict(depth=1),
    vt_resnet_nano={},
    cvt_nano=dict(depths=(1, 1, 1)),
    cetnet_nano=dict(depths=(1, 1, 2, 1)),
)


def make(name: str, **args: Any) -> nn.Module:
    model = randomise(timm.create_model(name, num_classes=5, drop_path_rate=0.3, **args))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # ViTAE's own, drawn in another order
    return model


def results(module: nn.Module, *inputs: Tensor) -> dict[str, Tensor | None]:
    """Outputs, gradients and running statistics under random gradients of the outputs."""
    torch.manual_seed(1)
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = module(*leaves)
    outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None]
    upstream = [random(*y.shape, seed=7).to(y.dtype) for y in outputs]
    torch.autograd.backward(outputs, upstream)
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    found |= {f"gradient of input {i}": x.grad for i, x in enumerate(leaves)}
    found |= {f"gradient of {name}": p.grad for name, p in module.named_parameters()}
    return found | {name: buffer for name, buffer in module.named_buffers() if "running" in name or "batches" in name}


def check_equal(found: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    largest = max(value.abs().max().item() for key, value in wanted.items() if value is not None and "grad" in key)
    for name, right in wanted.items():
        assert (found[name] is None) == (right is None), f"{name}: only one of both is there"
        if right is not None:
            scale = largest if "grad" in name else max(right.abs().max().item(), 1e-3)
            error = (found[name].double() - right.double()).abs().max().item()
            assert error <= tolerance * scale, f"{name} is off by {error:.1e} at values up to {scale:.1e}"


def fused_in(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__.startswith("Fused")]


# Equal to the plain modules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["train", "eval"])
@every_switch
def test_whole_models(name, args, train, references):
    """In float64, where nothing hides: forward, backward and running statistics, at a size that windows do not fit."""
    model = make(name, **args).double().train(train)
    fast = weft.fast(copy.deepcopy(model))
    assert fused_in(fast)
    picture = torch.randn(2, 3, 40, 56, dtype=torch.float64)
    wanted, found = results(model, picture), results(fast, picture)
    check_equal(found, wanted, 1e-6 if "vitae" in name else 1e-10)  # references of grouped ones sum in float32
    with torch.no_grad():
        torch.testing.assert_close(fast.eval()(picture), model.eval()(picture))


def down(chs: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(chs, out, 1, 2, bias=False), nn.BatchNorm2d(out))


def lewin(shifted: bool) -> nn.Module:
    return cetnet.LEWinBlock(16, cetnet.LEWinAttention(16, 2, 3, shifted, "qkv", 0.0, 0.0), "qkv", 24, 0.0, 0.5)


BLOCKS = {  # a module, and the shapes of what it takes
    "ceit": (lambda: ceit.Block(16, 2, ceit.LeFF(16, 24, 3, True, False), 0.0, 0.0, 0.5), [(2, 3, 5, 16), (2, 1, 16)]),
    "ceit, stem": (lambda: ceit.Image2Tokens("k7s2+maxpool", True, 3, 8, 4), [(2, 9, 10, 3)]),
    "cvt": (
        lambda: cvt.Block(16, cvt.Attention(16, 2, "conv", 2, 0.0, 0.0), 24, cvt.QuickGELU, 0.0, 0.5),
        [(2, 3, 5, 16), (2, 1, 16)],
    ),
    "cvt, embedding": (lambda: cvt.token_embedding("conv", 0, 3, 8), [(2, 11, 9, 3)]),
    "cetnet": (lambda: lewin(False), [(2, 4, 5, 16)]),
    "cetnet, shifted": (lambda: lewin(True), [(2, 4, 5, 16)]),
    "embedding, stem": (lambda: ce.conv_embedding(0, 3, 16), [(2, 9, 10, 3)]),
    "embedding": (lambda: ce.conv_embedding(1, 8, 16), [(2, 5, 6, 8)]),
    "vitae, normal cell": (
        lambda: vitae.NormalCell(16, 2, 24, 4, "pre", True, 3, 0.0, 0.0, 0.5), [(2, 3, 4, 16), (2, 1, 16)],
    ),
    "vitae, reduction cell": (
        lambda: vitae.ReductionCell(3, 8, 16, 7, 4, (1, 2), "performer", 1, True, 0.0), [(2, 8, 12, 3)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_by_kernels(block, interpreter):
    """Block by block, by the kernels, in float32 against float64."""
    build, shapes = BLOCKS[block]
    module = randomise(build()).train().to(DEVICE)
    for i, parameter in enumerate(module.parameters()):
        width = parameter[0].numel() if parameter.ndim > 1 else 4
        parameter.data = random(*parameter.shape, seed=i) * width**-0.5
    inputs = [random(*shape, seed=i) for i, shape in enumerate(shapes)]
    fast = weft.fast(copy.deepcopy(module))
    assert type(fast) in PLAIN
    with switched(False):
        wanted = results(copy.deepcopy(module).double(), *(x.double() for x in inputs))
    check_equal(results(fast, *inputs), wanted, 2e-5)


@pytest.mark.parametrize("block", ["ceit", "cvt", "cetnet", "vitae, normal cell"])
def test_the_first_norm_adds_the_gradient_of_the_stream(block, references, monkeypatch):
    """What goes around the first norm of a block and what goes through it are not added in a pass of their own."""
    added, real = [], tape._add

    def add(table: Any, slot: int, grad: Tensor | None) -> None:
        if slot >= 0 and grad is not None and table[slot] is not None:
            added.append(grad.shape)
        real(table, slot, grad)

    monkeypatch.setattr(tape, "_add", add)
    build, shapes = BLOCKS[block]
    results(weft.fast(build().train()), *(random(*shape) for shape in shapes))
    expected = {"cvt": 2 * [shapes[-1]], "vitae, normal cell": [shapes[0]]}  # of q, k and v; of PCM
    assert added == expected.get(block, [])


@pytest.mark.parametrize("kind", ["basic", "bottleneck", "filter", "recurrent"])
def test_residual_blocks_and_vt_modules_by_kernels(kind, interpreter):
    tokens = [random(2, 5, 64)] if kind == "recurrent" else []
    if kind == "basic":
        module: Any = timm.models.resnet.BasicBlock(8, 16, 2, down(8, 16))
    elif kind == "bottleneck":
        module = timm.models.resnet.Bottleneck(16, 4)
    else:
        module = VisualTransformer(48, 48, 5, 64, tokenizer=kind, group_width=16, num_heads=2)
    module = randomise(module).train().to(DEVICE)
    chs = {"basic": 8, "bottleneck": 16}.get(kind, 48)
    x = random(2, chs, 3, 4).contiguous(memory_format=torch.channels_last)
    fast = weft.fast(copy.deepcopy(module))
    assert fused_in(fast)
    with switched(False):
        wanted = results(copy.deepcopy(module).double(), x.double(), *(t.double() for t in tokens))
    check_equal(results(fast, x, *tokens), wanted, 5e-5)


@every_switch
def test_the_copy_for_inference(name, args, references, monkeypatch):
    """`weft.fuse` folds norms away; what is left runs by the same forms, with a gradient and without one."""
    monkeypatch.setattr(
        FusedTokenBlock, "can_bypass_modules", lambda self: False
    )  # else CvT's blocks take the path of a CPU
    seen = count_steps(monkeypatch)
    model = make(name, **args).double()
    copied = weft.fuse(model)
    picture = torch.randn(2, 3, 40, 56, dtype=torch.float64)
    with torch.no_grad():
        wanted = model(picture)
        torch.testing.assert_close(copied(picture), wanted, rtol=1e-7, atol=1e-9)
        assert seen
        torch.testing.assert_close(weft.plain(copy.deepcopy(copied))(picture), wanted, rtol=1e-7, atol=1e-9)
    given = picture.clone().requires_grad_()
    found = copied(given)
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-7, atol=1e-9)
    again = picture.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(again).sum(), again)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), given)[0], slope, rtol=1e-5, atol=1e-6)


def test_gradients_without_some_parameters_and_outputs(references):
    """Frozen weights get none, and an output that nobody uses asks for none."""
    model = make("cvt_nano").double().train()
    for parameter in model.stages[1].parameters():
        parameter.requires_grad_(False)
    fast = weft.fast(copy.deepcopy(model))
    picture = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    check_equal(results(fast, picture), results(model, picture), 1e-10)


@pytest.mark.parametrize("name", NANO)
def test_autocast_is_as_near_to_the_truth_as_torchs(name, references):
    """Gradients in bfloat16 against float64: no farther away than those of the plain model, but for a little luck."""
    model = make(name).train()
    picture = torch.randn(2, 3, 32, 32)
    truth = results(copy.deepcopy(model).double(), picture.double())
    errors = []
    for each in (copy.deepcopy(model), weft.fast(copy.deepcopy(model))):
        with torch.autocast("cpu", torch.bfloat16):
            found = results(each, picture)
        keys = [key for key in truth if key.startswith("gradient of") and truth[key] is not None]
        off = sum((found[key].double() - truth[key]).square().sum() for key in keys)
        errors.append((off / sum(truth[key].square().sum() for key in keys)).sqrt().item())
    assert errors[1] < 1.5 * errors[0]


@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["train", "eval"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("ceit_nano", "vt_resnet_nano") else pytest.mark.slow) for n in NANO]
)
def test_whole_models_by_kernels(name, train, interpreter):
    """All kernels of a model one behind the other, in float32 against float64."""
    model = make(name, **SHALLOW[name]).train(train).to(DEVICE)
    picture = random(2, 3, 32, 32) if "cetnet" in name else random(2, 3, 16, 24)  # windows of more than two pixels
    with switched(False):
        wanted = results(copy.deepcopy(model).double(), picture.double())
    check_equal(results(weft.fast(model), picture), wanted, 1e-3)


def test_checkpointing(references):
    model = make("ceit_nano").double().train()
    fast = weft.fast(copy.deepcopy(model))
    picture = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    once = results(fast, picture)
    again = weft.fast(copy.deepcopy(model))
    again.set_grad_checkpointing()
    grads = {key for key in once if key.startswith("gradient") or key.startswith("output")}
    check_equal({k: v for k, v in results(again, picture).items() if k in grads}, {k: once[k] for k in grads}, 1e-12)


@pytest.mark.parametrize(("name", "args"), [("ceit_nano", {}), ("vitae_nano", dict(rc_attention="softmax"))])
def test_a_second_backward_pass(name, args, references):
    model = weft.fast(make(name, **args).double().train())
    loss = model(torch.randn(2, 3, 32, 32, dtype=torch.float64)).square().sum()
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * first[name])


def test_calls_by_name_and_empty_batches(references):
    model = weft.fast(make("cvt_nano"))
    block, x = model.stages[0].blocks[0], torch.randn(1, 4, 4, 32)
    with torch.no_grad():
        torch.testing.assert_close(block(x=x, cls=None)[0], block(x, None)[0], rtol=1e-4, atol=1e-5)
        assert model(torch.randn(0, 3, 32, 32)).shape == (0, 5)


def test_half_precision_and_autocast_give_torchs_types(references):
    model = weft.fast(make("cvt_nano").train())
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.randn(2, 3, 32, 32))
    assert logits.dtype == torch.bfloat16
    logits.float().sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert weft.fast(make("cvt_nano").bfloat16())(torch.randn(1, 3, 32, 32).bfloat16()).dtype == torch.bfloat16


# The swap -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NANO)
def test_back_and_forth(name):
    """Parameters, keys and classes; twice is once, and `plain` undoes it."""
    model = make(name)
    before = {key: (value.data_ptr(), type(value)) for key, value in model.state_dict(keep_vars=True).items()}
    classes = [type(module) for module in model.modules()]
    text = repr(model)
    assert weft.fast(model) is model
    swapped = [type(module) for module in model.modules()]
    assert "Fused" in repr(model)
    assert [type(m) for m in weft.fast(model).modules()] == swapped
    after = {key: (value.data_ptr(), type(value)) for key, value in model.state_dict(keep_vars=True).items()}
    assert after == before
    assert weft.plain(model) is model
    assert [type(module) for module in model.modules()] == classes
    assert repr(model) == text


def test_copies_and_pickles_stay_fused(references):
    model = weft.fast(make("cvt_nano"))
    picture = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        wanted = model(picture)
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stream, weights_only=False)):
            block = other.stages[0].blocks[0]
            assert isinstance(block, Fused)
            assert block.is_unmodified()
            torch.testing.assert_close(other(picture), wanted)
            block.attn.proj.register_forward_hook(lambda *_: None)  # the copy's own
            assert not block.is_unmodified()
    assert model.stages[0].blocks[0].is_unmodified()


def test_every_form_is_a_subclass_of_its_class():
    import_forms()
    assert len(FORMS) > 15
    for plain, form in FORMS.items():
        assert issubclass(form, plain)
        assert issubclass(form, Fused)
        family = {ceit.Block: "CeiT", cvt.Block: "CvT"}.get(plain, "")
        assert form.__name__ == f"Fused{family}{plain.__name__}"
    assert len({form.__name__ for form in FORMS.values()}) == len(FORMS)


def test_what_is_no_model_is_refused():
    for function in (weft.fast, weft.plain):
        with pytest.raises(weft.WeftError, match="takes a model"):
            function("cvt_13")


# It steps aside -----------------------------------------------------------------------------------------------------


def count_steps(monkeypatch) -> list[str]:
    """The names of blocks that were one step for torch, as they come."""
    seen: list[str] = []
    real = swap.run_as_one_node

    def run_as_one_node(steps, *inputs):
        seen.append(type(steps.__self__).__name__)
        return real(steps, *inputs)

    monkeypatch.setattr(swap, "run_as_one_node", run_as_one_node)
    return seen


class Odd(cvt.Block):
    """A class of somebody else."""


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


CHANGES = {
    "a hook": lambda block: block.mlp.fc1.register_forward_hook(lambda *_: None),
    "a hook before": lambda block: block.attn.proj_q.register_forward_pre_hook(lambda *_: None),
    "a hook on the way back": lambda block: block.norm2.register_full_backward_hook(lambda *_: None),
    "another activation": lambda block: setattr(block.mlp, "act", nn.ReLU()),
    "another norm": lambda block: setattr(block, "norm1", nn.Identity()),
    "another forward": lambda block: setattr(block.attn.proj, "forward", lambda x: x),
    "a subclass": lambda block: setattr(block, "__class__", Odd),
    "pruning": lambda block: prune.l1_unstructured(block.mlp.fc2, "weight", 1),
    "a parametrisation": lambda block: parametrize.register_parametrization(block.mlp.fc2, "weight", Double()),
    "an averaging norm": lambda block: setattr(block.attn.conv_proj_k.bn, "momentum", None),
    "dropout": lambda block: setattr(block.mlp.drop1, "p", 0.5),
}


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_block_is_plain(change, late, references, monkeypatch):
    """It computes what its modules say, whether it was changed before `weft.fast` or after it."""
    plain = make("cvt_nano").train()
    fast = copy.deepcopy(plain)
    CHANGES[change](plain.stages[1].blocks[0])
    if late:
        weft.fast(fast)
        CHANGES[change](fast.stages[1].blocks[0])
    else:
        CHANGES[change](fast.stages[1].blocks[0])
        weft.fast(fast)
    seen = count_steps(monkeypatch)
    picture = torch.randn(2, 3, 32, 32)
    torch.manual_seed(0)
    found = fast(picture)
    assert seen.count("FusedCvTBlock") == 7  # of eight
    torch.manual_seed(0)
    torch.testing.assert_close(found, plain(picture), rtol=1e-4, atol=1e-4)


class Other:
    """A mixin that makes a module compute something else than its class."""

    def forward(self, *args: Any) -> Any:
        found = super().forward(*args)  # pyright: ignore[reportAttributeAccessIssue]
        return tuple(1.5 * y for y in found) if isinstance(found, tuple) else 1.5 * found


def places(model: nn.Module) -> dict[str, nn.Module]:
    """One module without children for each place in each kind of block."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        if not list(module.children()) and not isinstance(module, nn.Dropout | nn.Identity):
            found.setdefault(kind, module)
    return found


@pytest.mark.parametrize("name", NANO)
def test_a_subclass_anywhere_is_called(name, references):
    """In every place of every block, before `weft.fast` and after it."""
    picture = torch.randn(1, 3, 32, 32)
    count = 0
    for place in places(make(name, **SHALLOW[name])):
        plain = make(name, **SHALLOW[name])
        module = places(plain)[place]
        if type(module).__name__ in ("StochasticDepth", "DropPath", "WindowMask", "RelPosBias", "PerformerAttention"):
            continue  # which are not called, here or in eval mode
        late = weft.fast(copy.deepcopy(plain))
        module.__class__ = type("Odd", (Other, type(module)), {})
        early = weft.fast(copy.deepcopy(plain))
        there = places(late)[place]
        there.__class__ = type("Odd", (Other, type(there)), {})
        with torch.no_grad():
            wanted = plain(picture)
            for fast in (early, late):
                torch.testing.assert_close(fast(picture), wanted, rtol=1e-3, atol=1e-4, msg=place)
        count += 1
    assert count > 15


@pytest.mark.parametrize("name", NANO)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_dropouts_of_other_classes_are_called(name, late, references):
    """In eval mode, too, where a usual one is nothing."""

    def alter(model: nn.Module) -> nn.Module:
        for module in model.modules():
            if type(module) is nn.Dropout:
                module.__class__ = type("Odd", (Other, nn.Dropout), {})
        return model

    model = make(name)
    fast = alter(weft.fast(copy.deepcopy(model))) if late else weft.fast(alter(copy.deepcopy(model)))
    picture = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(fast(picture), alter(model)(picture), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NANO)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("change", ["padding", "statistics", "synchronised"])
def test_changed_attributes_are_noticed(name, late, change, references):
    def alter(model: nn.Module) -> nn.Module:
        for module in model.modules():
            if change == "padding" and isinstance(module, nn.Conv2d):
                module.padding_mode = "circular"
            if change == "statistics" and isinstance(module, nn.BatchNorm2d):
                module.track_running_stats = False
        if change == "synchronised":
            for module in list(model.modules()):
                for key, child in list(module.named_children()):
                    if type(child) is nn.BatchNorm2d:
                        setattr(module, key, nn.GroupNorm(1, child.num_features))
        return model

    model = make(name).train()
    fast = alter(weft.fast(copy.deepcopy(model))) if late else weft.fast(alter(copy.deepcopy(model)))
    picture = torch.randn(2, 3, 32, 32)
    plain = alter(model)
    wanted, found = results(plain, picture), results(fast, picture)
    check_equal(found, wanted, 1e-3)


def test_hooks_on_blocks_do_not_disturb(references, monkeypatch):
    model = weft.fast(make("cvt_nano"))
    maps: list[Tensor] = []
    model.stages[0].blocks[0].register_forward_hook(lambda module, args, output: maps.append(output[0]))
    seen = count_steps(monkeypatch)
    model(torch.randn(1, 3, 32, 32))
    assert seen.count("FusedCvTBlock") == 8
    assert maps[0].shape == (1, 16, 16, 32)


@pytest.mark.parametrize("name", NANO)
def test_hooks_fire_as_without_forms(name, references):
    model = weft.fast(make(name))
    skip = (nn.Identity, nn.Dropout)
    leaves = {n: m for n, m in model.named_modules() if not list(m.children()) and not isinstance(m, skip)}
    fired: set[str] = set()
    for leaf, module in leaves.items():
        module.register_forward_hook(lambda *_, leaf=leaf: fired.add(leaf))
    seen = []
    for on in (True, False):
        fired.clear()
        with switched(on), torch.no_grad():
            model(torch.randn(1, 3, 32, 32))
        seen.append(set(fired))
    assert seen[0] == seen[1]
    assert len(seen[0]) > 20


@pytest.mark.parametrize("name", NANO)
def test_some_norms_frozen(name, references):
    """Every second BatchNorm in eval mode, as in fine-tuning."""
    model = make(name).double().train()
    for i, module in enumerate(m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        module.train(i % 2 == 0)
    fast = weft.fast(copy.deepcopy(model))
    picture = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    check_equal(results(fast, picture), results(model, picture), 1e-6)


def test_plain_where_kernels_cannot_run(monkeypatch):
    """On a CPU, with kernels switched off, under torch.func, and for tracers."""
    model = weft.fast(make("cvt_nano"))
    seen = count_steps(monkeypatch)
    picture = torch.randn(1, 3, 32, 32)
    wanted = model(picture)
    monkeypatch.setattr(switch, "_usable", lambda x: switch._on and not torch.jit.is_tracing())
    monkeypatch.setattr(op, "interpreted", lambda: False)
    with switched(False):
        torch.testing.assert_close(model(picture), wanted)
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    loss = lambda p: torch.func.functional_call(model, p, (picture,)).sum()  # noqa: E731
    assert torch.func.grad(loss)(parameters).keys() == parameters.keys()
    torch.testing.assert_close(torch.jit.trace(model, picture, check_trace=False)(picture), wanted)
    program = torch.export.export(model, (picture,)).module()
    torch.testing.assert_close(program(picture), wanted)
    assert not seen
    model(picture)
    assert seen


def test_small_maps_stay_plain_unless_replayed(references, monkeypatch):
    """By their size and nothing else."""
    monkeypatch.setattr(FusedNormalCell, "MIN_ELEMENTS", 128 * 4 * 16)
    cell = weft.fast(randomise(vitae.NormalCell(16, 2, 24, 4, "pre", True, 3, 0.0, 0.0, 0.0)))
    seen = count_steps(monkeypatch)
    with torch.no_grad():
        for replayed, rows, fused in ((False, 2, 0), (True, 2, 1), (False, 128, 1)):
            swap.replaying.set(replayed)
            seen.clear()
            cell(torch.randn(1, rows, 4, 16), None)
            assert seen.count("FusedNormalCell") == fused


def test_torchscript_compiles_the_plain_form():
    model = weft.fast(make("cetnet_nano"))
    picture = torch.randn(1, 3, 32, 32)
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(picture), weft.plain(model)(picture))


def test_a_dry_run_changes_nothing(references):
    """Neither statistics, nor random numbers, nor what a graph that waits for its backward pass has saved."""
    model = weft.fast(make("vitae_nano").train())
    loss, larger = model(torch.randn(2, 3, 32, 32)).sum(), torch.randn(2, 3, 48, 48)
    before, draws = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    dry_run(model, lambda x: vitae.ViTAE.forward(model, x), larger)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), draws)
    assert all(parameter.grad is None for parameter in model.parameters())
    loss.backward()
    assert is_unhooked(model)
    model.blocks[0].register_forward_hook(lambda *_: None)
    assert not is_unhooked(model)
