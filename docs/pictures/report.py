"""Draw docs/pictures/report.png: the top of the report of a run, as headless Chromium shows it.

python docs/pictures/report.py RUN      # such as runs/demo-1 of make demo
"""

import shutil
import subprocess
import sys
from pathlib import Path

from vitral.runs import Run

TARGET = Path(__file__).with_name("report.png")
WIDTH, HEIGHT = 800, 1000
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def main(folder: str) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"Found none of {', '.join(BROWSERS)}. Install Chromium.")
    page = Run.open(Path(folder)).report.resolve().as_uri()
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
    subprocess.run([browser, *options, f"--screenshot={TARGET}", page], check=True, capture_output=True)


if __name__ == "__main__":
    main(sys.argv[1])
