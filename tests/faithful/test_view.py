"""iFAM networks as views: every method works, and visibility goes where keys go."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.engine.sweep import selection
from seecause.engine.trace import blank_image
from seecause.errors import BadOption, NotDefined, UnsupportedModel, ViewMismatch
from seecause.faithful import calibrate, intervene
from tests.faithful.nets import STEPS, dinov2_backbone, random_images, timm_backbone, tiny_net
from tests.helpers import hooks
from tests.reference import ifam as reference

EXACT = {"atol": 1e-10, "rtol": 0}


@pytest.mark.parametrize("stages", [1, 2])
def test_a_view_answers_like_the_network(stages):
    net, images = tiny_net(stages=stages, classes=["a", "b", "c", "d"]), random_images()
    model = sc.wrap(net)
    assert_close(model(images), net(images).logits, **EXACT)
    assert model.classes == ("a", "b", "c", "d") and model.preprocess == STEPS and hooks(net) == 0


@pytest.mark.parametrize("broken", ["a key lane", "a fact", "a block"])
def test_a_wrong_view_is_refused(broken, monkeypatch):
    import seecause.faithful.stages as stages
    import seecause.models.block as visibility
    from seecause.models.block import At

    if broken == "a key lane":
        monkeypatch.setattr(visibility, "HIDDEN", 0.0)
    elif broken == "a fact":
        monkeypatch.setattr(At, "row_facts", property(lambda at: at.facts[:, at.index] & False))
    else:
        monkeypatch.setattr(stages, "hiding", lambda block: replace(block))
    with pytest.raises(ViewMismatch):
        sc.wrap(tiny_net())


@torch.no_grad()
def test_caap_mixes_keys_with_the_visibility_of_their_own_image():
    net, images = tiny_net(), random_images(2)
    model = sc.wrap(net)
    blank = blank_image(model, (40, 48), "white")
    masks, blank_mask = net(images).mask, net(blank).mask[0]
    assert not torch.equal(masks[0], blank_mask)
    sets = [row.nonzero()[:, 0].tolist() for row in selection((5, 6), "box1")]
    stage = net.stage2
    fast = sc.attribute(model, images, target=2, tail="source", score="logit").maps
    for i in range(2):
        slow = reference.caap(
            stage.tower.native,
            stage.fc_norm,
            stage.head,
            images[i],
            masks[i],
            blank[0],
            blank_mask,
            sets,
        )
        assert_close(fast[i].flatten(), slow[:, 2], **EXACT)


METHODS = ["rollout", "gae", "t-attr", "grad-cam", "ixg", "ixg+", "libra-ixg+", "atman", "attcat"]
METHODS += ["legrad", "tis", "integrated-gradients"]


# tis: hidden tokens are alike
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("stages", [1, 2])
def test_methods_work(stages):
    model = sc.wrap(tiny_net(stages=stages))
    for method in METHODS:
        if method == "t-attr" and stages == 1:  # features times their shares, two activations
            with pytest.raises(NotDefined, match="relevance"):
                sc.attribute(model, random_images(1), target=1, method=method)
            continue
        cheap = {"integrated-gradients": {"steps": 2}}.get(method, {})
        maps = sc.attribute(model, random_images(1), target=1, method=method, **cheap).maps
        assert maps.shape == (1, 5, 6) and maps.isfinite().all() and maps.std() > 0, method


@torch.no_grad()
def test_head_scores_are_those_of_the_network_without_the_head():
    net, images = tiny_net(), random_images(3)
    result = sc.background.score(
        sc.wrap(net), images, response="logit", target=1, guard=False
    ).value
    plain = net(images).logits[:, 1]
    for layer, head in ((0, 0), (1, 2), (2, 1)):
        without = copy.deepcopy(net)
        without.stage2.tower.native.blocks[layer].attn.proj.weight[:, 8 * head : 8 * head + 8] = 0
        assert_close(result[layer, head], (plain - without(images).logits[:, 1]).mean(), **EXACT)


@torch.no_grad()
def test_an_intervention_makes_kept_runs_stale_and_changes_the_fingerprint():
    net, images = tiny_net(), random_images(2)
    model = sc.wrap(net)
    plain, mark = sc.attribute(model, images, target=0).maps, model.fingerprint()
    with intervene(model, drop_parts=[0, 1]):
        changed, other = sc.attribute(model, images, target=0).maps, model.fingerprint()
        fresh = sc.attribute(sc.wrap(net), images, target=0).maps
    assert_close(changed, fresh, **EXACT)
    assert not torch.allclose(changed, plain) and other != mark
    assert (
        torch.equal(sc.attribute(model, images, target=0).maps, plain)
        and model.fingerprint() == mark
    )


def test_what_has_no_view_is_said():
    with pytest.raises(NotDefined, match="soft"):
        sc.wrap(tiny_net(gradient="soft"))
    with pytest.raises(NotDefined, match="eval_noise"):
        sc.wrap(tiny_net(stages=1, eval_noise=True))


@pytest.mark.parametrize("stages", [1, 2])
@torch.no_grad()
def test_a_saved_network_comes_back_whole(stages, tmp_path):
    net, images = (
        tiny_net(stages=stages, classes=["a", "b", "c", "d"], gradient="none").float(),
        random_images().float(),
    )
    calibrate(net, images, 0.9)
    net.save(tmp_path, "small", trained_on="nothing")
    model = sc.load(str(tmp_path))
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.module.state_dict().values(), net.state_dict().values(), strict=True)
    )
    assert_close(model(images), net(images).logits)
    assert model.classes == ("a", "b", "c", "d") and model.preprocess == STEPS
    again = sc.faithful.load(tmp_path, "small")
    assert again.arguments == net.arguments and again.thresholds == net.thresholds
    with intervene(again, quantile=0.9), intervene(net, quantile=0.9):
        assert_close(again(images).logits, net(images).logits)
    net.save(tmp_path, "pruned", removed=[[0, 1]])  # heads of the only stage, or of the second
    assert bool(sc.faithful.load(tmp_path, "pruned").thresholds) == (stages == 2)
    assert json.loads((tmp_path / "small.json").read_text())["trained_on"] == "nothing"


@pytest.mark.parametrize("stages", [1, 2])
def test_heads_are_removed_for_good_and_the_network_stays_one(stages, tmp_path):
    """Zeros are in the tower that answers; thresholds are kept where stage 1 measures what it
    measured."""
    net, images, heads = tiny_net(stages=stages), random_images(), [(0, 1), (2, 0), (2, 2)]
    calibrate(net, images, 0.9)
    model = sc.wrap(net)
    with sc.background.ablate(model, heads):
        expected = model(images)
    assert (expected - model(images)).abs().max() > 1e-3
    again = sc.load(str(sc.background.export(model, heads, tmp_path / "zeroed")), dtype="float64")
    assert_close(again(images), expected, atol=1e-6, rtol=0)  # files are read in float32
    assert bool(again.module.thresholds) == (stages == 2)
    assert "sc.load(FOLDER)" in (tmp_path / "zeroed" / "README.md").read_text()
    card = json.loads((tmp_path / "zeroed" / "ifam.json").read_text())
    assert card["removed"] == [list(head) for head in heads]
    assert {"model", "layers", "fingerprint", "seecause"} <= set(card)
    with pytest.raises(UnsupportedModel, match="or export"):
        sc.background.prune_heads(model, heads)


def test_a_card_may_name_models_only(tmp_path):
    """What a card says is built: nothing else of a library may run."""
    with pytest.raises(BadOption, match="architecture is not set"):
        tiny_net(timm_backbone()).save(tmp_path)
    card = tiny_net(dinov2_backbone(), size=(40, 40)).save(tmp_path)
    fields = json.loads(card.read_text())
    assert sc.faithful.load(tmp_path).parts == 3
    fields["architecture"]["backbone"]["class"] = "pipeline"
    card.write_text(json.dumps(fields))
    with pytest.raises(sc.SeecauseError, match="pipeline"):
        sc.faithful.load(tmp_path)
