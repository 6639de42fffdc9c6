"""How long does the page of `view` take to open on a run of 100,000 trajectories, and does its list scroll smoothly?

The target is 2 s from the command to the curves, and to the drawn list. The logs of all steps are links to one file,
since opening reads the index alone; every step has an index of its own. Needs Chromium and playwright:

    python benchmarks/bench_view.py [--trajectories 100000]
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from grpo_roc_jax.record import index, trace  # noqa: E402
from tests.helpers.demo import TOKENIZER, records  # noqa: E402

PER_STEP = 256
FRAMES = """async () => {
  const list = document.querySelector('.list'), spans = [];
  let last = await new Promise(requestAnimationFrame);
  for (let k = 0; k < 120; k++) {
    list.scrollTop += 120;
    const now = await new Promise(requestAnimationFrame);
    spans.push(now - last);
    last = now;
  }
  return spans;
}"""


def make_run(folder: Path, trajectories: int) -> tuple[int, float]:
    """A run with so many trajectories; its number of steps, and processor seconds to write one with its index."""
    rng = np.random.default_rng(0)
    made = records(rng, 1, 0.6, groups=PER_STEP // 32, size=32)
    begun = time.process_time()
    trace.TraceWriter(folder, decode=TOKENIZER.decode).write(1, made)
    written_s = time.process_time() - begun
    log = trace.trace_files(folder)[0][0]
    content, steps = index.load(log, "step", 1), -(-trajectories // PER_STEP)
    for step in range(2, steps + 1):
        other = log.with_name(f"step_{step:08d}.jsonl")
        os.link(log, other)
        index.index_file(other).write_bytes(content.replace(b'"step": 1,', f'"step": {step},'.encode(), 1))
    names = ["rollout/reward", "rollout/length", "loss/entropy", "roc/kept", "time/rollout_s", "time/step_s"]
    rows = [{"step": step} | dict(zip(names, rng.random(len(names)), strict=True)) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(metrics) + "\n" for metrics in rows))
    return steps, written_s


def measure(folder: Path) -> dict[str, float]:
    """Seconds from the command to each view, and milliseconds of the frames of a scrolled list."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        where = shutil.which("chromium") or shutil.which("google-chrome")
        browser = driver.chromium.launch(executable_path=where, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 860})
        begun = time.monotonic()
        command = [sys.executable, "-m", "grpo_roc_jax", "view", str(folder), "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            url = server.stdout.readline().split()[0]
            started = time.monotonic()
            page.goto(url)
            page.wait_for_selector(".chart")
            measured = {"command_s": started - begun, "curves_s": time.monotonic() - started}
            page.goto("about:blank")
            started = time.monotonic()
            page.goto(f"{url}#/rollouts?view=flat")
            page.wait_for_selector(".item")
            measured["list_s"] = time.monotonic() - started
            count = page.inner_text(".count")
            begun = time.monotonic()
            page.goto(f"{url}#/rollouts?status=wrong&kept=no&error=exception")
            page.wait_for_selector(f".count:not(:has-text('{count}'))")
            measured["filter_s"] = time.monotonic() - begun
            begun = time.monotonic()
            page.goto(f"{url}#/group?g=0.step.1.0&a=0.step.1.3")
            page.wait_for_selector(".trajectory")
            measured["trajectory_s"] = time.monotonic() - begun
            page.goto(f"{url}#/rollouts?view=flat")
            page.wait_for_selector(".item")
            spans = np.array(page.evaluate(FRAMES))
            measured |= {"frame_ms_median": float(np.median(spans)), "frame_ms_p95": float(np.percentile(spans, 95))}
            measured["rollouts"] = int(count.split()[0].replace(",", ""))
        finally:
            server.terminate()
            used = os.wait4(server.pid, 0)[2]
            browser.close()
        return measured | {"server_cpu_s": used.ru_utime + used.ru_stime}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps, written_s = make_run(Path(folder) / "run", options.trajectories)
        measured = measure(Path(folder) / "run")
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    context = {
        "steps": steps,
        "step_written_s": round(written_s, 4),
        "load": os.getloadavg()[0],
        "machine": platform.machine(),
        "commit": commit,
    }
    print(json.dumps({name: round(value, 3) for name, value in measured.items()} | context))
    return 0


if __name__ == "__main__":
    sys.exit(main())
