"""The static page of `view`: one file without external resources; all text of the policy and its tools is escaped."""

from collections.abc import Iterable
from html import escape
from typing import Any

from grpo_roc_jax.record.segments import Segment, calls, faults, headline, penalties, segments
from grpo_roc_jax.record.trace import TraceRecord
from grpo_roc_jax.types import ToolCall, ToolResult

STYLE = """
.roc{font:14px/1.45 system-ui,sans-serif;color:#1b1f24;background:#fff;max-width:1200px;margin:0 auto;padding:12px}
.roc h1{font-size:17px;margin:0 0 8px}
.roc .bar{position:sticky;top:0;background:#fff;padding:8px 0;border-bottom:1px solid #ddd;z-index:1}
.roc .bar input[type=search]{width:260px;padding:3px 6px}
.roc .bar label{margin-left:14px}
.roc .key span{padding:1px 8px;border-radius:3px;margin-right:6px;font-size:12px}
.roc details.t{border:1px solid #d5d9de;border-left:5px solid #c0392b;border-radius:4px;margin:7px 0}
.roc details.t.correct{border-left-color:#1e8449}
.roc details.t>summary{padding:5px 9px;cursor:pointer;overflow-wrap:anywhere}
.roc .body{padding:2px 12px 10px}
.roc pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0;padding:6px 9px;font:12.5px/1.45 ui-monospace,monospace}
.roc .note{font-size:11.5px;color:#666;margin:7px 0 1px}
.roc .prompt{background:#eef0f2;color:#444}
.roc .policy{background:#dcebfa;border-left:3px solid #0072b2}
.roc .observation{background:#fdf3d8;border-left:3px solid #e69f00}
.roc .fault{color:#fff;background:#c0392b;padding:2px 8px;border-radius:3px}
.roc table{border-collapse:collapse;margin-top:8px;width:100%;table-layout:fixed}
.roc th{text-align:left;font-weight:600;font-size:12px;color:#555}
.roc td{vertical-align:top;border-top:1px solid #e3e6ea;padding:2px 8px 2px 0;font-size:12.5px;overflow-wrap:anywhere}
.roc td pre{padding:0;max-height:260px;overflow:auto}
.roc .ok{color:#1e8449}.roc .bad{color:#c0392b}.roc .infra{color:#b9770e}
"""

SCRIPT = """
(function(){const here=document.currentScript,pages=document.querySelectorAll('.roc');
const root=here?here.parentElement:pages[pages.length-1];
const items=[...root.querySelectorAll('details.t')],count=root.querySelector('.count');
const text=root.querySelector('input[type=search]'),boxes=[...root.querySelectorAll('.bar input[type=checkbox]')];
function run(){const words=text.value.toLowerCase();let n=0;
for(const item of items){const fits=boxes.every(b=>!b.checked||item.dataset[b.name]==='1')
&&(!words||item.textContent.toLowerCase().includes(words));item.style.display=fits?'':'none';n+=fits}
count.textContent=n+' shown'}
text.addEventListener('input',run);boxes.forEach(b=>b.addEventListener('change',run));run()})()
"""


def render_page(title: str, records: Iterable[TraceRecord]) -> str:
    """A self-contained HTML page of these trajectories."""
    boxes = "".join(
        f'<label><input type="checkbox" name="{name}"> {label}</label>'
        for name, label in (
            ("correct", "correct"),
            ("wrong", "not correct"),
            ("errors", "failed calls"),
            ("kept", "kept"),
        )
    )
    key = "".join(f'<span class="{kind}">{kind}</span>' for kind in ("prompt", "policy", "observation"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f'<div class="roc"><h1>{escape(title)}</h1>'
        f'<div class="bar"><input type="search" placeholder="find in text">{boxes} '
        f'<span class="count"></span> <span class="key">{key}</span></div>'
        + "".join(map(_trajectory, records))
        + f"<script>{SCRIPT}</script></div></body></html>"
    )


def _trajectory(record: TraceRecord) -> str:
    verdict = record.verdict
    correct = verdict is not None and verdict.status == "correct"
    errors = verdict is not None and verdict.tool_errors > 0
    marks = {"correct": correct, "wrong": not correct, "errors": errors, "kept": record.kept}
    data = " ".join(f'data-{name}="{int(value)}"' for name, value in marks.items())
    parts = [f'<p class="fault">{escape(fault)}</p>' for fault in faults(record)]
    parts += [_segment(segment) for segment in segments(record)]
    parts.append(_calls(record))
    if verdict is not None:
        parts.append(
            f'<p class="note">answer {escape(repr(verdict.answer))}, reference {escape(repr(record.problem.answer))}: '
            f"<b>{escape(verdict.status)}</b></p>"
        )
    if record.penalties:
        parts.append(f'<p class="note">{escape(penalties(record))}</p>')
    return (
        f'<details class="t{" correct" if correct else ""}" {data}><summary>{escape(headline(record))}</summary>'
        f'<div class="body">{"".join(parts)}</div></details>'
    )


def _segment(segment: Segment) -> str:
    note = f"{segment.kind}, tokens {segment.start}–{segment.end}{segment.origin}"
    return f'<p class="note">{escape(note)}</p><pre class="{segment.kind}">{escape(segment.text)}</pre>'


def _calls(record: TraceRecord) -> str:
    rows = [_call(*entry) for entry in calls(record)]
    if not rows:
        return ""
    heads = (("turn", 5), ("tool", 12), ("outcome", 14), ("ms", 7), ("arguments", 31), ("output", 31))
    head = "".join(f'<th style="width:{width}%">{name}</th>' for name, width in heads)
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _call(number: int, call: ToolCall, result: ToolResult | None) -> str:
    arguments: Any = call.arguments.get("code") if set(call.arguments) == {"code"} else call.arguments or call.raw
    if result is None:
        outcome, spent, output = "not run", "", ""
    else:
        style = "bad" if result.counts_as_error else "infra" if result.infra else "ok"
        outcome = f'<span class="{style}">{escape(result.kind)}</span>'
        spent = f"{result.wall_ms:.0f}"
        errors = f"{result.error_type} {result.error_message}".strip()
        output = "\n".join(part for part in (result.stdout, result.stderr, result.echo, errors) if part)
    cells = (str(number), escape(call.name), outcome, spent, _pre(arguments), _pre(output))
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _pre(value: Any) -> str:
    return f"<pre>{escape(str(value))}</pre>" if value else ""
