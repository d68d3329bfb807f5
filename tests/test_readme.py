"""What the README shows can be typed: its Python runs, and its commands have the options they are
given."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch

from tests.cli.calls import flags_of, invoke, photo

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL))
COMMANDS = re.findall(r"^seecause .*$", BLOCKS, flags=re.MULTILINE)
SLOW, LONG = pytest.mark.slow, re.compile("seecause (audit|repair)")
DOCS = Path(__file__).parents[1] / "docs"
PAGES = [path for path in sorted(DOCS.glob("*.md")) if path.name != "decisions.md"]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with the files that a reader has: photos, a checkpoint and class names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for name in ("a.jpg", "b.jpg"):
        photo(tmp_path / "photos" / name)
    timm = pytest.importorskip("timm")
    module = timm.create_model("vit_tiny_patch16_224", num_classes=3)
    torch.save(module.state_dict(), tmp_path / "model.pth")
    (tmp_path / "names.txt").write_text("cat\ndog\nfox\n")
    return tmp_path


def test_the_snippet_runs(desk):
    (snippet,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict = {}
    exec(snippet, names)
    assert names["result"].maps.shape == (1, 12, 12) and (desk / "overlay.png").is_file()


@pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=SLOW if LONG.match(line) else ()) for line in COMMANDS],
)
def test_every_command_runs(line, desk):
    words = shlex.split(line)[1:]
    done = invoke(*words)
    assert done.exit_code == 0, done.stderr
    assert (desk / words[words.index("--out") + 1]).is_dir()


def unknown_flags(line):
    """Options of a command line that its command does not have."""
    words = shlex.split(re.sub(r"\s+# .*", "", line))[1:]
    return {word.partition("=")[0] for word in words if word.startswith("--")} - flags_of(words)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_has_the_options_it_is_given(line):
    assert unknown_flags(line) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_the_docs_have_the_options_they_are_given(page):
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^    (seecause [a-z].*)$", text, flags=re.MULTILINE):
        assert unknown_flags(line) == set(), line


def test_it_is_short_and_names_every_extra():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert len(README.split()) <= 600
    extras = {*project["optional-dependencies"]} - {"docs"}
    assert extras == {*re.search(r"extras: (.*)", BLOCKS)[1].split(", ")}


def test_it_leads_with_an_image_and_says_how_to_install():
    image = README.index("](docs/first.jpg)")
    assert image < README.index("pip install") < README.index("make demo") < len(README) / 3
    assert "make test" in README and "](docs/others.md)" in README


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((docs/[^)#]+)", README))))
def test_every_link_leads_somewhere(target):
    assert (Path(__file__).parents[1] / target).is_file()
