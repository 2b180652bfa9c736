"""Recorded heads, and a browser that opens their pages."""

import shutil

import pytest
import torch
from report_examples import TEXT, layer

_SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]  # fmt: skip


@pytest.fixture
def seen():
    """The heads of two layers on `TEXT`, by layer name."""
    with torch.no_grad():
        x = torch.randn(2, len(TEXT.pieces), 32)
        return {f"encoder.layer.{i}": layer()(x)[1] for i in range(2)}


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium, driven by Playwright."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    with sync.sync_playwright() as playwright:
        # with scrollbars, as readers have them
        started = playwright.chromium.launch(
            executable_path=path, args=_SWITCHES, ignore_default_args=["--hide-scrollbars"]
        )
        yield started
        started.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Open reports in the browser. Console messages, errors and network requests fail the test."""
    contexts, complaints = [], []

    def open_(report, **options):
        path = tmp_path / "heads.html"
        report.write(path)
        context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: complaints.append(f"console {said.type}: {said.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        own = path.as_uri()
        page.on("request", lambda request: request.url == own or complaints.append(f"request: {request.url[:100]}"))
        page.goto(own)
        page.wait_for_selector("html[data-painted]", timeout=30_000)
        return page

    yield open_
    for context in contexts:
        context.close()
    # exported files have blob: addresses, which are not network requests
    assert [
        one for one in complaints if not one.startswith("request: blob:") and not one.startswith("request: data:,")
    ] == []
