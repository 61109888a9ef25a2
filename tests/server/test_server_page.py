"""The page that `vishwamai serve` has at /, in a real browser: Debian's Chromium and its driver."""

import os
import shutil
import time
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from serving import serving, write_model
from vishwamai.inference.loading import plan_load
from vishwamai.inference.server.service import Settings

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


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("page")
    write_model(path)
    engine = plan_load(path, dtype="float32", max_sequences=2, max_tokens=32, max_length=400, page_size=8).engine()
    step = engine.step

    def slow_step():
        time.sleep(0.02)  # so that there is time to stop an answer
        return step()

    engine.step = slow_step
    with serving(engine, Settings("tiny", keys=("secret",))) as found:
        yield found


@pytest.fixture
def browser(tmp_path):
    options: Any = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*OPTIONS.split(), f"--user-data-dir={tmp_path}", "--window-size=400,800"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(DRIVER)) as found:
        yield found


def test_a_chat_shows_its_answer_the_speed_and_what_is_wrong(address, browser):
    def at(name):
        return browser.find_element(By.ID, name)

    def wait(holds):
        WebDriverWait(browser, 60).until(lambda _: holds())

    def send(text):
        at("text").send_keys(text)
        at("send").click()

    def lines(kind):
        return [line.text for line in browser.find_elements(By.CSS_SELECTOR, f"#log .{kind}")]

    browser.get(address)
    send("without a key")
    wait(lambda: lines("error"))
    assert "the API key is missing or wrong" in lines("error")[0]
    assert not lines("assistant")

    browser.get(address)
    at("key").send_keys("secret")
    at("temperature").clear()
    at("temperature").send_keys("0")
    at("most").clear()
    at("most").send_keys("40")
    send("Grüße")
    wait(lambda: at("model").text == "tiny")
    wait(lambda: at("send").text == "Send" and lines("assistant")[-1])
    assert lines("user") == ["Grüße"]
    wait(lambda: at("speed").text[0].isdigit() and at("queue").text == "0 running, 0 waiting")
    wait(lambda: at("pages").text == "0 % of the pages held")

    at("most").clear()
    at("most").send_keys("200")
    send("a long one")
    wait(lambda: at("send").text == "Stop" and len(lines("assistant")) == 2 and lines("assistant")[-1])
    at("send").click()
    wait(lambda: at("send").text == "Send")
    assert not lines("error")
    wait(lambda: at("queue").text == "0 running, 0 waiting")  # the answer that was stopped holds nothing

    at("most").clear()
    at("most").send_keys("400")
    send("too much")
    wait(lambda: lines("error"))
    assert "a sequence holds at most 400 tokens" in lines("error")[0]
    wide = browser.execute_script("return document.documentElement.scrollWidth > window.innerWidth")
    assert not wide, "the page is wider than a phone"
    refused = {"401", "400"}  # what the browser logs of the two wrong requests, and nothing else
    found = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not [text for text in found if not any(status in text for status in refused)], found
    if folder := os.environ.get("VISHWAMAI_TEST_SCREENSHOTS"):
        browser.save_screenshot(os.path.join(folder, "chat.png"))
