"""The page in Chromium: what it draws, that text of a run never acts, and that it shows the numbers of the log.

With `GRPO_ROC_RUNS` (a directory of recorded runs) and `GRPO_ROC_SCREENSHOTS=docs/images` it renews the pictures of the
docs; docs/view.md has the commands.
"""

import io
import json
import os
import re
import shutil
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from grpo_roc_jax.commands import view
from grpo_roc_jax.record import index, trace
from grpo_roc_jax.types import ToolCall, ToolResult
from grpo_roc_jax.view.answers import Runs
from grpo_roc_jax.view.curves import curve, load_runs
from grpo_roc_jax.view.page_server import PageServer
from tests.helpers.demo import TOKENIZER, records, write_run
from tests.helpers.knobs import write_lines

playwright = pytest.importorskip("playwright.sync_api")
Image = pytest.importorskip("PIL.Image")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")]

WIDE = {"width": 1300, "height": 860}
FORMS = {
    "desktop": {"viewport": WIDE, "color_scheme": "light"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
    "dark": {"viewport": WIDE, "color_scheme": "dark"},
}


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    options = {"steps": 12, "groups": 3}
    runs = [write_run(folder / f"roc-{seed}", seed, **options) for seed in (0, 1)]
    runs += [write_run(folder / "grpo-0", 2, resample="none", **options)]
    return [str(run) for run in runs]


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
    """Opens addresses in one tab of each form, closed before the servers; errors, dialogs and requests to elsewhere
    fail the test."""
    pages, seen, local = {}, [], ("http://127.0.0.1:", "file://", "about:")

    def open_in(form, options):
        page = pages[form] = chromium.new_context(**FORMS[form], **options).new_page()
        page.on("pageerror", lambda error: seen.append(str(error)))
        page.on("console", lambda message: seen.append(message.text) if message.type in ("error", "warning") else None)
        page.on("dialog", lambda dialog: (seen.append("dialog"), dialog.dismiss()))
        page.on("request", lambda request: seen.append(request.url))
        return page

    def show(address, form="desktop", wait="body", **options):
        return opened(pages.get(form) or open_in(form, options), address, wait)

    yield show
    for page in pages.values():
        page.context.close()
    assert not [what for what in seen if not what.startswith(local) or "pwned" in what]


def opened(page, address, wait="body"):
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("body[data-opened]")
    page.wait_for_selector(wait)
    return page


def telling_group(run):
    """(step, group, place, place) of the group in which most differs: the places of a success with a failed call and
    of a clean one."""
    best, members = [(False,)], {}
    for _, kind, step in trace.trace_files(Path(run) / "trajectories"):
        for row, record in enumerate(trace.read_trace(run, step) if kind == "step" else ()):
            members.setdefault((step, record.group), []).append((row, record))
    for at, rows in members.items():
        right = [(row, r.verdict) for row, r in rows if r.verdict.status == "correct"]
        failed = [row for row, verdict in right if verdict.tool_errors]
        clean = [row for row, verdict in right if verdict.tool_calls and not verdict.tool_errors]
        if failed and clean:
            kinds = {(r.verdict.status, r.why, r.verdict.tool_errors > 0) for _, r in rows}
            best.append((any(r.why == "penalty" for _, r in rows), len(kinds), *at, failed[0], clean[0]))
    return max(best)[-4:]


@pytest.mark.parametrize("form", FORMS)
def test_every_view_is_drawn_and_fits(tab, serve, demo, tmp_path, form):
    """The curves of several runs and the groups of one: of recorded ones, if there are some."""
    folder = os.environ.get("GRPO_ROC_RUNS")
    pictures = Path(os.environ.get("GRPO_ROC_SCREENSHOTS", tmp_path))
    pictures.mkdir(parents=True, exist_ok=True)
    several, shown = ([f"{folder}/toy"], f"{folder}/words") if folder else (demo, demo[0])
    base, alone = serve(*several), serve(shown)
    at, group, repaired, clean = telling_group(shown)
    views = {
        "curves": f"{base}#/curves",
        "rollouts": f"{alone}#/rollouts",
        "group": f"{alone}#/group?g=0.step.{at}.{group}",
        "pair": f"{alone}#/group?g=0.step.{at}.{group}&a=0.step.{at}.{repaired}&b=0.step.{at}.{clean}",
        "trajectory": f"{alone}#/t?id=0.step.{at}.{repaired}",
        "tokens": f"{alone}#/t?id=0.step.{at}.{repaired}&by=logprob",
        "evaluations": f"{base}#/evals",
    }
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
    spoken = {"text": EVIL + "raw" + EVIL, "results": (failed,)}
    spoken["calls"] = (ToolCall(EVIL, {"code": EVIL}, raw="raw", message=EVIL),)
    made = []
    for record in trace.read_trace(folder, 2):
        first, *later = record.trajectory.turns
        turns = (replace(first, **spoken), *(replace(turn, text=EVIL, reply=EVIL) for turn in later))
        changes = {
            "problem": replace(record.problem, uid=EVIL, prompt=EVIL, answer=EVIL, source=EVIL, extra={EVIL: EVIL}),
            "verdict": replace(record.verdict, answer=EVIL, channels={EVIL: 1.0}),
            "trajectory": replace(record.trajectory, turns=turns),
        }
        made.append(replace(record, **changes, why=EVIL))
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
    page = opened(chromium.new_page(), serve(demo[0]))
    urls = []
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
    assert "step=12" in page.url and page.inner_text(".count") == "144 of 144 rollouts in 9 groups"
    page.keyboard.press("1")
    page.wait_for_selector(".chart")
    page.locator(".chart").first.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector(".item")
    assert "step=3" in page.url
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(".card")
    assert page.locator(".card").count() == 16 and page.inner_text(".crumbs").startswith("step 3")
    page.keyboard.press("j")
    page.wait_for_selector(".crumbs:has-text('group 2 of 3')")
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")


def test_bands_and_running_means_are_those_of_the_plots(tab, serve, demo, tmp_path):
    """A running mean counts steps and leaves evaluations as measured."""

    def readouts(page, title, expected):
        """What the chart says of each step, beside the mean and the spread that it should say."""
        chart = page.locator("figure", has_text=title)
        chart.locator(".chart").focus()
        for mean, spread in zip(expected.mean, expected.std, strict=True):
            page.keyboard.press("ArrowRight")
            yield chart.locator(".readout"), mean, spread

    base, runs = serve(*demo[:2]), load_runs(demo[:2])
    at = enumerate(readouts(tab(base), "reward, all sampled", curve(runs, "rollout/reward")), 1)
    for step, (readout, mean, spread) in at:
        text = readout.inner_text()
        shown = [*map(float, re.search(r"([\d.e-]+) ± ([\d.e-]+)", text).groups())]
        assert f"step {step}" in text and shown == pytest.approx([mean, spread], abs=5.1e-4)  # of three digits
    page = tab(f"{base}#/curves?x=tokens&smooth=5")
    assert "by tokens" in page.locator(".chart").first.get_attribute("aria-label")
    assert page.locator(".alarm").count() > 0
    ticks = page.locator("figure", has_text="rollouts kept").locator("text[text-anchor=end]").all_text_contents()
    assert len(set(ticks)) == len(ticks) > 2 and "24" in ticks  # a constant has ticks that differ
    rows = [{"step": i} | ({} if 3 <= i <= 6 else {"rollout/reward": i * i / 99}) for i in range(1, 13)]
    write_lines(tmp_path / "metrics.jsonl", [row | {"eval/all/avg@1": row["step"] % 5 / 5} for row in rows])
    page, runs = tab(f"{serve(tmp_path)}#/curves?smooth=5"), load_runs([str(tmp_path)])
    for title, metric, window in (("reward, all sampled", "rollout/reward", 5), ("held-out accuracy", "eval", 1)):
        for readout, mean, _ in readouts(page, title, curve(runs, metric, smooth=window)):
            assert float(readout.locator("span").inner_text()) == pytest.approx(mean, abs=5.1e-4), title


FILTERS = {
    "step=3": lambda r: r.step == 3,
    "status=wrong&kept=no": lambda r: r.verdict.status == "wrong" and not r.kept,
    "status=wrong&view=flat": lambda r: r.verdict.status == "wrong",
    "calls=failed&low=1&high=1": lambda r: r.verdict.tool_errors and r.verdict.reward == 1.0,
    "uid=world:gcd&sample=2": lambda r: "world:gcd" in r.problem.uid and r.trajectory.sample == 2,
    "kind=eval&step=6": lambda r: True,
    "text=another+name": lambda r: any("another name" in turn.text for turn in r.trajectory.turns),
    "source=world:divisors&step=2-4": lambda r: r.problem.source == "world:divisors" and 2 <= r.step <= 4,
    "error=exception": lambda r: any(result.kind == "exception" for result in r.trajectory.results),
    "stop=length": lambda r: r.trajectory.stop == "length",
    "why=penalty": lambda r: r.why == "penalty",
}


def test_filters_show_what_they_say_and_lists_sort(tab, serve, demo):
    """By the spread of rewards and by the share of failing calls, largest first; the numbers are those of the log."""
    base, every = serve(demo[0]), list(trace.read_trace(demo[0]))
    for query, fits in FILTERS.items():
        page = tab(f"{base}#/rollouts?{query}", wait=".item")
        expected = [r for r in (trace.read_trace(demo[0], 6, "eval") if "eval" in query else every) if fits(r)]
        assert page.inner_text(".count").split(" of ")[0] == f"{len(expected):,}" and expected, query
    page = tab(f"{base}#/rollouts?step=99")
    assert "Steps in the log: 1, 2, 3" in page.inner_text("main") and "correct " in page.inner_text("main")
    base, groups = serve(demo[0]), {}
    for record in trace.read_trace(demo[0]):
        groups.setdefault((record.step, record.group), []).append(record.verdict)
    share = {at: sum(v.tool_errors for v in g) / sum(v.tool_calls for v in g) for at, g in groups.items()}
    spread = {at: max(v.reward for v in g) - min(v.reward for v in g) for at, g in groups.items()}
    page = tab(f"{base}#/rollouts?sort=failed", wait=".item")
    items = [row.get_attribute("href").split(".")[-2:] for row in page.locator(".item").all()[:8]]
    assert [share[int(step), int(group)] for step, group in items] == sorted(share.values(), reverse=True)[:8]
    legend = page.inner_text("main .key")
    assert "correct" in legend and "dropped" in legend and "call:" not in legend  # the squares of groups show no calls
    page = tab(f"{base}#/rollouts?view=flat", wait=".item")
    assert "call: exception" in page.inner_text("main .key")
    page = tab(f"{base}#/rollouts?sort=spread", wait=".item")
    assert page.inner_text(".count").endswith("groups") and max(spread.values()) == 1
    if min(spread.values()) == 0:
        first = int(page.locator(".item .where").first.inner_text())
        assert max(value for (step, _), value in spread.items() if step == first) == 1


def test_two_rollouts_open_beside_each_other_with_their_difference(tab, serve, demo):
    page = tab(f"{serve(demo[0])}#/group?g=0.step.1.0")
    rows = [(i, r) for i, r in enumerate(trace.read_trace(demo[0], 1)) if r.group == 0]
    first = next(i for i, record in rows if not record.verdict.tool_errors)
    second = next(i for i, record in rows if record.verdict.tool_errors == 1)
    page.locator(".card").nth(first).click()
    page.wait_for_selector(".trajectory")
    page.locator(".card").nth(second).click()
    page.wait_for_selector(".pair mark")
    sides = page.locator("details > .pair > pre")
    stay = "[...side.childNodes].filter(node => node.tagName !== 'MARK').map(node => node.textContent).join('')"
    texts = [sides.nth(i).evaluate(f"side => {stay}") for i in (0, 1)]
    assert texts[0] == texts[1] and "greatest" not in texts[0] and len(texts[0]) > 100
    equal = rows[first][1].trajectory, rows[second][1].trajectory
    shared = next(t for t, pair in enumerate(zip(*(x.tokens for x in equal), strict=False)) if pair[0] != pair[1])
    assert f"The first {shared - equal[0].prompt_length} tokens" in page.inner_text("#detail")
    assert page.locator(".error > summary").first.inner_text() == "NameError: name 'maths' is not defined"
    assert not page.locator(".error > pre").first.is_visible()


def test_a_token_shows_its_numbers(tab, serve, demo):
    """With ratio and entropy, which it can be colored by, where a pass has scored it."""
    base = serve(demo[0])
    page, record = tab(f"{base}#/t?id=0.step.2.1&by=logprob"), list(trace.read_trace(demo[0], 2))[1]
    t = record.trajectory.prompt_length + 4
    page.locator(f".tokens [data-i='{t}']").hover()
    text = page.locator("output").inner_text()
    assert f"id {record.trajectory.tokens[t]}" in text and f"log-prob {record.trajectory.logprobs[t]:.4f}" in text
    assert "parameters of step 1" in text and "Not logged for this rollout: ratio, entropy" in page.inner_text(".body")
    shown = page.locator(".tokens").inner_text().replace("↵", "")
    assert shown == TOKENIZER.decode(record.trajectory.tokens.tolist())
    page.get_by_role("tab", name="advantage").click()
    assert "by=advantage" in page.url
    page.reload()
    page.wait_for_selector("[aria-selected=true]:has-text('advantage')")
    row, record = next((i, r) for i, r in enumerate(trace.read_trace(demo[0], 3)) if r.scored is not None)
    t = record.trajectory.prompt_length + 4
    ratio, entropy = np.exp(np.float32(record.scored[0, t])), record.scored[1, t]
    page = tab(f"{base}#/t?id=0.step.3.{row}&by=ratio")
    token = page.locator(f".tokens [data-i='{t}']")
    token.hover()
    text = page.locator("output").inner_text()
    assert f"ratio {ratio:.4f}" in text and f"entropy {entropy:.4f}" in text
    assert ("up" if ratio > 1 else "down") in token.get_attribute("class")
    share = token.evaluate("node => node.style.getPropertyValue('--share')")
    assert int(share[:-1]) == pytest.approx(100 * min(1, abs(np.log(ratio)) / np.log(1.2)), abs=1)
    page.get_by_role("tab", name="entropy").click()
    assert "by=entropy" in page.url and "Not logged" not in page.inner_text(".body")


def test_the_page_follows_a_run(tab, serve, tmp_path):
    folder = write_run(tmp_path / "run", 0, steps=2, groups=1, size=4)
    page = tab(f"{serve(folder)}#/rollouts")
    assert page.inner_text(".count").startswith("8 of 8")
    writer = trace.TraceWriter(folder)
    writer.write(3, records(np.random.default_rng(5), 3, 0.5, groups=2, size=4))
    page.wait_for_selector(".count:has-text('16 of 16')", timeout=15_000)
    writer.cut(2)  # as a resumed run does
    page.wait_for_selector(".count:has-text('8 of 8')", timeout=15_000)


def test_a_file_works_without_a_server(tab, demo, tmp_path):
    file = tmp_path / "page.html"
    assert view.main([*demo[:2], "--step", "6", "--html", str(file), "--limit", "20"]) == 0
    page = tab(file.as_uri(), "phone", offline=True)
    assert "step=6" in page.url and page.inner_text(".count").startswith("96 of 96")
    records = list(trace.read_trace(demo[0], 6))
    expected = sum("another name" in t.text for r in records[:20] for t in r.trajectory.turns[:2])

    def at(where):
        return tab(f"{file.as_uri()}#/{where}", "phone")

    assert at("rollouts?text=another+name").inner_text(".count").startswith(f"{expected} of 96")
    assert at("t?id=0.step.6.3").locator(".turn").count() == len(records[3].trajectory.turns)
    assert "This file holds 20 rollouts, and not this one" in at("t?id=0.step.6.40").inner_text("main")
    assert at("evals").locator(".whisker").count() > 0


def test_runs_with_metrics_alone_or_trajectories_alone(tab, chromium, serve, demo, tmp_path):
    """Or without the text of tokens, where ids are shown."""
    bases = {}
    for name, lacks in (("metrics", "trajectories"), ("log", "metrics.jsonl"), ("evals", "metrics.jsonl"), ("ids", "")):
        shutil.copytree(demo[0], tmp_path / name)
        gone = tmp_path / name / lacks if lacks else index.folder_of(tmp_path / name / "trajectories/log")
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        bases[name] = serve(tmp_path / name)
    for log in (tmp_path / "evals/trajectories").glob("step_*"):
        log.unlink()
    trace.TraceWriter(tmp_path / "log").write(12, [])  # a step of which nothing is left
    for name, where, text in (
        ("metrics", "rollouts", "Steps in the log: none"),
        ("metrics", "evals", "kept no rollouts"),
        ("log", "curves", "no metrics yet"),
        ("log", "rollouts", "528 of 528"),
        ("log", "rollouts?step=12", "erdicts: none"),
        ("evals", "rollouts?kind=eval", "144 of 144"),
        ("evals", "group?g=0.step.1.0", "not in the log"),
        ("ids", "t?id=0.step.2.1&by=mask", "so ids are shown"),
        ("ids", "t?id=0.step.2.1&by=mask", "⟨60⟩⟨124⟩"),
    ):
        assert text in tab(f"{bases[name]}#/{where}").inner_text("main"), (name, where)
    page = chromium.new_page()  # one that may log an answer 404
    assert "no such thing" in opened(page, f"{bases['log']}#/t?id=0.step.1.999").inner_text("main")
    page.close()


def test_a_long_list_has_few_elements(tab, serve, demo, tmp_path):
    shutil.copytree(demo[0], tmp_path / "run")
    log = tmp_path / "run/trajectories/step_00000001.jsonl"
    for step in range(13, 200):
        shutil.copy(log, log.with_name(f"step_{step:08d}.jsonl"))
    page = tab(f"{serve(tmp_path / 'run')}#/rollouts?view=flat")
    assert page.inner_text(".count").startswith(f"{48 * 199:,} of")
    page.locator(".list").evaluate("list => { list.scrollTop = list.scrollHeight }")
    page.wait_for_selector(".item:last-child small:has-text('sample 15')")
    assert page.locator(".item").count() < 60
    page.emulate_media(media="print")
    assert not page.locator("#top nav").is_visible()


def test_a_card_has_its_answer_and_a_penalty_only_where_it_ranks(tab, serve, demo):
    page = tab(f"{serve(demo[0])}#/group?g=0.step.1.0")
    group = [r for r in trace.read_trace(demo[0], 1) if r.group == 0]
    dropped = Counter(r.why for r in group if not r.kept)
    words = [f"{len(group) - sum(dropped.values())} of {len(group)} kept"]
    words += [f"{count} dropped: {why.replace('_', ' ')}" for why, count in dropped.items()]
    assert dropped and " · ".join(words) in page.inner_text("section > .facts")
    for i, record in enumerate(group):
        card = page.locator(".card").nth(i)
        text, verdict = card.inner_text(), record.verdict
        assert (f"= {verdict.answer}" if verdict.answer else "no answer") in text
        shown = bool(card.locator(".pen").count())
        assert shown == (verdict.status == "correct" and record.penalties["total"] > 0)


def write_group(folder, record, trajectories, **changes):
    """The trace of a group of these trajectories, which are otherwise those of a record."""
    made = [
        replace(record, trajectory=replace(trajectory, sample=sample), group=0, **changes)
        for sample, trajectory in enumerate(trajectories)
    ]
    trace.TraceWriter(folder, decode=TOKENIZER.decode).write(1, made)


def test_kinds_of_failed_calls_look_different(tab, serve, demo, tmp_path):
    """A program that was wrong, a limit, a call that could not be read: each has its color and shape, the same ones on
    the card and in the trajectory."""
    kinds = ["ok", "exception", "timeout", "malformed_call", "sandbox_error"]
    record = next(r for r in trace.read_trace(demo[0], 1) if r.trajectory.results)
    ended = [
        [replace(turn, results=tuple(replace(r, kind=kind) for r in turn.results)) for turn in record.trajectory.turns]
        for kind in kinds
    ]
    write_group(tmp_path, record, [replace(record.trajectory, turns=tuple(turns)) for turns in ended])
    style = (
        "e => { const s = getComputedStyle(e); "
        "return [s.color, s.borderRadius, s.transform, s.backgroundImage].join(); }"
    )
    base, looks = serve(tmp_path), set()
    for sample, kind in enumerate(kinds):
        page = tab(f"{base}#/group?g=0.step.1.0&a=0.step.1.{sample}", wait=".called")
        mark = page.locator(".card").nth(sample).locator(".call").first
        assert page.locator(".called .call").first.get_attribute("class") == mark.get_attribute("class")
        assert f"call: {kind.replace('_', ' ')}" in page.inner_text("section > .key")
        looks.add(mark.evaluate(style))
    assert len(looks) == len(kinds)


def test_equal_tokens_of_two_rollouts_are_folded(tab, serve, demo, tmp_path):
    """Also where the shorter one has nothing but equal tokens."""
    left, right = [r.trajectory.tokens for r in trace.read_trace(demo[0], 1)][:2]
    record = next(r for r in trace.read_trace(demo[0], 1) if len(r.trajectory.turns) > 1)
    trajectory = record.trajectory
    end = trajectory.turns[0].end
    first = {name: getattr(trajectory, name)[:end] for name in ("tokens", "policy_mask", "logprobs", "versions")}
    short = replace(trajectory, turns=(replace(trajectory.turns[0], calls=(), results=()),), **first)
    write_group(tmp_path, record, [trajectory, short], advantages=None)
    part = next(i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1])
    for run, equal, others in ((tmp_path, end, 1), (demo[0], part, 2)):
        page = tab(f"{serve(run)}#/pair?a=0.step.1.0&b=0.step.1.1&by=mask", wait=".fold")
        assert [fold.inner_text() for fold in page.locator(".fold").all()] == [f"{equal} equal tokens"] * 2
        beyond = page.locator(f".trajectory [data-i='{equal}']")
        assert beyond.count() == others and beyond.first.is_visible()
    begin = page.locator(".trajectory [data-i='0']").first
    assert not begin.is_visible()
    page.locator(".fold").first.click()
    assert begin.is_visible()


