"""Heads for backbones without a classifier, and zero-shot heads: classes come from a native text
tower, once."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import seecause as sc
from seecause.errors import BadOption, UnsupportedModel
from seecause.loading import imagenet_prompts, load, wrap
from seecause.models.parts import CosineHead, UnitLinear, text_matrix
from tests.families.native import CLASSES, HALF, tokenize
from tests.helpers import noise, view
from tests.tiny import FAMILIES, tiny

ZERO_SHOT = [
    family
    for family in FAMILIES
    if family in ("hf_clip", "hf_siglip", "open_clip_clip", "open_clip_timm")
]


def test_templates_are_averaged_on_the_sphere_whatever_the_batch():
    codes = {
        f"{name} {letter}": noise(6, seed=seed)
        for seed, (name, letter) in enumerate((n, x) for n in "pqr" for x in "ab")
    }
    rows = text_matrix(
        lambda prompts: torch.stack([codes[p] for p in prompts]), "pqr", ["{} a", "{} b"], batch=4
    )
    for row, name in zip(rows, "pqr", strict=True):
        mean = (F.normalize(codes[f"{name} a"], dim=0) + F.normalize(codes[f"{name} b"], dim=0)) / 2
        assert_close(row, mean / mean.norm())


@pytest.mark.parametrize("family", ZERO_SHOT)
def test_sigmoid_answers_come_with_a_bias(family):
    model = view(tiny(family))
    assert model.sigmoid is (family in ("hf_siglip", "open_clip_timm"))


@pytest.mark.parametrize("family", ZERO_SHOT)
@pytest.mark.parametrize("given", [{}, {"classes": CLASSES}, {"tokenizer": tokenize}])
def test_without_classes_and_tokenizer_it_says_what_to_pass(family, given):
    with pytest.raises(UnsupportedModel, match=r"classes=.*tokenizer="):
        wrap(tiny(family).module, **HALF, size=(32, 48), **given)


def test_a_transformers_tokenizer_pads_to_the_full_length():
    native = tiny("hf_siglip")
    seen = {}
    text_tower = native.module.text_model
    with_ids = text_tower.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    model = wrap(native.module, **{**native.options, "tokenizer": _word_tokenizer()})
    with_ids.remove()
    assert seen["input_ids"].shape == (len(CLASSES), 8)
    assert model.n_classes == len(CLASSES)


def test_a_template_without_a_place_for_the_name_is_refused():
    native = tiny("hf_clip")
    with pytest.raises(BadOption, match="where the class name goes"):
        wrap(native.module, **{**native.options, "templates": ["a photo"]})


def _word_tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = [*" ".join(CLASSES).split(), "a", "drawing", "of", "the", ".", "?"]
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="?", unk_token="?")


def test_the_word_imagenet_makes_clip_zero_shot_as_it_was_published(tmp_path, monkeypatch):
    names, templates = imagenet_prompts()
    assert (len(names), len(templates)) == (1000, 80) and templates[0] == "a bad photo of a {}."
    import open_clip

    monkeypatch.setattr(open_clip, "IMAGENET_CLASSNAMES", ["cat", "dog"])  # 80,000 prompts else
    native = tiny("hf_clip")
    native.module.save_pretrained(tmp_path)
    _word_tokenizer().save_pretrained(tmp_path)
    options = {key: native.options[key] for key in ("mean", "std") if key in native.options}
    model = load(f"hf:{tmp_path}", classes="imagenet", **options)
    assert model.classes == ("cat", "dog") and model.texts["templates"] == templates
    named = load("timm:test_vit", weights="random", classes="imagenet")  # no text: timm's names
    assert len(named.classes) == 1000 and named.classes[0].startswith("tench")


def test_heads_on_unit_features_read_every_row_for_itself():
    rows = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = torch.eye(5, dtype=torch.float64)[:4]
    unit = rows / rows.norm(dim=-1, keepdim=True)
    assert_close(CosineHead(2 * matrix, scale=3.0)(rows), 3 * unit[..., :4])
    layer = UnitLinear(5, 4, bias=False, dtype=torch.float64)
    layer.load_state_dict({"weight": matrix})
    assert_close(layer(rows), unit[..., :4])
    scale, bias = (torch.nn.Parameter(torch.tensor(x).double()) for x in (1.0, 0.5))
    assert_close(CosineHead(matrix, scale=scale, bias=bias)(rows), torch.e * unit[..., :4] + 0.5)


def test_a_norm_between_pool_and_classifier_stays_in_front_of_a_given_head():
    from timm.models.vision_transformer import VisionTransformer

    from tests.tiny import scramble

    base = dict(img_size=(32, 48), patch_size=8, embed_dim=24, depth=2, num_heads=3)
    module = (
        scramble(
            VisionTransformer(
                **base, num_classes=0, class_token=False, global_pool="avg", fc_norm=True
            )
        )
        .double()
        .requires_grad_(False)
    )
    matrix = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = sc.wrap(module, head=matrix, mean=(0.5,) * 3, std=(0.5,) * 3)
    images = torch.randn(
        2, 3, 32, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    assert_close(model(images), module(images) @ matrix.T, atol=1e-10, rtol=0)
