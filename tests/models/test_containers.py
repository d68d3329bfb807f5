"""Models as people have them: compiled, parallel, adapted, or inside a module of their own."""

from __future__ import annotations

import pytest
import timm
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.testing import assert_close
from transformers import (
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

import seecause as sc
from seecause.errors import UnsupportedModel
from tests.tiny import scramble

HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
VIT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "num_labels": 3}
VIT |= {"intermediate_size": 48, "image_size": 32, "patch_size": 8}


def small(classes: int = 5, **options) -> nn.Module:
    return scramble(timm.create_model("test_vit", num_classes=classes, img_size=32, **options))


def hf(kind=ViTForImageClassification) -> nn.Module:
    return scramble(kind(ViTConfig(**VIT)))


def images(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)


def same_maps(got: nn.Module, expected: nn.Module) -> None:
    maps = [sc.attribute(sc.wrap(m, **HALF), images(), 1).maps for m in (got, expected)]
    assert_close(*maps)


def compiled_blocks(module):
    for index, block in enumerate(module.blocks):
        module.blocks[index] = torch.compile(block, backend="eager")
    return module


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    "around",
    [
        lambda module: torch.compile(module, backend="eager"),
        nn.DataParallel,
        lambda module: torch.compile(nn.DataParallel(module), backend="eager"),
        compiled_blocks,
        compiled_in_place,
        torch.optim.swa_utils.AveragedModel,
        timm.utils.ModelEmaV3,
        lambda module: nn.Sequential(module),
    ],
    ids=["compile", "parallel", "both", "blocks", "in place", "average", "ema", "sequence"],
)
def test_what_is_around_a_model_changes_no_map(around):
    same_maps(around(small()), small())


def test_a_distributed_model_is_taken(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        module = small().requires_grad_(True)
        same_maps(nn.parallel.DistributedDataParallel(module), module)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_an_adapted_model_answers_as_its_merged_one(library):
    plain = small() if library == "timm" else hf()
    targets = ["qkv", "fc1"] if library == "timm" else ["q_proj", "v_proj", "query", "value"]
    head = "head" if library == "timm" else "classifier"
    lora = LoraConfig(r=2, target_modules=targets, modules_to_save=[head], lora_dropout=0.5)
    adapted = get_peft_model(plain, lora)
    scramble(adapted).train()
    model = sc.wrap(adapted, **HALF)
    got = sc.attribute(model, images(), 1).maps
    assert all(part.training for part in adapted.modules())
    same = sc.wrap(adapted.eval().merge_and_unload(), **HALF)
    assert_close(got, sc.attribute(same, images(), 1).maps, atol=1e-4, rtol=1e-4)


class Wrapper(nn.Module):
    """What people write around a backbone."""

    def __init__(self, backbone: nn.Module, head: nn.Module, take=lambda features: features):
        super().__init__()
        self.backbone, self.dropout, self.head, self.take = backbone, nn.Dropout(0.5), head, take
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.head(self.dropout(self.take(self.backbone(x))))


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


@pytest.mark.parametrize(
    ("backbone", "take", "pool"),
    [
        (lambda: small(0), lambda y: y, "cls"),
        (lambda: small(0, global_pool="avg"), lambda y: y, "mean"),
        (lambda: hf(ViTModel), lambda y: y.last_hidden_state[:, 0], "cls"),
        (lambda: hf(ViTModel), lambda y: y.last_hidden_state[:, 1:].mean(1), "mean"),
        (lambda: hf(ViTModel), lambda y: y.pooler_output, "cls"),
    ],
    ids=["timm", "timm mean", "hf class token", "hf mean", "hf pooler"],
)
@pytest.mark.parametrize("head", [lambda width: nn.Linear(width, 4), mlp], ids=["linear", "mlp"])
def test_a_backbone_below_a_head_is_read_with_it(backbone, take, pool, head):
    inner = backbone()
    width = getattr(inner, "num_features", 24)
    module = scramble(Wrapper(inner, head(width), take))
    model = sc.wrap(module, **HALF)
    assert model.readout.kind == pool
    assert_close(model(images()), module(images()), atol=1e-4, rtol=1e-4)
    module.train()
    sc.attribute(model, images(), 1)
    assert all(part.training for part in module.modules())


class Beside(Wrapper):
    """With a layer that only its training reads, before the head."""

    def __init__(self, backbone: nn.Module, head: nn.Module):
        super().__init__(backbone, nn.Identity())
        self.projector, self.head = nn.Linear(backbone.num_features, backbone.num_features), None
        self.classifier = head

    def forward(self, x):
        return self.classifier(self.backbone(x))


def test_the_last_layer_alone_may_be_the_head():
    without_class_token = {"class_token": False, "reg_tokens": 0, "global_pool": "avg"}
    for inner in (small(0), small(0, **without_class_token)):
        module = scramble(Beside(inner, nn.Linear(inner.num_features, 4)))
        assert_close(sc.wrap(module, **HALF)(images()), module(images()), atol=1e-4, rtol=1e-4)


class Lightning(nn.Module):
    """Like a Lightning module: the model, a loss, a step."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.loss = model, nn.CrossEntropyLoss()

    def training_step(self, batch):
        return self.loss(self.model(batch[0]), batch[1])


def test_a_module_that_only_trains_gives_its_model():
    same_maps(Lightning(small()), small())
    same_maps(Lightning(torch.compile(small(), backend="eager")), small())


def test_a_named_head_is_taken_as_it_is():
    module = Wrapper(small(0), nn.Identity())
    head = nn.Linear(small(0).num_features, 7)
    assert sc.wrap(module, head=head, **HALF).n_classes == 7


class Odd(Wrapper):
    def forward(self, x):
        return self.head(self.backbone(x).square())


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = small(), small()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda: Odd(small(0), nn.Linear(64, 4)), r"sc\.wrap\(module\.backbone, head=module\.head"),
        (lambda: Lightning(Odd(small(0), nn.Linear(64, 4))), r"module\.model\.backbone, head="),
        (Both, r"several models, at \.student and \.teacher"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 3)), "no adapter knows it"),
        (lambda: small(0), "pass head="),
    ],
    ids=["odd", "inside", "both", "nothing", "bare"],
)
def test_what_cannot_be_read_is_refused_with_what_to_give(module, words):
    with pytest.raises(UnsupportedModel, match=words):
        sc.wrap(module(), **HALF)


def test_a_timm_model_in_transformers_brings_names_and_preprocessing():
    names = {0: "tench", 1: "goldfish", 2: "shark"}
    card = {"input_size": (3, 160, 160), "crop_pct": 0.9, **HALF}
    config = TimmWrapperConfig(
        architecture="test_vit", id2label=names, pretrained_cfg=card, num_labels=3
    )
    module = scramble(TimmWrapperForImageClassification(config))
    model = sc.wrap(module)
    assert model.classes == ("tench", "goldfish", "shark")
    assert model.preprocess.crop == 0.9
    x = torch.zeros(1, 3, 160, 160)
    assert_close(model(x), module(x).logits)
