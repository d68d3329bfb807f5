"""The Heads panel: what it answers is what ablated models answer."""

import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import seecause as sc
from seecause.app.panels import heads
from seecause.app.panels.heads import HeadsRequest
from seecause.app.state import ActionContext, open_state
from seecause.errors import BadOption
from tests.app.conftest import context_of

ON = {"model": "critters-vit", "picture": "s1"}
OFF = (3, 12, 20, 41)  # layer x 8 + head
PAIRS = [(0, 3), (1, 4), (2, 4), (5, 1)]


def agree(answers, logits):
    chances = logits.softmax(dim=-1)
    for answer in answers:
        assert answer["probability"] == pytest.approx(float(chances[answer["class"]]), abs=1e-5)


@torch.no_grad()
def test_heads_at_zero_are_ablated(context):
    answer = heads.switch(context, HeadsRequest(**ON, off=OFF))
    image = context.image("s1")
    agree(answer["before"], context.model(image)[0])
    with sc.background.ablate(context.model, PAIRS):
        agree(answer["after"], context.model(image)[0])
    assert answer["heads"] == 4


def test_the_backgrounds_share_is_that_of_information_gains(context):
    answer = heads.switch(context, HeadsRequest(**ON, off=OFF))
    mask = context.picture("s1").masks["critters-vit"]
    data = sc.background.LabelledImages(context.image("s1"), masks=mask)
    gains = sc.background.information_gains(context.model, data)
    before, after = answer["background"]
    assert before["share"] == pytest.approx(float(gains.bir[0]), abs=1e-3)
    with sc.background.ablate(context.model, PAIRS):
        gains = sc.background.information_gains(context.model, data)
    assert after["share"] == pytest.approx(float(gains.bir[0]), abs=1e-3)


@pytest.mark.parametrize("by", ["answer", "background"])
def test_scores_are_the_librarys(context, by):
    answer = heads.score(context, HeadsRequest(**ON, by=by))
    mask = context.picture("s1").masks["critters-vit"]
    response = {"answer": "logit", "background": "big"}[by]
    data = sc.background.LabelledImages(context.image("s1"), masks=None if by == "answer" else mask)
    expected = sc.background.score(context.model, data, response=response, guard=False)
    values = torch.tensor(answer["values"], dtype=torch.float64)
    torch.testing.assert_close(values, expected.value, rtol=1e-3, atol=1e-6)


def test_maps_before_and_after_are_the_librarys(context):
    answer = heads.maps(context, HeadsRequest(**ON, off=OFF, target=2))
    with sc.background.ablate(context.model, PAIRS):
        after = sc.attribute(context.model, context.image("s1"), target=2).maps[0]
    values = torch.tensor(answer["after"]["values"])
    torch.testing.assert_close(values, after.flatten(), rtol=1e-3, atol=1e-6)
    assert (answer["before"]["low"], answer["before"]["high"]) == (
        answer["after"]["low"], answer["after"]["high"],
    )  # fmt: skip
    assert context.model.gates is None


def test_the_exported_checkpoint_answers_as_the_page_does(context, tmp_path):
    answer = heads.export(context, HeadsRequest(**ON, off=OFF))
    name, path = context.session.file(answer["file"])
    assert name == "critters-vit-without-4-heads.zip"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path)
    with torch.no_grad():
        logits = sc.load(str(tmp_path))(context.image("s1"))[0]
    agree(heads.switch(context, HeadsRequest(**ON, off=OFF))["after"], logits)
    with pytest.raises(BadOption, match="at least one head"):
        heads.export(context, HeadsRequest(**ON))


def test_copied_python_gives_the_numbers_of_the_page(context, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = HeadsRequest(**ON, off=OFF)
    names: dict = {}
    exec(heads.copy(context, request)["python"].replace("print(", "_ = ("), names)
    agree(heads.switch(context, request)["after"], names["logits"].detach())


def test_jobs_at_once_do_not_disturb_each_other():
    """A proof that heads are off zeroes shared weights: no job may make one beside another."""
    state = open_state(["builtin:critters-vit"])
    served, session = state.models["critters-vit"], context_of(state).session
    asked = HeadsRequest(**ON, by="answer")

    def job(function, request):
        with served.borrow() as view:
            quiet = lambda share, words="": None  # noqa: E731
            return function(ActionContext(state, session, served, quiet, view), request)

    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(job, heads.switch, HeadsRequest(**ON, off=OFF)) for _ in range(4)]
        scores = [pool.submit(job, heads.score, asked) for _ in range(2)]
        values = [score.result()["values"] for score in scores]
        assert all(other.result() for other in others)
    assert values == [job(heads.score, asked)["values"]] * 2
    state.close()


def test_heads_that_are_not_there_are_refused(context):
    with pytest.raises(BadOption, match="layers 0-5"):
        heads.switch(context, HeadsRequest(**ON, off=(48,)))


def test_where_nothing_moves_there_is_no_share(context):
    every = tuple(range(context.transformer.n_layers * context.transformer.n_heads))
    before, after = heads.switch(context, HeadsRequest(**ON, off=every))["background"]
    assert before["share"] is not None and after["share"] is None
