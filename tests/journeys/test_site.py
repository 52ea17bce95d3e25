"""Build the site strictly, and check that every link resolves and that no page loads an outside resource."""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
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
