"""The page in Chromium: what it draws, that text of a run never acts, that it shows the numbers of the log.

With `GRPO_ROC_RUNS` and `GRPO_ROC_SCREENSHOTS` it renews the pictures of the docs; docs/view.md has the commands.
"""

import io
import json
import os
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_roc_jax.commands import view
from grpo_roc_jax.record import trace
from grpo_roc_jax.types import ToolCall, ToolResult
from grpo_roc_jax.view.answers import Runs
from grpo_roc_jax.view.page_server import PageServer
from tests.helpers.demo import write_run

playwright = pytest.importorskip("playwright.sync_api")
Image = pytest.importorskip("PIL.Image")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")]

WIDE = {"width": 1300, "height": 860}
FORMS = {"desktop": (WIDE, "light"), "phone": ({"width": 390, "height": 844}, "light"), "dark": (WIDE, "dark")}


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [str(write_run(folder / f"roc-{seed}", seed, steps=12, groups=3)) for seed in (0, 1)]


@pytest.fixture
def serve():
    servers = []

    def start(*runs):
        servers.append(PageServer(Runs([str(run) for run in runs])))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1].url

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def tab(chromium, serve):
    """Opens addresses in one tab of each form; errors, dialogs and requests to elsewhere fail the test."""
    pages, seen, local = {}, [], ("http://127.0.0.1:", "file://", "about:")

    def open_in(form):
        viewport, scheme = FORMS[form]
        page = pages[form] = chromium.new_context(viewport=viewport, color_scheme=scheme).new_page()
        page.on("pageerror", lambda error: seen.append(str(error)))
        page.on("console", lambda message: seen.append(message.text) if message.type in ("error", "warning") else None)
        page.on("dialog", lambda dialog: (seen.append("dialog"), dialog.dismiss()))
        page.on("request", lambda request: seen.append(request.url))
        return page

    def show(address, form="desktop", wait="body"):
        page = pages.get(form) or open_in(form)
        page.goto("about:blank")
        page.goto(address)
        page.wait_for_selector("body[data-opened]")
        page.wait_for_selector(wait)
        return page

    yield show
    for page in pages.values():
        page.context.close()
    assert not [what for what in seen if not what.startswith(local) or "pwned" in what]


def telling_group(run):
    """(step, group, place, place) of a group with a success after a failed call and a clean one."""
    for _, kind, step in trace.trace_files(Path(run) / "trajectories"):
        right = {}
        for row, record in enumerate(trace.read_trace(run, step) if kind == "step" else ()):
            if record.verdict.status == "correct" and record.verdict.tool_calls:
                right.setdefault(record.group, {})[record.verdict.tool_errors > 0] = row
        for group, rows in right.items():
            if len(rows) == 2:
                return step, group, rows[True], rows[False]
    raise ValueError(run)


@pytest.mark.parametrize("form", FORMS)
def test_every_view_is_drawn_and_fits(tab, serve, demo, tmp_path, form):
    """The curves of several runs and the groups of one: of recorded ones, if there are some."""
    folder = os.environ.get("GRPO_ROC_RUNS")
    pictures = Path(os.environ.get("GRPO_ROC_SCREENSHOTS", tmp_path))
    pictures.mkdir(parents=True, exist_ok=True)
    several, shown = ([f"{folder}/toy"], f"{folder}/words") if folder else (demo, demo[0])
    base, alone = serve(*several), serve(shown)
    at, *places = telling_group(shown)
    group, repaired, clean = (f"0.step.{at}.{place}" for place in places)
    views = {"curves": f"{base}#/curves", "rollouts": f"{alone}#/rollouts", "evaluations": f"{base}#/evals"}
    views |= {"group": f"{alone}#/group?g={group}", "pair": f"{alone}#/group?g={group}&a={repaired}&b={clean}"}
    views |= {"trajectory": f"{alone}#/t?id={repaired}", "tokens": f"{alone}#/t?id={repaired}&by=logprob"}
    rare_colors_too = Image.Quantize.MAXCOVERAGE  # by default a rare color becomes a frequent one that is near
    for name, address in views.items():
        page = tab(address, form)
        page.wait_for_timeout(100)
        wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide[0] <= wide[1], (form, name)
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(256, rare_colors_too)
        picture.save(pictures / f"view_{name}_{form}.png", optimize=True)


EVIL = (
    "<script>window.pwned=1</script></script><script>pwned=1</script><!--<script>"
    "<img src=x onerror=pwned=1><img src=http://127.0.0.1:1/pwned><svg/onload=pwned=1><svg><script>pwned=1</script>"
    "</svg><style>body{display:none;background:url(http://127.0.0.1:1/pwned)}</style></pre></textarea></title>"
    "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe><a href=javascript:pwned=1>x</a>"
    "<meta http-equiv=refresh content='0;url=http://127.0.0.1:1/pwned'><base href=http://127.0.0.1:1/pwned>"
    "{{script}}{{data}}${pwned=1}`'\"&lt;b&gt;\x1b[31mred\x1b]0;title\x07\x1b[2J\x00\x08\r"
    "\u202egnp.exe\u2066\u2069\u200b\u200f\u061c\ufeff\U000e0041\u2028\u2029\u00ad" + "Z" + "\u0301" * 300
)
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e0fff]"
)
ACTIVE = "img, svg script, iframe, body style, object, embed, base, form:not(dialog form), link, body meta"
TEXTS = """(() => {
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
    while (walk.nextNode()) if (walk.currentNode.parentNode.tagName !== 'SCRIPT') found.push(walk.currentNode.data);
    return found.join('') + [...document.querySelectorAll('[title]')].map(e => e.title).join('');
})()"""
HANDLERS = "[...document.querySelectorAll('*')].flatMap(e => [...e.attributes]).filter(a => /^on/i.test(a.name)).length"
LOCAL = "[...document.links].every(a => a.getAttribute('href')[0] === '#')"


