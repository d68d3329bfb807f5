"""The documentation: one site that builds without a warning, fetches nothing, and is short."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from seecause.cli import GROUPS
from tests.test_layers import public_names

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
# generated from the papers' tables; a log, which is no page of the site; pages to look things up in
REFERENCE = ("methods.md", "metrics.md", "models.md", "data.md", "critters.md")
NOT_COUNTED = ("papers.md", "decisions.md", *REFERENCE)


def words(page: Path) -> int:
    """Words of prose and tables: what holds a letter, outside of code and of a link's address."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    text = re.sub(r"^ {4}.*$", "", text, flags=re.M)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return sum(bool(re.search("[A-Za-z]", word)) for word in text.split())


def test_it_can_be_read_in_an_hour():
    counts = {str(page): words(page) for page in PAGES if page.name not in NOT_COUNTED}
    assert len(counts) == len(PAGES) - len(NOT_COUNTED)
    assert sum(counts.values()) <= 14_000, counts


def test_every_public_function_and_class_is_explained_with_an_example():
    """Its parameters or attributes, what it returns, and an example, which tests/test_doctests.py
    runs."""
    missing = {}
    for name in public_names():
        module, _, own = name.rpartition(".")
        value = getattr(importlib.import_module(module), own)
        text = inspect.getdoc(value) or ""
        if inspect.isclass(value):
            wanted = ("Args:|Attributes:", "Example:\n    >>> ")
        elif inspect.isfunction(value):
            returns = value.__annotations__.get("return") not in (None, "None")
            wanted = ("Args:",) * bool(inspect.signature(value).parameters)
            wanted += ("Returns:|Yields:",) * returns + ("Example:\n    >>> ",)
        else:
            continue
        gaps = [section for section in wanted if not re.search(f"^({section})", text, flags=re.M)]
        missing |= {name: gaps} if gaps else {}
    assert missing == {}


def test_links_of_the_pages_work_in_a_forge_too():
    """Relative links lead to files of the repository; mkdocs checks those of the site."""
    for page in [*PAGES, *ROOT.glob("*.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert link.startswith("http") or (page.parent / link).exists(), (page.name, link)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_built_and_fetches_nothing(site):
    for page in PAGES:
        built = site / page.relative_to(ROOT / "docs").with_suffix(".html")
        assert built.is_file() == (page.name != "decisions.md")
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(http[^\"> ]+)", text)
        assert not loaded, (page.name, loaded)
    assert not list(site.rglob("*.py"))


def test_the_reference_has_every_public_name_and_command(site):
    for name in public_names():
        module, _, own = name.rpartition(".")
        if inspect.isfunction(value := getattr(importlib.import_module(module), own)) or (
            inspect.isclass(value)
        ):
            page = (site / "reference" / f"{module}.html").read_text(encoding="utf-8")
            assert f'id="{value.__module__}.{value.__qualname__}"' in page, name
        else:
            page = (site / "reference" / f"{module}.html").read_text(encoding="utf-8")
            assert inspect.ismodule(value) or f"<code>{own}</code>" in page, name
    commands = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    for command in (name for group in GROUPS.values() for name in group):
        assert f'id="seecause-{command.replace(" ", "-")}"' in commands, command
    page = (site / "reference" / "seecause.html").read_text(encoding="utf-8")
    assert page.count("&gt;&gt;&gt;") > 20 and page.count("Parameters:") > 10
    assert re.search(r"the protocol\s+that produced them", page)  # one value: one row of the table


def test_tutorials_show_outputs_and_machines_find_every_page(site):
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        page = (site / "tutorials" / f"{notebook.stem}.html").read_text(encoding="utf-8")
        assert 'src="data:image/jpeg;base64,' in page
    listed = re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text(encoding="utf-8"))
    assert {*listed} == {str(page.relative_to(site)) for page in site.rglob("*.html")} - {
        "404.html"
    }


def test_the_search_works_from_disk(site, browser):
    page = browser.new_page()
    page.goto(f"{(site / 'index.html').as_uri()}?q=prune_heads")
    page.wait_for_selector(".md-search-result__item", timeout=20_000)
    assert page.locator(".md-search-result__link").first.get_attribute("href")
    page.close()


def test_equations_are_drawn_without_a_script(site):
    page = (site / "methods.html").read_text(encoding="utf-8")
    assert page.count('<math xmlns="http://www.w3.org/1998/Math/MathML"') >= 10
    assert "$$" not in page and "merror" not in page


def test_spreads_stay_with_their_numbers(site):
    assert "± 0" not in (site / "results" / "caap.html").read_text(encoding="utf-8")
