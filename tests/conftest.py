"""Shared set-up: one torch thread, and Triton kernels interpreted where there is no GPU, so that
they are tested everywhere."""

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = (
    False  # on by default: a patch embedding on a GPU would differ in the fourth digit
)

CHROMIUM = Path("/usr/bin/chromium")
CHROMIUM_ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    """Closed with its file: while Playwright is open, its event loop counts as running, and neither
    a second Playwright nor `asyncio.run` of another file can start in the thread."""
    if not CHROMIUM.exists():
        pytest.skip(f"no {CHROMIUM}: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=list(CHROMIUM_ARGUMENTS))
        yield opened
        opened.close()
