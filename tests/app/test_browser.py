"""The page in a real browser: each panel's main act changes what it should, by numbers."""

import re

import pytest
from playwright.sync_api import expect

from seecause.app.panels import ask, explain, heads, parts, swap
from seecause.app.panels.explain import Brush
from tests.app.conftest import context_of

PANELS = ["explain", "doubt", "test", "repair", "swap", "heads", "parts", "ask", "runs"]
EXPLAIN = "#explain?model=critters-vit&image=s1&explain.tool=brush"


def shown(page, panel):
    """Wait until a panel has an answer; an audit does not begin by itself."""
    answered = {"test": ".cut", "repair": ".remedy", "runs": "iframe"}.get(panel, ".answer-card li")
    page.locator(f".panel:not([hidden]) {answered}").first.wait_for()
    expect(page.locator("html")).to_have_attribute("data-asking", "0", timeout=60_000)


def bars(page, title, within="main"):
    """Class -> probability, as a card shows it."""
    expect(page.locator("html")).to_have_attribute("data-asking", "0", timeout=60_000)
    heading = page.get_by_role("heading", name=title, exact=True)
    card = page.locator(f"{within} .answer-card", has=heading)
    card.locator("li").first.wait_for()
    rows = card.locator("li").all()
    return {
        row.locator(".name").text_content(): float(row.locator(".value").text_content())
        for row in rows
    }


def patch_point(page, place, stack="#panel-explain .stack"):
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


def expected(context, patches, which):
    request = Brush(model="critters-vit", picture="s1", patches=tuple(patches))
    return {a["name"]: a["probability"] for a in explain.brush(context, request)[which]}


def test_brushing_moves_both_answers(visit, context):
    page = visit(EXPLAIN)
    bars(page, "Prediction")
    patches = [52, 53, 54, 66, 78]
    brush_patches(page, patches)
    expect(page.locator("#panel-explain .stack")).to_have_attribute("data-brush", "5")
    expect(page.get_by_text("5 of 144 patches")).to_have_count(2)
    for title, which in (("Only these patches", "only"), ("Without these patches", "without")):
        assert bars(page, title) == pytest.approx(expected(context, patches, which), abs=1e-3)
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#panel-explain .stage-answers")).to_be_hidden()


def test_hovering_reads_a_patch_for_the_top_classes(visit, context):
    page = visit("#doubt?model=critters-vit&image=s1&doubt.methods=caap")
    page.locator(".map-card .heat").wait_for()
    page.mouse.move(*patch_point(page, 66, ".map-card .stack"))
    values = page.locator(".map-card .patch-values div").all_text_contents()
    drawn = explain.draw(context, Brush(model="critters-vit", picture="s1"), "caap")
    assert len(values) == 5
    for text, name, row in zip(values, drawn["classes"], drawn["by_class"], strict=True):
        assert text.startswith(name)
        value = float(text.removeprefix(name).replace("\u2212", "-"))
        assert value == pytest.approx(row[66], rel=0.06)


def test_the_keyboard_brushes(visit, context):
    page = visit(EXPLAIN)
    bars(page, "Prediction")
    page.locator("#panel-explain .stack").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Space", "Shift+ArrowRight"):
        page.keyboard.press(key)
    expect(page.get_by_text("2 of 144 patches")).to_have_count(2)
    assert bars(page, "Only these patches") == pytest.approx(
        expected(context, [13, 14], "only"), abs=1e-3
    )


def test_a_wrong_file_gives_a_message_and_a_right_one_an_answer(visit, tmp_path, state):
    visit.expected = "status of 4"  # the console names the refused request
    page = visit(EXPLAIN)
    bars(page, "Prediction")
    wrong = tmp_path / "notes.png"
    wrong.write_text("these are notes")
    page.get_by_label("Image: a file").set_input_files(wrong)
    page.get_by_role("alert").filter(has_text="not an image that can be read").wait_for()
    right = tmp_path / "critter.png"
    state.sample("s5").shown.save(right)
    page.get_by_label("Image: a file").set_input_files(right)
    page.get_by_text("critter.png").first.wait_for()
    own = bars(page, "Prediction")
    other = visit("#explain?model=critters-vit&image=s5")
    assert bars(other, "Prediction") == own


