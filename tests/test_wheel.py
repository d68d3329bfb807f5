"""The wheel holds the package whole; `make release-check` also installs it by itself."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    done = subprocess.run([*build, str(folder), str(ROOT)], capture_output=True, text=True)
    missing = ("Could not find a version", "No matching distribution")
    if done.returncode and any(words in done.stderr for words in missing):
        pytest.skip(f"no build backend here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("seecause-*.whl")
    return file


@pytest.mark.slow
def test_every_tracked_file_of_the_package_is_in_the_wheel(wheel):
    listed = subprocess.run(
        ["git", "ls-files", "src/seecause"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tracked = {line.removeprefix("src/") for line in listed.stdout.splitlines()}
    assert tracked <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_an_installed_wheel_explains_a_picture_from_anywhere(wheel, tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*install, str(tmp_path / "site"), str(wheel)], check=True)
    code = (
        "import seecause; assert 'site' in seecause.__file__;"
        "from seecause.cli import app;"
        "app(['explain', 'critters:clean:test#3', '--method', 'caap'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "explained" / "index.html").is_file()
