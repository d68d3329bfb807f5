"""The page in a real browser, from disk: no network, no errors, and its controls work."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from markupsafe import Markup
from PIL import Image
from playwright.sync_api import Page

from seecause.report import Section, protocol_section, write_page
from seecause.report.explain import explain_section, write_explanations
from seecause.report.figures import heat_layer, scale_of
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
    assert heard == [] and not page.locator(".sorter").count()


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


def test_the_slider_fades_the_maps_and_the_switch_shows_single_patches(shown):
    page, _ = shown
    for value in ("0", "85"):
        page.locator("#opacity").fill(value)
        assert heat_opacity(page) == pytest.approx(int(value) / 100)
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


def test_navigation_is_two_rows_however_many_sections(shown, tmp_path):
    page, _ = shown
    many = write_page(
        tmp_path / "many.html",
        "Many",
        [Section(f"What about question number {place}?", Markup("")) for place in range(20)],
    )
    for width in (1200, 380):
        other = page.context.browser.new_page()
        other.set_viewport_size({"width": width, "height": 700})
        other.goto(many.as_uri())
        assert other.locator(".bar").evaluate("e => e.offsetHeight") < 90
        assert other.evaluate("document.documentElement.scrollWidth") <= width
        other.close()


def test_a_narrow_window_does_not_scroll_sideways(shown):
    page, _ = shown
    page.set_viewport_size({"width": 380, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    page.set_viewport_size({"width": 1200, "height": 800})


def many(folder, count=9, **options):
    """A page of images in a folder: a and d are right or unknown, b and c are wrong."""
    names = tuple(f"{'abcd'[i % 4]}{i}<b>.jpg" for i in range(count))
    known = [(0.9, "tabby", 0.2), (0.3, "tiger", 0.7), (0.8, "tiger", None), (0.6, None, 0.4)]
    rows = [known[i] if i < 4 else (0.1 - i / 1e4, None, None) for i in range(count)]
    shown = replace(
        explanation(names, methods=("caap", "mosaic")),
        answers=[
            [Answer("tabby" if i != 1 else "lynx", p, True)] for i, (p, *_) in enumerate(rows)
        ],
        truths=[truth for _, truth, _ in rows],
        background=[share for *_, share in rows],
        background_area=[0.5] * count,
        places=list(range(count)),
    )
    write_explanations(folder, [shown], names, **options)
    return (folder / "index.html").as_uri(), shown


@pytest.mark.parametrize("one_file", [False, True])
def test_thumbnails_are_sorted_filtered_and_opened(browser, tmp_path, one_file):
    page, heard = browser.new_page(), []
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("console", lambda message: heard.append(message.text))
    address, _ = many(tmp_path, one_file=one_file)
    page.goto(address)
    assert page.locator(".thumb").count() == 9 and not page.locator(".card:visible").count()

    def order() -> str:
        page.wait_for_timeout(50)
        return "".join(title[0] for title in page.locator(".thumb .title").all_inner_texts())

    expected = {
        "": "abcd",
        "confidence down": "acdb",
        "error down": "cbad",  # confident and wrong first, unknown last
        "background down": "bdac",
    }
    for value, letters in expected.items():
        page.select_option("select[name=sort]", value)
        assert order()[:4] == letters
    page.select_option("select[name=show]", "wrong")
    assert order() == "bc" and page.locator(".sorter output").inner_text() == "2 of 9"
    page.select_option("select[name=class]", "tabby")
    assert order() == "c"
    page.select_option("select[name=class]", "")
    page.fill("input[name=find]", "TIGER")
    assert order() == "bc"
    page.reload()  # all of it is in the address
    assert order() == "bc" and page.input_value("input[name=find]") == "TIGER"

    page.locator(".thumb").nth(1).click()
    card = page.locator("dialog .card")
    assert card.locator("h3").inner_text() == "c2<b>.jpg" and "card=3" in page.url
    assert card.locator(".original").evaluate(
        "async e => { const i = new Image(); i.src = getComputedStyle(e).backgroundImage"
        ".slice(5, -2); await i.decode(); return i.naturalWidth; }"
    )
    page.keyboard.press("ArrowLeft")
    card.locator("h3", has_text="b1").wait_for()
    page.keyboard.press("Escape")
    assert order() == "bc" and "card" not in page.url and not card.is_visible()
    page.locator(".thumb").first.press("Enter")
    card.wait_for()
    page.go_back()
    page.locator("dialog").wait_for(state="hidden")
    assert heard == []
    page.close()


def test_pages_of_thumbnails_and_cards_are_loaded_as_they_are_looked_at(browser, tmp_path):
    address, _ = many(tmp_path, 450)
    page, asked = browser.new_page(viewport={"width": 800, "height": 600}), []
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
    page.goto(address)
    page.locator(".thumb").nth(199).wait_for(state="attached")
    assert page.locator(".thumb").count() == 200
    page.locator("main > section .pages .next").click()
    page.locator(".thumb", has_text="a200").wait_for()
    assert "page=2" in page.url and page.locator(".thumb").count() == 200
    assert not {"0000.js", "0001.js", "00450.jpg"} & set(asked) and len(asked) < 250
    page.locator(".thumb", has_text="b241").click()
    page.locator("dialog .card h3", has_text="b241").wait_for()
    assert "0001.js" in asked and not {"0000.js", "0002.js"} & set(asked)
    page.reload()
    page.locator("dialog .card h3", has_text="b241").wait_for()
    page.close()


@pytest.mark.parametrize("method", ["caap", "mosaic", "sobel"])
def test_the_page_colours_maps_as_they_are_drawn(browser, tmp_path, method):
    """Of one sign, of two signs, and at image resolution."""
    known = explanation(methods=(method,))
    run = known.runs[method]
    run.maps -= 0.4 if method == "mosaic" else 0
    if method == "sobel":
        run.native = torch.rand(2, 64, 96, generator=torch.Generator().manual_seed(1))
    page = browser.new_page()
    page.goto(write_page(tmp_path / "maps.html", "Maps", [explain_section(known)]).as_uri())
    read = "c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
    shown = np.array(page.locator("canvas.heat").first.evaluate(read), int).reshape(-1, 4)
    values = run.maps[0] if run.native is None else run.native[0]
    drawn = heat_layer(values, scale_of(values, signed=run.signed))
    drawn = np.asarray(drawn).astype(int).reshape(-1, 4)
    assert np.abs(shown - drawn)[:, 3].max() <= 6  # 8 bits near 0
    strong = drawn[:, 3] > 128  # colours of faint pixels are not kept exactly by a canvas
    assert strong.any() and np.abs(shown - drawn)[strong].max() <= 6
    page.close()
