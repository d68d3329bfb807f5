"""An image depends on its own latents only, and an intervention changes only what it names."""

import pytest
import torch

from seecause import critters
from seecause.critters.rendering import Do, render
from seecause.critters.world import BACKGROUNDS, CLASSES, CODEWORDS, PARTS, VARIANTS
from seecause.errors import SeecauseError

GRID = len(CLASSES) * len(BACKGROUNDS)


@pytest.fixture(scope="module")
def latents():
    return critters.draw("balanced", "test", GRID, seed=1)


@pytest.fixture(scope="module")
def drawn(latents):
    return render(latents)


def saturation(image):
    """(max - min) / max over channels: [B, 3, H, W] -> [B, H, W]; a global gain does not change
    it."""
    return (image.amax(1) - image.amin(1)) / image.amax(1)


def test_an_image_is_bit_equal_in_any_batch(latents, drawn):
    order = torch.randperm(GRID, generator=torch.Generator().manual_seed(0))
    shuffled = render(latents[order])
    assert torch.equal(shuffled.image, drawn.image[order])
    for row in (0, 13, GRID - 1):
        alone = render(latents[row])
        assert torch.equal(alone.image[0], drawn.image[row])
        assert torch.equal(alone.parts[0], drawn.parts[row])


@pytest.mark.parametrize("size", [64, 96, 128, 224])
@pytest.mark.parametrize("style", ["plain", "flat", "sketch"])
def test_every_size_and_style_has_sound_pixels(latents, size, style):
    drawn = render(latents[:4], size=size, style=style)
    assert drawn.image.shape == (4, 3, size, size)
    assert drawn.image.dtype == torch.float32
    assert drawn.image.min() >= 0 and drawn.image.max() <= 1
    assert torch.equal(drawn.mask, drawn.parts > 0)


@pytest.mark.parametrize("code", range(len(BACKGROUNDS)))
def test_another_background_leaves_every_bit_of_the_creature(latents, drawn, code):
    swapped = render(latents, do=Do(background=code))
    creature = drawn.mask[:, None].expand_as(drawn.image)
    assert torch.equal(swapped.image[creature], drawn.image[creature])
    assert torch.equal(swapped.parts, drawn.parts)
    moved_away = latents.background != code
    differs = (swapped.image != drawn.image).any(1) & ~drawn.mask
    share = differs.flatten(1).sum(1) / (~drawn.mask).flatten(1).sum(1)
    assert share[moved_away].min() > 0.9
    assert share[~moved_away].max() == 0


@pytest.mark.parametrize("part", PARTS)
def test_removing_a_part_changes_its_own_pixels_and_no_other(latents, drawn, part):
    removed = render(latents, do=Do(without=(part,)))
    support = drawn.parts == 1 + PARTS.index(part)
    changed = (removed.image != drawn.image).any(1)
    assert not (changed & ~support).any()
    assert (changed & support).flatten(1).any(1).all()
    assert not (removed.parts == 1 + PARTS.index(part)).any()


def test_moving_shifts_the_creature_bit_for_bit(latents, drawn):
    centred = latents.replace(centre=torch.full_like(latents.centre, 0.5))
    before, after = render(centred), render(centred, do=Do(move=(5, -3)))
    assert torch.equal(torch.roll(before.parts, (5, -3), dims=(1, 2)), after.parts)
    shifted = torch.roll(before.image, (5, -3), dims=(2, 3))
    creature = after.mask[:, None].expand_as(shifted)
    assert torch.equal(shifted[creature], after.image[creature])


def test_nothing_left_but_the_background(latents, drawn):
    empty = render(latents, do=Do(without=PARTS))
    assert not empty.mask.any()
    outside = ~drawn.mask[:, None].expand_as(drawn.image)
    assert torch.equal(empty.image[outside], drawn.image[outside])


def test_creatures_and_backgrounds_share_no_colour():
    drawn = render(critters.draw("clean", "test", 256, seed=2))
    colourful = saturation(drawn.image)
    assert colourful[drawn.mask].min() > colourful[~drawn.mask].max() + 0.03


def test_creatures_and_parts_are_large_enough_and_whole():
    drawn = render(critters.draw("balanced", "test", 4 * GRID, seed=3))
    for number in range(1, 1 + len(PARTS)):
        part = drawn.parts == number
        longest = torch.maximum(part.any(1).sum(1), part.any(2).sum(1))
        assert longest.min() >= 16
    tall, wide = drawn.mask.any(2).sum(1) / 96, drawn.mask.any(1).sum(1) / 96
    assert tall.min() > 0.4 and tall.max() < 0.6
    assert wide.min() > 0.4 and wide.max() < 0.6
    border = torch.cat(
        [drawn.mask[:, 0], drawn.mask[:, -1], drawn.mask[:, :, 0], drawn.mask[:, :, -1]]
    )
    assert not border.any()


def test_swapping_a_part_gives_the_creature_that_has_it(latents):
    other = (latents.creature + 1) % len(CLASSES)
    for row in range(4):
        word = CODEWORDS[other[row]]
        swap = {part: VARIANTS[part][code] for part, code in zip(VARIANTS, word, strict=True)}
        by_parts = render(latents[row], do=Do(swap=swap))
        assert torch.equal(by_parts.image, render(latents.show(other)[row]).image)


def test_a_background_without_its_cue_is_flat(latents, drawn):
    flat = render(latents, do=Do(cue=0.0))
    outside = (flat.image / latents.gain[:, None, None, None]).permute(0, 2, 3, 1)[~flat.mask]
    assert outside.std(0).max() < 1e-6
    assert torch.equal(flat.mask, drawn.mask)


@pytest.mark.parametrize(
    ("do", "options", "message"),
    [
        (Do(without=("tial",)), {}, "Did you mean tail"),
        (Do(swap={"feet": "hooves"}), {}, "feet variant"),
        (Do(swap={"body": "round"}), {}, "part with variants"),
        (Do(background=-1), {}, "background"),  # would be the last palette
        (Do(background=torch.tensor([0, len(BACKGROUNDS)])), {}, "background"),
        (Do(), {"style": "oil"}, "drawing style"),
        (Do(), {"size": 16}, "32 pixels"),
    ],
)
def test_mistakes_are_named(do, options, message):
    with pytest.raises(SeecauseError, match=message):
        render(critters.draw("clean", "test", 2), do=do, **options)
