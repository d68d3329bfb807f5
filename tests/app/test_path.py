"""The path explain, doubt, test, repair in a real browser, with the embedded models and with a
user's own: nothing is lost on reload, back undoes, two tabs do not disturb each other."""

import io
import re
import shutil
import subprocess
import zipfile
from itertools import product
from pathlib import Path

import pytest
from playwright.sync_api import expect

import seecause as sc
from seecause.app.panels import explain, repair, test as panel
from seecause.app.server import create_app
from seecause.app.state import open_state
from seecause.data.dataset import to_pil
from tests.app.conftest import context_of, serving
from tests.app.test_browser import PANELS, patch_point

expect.set_options(timeout=60_000)
BIASED = "critters-biased"
AUDITED = {"model": BIASED, "data": "critters:certified:test", "limit": 16}
LEARN = "critters:certified:train"


def answered(page):
    expect(page.locator("html")).to_have_attribute("data-asking", "0", timeout=90_000)


def again(page, *queries):
    """The same words after a reload."""
    answered(page)
    page.wait_for_timeout(500)  # the address follows
    before = [page.locator(query).all_text_contents() for query in queries]
    page.reload()
    answered(page)
    for query, texts in zip(queries, before, strict=True):
        assert texts and all(texts)
        expect(page.locator(query)).to_have_text(texts)


def test_the_path_from_a_prediction_to_a_repaired_model(visit, state):
    context = context_of(state, BIASED)
    page = visit(f"#explain?model={BIASED}&image=s0")
    headline, then = page.locator("#panel-explain .headline"), page.locator(".then")
    expect(headline).to_contain_text("The model says quillow, 94 %. It looks at the background")
    page.get_by_role("button", name="Change the background").click()
    expect(then).to_contain_text("Now it says")
    again(page, "#panel-explain .headline", ".then")
    page.get_by_role("button", name="Undo").click()
    expect(then).to_have_text("")
    page.get_by_role("button", name="Redo").click()
    expect(then).to_contain_text("Now it says")

    page.get_by_role("button", name="Next: doubt").click()
    page.get_by_role("button", name="Find minimal evidence").click()
    page.locator(".evidence p").first.wait_for()
    again(page, "#panel-doubt .headline", ".evidence p", ".ladder li .value")
    found = explain.evidence(context, explain.OfClass(model=BIASED, picture="s0"))
    for place, name in enumerate(("enough", "needed")):
        count = page.locator(".evidence p").nth(place).get_attribute("data-patches")
        assert int(count) == len(found[name]["patches"])

    page.get_by_role("button", name="Next: test").click()
    expect(page.locator(".cut")).to_have_count(8)
    placed = panel.place(context, panel.Place(model=BIASED, picture="s0"))
    right = sum(tile["right"] for tile in placed["tiles"])
    assert page.locator("[data-right]").get_attribute("data-right") == str(right)
    page.locator(".cut.right").first.click()
    expect(page.locator("[data-right]")).to_have_attribute("data-right", str(right - 1))
    page.get_by_label("Images, at most").fill("16")
    page.get_by_label("Images, at most").blur()
    page.get_by_role("button", name="Audit the dataset").click()
    page.wait_for_url(re.compile("test.result="))
    page.reload()  # while it is computed
    audit = repair.audit(context, repair.OnData(**AUDITED))
    expect(page.locator(".verdict")).to_have_text(audit["words"][0], timeout=90_000)
    assert float(page.locator(".flips").get_attribute("data-flips")) == audit["flips"]
    expect(page.locator(".cut.out")).to_have_count(1)

    page.get_by_role("button", name="Next: repair").click()
    page.get_by_text("Advanced").click()
    page.get_by_label("Export even").check()
    page.get_by_role("button", name="Try directions").click()
    card = page.locator("[data-remedy=directions]")
    expect(card).to_have_attribute("data-taken", "true", timeout=90_000)
    request = repair.RepairRequest(**AUDITED, learn=LEARN, remedy="directions", force=True)
    reply = repair.run_repair(context, request)
    rows = {row["name"]: row["after"] - row["value"] for row in reply["rows"]}
    gain = float(card.locator("[data-gain]").get_attribute("data-gain"))
    assert gain == pytest.approx(rows["other accuracy"])
    again(page, "#panel-repair .headline", "[data-remedy=directions] dd")
    files = {"report": "directions.html", "checkpoint": "repaired-by-directions.zip"}
    for name, file in files.items():
        with page.expect_download() as waiting:
            page.get_by_role("button", name=f"Download the {name}").click()
        assert waiting.value.suggested_filename == f"critters-biased-{file}"
    page.get_by_role("button", name="Open the repaired model here").click()
    expect(page.get_by_label("Model")).to_have_value("critters-biased-directions")
    expect(page.locator("#model option")).to_have_text(
        ["critters-vit", BIASED, "critters-ifam", "critters-biased-directions"]
    )
    again(page, "#panel-test .headline")
    page.go_back()
    expect(page.get_by_label("Model")).to_have_value(BIASED)
    expect(card).to_have_attribute("data-taken", "true")
    page.locator("#tools summary").click()
    page.get_by_role("button", name="Results").click()
    expect(page.locator(".kept button b")).to_have_text(
        [f"{BIASED}: directions", f"Audit of {BIASED}"]
    )


