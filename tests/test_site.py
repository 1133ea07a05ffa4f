"""Tests that the site builds without a warning, and that its links and pages work."""

import functools
import html.parser
import http.server
import re
import shutil
import sys
import threading
import urllib.parse

import pytest

from .command import ROOT, run

pytestmark = pytest.mark.full
pytest.importorskip("sphinx")
pytest.importorskip("myst_nb")

DESKTOP, PHONE = (1280, 900), (390, 844)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Builds the site without running the tutorials, and returns its folder."""
    out = tmp_path_factory.mktemp("site")
    options = ["--fail-on-warning", "--keep-going", "--define=nb_execution_mode=off"]
    run(sys.executable, "-m", "sphinx", *options, ROOT / "docs", out)
    return out


def pages(site):
    return {p.relative_to(site).as_posix(): p.read_text() for p in site.rglob("*.html")}


class Addresses(html.parser.HTMLParser):
    """The links of a page, the files that it loads, and its link targets."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loaded, self.places = set(), set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.places |= {found.get("id"), found.get("name")}
        if tag == "a":
            self.links.add(found.get("href"))
        elif tag == "link":
            self.loaded.add(found.get("href"))
        elif "src" in found:
            self.loaded.add(found["src"])


def test_site_links_lead_to_existing_pages_and_places(site):
    read = {path: Addresses(text) for path, text in pages(site).items()}
    for path, page in read.items():
        for link in filter(None, page.links):
            target = urllib.parse.urlsplit(link)
            if target.scheme:
                continue
            there = (site / path).parent / target.path if target.path else site / path
            name = there.resolve().relative_to(site).as_posix()
            assert there.exists(), (path, link)
            if target.fragment and name in read:
                place = urllib.parse.unquote(target.fragment)
                assert place in read[name].places, (path, link)


def test_site_loads_nothing_from_other_hosts(site):
    for path, text in pages(site).items():
        for address in filter(None, Addresses(text).loaded):
            assert not re.match(r"(https?:)?//", address), (path, address)


def test_every_document_is_a_page(site):
    documents = (ROOT / "docs").rglob("*.md")
    wanted = {p.relative_to(ROOT / "docs").with_suffix(".html") for p in documents}
    assert wanted <= {p.relative_to(site) for p in site.rglob("*.html")}


@pytest.fixture(scope="module")
def address(site):
    """Serves the site on this machine, and yields its address."""
    handler = functools.partial(Silent, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        del args


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"]
        )
        yield found
        found.close()


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_show_no_browser_error_and_fit_the_width(
    site, address, browser, size, scheme
):
    """The console shows no error, and the page does not scroll sideways."""
    width, height = size
    page = browser.new_page(
        viewport={"width": width, "height": height}, color_scheme=scheme
    )
    said, given_up = [], set()
    page.on("console", lambda message: said.append((message.type, message.text)))
    page.on("pageerror", lambda error: said.append(("error", str(error))))
    # Chromium gives up a request for the icon if the page is left meanwhile.
    page.on("requestfailed", lambda request: given_up.add(request.url))
    for path in pages(site):
        page.goto(f"{address}/{path}")
        assert not [text for kind, text in said if kind == "error"], (path, said)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
    for url in given_up:
        assert url.startswith(address), "a request to another host"
        assert page.request.get(url).ok, url
    page.close()


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("make_train_step", "reference/train_step"),
        ("EMA", "recipes"),
        ("Grain", "recipes"),
        ("DiLoCo", "local_steps"),
        ("PowerSGD", "compression"),
        ("out of memory", "troubleshooting"),
    ],
)
def test_site_search_finds_the_page_of_a_term(address, browser, words, path):
    page = browser.new_page()
    page.goto(f"{address}/search.html?q={urllib.parse.quote_plus(words)}")
    page.wait_for_selector(f"#search-results a[href*='{path}.html']")
    page.close()
