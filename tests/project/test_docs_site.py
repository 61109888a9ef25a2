"""Every page of the documentation site at the width of a desktop and of a telephone, in Debian's Chromium."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
# Without a sandbox, which root cannot have, and without a browser's own calls to the network.
OPTIONS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
OPTIONS += " --disable-component-update --disable-sync --hide-scrollbars"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="no chromium and chromedriver (apt-get install chromium chromium-driver)",
    ),
]

PARTS = 6
"""Tests among which the pages are divided, so that none takes minutes."""

FAULTS = """
const faults = [], width = document.documentElement.clientWidth;
if (document.documentElement.scrollWidth > width) {
  const wide = [...document.querySelectorAll("article *")].filter((node) => {
    if (node.getBoundingClientRect().right <= width + 1) return false;
    for (let box = node.parentElement; box; box = box.parentElement)
      if (["auto", "scroll", "hidden"].includes(getComputedStyle(box).overflowX)) return false;
    return true;
  });
  faults.push(`${document.documentElement.scrollWidth} pixels wide: ` +
    wide.slice(0, 3).map((node) => node.outerHTML.slice(0, 120)).join(" | "));
}
for (const image of document.images) if (image.complete && !image.naturalWidth) faults.push(`no image ${image.src}`);
if (!document.querySelector("article h1")) faults.push("no title");
return faults;
"""


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing: a line for each file of each page helps nobody."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder of the built site, and its address."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(folder)], cwd=ROOT, check=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*OPTIONS.split(), f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(option)
    with webdriver.Chrome(options, webdriver.ChromeService(DRIVER)) as chromium:
        yield chromium


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("width", [1400, 400])
def test_no_page_is_wider_than_the_window(width: int, part: int, site: tuple[Path, str], browser: Any) -> None:
    """Tables, code and pictures scroll or shrink in their own boxes; each picture is there."""
    folder, address = site
    pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.html") if path.name != "404.html")
    assert len(pages) > 50
    # A window of a headless Chromium is at least 500 pixels wide; a page's viewport is not bound by that.
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    faults: dict[str, list[str]] = {}
    for page in pages[part::PARTS]:
        browser.get(address + page)
        assert browser.execute_script("return innerWidth") == width
        if result := browser.execute_script(FAULTS):
            faults[page] = result
    assert not faults, faults