@pytest.fixture
def own(tmp_path):
    """A user's own checkpoint, two images, and a ZIP of eight images of each of two classes."""
    model = sc.load("builtin:critters-biased")
    folder = sc.background.export(model, [], tmp_path / "my-vit")
    packed, names = io.BytesIO(), []
    data = sc.data.open_data("critters:certified:test", limit=400)
    with zipfile.ZipFile(packed, "w") as archive:
        for wanted in (0, 7):
            rows = [row for row in range(len(data)) if data[row].label == wanted][:16]
            for row in rows:
                sample, name = data[row], f"{data.classes[wanted]}/{row}.png"
                for where, image in (("", to_pil(sample.image)), ("masks/", sample.mask)):
                    content = io.BytesIO()
                    shown = image if where == "" else to_pil(image.float().expand(3, -1, -1))
                    shown.save(content, "PNG")
                    archive.writestr(f"photos/{where}{name}", content.getvalue())
            to_pil(data[rows[0]].image).save(tmp_path / f"{wanted}.png")
            names.append(str(tmp_path / f"{wanted}.png"))
    (tmp_path / "photos.zip").write_bytes(packed.getvalue())
    return folder, names, tmp_path / "photos.zip"


def test_the_path_with_a_model_and_images_of_ones_own(browser, own):
    folder, names, packed = own
    state = open_state([str(folder)], samples=names)
    with serving(create_app(state)) as where:
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        page, other = context.new_page(), context.new_page()
        for tab in (page, other):
            tab.set_default_timeout(60_000)
        page.goto(where)
        page.get_by_label("Image: a file").set_input_files(names[1])
        expect(page.locator("#panel-explain figcaption")).to_have_text("7.png")
        page.get_by_role("button", name="Hide what the map marks").click()
        expect(page.locator(".then")).to_have_text(re.compile("^(It still|Now it) says"))
        again(page, ".then", "#panel-explain .headline")
        expect(page.get_by_role("button", name="Copy private link")).to_be_visible()

        page.get_by_role("button", name="Next: doubt").click()
        again(page, "#panel-doubt .headline")
        page.get_by_role("button", name="Next: test").click()
        expect(page.locator("#panel-test .headline")).to_contain_text("Where is the object?")
        page.get_by_role("radio", name="Add to the object").click()
        stack = "#panel-test .stack"
        page.mouse.move(*patch_point(page, 65, stack))
        page.mouse.down()
        for place in (66, 67, 68, 80, 79, 78, 77, 89, 90, 91):
            page.mouse.move(*patch_point(page, place, stack))
        page.mouse.up()
        expect(page.locator(".cut")).to_have_count(2)
        again(page, "#panel-test .headline", ".cut b")

        other.goto(page.url)  # another tab of the same browser sees the image and goes its own way
        answered(other)
        other.get_by_role("radio", name="0.png").click()
        other.locator(".path button", has_text="Explain").click()
        expect(page.locator(".cut")).to_have_count(2)

        page.get_by_label("A ZIP with a dataset").set_input_files(packed)
        expect(page.get_by_label("Dataset", exact=True)).to_have_value("photos")
        page.get_by_role("button", name="Audit the dataset").click()
        page.locator(".verdict").wait_for()
        again(page, ".verdict", ".flips .value")
        page.get_by_role("button", name="Next: repair").click()
        page.get_by_text("Advanced").click()
        page.get_by_label("Export even").check()
        page.get_by_role("button", name="Try directions").click()
        page.get_by_role("button", name="Open the repaired model here").click()
        expect(page.get_by_label("Model")).to_have_value(re.compile("^my-vit-directions"))
        expect(page.locator(".cut")).to_have_count(2)
        again(page, "#panel-test .headline")
        private = page.url
        context.close()
        stranger = browser.new_page()  # neither the image nor the model is anybody else's
        stranger.goto(private)
        expect(stranger.get_by_role("alert").first).to_contain_text("not served here")
        stranger.close()
    state.close()


