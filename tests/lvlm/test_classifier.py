"""A vision-language model as a classifier: native answers, exact head scores in both scopes, and a
checkpoint without heads."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause import critters
from seecause.critters.questions import wordings
from seecause.errors import NotDefined, UnsupportedModel, ViewMismatch
from seecause.lvlm.prompt_classifier import verify_answers
from tests.families.lvlm import photo, tiny_lvlm
from tests.helpers import hooks
from tests.lvlm.classifiers import (
    FAMILIES,
    NAMES,
    QUESTION,
    asked,
    ids,
    lvlm,
    objects,
    pictures,
    words,
)
from tests.reference import cigma, prompted


@pytest.mark.parametrize("scope", ["vision", "llm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_scored_as_native_runs_score_them(family, scope):
    expected = prompted.by_names(
        lvlm(family).module, ids(family), [words(family, name) for name in NAMES], pictures()
    )
    assert_close(asked(family, scope)(pictures()), expected, atol=1e-10, rtol=0)


def test_answers_are_compared_with_native_runs_of_the_first_names(monkeypatch):
    model, calls = asked("llava"), []
    spy = model.lvlm.module.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        verify_answers(model)
        assert len(calls) == len(NAMES) == 4
        monkeypatch.setattr("seecause.lvlm.prompt_classifier._CHECKED", 2)
        verify_answers(model)
        assert len(calls) == 4 + 2
        monkeypatch.setattr(model, "query", replace(model.query, share=2 * model.query.share))
        with pytest.raises(ViewMismatch, match="the classes"):
            verify_answers(model)
    finally:
        spy.remove()


@pytest.mark.parametrize("options", [{}, {"check": True}, {"check": False}])
def test_answers_are_compared_unless_that_is_switched_off(options, monkeypatch):
    compared = []
    monkeypatch.setattr("seecause.lvlm.prompt_classifier.verify_answers", compared.append)
    model = sc.lvlm.classifier(lvlm("llava"), NAMES, question=QUESTION, **options)
    assert compared == ([] if options == {"check": False} else [model])


def test_summed_likelihoods_are_not_divided_by_length():
    model = sc.lvlm.classifier(lvlm("llava"), NAMES, question=QUESTION, length="sum")
    expected = prompted.by_names(
        lvlm("llava").module,
        ids("llava"),
        [words("llava", name) for name in NAMES],
        pictures(),
        mean=False,
    )
    assert_close(model(pictures()), expected, atol=1e-10, rtol=0)


def test_the_prior_is_what_a_grey_picture_says():
    model = sc.lvlm.classifier(lvlm("llava"), NAMES, question=QUESTION, prior=True)
    plain = asked("llava")
    assert_close(
        model(pictures()),
        plain(pictures()) - plain(torch.zeros(1, 3, 32, 32, dtype=torch.float64)),
        atol=1e-10,
        rtol=0,
    )
    assert model.fingerprint() != plain.fingerprint()


@pytest.mark.parametrize("scope", ["vision", "llm"])
@pytest.mark.parametrize("family", ["llava", "internvl"])
def test_labels_are_scored_as_native_runs_score_them_in_every_order(family, scope):
    orders = [
        ("cat", "dog", "blue"),
        ("dog", "blue", "cat"),
        ("blue", "cat", "dog"),
    ]  # every class stands first once
    lists = [
        "\n".join(f"{letter}. {name}" for letter, name in zip("ABC", order, strict=True))
        for order in orders
    ]
    prompts = [
        ids(family, f"{QUESTION}\n{listed}\nAnswer with the letter of the right option.")
        for listed in lists
    ]
    labels = [
        [words(family, "ABC"[order.index(name)])[0] for name in orders[0]] for order in orders
    ]
    model = asked(family, scope, "label_token")
    assert model.query.metadata["labels"] == "letters" and model.query.metadata["orders"] == 3
    assert_close(
        model(pictures()),
        prompted.by_labels(lvlm(family).module, prompts, labels, pictures()),
        atol=1e-10,
        rtol=0,
    )


def test_names_that_are_one_token_each_can_be_labels():
    model = sc.lvlm.classifier(
        lvlm("llava"), ("cat", "dog"), question=QUESTION, by="label_token", labels="names"
    )
    expected = prompted.by_labels(
        lvlm("llava").module,
        [ids("llava")],
        [[words("llava", name)[0] for name in ("cat", "dog")]],
        pictures(),
    )
    assert_close(model(pictures()), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("family", "scope"),
    [("llava", "vision"), ("normed", "vision"), ("grouped", "llm"), ("normed", "llm")],
)
def test_suffix_scores_are_naive_scores(family, scope):
    model = sc.lvlm.classifier(
        lvlm(family),
        ("cat", "dog", "blue"),
        question=QUESTION,
        by="label_token",
        labels="names",
        scope=scope,
    )
    images, keep = pictures(), objects()
    block, natives = model.blocks[0], [block.native for block in model.blocks]
    expected = cigma.head_effects(
        2,
        natives,
        block.heads,
        block.head_dim,
        lambda i: cigma.gains(model.native, images[i], keep[i])[1],
    )
    assert_close(
        sc.background.score(model, sc.background.LabelledImages(images, masks=keep)).effects,
        expected,
        atol=1e-10,
        rtol=0,
    )
    gains = sc.background.information_gains(model, sc.background.LabelledImages(images, masks=keep))
    slow = torch.tensor(
        [cigma.gains(model.native, image, mask) for image, mask in zip(images, keep, strict=True)],
        dtype=torch.float64,
    )
    assert_close(torch.stack([gains.fig, gains.big], dim=1), slow, atol=1e-10, rtol=0)


def test_heads_of_the_block_that_llava_drops_score_exactly_zero():
    model, images = asked("llava"), pictures()
    scores = sc.background.score(model, sc.background.LabelledImages(images, masks=objects()))
    assert (
        scores.value.shape == (3, 2)
        and bool((scores.value[-1] == 0).all())
        and bool((scores.value[:-1] != 0).all())
    )
    assert bool((scores.after["fig_drop"][-1] == 0).all()) and scores.protocol["heads_run"] == 4
    before = model.native(images)
    with cigma.without(model.blocks[-1].native, 0, model.blocks[-1].head_dim):
        assert torch.equal(
            model.native(images), before
        )  # it is the native model that does not read it
    with sc.background.ablate(model, [(2, 0), (2, 1)]):
        ablated = model(images)
    assert torch.equal(ablated, model(images))


@pytest.mark.parametrize("scope", ["vision", "llm"])
@pytest.mark.parametrize("family", ["llava", "internvl"])
def test_the_exported_model_answers_like_the_ablated_one(family, scope, tmp_path):
    model, heads = asked(family, scope), [(0, 1), (1, 0)]
    before, left = model(pictures()), hooks(model.module)  # transformers keeps some of its own
    with sc.background.ablate(model, heads):
        ablated = model(pictures())
    folder = sc.lvlm.export(model, heads, tmp_path / "out", note="chosen by hand")
    assert (
        torch.equal(model(pictures()), before) and hooks(model.module) == left
    )  # the model itself is untouched
    native = tiny_lvlm(FAMILIES[family], seed=1)
    native.module.load_state_dict(
        type(model.module).from_pretrained(folder).state_dict()
    )  # into norms that compute in float64
    again = sc.lvlm.classifier(
        sc.lvlm.wrap(native.module, native.processor), NAMES, question=QUESTION, scope=scope
    )
    assert_close(again(pictures()), ablated, atol=1e-10, rtol=0)
    assert not torch.allclose(before, ablated)
    page = (folder / "README.md").read_text()
    part = {"vision": "vision tower", "llm": "language model"}[scope]
    assert (
        "chosen by hand" in page
        and f"The heads are those of its {part}" in page
        and "belongs to no head" in page
        and "template=" not in page
    )
    assert (folder / "processor_config.json").is_file()


def test_classes_are_asked_for_in_the_models_own_template():
    view = replace(lvlm("llava"), template="{image} a {question}")
    model = sc.lvlm.classifier(view, NAMES, question=QUESTION, check=False)
    alone = view.prompt(photo((32, 32)), QUESTION).ids.tolist()
    assert list(model.query.sequences[0]) == alone != ids("llava")  # a name of one token
    assert list(model.query.sequences[1]) == [*alone, *words("llava", "red")]


def test_an_exported_model_says_which_template_it_was_asked_with(tmp_path):
    view, template = lvlm("llava"), "{image} a {question}"
    model = sc.lvlm.classifier(
        replace(view, template=template), NAMES, question=QUESTION, check=False
    )
    folder = sc.lvlm.export(model, [(0, 1), (2, 0)], tmp_path)
    assert json.loads((folder / "seecause-heads.json").read_text()) == {
        "form": "zeroed", "model": model.name, "scope": "vision", "removed": [[0, 1], [2, 0]],
        "layers": [2, 2, 2], "query": model.query.metadata, "template": template,
        "classes": list(NAMES), "fingerprint": view.fingerprint(), "seecause": sc.__version__,
    }  # fmt: skip
    page = (folder / "README.md").read_text()
    assert f"template={template!r}" in page and view.fingerprint() in page
    assert "without 2 of 6 attention heads" in page


def test_pictures_may_be_prepared_in_another_way_but_not_padded(monkeypatch):
    view = lvlm("llava")
    own = replace(asked("llava").preprocess, mean=(0.1, 0.2, 0.3))
    model = sc.lvlm.classifier(view, NAMES, question=QUESTION, preprocess=own, check=False)
    assert model.preprocess is own
    padded = json.dumps(
        {**json.loads(view.processor.image_processor.to_json_string()), "do_pad": 1}
    )
    monkeypatch.setattr(type(view.processor.image_processor), "to_json_string", lambda self: padded)
    with pytest.raises(UnsupportedModel, match="pads pictures to a square"):
        sc.lvlm.classifier(view, NAMES, question=QUESTION)
    assert sc.lvlm.classifier(view, NAMES, question=QUESTION, preprocess=own).preprocess is own


@pytest.mark.parametrize("scope", ["vision", "llm"])
def test_what_takes_a_model_with_heads_takes_it(scope):
    model, images, keep = asked("llava", scope), pictures(3), objects(3)
    labels = model(images).argmax(dim=1)
    assert (
        sc.background.discover_masks(model, images, steps=2, grid=4).hard.shape == keep.shape
    )  # differentiable in the pixels
    data = sc.background.LabelledImages(images, labels, keep)
    for by in ("taylor", "attention-mass", "weight-norm"):
        result = sc.background.select(by, model, data)
        assert bool(result.value.isfinite().all()) and result.value.shape == (
            model.n_layers,
            model.n_heads,
        ), by
    assert sc.background.screen(model, data, top=1).value.isfinite().sum() >= 4
    assert (
        model.readout_name
        == f"by name_ll, question {QUESTION}, length mean; heads of scope {scope}"
    )


def test_attention_mass_of_the_language_model_is_what_answer_rows_send_to_image_tokens():
    model, images = asked("llava", "llm", "label_token"), pictures(1)
    result = sc.background.select(
        "attention-mass",
        model,
        sc.background.LabelledImages(images, masks=torch.zeros(1, 32, 32, dtype=torch.bool)),
    )
    layout, module = model.layout, lvlm("llava").module
    assert layout.grid == (4, 4) and layout.tokens == len(model.query.tree.ids)
    module.set_attn_implementation("eager")
    try:
        shares = torch.zeros(4, 4, dtype=torch.float64)
        for sequence in model.query.sequences:
            tokens = torch.tensor([sequence])
            out = module(
                input_ids=tokens,
                pixel_values=images,
                attention_mask=torch.ones_like(tokens),
                output_attentions=True,
            )
            shares += torch.stack(
                [probs[0, :, -1, layout.patches].sum(dim=-1) for probs in out.attentions]
            ) / len(model.query.sequences)
    finally:
        module.set_attn_implementation("sdpa")
    assert_close(result.value, shares, atol=1e-6, rtol=0)  # the native softmax is in float32


def test_critters_llava_names_its_creatures():
    view = sc.lvlm.load("builtin:critters-llava")
    latents = critters.draw("clean", "test", 8)
    scene = critters.render(latents)
    for by in ("name_ll", "label_token"):
        model = sc.lvlm.classifier(view, critters.CLASSES, question=wordings("creature")[0], by=by)
        images = model.preprocess.normalise(scene.image)
        assert bool((model(images).argmax(dim=1) == latents.creature).all())
    assert model.query.metadata["labels"] == "names"  # its tokenizer knows no letters
    scores = sc.background.score(
        model, sc.background.LabelledImages(images[:2], masks=scene.mask[:2])
    )
    assert bool((scores.value[3] == 0).all()) and bool((scores.value[:3] != 0).any())


@pytest.mark.parametrize("family", ["llava", "internvl"])
def test_the_layout_counts_every_token_and_memory_grows_with_them(family):
    model, short = asked(family, "llm"), asked(family, "llm", "label_token")
    layout, image = model.layout, lvlm(family).module.config.image_token_id
    assert layout.tokens == len(model.query.tree.ids) > layout.n_patches
    assert (model.query.tree.ids[layout.patches] == image).all()
    config, element = lvlm(family).decoder.native.config, 8
    row = element * (12 * config.hidden_size + 3 * config.intermediate_size)
    words = 2 * lvlm(family).decoder.head.out_features * element
    other = replace(short, blocks=model.blocks, layout_at=model.layout_at)  # only the query differs
    tokens = len(short.query.tree.ids) - len(model.query.tree.ids)
    rows = len(short.query.rows) - len(model.query.rows)
    gap = other.forward_bytes(layout) - model.forward_bytes(layout)
    assert gap == tokens * row + rows * words


def test_pictures_have_the_size_of_the_tower_whatever_the_processor_says(monkeypatch):
    view = lvlm("llava")
    config = json.loads(view.processor.image_processor.to_json_string())
    for name in ("size", "crop_size"):
        if isinstance(config.get(name), dict):
            config[name] = dict.fromkeys(config[name], 48)
    told = json.dumps(config)
    monkeypatch.setattr(type(view.processor.image_processor), "to_json_string", lambda self: told)
    model = sc.lvlm.classifier(view, NAMES, question=QUESTION, check=False)
    assert model.preprocess.size == (32, 32)


def test_a_fingerprint_knows_heads_that_are_switched_off_and_what_is_asked(tmp_path):
    model = asked("llava")
    whole = model.fingerprint()
    with sc.background.ablate(model, [(0, 1)]):
        assert model.fingerprint() != whole
        with pytest.raises(NotDefined, match="gates"):
            sc.lvlm.export(model, [(0, 0)], tmp_path / "out")
    assert model.fingerprint() == whole != asked("llava", "llm").fingerprint()
    names = ("cat", "dog", "blue")
    options = {"question": QUESTION, "by": "label_token"}
    three, five = (sc.lvlm.classifier(lvlm("llava"), names, orders=n, **options) for n in (3, 5))
    assert five.query.metadata["orders"] == 3 and three.fingerprint() == five.fingerprint()
    one = sc.lvlm.classifier(lvlm("llava"), names, orders=1, **options)
    assert one.query.metadata["orders"] == 1 and one.fingerprint() != three.fingerprint()
