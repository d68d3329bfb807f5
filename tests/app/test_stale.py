"""What the page shows belongs to what is chosen: no number, name or outline of another question."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.app.test_browser import EXPLAIN

HEADS = "#heads?model=critters-vit&heads.picture=s8"


def eval_mode(page):
    expect(page.locator("html")).to_have_attribute("data-asking", "0", timeout=60_000)


def held(page, action):
    """Requests of an action get no reply from now on; gives those that were made."""
    routes = []
    page.route(f"**/api/run/{action}", lambda route: routes.append(route))
    return routes


def choose(page, picture, within="main .panel:not([hidden])"):
    page.locator(f"{within} .thumbs [data-id={picture}]").first.click()


def test_enough_and_needed_are_not_drawn_on_another_picture(visit):
    page = visit(f"{EXPLAIN}&explain.evidence=true")
    stack = page.locator(".stage .stack")
    page.locator(".finding .key.needed").wait_for()
    eval_mode(page)
    assert int(stack.get_attribute("data-enough")) > 0
    held(page, "explain/evidence")
    choose(page, "s2")
    page.locator("figcaption", has_text="#2").first.wait_for()
    expect(stack).to_have_attribute("data-enough", "0")
    expect(stack).to_have_attribute("data-needed", "0")


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


@pytest.mark.parametrize("panel", ["heads", "swap"])
def test_a_model_without_blocks_shows_no_numbers_of_another(visit, panel):
    """And its notice goes with it."""
    page = visit()
    eval_mode(page)

    def without_blocks(route):
        facts = route.fetch().json()
        del next(model for model in facts["models"] if model["key"] == "critters-biased")["layers"]
        route.fulfill(json=facts)

    page.route("**/api/hello", without_blocks)
    page.goto(page.url.partition("#")[0] + f"#{panel}?model=critters-vit")
    page.reload()
    bar, notice = page.locator(".answer-card li").first, page.get_by_text("transformer")
    expect(bar).to_be_visible(timeout=60_000)
    eval_mode(page)
    page.get_by_label("model").select_option("critters-biased")
    expect(notice).to_be_visible()
    expect(bar).to_be_hidden()
    page.get_by_label("model").select_option("critters-vit")
    expect(bar).to_be_visible()
    expect(notice).to_be_hidden()
