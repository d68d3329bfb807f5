"""The page is one file that needs nothing else, and says what it shows."""

import re
from dataclasses import asdict, replace
from html.parser import HTMLParser

import torch
from markupsafe import Markup

from seecause.report import Section, head_grid, protocol_section, table
from seecause.report.explain import explain_section, prediction_text
from tests.report.examples import MANIFEST, explanation, rendered


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
    page = rendered(
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
    body = protocol_section([{**MANIFEST, "random_weights": True}]).body
    assert "random weights" in body and "random weights" not in protocol_section([MANIFEST]).body


def test_the_protocol_names_what_made_the_numbers():
    body = protocol_section([MANIFEST]).body
    facts = ("caap", "tail=source", "timm:toy", "0123456789abcdef", "cpu", "torch=2.0", "4, 6")
    assert all(fact in body for fact in facts)
    assert "0.1" * 999 not in protocol_section([{**MANIFEST, "answer": "0.1" * 999}]).body


def test_a_page_of_chapters_has_only_these_in_its_navigation():
    sections = [
        Section("First?", Markup(""), chapter="One"),
        Section("Second?", Markup("")),
        Section("Third?", Markup(""), chapter="Two"),
    ]
    assert links(rendered("Demo", sections)) == ["One", "Two"]
    assert links(rendered("Demo", sections[1:2])) == ["Second?"]


def links(page: str) -> list[str]:
    return re.findall(r'<a href="#[^"]+">([^<]+)</a>', page)


def test_controls_of_maps_are_there_only_with_maps():
    assert 'id="opacity"' in rendered("Maps", [explain_section(explanation())])
    plain = rendered("Tables", [Section("Which heads?", Markup("<p>table</p>"))])
    assert 'id="opacity"' not in plain and "<script>" not in plain


def test_the_answer_in_words():
    answers = explanation().answers[0]
    row = {"answers": [asdict(answer) for answer in answers]}
    assert prediction_text(row) == "tabby, probability 0.750"
    for answer in row["answers"]:
        answer["explained"] = not answer["explained"]
    assert prediction_text(row) == "tabby, probability 0.750; explained: tiger <cat>, 0.200"


def test_a_card_says_whether_the_prediction_is_right_and_where_the_map_lies():
    known = replace(
        explanation(), truths=["tabby", "dog"], background=[0.25, None], background_area=[0.5, 0.5]
    )
    body = explain_section(known).body
    assert "right; 25% of the map&#39;s highest half lies on the background" in body
    assert "which is 50% of the image" in body
    assert "wrong: it is dog" in body and "caap: tabby" in body
    other = explain_section(explanation(methods=("mosaic", "rollout"))).body
    assert "mosaic: tabby" in other
    assert "rollout: the same for every class" in other


def test_a_grid_of_heads_shows_errors_and_what_must_stay():
    values = torch.tensor([[0.02, -0.01, torch.nan], [0.0, -torch.inf, 0.004]])
    grid = head_grid("scores", values, chosen=[(0, 0)], errors=torch.full((2, 3), 0.003))
    assert "layer 0, head 0: 0.02 ± 0.003" in grid
    assert 'class="for chosen" style="--strength: 90%"' in grid
    assert 'class="against" style="--strength: 45%"' in grid
    assert "head 2: not measured" in grid and "layer 1, head 1: must stay" in grid
    assert "head-grid" in head_grid("", torch.full((2, 2), torch.nan))


def test_a_table_escapes_text_and_shades_rows():
    body = table([("<b>", Markup("<i>x</i>"))], head=("a", "b"), marked=[0])
    assert "&lt;b&gt;" in body and "<i>x</i>" in body
    assert 'class="best"' in body
