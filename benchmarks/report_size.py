"""How large the report of a run of 1,024 ranks is, and how long it takes to write and to open in Chromium.

    python -m benchmarks.report_size

The run folder is made without ranks, every file by the code that writes it in a run: 3,000 logged steps of 1,024
devices in 64 pipelines of 16 stages. Needs Debian's chromium.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from hpctrain.config.job import load_job
from hpctrain.plan.tiling import even_plan
from hpctrain.sharding.grid import TensorGrid

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.unit.folders import LARGE, make_run  # noqa: E402

CHROMIUM = "chromium --headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-component-update"
CHROMIUM += " --disable-background-networking --disable-sync --disable-dev-shm-usage --window-size=1280,8000"
OPENED = """<script>addEventListener("load", () => {
  document.body.getBoundingClientRect();  // lays the whole page out
  document.documentElement.dataset.opened = performance.now();
});</script></body>"""


@click.command()
@click.option("--steps", default=3000, show_default=True)
@click.option("--repeat", default=5, show_default=True, help="How often the page is opened.")
def main(steps, repeat):
    model = ["model.vocab_size=32768", "model.num_layers=32", "model.num_heads=8", "train.dtype=bf16"]
    model.append(f"train.steps={steps}")
    job = load_job("tiny", model)
    plan = even_plan(job.model.num_items, TensorGrid(1, 1, 1), 16, 64, 64, 64, family="gpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = make_run(folder / "large", job, plan, LARGE, steps=steps)
        begun = time.monotonic()
        subprocess.run([sys.executable, "-m", "hpctrain", "report", str(run)], check=True, stdout=subprocess.DEVNULL)
        written = time.monotonic() - begun
        page = run / "report.html"
        timed = folder / "timed.html"
        timed.write_text(page.read_text().replace("</body>", OPENED))
        laid_out, whole, empty = [], [], []
        for number in range(repeat):
            profile = f"--user-data-dir={folder / f'profile-{number}'}"
            dom = _chromium(profile, "--dump-dom", f"file://{timed}")
            laid_out.append(float(re.findall(r'data-opened="([\d.]+)"', dom)[0]) / 1e3)
            for address, seconds in ((f"file://{page}", whole), ("about:blank", empty)):
                begun = time.monotonic()
                _chromium(profile, f"--screenshot={folder / 'picture.png'}", address)
                seconds.append(time.monotonic() - begun)
        summary = {
            "ranks": len(plan.ranks),
            "logged_steps": steps,
            "megabytes": round(page.stat().st_size / 1e6, 3),
            "seconds_to_write": round(written, 2),
            "seconds_until_laid_out": round(statistics.median(laid_out), 3),
            "seconds_from_start_of_chromium_to_a_picture": round(statistics.median(whole), 2),
            "the_same_for_an_empty_page": round(statistics.median(empty), 2),
        }
        print(json.dumps(summary, indent=1))


def _chromium(*arguments: str) -> str:
    command = [*CHROMIUM.split(), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


if __name__ == "__main__":
    main()
