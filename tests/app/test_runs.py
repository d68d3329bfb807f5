"""The Runs panel: what is listed at the start is all that can be opened."""

import json

import pytest

from seecause.app.middleware import POLICY
from seecause.app.panels import runs
from seecause.app.panels.runs import Everything, find_pages, find_runs
from seecause.app.state import ServerState, open_state
from seecause.files import digest
from tests.app.conftest import context_of

PAGE = digest("results/ours/index.html", length=12)


@pytest.fixture
def context(results):
    state = ServerState({}, runs={"results": results})
    yield context_of(state)
    state.close()


def test_results_one_level_down_are_listed_newest_first(context, results):
    listed = runs.listed(context, Everything())["runs"]
    assert [run["name"] for run in listed] == ["results/ours", "results/hostile"]
    assert listed[1]["date"] == "2001-09-09 01:46 UTC"
    pages = [[page["name"] for page in run["pages"]] for run in listed]
    assert pages == [["index.html"], ["report.html", "more.html"]]
    assert str(results) not in json.dumps(listed)


def test_a_folder_that_is_a_result_itself_is_listed(results):
    (run,) = find_runs({"mine": results / "ours"})
    assert run.name == "mine" and [page.name for page in run.pages.values()] == ["index.html"]


def test_links_that_lead_elsewhere_are_not_pages(tmp_path):
    (tmp_path / "secret.html").write_text("secret")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "index.html").write_text("page")
    (folder / "other.html").symlink_to(tmp_path / "secret.html")
    assert [path.name for path in find_pages(find_runs({"run": folder})).values()] == ["index.html"]


def test_folders_of_one_name_do_not_hide_each_other(tmp_path):
    places = [tmp_path / "a" / "out", tmp_path / "b" / "out"]
    assert open_state([], runs=places).runs == {"out": places[0], "out-2": places[1]}


def test_a_page_comes_with_a_policy_that_gives_it_nothing(client):
    answer = client.get(f"/runs/{PAGE}")
    assert answer.status_code == 200 and "A page of ours" in answer.text
    assert 'http-equiv="Content-Security-Policy"' in answer.text  # its own stays
    policy = answer.headers["content-security-policy"]
    assert "sandbox allow-scripts" in policy and "allow-same-origin" not in policy
    assert "frame-ancestors 'self'" in policy and "connect-src" not in policy
    assert "default-src 'none'" in policy
    assert client.get("/").headers["content-security-policy"] == POLICY
    assert "frame-ancestors 'none'" in POLICY


@pytest.mark.parametrize(
    "id",
    ["r9p0", PAGE[:5], "ours", "results/ours/index.html", "..%2fnotes%2fsecret.html",
     "%2fetc%2fpasswd", f"{PAGE}/../../notes/secret.html", "index.html", f"{PAGE}%00"],
)  # fmt: skip
def test_what_is_not_listed_is_not_there(client, id):
    answer = client.get(f"/runs/{id}")
    assert answer.status_code == 404 and "secret" not in answer.text


def test_a_sandboxed_page_is_refused_by_the_api(client, headers):
    for extra in ({"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        assert client.get("/api/hello", headers={**headers, **extra}).status_code == 403
