"""The report's page, in a real browser where there is one: nothing is fetched, nothing of a user's text is markup."""

import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from rewriting import ConvNet
from torch import nn

import sparsecomp
from sparsecomp.report import Estimate, Node, Report, Site
from sparsecomp.report.node import Timing

EVIL = "<script>document.title='taken'</script>\"'>&{{ 7 * 7 }}"


class Model(nn.Module):
    """Spikes into a convolution, a sparse weight, and a masked one."""

    def __init__(self) -> None:
        super().__init__()
        self.spiking = ConvNet()
        self.sparse = sparsecomp.nn.SparseLinear.from_linear(nn.Linear(10, 512), sparsity=0.9)
        self.masked = nn.Linear(512, 512)
        self.register_buffer("mask", (torch.arange(512 * 512).reshape(512, 512) % 7 == 0).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.sparse(self.spiking(x)))
        return nn.functional.linear(x, self.masked.weight * self.mask, self.masked.bias)


@pytest.fixture(scope="module")
def report() -> Report:
    with torch.no_grad():
        model, x = Model().eval(), torch.rand(2, 3, 8, 8)
        return sparsecomp.explain(model, x, implementation="binary", frozen=True)


def evil() -> Report:
    """Users' text wherever there can be any."""
    site = Site(EVIL, EVIL, False, EVIL, f"/no/such/{EVIL}:3", EVIL, 0.5, "measured", EVIL, why=EVIL)
    node = Node(EVIL, EVIL, (), EVIL, location=f"javascript:alert(1):{EVIL}:1", module=EVIL)
    nodes = [node, Node("b", EVIL, (EVIL,))]
    return Report(
        EVIL, [site], graph_before=EVIL, graph_after="b", before=nodes, after=nodes[:1], graph_breaks=[EVIL],
        notes=[EVIL],
    )  # fmt: skip


