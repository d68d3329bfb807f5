"""Suffix scores are the naive ones, and say what else a removal does; a screen guesses all scores
and measures the likeliest exactly."""

import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.background import HeadScores, LabelledImages, penalised, score, screen
from seecause.background.scoring import derangement, guessed, saturated
from seecause.engine.chunks import budget
from seecause.errors import BadImage, BadOption, NotDefined
from tests.background.toys import masked_case as case
from tests.families.conv import OPTIONS as CONV, tiny_conv
from tests.helpers import hooks, noise
from tests.reference import cigma as reference

FAMILIES = ["timm_deit3", "timm_clip", "timm_post_norm", "timm_map", "timm_mean", "timm_eva"]
FAMILIES += ["timm_distilled", "timm_eva_registers", "hf_vit", "hf_clip", "hf_dinov2"]
FAMILIES += ["hf_siglip_tower", "torchvision_vit", "open_clip_clip"]
HEADS, WIDTH, BIG = 3, 8, 1


@torch.no_grad()
def naive(native, images, measure, changed=None):
    """Effects [B, L, H] on measure(i)."""
    return reference.head_effects(len(images), native.blocks, HEADS, WIDTH, measure, changed)


def big(native, images, masks):
    return lambda i: reference.gains(native.forward, images[i], masks[i])[BIG]


@pytest.mark.parametrize("family", FAMILIES)
def test_suffix_scores_are_naive_scores(family):
    native, model, data = case(family)
    images, masks = data.images, data.masks.hard
    expected = naive(native, images, big(native, images, masks))
    result = score(model, data)
    assert_close(result.effects, expected, atol=1e-10, rtol=0)
    assert_close(result.value, expected.mean(dim=0), atol=1e-10, rtol=0)
    assert_close(result.error, expected.std(dim=0) / 2**0.5, atol=1e-10, rtol=0)
    assert expected.abs().max() > 1e-4 and hooks(native.module) == 0


