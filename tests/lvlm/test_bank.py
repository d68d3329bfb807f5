"""The average picture: four ways to average, leaving one out, and what does not fit."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from seecause import critters
from seecause.critters.rendering import STYLES
from seecause.data.images import to_pil
from seecause.errors import BadInput, BadOption, DataMissing
from seecause.lvlm import (
    MaskEngine,
    MeanBank,
    bank as banks,
    bank_of_prompts,
    calibration_critters,
    make_bank,
)
from seecause.lvlm._cache import run_prefix
from seecause.lvlm.bank import Averaged, picture_digest, stretch
from seecause.models.decoder import Grid, ImageTokens
from tests.families.lvlm import photo
from tests.lvlm.scenes import QUESTION, TOKEN, scene
from tests.reference import hear


@pytest.mark.parametrize("family", ["llava_next", "qwen3_vl"])
def test_means_equal_what_the_native_model_makes(family):
    here = scene(family)
    means = hear.average_picture(
        here.lvlm.module, [dict(here.lvlm.prompt(p, QUESTION).inputs) for p in here.pictures]
    )
    keys, values = here.bank.means(here.lvlm, here.engine.prompt)
    for layer, (k, v) in enumerate(means):
        assert_close(keys[layer], k, atol=1e-12, rtol=0)
        assert_close(values[layer], v, atol=1e-12, rtol=0)
    same = bank_of_prompts(here.lvlm, [here.lvlm.prompt(p, QUESTION) for p in here.pictures])
    assert_close(same.means(here.lvlm, here.engine.prompt), (keys, values))


@pytest.mark.parametrize("mode", ["shape", "fixed", "mean", "grid"])
def test_the_explained_picture_is_left_out(mode):
    here = scene("qwen2_vl")
    size = (32, 48) if mode in ("fixed", "grid") else None
    pictures = [photo((40, 56), 1), photo((56, 40), 2), photo((64, 64), 3)]
    whole, rest = (
        make_bank(here.lvlm, some, mode=mode, size=size) for some in (pictures, pictures[1:])
    )
    prompt = here.lvlm.prompt(whole.resized(pictures[0]), QUESTION)
    assert_close(
        whole.means(here.lvlm, prompt, pictures[0]),
        rest.means(here.lvlm, prompt, pictures[0]),
        atol=1e-10,
        rtol=0,
    )
    kept = whole.means(here.lvlm, prompt)
    assert (kept[0] - rest.means(here.lvlm, prompt)[0]).abs().max() > 1e-3
    assert kept[0].shape[2] == prompt.n_image
    alone = make_bank(here.lvlm, pictures[:1], mode=mode, size=size)
    with pytest.raises(BadInput, match="leaves nothing"):
        alone.means(here.lvlm, prompt, pictures[0])


def test_a_picture_is_left_out_as_often_as_it_is_in():
    here = scene("llava")
    first, *others = here.pictures
    twice, none = make_bank(here.lvlm, [first, *others, first]), make_bank(here.lvlm, others)
    prompt = here.lvlm.prompt(first, QUESTION)
    assert_close(
        twice.means(here.lvlm, prompt, first), none.means(here.lvlm, prompt), atol=1e-10, rtol=0
    )
    with pytest.raises(BadInput, match="leaves nothing"):
        make_bank(here.lvlm, [first, first]).means(here.lvlm, prompt, first)


def test_one_average_over_all_tokens_knows_no_place():
    here = scene("qwen2_vl")
    pictures = [photo((40, 56), 1), photo((40, 56), 3), photo((64, 32), 2)]  # two run together
    prompts = [here.lvlm.prompt(p, QUESTION) for p in pictures]
    values = torch.cat(
        [run_prefix(here.lvlm.decoder, [p])[2][1][0, :, p.image] for p in prompts], dim=1
    ).mean(dim=1)  # of block 2
    bank = make_bank(here.lvlm, pictures, mode="mean")
    _, got = bank.means(here.lvlm, here.engine.prompt)
    assert_close(got[2], values[:, None].expand_as(got[2]), atol=1e-12, rtol=0)


def test_a_grid_is_stretched_and_newlines_keep_apart():
    here = scene("llava_next")
    bank = make_bank(here.lvlm, here.pictures, mode="grid", size=(64, 64))
    square = here.lvlm.prompt(photo((64, 64)), QUESTION)
    exact = make_bank(here.lvlm, here.pictures, mode="fixed", size=(64, 64)).means(
        here.lvlm, square
    )
    newlines = [part.newline for part in square.tokens.parts]
    assert newlines == [False, True]
    same, wide = bank.means(here.lvlm, square)[1], bank.means(here.lvlm, here.engine.prompt)[1]
    rows = square.tokens.parts[1].rows
    fine = same[:, :, 16:].unflatten(2, (rows, -1))
    true = exact[1][:, :, 16:].unflatten(2, (rows, -1))
    assert_close(fine[..., :-1, :], true[..., :-1, :], atol=1e-12, rtol=0)
    line = true[..., -1, :].mean(dim=2)
    assert_close(wide[:, :, -1], line, atol=1e-12, rtol=0)
    assert wide.shape[2] == here.engine.n_image != same.shape[2]


def between(values: torch.Tensor, places: int, axis: int) -> torch.Tensor:
    """Slow twin of bilinear stretching along one axis: cell i of `places` covers an equal share of
    the picture, its centre lies at (i + 0.5) / places, and beyond the outer centres nothing
    changes."""
    have, cells = values.shape[axis], []
    for i in range(places):
        centre = (i + 0.5) / places * have - 0.5  # in cells of `values`, whose centres are whole
        centre = min(max(centre, 0.0), have - 1.0)
        low = min(int(centre), have - 2) if have > 1 else 0
        high, share = min(low + 1, have - 1), centre - low
        cells.append((1 - share) * values.select(axis, low) + share * values.select(axis, high))
    return torch.stack(cells, dim=axis)


@pytest.mark.parametrize(("rows", "columns"), [(5, 7), (2, 9), (3, 4), (6, 2), (1, 1)])
def test_an_average_is_stretched_by_places_in_the_picture_not_by_corners(rows, columns):
    generator = torch.Generator().manual_seed(0)
    have = ImageTokens((Grid(2, 2), Grid(3, 4, newline=True)))
    want = ImageTokens((Grid(2, 2), Grid(rows, columns, newline=True)))
    values = torch.randn(2, 3, have.count, 5, generator=generator, dtype=torch.float64)
    got = stretch(values, have, want)
    assert got.shape == (2, 3, want.count, 5)
    assert torch.equal(got[:, :, :4], values[:, :, :4])  # the same grid stays as it is
    fine = values[:, :, 4:].unflatten(2, (3, 5))  # [L, Hkv, rows, columns + newline, dh]
    slow = between(between(fine[:, :, :, :4], rows, 2), columns, 3)
    grown = got[:, :, 4:].unflatten(2, (rows, columns + 1))
    assert_close(grown[:, :, :, :columns], slow, atol=1e-12, rtol=0)
    line = fine[:, :, :, 4].mean(dim=2, keepdim=True).expand(-1, -1, rows, -1)
    assert_close(grown[:, :, :, columns], line, atol=1e-12, rtol=0)


def test_banks_are_saved_and_loaded(tmp_path):
    here = scene("llava_next")
    read = MeanBank.load(here.bank.save(tmp_path))
    assert_close(
        read.means(here.lvlm, here.engine.prompt), here.bank.means(here.lvlm, here.engine.prompt)
    )
    for name in ("mode", "model", "size", "digests", "weights"):
        assert getattr(read, name) == getattr(here.bank, name), name
    sized = make_bank(here.lvlm, here.pictures, mode="fixed", size=(64, 64))
    assert MeanBank.load(sized.save(tmp_path / "sized")).size == (64, 64)
    with pytest.raises(
        BadInput, match=r"4 x 4 \+ 6 x 8 with newlines.*this picture has 4 x 4 \+ 8 x 8"
    ):
        MaskEngine(here.lvlm, photo((70, 70)), QUESTION, read, answer=[TOKEN], floor=None)
    with pytest.raises(DataMissing):
        MeanBank.load(tmp_path / "nowhere")
    (tmp_path / "bank.json").write_text((tmp_path / "bank.json").read_text()[:-20])
    with pytest.raises(DataMissing, match=r"damaged.*`seecause lvlm bank`"):
        MeanBank.load(tmp_path)


def test_what_does_not_fit_is_refused():
    here, other = scene("llava"), scene("llava_grouped")
    with pytest.raises(BadInput, match="another model"):
        MaskEngine(other.lvlm, photo((40, 56)), QUESTION, here.bank)
    for wrong in ({"mode": "nonsense"}, {"mode": "fixed"}, {"size": (32, 32)}):
        with pytest.raises(BadOption):
            make_bank(here.lvlm, here.pictures, **wrong)
    with pytest.raises(BadOption):
        make_bank(here.lvlm, [])
    tiles = scene("internvl")
    bank = make_bank(tiles.lvlm, tiles.pictures, mode="grid", size=(32, 32))
    with pytest.raises(BadInput, match="other grids or at other places"):
        bank.means(tiles.lvlm, tiles.engine.prompt)
    mixed = [here.lvlm.prompt(p, QUESTION) for p in here.pictures] + [other.engine.prompt]
    assert len({p.tokens for p in mixed}) == 1
    shapes = scene("qwen2_vl").lvlm
    with pytest.raises(BadInput, match="calibration picture"):
        bank_of_prompts(
            shapes, [shapes.prompt(photo(size), QUESTION) for size in ((40, 56), (64, 64))]
        )


def test_a_bank_has_as_many_shapes_as_were_asked_for_and_keeps_them_apart(tmp_path):
    here = scene("qwen2_vl")
    bank = make_bank(here.lvlm, here.pictures, sizes=[(40, 56), (64, 64)])
    tokens = ImageTokens((Grid(1, 2, box=None), Grid(1, 1, (0.0, 0.5, 1.0, 1.0), True)))
    odd = Averaged(tokens, (8, 9))
    bank.sums[odd], bank.weights[odd] = (torch.ones(1, 1, 4, 2), torch.zeros(1, 1, 4, 2)), 7
    read = MeanBank.load(bank.save(tmp_path / "new" / "bank"))
    assert list(read.sums) == list(bank.sums) and read.weights == bank.weights
    for layout, pair in bank.sums.items():
        assert all(map(torch.equal, read.sums[layout], pair)), layout
    tokens = "2 x 4, 4 x 4, 1 x 2 + 1 x 1 with newlines"
    assert repr(read) == f"MeanBank(shape, 3 pictures, image tokens {tokens})"
    empty = make_bank(here.lvlm, here.pictures)
    assert repr(empty) == "MeanBank(shape, 3 pictures, image tokens none yet)"
    assert len(bank_of_prompts(here.lvlm, [here.engine.prompt] * 2)) == 2


def test_pictures_run_a_few_at_a_time(monkeypatch):
    here, together = scene("llava_grouped"), []
    pictures = [photo(here.native.size, seed) for seed in range(1, 6)]
    inner = banks.run_prefix
    monkeypatch.setattr(
        banks, "run_prefix", lambda d, batch: together.append(len(batch)) or inner(d, batch)
    )
    whole = make_bank(here.lvlm, pictures).means(here.lvlm, here.engine.prompt)
    budgets = []
    monkeypatch.setattr(banks, "fit", lambda most, each, device: budgets.append((most, each)) or 2)
    few = make_bank(here.lvlm, pictures).means(here.lvlm, here.engine.prompt)
    assert together == [5, 2, 2, 1]
    for a, b in zip(whole, few, strict=True):
        assert_close(a, b, atol=1e-12, rtol=0)
    held = 4 * 2 * 2 * 8 + 20 * 4 * 8  # of 4 layers, 2 key heads of 8, and states of 4 heads
    assert set(budgets) == {(16, here.engine.prompt.image.stop * held * 8)}


def test_only_a_bank_of_one_size_resizes_the_explained_picture():
    lvlm, picture = scene("qwen2_vl").lvlm, photo((40, 56))
    small = picture.resize((48, 32), Image.Resampling.BICUBIC)
    for mode, size in (("shape", None), ("mean", None), ("grid", (32, 48)), ("fixed", (32, 48))):
        bank = make_bank(lvlm, [photo((40, 56), 1)], mode=mode, size=size)
        assert bank.resized(picture) == (small if mode == "fixed" else picture)
    assert bank.resized(small) is small
    with pytest.raises(BadInput, match=r"a calibration picture.*2 x 3.*expected 2 x 4"):
        bank.means(lvlm, lvlm.prompt(picture, QUESTION))  # not as the bank sees it
    for mode in ("shape", "mean"):
        with pytest.raises(BadOption, match=f"None with mode='{mode}'"):
            make_bank(lvlm, [picture], mode=mode, size=(32, 48))
    for mode in ("fixed", "grid"):
        with pytest.raises(BadOption, match=f"a height and width with mode='{mode}'"):
            make_bank(lvlm, [picture], mode=mode)


def test_pictures_are_resized_to_that_of_the_prompt_which_must_be_known():
    here = scene("qwen2_vl")
    bank = make_bank(here.lvlm, [photo((64, 64), 1)])
    wide = photo((64, 64), 1).resize((56, 40), Image.Resampling.BICUBIC)
    own = here.lvlm.prompt(wide, QUESTION)
    prompt = here.lvlm.prompt(photo((40, 56)), QUESTION)
    prefix = run_prefix(here.lvlm.decoder, [own])
    for layer, keys in enumerate(bank.means(here.lvlm, prompt)[0]):
        assert_close(keys, prefix[layer][0][0, :, own.image], atol=1e-12, rtol=0)
    with pytest.raises(BadInput, match="does not tell its picture's size"):
        fresh = make_bank(here.lvlm, [photo((64, 64), 1)])
        fresh.means(here.lvlm, here.lvlm.read(dict(prompt.inputs)))


def test_a_picture_that_has_the_right_tokens_is_not_resized():
    here = scene("llava")  # whose pictures all have 4 x 4 tokens
    pictures = [photo((40, 56), 1), photo((64, 48), 2)]
    bank = make_bank(here.lvlm, pictures)
    prompts = [dict(here.lvlm.prompt(picture, QUESTION).inputs) for picture in pictures]
    means = hear.average_picture(here.lvlm.module, prompts)
    keys, values = bank.means(here.lvlm, here.engine.prompt)
    for layer, (k, v) in enumerate(means):
        assert_close(keys[layer], k, atol=1e-12, rtol=0)
        assert_close(values[layer], v, atol=1e-12, rtol=0)


def test_pictures_are_told_apart_by_their_shape_too():
    shapes = [Image.new("RGB", size) for size in ((4, 6), (6, 4), (4, 6))]
    first, second, again = map(picture_digest, shapes)
    assert first == again != second


def test_as_many_critters_as_asked_for_in_every_style(monkeypatch):
    styles, render = [], critters.render

    def counted(rows, *, size, style):
        styles.append((style, len(rows)))
        return render(rows, size=size, style=style)

    monkeypatch.setattr(critters, "render", counted)
    assert len(calibration_critters(7, size=32)) == 7
    assert [style for style, _ in styles] == list(STYLES)
    assert max(count for _, count in styles) - min(count for _, count in styles) <= 2
    assert [picture.size for picture in calibration_critters()] == [(96, 96)] * 100
    assert [len(calibration_critters(few, size=32)) for few in (1, 2, 4)] == [1, 2, 4]
    first, second = (
        critters.draw("balanced", "train", 7, start=start) for start in (0, 1 << 30)
    )  # far from what models are trained on
    shown = [to_pil(image) for image in render(second[:3], size=32, style=styles[0][0]).image]
    assert calibration_critters(7, size=32)[:3] == shown
    assert to_pil(render(first[:1], size=32, style=styles[0][0]).image[0]) != shown[0]


def test_prompts_of_a_bank_may_have_the_picture_at_different_places():
    here = scene("llava")
    question = [here.lvlm.prompt(photo(here.native.size, seed), QUESTION) for seed in (1, 2)]
    inputs = dict(question[1].inputs)
    for name in ("input_ids", "attention_mask"):  # a word more before the picture
        inputs[name] = torch.cat([inputs[name][:, :1], inputs[name]], dim=1)
    moved = here.lvlm.read(inputs)
    assert moved.image.start == question[0].image.start + 1
    both = bank_of_prompts(here.lvlm, [question[0], moved]).means(here.lvlm, moved)
    each = [bank_of_prompts(here.lvlm, [p]).means(here.lvlm, moved) for p in (question[0], moved)]
    for mean, first, second in zip(both, *each, strict=True):
        assert_close(mean, (first + second) / 2, atol=1e-12, rtol=0)


def test_sizes_belong_to_the_mode_that_has_several():
    here = scene("llava")
    with pytest.raises(BadOption, match="none with mode='mean'"):
        make_bank(here.lvlm, here.pictures, mode="mean", sizes=[(40, 56)])


def test_tiles_at_other_places_are_not_taken_for_one_another():
    beside, below = (0.0, 0.0, 1.0, 0.5), (0.0, 0.0, 0.5, 1.0)
    have, want = (ImageTokens((Grid(2, 2, box), Grid(2, 2))) for box in (beside, below))
    values = torch.rand(1, 1, 8, 2)
    assert torch.equal(stretch(values, have, have), values)
    with pytest.raises(BadInput, match="other places"):
        stretch(values, have, want)
