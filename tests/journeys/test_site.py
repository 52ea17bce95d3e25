"""Build the site strictly: links resolve, nothing comes from outside, and pages are accessible on phones and desktops.

Without Chromium or axe-core the last tests are skipped, except in CI, where they fail. `make browser` fetches both.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
AXE = ROOT / "build" / "axe.min.js"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
SCREENS = {"phone": ("light", 390, 844), "desktop": ("dark", 1440, 900)}
VARIED_PAGES = ("index.html", "explanation/results.html", "tutorials/inspect.html")
"""Wide tables, code and figures."""
LOADED = {
    "script": ("src",),
    "link": ("href",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "object": ("data",),
    "embed": ("src",),
}
"""The attributes by which an element loads something."""
HARMLESS_LINKS = {"canonical", "next", "prev", "index", "search", "author"}


class Page(HTMLParser):
    """The links, the resources and the anchors of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.resources: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") in HARMLESS_LINKS:
            return
        self.resources += [values[name] for name in LOADED.get(tag, ()) if name in values]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Return the pages of the site; every warning of the build is an error."""
    pytest.importorskip("sphinx", reason="pip install 'vitral[docs]'")
    pytest.importorskip("furo", reason="pip install 'vitral[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-j", "1"]
    done = subprocess.run([*command, str(ROOT / "docs"), str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {path.resolve(): Page(path) for path in folder.rglob("*.html")}


def test_every_page_is_in_the_site(site: dict[Path, Page]) -> None:
    names = {page.stem for page in (ROOT / "docs").rglob("*.md")}
    assert names <= {path.stem for path in site}


def test_every_link_resolves(site: dict[Path, Page]) -> None:
    for page in site.values():
        for link in [*page.links, *page.resources]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path.resolve()
            assert target.exists(), f"{page.path.name} -> {link}"
            if parts.fragment and target in site:
                assert unquote(parts.fragment) in site[target].anchors, f"{page.path.name} -> {link}"


def test_nothing_is_loaded_from_outside(site: dict[Path, Page]) -> None:
    for page in site.values():
        for resource in page.resources:
            assert not urlsplit(resource).netloc, f"{page.path.name} loads {resource}"
    for address in loaded_by_styles(next(iter(site)).parent):
        assert not urlsplit(address).netloc, address


def loaded_by_styles(folder: Path) -> Iterator[str]:
    """Yield the addresses that the style sheets of the site load."""
    root = next(parent for parent in (folder, *folder.parents) if (parent / "_static").is_dir())
    for sheet in (root / "_static").rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        yield from re.findall(r"url\(\s*['\"]?(?!data:)([^'\")]+)", text)
        yield from re.findall(r"@import\s+['\"]([^'\"]+)", text)


def test_search_works_offline(site: dict[Path, Page]) -> None:
    index = next(path for path in site if path.name == "index.html").parent / "searchindex.js"
    assert "packing" in index.read_text(encoding="utf-8")


# ---- in a browser ----


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium, or skip."""
    if CHROMIUM is None or not AXE.exists():
        reason = "Chromium or axe-core is missing. Run: make browser"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(params=SCREENS)
def page(request: pytest.FixtureRequest, browser: Any) -> Iterator[Any]:
    """Open a tab, and check at the end that nothing was logged or requested from outside."""
    scheme, width, height = SCREENS[request.param]
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
    page, problems = context.new_page(), list[str]()
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda sent: sent.url.startswith(("file:", "data:")) or problems.append(sent.url))
    yield page
    assert not problems
    context.close()


def check_page(page: Any, **options: Any) -> None:
    """axe-core finds nothing, and nothing makes the page wider than the screen."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    result = page.evaluate("(options) => axe.run(options)", {"preload": False, **options})
    assert not [(rule["id"], rule["nodes"][0]["html"][:200]) for rule in result["violations"]]
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@pytest.mark.parametrize("name", VARIED_PAGES)
def test_pages_are_accessible_and_fit(site: dict[Path, Page], page: Any, name: str) -> None:
    page.goto((root_of(site) / name).as_uri())
    check_page(page)
    assert page.evaluate("[...document.images].every((image) => image.naturalWidth > 0)")


@pytest.mark.parametrize("page", ["phone"], indirect=True)
def test_the_api_reference_is_accessible_and_fits(site: dict[Path, Page], page: Any) -> None:
    """Without the colors, whose check takes seconds on this long page."""
    page.goto((root_of(site) / "reference" / "python.html").as_uri())
    check_page(page, rules={"color-contrast": {"enabled": False}})


def test_search_finds_pages(site: dict[Path, Page], page: Any) -> None:
    page.goto((root_of(site) / "search.html").as_uri())
    check_page(page)
    page.locator("article input[name=q]").fill("registers")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a")
    check_page(page)
    page.locator("#search-results li a").first.click()
    page.wait_for_url(lambda url: "search.html" not in url)
    assert "registers" in page.text_content("article").lower()


def root_of(site: dict[Path, Page]) -> Path:
    return next(path for path in site if path.name == "genindex.html").parent
