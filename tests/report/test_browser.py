"""The page in a real browser: no error, no request, and a slider that works by keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import net2gp as n2g
from net2gp.report import UncertaintyReport, uncertainty_report


@pytest.fixture(scope="module")
def report() -> UncertaintyReport:
    x = torch.randn(300, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    posterior = n2g.condition(4.0 * n2g.RBF(), (x[:80], y[:80]), n2g.Bernoulli())
    return uncertainty_report(
        posterior, (x[80:], y[80:]), others={"far": 6 * x[:50]}, columns=["age", "dose"]
    )


SIZES = {"laptop": (1280, 800), "phone": (390, 844)}


@pytest.fixture(params=SIZES)
def page(request, chromium, report, tmp_path) -> Iterator[Any]:
    width, height = SIZES[request.param]
    path, _ = report.save(tmp_path / "report")
    context = chromium.new_context(viewport={"width": width, "height": height}, offline=True)
    page = context.new_page()
    errors, requests = [], []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda one: requests.append(one.url))
    page.goto(path.as_uri())
    yield page
    assert errors == []
    assert [url for url in requests if not url.startswith(("data:", path.as_uri()))] == []
    context.close()


def test_nothing_is_wider_than_the_window(page):
    sizes = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert sizes[0] <= sizes[1]


def test_the_slider_moves_by_keyboard_and_says_what_the_table_says(page, report):
    slider = page.locator("#refused")
    slider.focus()
    assert page.evaluate("document.activeElement.id") == "refused"
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    assert slider.input_value() == "10"
    percent, error, _, kept = report.values["refusing"]["curve"][10]
    said = page.locator("#kept-text").inner_text()
    assert said.startswith(f"Refuse {percent} %")
    assert f"of the {kept} points" in said
    assert f"{100 * error:.2f} %" in said
    assert slider.get_attribute("aria-valuetext") == said
    before = float(page.locator("#kept").get_attribute("x1"))
    page.keyboard.press("End")
    assert slider.input_value() == "95"
    assert float(page.locator("#kept").get_attribute("x1")) > before


def test_every_table_and_link_can_be_reached_by_keyboard(page):
    for summary in page.locator("summary").all():
        summary.focus()
        page.keyboard.press("Enter")
    page.evaluate("document.activeElement.blur()")
    name = """() => { const one = document.activeElement;
        return one.getAttribute('aria-label') || one.id || one.getAttribute('href'); }"""
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate(name))
    labels = """all => all.map(one => one.getAttribute('aria-label'))"""
    assert set(page.locator(".scroll").evaluate_all(labels)) <= reached
    assert {"refused", "#calibration"} <= reached


def test_without_scripts_the_numbers_are_in_a_table(chromium, report, tmp_path):
    path, _ = report.save(tmp_path / "report")
    context = chromium.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(path.as_uri())
    assert not page.locator("#abstain").is_visible()
    table = page.get_by_role("region", name="error by share of refused points")
    assert "20 %" in table.inner_text()
    context.close()


def contrast(first: list[float], second: list[float]) -> float:
    """The contrast ratio of two colors, as the guidelines for accessible content define it."""
    lights = []
    for color in (first, second):
        parts = [c / 255 for c in color[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        lights.append(sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True)))
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out_in_both_color_schemes(chromium, report, tmp_path, scheme):
    path, _ = report.save(tmp_path / "report")
    page = chromium.new_page(color_scheme=scheme)
    page.goto(path.as_uri())
    color = """([query, name]) => getComputedStyle(document.querySelector(query))[name]
        .match(/[0-9.]+/g).map(Number)"""
    ground = page.evaluate(color, ["figure.chart", "backgroundColor"])
    for query, name, least in (
        (".verdict li", "color", 4.5),
        (".soft", "color", 4.5),
        (".tick", "fill", 4.5),
        (".line.a", "stroke", 3.0),
        (".line.b", "stroke", 3.0),
        (".line.c", "stroke", 3.0),
    ):
        found = page.evaluate(color, [query, name])
        assert contrast(found, ground) >= least, (query, found, ground)
    page.close()