def test_the_paper_fills_with_the_mean_colour():
    native, model, data = case()
    images, masks = data.images, data.masks.hard

    def gain(**options):
        return lambda i: reference.gains(native.forward, images[i], masks[i], **options)[BIG]

    found = score(model, data, fill="mean").effects
    assert_close(found, naive(native, images, gain(fill="mean")), atol=1e-10, rtol=0)
    default = score(model, data).protocol
    assert default["fill"] == "grey"  # see test_known_models
    assert [default[name] for name in ("response", "operator", "temperature", "guard", "seed")] == [
        "big", "zero", 1.0, True, 0,
    ]  # fmt: skip
    warm = score(model, data, temperature=2.0)
    assert_close(warm.effects, naive(native, images, gain(temperature=2.0)), atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", ["timm_registers", "timm_clip", "hf_vit"])
def test_mean_and_resampled_heads_are_what_hooks_put_there(family):
    native, model, data = case(family, batch=3)
    images, masks = data.images, data.masks.hard
    seen = [
        torch.stack([reference.carried(native.forward, block, image) for image in images])
        for block in native.blocks
    ]  # [B, T, H * dh]

    def put(contents):
        def changed(i, layer, head):
            return reference.carrying(
                native.blocks[layer],
                head,
                WIDTH,
                contents(i, layer)[:, head * WIDTH : (head + 1) * WIDTH],
            )

        return changed

    donors = derangement(3, seed=4).tolist()
    assert donors != derangement(3, seed=0).tolist()
    for operator, contents in (
        ("mean", lambda i, layer: seen[layer].mean(dim=0)),
        ("resample", lambda i, layer: seen[layer][donors[i]]),
    ):
        expected = naive(native, images, big(native, images, masks), put(contents))
        result = score(model, data, operator=operator, seed=4, guard=False)
        assert_close(result.effects, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", ["timm_registers", "hf_vit", "torchvision_vit"])
def test_heads_without_output_columns_score_exactly_zero(family):
    native, model, data = case(family)
    with torch.no_grad():
        reference.projection(native.blocks[1]).weight[:, WIDTH : 2 * WIDTH] = 0
    done = []
    result = score(model, data, progress=done.append)
    assert sum(done) == 2 * 12  # also what need not run is done
    assert (result.effects[:, 1, 1] == 0).all() and result.error[1, 1] == 0
    assert (result.value == 0).sum() == 1 and result.protocol["heads_run"] == 11
    assert result.after["nll"][1, 1] == result.before["nll"]


def test_blocks_may_have_fewer_heads():
    _, model, data = case()
    smaller = sc.background.prune_heads(model, [(1, 0), (1, 2)])
    result = score(smaller, data)
    assert result.value.isnan().nonzero().tolist() == [[1, 1], [1, 2]]
    with sc.background.ablate(model, [(1, 0), (1, 2)]):
        ablated = score(model, data).value
    assert_close(result.value[[0, 2, 3]], ablated[[0, 2, 3]], atol=1e-10, rtol=0)
    assert_close(result.value[1, 0], ablated[1, 1], atol=1e-10, rtol=0)
    bare = sc.background.prune_heads(model, [(2, head) for head in range(HEADS)])
    bare = score(bare, data)
    assert bare.value[2].nan_to_num(0).eq(0).all() and bare.value[[0, 1, 3]].isfinite().all()


def test_what_else_a_removal_does():
    native, model, data = case(batch=3)
    images, masks = data.images, data.masks.hard
    labels = [native.forward(images[:1]).argmax().item(), 0, 1]
    result = score(model, data, target=labels)
    with torch.no_grad(), reference.without(native.blocks[2], 1, WIDTH):
        p = torch.softmax(native.forward(images), dim=-1)
        gains = torch.tensor(
            [reference.gains(native.forward, x, m) for x, m in zip(images, masks, strict=True)]
        )
    assert result.after["accuracy"][2, 1].item() == pytest.approx(
        (p.argmax(dim=-1) == torch.tensor(labels)).double().mean().item()
    )
    assert result.after["nll"][2, 1].item() == pytest.approx(
        -p[range(3), labels].log().mean().item()
    )
    assert result.after["fig"][2, 1].item() == pytest.approx(gains[:, 0].mean().item())
    assert result.before["fig"] - result.after["fig"][2, 1].item() == pytest.approx(
        result.after["fig_drop"][2, 1].item()
    )
    assert_close(result.fig_drops.mean(dim=0), result.after["fig_drop"])
    assert "fig" not in score(model, data, guard=False).after


def test_other_responses_need_no_masks():
    native, model, data = case()
    images = data.images
    labels = [2, 5]
    measures = {
        "nll": lambda i: -reference.answer(native.forward, images[i])[labels[i]].log().item(),
        "prob": lambda i: reference.answer(native.forward, images[i])[labels[i]].item(),
        "logit": lambda i: native.forward(images[i : i + 1])[0, labels[i]].item(),
    }
    for response, measure in measures.items():
        result = score(model, images, response=response, target=labels)
        assert_close(result.effects, naive(native, images, measure), atol=1e-10, rtol=0)
        assert "fig" not in result.after
    known = LabelledImages(images, torch.tensor(labels))
    assert torch.equal(score(model, known, response="logit").effects, result.effects)
    pair = score(model, images, response="logit", target=(1, 4))
    first, second = (score(model, images, response="logit", target=at).value for at in (1, 4))
    assert_close(pair.value, first - second, atol=1e-10, rtol=0)
    p = torch.softmax(native.forward(images), dim=-1).amax(dim=-1)
    assert pair.before["accuracy"] == 1  # of two classes neither is a label: the predictions are
    assert pair.before["nll"] == pytest.approx(-float(p.log().mean()))
    figs = score(model, data, response="fig")
    assert_close(figs.value, figs.after["fig_drop"])


def test_other_versions_need_no_masks():
    native, model, data = case()
    images = data.images
    elsewhere = images + noise(*images.shape, seed=5)
    pairs = LabelledImages(images, other_background=elsewhere)
    result = score(model, pairs, fill="swap", guard=False)

    def measure(i):
        return reference.js(*(reference.answer(native.forward, x[i]) for x in (images, elsewhere)))

    assert_close(result.effects, naive(native, images, measure), atol=1e-10, rtol=0)
    both = replace(pairs, other_object=images.flip(0))
    beside = score(model, both, response="logit", target=1, fill="swap")
    gains = score(model, both, fill="swap")
    assert_close(beside.after["fig_drop"], gains.after["fig_drop"])  # for the guard
    assert_close(beside.after["big"], gains.after["response"])


def test_penalised_scores_have_errors_and_effects_of_their_own():
    _, model, data = case(batch=3)
    result = score(model, data)
    guarded = penalised(result)
    assert (result.after["fig_drop"] > 0).any() and (result.after["fig_drop"] < 0).any()
    assert_close(guarded.value, result.value - result.after["fig_drop"].clamp_min(0))
    assert_close(guarded.effects.mean(dim=0), guarded.value)
    assert_close(guarded.error, guarded.effects.std(dim=0) / 3**0.5)
    with pytest.raises(NotDefined, match="guard=True"):
        penalised(score(model, data, guard=False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"response": "bigger"}, "big, fig, prob, logit, nll"),
        ({"operator": "shuffle"}, "zero, mean, resample"),
        ({"heads": [(4, 0)]}, "layers 0-3"),
        ({"heads": []}, "at least one"),
        ({"temperature": 0}, "above 0"),
        ({"target": [1]}, "each of the 2 images"),
        ({"fill": "white"}, "mean, grey, blur, noise, swap"),
        ({"fill": "swap"}, "have other versions"),
    ],
)
def test_bad_options_are_refused(options, message):
    _, model, data = case()
    with pytest.raises(BadOption, match=message):
        score(model, data, **options)


