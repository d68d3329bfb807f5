"""The two towers: which backbones they take, what of them learns, and runs on selected tokens
alone."""

import pytest
import timm
import torch
from torch.testing import assert_close

from seecause.errors import UnsupportedModel
from seecause.faithful import IFAM, stages
from seecause.faithful.stages import packed_places, visible_tokens
from tests.faithful.nets import SQUARE, dinov2_backbone, random_images, timm_backbone, tiny_net
from tests.families.staged import timm_convnext

EXACT = {"atol": 1e-10, "rtol": 0}


TOKENS = (  # of each, all that learns in stage 1
    {"class_token", "encoder.pos_embedding"},
    {"embeddings.cls_token", "embeddings.position_embeddings"},
    {"embeddings.cls_token", "embeddings.position_embeddings"},
    {"embeddings.cls_token", "embeddings.register_tokens"},
    {"cls_token", "pos_embed"},
)


def test_every_backbone_with_a_class_token_works():
    import torchvision
    import transformers as hf

    square, shape = random_images(1, size=(32, 32)), {"image_size": 32, "patch_size": 8}
    named = {"num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 24}
    small = {**shape, **named, "hidden_size": 24}
    backbones = [
        torchvision.models.VisionTransformer(
            **shape, num_layers=2, num_heads=3, hidden_dim=24, mlp_dim=48, num_classes=6
        ),
        hf.ViTForImageClassification(hf.ViTConfig(**small)),
        hf.ViTModel(hf.ViTConfig(**small)),
        hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**small, num_register_tokens=2)),
        timm.models.VisionTransformer(**SQUARE, patch_drop_rate=0.5, drop_path_rate=0.2),
    ]
    for backbone, tokens in zip(backbones, TOKENS, strict=True):
        net = tiny_net(backbone, parts=2, size=(32, 32)).train()
        native = net.stage1.tower.native.named_parameters()
        assert {name for name, value in native if value.requires_grad} == tokens
        net(square).logits.sum().backward()
        untouched = [
            name
            for name, p in net.named_parameters()
            if p.requires_grad and p.grad is None and not name.startswith("stage1")
        ]
        assert not untouched, (  # they would never learn
            f"{type(backbone).__name__}: {untouched}"
        )


def test_a_backbones_own_dropout_is_no_part_of_the_method():
    """Stages are read alike in every pass, also while the network learns."""
    backbone = timm.models.VisionTransformer(**SQUARE, proj_drop_rate=0.5, drop_path_rate=0.5)
    net = tiny_net(backbone, parts=2, size=(32, 32)).train()
    images = random_images(1, size=(32, 32))
    first, again = (net.stage1.tower.features(images) for _ in range(2))
    assert net.training and torch.equal(first, again)


@pytest.mark.parametrize("few", [0, 512], ids=["many rows", "few rows"])
@torch.no_grad()
def test_rows_that_fill_up_a_packed_run_change_nothing(few, monkeypatch):
    monkeypatch.setattr(stages, "_FEW", few)
    net, images = tiny_net(), random_images(4)
    mask = net(images).mask
    mask[0] = False
    stage = net.stage2
    assert stage is not None
    expected = net(images, mask=mask, packed=False).logits
    places, sizes, total = packed_places(visible_tokens(mask.flatten(1), stage.prefix))
    for spare in (1, 7, len(places) - int(total)):
        filled = stage.filled(images, places[: int(total) + spare], sizes)
        assert_close(filled, expected, atol=1e-10, rtol=0)


def dinov3_backbone():
    """Its keys are turned by where they are."""
    import transformers as hf

    config = hf.DINOv3ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=24,
        patch_size=8, image_size=40, num_register_tokens=2,
    )  # fmt: skip
    return hf.DINOv3ViTModel(config)


@pytest.mark.parametrize("backbone", [timm_backbone, dinov2_backbone, dinov3_backbone])
@torch.no_grad()
def test_packed_equals_masked_whatever_else_is_in_the_batch(backbone):
    size = (40, 48) if backbone is timm_backbone else (40, 40)
    net, images = tiny_net(backbone(), size=size), random_images(4, size=size)
    mask = net(images).mask
    mask[0], mask[1] = False, True
    masked = net(images, mask=mask, packed=False).logits
    assert_close(net(images, mask=mask).logits, masked, **EXACT)
    for i in range(4):
        assert_close(net(images[i : i + 1], mask=mask[i : i + 1]).logits[0], masked[i], **EXACT)
    assert_close(net.float()(images.float(), mask=mask).logits, masked.float(), atol=1e-5, rtol=0)


def test_a_new_network_starts_as_the_paper_has_it():
    """Prototypes as a convolution's weights, classifiers small, norms that change nothing."""
    torch.manual_seed(0)
    net = IFAM(timm_backbone(), 20, 300)
    bound = 24**-0.5
    low, high = net.stage1.prototypes.aminmax()
    assert -bound <= low < -0.9 * bound and 0.9 * bound < high <= bound
    for head in (net.stage1.classifier, net.stage2.head):
        assert abs(head.weight.std() - 0.02) < 1e-3 and head.bias is None
        assert head.weight.shape == (300, 24)
    for norm in (net.stage1.modulation, net.stage2.fc_norm):
        assert (norm.weight == 1).all() and (norm.bias == 0).all()
    assert not torch.equal(net.stage1.classifier.weight, net.stage2.head.weight)


def test_a_backbone_is_copied_and_learns_whatever_it_was():
    backbone = timm_backbone().requires_grad_(False)
    net = IFAM(backbone, 2, 2, freeze="none")
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert not any(parameter.requires_grad for parameter in backbone.parameters())
    natives = (backbone, net.stage1.tower.native, net.stage2.tower.native)
    assert len({native.pos_embed.data_ptr() for native in natives}) == 3


def test_backbones_that_cannot_be_masked_are_refused():
    with pytest.raises(UnsupportedModel, match="no tokens"):
        IFAM(timm_convnext().module, 2, 2)
