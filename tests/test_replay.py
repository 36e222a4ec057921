"""`weft.replay`: the same outputs, from a recording where there is a GPU."""

import pytest
import torch

import weft


def test_without_a_gpu_it_is_the_model():
    model = weft.create_model("ceit_nano").eval()
    fast = weft.replay(model)
    picture = torch.randn(2, 3, 32, 32)
    assert not fast.training
    with torch.no_grad():
        assert torch.equal(fast(picture), model(picture))
    assert fast(picture).requires_grad  # with gradients as ever


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
