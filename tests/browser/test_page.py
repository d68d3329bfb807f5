"""The page in a real browser, from disk: no network, no errors, and its controls work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from markupsafe import Markup
from PIL import Image
from playwright.sync_api import Page

from seecause.report import Section, protocol_section, write_page
from seecause.report.explain import explain_section
from seecause.target import Answer
from tests.report.examples import MANIFEST, explanation


@pytest.fixture(scope="module")
def shown(tmp_path_factory, browser):
    """The opened page, and everything it asked for or complained about."""
    file = tmp_path_factory.mktemp("page") / "index.html"
    sections = [
        explain_section(explanation(methods=("caap", "sobel"))),
        protocol_section([MANIFEST]),
    ]
    write_page(file, "What toy saw", sections)
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    heard: list[str] = []
    page.on(
        "request",
        lambda request: (
            heard.append(request.url) if not request.url.startswith(("file:", "data:")) else None
        ),
    )
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.goto(file.as_uri())
    yield page, heard
    page.close()


def heat_opacity(page: Page) -> float:
    return float(page.locator(".heat").first.evaluate("e => getComputedStyle(e).opacity"))


def test_nothing_is_fetched_and_nothing_fails(shown):
    page, heard = shown
    assert page.title() == "What toy saw"
    assert page.locator("img").evaluate_all(
        "images => images.every(i => i.complete && i.naturalWidth > 0)"
    )
    assert heard == []


def test_the_policy_stops_scripts_and_requests_that_are_not_the_pages(shown, tmp_path):
    page, _ = shown
    file = write_page(
        tmp_path / "hostile.html",
        "Hostile",
        [
            explain_section(explanation()),
            Section(
                "Foreign?",
                Markup(
                    '<script>document.title = "taken"</script><img src="x.png" alt=""'
                    " onerror=\"document.title = 'taken'\">"
                    '<iframe src="https://example.org"></iframe>'
                ),
            ),
        ],
    )
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")  # there to be loaded, if it may be
    other, loaded = page.context.browser.new_page(), []
    other.on("requestfinished", lambda request: loaded.append(request.url))
    other.goto(file.as_uri())
    assert other.title() == "Hostile"
    assert not [url for url in loaded if not url.startswith(("data:", file.as_uri()))]
    other.locator("#opacity").fill("40")  # the page's own script still runs
    assert heat_opacity(other) == pytest.approx(0.4)
    other.close()


def test_the_slider_fades_the_maps(shown):
    page, _ = shown
    for value in ("0", "40", "85"):
        page.locator("#opacity").fill(value)
        assert heat_opacity(page) == pytest.approx(int(value) / 100)


def test_the_switch_shows_single_patches(shown):
    page, _ = shown
    rendering = "e => getComputedStyle(e).imageRendering"
    assert page.locator(".heat").first.evaluate(rendering) == "auto"
    page.locator("#smooth").uncheck()
    assert page.locator(".heat").first.evaluate(rendering) == "pixelated"
    page.locator("#smooth").check()


def test_pointing_at_a_patch_reads_it_in_every_map_of_its_card(shown):
    page, _ = shown
    values = explanation(methods=("caap", "sobel")).runs["caap"].maps[0]
    card = page.locator(".card").first
    stack = card.locator(".map .stack").first
    box = stack.bounding_box()
    stack.hover(
        position={"x": box["width"] * 2.5 / 6, "y": box["height"] * 1.5 / 4}
    )  # row 1, column 2 of 4 x 6
    read = card.locator(".read").all_text_contents()
    assert read[0] == f"row 1, column 2: {values[1, 2]:.3g}" and read[1].startswith(
        "row 1, column 2: "
    )
    assert page.locator(".card").nth(1).locator(".read").all_text_contents() == ["", ""]
    page.mouse.move(0, 0)
    assert card.locator(".read").all_text_contents() == ["", ""]


def test_navigation_is_one_row_however_many_sections(shown, tmp_path):
    page, _ = shown
    many = write_page(
        tmp_path / "many.html",
        "Many",
        [Section(f"What about question number {place}?", Markup("")) for place in range(20)],
    )
    for width, rows in ((1200, 1), (380, 2)):
        other = page.context.browser.new_page()
        other.set_viewport_size({"width": width, "height": 700})
        other.goto(many.as_uri())
        assert other.locator(".bar").evaluate("e => e.offsetHeight") < 45 * rows
        assert other.evaluate("document.documentElement.scrollWidth") <= width
        other.close()


def test_a_narrow_window_does_not_scroll_sideways(shown):
    page, _ = shown
    page.set_viewport_size({"width": 380, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    page.set_viewport_size({"width": 1200, "height": 800})


def test_cards_of_many_pictures_are_sorted_and_filtered(shown, tmp_path):
    names = ("a.jpg", "b.jpg", "c.jpg", "d.jpg")
    known = replace(
        explanation(names),
        answers=[[Answer("tabby", p, True)] for p in (0.9, 0.3, 0.8, 0.6)],
        truths=["tabby", "tiger", "tiger", None],
        background=[0.2, 0.7, None, 0.4],
        background_area=[0.5] * 4,
    )
    file = write_page(tmp_path / "many.html", "Many", [explain_section(known)])
    page, heard = shown[0].context.browser.new_page(), []
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.goto(file.as_uri())

    def order() -> str:
        return "".join(title[0] for title in page.locator(".card:visible h3").all_inner_texts())

    expected = {
        "": "abcd",
        "confidence up": "bdca",
        "confidence down": "acdb",
        "error down": "cbad",  # confident and wrong first, unknown last
        "background down": "bdac",
    }
    for value, letters in expected.items():
        page.select_option("select[name=sort]", value)
        assert order() == letters
    page.select_option("select[name=show]", "wrong")
    assert order() == "bc" and page.locator(".sorter output").inner_text() == "2 of 4"
    page.fill("input[name=find]", "C.jpg")
    assert order() == "c" and heard == []
    page.close()


def test_few_images_have_no_controls(shown):
    page, _ = shown
    assert not page.locator(".sorter").is_visible()
