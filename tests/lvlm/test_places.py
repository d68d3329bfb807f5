"""Where image tokens come from, asked of the processors themselves: a spot is painted in a picture,
and the views whose pixels move are those whose boxes hold it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from tokenizers import pre_tokenizers

from seecause.models.decoder import Grid, ImageTokens, image_tokens
from tests.families.lvlm import internvl, photo, tokenizer
from tests.families.lvlm_more import aya_vision, idefics3, molmo2, ovis2, perception_lm
from tests.families.native import need

SIDE = 32  # pixels of a view; each is 2 x 2 tokens
TILES = [f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)]
INDICATORS = ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]


def _idefics(kind: str, *, lines: bool = True) -> tuple[Any, Any, str]:
    """With a tokenizer that keeps the ends of lines, or does not."""
    marks = ("<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *TILES)
    words = tokenizer("<image>", *marks)
    if lines:
        words.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    edges = {"size": {"longest_edge": 4 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
    pictures = getattr(hf, f"{kind}ImageProcessor")(**edges)
    processor = hf.Idefics3Processor(pictures, words, image_seq_len=4)  # both write the same text
    return idefics3(kind).module.config, processor, "<image>"


def _ovis(covering: bool) -> tuple[Any, Any, str]:
    words = tokenizer("<image>", "<IMG_ATOM>", *INDICATORS)
    words.add_tokens(["<IMG_ATOM>", *INDICATORS], special_tokens=True)
    pictures = hf.Ovis2ImageProcessor(
        size={"height": SIDE, "width": SIDE}, crop_to_patches=True, max_patches=6,
        use_covering_area_grid=covering,
    )  # fmt: skip
    processor = hf.Ovis2Processor(pictures, words, image_token="<image>", image_seq_length=4)
    config = ovis2().module.config
    config.image_token_id = words.convert_tokens_to_ids("<IMG_ATOM>")
    config.visual_indicator_token_ids = words.convert_tokens_to_ids(INDICATORS)
    return config, processor, "<image>"


def _intern() -> tuple[Any, Any, str]:
    native = internvl()
    return native.module.config, native.processor, "<IMG_CONTEXT>"


def _perception() -> tuple[Any, Any, str]:
    words = tokenizer("<image>", "<video>", image_token="<image>", video_token="<video>")
    pictures = hf.PerceptionLMImageProcessor(tile_size=SIDE, max_num_tiles=6)
    video = hf.PerceptionLMVideoProcessor()
    processor = hf.PerceptionLMProcessor(video, pictures, words, patch_size=8, pooling_ratio=2)
    config = perception_lm().module.config
    config.image_token_id = words.image_token_id
    return config, processor, "<image>"


def _aya() -> tuple[Any, Any, str]:
    tiles = [f"TILE_{i}" for i in range(1, 7)]
    marks = ["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "TILE_GLOBAL", *tiles]
    words = tokenizer("<image>", *marks)
    words.add_tokens(marks, special_tokens=True)
    pictures = hf.GotOcr2ImageProcessor(
        size={"height": SIDE, "width": SIDE}, crop_to_patches=True, min_patches=1, max_patches=6
    )
    processor = hf.AyaVisionProcessor(
        pictures, words, patch_size=8, img_size=SIDE, downsample_factor=2
    )
    config = aya_vision().module.config
    config.image_token_index = words.convert_tokens_to_ids("<|IMG_PATCH|>")
    return config, processor, "<image>"


TILED: dict[str, Callable[[], tuple[Any, Any, str]]] = {
    "internvl": _intern,
    "idefics3": lambda: _idefics("Idefics3"),
    "idefics3 without lines": lambda: _idefics("Idefics3", lines=False),
    "smolvlm": lambda: _idefics("SmolVLM"),
    "perception_lm": _perception,
    "aya_vision": _aya,
    "ovis2": lambda: _ovis(True),
    "ovis2 by shape": lambda: _ovis(False),
}


@pytest.fixture(scope="module", params=TILED)
def tiled(request: pytest.FixtureRequest) -> tuple[Any, Any, str]:
    return TILED[request.param]()


def _read(tiled: tuple[Any, Any, str], *pictures: Image.Image) -> tuple[ImageTokens, torch.Tensor]:
    """Places of the tokens of pictures, and the pixels [views, 3, h, w] of all views."""
    config, processor, token = tiled
    text = "USER : " + f"{token} and ".join([""] * (len(pictures) + 1)) + "what is this ?"
    inputs = processor(images=[list(pictures)], text=[text], return_tensors="pt")
    spots = (inputs["input_ids"][0] == config.image_token_id).nonzero()[:, 0]
    places = inputs["input_ids"][0, spots[0] : spots[-1] + 1] == config.image_token_id
    size = (pictures[0].height, pictures[0].width)
    tokens = image_tokens(config, inputs, places, size, processor.image_processor)
    return tokens, inputs["pixel_values"].flatten(0, -4)


def _views(tokens: ImageTokens) -> list[Grid]:
    return [part for part in tokens.parts if (part.rows, part.columns) == (2, 2)]


def _painted(picture: Image.Image, x: float, y: float) -> Image.Image:
    """A white spot at shares of width and height."""
    pixels = np.array(picture)
    row, column = int(y * picture.height), int(x * picture.width)
    pixels[row - 1 : row + 2, column - 1 : column + 2] = 255
    return Image.fromarray(pixels)


def _inside(box: tuple[float, ...] | None, x: float, y: float) -> bool:
    return box is not None and box[0] <= y < box[2] and box[1] <= x < box[3]


@pytest.mark.parametrize("size", [(64, 96), (96, 64), (40, 120), (64, 64)])
def test_tiles_lie_where_the_processor_cut_them(tiled, size):
    picture = Image.fromarray(np.array(photo(size)) // 2)
    tokens, before = _read(tiled, picture)
    views = _views(tokens)
    assert len(views) == len(before) > 2 and all(view.box is not None for view in views)
    for y in (0.14, 0.4, 0.86):
        for x in (0.14, 0.4, 0.86):
            after = _read(tiled, _painted(picture, x, y))[1]
            moved = (after - before).abs().amax(dim=(1, 2, 3)) > 0.5
            expected = [_inside(view.box, x, y) for view in views]
            assert moved.tolist() == expected, (x, y)


@pytest.mark.parametrize(("most", "side"), [("anyres_max_9", 6), ("anyres_max_30", 12), ("", 12)])
def test_a_fine_grid_that_is_too_large_is_shrunk(most, side):
    """LLaVA-OneVision: tiles of 6 x 6 views of 2 x 2 tokens, 144 of at most 9 times 4."""
    vision = SimpleNamespace(image_size=32, patch_size=16)
    config = SimpleNamespace(vision_config=vision, image_grid_pinpoints=[[192, 192]])
    config.vision_aspect_ratio = most
    inputs = {"image_sizes": torch.tensor([[192, 192]])}
    places = torch.ones(4 + side * (side + 1), dtype=torch.bool)
    base, fine = image_tokens(config, inputs, places).parts
    assert (base.rows, base.columns) == (2, 2)
    assert (fine.rows, fine.columns, fine.newline) == (side, side, True)


@pytest.mark.parametrize(
    "marked", [{}, {"use_single_crop_col_tokens": False}, {"image_use_col_tokens": False}]
)
@pytest.mark.parametrize("size", [(64, 96), (32, 32), (40, 200)])
def test_grids_of_molmo_lie_between_its_marks(marked, size):
    need("Molmo2Processor")
    marks = ["im_patch", "im_col", "im_start", "low_res_im_start", "im_end", "im_low"]
    marks = ["<|image|>", "<|video|>", "<frame_start>", "<frame_end>", *(f"<{m}>" for m in marks)]
    words = tokenizer(*marks)
    words.add_tokens(marks, special_tokens=True)
    options = {"overlap_margins": [1, 1], "patch_size": 4, "pooling_size": [2, 2], "max_crops": 6}
    pictures = hf.Molmo2ImageProcessor(size={"height": SIDE, "width": SIDE}, **options)
    processor = hf.Molmo2Processor(pictures, hf.Molmo2VideoProcessor(), words, **marked)
    text = ["USER : <|image|> what is this ?"]
    inputs = processor(images=[photo(size)], text=text, return_tensors="pt")
    spots = (inputs["mm_token_type_ids"][0] == 1).nonzero()[:, 0]
    ids = inputs["input_ids"][0, spots[0] : spots[-1] + 1]
    tokens = image_tokens(molmo2().module.config, inputs, torch.ones(len(ids), dtype=torch.bool))
    patches = ids == words.convert_tokens_to_ids("<im_patch>")
    shown = tokens.maps(patches)
    assert all(bool(part.all()) for _, part in shown)
    assert sum(part.numel() for _, part in shown) == int(patches.sum())
