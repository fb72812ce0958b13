"""The page for people, in a real browser."""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from serve.app import create_app
from serve.metrics import Metrics
from serve.predictor import Predictor
from serve.settings import Settings
from serve.tokens import token_digest
from tests.service.conftest import png
from tests.service.exports import untrained_scans, untrained_table
from tests.service.live import TOKEN, free_port, wait_for

CHROMIUM = shutil.which("chromium")
ARGUMENTS = [
    "--no-sandbox", "--headless", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
SEVEN = [(80, 70), (200, 70), (140, 220)]
STAR = [[(60, 60), (220, 220)], [(220, 60), (60, 220)], [(140, 40), (140, 240)], [(40, 140), (240, 140)]]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)")


def started(run: Path, **settings: Any) -> tuple[uvicorn.Server, str]:
    """The application in a thread: what the browser sees does not depend on Ray."""
    made = Settings(run=str(run), **settings)
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(create_app(Predictor(made, Metrics()), made), port=port, log_level="warning")
    )
    threading.Thread(target=server.run, daemon=True).start()
    wait_for(lambda: server.started, 20)
    return server, f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def url(digits_run: Path) -> Iterator[str]:
    server, address = started(digits_run)
    yield address
    server.should_exit = True


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1000, "height": 820})
    yield from opened(page, url)


def opened(page: Page, url: str, classes: int = 10) -> Iterator[Page]:
    """Nothing from elsewhere is fetched, and no script fails."""
    trouble: list[str] = []
    page.on("request", lambda request: None if request.url.startswith((url, "blob:")) else trouble.append(request.url))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("console", lambda message: trouble.append(message.text) if message.type == "error" else None)
    page.goto(url)
    expect(page.locator("#bars li")).to_have_count(classes)
    yield page
    page.close()
    assert not [line for line in trouble if "401" not in line]


def draw(page: Page, points: list[tuple[int, int]]) -> None:
    box = page.locator("#pad").bounding_box()
    assert box is not None
    scale = box["width"] / 280
    page.mouse.move(box["x"] + points[0][0] * scale, box["y"] + points[0][1] * scale)
    page.mouse.down()
    for x, y in points[1:]:
        page.mouse.move(box["x"] + x * scale, box["y"] + y * scale, steps=8)
    page.mouse.up()


def test_a_drawn_digit_is_answered(page: Page) -> None:
    draw(page, SEVEN)
    expect(page.locator("#badge")).to_have_text("answers")
    expect(page.locator("#label")).to_have_text("7")
    expect(page.locator("#bars li.best")).to_contain_text("7")
    assert float(page.locator("#gauge").get_attribute("aria-valuenow") or 1) < 0.3


def test_a_scribble_is_abstained_from_and_clearing_starts_anew(page: Page) -> None:
    for line in STAR:
        draw(page, line)
    expect(page.locator("#badge")).to_have_text("abstains: I don't know")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#badge")).to_have_text("waiting for an image")


def test_coverage_of_everything_answers_the_scribble(page: Page) -> None:
    for line in STAR:
        draw(page, line)
    expect(page.locator("#badge")).to_have_class("badge unsure")
    page.get_by_label("Coverage").select_option("1")
    expect(page.locator("#badge")).to_have_class("badge sure")


def test_a_scribble_has_a_set_of_several_classes_and_a_flag(page: Page) -> None:
    expect(page.locator("#set-note")).to_contain_text("not for one class or one site by itself")
    draw(page, SEVEN)
    expect(page.locator("#set")).to_have_text("only 7")
    expect(page.locator("#foreign")).to_be_hidden()
    for line in STAR:
        draw(page, line)
    page.get_by_label("Set that is right in").select_option("0.99")
    expect(page.locator("#set")).to_contain_text("one of ")
    expect(page.locator("#foreign")).to_be_visible()
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#set")).to_be_hidden()
    expect(page.locator("#foreign")).to_be_hidden()


def test_it_can_be_used_by_keyboard_alone(page: Page) -> None:
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "pad":
            break
    for key in ["ArrowUp"] * 10 + [" "] + ["ArrowDown"] * 20 + [" "]:
        page.keyboard.press(key)
    expect(page.locator("#label")).to_have_text("1")
    page.keyboard.press("Escape")
    expect(page.locator("#label")).to_have_text("–")
    reached = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert {"clear", "file", "invert", "coverage"} <= reached