def by_name(answers):
    return {answer["name"]: answer["probability"] for answer in answers}


def test_dragging_a_patch_into_the_other_picture_moves_both_answers(visit, context):
    page = visit("#swap?model=critters-vit&image=s0&swap.b=s4")
    bars(page, "As it is", "[data-side=b]")
    page.mouse.move(*patch_point(page, 66, "[data-side=a] .stack"))
    page.mouse.down()
    page.mouse.move(*patch_point(page, 30, "[data-side=b] .stack"), steps=4)
    page.mouse.up()
    page.wait_for_url(re.compile("swap.down=-3"))
    request = swap.Swap(model="critters-vit", a="s0", b="s4", patches=(66,), down=-3)
    answer = swap.exchange(context, request)
    expect(page.locator("[data-side=b] .stack")).to_have_attribute("data-landing", "1")
    for side, title in (("a", "With B\u2019s patches"), ("b", "With A\u2019s patches")):
        shown = bars(page, title, f"[data-side={side}]")
        assert shown == pytest.approx(by_name(answer[side]), abs=1e-3)


def test_the_fewest_patches_are_found_and_can_be_shown(visit, context):
    page = visit("#swap?model=critters-vit&image=s0&swap.b=s4")
    page.get_by_role("button", name="Fewest patches").click()
    found = swap.path(context, swap.Swap(model="critters-vit", a="s0", b="s4"))
    expect(page.locator(".found .count")).to_have_text(str(len(found["patches"])))
    page.get_by_role("button", name="Show").click()
    marked = page.locator("[data-side=a] .stack")
    expect(marked).to_have_attribute("data-brush", str(len(found["patches"])))
    leader = page.locator("[data-side=b] .answer-card", has_text="With A").locator("li.leads .name")
    expect(leader).to_have_text(found["to"])


def test_heads_that_are_clicked_off_change_the_answer(visit, state):
    page = visit("#heads?model=critters-biased&image=s9&heads.by=background")
    bars(page, "All heads on")
    page.get_by_role("button", name="layer 5, head 3:").click()
    page.get_by_role("button", name="layer 0, head 4:").click()
    page.get_by_text("2 heads off").wait_for()
    context = context_of(state, "critters-biased")
    request = heads.HeadsRequest(model="critters-biased", picture="s9", off=(4, 43))
    answer = heads.switch(context, request)
    assert bars(page, "Some off") == pytest.approx(by_name(answer["after"]), abs=1e-3)
    shares = page.locator(".share .value").all_text_contents()
    expected = [100 * part["share"] for part in answer["background"]]
    assert [float(value.split()[0]) for value in shares] == pytest.approx(expected, abs=0.06)
    drawn = heads.maps(context, request)
    page.locator("[data-sum]").nth(1).wait_for()
    for place, name in enumerate(("before", "after")):
        shown = float(page.locator("[data-sum]").nth(place).get_attribute("data-sum"))
        assert shown == pytest.approx(sum(drawn[name]["values"]), abs=0.02)


def test_a_slow_job_says_how_far_it_is_and_a_cancelled_one_frees_the_queue(visit, context):
    page = visit("#doubt?model=critters-vit&image=s1&doubt.methods=rise")
    stop = page.locator("#job").get_by_role("button", name="Cancel")
    stop.click()
    stop.wait_for(state="hidden")
    page.goto(page.url.partition("#")[0] + EXPLAIN)
    bars(page, "Prediction")
    brush_patches(page, [52, 53, 54])
    page.wait_for_url(re.compile(r"explain\.patches=52-54&"))
    expect(page.get_by_text("3 of 144 patches")).to_have_count(2)
    wanted = pytest.approx(expected(context, [52, 53, 54], "only"), abs=1e-3)
    assert bars(page, "Only these patches") == wanted


def test_an_unticked_part_changes_what_is_read(visit, state):
    page = visit("#parts?image=s3")
    bars(page, "All parts")
    page.get_by_role("checkbox").nth(2).uncheck()
    page.get_by_text("1 part out").wait_for()
    context = context_of(state, "critters-ifam")
    answer = parts.look(context, parts.Masked(model="critters-ifam", picture="s3", out=(2,)))
    assert bars(page, "As set") == pytest.approx(by_name(answer["after"]), abs=1e-3)
    share = page.locator(".finding").get_attribute("data-share")
    assert float(share) == pytest.approx(answer["share"], abs=1e-4)


