"""Makes the pictures of the documents again: `python -m benchmarks.docs_pictures` writes them to `docs/images`.

They come from `aorta demo`; that of the page needs chromium, its driver and selenium. Prints one line of JSON: the
files written, and the load average before, since the times in the pictures are of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from selenium.webdriver.common.by import By

from tests.report.browsing import opened, started
from tests.runs import ROOT, environment

IMAGES = ROOT / "docs" / "images"
OF_DEMO = ("reference_timeline.png", "candidate_timeline.png")
PAGE = "report_page.png"


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        _run(here, "-m", "aorta", "demo")
        report = here / "reports" / "demo"
        _photograph(report / "report.html", report / PAGE)
        pictures = [report / name for name in (PAGE, *OF_DEMO)]
        for picture in pictures:  # in 256 colours: documents have to load fast
            Image.open(picture).convert("RGB").quantize(256).save(IMAGES / picture.name, optimize=True)
    written = [str((IMAGES / name).relative_to(ROOT)) for name in (PAGE, *OF_DEMO)]
    sys.stdout.write(json.dumps({"written": written, "load_average": round(load, 1)}) + "\n")
    return 0


def _photograph(page: Path, picture: Path) -> None:
    """Write the page's timelines, as a browser shows them at first."""
    for browser in started():
        opened(browser, page)
        browser.set_window_size(1280, 1600)  # a browser photographs what its window shows
        browser.find_element(By.ID, "timelines").screenshot(str(picture))


def _run(folder: Path, *words: str) -> None:
    subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment(HOME=str(folder), PYTHONPATH=str(ROOT)),
        stdout=sys.stderr,
        check=True,
    )


if __name__ == "__main__":
    sys.exit(main())