def test_bad_data_and_models_are_refused():
    _, model, data = case()
    images = data.images
    one = data.take(torch.tensor([0]))
    assert score(model, one).error.isnan().all()  # one image says nothing of others
    with pytest.raises(BadOption, match="resampling needs at least two"):
        score(model, one, operator="resample")
    with pytest.raises(BadOption, match="masks of the images"):
        score(model, images)
    with pytest.raises(BadImage, match="at least one image"):
        score(model, data.take(torch.tensor([], dtype=torch.long)))
    conv = sc.wrap(tiny_conv("timm_resnet").module, check=False, **CONV)
    with pytest.raises(NotDefined, match="not by heads"):
        score(conv, torch.zeros(1, 3, *conv.preprocess.size, dtype=torch.float64), response="nll")
    model.sigmoid = True
    for response in ("big", "nll"):  # also the guard compares
        with pytest.raises(NotDefined, match=r"comparison of versions .*sigmoid=False"):
            score(model, data, response=response)


def test_the_guess_is_that_of_the_slow_twin():
    native, model, data = case(batch=3)
    images, masks = data.images, data.masks.hard
    guess = guessed(model, data, seed=5)
    turned = guessed(model, LabelledImages(images, masks=~masks), seed=5, response="fig")
    assert_close(turned.value, guess.value, atol=1e-12, rtol=0)
    chance = torch.Generator().manual_seed(5)
    signs = torch.randint(0, 2, (3, model.n_classes), generator=chance) * 2.0 - 1
    slow = [
        reference.second_order(native.forward, native.blocks, HEADS, WIDTH, *one)
        for one in zip(images, masks, signs.double(), strict=True)
    ]
    assert_close(guess.value, torch.stack(slow).mean(dim=0), atol=1e-10, rtol=0)
    with pytest.raises(BadOption, match="big or fig"):
        guessed(model, data, response="logit")


@pytest.mark.parametrize("operator", ["zero", "mean", "resample"])
def test_a_guess_takes_operators_and_chunks(operator):
    _, model, data = case(batch=4)
    whole = guessed(model, data, operator=operator, response="fig")
    with budget(1):
        parts = guessed(model, data, operator=operator, response="fig")
    assert_close(whole.value, parts.value, atol=1e-12, rtol=0)


def test_no_guess_of_a_divergence_leaves_its_range_and_small_ones_are_the_quadratic_form():
    at, slope, spread = torch.tensor([0.0, 1e-6, 0.3, math.log(2)], dtype=torch.float64), 0.2, 4.0
    for sign in (-1, 1):
        guess = saturated(at, torch.full_like(at, sign * slope), torch.full_like(at, spread))
        assert bool((guess >= 0).all()) and bool((guess <= math.log(2)).all())
    small = saturated(at[1:2], at[1:2] / 4, at[1:2] / 2)
    assert small.item() == pytest.approx(1e-6 * (1 - 1 / 4 + 0.6 / 16), rel=1e-4)


def test_a_screen_measures_the_likeliest_exactly():
    _, model, data = case()
    exact, result = score(model, data), screen(model, data, top=2)
    guess = HeadScores(result.after["guess"])
    assert result.value.isfinite().sum() == 6
    for head in guess.order(positive=False)[:6]:
        assert result.value[head].item() == pytest.approx(exact.value[head].item(), abs=1e-12)
    assert screen(model, data, top=1).value.isfinite().sum() == 3  # three for each
    assert penalised(result).value.isfinite().sum() == 6


def test_a_screen_guesses_with_the_options_that_it_measures_with():
    _, model, data = case(batch=4)
    options = {"temperature": 2.0, "fill": "mean", "operator": "resample", "seed": 3}
    result = screen(model, data, **options)
    assert_close(result.after["guess"], guessed(model, data, **options).value)
    (head, *_) = HeadScores(result.after["guess"]).order(positive=False)
    assert_close(result.value[head], score(model, data, **options).value[head])


def test_impossible_screens_are_refused():
    _, model, data = case()
    for options, message in (
        ({"top": 13}, "1 to 12"),
        ({"by": "luck"}, "screen option by"),
    ):
        with pytest.raises(BadOption, match=message):
            screen(model, data, **options)
