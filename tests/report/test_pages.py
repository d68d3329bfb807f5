"""The page is one file that needs nothing else, and says what it shows."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from markupsafe import Markup

from seecause.background.repair import Candidate
from seecause.report import pages
from seecause.report.background import _crops, remedies_section
from seecause.report.explain import answer_text, explain_panel, explain_section
from seecause.report.figures import scale_of
from seecause.report.pages import (
    Card,
    CardFile,
    MapView,
    Section,
    Strip,
    cards_html,
    file_names,
    head_grid,
    protocol_section,
    render_page,
    rows_csv,
    table,
)
from tests.report.examples import MANIFEST, explanation

TEMPLATES = Path(pages.__file__).parent / "templates"


class Outline(HTMLParser):
    """Collects tags and addresses, and notices tags that are not closed."""

    VOID = frozenset({"meta", "link", "img", "input", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.addresses += [value for key, value in attrs if key in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def outline(html: str) -> Outline:
    parser = Outline()
    parser.feed(html)
    assert not parser.open
    return parser


def test_the_page_refers_to_nothing_outside():
    page = render_page(
        "Title",
        [explain_section(explanation(methods=("caap", "sobel"))), protocol_section([MANIFEST])],
    )
    assert all(address.startswith(("data:", "#")) for address in outline(page).addresses)
    assert not re.search(r"https?://|@import", page)


def test_each_picture_has_a_card_and_each_method_a_map():
    seen = outline(explain_section(explanation(methods=("caap", "sobel", "center"))).body).seen
    assert seen.count("article") == 2
    assert seen.count("figure") == 2 * (1 + 3)


def test_names_from_outside_are_escaped():
    body = explain_section(explanation(names=("<script>alert(1)</script>.png",))).body
    assert "<script>alert" not in body and "&lt;script&gt;" in body
    assert "tiger <cat>" not in body


def test_random_weights_are_never_shown_without_saying_so():
    assert "random weights" in explain_section(explanation(random_weights=True)).body
    assert "RANDOM" in protocol_section([{**MANIFEST, "random_weights": True}]).body


def test_the_protocol_names_what_made_the_numbers():
    body = protocol_section([MANIFEST]).body
    for fact in (
        "caap",
        "tail=source",
        "timm:toy",
        "0123456789abcdef",
        "cpu, float32",
        "torch 2.0",
    ):
        assert fact in body


def test_sections_of_any_job_fit():
    page = render_page("Demo", [Section("Which heads?", Markup("<p>table</p>"), note="Read & see")])
    assert 'id="which-heads"' in page and "<p>table</p>" in page and "Read &amp; see" in page


def test_a_page_of_chapters_has_only_these_in_its_navigation():
    sections = [
        Section("First?", Markup(""), chapter="One"),
        Section("Second?", Markup("")),
        Section("Third?", Markup(""), chapter="Two"),
    ]
    assert links(render_page("Demo", sections)) == ["One", "Two"]
    assert links(render_page("Demo", sections[1:2])) == ["Second?"]
    assert links(
        render_page("Demo", [Section("A long question?", Markup(""), short="Short?")])
    ) == ["Short?"]


def links(page: str) -> list[str]:
    return re.findall(r'<a href="#[^"]+">([^<]+)</a>', page)


def test_controls_of_maps_are_there_only_with_maps():
    assert 'id="opacity"' in render_page("Maps", [explain_section(explanation())])
    plain = render_page("Tables", [Section("Which heads?", Markup("<p>table</p>"))])
    assert 'id="opacity"' not in plain and "<script>" not in plain


def test_short_names_are_explained_under_what_uses_them():
    page = render_page(
        "Demo", [Section("Which heads?", Markup("<p>table</p>"), terms={"BIR": "share < 1"})]
    )
    assert "<dt>BIR</dt> <dd>share &lt; 1</dd>" in page


def test_what_all_runs_share_is_said_once():
    body = protocol_section([MANIFEST, {**MANIFEST, "method": "rollout"}]).body
    assert body.count("timm:toy") == 1 and body.count(">caap<") == body.count(">rollout<") == 1
    assert "data fingerprint" not in body  # none is known


def test_every_style_is_in_one_place_and_every_picture_has_words():
    for file in TEMPLATES.glob("*.j2"):
        text = file.read_text(encoding="utf-8")
        assert "<style" not in text or file.name == "page.html.j2"
        assert all("alt=" in tag for tag in re.findall(r"<img[^>]*>", text))


def test_top_patches_are_rows_and_columns_of_the_highest_values():
    values = torch.zeros(4, 6)
    values[2, 5], values[1, 0] = 3.0, 2.0
    assert MapView("caap", values, scale_of(values)).top(2) == [(2, 5, "3"), (1, 0, "2")]
    assert "top patches: row, column" in str(explain_section(explanation()).body)


def test_the_answer_in_words():
    answers = explanation().answers[0]
    assert answer_text(answers) == "tabby, probability 0.750"
    swapped = [type(a)(a.name, a.probability, not a.explained) for a in answers]
    assert answer_text(swapped) == "tabby, probability 0.750; explained: tiger <cat>, 0.200"


def test_the_panel_has_a_picture_and_one_overlay_for_each_method():
    assert explain_panel(explanation(methods=("caap", "sobel")), 1).width > 3 * 384


def test_pictures_come_before_prose():
    """The first sentence stands above the body, the rest is folded; nothing is lost."""
    note = "Bright is good. " + "It is hard to say more about it in a few words. " * 5
    section = Section("Maps", Markup("<p>body</p>"), note.strip())
    assert section.opening == "Bright is good." and section.rest.startswith("It is hard")
    page = render_page("Title", [section, Section("Short", Markup(""), "One. Two.")])
    above = page[: page.index("<p>body</p>")]
    assert "<details" in above and above.index("Bright is good.") < above.index("<details")
    assert f"{section.opening} {section.rest}" == note.strip()
    assert page.count("<details") == 1 and "One. Two." in page


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"transplant-worst": 0.7, "transplants": 0.9, "flips": 0.0}, ""),
        ({"transplant-worst": 0.8, "transplants": 0.8, "flips": 0.0}, "more correct transplants"),
        ({"transplant-worst": 0.8, "transplants": 0.9, "flips": 0.3}, "fewer flips decided"),
        ({"transplant-worst": 0.8, "transplants": 0.9, "flips": 0.1}, "the first remedy was taken"),
    ],
)
@pytest.mark.parametrize("name", ["b", "nothing"])
def test_a_repair_says_what_decided_between_equals(name, other, words):
    taken = {"transplant-worst": 0.8, "transplants": 0.9, "flips": 0.1}
    listed = [Candidate(name, "", validation=other), Candidate("a", "", validation=taken)]
    candidates = {c.name: c for c in listed}
    result = SimpleNamespace(candidates=candidates, remedy="a", chosen_by="transplant-worst")
    note, called = remedies_section(result).note, {"nothing": "the model as it was"}.get(name, name)
    assert words in note and (f"worst there: {called};" in note) is bool(words)
    left = SimpleNamespace(candidates=candidates, remedy=name, chosen_by="transplant-worst")
    assert ("None was taken" in remedies_section(left).note) is (name == "nothing")


def test_examples_of_a_kind_are_nine_pictures_at_most_each_once():
    images = torch.arange(12.0).view(12, 1, 1, 1).expand(12, 3, 16, 16) / 12
    model = SimpleNamespace(
        patch=(4, 4), layout=SimpleNamespace(grid=(4, 4)),
        preprocess=SimpleNamespace(raw=lambda image: image),
    )  # fmt: skip
    result = SimpleNamespace(model=model, data=SimpleNamespace(images=images))
    tokens = [[place // 2, 5] for place in range(24)]
    sheet = _crops(result, SimpleNamespace(tokens=torch.tensor(tokens)))
    assert sheet.shape == (3, 42, 42)  # three by three: a patch, its neighbours and a line
    centres = sheet[0, 7::14, 7::14].flatten()
    torch.testing.assert_close(centres, torch.arange(9.0) / 12)
    one = _crops(result, SimpleNamespace(tokens=torch.tensor([[3, 0]])))
    assert one.shape == (3, 14, 14) and one[0, 0, 0] == 1


def test_cards_written_one_by_one_are_those_written_at_once(tmp_path):
    cards = [Card(name, [Strip(torch.rand(3, 8, 8), ())]) for name in "ab"]
    with CardFile(tmp_path / "cards") as file:
        for card in cards:
            file.add(card)
        written = file.finish().read_text()
    assert "".join(written.split()) == "".join(cards_html(cards).split())


def test_a_card_says_whether_the_prediction_is_right_and_where_the_map_lies():
    known = replace(
        explanation(), truths=["tabby", "dog"], background=[0.25, None], background_area=[0.5, 0.5]
    )
    body = explain_section(known).body
    assert "right; 25% of the map on the background (an even map: 50%)" in body
    assert "wrong: it is dog" in body and "caap: probability of tabby" in body
    other = explain_section(explanation(methods=("mosaic", "rollout"))).body
    assert "mosaic: slope of the probability of tabby" in other
    assert "rollout: the same for every class" in other


def test_sorting_is_offered_by_what_is_known():
    four = explanation(names=tuple("abcd"))
    plain = explain_section(four).tools
    assert "least confident first" in plain and "worst errors" not in plain
    assert "worst errors first" in explain_section(replace(four, truths=["tabby"] * 4)).tools
    assert not explain_section(explanation()).tools


def test_a_grid_of_heads_shows_errors_costs_and_what_must_stay():
    values = torch.tensor([[0.02, -0.01, torch.nan], [0.0, -torch.inf, 0.004]])
    costs = {"accuracy": torch.full((2, 3), 0.75)}
    errors = torch.full((2, 3), 0.003)
    grid = head_grid("scores", values, chosen=[(0, 0)], errors=errors, without=costs, key="K")
    assert "layer 0, head 0: 0.02 ± 0.003; without it: accuracy 0.75" in grid
    assert 'class="for chosen" style="--strength: 90%"' in grid and ">20</td>" in grid
    assert 'class="against" style="--strength: 45%"' in grid and ">-10</td>" in grid
    assert "head 2: not measured" in grid and ">stays</td>" in grid and "must stay" in grid
    assert "columns: heads; K; numbers are multiples of 0.001" in grid
    assert ">0</td>" in head_grid("", torch.tensor([[0.09999, -1e-9]]))  # not -0
    assert ">12</td>" in head_grid("", torch.tensor([[3.0, 12.5]]))
    assert ">1</td>" not in head_grid("", torch.ones(1, 32))  # no room for numbers
    assert "head-grid" in head_grid("", torch.full((2, 2), torch.nan))


def test_a_table_escapes_text_and_shades_cells():
    cell = {"text": "3 of 4", "strength": 45, "title": "accuracy"}
    body = table([("<b>", cell, Markup("<i>x</i>"))], head=("a", "b", "c"), marked=[0])
    assert "&lt;b&gt;" in body and "<i>x</i>" in body and "--strength: 45%" in body
    assert 'class="best"' in body


def test_rows_may_lack_columns_and_are_never_formulas():
    assert rows_csv([{"a": 1}, {"b": 2.5}]) == "a,b\n1,\n,2.5\n"
    assert rows_csv([{"image": "=1+1"}]) == "image\n'=1+1\n"


def test_names_become_files_of_their_own():
    names = ["a/b.jpg", "a b.jpg", "A-B.jpg", "../..", "=x"]
    assert file_names(names, ".png") == [
        "a-b.jpg.png", "a-b.jpg-2.png", "A-B.jpg-3.png", "image.png", "x.png",
    ]  # fmt: skip
