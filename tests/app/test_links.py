"""Links restore every panel, and choosers hold what can be read; in a real browser."""

import time

import pytest
from PIL import Image
from playwright.sync_api import expect

from seecause.app.server import create_app
from seecause.app.state import open_state
from tests.app.conftest import serving

SNAPSHOT = """() => {
  const all = (query) => [...document.querySelectorAll(query)].filter((e) => e.checkVisibility());
  const marks = ({ cursor, ...others }) => others; // where the pointer is
  return {
    controls: ["select", "textarea", "input:not([type=file])"]  // folded ones, too
      .flatMap((e) => [...document.querySelectorAll(`.panel:not([hidden]) ${e}`)])
      .map((e) => [e.labels[0]?.textContent ?? "", e.type === "checkbox" ? e.checked : e.value]),
    chosen: all("[aria-pressed=true], [aria-checked=true]")
      .map((e) => e.ariaLabel ?? e.textContent),
    marks: all(".stack").map((e) => marks({ ...e.dataset })),
    numbers: all(".value, .count, .spoken, .finding").map((e) => e.textContent),
    frames: all("iframe").map((e) => e.getAttribute("src")),
  };
}"""
# panel: a link in which nothing is as usual; what is changed then, and how the address says it
LINKS = {
    "explain": (
        "model=critters-vit&image=s1&explain.blank=black&explain.first=2"
        "&explain.patches=52-54.66.78&explain.tool=brush",
        lambda page: pick(page, "twiglet"),
        "explain.target=4",
    ),
    "doubt": (
        "model=critters-vit&image=s1&doubt.methods=caap%2Clegrad&doubt.evidence=true",
        lambda page: page.get_by_label("remove the map by legrad").click(),
        "doubt.methods=caap",
    ),
    "test": (
        "model=critters-biased&image=s1&test.brushed=40-43.52-55&test.tool=brush&test.out=1"
        "&test.data=critters%3Acertified%3Atrain&test.limit=16",
        lambda page: page.get_by_label("Object mask").select_option("own"),
        "test.masks=own",
    ),
    "swap": (
        "model=critters-biased&image=s1&swap.b=s6&swap.patches=52-54.66&swap.down=1"
        "&swap.across=-2&swap.first=1&swap.last=4&swap.tool=brush",
        lambda page: page.get_by_label("first layer").fill("2"),
        "swap.first=2",
    ),
    "heads": (
        "model=critters-biased&image=s9&heads.target=0&heads.by=background&heads.off=4.43"
        "&heads.brushed=40-42",
        lambda page: page.get_by_role("button", name="layer 1, head 0:").click(),
        "heads.off=4.8.43",
    ),
    "repair": (
        "model=critters-biased&image=s1&test.masks=critters-vit&repair.force=true",
        lambda page: open_and_pick(page, "Learn from", "critters:certified:test"),
        "repair.learn=critters%3Acertified%3Atest",
    ),
    "parts": (
        "model=critters-ifam&image=s5&parts.out=1-2",
        lambda page: page.get_by_role("checkbox").nth(0).uncheck(),
        "parts.out=0-2",
    ),
    "ask": (
        "model=critters-llava&image=s2&ask.question=What+colour+is+the+tail%3F&ask.blind=1.9",
        lambda page: page.get_by_role("button", name="layer 0, head 2").click(),
        "ask.blind=1-2.9",
    ),
    "runs": (
        "model=critters-vit&image=s1&runs.run=results%2Fhostile",
        lambda page: page.get_by_label("page").select_option("more.html"),
        "runs.page=more.html",
    ),
}


def pick(page, name):
    page.get_by_text("Advanced").click()
    page.get_by_label("Explain", exact=True).fill(name)
    page.get_by_label("Explain", exact=True).press("Tab")
    page.get_by_text("Advanced").click()


def open_and_pick(page, label, value):
    page.get_by_text("Advanced").click()
    page.get_by_label(label).select_option(value)
    page.get_by_text("Advanced").click()


def eval_mode(page, panel):
    """What is on the page, when all is answered."""
    done = {"repair": ".remedy", "runs": "iframe.run-page", "test": ".cut"}
    awaited = done.get(panel, ".answer-card li")
    page.locator(f".panel:not([hidden]) {awaited}").first.wait_for()
    expect(page.locator("html")).to_have_attribute("data-asking", "0", timeout=60_000)
    return page.evaluate(SNAPSHOT)


@pytest.mark.parametrize("panel", LINKS)
def test_links_restore_every_panel(visit, panel):
    link, change, address = LINKS[panel]
    if panel == "runs":  # a hostile page tries, and the console names what was forbidden
        visit.expected = "Content Security Policy"
    page = visit(f"#{panel}?{link}")
    first = eval_mode(page, panel)
    assert set(page.url.partition("?")[2].split("&")) == set(link.split("&"))
    change(page)
    page.wait_for_url(lambda url: address in url.split("?")[1].split("&"))
    changed = eval_mode(page, panel)
    assert changed != first
    again = visit("#" + page.url.partition("#")[2])
    assert eval_mode(again, panel) == changed
    page.evaluate(f"location.hash = '#{panel}?{link}'")  # and in the page that is open
    ends = time.monotonic() + 60
    while eval_mode(page, panel) != first and time.monotonic() < ends:
        page.wait_for_timeout(50)
    assert eval_mode(page, panel) == first


def test_a_sample_that_cannot_be_read_leaves_the_chooser(browser, tmp_path):
    for name in ("a.png", "b.png"):
        Image.new("RGB", (40, 40), (9, 90, 200)).save(tmp_path / name)
    samples = [str(tmp_path / name) for name in ("a.png", "b.png")]
    state = open_state(["builtin:critters-vit"], samples=samples)
    (tmp_path / "b.png").write_bytes(b"gone")  # after the start
    with serving(create_app(state)) as where:
        page = browser.new_page()
        page.goto(f"{where}/#heads?image=s1")
        thumbs = page.locator(".thumbs").first.locator("button")
        expect(thumbs).to_have_count(1)
        expect(thumbs.first).to_have_attribute("aria-label", "a.png")
        thumbs.first.click()
        page.locator(".answer-card li").first.wait_for()
        page.close()
    state.close()


def test_what_the_models_cannot_do_is_not_offered(browser):
    state = open_state(["builtin:critters-vit"])
    with serving(create_app(state)) as where:
        page = browser.new_page()
        page.goto(f"{where}/#parts")
        expect(page.get_by_role("alert").first).to_have_text(
            "Parts cannot be used with critters-vit."
        )
        expect(page.locator(".path button")).to_have_text(["Explain", "Doubt", "Test", "Repair"])
        page.locator("#tools summary").click()
        expect(page.locator("#tools button")).to_have_text(["Swap", "Heads", "Results"])
        page.close()
    state.close()