def evil_run(folder):
    """A run in which every text that is not a setting of the user's is an attack."""
    write_run(folder, 3, steps=2, groups=1, size=4)
    failed = ToolResult("exception", EVIL, EVIL, EVIL, EVIL, EVIL, traceback=EVIL, observation=EVIL, shown=EVIL)
    called = (ToolCall(EVIL, {"code": EVIL}, raw="raw", message=EVIL),)
    made = []
    for record in trace.read_trace(folder, 2):
        first, *later = record.trajectory.turns
        turns = [replace(first, text=EVIL + "raw" + EVIL, calls=called, results=(failed,))]
        turns += [replace(turn, text=EVIL, reply=EVIL) for turn in later]
        problem = replace(record.problem, uid=EVIL, prompt=EVIL, answer=EVIL, source=EVIL, extra={EVIL: EVIL})
        verdict = replace(record.verdict, answer=EVIL, channels={EVIL: 1.0})
        trajectory = replace(record.trajectory, turns=tuple(turns))
        made.append(replace(record, problem=problem, verdict=verdict, trajectory=trajectory, why=EVIL))
    writer = trace.TraceWriter(folder, decode=lambda ids: EVIL * len(ids))
    writer.write(2, made)
    writer.write(2, [replace(record, why="evaluation") for record in made], kind="eval")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 2, EVIL: 1.0, "eval/" + EVIL: 1.0, "alarm/" + EVIL: 1.0}) + "\n")
    (folder / "events.jsonl").write_text(json.dumps({"step": 1, "event": EVIL, "text": EVIL}) + "\n")
    return folder


@pytest.mark.parametrize("as_file", [False, True], ids=["served", "file"])
def test_text_of_a_run_never_acts(tab, serve, tmp_path, as_file):
    folder = evil_run(tmp_path / "<img src=x onerror=pwned=1>")
    if as_file:
        assert view.main([str(folder), "--step", "2", "--html", str(tmp_path / "page.html"), "--limit", "0"]) == 0
        base = (tmp_path / "page.html").as_uri()
    else:
        base = serve(folder)
    pair, where = "a=0.step.2.0&b=0.step.2.1", []
    views = ["curves", "rollouts", "rollouts?view=flat", f"group?g=0.step.2.0&{pair}", f"pair?{pair}", "evals"]
    views += [f"t?id=0.step.2.1&by={by}" for by in ("turns", "mask", "logprob", "advantage", "version")]
    for address in views:
        page = tab(f"{base}#/{address}")
        if "onload" in page.inner_text("main") and "U+202E" in page.inner_text("main"):
            where.append(address)
        for summary in page.query_selector_all("details:not([open]) > summary"):
            summary.click()
        assert page.evaluate("typeof window.pwned") == "undefined", address
        assert page.evaluate("document.querySelectorAll('script').length") == 2, address
        assert page.evaluate(f"document.querySelectorAll({ACTIVE!r}).length") == 0, address
        assert page.evaluate(HANDLERS) == 0 and page.evaluate(LOCAL), address
        texts = page.evaluate(TEXTS)
        assert not UNSEEN.search(texts), (address, UNSEEN.findall(texts))
    assert len(where) == 11  # every view showed attacks


def test_the_policy_stops_what_would_enter_the_page(chromium, serve, demo):
    page, urls = chromium.new_page(), []
    page.goto(serve(demo[0]))
    page.wait_for_selector("body[data-opened]")
    page.on("request", lambda request: urls.append(request.url))
    before = page.evaluate("getComputedStyle(document.body).display")
    page.evaluate("text => document.body.insertAdjacentHTML('beforeend', text)", EVIL)
    page.evaluate("() => { const s = document.createElement('script'); s.text = 'pwned = 1'; document.body.append(s) }")
    page.wait_for_timeout(300)
    assert page.evaluate("typeof window.pwned") == "undefined"
    assert not [url for url in urls if "api/" not in url and url != "about:srcdoc"]
    assert page.evaluate("getComputedStyle(document.body).display") == before
    page.close()


def test_a_click_on_a_step_opens_its_groups_and_keys_lead_on(tab, serve, demo):
    page = tab(serve(*demo))
    chart = page.locator(".chart").first
    box = chart.bounding_box()
    chart.click(position={"x": box["width"] - 11, "y": 60})
    page.wait_for_selector(".item")
    assert "step=12" in page.url and page.inner_text(".count") == "96 of 96 rollouts in 6 groups"
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(".card")
    assert page.locator(".card").count() == 16 and page.inner_text(".crumbs").startswith("step 12")
