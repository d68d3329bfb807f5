"""Other models than the embedded ones: convolutional, without a class token, of another size."""

from collections import OrderedDict

import pytest
import torch
from PIL import Image

from seecause.app.panels import OnPicture, explain, heads, parts, swap
from seecause.app.panels.explain import Brush
from seecause.app.state import AVERAGED, OPENED, ServerState, open_state
from seecause.background import ablate
from seecause.cli import serve
from seecause.errors import BadImage, BadOption, NotDefined
from seecause.faithful import intervene
from tests.app.conftest import context_of
from tests.cli.calls import invoke
from tests.families.conv import CONV_FAMILIES, tiny_conv
from tests.helpers import view
from tests.tiny import tiny


def serving(model, **options):
    state = open_state(["mine:toy"], load=lambda spec: model, **options)
    return context_of(state, "toy")


@pytest.mark.parametrize("family", ["timm_mean", "timm_distilled"])
def test_transformers_of_other_kinds_are_explained_and_swapped(family):
    context = serving(view(tiny(family), check=False))
    on = {"model": "toy", "picture": "s0"}
    every = tuple(range(context.model.layout.n_patches))
    whole = explain.look(context, OnPicture(**on))["answers"]
    only = explain.brush(context, Brush(**on, patches=every))["only"]
    for one, other in zip(whole, only, strict=False):
        assert one["class"] == other["class"]
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-4)
    assert len(explain.draw(context, Brush(**on), "caap")["values"]) == len(every)
    request = swap.Swap(model="toy", a="s0", b="s0", patches=(0, 1))
    assert swap.exchange(context, request)["patches"] == 2
    assert heads.switch(context, heads.HeadsRequest(**on, off=(0,)))["heads"] == 1
    context.state.close()


def test_convolutional_networks_are_explained_and_other_panels_say_why_not():
    native = tiny_conv(next(iter(CONV_FAMILIES)))
    context = serving(view(native, check=False))
    on = {"model": "toy", "picture": "s0"}
    answer = explain.brush(context, Brush(**on, patches=(0, 1)))
    assert answer["only"] and explain.draw(context, Brush(**on), "caap")["values"]
    with pytest.raises(NotDefined, match="no transformer blocks"):
        swap.exchange(context, swap.Swap(model="toy", a="s0", b="s0"))
    with pytest.raises(NotDefined, match="no transformer blocks"):
        heads.switch(context, heads.HeadsRequest(**on))
    context.state.close()


def test_heads_that_one_job_switches_off_are_on_in_all_others(state):
    served, image = state.models["critters-vit"], state.sample("s0").inputs["critters-vit"]
    every = [(layer, head) for layer in range(6) for head in range(8)]
    with served.borrow() as one, served.borrow() as other:
        plain = other(image)
        with ablate(one, every):
            assert one(image).sub(plain).abs().max() > 0.1
            assert other(image).equal(plain)
            with served.borrow() as third:
                assert third(image).equal(plain)
    assert len(served.spare) == 3 and all(view.gates is None for view in served.spare)


def test_parts_are_taken_out_of_a_network_that_no_other_job_has(state):
    served = state.models["critters-ifam"]
    context = context_of(state, "critters-ifam")
    with parts.own_network(context) as net, intervene(net, drop_parts=range(net.parts)):
        assert not served.view.module.intervention and not served.view.module.removed.any()
    weights = zip(net.parameters(), served.view.module.parameters(), strict=True)
    assert net is not served.view.module and all(one is other for one, other in weights)


def test_a_model_that_is_not_served_is_refused(state):
    with pytest.raises(BadOption, match="one of critters-vit"):
        state.served("timm:vit_base_patch16_224")


def pictures_in(folder, names):
    for name in names:
        Image.new("RGB", (40, 40), (9, 90, 200)).save(folder / name)
    return [str(folder / name) for name in names]


