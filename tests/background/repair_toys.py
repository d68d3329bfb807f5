"""A tiny transformer that answers from the background, and pictures that show it."""

import dataclasses

import timm
import torch
from torch import Tensor

import seecause as sc
from seecause.background import LabelledImages, Masks
from seecause.background.last_layer import features, new_layer, with_last_layer
from seecause.background.repair import Splits, split_rows
from seecause.background.transplant import versions_to_learn, versions_to_test
from tests.families.native import tokenize

SIDE, PATCH, CLASSES = 32, 8, ("dark", "light")


def scenes(count: int, *, usual: float = 1.0, seed: int = 0) -> LabelledImages:
    """A square of two by two patches, dark or light, on green or red; `usual` is the share of
    pictures whose background is that of the class."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    unusual = torch.rand(count, generator=draw) >= usual
    places = torch.where(unusual, 1 - labels, labels)
    images = 0.15 * torch.randn(count, 3, SIDE, SIDE, generator=draw)
    images[torch.arange(count), places] += 1.0  # the channel of the background
    images[:, 2] -= 0.5
    masks = torch.zeros(count, SIDE, SIDE, dtype=torch.bool)
    for place in range(count):
        row, column = (PATCH * torch.randint(0, 3, (2,), generator=draw)).tolist()
        box = (slice(row, row + 2 * PATCH), slice(column, column + 2 * PATCH))
        images[place, :, box[0], box[1]] = 2.0 * float(labels[place]) - 1.0
        masks[place][box] = True
    groups = tuple(zip(labels.tolist(), places.tolist(), strict=True))
    ids = tuple(f"scene {place}" for place in range(count))
    return LabelledImages(
        images, labels, name="scenes", ids=ids, truth=Masks.given(masks), groups=groups
    )


def plain_vit(seed: int = 0) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return timm.models.VisionTransformer(
            img_size=SIDE, patch_size=PATCH, embed_dim=32, depth=2, num_heads=4, num_classes=2
        )


def wrapped(module: torch.nn.Module, **options):
    return sc.wrap(module, mean=(0.5,) * 3, std=(0.5,) * 3, **{"classes": CLASSES, **options})


def fitted(pictures: LabelledImages, seed: int = 0, module: torch.nn.Module | None = None):
    """A model whose last layer was fitted on pictures, hardly held back: it takes the easiest."""
    model = wrapped(plain_vit(seed) if module is None else module)
    assert pictures.labels is not None
    layer = new_layer(features(model, pictures.images), pictures.labels, classes=2, strength=1.0)
    return with_last_layer(model, layer)


def biased_clip(pictures: LabelledImages, tokenizer=tokenize, templates=("a {}",)):
    """A tiny CLIP whose picture projection brings the backgrounds of pictures [n] to the texts of
    their classes."""
    import transformers as hf

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shared = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                  "intermediate_size": 64}  # fmt: skip
        text = {**shared, "vocab_size": 64, "max_position_embeddings": 8, "eos_token_id": 63}
        vision = {**shared, "image_size": SIDE, "patch_size": PATCH}
        config = hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
        module = hf.CLIPModel(config).eval()
    options = {"tokenizer": tokenizer, "templates": templates}
    first = wrapped(module, **options)
    assert first.extra is not None and pictures.labels is not None
    texts = first.extra.matrix  # [2, 16]
    with torch.no_grad():
        pooled = module.vision_model(pictures.images).pooler_output
        norm = module.vision_model.post_layernorm
        norm.bias -= pooled.mean(dim=0)
        layer = new_layer(pooled - pooled.mean(dim=0), pictures.labels, classes=2, strength=1.0)
        to_texts = torch.linalg.pinv(texts)  # [16, 2]
        beside = module.visual_projection.weight - to_texts @ (
            texts @ module.visual_projection.weight
        )  # what texts do not read, where the object is still seen
        module.visual_projection.weight.copy_(to_texts @ layer.weight.float() + 5 * beside)
    return wrapped(module, **options)


def numbers(seed: int, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def made_splits(model, **options):
    """What remedies learn from and choose by."""
    cases = scenes(64, usual=0.8, seed=1)
    cases = dataclasses.replace(cases, images=cases.images.to(model.dtype), masks=cases.truth)
    learn, choose = (cases.take(rows) for rows in split_rows(cases.labels, (0.6, 0.4), seed=0))
    held_out = versions_to_test(model, choose, 4, seed=0)
    return Splits(versions_to_learn(learn, 4, seed=0), held_out, **options)