class _Markup(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def written(report: Report, folder: Path) -> str:
    report.to_html(folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


def test_a_page_needs_no_other_file_and_no_network(report: Report, tmp_path: Path) -> None:
    text = written(report, tmp_path)
    markup = _Markup()
    markup.feed(text)
    links = [value for _, attributes in markup.tags for name, value in attributes.items() if name in ("href", "src")]
    assert links and all(str(link).startswith(("#", "file:///")) for link in links)
    assert not {"link", "img", "iframe"} & {tag for tag, _ in markup.tags}
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest", text)


def test_text_of_users_is_no_markup(tmp_path: Path) -> None:
    text = written(evil(), tmp_path)
    markup = _Markup()
    markup.feed(text)
    assert [tag for tag, _ in markup.tags].count("script") == 1 and "{{ 7 * 7 }}" in text
    assert not any(str(attributes.get("href", "#")).startswith("javascript") for _, attributes in markup.tags)
    assert not any(name.startswith("on") for _, attributes in markup.tags for name in attributes)


def test_an_empty_report_has_a_page(tmp_path: Path) -> None:
    assert "no rule was run" in written(Report(), tmp_path)


def test_a_notebook_shows_the_page_in_a_frame(report: Report) -> None:
    markup = _Markup()
    markup.feed(report._repr_html_())
    ((tag, attributes),) = markup.tags
    assert tag == "iframe" and str(attributes["srcdoc"]).startswith("<!doctype html>")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    chromium, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if chromium is None or driver is None:
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1400,1000"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


def show(browser: Any, report: Report, folder: Path) -> None:
    report.to_html(folder / "report.html")
    browser.get_log("performance"), browser.get_log("browser")
    browser.get((folder / "report.html").as_uri())


def shown(browser: Any, selector: str) -> list[str]:
    return [found.text for found in browser.find_elements("css selector", selector) if found.is_displayed()]


@pytest.mark.slow(reason="drives a browser")
def test_the_browser_fetches_nothing_and_has_nothing_to_say(browser: Any, report: Report, tmp_path: Path) -> None:
    show(browser, report, tmp_path)
    asked = re.findall(r'"documentURL":"([^"]*)"', str(browser.get_log("performance")))
    assert {address.partition(":")[0] for address in asked} == {"file"}
    assert browser.get_log("browser") == []
    assert shown(browser, "#summary") == [report.summary]


@pytest.mark.slow(reason="drives a browser")
def test_rows_are_filtered(browser: Any, report: Report, tmp_path: Path) -> None:
    show(browser, report, tmp_path)
    every = len(report.layers)
    assert len(shown(browser, "#layers tbody tr")) == every
    field = browser.find_element("id", "filter")
    field.send_keys("SPIKE_conv")
    found = shown(browser, "#layers td.rule")
    assert found == ["spike_conv"] * 2 and shown(browser, "#count") == [f"2 of {every} layers"]
    browser.find_element("css selector", "#outcome option[value=rewritten]").click()
    assert shown(browser, "#layers td.site") == ["spiking.second"]
    field.clear()
    field.send_keys(" ")
    assert len(shown(browser, "#layers tbody tr")) == sum(layer.site.rewritten for layer in report.layers)


def sites(*densities: float | None) -> list[Site]:
    return [
        Site("rule", f"layer{place}", True, "why", module=f"layer{place}", density=density, density_source="measured",
             estimate=Estimate(1e-6 * place, 1e-5), expected_gain=1.0 + place)
        for place, density in enumerate(densities)
    ]  # fmt: skip


@pytest.mark.slow(reason="drives a browser")
def test_rows_are_sorted_by_number_with_the_unknown_last(browser: Any, tmp_path: Path) -> None:
    show(browser, Report(sites=sites(0.5, None, 0.09, 0.1)), tmp_path)
    heading = browser.find_element("xpath", "//th[button='density']/button")
    heading.click()
    assert shown(browser, "#layers td.site") == ["layer2", "layer3", "layer0", "layer1"]
    heading.click()
    assert shown(browser, "#layers td.site") == ["layer0", "layer3", "layer2", "layer1"]
    browser.find_element("xpath", "//th[button='site']/button").click()
    assert shown(browser, "#layers td.site") == ["layer0", "layer1", "layer2", "layer3"]


@pytest.mark.slow(reason="drives a browser")
def test_bars_are_as_long_as_their_numbers(browser: Any, tmp_path: Path) -> None:
    show(browser, Report(sites=sites(0.5, None, 0.1)), tmp_path)

    def lengths(column: str) -> list[float]:
        bars = browser.find_elements("css selector", f"#layers td.{column} .bar")
        widths = [(bar.find_element("tag name", "i").size["width"], bar.size["width"]) for bar in bars]
        return [inner / whole for inner, whole in widths]

    assert lengths("density") == pytest.approx([0.5, 0.1], abs=0.03)
    assert lengths("time") == pytest.approx([0.0, 0.5, 1.0], abs=0.03)


@pytest.mark.slow(reason="drives a browser")
def test_reasons_are_grouped_with_their_counts(browser: Any, report: Report, tmp_path: Path) -> None:
    show(browser, report, tmp_path)
    (kind, layers), *_ = report.why_not()
    first = browser.find_element("css selector", "details.why")
    assert first.find_element("tag name", "summary").text == f"{sum(layer.count for layer in layers)} {kind}"
    first.find_element("tag name", "summary").click()
    assert len(first.find_elements("tag name", "li")) == len(layers) and layers[0].site.reason in first.text


@pytest.mark.slow(reason="drives a browser")
def test_changed_nodes_are_marked_on_both_sides(browser: Any, report: Report, tmp_path: Path) -> None:
    show(browser, report, tmp_path)
    before, after = ({node.name for node in nodes} for nodes in (report.before, report.after))
    drawn = {node.name for node in report.after if node.op != "parameter"}
    assert set(shown(browser, ".before .node.changed b")) == {
        node.name for node in report.before if node.name not in after and node.op != "parameter"
    }
    assert set(shown(browser, ".after .node.changed b")) == drawn - before
    assert "spike_conv_default" in drawn - before
    # what stayed stands in one line with itself
    places = {
        side: {found.text: found.location["y"] for found in browser.find_elements("css selector", f".{side} .node b")}
        for side in ("before", "after")
    }
    assert all(places["before"][name] == places["after"][name] for name in places["before"].keys() & places["after"])


@pytest.mark.slow(reason="drives a browser")
def test_a_node_leads_to_its_line(browser: Any, report: Report, tmp_path: Path) -> None:
    show(browser, report, tmp_path)
    (node,) = browser.find_elements("xpath", "//div[@class='node changed'][.//b='spike_conv_default']")
    link = node.find_element("css selector", ".source")
    assert link.get_attribute("href").endswith("/rewriting.py") and "self.second(x)" in link.text
    path, _, line = link.get_attribute("title").rpartition(":")
    assert "self.second(x)" in Path(path).read_text().splitlines()[int(line) - 1]


@pytest.mark.slow(reason="drives a browser")
def test_a_node_leads_to_what_it_reads(browser: Any, report: Report, tmp_path: Path) -> None:
    show(browser, report, tmp_path)
    (link,) = browser.find_elements("css selector", ".after .node [href^='#']")[:1]
    name = link.text
    link.click()
    assert shown(browser, ".node:target b") == [name]


@pytest.mark.slow(reason="drives a browser")
def test_hostile_text_is_shown_as_it_is(browser: Any, tmp_path: Path) -> None:
    show(browser, evil(), tmp_path)
    assert browser.title == "sparsecomp report"
    assert EVIL in browser.find_element("id", "summary").text and EVIL in shown(browser, "#layers td.reason")
    assert not browser.find_elements("css selector", "a[href^='javascript']") and browser.get_log("browser") == []


@pytest.mark.slow(reason="drives a browser")
def test_nothing_is_wider_than_the_window(browser: Any, report: Report, tmp_path: Path) -> None:
    show(browser, report, tmp_path)
    for width in (1400, 800):
        browser.set_window_size(width, 1000)
        assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.slow(reason="drives a browser")
def test_a_graph_of_a_thousand_nodes_is_drawn(browser: Any, tmp_path: Path) -> None:
    nodes = [Node("n0", "input", timing=Timing.NONE)]
    nodes += [Node(f"n{place}", "relu", (f"n{place - 1}", "n0")) for place in range(1, 1000)]
    show(browser, Report(before=nodes, after=nodes), tmp_path)
    assert len(browser.find_elements("css selector", ".after .node")) == 1000
