"""A vision-language model as a classifier: native answers, exact head scores in both scopes, a
checkpoint without heads, prompts that share what they can, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.errors import (
    BadInput,
    BadOption,
    EditLost,
    NotDefined,
    UnsupportedModel,
    ViewMismatch,
)
from seecause.lvlm.prompt_classifier import ask_labels, ask_names, sequence_tree, verify_answers
from seecause.models.block import columns
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


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_scored_as_native_runs_score_them(family):
    expected = prompted.by_names(
        lvlm(family).module, ids(family), [words(family, name) for name in NAMES], pictures()
    )
    assert_close(asked(family)(pictures()), expected, atol=1e-10, rtol=0)


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
        calls.clear()
        sc.lvlm.classifier(model.lvlm, NAMES[:2], question=QUESTION, check=False)
        assert not calls
        sc.lvlm.classifier(model.lvlm, NAMES[:2], question=QUESTION)
        assert calls
    finally:
        spy.remove()


@pytest.mark.parametrize("family", ["llava", "internvl"])
def test_labels_are_scored_as_native_runs_score_them_in_every_order(family):
    first, prompts, labels = ("cat", "dog", "blue"), [], []
    for order in (first, ("dog", "blue", "cat"), ("blue", "cat", "dog")):  # each is first once
        listed = "\n".join(f"{letter}. {name}" for letter, name in zip("ABC", order, strict=True))
        text = f"{QUESTION}\n{listed}\nAnswer with the letter of the right option."
        prompts.append(ids(family, text))
        labels.append([words(family, "ABC"[order.index(name)])[0] for name in first])
    slow = prompted.by_labels(lvlm(family).module, prompts, labels, pictures())
    assert_close(asked(family, "label_token")(pictures()), slow, atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", ["llava", "internvl", "next"])
def test_the_exported_model_answers_like_the_ablated_one(family, tmp_path):
    model, heads = asked(family), [(0, 1), (1, 0)]
    before, left = model(pictures()), hooks(model.module)  # transformers keeps some of its own
    with sc.background.ablate(model, heads):
        ablated = model(pictures())
    folder = model.export(heads, tmp_path / "out", note="chosen by hand")
    assert (
        torch.equal(model(pictures()), before) and hooks(model.module) == left
    )  # the model itself is untouched
    native = tiny_lvlm(FAMILIES[family], seed=1)
    native.module.load_state_dict(
        type(model.module).from_pretrained(folder).state_dict()
    )  # into norms that compute in float64
    again = sc.lvlm.classifier(
        sc.lvlm.wrap(native.module, native.processor), NAMES, question=QUESTION
    )
    assert_close(again(pictures()), ablated, atol=1e-10, rtol=0)
    assert not torch.allclose(before, ablated)
    page = (folder / "README.md").read_text()
    assert (
        "chosen by hand" in page
        and "The heads are those of its vision tower" in page
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


def test_images_that_a_processor_pads_are_refused(monkeypatch):
    view = lvlm("llava")
    padded = json.dumps(
        {**json.loads(view.processor.image_processor.to_json_string()), "do_pad": 1}
    )
    monkeypatch.setattr(type(view.processor.image_processor), "to_json_string", lambda self: padded)
    with pytest.raises(UnsupportedModel, match="pads images to a square"):
        sc.lvlm.classifier(view, NAMES, question=QUESTION)


def test_images_in_several_tiles_are_refused_with_the_remedy():
    native = tiny_lvlm("llava_next")
    view = sc.lvlm.wrap(native.module, native.processor)
    with pytest.raises(UnsupportedModel, match=r"image_grid_pinpoints = \[\[32, 32\]\]"):
        sc.lvlm.classifier(view, NAMES, question=QUESTION)
    native.module.config.image_grid_pinpoints = [[32, 32]]
    with pytest.raises(BadOption, match="as in the model's config"):
        sc.lvlm.classifier(view, NAMES, question=QUESTION)
    native.processor.image_processor.image_grid_pinpoints = [[32, 32]]
    assert sc.lvlm.classifier(view, NAMES, question=QUESTION).preprocess.size == (32, 32)


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


@pytest.mark.parametrize("family", ["llava", "normed"])
def test_suffix_scores_are_naive_scores(family):
    model = asked(family, "label_token")
    images, keep = pictures(), objects()
    block, natives = model.blocks[0], [block.native for block in model.blocks]
    expected = cigma.head_effects(
        2,
        natives,
        block.heads,
        block.head_dim,
        lambda i: cigma.gains(model.native, images[i], keep[i])[1],
    )
    data = sc.background.LabelledImages(images, masks=keep)
    assert_close(sc.background.score(model, data).effects, expected, atol=1e-10, rtol=0)
    gains = sc.background.information_gains(model, data)
    slow = torch.tensor(
        [cigma.gains(model.native, image, mask) for image, mask in zip(images, keep, strict=True)],
        dtype=torch.float64,
    )
    assert_close(torch.stack([gains.fig, gains.big], dim=1), slow, atol=1e-10, rtol=0)


def test_what_takes_a_model_with_heads_takes_it():
    model, images, keep = asked("llava"), pictures(3), objects(3)
    labels = model(images).argmax(dim=1)
    # differentiable in the pixels
    found = sc.background.discover_masks(model, images, steps=2, grid=4)
    assert found.hard.shape == keep.shape
    data = sc.background.LabelledImages(images, labels, keep)
    for by in ("taylor", "attention-mass"):
        result = sc.background.select(by, model, data)
        assert bool(result.value.isfinite().all()) and result.value.shape == (3, 2), by
    assert model.readout_name == f"by name_ll, question {QUESTION}"


def test_a_fingerprint_knows_what_is_asked_and_heads_that_are_switched_off(tmp_path):
    model = asked("llava")
    whole = model.fingerprint()
    with sc.background.ablate(model, [(0, 1)]):
        assert model.fingerprint() != whole
        with pytest.raises(NotDefined, match="gates"):
            model.export([(0, 0)], tmp_path / "out")
    question = "what is in the picture ?"
    other = sc.lvlm.classifier(lvlm("llava"), NAMES, question=question, check=False)
    assert len({whole, other.fingerprint(), asked("llava", "label_token").fingerprint()}) == 3
    assert model.fingerprint() == whole
    # the last token of a name is read, never said
    pairs = [
        sc.lvlm.classifier(lvlm("llava"), names, question=QUESTION, check=False)
        for names in (("cat", "dog"), ("cat", "blue"), ("dog", "cat"))
    ]
    assert len({pair.query.sequences for pair in pairs}) == 1
    assert len({pair.fingerprint() for pair in pairs}) == 3


def test_an_export_that_keeps_a_head_is_refused_when_it_is_written(tmp_path, monkeypatch):
    which = "seecause.lvlm.prompt_classifier.columns"
    monkeypatch.setattr(which, lambda heads, width: columns([h ^ 1 for h in heads], width))
    with pytest.raises(EditLost, match="'export'"):
        asked("llava").export([(0, 1)], tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_an_exported_model_says_how_it_was_asked(tmp_path):
    view, template = lvlm("llava"), "{image} a {question}"
    own = replace(view, template=template)
    model = sc.lvlm.classifier(own, NAMES, question=QUESTION, check=False)
    folder = model.export([(0, 1), (2, 0)], tmp_path)
    assert json.loads((folder / "seecause-heads.json").read_text()) == {
        "form": "zeroed", "model": model.name, "removed": [[0, 1], [2, 0]], "by": "name_ll",
        "layers": [2, 2, 2], "question": QUESTION, "template": template,
        "classes": list(NAMES), "fingerprint": view.fingerprint(), "seecause": sc.__version__,
    }  # fmt: skip
    page = (folder / "README.md").read_text()
    assert f"template={template!r}" in page and view.fingerprint() in page


def test_a_tree_holds_what_sequences_share_once():
    tree = sequence_tree([(1, 2, 3, 4), (1, 2, 5), (1, 2, 3, 6)])
    assert tree.ids.tolist() == [1, 2, 3, 4, 5, 3, 6] and tree.trunk == 2
    assert tree.positions.tolist() == [0, 1, 2, 3, 2, 2, 3]
    assert tree.branch.tolist() == [0, 0, 1, 1, 2, 3, 3]
    assert [tree.row(2, place) for place in range(4)] == [0, 1, 5, 6]


def test_branches_hide_from_each_other():
    view, tree = lvlm("llava"), sequence_tree([(1, 2, 3, 4), (1, 2, 5), (1, 2, 3, 6)])
    block = tree.separated(view.blocks)[-1]
    at = view.decoder.at(tree.positions[None], view.decoder.head.weight[:1, :1])
    bias, few = block.bias(at, at), block.bias(at.take(torch.tensor([4, 1])), at)
    assert torch.equal(few, bias[:, :, [4, 1]])
    seen = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 5], [0, 1, 5, 6]]
    assert [(row == 0).nonzero()[:, 0].tolist() for row in bias[0, 0]] == seen


def test_names_and_labels_that_tokens_cannot_tell_apart_are_refused():
    many = [f"name{place}" for place in range(27)]
    with pytest.raises(BadInput, match="27 options by letters"):
        ask_labels(many, "what ?", lambda q: [1], lambda q, answer: [ord(answer)])
    with pytest.raises(BadInput, match="3 options by letters"):
        ask_labels(many[:3], "what ?", lambda q: [1], lambda q, answer: [1, 2])
    with pytest.raises(BadInput, match=r"class 'dog  '.*the same tokens"):
        ask_names(("dog", "dog  "), "what ?", lambda q: [1], lambda q, answer: [2])


def test_what_cannot_be_asked_is_refused(tmp_path):
    view, model, tiled = lvlm("llava"), asked("llava"), tiny_lvlm("llava_next")
    after = "{question} {image} ASSISTANT"
    behind = sc.lvlm.wrap(view.module, view.processor, template=after, check=False)
    bare = sc.lvlm.wrap(view.module, template="{image} {question}", check=False)
    other = sc.lvlm.wrap(tiled.module, tiled.processor)
    ask = sc.lvlm.classifier
    labels = {"question": QUESTION, "by": "label_token"}
    cases = {
        "a model wrapped with it": (BadOption, lambda: ask(bare, NAMES, question=QUESTION)),
        "^an empty question": (BadInput, lambda: ask(view, NAMES, question=" ")),
        "two different names": (BadOption, lambda: ask(view, ["cat"])),
        "by=": (BadOption, lambda: ask(view, NAMES, by="guess")),
        "words that the model's tokenizer does not know": (
            BadInput,
            lambda: ask(view, ["cat", "zebra"], question=QUESTION),
        ),
        "cuts images into tiles": (UnsupportedModel, lambda: ask(other, NAMES)),
        "after the question": (UnsupportedModel, lambda: ask(behind, NAMES[:2], **labels)),
        "or model.export": (NotDefined, lambda: sc.background.prune_heads(model, [(0, 0)])),
        "Use model.export": (NotDefined, lambda: sc.background.export(model, [(0, 0)], tmp_path)),
        "read by a language model": (NotDefined, lambda: sc.background.divprune(model, pictures())),
        "not for vision-language models that are asked": (
            NotDefined,
            lambda: sc.attribute(model, pictures(), method="caap"),
        ),
    }
    for message, (error, run) in cases.items():
        with pytest.raises(error, match=message):
            run()
