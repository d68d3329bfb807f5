"""What the page shows belongs to what is chosen: no number, name or outline of another question."""

from playwright.sync_api import expect

HEADS = "#heads?model=critters-vit&image=s8"
DOUBT = "#doubt?model=critters-vit&image=s1&doubt.methods=caap&doubt.evidence=true"


def eval_mode(page):
    expect(page.locator("html")).to_have_attribute("data-asking", "0", timeout=60_000)


def held(page, action):
    """Requests of an action get no reply from now on; gives those that were made."""
    routes = []
    page.route(f"**/api/run/{action}", lambda route: routes.append(route))
    return routes


def choose(page, picture):
    page.locator(f"#tray [data-id={picture}]").click()


def test_enough_and_needed_are_not_drawn_on_another_picture(visit):
    page = visit(DOUBT)
    stacks = page.locator(".evidence .stack")
    page.locator(".evidence p").first.wait_for()
    eval_mode(page)
    assert int(stacks.first.get_attribute("data-enough")) > 0
    for action in ("explain/evidence", "doubt/compare"):
        held(page, action)
    choose(page, "s2")
    expect(page.locator(".evidence p:visible")).to_have_count(0)
    expect(page.locator(".map-card:visible")).to_have_count(0)
    expect(stacks.first).to_have_attribute("data-enough", "0")
    expect(stacks.nth(1)).to_have_attribute("data-needed", "0")


def test_an_old_map_is_not_drawn_on_a_new_image(visit):
    page = visit("#explain?model=critters-vit&image=s1")
    heat = page.locator("#panel-explain .heat")
    heat.wait_for()
    eval_mode(page)
    held(page, "doubt/compare")
    choose(page, "s2")
    page.locator("figcaption", has_text="#2").first.wait_for()
    expect(heat).to_be_hidden()


def test_scores_and_maps_of_heads_go_with_the_picture(visit):
    page = visit(HEADS)
    eval_mode(page)
    first = page.locator("[data-place='0']")
    assert first.text_content() != ""
    expect(page.locator(".map-card .heat:visible")).to_have_count(2)
    held(page, "heads/score")
    held(page, "heads/maps")
    choose(page, "s9")
    page.locator(".heads-picture figcaption", has_text="#1").wait_for()
    expect(first).to_have_text("")
    expect(page.get_by_role("button", name="Four highest off")).to_be_disabled()
    expect(page.locator(".map-card .heat:visible")).to_have_count(0)


def test_an_old_answer_is_not_the_answer_to_a_new_question(visit):
    visit.expected = "status of 4"
    page = visit("#ask?model=critters-llava&ask.picture=s3")
    page.locator(".spoken .word").first.wait_for()
    eval_mode(page)
    for action in ("answer", "behind", "hear"):
        page.route(
            f"**/api/run/ask/{action}",
            lambda route: route.fulfill(status=400, json={"error": "it says nothing."}),
        )
    page.get_by_label("question").fill("What place is this?")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.get_by_role("alert").filter(has_text="it says nothing").first.wait_for()
    expect(page.locator(".spoken .word")).to_have_count(0)
    expect(page.locator(".answer-card li")).to_have_count(0)
