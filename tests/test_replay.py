"""`weft.replay`: the same outputs, from a recording where there is a GPU."""

import pytest
import torch

import weft
from weft.models.replay import circumstances, writable_copy


def test_without_a_gpu_it_is_the_model():
    model = weft.create_model("ceit_nano").eval()
    fast = weft.replay(model)
    picture = torch.randn(2, 3, 32, 32)
    assert not fast.training
    with torch.no_grad():
        assert torch.equal(fast(picture), model(picture))
    assert fast(picture).requires_grad  # with gradients as ever


def test_a_copy_made_in_inference_mode_can_be_written_outside():
    with torch.inference_mode():
        x = torch.ones(2)
        given = writable_copy(x)
    with torch.no_grad():
        given.copy_(torch.zeros(2))
    with torch.inference_mode():
        given.copy_(x)
    assert given.tolist() == [1, 1]


def test_circumstances_that_need_a_recording_of_their_own():
    x, found = torch.ones(2, 3), []
    found.append(circumstances(x))
    found.append(circumstances(x.double()))
    found.append(circumstances(torch.ones(3, 2).T))
    with torch.inference_mode():
        found.append(circumstances(x))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            found.append(circumstances(x))
    assert len(set(found)) == 6
    assert circumstances(torch.zeros(2, 3)) == found[0]


def test_mistakes():
    with pytest.raises(weft.WeftError, match="takes a model, not str"):
        weft.replay("cvt_13")  # pyright: ignore[reportArgumentType]
    with pytest.raises(weft.WeftError, match="most=0"):
        weft.replay(torch.nn.Identity(), most=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replays_equal_the_model_for_every_shape():
    model = weft.fuse(weft.create_model("cvt_nano")).cuda()
    fast = weft.replay(model, most=2)
    with torch.inference_mode():
        for batch, side in [(2, 32), (3, 48), (2, 32), (1, 64), (2, 32)]:
            pictures = torch.randn(batch, 3, side, side, device="cuda")
            found = fast(pictures)
            torch.testing.assert_close(found, model(pictures))
            kept = found.clone()
            fast(torch.randn_like(pictures))
            assert torch.equal(found, kept)  # a later call leaves earlier results alone
    assert len(fast._recordings) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_with_and_without_inference_mode():
    model = weft.create_model("cvt_nano").eval().cuda()
    fast, pictures = weft.replay(model), torch.randn(2, 3, 32, 32, device="cuda")
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(fast(pictures), model(pictures))
    model.train()
    with torch.no_grad():
        fast(pictures)
    assert len(fast._recordings) == 2  # none in training mode
