"""Views of every family: they compute what the native model computes, and a wrong one, or a
family that is not read, is refused in words."""

import pytest
import timm
import torch
import torchvision
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.testing import assert_close

import seecause as sc
from seecause.errors import UnsupportedModel, ViewMismatch
from seecause.loading import wrap
from seecause.models.parts import find_parts
from tests.families.native import HALF, SIZE, matrix
from tests.helpers import hooks, noise, view
from tests.tiny import FAMILIES, pictures, scramble, tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_a_view_answers_like_its_native_model_and_leaves_nothing_on_it(family):
    native = tiny(family)
    images = pictures(native)
    expected = native.forward(images)
    before = hooks(native.module)
    model = view(native)
    assert_close(model(images), expected, atol=1e-10, rtol=0)
    assert_close(model.native(images), expected, atol=1e-10, rtol=0)
    assert hooks(native.module) == before
    assert not any(p.requires_grad for p in native.module.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_views_hold_in_single_precision(family):
    view(tiny(family, dtype=torch.float32))


def test_nan_weights_are_refused():
    native = tiny("hf_vit")
    native.module.classifier.bias[2] = torch.nan
    with pytest.raises(ViewMismatch, match="not finite"):
        view(native)


def _swin_backbone() -> nn.Module:
    import transformers

    return transformers.SwinModel(
        transformers.SwinConfig(
            image_size=32, embed_dim=12, depths=[1, 1], num_heads=[2, 2], window_size=4
        )
    )


def _open_clip_with(**vision: object) -> nn.Module:
    from open_clip.model import CLIP

    tower = dict(width=24, head_width=8, patch_size=8, image_size=32)
    return CLIP(
        16, {**tower, **vision}, dict(context_length=8, vocab_size=64, width=16, heads=2, layers=1)
    )


REFUSED = {
    "timm VisionTransformerRelPos": lambda: timm.create_model(
        "vit_relpos_small_patch16_224", img_size=32, embed_dim=24, depth=1, num_heads=3
    ),
    "transformers SwinModel": _swin_backbone,
    "torchvision MaxVit": lambda: torchvision.models.get_model("maxvit_t"),
    "open_clip ModifiedResNet": lambda: _open_clip_with(layers=(1, 1, 1, 1), width=8),
    "open_clip VisionTransformer": lambda: _open_clip_with(layers=1, attentional_pool=True),
    "torch.nn.modules.linear.Linear": lambda: nn.Linear(3, 3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_exactly_is_refused_by_name(name):
    if name.startswith("open_clip"):
        pytest.importorskip("open_clip")
    with pytest.raises(UnsupportedModel, match=f"^{name}"):
        wrap(REFUSED[name](), **HALF, size=32)


def _backbone(kind: str) -> nn.Module:
    import transformers as hf

    small = dict(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=48,
        patch_size=8,
        image_size=32,
    )
    if kind == "timm":
        return timm.models.VisionTransformer(
            img_size=SIZE,
            patch_size=8,
            embed_dim=24,
            depth=2,
            num_heads=3,
            num_classes=0,
            reg_tokens=2,
        )
    if kind == "dinov2":
        return hf.Dinov2WithRegistersModel(
            hf.Dinov2WithRegistersConfig(**small, num_register_tokens=2)
        )
    return hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**small, num_register_tokens=2))


@pytest.mark.parametrize("kind", ["timm", "dinov2", "dinov3"])
class TestBackbones:
    """A backbone without a classifier says what it needs, and reads its own tokens as asked."""

    def test_it_asks_for_a_head(self, kind):
        with pytest.raises(UnsupportedModel, match="pass head="):
            wrap(_backbone(kind), **HALF, size=SIZE)

    @pytest.mark.parametrize("pool", ["cls", "mean", "cls+mean"])
    @pytest.mark.parametrize("as_module", [False, True])
    def test_it_pools_its_own_tokens(self, kind, pool, as_module):
        backbone = scramble(_backbone(kind)).double()
        weight = matrix(48 if pool == "cls+mean" else 24)
        head: nn.Module | torch.Tensor = weight
        if as_module:
            head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            head.weight.data.copy_(weight)
        model = wrap(backbone, **HALF, size=SIZE, head=head, pool=pool)
        images = noise(2, 3, *SIZE)
        with torch.no_grad():
            tokens = (
                backbone.forward_features(images)
                if kind == "timm"
                else backbone(images).last_hidden_state
            )
        parts = {"cls": tokens[:, 0], "mean": tokens[:, 3:].mean(dim=1)}
        pooled = torch.cat([parts[part] for part in pool.split("+")], dim=-1)
        assert_close(model(images), pooled @ weight.double().T, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("family", "free"),
    [("hf_vit", False), ("hf_dinov2", True), ("hf_clip_classifier", True), ("hf_dinov3", True)],
)
def test_other_sizes_are_taken_where_the_library_takes_them(family, free):
    native = tiny(family)
    model = view(native)
    assert model.fixed_size is not free
    if free:
        images = noise(1, 3, 40, 24)
        assert model.check(images).grid == (5, 3)
        assert_close(model(images), native.forward(images), atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("xcit_nano_12_p8_224", "timm Xcit is not supported: its attention is between channels"),
        ("mvitv2_tiny", "timm MultiScaleVit is not supported: its queries and keys are pooled"),
        ("nest_tiny", "timm Nest is not supported: its attention is within blocks"),
        ("sequencer2d_s", "timm Sequencer2d is not supported: no view of this class is written"),
    ],
)
def test_what_is_not_read_is_refused_by_name(name, words):
    with torch.device("meta"):
        module = timm.create_model(name)
    with pytest.raises(UnsupportedModel, match=words):
        find_parts(module)


def test_a_class_derived_from_one_of_timm_is_read_as_that_and_compared():
    class Mine(VisionTransformer):
        pass

    class Doubled(VisionTransformer):
        def forward_features(self, *args, **options):
            return 2 * super().forward_features(*args, **options)

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    native = scramble(Mine(**sizes, num_classes=5))
    images = torch.randn(1, 3, 32, 32)
    assert_close(sc.wrap(native, **HALF)(images), native(images))
    with pytest.raises(ViewMismatch):
        sc.wrap(scramble(Doubled(**sizes, num_classes=5)), **HALF)