def reach(page, words):
    """Move the focus with the Tab key to what has these words."""
    focused = "() => { const e = document.activeElement; return e.ariaLabel ?? e.textContent; }"
    for _ in range(120):
        page.keyboard.press("Tab")
        if re.search(words, page.evaluate(focused) or ""):
            return
    raise AssertionError(f"{words} is not reached")


def test_the_keyboard_alone_walks_the_path(visit):
    page = visit(f"#explain?model={BIASED}&image=s0&test.limit=16&repair.force=true")
    answered(page)
    reach(page, "^Change the background")
    page.keyboard.press("Enter")
    expect(page.locator(".then")).to_contain_text("Now it says")
    reach(page, "^Next: doubt")
    page.keyboard.press("Enter")
    answered(page)
    reach(page, "^Next: test")
    page.keyboard.press("Enter")
    answered(page)
    reach(page, "^[✓✗]")
    page.keyboard.press("Space")
    expect(page.locator(".cut.out")).to_have_count(1)
    reach(page, "^Audit the dataset")
    page.keyboard.press("Enter")
    page.locator(".verdict").wait_for()
    reach(page, "^Next: repair")
    page.keyboard.press("Enter")
    answered(page)
    reach(page, "^Try directions")
    page.keyboard.press("Enter")
    page.locator("[data-remedy=directions][data-taken]").wait_for()
    reach(page, "^Open the repaired model")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Model")).to_have_value("critters-biased-directions")


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """The source of axe-core, from npm."""
    folder = tmp_path_factory.mktemp("axe")
    command = ["npm", "pack", "axe-core@4.14.1", "--silent"]
    if shutil.which("npm") is None:
        pytest.skip("no npm")
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip("axe-core cannot be fetched")
    shutil.unpack_archive(next(folder.glob("*.tgz")), folder, "gztar", filter="data")
    return Path(folder / "package" / "axe.min.js").read_text()


STRONGEST = """() => document.querySelectorAll(".head-buttons button").forEach((button, place) => {
  button.className = place % 2 ? "for" : "against";
  button.style.setProperty("--strength", "100%");
})"""


@pytest.mark.parametrize("name", PANELS)
def test_axe_finds_no_serious_violation(visit, axe, name):
    """Light and dark, wide and narrow; heads in the strongest of both colours."""
    page = visit(f"#{name}?image=s0&explain.tool=brush&explain.patches=52-54&doubt.evidence=true")
    answered(page)
    page.evaluate(axe)
    for width, scheme in product((1280, 390), ("light", "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.evaluate(STRONGEST)
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        serious = [each for each in found if each["impact"] in ("serious", "critical")]
        assert [(e["id"], e["nodes"][0]["html"][:90]) for e in serious] == []
