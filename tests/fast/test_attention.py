"""Attention in a tape: the engine that torch would take, called as its operators want it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.helpers.kernel_checks import DEVICE, check_gradients, check_values, random
from weft.fast.tape import attention
from weft.fast.tape.attention import CrossAttention, CudnnEngine, FlashEngine, PlainEngine, SelfAttention
from weft.fast.tape.tape import apply_operation

HEADS, WIDTH, SCALE = 2, 16, 0.2
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Head by head, in the type at hand."""
    parts = zip(*(x.chunk(HEADS, dim=2) for x in (q, k, v)), strict=True)
    return torch.cat([(qh @ kh.transpose(1, 2) * SCALE).softmax(-1) @ vh for qh, kh, vh in parts], dim=2)


def reference_self(qkv: Tensor) -> Tensor:
    return reference(*qkv.chunk(3, dim=2))


def cross(*tensors: Tensor) -> Tensor:
    return apply_operation(CrossAttention, *tensors, HEADS, SCALE)


def of_itself(qkv: Tensor) -> Tensor:
    return apply_operation(SelfAttention, qkv, HEADS, SCALE)


def check_both(dtype: torch.dtype, width: int = WIDTH) -> None:
    """Values and gradients of attention to oneself and to others."""
    qkv = random(3, 11, 3 * HEADS * width, dtype=dtype)
    others = [random(3, count, HEADS * width, dtype=dtype, seed=count) for count in (11, 5, 5)]
    for function, right, inputs in ((of_itself, reference_self, [qkv]), (cross, reference, others)):
        check_values(function, right, *inputs)
        check_gradients(function, right, *inputs)


def test_the_engine_of_torchs_choice(monkeypatch):
    class OnGpu:
        is_cuda = True

        def detach(self) -> Tensor:
            return torch.zeros(1, 2, 3, 8)

    def choose(backend: SDPBackend) -> Any:
        def choice(q: Tensor, k: Tensor, v: Tensor, scale: float) -> int:
            assert all(x.requires_grad for x in (q, k, v))
            assert torch.is_grad_enabled()
            return backend.value

        monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
        with torch.no_grad():  # as a tape has it
            return attention.engine_for(OnGpu(), OnGpu(), OnGpu(), SCALE)  # pyright: ignore[reportArgumentType]

    assert choose(SDPBackend.CUDNN_ATTENTION) is CudnnEngine
    assert choose(SDPBackend.FLASH_ATTENTION) is FlashEngine
    assert choose(SDPBackend.EFFICIENT_ATTENTION) is choose(SDPBackend.MATH) is PlainEngine


def test_on_a_cpu_it_is_plain():
    """Also where torch's choice has the number of flash attention."""
    x = torch.randn(1, 2, 4, 8)
    assert torch._fused_sdp_choice(x, x, x) == SDPBackend.FLASH_ATTENTION.value
    assert attention.engine_for(x, x, x, SCALE) is PlainEngine


@pytest.fixture
def operators():
    """Torch's operators for GPUs with kernels for the CPU: torch checks and converts arguments as their schemas say."""
    library = torch.library.Library("aten", "IMPL")

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Any:
        assert scale is not None
        logits = q @ k.transpose(-1, -2) * scale
        # What these kernels give lies in memory as q does: heads behind tokens.
        y = (logits.softmax(-1) @ v).transpose(1, 2).contiguous().transpose(1, 2)
        seed, offset = torch.tensor(3), torch.tensor(4)
        return y, logits.logsumexp(-1), None, None, q.shape[2], k.shape[2], seed, offset, torch.empty(0)

    def gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, scale: Any) -> Any:
        """From what the forward pass has kept, and nothing else."""
        weights = (q @ k.transpose(-1, -2) * scale - sums.unsqueeze(-1)).exp()
        slopes = weights * (grad @ v.transpose(-1, -2) - (grad * y).sum(-1, keepdim=True)) * scale
        found = slopes @ k, slopes.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad
        return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in found)

    def cudnn(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
        assert (attn_bias, compute_log_sumexp, dropout_p, is_causal, debug) == (None, True, 0.0, False, False)
        return attend(q, k, v, scale)

    def cudnn_backward(
        grad, q, k, v, y, sums, seed, offset, attn_bias, cum_q, cum_k, max_q, max_k, p, causal, *, scale=None
    ):
        assert (seed.item(), offset.item(), attn_bias, cum_q, cum_k, p, causal) == (3, 4, None, None, None, 0.0, False)
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        return gradients(grad, q, k, v, y, sums, scale)

    def flash(q, k, v, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
        assert (dropout_p, is_causal, debug) == (0.0, False, False)
        return attend(q, k, v, scale)

    def flash_backward(
        grad, q, k, v, y, sums, cum_q, cum_k, max_q, max_k, p, causal, seed, offset, *, scale=None
    ):  # fmt: skip
        assert (seed.item(), offset.item(), cum_q, cum_k, p, causal) == (3, 4, None, None, 0.0, False)
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        return gradients(grad, q, k, v, y, sums, scale)

    for name, kernel in dict(
        cudnn=cudnn, cudnn_backward=cudnn_backward, flash=flash, flash_backward=flash_backward
    ).items():
        kind, _, way = name.partition("_")
        library.impl(f"_scaled_dot_product_{kind}_attention" + (way and f"_{way}"), kernel, "CPU")
    yield
    library._destroy()


@pytest.mark.skipif(DEVICE != "cpu", reason="these stand in for a GPU's")
@pytest.mark.parametrize("engine", [CudnnEngine, FlashEngine, PlainEngine])
def test_engines_call_their_operators(engine, operators, monkeypatch):
    monkeypatch.setattr(attention, "engine_for", lambda *_: engine)
    check_both(torch.float32)


@pytest.mark.skipif(DEVICE != "cpu", reason="these stand in for a GPU's")
def test_gradients_of_attention_are_joined_in_one_pass(operators, monkeypatch):
    """What the engine gives is copied once, as whole rows, and by nothing else."""
    monkeypatch.setattr(attention, "engine_for", lambda *_: CudnnEngine)
    qkv = torch.randn(2, 7, 3 * HEADS * WIDTH, requires_grad=True)
    y = of_itself(qkv)
    copied: list[list[Tensor]] = []
    real = torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors, dim: copied.append(tensors) or real(tensors, dim=dim))
    given: list[Tensor] = []
    backward = CudnnEngine.backward
    monkeypatch.setattr(
        CudnnEngine, "backward", staticmethod(lambda *args: given.extend(found := backward(*args)) or found)
    )
    y.backward(torch.randn_like(y))
    ((q, k, v),) = copied
    assert [x.data_ptr() for x in (q, k, v)] == [x.data_ptr() for x in given]
    assert all(x.is_contiguous() for x in (q, k, v))


@needs_gpu
@pytest.mark.parametrize("backend", ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_engines_on_a_gpu(backend, dtype):
    x = random(1, HEADS, 11, 64, dtype=dtype)
    with sdpa_kernel(getattr(SDPBackend, backend)):
        chosen = attention.engine_for(x, x, x, SCALE)
        if backend == "CUDNN_ATTENTION" and chosen is not CudnnEngine:
            pytest.skip("cudnn has no attention for this GPU")
        assert chosen is attention.ENGINES.get(getattr(SDPBackend, backend).value, PlainEngine)
        check_both(dtype, 64)