def test_an_image_file_is_answered_and_inverted_on_demand(page: Page, digits: Any, tmp_path: Path) -> None:
    index = int(np.flatnonzero(np.asarray(digits.labels) == 3)[0])
    file = tmp_path / "three.png"
    file.write_bytes(png(255 - digits.images[index][0]))
    page.get_by_label("dark on light").check()
    page.locator("#file").set_input_files(file)
    expect(page.locator("#label")).to_have_text("3")
    expect(page.locator("#picture")).to_be_visible()


def test_a_file_that_is_no_image_is_explained(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "broken.png"
    file.write_bytes(b"hello")
    page.locator("#file").set_input_files(file)
    expect(page.get_by_role("alert")).to_contain_text("broken.png is not an image")


def test_it_fits_a_phone(browser: Browser, url: str) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    for _ in opened(page, url):
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        for locator in ("#pad", "#coverage", "#bars"):
            box = page.locator(locator).bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 360
        draw(page, SEVEN)
        expect(page.locator("#label")).to_have_text("7")


def test_a_protected_service_asks_for_its_token(browser: Browser, digits_run: Path) -> None:
    server, url = started(digits_run, tokens={"default": token_digest(TOKEN)})
    page = browser.new_page()
    for _ in opened(page, url):
        draw(page, SEVEN)
        page.get_by_label("asks for a token").fill(TOKEN)
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#label")).to_have_text("7")
        expect(page.locator("#token-form")).to_be_hidden()
    server.should_exit = True


def test_a_colour_model_takes_files_only(browser: Browser, colour_run: Path, tmp_path: Path) -> None:
    server, url = started(colour_run)
    file = tmp_path / "colour.png"
    file.write_bytes(png(np.random.default_rng(0).integers(0, 256, (40, 40, 3))))
    page = browser.new_page()
    for _ in opened(page, url):
        expect(page.locator("#pad")).to_be_hidden()
        page.locator("#file").set_input_files(file)
        expect(page.locator("#badge")).to_have_text("answers")
        expect(page.locator("#threshold")).to_contain_text("never abstains")
    server.should_exit = True


def test_a_table_has_a_form_with_the_ranges_of_training_and_warns_beyond_them(browser: Browser, tmp_path: Path) -> None:
    untrained_table(tmp_path / "run")
    server, url = started(tmp_path / "run")
    page = browser.new_page()
    for _ in opened(page, url, classes=2):
        expect(page.locator("#drop")).to_be_hidden()
        expect(page.locator("#fields label").first).to_contain_text("seen: 20 to 95")
        page.get_by_role("button", name="Averages").click()
        expect(page.locator("#label")).to_have_text(re.compile("ill|well"))
        expect(page.locator("#beyond")).to_be_hidden()
        page.locator("#fields").get_by_label("age").fill("130")
        page.locator("#fields").get_by_label("lab").fill("")
        expect(page.locator("#beyond")).to_have_text(re.compile("^Beyond what training saw: age[.]"))
        page.locator("#fields").get_by_label("ward").select_option("b, c")
        page.locator("#fields").get_by_label("age").fill("50")
        expect(page.locator("#beyond")).to_be_hidden()
    server.should_exit = True


def test_a_model_of_sixteen_bits_takes_drawings_and_tiff_files(browser: Browser, tmp_path: Path) -> None:
    untrained_scans(tmp_path / "run", (1, 18, 20), (0.0, 65_535.0))
    server, url = started(tmp_path / "run")
    Image.fromarray(np.full((18, 20), 40_000, np.uint16)).save(tmp_path / "scan.tif")
    page = browser.new_page()
    for _ in opened(page, url, classes=2):
        with page.expect_request("**/predict*") as asked:
            draw(page, SEVEN)
        assert np.max(json.loads(asked.value.post_data or "")["instances"]) > 60_000
        expect(page.locator("#badge")).to_have_text("answers")
        page.get_by_role("button", name="Clear").click()
        page.locator("#file").set_input_files(tmp_path / "scan.tif")
        expect(page.locator("#badge")).to_have_text("answers")
        expect(page.get_by_role("alert")).to_be_hidden()
    server.should_exit = True