def test_a_sample_that_cannot_be_read_is_skipped_and_named_once(tmp_path, caplog):
    samples = pictures_in(tmp_path, ("b.png", "c.png"))
    (tmp_path / "c.png").write_bytes(b"gone")
    model = view(tiny("timm_mean"), check=False)
    state = open_state(["mine:toy"], load=lambda spec: model, samples=samples)
    for _ in range(2):
        with pytest.raises(BadImage):
            state.sample("s1")
    assert list(state.samples) == ["s0"] and caplog.text.count("c.png") == 1
    state.close()


def test_averages_take_an_even_part_of_many_samples_and_few_stay_open(tmp_path):
    names = pictures_in(tmp_path, [f"{place}.png" for place in range(100)])
    state = ServerState({}, OrderedDict((f"s{place}", name) for place, name in enumerate(names)))
    ids = state.averaged()
    assert len(ids) == len(set(ids)) == AVERAGED and ids[16] == "s50"
    heard, context = [], context_of(state)
    context.progress = lambda share, words="": heard.append(words)
    assert len(list(context.averaged_pictures())) == AVERAGED == len(heard)
    for id in state.samples:
        state.sample(id)
    assert len(state.opened) == OPENED and state.opened.get("s99") and not state.opened.get("s0")
    state.close()


def test_the_checkpoint_is_named_in_what_is_copied():
    model = view(tiny("timm_mean"), check=False)
    context = serving(model, weights="/home/me/secret/w.pt")
    texts = explain.copy(context, Brush(model="toy", picture="s0"))
    assert "weights='w.pt'" in texts["python"]
    assert "secret" not in str(texts)
    context.state.close()


def test_serve_reads_pictures_as_it_is_told_and_copies_say_so(monkeypatch, tmp_path):
    opened = []
    monkeypatch.setattr(serve, "_listen", lambda state, *place, **options: opened.append(state))
    threads = torch.get_num_threads()
    names = tmp_path / "names.txt"
    names.write_text("\n".join(f"kind {number}" for number in range(1000)))
    words = "serve --model timm:test_vit --weights random --input mean=0.25"
    words += " --input std=0.5,0.25,0.5 --input size=160 --device cpu --port 0"
    done = invoke(*words.split(), "--classes", names)
    torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    (state,) = opened
    served = state.models["test_vit"]
    image = state.sample("s0").inputs["test_vit"]
    seen = served.view.preprocess(Image.new("RGB", (50, 40), "white"))
    assert torch.allclose(seen[0, :, 0, 0], torch.tensor([1.5, 3.0, 1.5]), atol=1e-5)
    assert image.shape == (1, 3, 160, 160) and served.facts()["classes"][7] == "kind 7"
    context = context_of(state, "test_vit")
    texts = explain.copy(context, Brush(model="test_vit", picture="s0"))
    assert "mean=(0.25, 0.25, 0.25), std=(0.5, 0.25, 0.5), size=160" in texts["python"]
    assert str(tmp_path) not in str(texts)
    state.close()


def test_classes_that_answer_independently_are_shown_and_copied_so(capsys):
    model = view(tiny("timm_mean"), check=False)
    model.sigmoid = True
    context = serving(model)
    logits = model(context.image("s0"))[0]
    shown = explain.look(context, OnPicture(model="toy", picture="s0"))["answers"]
    for answer in shown:
        expected = float(logits[answer["class"]].sigmoid())
        assert answer["probability"] == pytest.approx(expected, abs=1e-5)
    off = heads.switch(context, heads.HeadsRequest(model="toy", picture="s0", off=(0,)))
    assert off["background"] is None  # its share is one of a distribution
    for copied in (
        swap.copy(context, swap.Swap(model="toy", a="s0", b="s0", patches=(1,))),
        heads.copy(context, heads.HeadsRequest(model="toy", picture="s0", off=(0,))),
    ):
        exec(copied["python"].splitlines()[-1], {"model": model, "logits": logits})
        assert float(capsys.readouterr().out.split()[-1]) == pytest.approx(
            float(logits.sigmoid().max())
        )
    context.state.close()
