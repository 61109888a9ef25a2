"""`report.html` of a run in a real browser: Debian's Chromium and its driver."""

import math

import pytest

from test_server_page import CHROMIUM, DRIVER, browser  # noqa: F401 (a fixture)
from vishwamai.training.config import TrainConfig
from vishwamai.training.records import Record
from vishwamai.training.report import write_report

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="no chromium and chromedriver (apt-get install chromium chromium-driver)",
    ),
]


def test_the_report_fits_a_phone_and_logs_nothing(tmp_path, browser):  # noqa: F811
    records = [
        Record(
            step=step,
            loss=math.nan if step == 7 else 10 / step,
            tokens=step * 10**6,
            tokens_per_second=123_456.7,
            gradient_norm=1.0 / step,
            learning_rate=1e-3,
            seconds=step + 1.0,
            step_seconds=step + 0.5,
            skipped=0,
            memory=1 << 34,
            evaluation_loss=11 / step if step % 10 == 0 else None,
        )
        for step in range(1, 101)
    ]
    bad = [f"/a/directory/with/a/long/path/{'x' * 200}.jsonl:{n}: not JSON" for n in range(1, 120)]
    write_report(TrainConfig(), records, tmp_path / "report.html", bad, "once upon " * 50 + "y" * 300)
    browser.get((tmp_path / "report.html").as_uri())
    assert "Training run" in browser.find_element("tag name", "h1").text
    assert len(browser.find_elements("tag name", "figure")) == 4
    for details in browser.find_elements("tag name", "details"):
        browser.execute_script("arguments[0].open = true", details)
    wide = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert wide[0] <= wide[1] <= 500, wide
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