def test_points_are_marked_where_they_are_few_or_between_gaps(tab, serve, demo, tmp_path):
    """Thirty evaluations in 300 steps are points; 300 losses are a line."""
    rows = [{"step": step, "rollout/reward": step / 300} for step in range(1, 301)]
    for row in rows[::10]:
        row["eval/all/avg@1"] = row["step"] / 300
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for run, counts in ((demo[0], [12, 3]), (tmp_path, [0, 30])):
        page = tab(f"{serve(run)}#/curves", wait="svg.chart circle")
        assert [chart.locator("circle").count() for chart in page.locator("svg.chart").all()][:2] == counts


def test_a_group_of_one_without_calls_of_which_nothing_is_kept(tab, serve, demo, tmp_path):
    """No advantage, no penalty, no call: the page says so and explains no mark that it does not show."""
    record = next(r for r in trace.read_trace(demo[0], 1) if r.verdict.status != "correct")
    turns = tuple(replace(turn, calls=(), results=()) for turn in record.trajectory.turns)
    verdict = replace(record.verdict, tool_calls=0, tool_errors=0)
    changes = {"kept": False, "why": "equal_rewards", "advantages": None, "penalties": {}}
    write_group(tmp_path, record, [replace(record.trajectory, turns=turns)], verdict=verdict, **changes)
    base = serve(tmp_path)
    for sort in ("spread", "failed"):
        page = tab(f"{base}#/rollouts?sort={sort}", wait=".item")
        assert "0 of 1 kept" in page.inner_text(".item") and page.locator(".sq.dropped").count() == 2  # one of the key
    page = tab(f"{base}#/group?g=0.step.1.0&a=0.step.1.0", wait="article.trajectory")
    assert "0 of 1 kept · 1 dropped: equal rewards" in page.inner_text("section > .facts")
    text, key = page.inner_text(".card"), page.inner_text("section > .key")
    assert "no call" in text and "dropped: equal_rewards" in text and not page.locator(".card .pen").count()
    assert "penalty" not in key and "advantage" not in key and "call:" not in key
    assert "not kept (equal_rewards)" in page.inner_text("article.trajectory .facts")


def test_an_evaluation_has_no_marks_of_training(tab, serve, demo):
    page = tab(f"{serve(demo[0])}#/rollouts?kind=eval", wait=".item")
    page.locator(".item").first.click()
    page.wait_for_selector(".card")
    key = page.inner_text("section > .key")
    assert not any(word in key for word in ("penalty", "advantage", "dropped")), key
