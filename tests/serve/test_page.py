"""The page in a real browser: digits drawn by mouse and by keys, the meter, the gallery, the token, small and dark."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gigamlp as gm
from tests.serve.helpers import Process, app_of, ask, running, served, serving, tiny

IMAGES = os.environ.get("GIGAMLP_PAGE_IMAGES")  # a folder: the pictures of the documentation are written there
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
# strokes on a square of side 1; the first and the last points of each are joined by lines
DIGITS: dict[str, list[list[tuple[float, float]]]] = {
    "0": [[(0.5 + 0.19 * np.sin(t), 0.5 - 0.3 * np.cos(t)) for t in np.linspace(0, 2 * np.pi, 40)]],
    "1": [[(0.52, 0.2), (0.5, 0.5), (0.48, 0.8)]],
    "2": [[(0.3, 0.32), (0.36, 0.23), (0.5, 0.19), (0.63, 0.25), (0.66, 0.36), (0.58, 0.5), (0.42, 0.66), (0.29, 0.78)],
          [(0.29, 0.78), (0.5, 0.77), (0.72, 0.78)]],
    "3": [[(0.32, 0.25), (0.45, 0.18), (0.6, 0.22), (0.64, 0.33), (0.58, 0.44), (0.46, 0.49), (0.6, 0.54), (0.67, 0.65),
           (0.6, 0.77), (0.45, 0.82), (0.31, 0.76)]],
    "4": [[(0.36, 0.2), (0.33, 0.38), (0.3, 0.52), (0.5, 0.52), (0.68, 0.5)], [(0.64, 0.22), (0.62, 0.5), (0.6, 0.82)]],
    "7": [[(0.28, 0.24), (0.5, 0.23), (0.71, 0.22), (0.6, 0.45), (0.5, 0.62), (0.44, 0.82)]],
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("page")
    tiny(features=4, classes=np.array(["rose", "iris", "lily", "tulip"]), outputs=4).save(
        folder / "flowers.safetensors"
    )
    gm.MLP([gm.Layer([[1.0, 2.0]])], head="regression").save(folder / "price.safetensors")
    models = ("mnist-512", "mnist-40", str(folder / "flowers.safetensors"), str(folder / "price.safetensors"))
    with serving(*models) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@contextmanager
def page_of(browser: Any, server: Process, errors: bool = False, **own: Any) -> Iterator[Any]:
    """Open the page; in the end no error was logged, and nothing was asked of another server."""
    context = browser.new_context(**{"viewport": {"width": 1100, "height": 900}, **own})
    page = context.new_page()
    page.set_default_timeout(30_000)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"http://127.0.0.1:{server.port}/")
    try:
        yield page
        assert errors or said == []
        assert {url.split("/")[2] for url in asked} == {f"127.0.0.1:{server.port}"}
    finally:
        context.close()


def draw(page: Any, digit: str) -> None:
    box = page.locator("#pad").bounding_box()

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return box["x"] + point[0] * box["width"], box["y"] + point[1] * box["height"]

    for stroke in DIGITS[digit]:
        page.mouse.move(*at(stroke[0]))
        page.mouse.down()
        for point in stroke[1:]:
            page.mouse.move(*at(point), steps=3)
        page.mouse.up()


def verdict(page: Any, text: str) -> None:
    page.wait_for_function("text => document.getElementById('verdict').textContent === text", arg=text)


def picture(page: Any, name: str, **own: Any) -> None:
    if IMAGES:
        page.screenshot(path=str(Path(IMAGES) / name), **own)


def gallery_ready(page: Any) -> str:
    page.wait_for_function("() => /right/.test(document.getElementById('gallery-text').textContent)")
    return str(page.text_content("#gallery-text"))


def test_drawn_digits_are_read(browser: Any, server: Process) -> None:
    with page_of(browser, server) as page:
        for digit in DIGITS:
            page.wait_for_selector("#try:not([hidden])")
            draw(page, digit)
            verdict(page, digit)
            assert re.fullmatch(r"[\d.]+ (µs|ms)", page.text_content("#model-time"))
            assert re.fullmatch(r"[\d.]+ (µs|ms)", page.text_content("#trip-time"))
            assert page.locator("#bars li").count() == 10
            assert page.text_content("#bars .best .name") == digit
            if digit != "7":
                page.click("#clear")
                verdict(page, "–")
        gallery_ready(page)
        picture(page, "page.png", full_page=True)


def test_delete_in_the_middle_of_a_stroke(browser: Any, server: Process) -> None:
    with page_of(browser, server) as page:
        page.wait_for_selector("#try:not([hidden])")
        box = page.locator("#pad").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 3)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=3)
        page.keyboard.press("Delete")
        page.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2, steps=3)
        page.mouse.up()
        verdict(page, "–")
        draw(page, "1")
        verdict(page, "1")


def test_the_gallery_shows_the_mistakes_of_the_model(browser: Any, server: Process) -> None:
    _, _, x, y = gm.data.load_mnist()
    with page_of(browser, server) as page:
        for name in ("mnist-512", "mnist-40"):
            page.select_option("#model", label=name)
            with gm.Session(gm.load(name), device="cpu", engine="cpu_fused") as session:
                wrong = np.flatnonzero(session.predict(x) != y)
            expected = f"{10_000 - len(wrong):,} of 10,000 right, {len(wrong)} mistakes"
            page.wait_for_function("t => document.getElementById('gallery-text').textContent === t", arg=expected)
            labels = page.locator("#tiles button").evaluate_all("all => all.map(b => b.getAttribute('aria-label'))")
            assert [int(re.findall(r"\d+", label)[0]) for label in labels] == wrong[:40].tolist()
        page.locator("#tiles button").first.click()
        said = re.findall(r"says (\d)", labels[0])[0]
        verdict(page, said)
        page.click("label[for=which-all]")
        page.wait_for_function("() => document.getElementById('place').textContent === '1–40 of 10,000'")
        page.click("#later")
        page.wait_for_function("() => document.getElementById('place').textContent === '41–80 of 10,000'")


def test_the_keyboard_alone_is_enough(browser: Any, server: Process) -> None:
    with page_of(browser, server) as page:
        gallery_ready(page)
        for _ in range(5):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == "pad":
                break
        assert page.evaluate("document.activeElement.id") == "pad"
        page.keyboard.press("Space")
        for _ in range(15):
            page.keyboard.press("ArrowDown")
        verdict(page, "1")
        page.keyboard.press("Space")
        assert page.text_content("#pad-state") == "pen up"
        page.keyboard.press("Delete")
        verdict(page, "–")
        page.focus("#tiles button >> nth=0")
        label = page.get_attribute("#tiles button >> nth=0", "aria-label")
        page.keyboard.press("Enter")
        verdict(page, re.findall(r"says (\d)", label)[0])


def test_the_meter_streams_rows(browser: Any, server: Process) -> None:
    with page_of(browser, server) as page:
        gallery_ready(page)
        page.click("#meter-go")
        page.wait_for_function("() => Number(document.getElementById('rate').textContent.replaceAll(',', '')) > 1000")
        page.click("#meter-go")
        page.wait_for_function("() => /rows in/.test(document.getElementById('meter-text').textContent)")
        assert page.text_content("#meter-go") == "Start"


def test_other_models_get_a_field_for_numbers(browser: Any, server: Process) -> None:
    with page_of(browser, server) as page:
        page.wait_for_selector("#try:not([hidden])")
        page.select_option("#model", label="flowers")
        page.fill("#numbers", "1 2 3")
        page.click("#numbers-ask button[type=submit]")
        page.wait_for_function("() => /takes 4 numbers/.test(document.getElementById('problem').textContent)")
        page.fill("#numbers", "1, 2, 3, 0.5")
        page.press("#numbers", "Tab")
        page.keyboard.press("Enter")
        mlp = tiny(features=4, classes=np.array(["rose", "iris", "lily", "tulip"]), outputs=4)
        verdict(page, str(mlp.predict(np.array([[1, 2, 3, 0.5]], np.float32))[0]))
        assert page.is_hidden("#gallery")
        page.select_option("#model", label="price")
        page.fill("#numbers", "1 2")
        page.click("#numbers-ask button[type=submit]")
        verdict(page, "5")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(browser: Any, server: Process, scheme: str) -> None:
    phone = {"viewport": {"width": 360, "height": 760}, "device_scale_factor": 2, "has_touch": True}
    with page_of(browser, server, color_scheme=scheme, **phone) as page:
        page.wait_for_selector("#try:not([hidden])")
        draw(page, "3")
        verdict(page, "3")
        gallery_ready(page)
        for name in ("mnist-40", "flowers", "mnist-512"):
            page.select_option("#model", label=name)
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
        light = sum(
            json.loads(
                re.sub(r"[^\d,]", "", page.evaluate("getComputedStyle(document.body).backgroundColor")).join("[]")
            )
        )
        assert (light > 600) == (scheme == "light")
        gallery_ready(page)
        draw(page, "3")
        verdict(page, "3")
        page.evaluate("() => scrollTo(0, 0)")
        picture(page, f"page-phone-{scheme}.png")


def test_the_token_is_asked_for_and_kept_in_memory_only(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    with serving("mnist-40", "--token-file", str(tmp_path / "token")) as server:
        assert server.ask("GET", "/page/models")[0] == 401
        assert server.ask("GET", "/page/test/labels")[0] == 401
        with page_of(browser, server, errors=True) as page:
            page.fill("#token", "wrong")
            page.keyboard.press("Enter")
            page.wait_for_selector("#token-problem:not([hidden])")
            page.fill("#token", "s3cret")
            page.keyboard.press("Enter")
            gallery_ready(page)
            draw(page, "1")
            verdict(page, "1")
            assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]


# ---- without a browser -----------------------------------------------------------------------------------------------


def answers(app: Any, *requests: tuple[Any, ...]) -> list[Any]:
    async def go() -> list[Any]:
        async with running(app):
            return [await ask(app, *request) for request in requests]

    with ThreadPoolExecutor(1) as thread:  # Playwright's loop runs in this one
        return thread.submit(asyncio.run, go()).result()


def test_the_files_are_sent_with_a_strict_policy() -> None:
    app = app_of(served(tiny()))
    index, css, again, none, climb = answers(
        app, ("GET", "/"), ("GET", "/static/page.css"), ("GET", "/static/page.css"), ("GET", "/static/nope.js"),
        ("GET", "/static/..%2f__init__.py"),
    )  # fmt: skip
    assert (index.status, css.status, again.status, none.status, climb.status) == (200, 200, 200, 404, 404)
    policy = index.headers[b"content-security-policy"].decode()
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert not re.search(rb"(src|href)=\"(https?:)?//", index.body)
    (kept,) = answers(app, ("GET", "/static/page.css", b"", [(b"if-none-match", css.headers[b"etag"])]))
    assert (kept.status, kept.body) == (304, b"")


@pytest.mark.parametrize("features", [1, 3, 784])
def test_an_answer_has_the_models_own_time(features: int) -> None:
    mlp = tiny(features=features)
    app = app_of(served(mlp))
    row = np.arange(features).astype(np.uint8)
    octets = [(b"content-type", b"application/octet-stream")]
    path = "/page/models/m/versions/1/answer"
    good, two, short, none = answers(
        app, ("POST", path, row.tobytes(), octets), ("POST", path, row.tobytes() * 2, octets),
        ("POST", path, b"", octets), ("POST", path.replace("/m/", "/x/"), row.tobytes(), octets),
    )  # fmt: skip
    assert [each.status for each in (good, two, short, none)] == [200, 413, 400, 404]
    assert good.json["class"] == str(mlp.predict(row[None])[0])
    assert [each["proba"] for each in good.json["top"]] == pytest.approx(mlp.predict_proba(row[None])[0], abs=1e-5)
    assert 0 < good.json["model_us"] < 1e6
