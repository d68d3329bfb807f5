"""What only a GPU runs: the kernel for sequences of different lengths, and half precision there.
Skipped elsewhere."""

import pytest
import torch
from torch.testing import assert_close

from seecause.faithful import intervene, stages
from seecause.faithful.parts import Noise
from tests.faithful.nets import random_images, tiny_net
from tests.helpers import without_graphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@torch.no_grad()
def test_packed_equals_masked_on_a_gpu():
    net, images = tiny_net(), random_images(4)
    mask = net(images).mask
    mask[0] = False
    expected = net(images, mask=mask).logits
    for dtype, within in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        net, images = net.to("cuda", dtype), images.to("cuda", dtype)
        packed, masked = (
            net(images, mask=mask.cuda(), packed=packed).logits.double().cpu()
            for packed in (True, False)
        )
        assert_close(packed, expected, atol=within, rtol=0)
        assert_close(packed, masked, atol=within, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("few", [512, 0], ids=["at once", "one after the other"])
def test_both_stages_by_graph_have_the_bits_of_a_plain_run(monkeypatch, few):
    monkeypatch.setattr(stages, "_FEW", few)
    net = tiny_net().to("cuda", torch.bfloat16)

    def check(images):
        got = net(images)
        with without_graphs():
            plain = net(images)
        assert torch.equal(got.logits, plain.logits) and torch.equal(got.maps, plain.maps)
        return got.logits

    given = [random_images(4, seed=seed).to("cuda", torch.bfloat16) for seed in (0, 1, 0, 1, 0, 1)]
    before = [check(images) for images in given]
    owners = (net.graphs, net.stage2.graphs)
    held = [graph for owner in owners for graph in owner.memo.get("graphs", {}).values()]
    assert sum(call.graph is not None for call in held) >= (1 if few else 2)
    assert bool(net.stage2.graphs.memo.get("graphs")) == (not few)
    with intervene(net, drop_parts=[0]):
        dropped = [check(images) for images in given]
    assert not torch.equal(dropped[-1], before[-1])
    assert torch.equal(check(given[-1]), before[-1])


def test_packed_training_has_the_masked_gradient_on_a_gpu():
    images, draws = random_images(4).float().cuda(), Noise(0, 0, torch.arange(4).cuda())
    slopes = []
    for packed in (True, False):
        net = tiny_net(gradient="none").float().cuda().train()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = net(images, noise=draws, packed=packed).logits
        logits.float().square().sum().backward()
        slopes.append(net.stage2.tower.native.blocks[0].attn.qkv.weight.grad)
    assert_close(slopes[0], slopes[1], atol=5e-2 * slopes[1].abs().max().item(), rtol=0)
