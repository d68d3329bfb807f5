"""The page in a real browser: each panel's main act changes what it should, by numbers."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from seecause.app.panels import explain
from seecause.app.panels.explain import Brush

EXPLAIN = "#explain?model=critters-vit&explain.picture=s1&explain.methods=caap"


def bars(page, title):
    """Class -> probability, as a card shows it."""
    card = page.locator(".answer-card", has=page.get_by_role("heading", name=title, exact=True))
    card.locator("li").first.wait_for()
    rows = card.locator("li").all()
    return {
        row.locator(".name").text_content(): float(row.locator(".value").text_content())
        for row in rows
    }


def patch_point(page, place, stack=".stage .stack"):
    """Where on the screen a patch is."""
    box = page.locator(stack).bounding_box()
    row, column = divmod(place, 12)
    return box["x"] + box["width"] * (column + 0.5) / 12, box["y"] + box["height"] * (
        row + 0.5
    ) / 12


def brush_patches(page, places):
    page.mouse.move(*patch_point(page, places[0]))
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*patch_point(page, place))
    page.mouse.up()


def expected(desk, patches, which):
    request = Brush(model="critters-vit", picture="s1", patches=tuple(patches))
    return {a["name"]: a["probability"] for a in explain.brush(desk, request)[which]}


def test_brushing_moves_both_answers(visit, desk):
    page = visit(EXPLAIN)
    bars(page, "Whole picture")
    patches = [52, 53, 54, 66, 78]
    brush_patches(page, patches)
    expect(page.locator(".stage .stack")).to_have_attribute("data-brush", "5")
    expect(page.get_by_text("5 of 144 patches")).to_have_count(2)
    for title, which in (("Only these", "only"), ("Without these", "without")):
        assert bars(page, title) == pytest.approx(expected(desk, patches, which), abs=1e-3)
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_text("brush some patches")).to_have_count(2)


def test_hovering_reads_a_patch_for_the_top_classes(visit, desk):
    page = visit(EXPLAIN)
    page.locator(".map-card:not(.stale) .heat").wait_for()
    page.mouse.move(*patch_point(page, 66))
    values = page.locator(".map-card .patch-values div").all_text_contents()
    drawn = explain.draw(desk, explain.Draw(model="critters-vit", picture="s1"))
    assert len(values) == 5
    for text, name, row in zip(values, drawn["classes"], drawn["by_class"], strict=True):
        assert text.startswith(name)
        assert float(text.removeprefix(name)) == pytest.approx(row[66], rel=0.01, abs=1e-6)


def test_a_link_restores_everything(visit):
    page = visit(f"{EXPLAIN}&explain.blank=black&explain.first=2&explain.patches=52-54.66.78")
    before = bars(page, "Only these")
    assert page.get_by_label("blank").input_value() == "black"
    assert page.get_by_label("first layer").input_value() == "2"
    page.get_by_label("class explained").select_option("twiglet")
    page.locator(".answer-card .explained .name", has_text="twiglet").first.wait_for()
    page.wait_for_url(re.compile("explain.target=4"))
    again = visit(page.url.partition("/#")[2].join(["#", ""]))
    assert bars(again, "Only these") == before
    assert again.get_by_label("class explained").input_value() == "4"


def test_the_keyboard_brushes(visit, desk):
    page = visit(EXPLAIN)
    bars(page, "Whole picture")
    page.locator(".stage .stack").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Space", "Shift+ArrowRight"):
        page.keyboard.press(key)
    expect(page.get_by_text("2 of 144 patches")).to_have_count(2)
    assert bars(page, "Only these") == pytest.approx(expected(desk, [13, 14], "only"), abs=1e-3)


def test_a_wrong_file_gives_a_message_and_a_right_one_an_answer(visit, tmp_path, shop):
    page = visit(EXPLAIN)
    bars(page, "Whole picture")
    wrong = tmp_path / "notes.png"
    wrong.write_text("these are notes")
    page.get_by_label("Picture: a file").set_input_files(wrong)
    page.get_by_role("alert").filter(has_text="not an image that can be read").wait_for()
    visit.heard.clear()  # the console names the refused request
    right = tmp_path / "critter.png"
    shop.sample("s5").shown.save(right)
    page.get_by_label("Picture: a file").set_input_files(right)
    page.get_by_text("critter.png").first.wait_for()
    own = bars(page, "Whole picture")
    other = visit("#explain?model=critters-vit&explain.picture=s5&explain.methods=caap")
    assert bars(other, "Whole picture") == own


def test_nothing_scrolls_sideways_on_a_telephone(visit):
    page = visit(EXPLAIN)
    page.set_viewport_size({"width": 390, "height": 844})
    bars(page, "Whole picture")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