@pytest.mark.slow
def test_blinded_heads_are_heard_in_the_answer(visit, state):
    page = visit("#ask?image=s3&ask.question=Which+critter+is+this%3F")
    context = context_of(state, "critters-llava")
    asked = {"model": "critters-llava", "picture": "s3", "question": "Which critter is this?"}
    word = page.get_by_role("button", name=ask.answer(context, ask.Asked(**asked))["words"][0])
    expect(word).to_have_attribute("aria-pressed", "true")
    behind = ask.behind(context, ask.Asked(**asked))
    page.locator("[data-sum]").wait_for()
    total = float(page.locator("[data-sum]").get_attribute("data-sum"))
    assert total == pytest.approx(sum(behind["tokens"]["values"]), abs=0.01)
    first = behind["top"][0]
    page.get_by_role("button", name=f"layer {first['layer']}, head {first['head']}:").click()
    page.get_by_text("hidden from 1 head").wait_for()
    page.get_by_role("button", name="Hide the image from key heads").click()
    page.get_by_text(f"hidden from {len(behind['enough'])} heads").wait_for()
    heard = ask.hear(context, ask.Asked(**asked, blind=tuple(behind["enough"])))
    assert bars(page, "Image hidden from some heads") == pytest.approx(
        by_name(heard["after"]), abs=1e-3
    )
    expect(page.locator("p.spoken").nth(1)).to_have_text(" ".join(heard["words"]))
    page.get_by_label("question").fill("What colour is the tail?")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.wait_for_url(re.compile("ask.question=What"))
    other = ask.answer(context, ask.Asked(**{**asked, "question": "What colour is the tail?"}))
    page.get_by_role("button", name=other["words"][0], exact=True).wait_for()


SHIFTS = """() => new Promise((done) => {
  new PerformanceObserver((list) => done(list.getEntries().filter((e) => !e.hadRecentInput)
    .map((e) => [e.value, ...e.sources.map((s) => s.node?.className ?? "")])))
    .observe({ type: "layout-shift", buffered: true });
  setTimeout(() => done([]), 1000);  // none
})"""


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("panel", PANELS)
def test_nothing_moves_while_a_panel_is_answered(visit, panel, width):
    """What is aimed at stays where it is: Chromium's layout shifts without input."""
    link = f"#{panel}?model=critters-vit&image=s1&explain.patches=52-54"
    page = visit(link, viewport={"width": width, "height": 900})
    shown(page, panel)
    moved = page.evaluate(SHIFTS)
    assert sum(value for value, *_ in moved) < 0.01, moved
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_results_open_in_a_sandbox(visit):
    page = visit("#runs")
    frame = page.frame_locator("iframe.run-page")
    expect(frame.get_by_role("heading", name="A page of ours")).to_be_visible()
    assert page.locator(".run-list:not(.kept) button").count() == 2
    assert visit.heard == []
    page.get_by_role("radio", name="results/hostile").click()
    expect(frame.locator("#read")).to_have_text("no parent, no server, null")
    page.get_by_label("page").select_option("more.html")
    expect(frame.get_by_text("more")).to_be_visible()
    page.wait_for_url(re.compile("runs.run=results%2Fhostile.*runs.page=more.html"))
    with page.expect_popup() as waiting:
        page.get_by_role("link", name="Open in a new tab").click()
    expect(waiting.value.get_by_text("more")).to_be_visible()
    assert waiting.value.evaluate("window.origin") == "null"
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.reload()
    expect(page.locator("#tools summary")).to_have_text("Tools: Results")
    page.locator(".run-list:not(.kept) button").first.wait_for()
    page.set_viewport_size({"width": 1280, "height": 150})  # a list longer than the window
    overfull = "all => all.filter((b) => b.scrollHeight > b.clientHeight).length"
    assert page.locator(".run-list:not(.kept) button").evaluate_all(overfull) == 0
    visit.expected = "Content Security Policy"  # the console names what it forbade, nothing else
    assert visit.heard
