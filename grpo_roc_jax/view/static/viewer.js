// The page of `grpo-roc view`. Text of runs enters the document only through `plain`, as text nodes.
"use strict";
(() => {

const held = document.getElementById("data").textContent;
const DATA = held ? JSON.parse(held) : null;
const top = document.getElementById("top"), main = document.getElementById("main");
const COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F"];
const PHASES = ["rollout", "plan", "select", "rows", "update"];
const PANELS = [
  ["reward, all sampled", "rollout/reward"],
  ["held-out accuracy", "eval"],
  ["failing calls in correct rollouts; dashed: in those trained on",
    "rollout/tool_error_in_correct", "roc/tool_error_in_correct_kept"],
  ["rollouts kept; dashed: dropped", "roc/kept", "roc/dropped"],
  ["tokens after the prompt", "rollout/length"],
  ["entropy, nats per token", "loss/entropy"],
  ["largest log-prob gap, sampler to trainer", "loss/logprob_gap_max"],
];
const INFRA = ["sandbox_error", "queue_timeout", "transport_error"];
const S = { runs: [], labels: [], updated: 0, broken: "" };

// ---- text and elements ------------------------------------------------------------------------------------------

// Controls, marks of direction and characters without width are shown by name, so text reads as it is stored.
const HIDDEN = new RegExp("[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4"
  + "\\u17b5\\u180b-\\u180f\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufe00-\\ufe0f\\ufeff\\uffa0\\ufff0-\\ufffb"
  + "\\u{e0000}-\\u{e0fff}\\ud800-\\udfff]", "gu");
const nameOf = char => {
  const code = char.codePointAt(0);
  if (code < 32) return String.fromCharCode(0x2400 + code);
  return code === 127 ? "\u2421" : "U+" + code.toString(16).toUpperCase().padStart(4, "0");
};
const marked = text => String(text).replace(HIDDEN, nameOf);

function plain(value) {
  const text = String(value), parts = document.createDocumentFragment();
  let place = 0;
  for (const found of text.matchAll(HIDDEN)) {
    if (found.index > place) parts.append(text.slice(place, found.index));
    const mark = document.createElement("span");
    mark.className = "ctl";
    mark.textContent = nameOf(found[0]);
    parts.append(mark);
    place = found.index + found[0].length;
  }
  if (place < text.length) parts.append(text.slice(place));
  return parts;
}

const DRAWN = new Set(["svg", "path", "line", "rect", "circle", "text", "g", "polygon"]);
function el(tag, attributes, ...children) {
  const node = DRAWN.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : marked(value));
  }
  return add(node, children);
}
function add(node, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    node.append(child instanceof Node ? child : plain(child));
  }
  return node;
}
const put = (...children) => add(main, children);
const number = (value, digits = 3) => value === null || value === undefined ? "–"
  : Number.isInteger(value) ? value.toLocaleString("en") : Math.abs(value) >= 1e4 || (value && Math.abs(value) < 1e-3)
    ? value.toExponential(1) : value.toFixed(digits);
const signed = value => value === null || value === undefined ? "–" : (value < 0 ? "−" : "+") + number(Math.abs(value));
const link = (page, query) => "#/" + page + "?" + new URLSearchParams(
  Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined));

// ---- data -------------------------------------------------------------------------------------------------------

async function ask(name, query) {
  if (DATA) return answer(name, query);
  const found = await fetch("api/" + name + "?" + new URLSearchParams(query));
  if (!found.ok) throw new Error(await found.text());
  return found.json();
}

function answer(name, query) {
  if (name === "state") return DATA.state;
  if (name === "evaluations") return DATA.evaluations;
  if (name === "metrics") return DATA.metrics[query.run];
  if (name === "blocks") return query.blocks.split(",").map(block => DATA.blocks[query.run][block]).filter(Boolean);
  if (name === "trajectory") {
    const found = DATA.trajectories[[query.run, query.block, query.row].join(".")];
    if (found) return found;
    throw new Error(`This file holds ${Object.keys(DATA.trajectories).length} rollouts, and not this one. `
      + "`--limit 0` writes all that pass the filters, and the page on loopback shows every one.");
  }
  const sought = query.text.toLowerCase(), hits = {};
  for (const [id, found] of Object.entries(DATA.trajectories)) {
    const [run, kind, step, row] = id.split("."), name = kind + "." + step;
    const texts = [found.problem.prompt, ...found.segments.map(s => s.text), found.verdict && found.verdict.answer,
      ...found.turns.flatMap(t => (t.results || []).flatMap(r => [r.observation, r.stdout, r.stderr, r.error_message]))];
    if (run === String(query.run) && query.blocks.split(",").includes(name)
      && texts.some(text => text && text.toLowerCase().includes(sought))) (hits[name] ||= []).push(Number(row));
  }
  return hits;
}

async function refresh() {
  const state = await ask("state", {});
  let changed = S.runs.length !== state.length;
  for (const [place, found] of state.entries()) {
    const run = S.runs[place] ||= { place, blocks: new Map(), stamps: {}, metrics: { steps: [], columns: {}, events: [] } };
    Object.assign(run, { name: found.name, label: found.label });
    if (run.stamp !== found.metrics.join()) {
      run.metrics = await ask("metrics", { run: place });
      run.stamp = found.metrics.join();
      changed = true;
    }
  }
  S.labels = [...new Set(S.runs.map(run => run.label))];
  if (!S.updated && !location.hash.replace("#/curves", "")) await draw(); // curves need no index
  for (const [place, found] of state.entries()) {
    const run = S.runs[place];
    for (const name of run.blocks.keys()) if (!(name in found.blocks)) { run.blocks.delete(name); changed = true; }
    const fresh = Object.keys(found.blocks).filter(name => run.stamps[name] !== found.blocks[name] || !run.blocks.has(name));
    for (let at = 0; at < fresh.length; at += 64) {
      if (!S.updated) (main.querySelector("p.quiet:only-child") || document.createElement("p")).textContent = `Reading ${marked(run.name)}: ${at} of ${fresh.length} steps.`;
      for (const block of await ask("blocks", { run: place, blocks: fresh.slice(at, at + 64).join() })) {
        const name = block.kind + "." + block.step;
        run.blocks.set(name, grouped(block, place, name));
        run.stamps[name] = found.blocks[name];
      }
      changed = true;
    }
  }
  S.updated = Date.now();
  return changed;
}

// Rows of a problem in a step belong together; rows that left their group are shown with those of their problem.
function grouped(block, run, name) {
  const { group, problem } = block.columns, places = new Map(), first = new Map();
  for (let i = 0; i < block.count; i++) if (group[i] >= 0 && !first.has(problem[i])) first.set(problem[i], group[i]);
  for (let i = 0; i < block.count; i++) {
    const key = group[i] >= 0 ? group[i] : first.has(problem[i]) ? first.get(problem[i]) : "p" + problem[i];
    if (!places.has(key)) places.set(key, []);
    places.get(key).push(i);
  }
  block.groups = [...places.values()].map((rows, g) => ({ block, run, name, g, rows, problem: problem[rows[0]] }));
  block.of = new Int32Array(block.count);
  for (const found of block.groups) for (const i of found.rows) block.of[i] = found.g;
  Object.assign(block, { run, name });
  return block;
}

const text = (block, column, i) => block.names[block.columns[column][i]];
const outcomes = (block, i) => [...block.columns.calls[i]].map(c => c === " " ? " " : block.outcomes[c.charCodeAt(0) - 97]);
// Three kinds of failure: the program was wrong, a limit ended it, or the call could not be read or run.
const LIMITS = ["timeout", "memory_limit", "output_limit"], CALLS = ["malformed_call", "bad_arguments", "unknown_tool"];
const look = kind => "call " + (kind === "ok" ? "ok" : kind === "not_run" ? "idle" : INFRA.includes(kind) ? "infra" : LIMITS.includes(kind) ? "bad limit" : CALLS.includes(kind) ? "bad form" : "bad");
const bad = kind => kind !== "ok" && kind !== "not_run" && !INFRA.includes(kind);
const idOf = (block, i) => [block.run, block.name, i].join(".");
const groupId = found => [found.run, found.name, found.g].join(".");
function parse(id) {
  const [run, kind, step, place] = String(id).split("."), block = S.runs[run] && S.runs[run].blocks.get(kind + "." + step);
  return block && Number(place) >= 0 ? { block, place: Number(place) } : null;
}
const findGroup = id => { const found = parse(id); return found && found.block.groups[found.place]; };
const blocksOf = (kind, run) => S.runs.filter(r => run === "" || r.place === Number(run))
  .flatMap(r => [...r.blocks.values()].filter(block => block.kind === kind)).sort((a, b) => b.step - a.step || a.run - b.run);
const colorOf = label => COLORS[S.labels.indexOf(label) % COLORS.length];
const shortRun = run => S.runs.length > 1 ? S.runs[run].name.split("/").filter(Boolean).pop() : "";

// ---- curves -----------------------------------------------------------------------------------------------------

function column(run, metric) {
  const { columns } = run.metrics;
  if (metric !== "eval") return columns[metric];
  const names = Object.keys(columns).filter(name => name.startsWith("eval/") && name.includes("/avg@"));
  return columns[names.find(name => name.startsWith("eval/all/")) || (names.length === 1 ? names[0] : "")];
}
function axis(run, kind) {
  const { steps, columns } = run.metrics;
  const part = columns[{ tokens: "rollout/sampled_tokens", seconds: "time/step_s" }[kind]];
  let total = 0;
  return kind === "step" ? steps : part ? part.map(value => total += value || 0) : null;
}
function lineOf(run, metric, kind, smooth) {
  const values = column(run, metric), places = axis(run, kind), line = { x: [], y: [], step: [] };
  if (!values || !places) return line;
  values.forEach((value, i) => {
    if (value === null) return;
    line.x.push(places[i]);
    line.y.push(value);
    line.step.push(run.metrics.steps[i]);
  });
  const raw = line.y, window = metric.startsWith("eval") ? 1 : smooth;  // in steps; evaluations are drawn as measured
  let first = 0;
  line.y = raw.map((_, i) => {
    while (line.step[first] <= line.step[i] - window) first += 1;
    const part = raw.slice(first, i + 1);
    return part.reduce((a, b) => a + b) / part.length;
  });
  return line;
}
function between(line, x) {
  let high = line.x.findIndex(place => place >= x);
  if (high <= 0) return line.y[Math.max(high, 0)];
  const low = high - 1, share = (x - line.x[low]) / (line.x[high] - line.x[low] || 1);
  return line.y[low] + share * (line.y[high] - line.y[low]);
}
// Mean and standard deviation (n - 1) over the runs of one label: at each step, or on one grid of the range they share.
function band(runs, metric, kind, smooth) {
  const lines = runs.map(run => lineOf(run, metric, kind, smooth)).filter(line => line.x.length);
  if (!lines.length) return null;
  let x, step, at;
  if (kind === "step" || lines.length === 1) {
    x = [...new Set(lines.flatMap(line => line.x))].sort((a, b) => a - b);
    const places = lines.map(line => new Map(line.x.map((place, i) => [place, line.y[i]])));
    at = place => places.map(found => found.get(place)).filter(value => value !== undefined);
    step = kind === "step" ? x : lines[0].step;
  } else {
    const low = Math.max(...lines.map(line => line.x[0])), high = Math.min(...lines.map(line => line.x.at(-1)));
    if (low > high) return null;
    const size = Math.max(...lines.map(line => line.x.length));
    x = Array.from({ length: size }, (_, i) => low + (high - low) * i / Math.max(1, size - 1));
    step = x.map(place => lines[0].step[Math.max(0, lines[0].x.findIndex(found => found >= place))]);
    at = place => lines.map(line => between(line, place));
  }
  const mean = [], std = [];
  for (const place of x) {
    const values = at(place), m = values.reduce((a, b) => a + b) / values.length;
    mean.push(m);
    std.push(values.length > 1 ? Math.sqrt(values.reduce((a, b) => a + (b - m) ** 2, 0) / (values.length - 1)) : 0);
  }
  return { x, mean, std, step, runs: lines.length };
}

function ticks(low, high, count) {
  const raw = (high - low) / count || 1, unit = 10 ** Math.floor(Math.log10(raw));
  const size = unit * [1, 2, 5, 10].find(factor => factor * unit >= raw), found = [];
  for (let value = Math.ceil(low / size) * size; value <= high + size * 1e-9; value += size) found.push(value);
  return found;
}
// A tick with as many digits as its distance from the next one needs.
function short(value, size) {
  if (value && Math.abs(value) < 1e-3) return value.toExponential(1);
  const [unit, name] = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([unit]) => Math.abs(value) >= unit) || [1, ""];
  return String(Number((value / unit).toFixed(Math.max(0, Math.min(8, Math.ceil(-Math.log10(size / unit) - 1e-9)))))) + name;
}

// One panel: lines with bands, marks of alarms, a readout; a click or Enter passes the step to `pick`.
const SPARSE = 24;  // values of a curve, up to which each is marked; so is each of more that have gaps, such as evaluations
const sparse = (line, width) => line.x.length <= SPARSE || line.x.length <= Math.min(width / 6, (line.step.at(-1) - line.step[0]) / 2);
function chart(title, lines, { width, marks = [], unit = "step", pick, stacked = false }) {
  const pad = lines.some(line => line.bars) ? 14 : 0, height = 190, left = 46, right = 10, upper = 8, lower = 24, inner = width - left - right;
  const every = lines.flatMap(line => line.x), lowX = Math.min(...every), highX = Math.max(...every);
  const values = lines.flatMap(line => stacked ? [0, ...line.high] : line.bars ? [...line.low, ...line.high] : line.mean.flatMap((m, i) => [m - line.std[i], m + line.std[i]]));
  let lowY = Math.min(...values), highY = Math.max(...values);
  if (lowY >= 0 && lowY < highY * 0.6) lowY = 0;
  if (lowY === highY) { lowY -= 0.5; highY += 0.5; }
  const px = x => left + (highX === lowX ? inner / 2 : pad + (x - lowX) / (highX - lowX) * (inner - 2 * pad));
  const py = y => upper + (1 - (y - lowY) / (highY - lowY)) * (height - upper - lower);
  const trace = (xs, ys) => xs.map((x, i) => (i ? "L" : "M") + px(x).toFixed(1) + " " + py(ys[i]).toFixed(1)).join("");
  const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", tabindex: 0, role: "img",
    "aria-label": `${title}, by ${unit}; left and right move along it` + (pick ? ", Enter opens the step" : "") });
  const gapOf = found => found.length > 1 ? found[1] - found[0] : Math.abs(found[0]) || 1;
  const ys = ticks(lowY, highY, 6), xs = ticks(lowX, highX, Math.max(2, Math.floor(width / 90)));
  for (const y of ys) svg.append(
    el("line", { x1: left, x2: width - right, y1: py(y), y2: py(y), class: "grid" }),
    el("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, short(y, gapOf(ys))));
  for (const x of xs) if (unit !== "step" || Number.isInteger(x))
    svg.append(el("text", { x: px(x), y: height - 7, "text-anchor": "middle" }, short(x, gapOf(xs))));
  for (const line of lines) {
    if (stacked) {
      const edge = line.x.map((x, i) => px(x).toFixed(1) + "," + py(line.high[i]).toFixed(1));
      const base = line.x.map((x, i) => px(x).toFixed(1) + "," + py(line.low[i]).toFixed(1)).reverse();
      svg.append(el("polygon", { points: [...edge, ...base].join(" "), fill: line.color, "fill-opacity": 0.75 }));
      continue;
    }
    if (line.bars) line.x.forEach((x, i) => svg.append(el("line", { x1: px(x) + line.shift, x2: px(x) + line.shift, y1: py(line.low[i]), y2: py(line.high[i]), stroke: line.color, class: "whisker" })));
    else if (line.runs > 1) {
      const edge = line.x.map((x, i) => px(x).toFixed(1) + "," + py(line.mean[i] + line.std[i]).toFixed(1));
      const base = line.x.map((x, i) => px(x).toFixed(1) + "," + py(line.mean[i] - line.std[i]).toFixed(1)).reverse();
      svg.append(el("polygon", { points: [...edge, ...base].join(" "), fill: line.color, "fill-opacity": 0.18 }));
    }
    svg.append(el("path", { d: trace(line.x, line.mean), stroke: line.color, class: "line", "stroke-dasharray": line.dash && "5 4", transform: line.shift ? `translate(${line.shift} 0)` : null }));
    if (line.bars || sparse(line, width)) line.x.forEach((x, i) => svg.append(el("circle", { cx: px(x) + (line.shift || 0), cy: py(line.mean[i]), r: line.bars ? 3 : 2.4, fill: line.color })));
  }
  for (const mark of marks) if (mark.x >= lowX && mark.x <= highX) svg.append(
    el("g", { class: "alarm" }, el("line", { x1: px(mark.x), x2: px(mark.x), y1: upper, y2: height - lower }),
      el("polygon", { points: `${px(mark.x) - 5},${upper} ${px(mark.x) + 5},${upper} ${px(mark.x)},${upper + 8}` })));
  const cursor = el("line", { y1: upper, y2: height - lower, class: "cursor", x1: -9, x2: -9 }), readout = el("p", { class: "readout" });
  svg.append(cursor);
  let chosen = -1;
  const base = lines.reduce((a, b) => b.x.length > a.x.length ? b : a);
  const move = i => {
    chosen = Math.max(0, Math.min(base.x.length - 1, i));
    const x = base.x[chosen];
    cursor.setAttribute("x1", px(x));
    cursor.setAttribute("x2", px(x));
    const parts = lines.map(line => {
      const near = line.x.reduce((best, place, k) => Math.abs(place - x) < Math.abs(line.x[best] - x) ? k : best, 0);
      const value = stacked ? line.high[near] - line.low[near] : line.mean[near];
      const spread = line.bars ? ` (${number(line.low[near])} to ${number(line.high[near])})` : !stacked && line.runs > 1 ? " ± " + number(line.std[near]) : "";
      return el("span", {}, dot(line.color), number(value) + spread);
    });
    const near = marks.filter(mark => Math.abs(px(mark.x) - px(x)) < 6).map(mark => el("b", {}, `${mark.name}: ${mark.text}`));
    readout.replaceChildren();
    add(readout, [`${unit} ${number(x, 1)}`, parts, near]);
  };
  const nearest = event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * width;
    return base.x.reduce((best, place, i) => Math.abs(px(place) - x) < Math.abs(px(base.x[best]) - x) ? i : best, 0);
  };
  svg.addEventListener("pointermove", event => move(nearest(event)));
  svg.addEventListener("keydown", event => {
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") move(chosen + (event.key === "ArrowLeft" ? -1 : 1));
    else if (event.key === "Enter" && pick && chosen >= 0) pick(base.step[chosen]);
    else return;
    event.preventDefault();
  });
  if (pick) svg.addEventListener("click", event => { const i = nearest(event); move(i); pick(base.step[i]); });
  return el("figure", {}, el("figcaption", {}, title), svg, readout);
}
const dot = color => { const node = el("i", { class: "dot" }); node.style.background = color; return node; };

function openStep(step) {
  const steps = blocksOf("step", "").map(block => block.step);
  if (!steps.length) return;
  location.hash = link("rollouts", { step: steps.reduce((a, b) => Math.abs(b - step) < Math.abs(a - step) ? b : a) });
}

function curves(query) {
  const kind = query.get("x") || "step", smooth = Number(query.get("smooth") || 1), chosen = query.getAll("m");
  const width = main.clientWidth - 4, columns = width < 700 ? 1 : width < 1150 ? 2 : 3, size = Math.floor((width - (columns - 1) * 18) / columns);
  const names = [...new Set(S.runs.flatMap(run => Object.keys(run.metrics.columns)))].sort();
  const set = changes => {
    const next = new URLSearchParams(query);
    for (const [name, value] of Object.entries(changes)) {
      next.delete(name);
      for (const item of [value].flat()) if (item !== "") next.append(name, item);
    }
    location.hash = "#/curves?" + next;
  };
  const members = S.labels.map(label => [label, S.runs.filter(run => run.label === label)]);
  const marks = S.runs.flatMap(run => run.metrics.events.map(event => {
    const places = axis(run, kind), at = run.metrics.steps.indexOf(event.step);
    return { ...event, run: run.place, x: kind === "step" ? event.step : places && at >= 0 ? places[at] : NaN };
  }));
  const panels = [...chosen.map(metric => [metric, metric]), ...PANELS].map(([title, ...metrics]) => {
    const lines = metrics.flatMap((metric, i) => members.map(([label, runs]) => {
      const found = band(runs, metric, kind, smooth);
      return found && { ...found, color: colorOf(label), dash: i > 0 };
    })).filter(Boolean);
    if (!lines.length) return chosen.includes(title) && el("figure", {}, el("figcaption", {}, title), el("p", { class: "quiet" }, `no run has it by ${kind}`));
    const figure = chart(title, lines, { width: size, marks, unit: kind, pick: openStep });
    if (chosen.includes(title)) figure.firstChild.append(" ", el("button", { class: "small", "aria-label": "remove " + title,
      onclick: () => set({ m: chosen.filter(metric => metric !== title) }) }, "×"));
    return figure;
  });
  const picker = el("input", { list: "metrics", placeholder: "add any metric", "aria-label": "add any metric", size: 30, onchange: event => {
    if (names.includes(event.target.value)) set({ m: [event.target.value, ...chosen.filter(m => m !== event.target.value)] });
  } });
  put(
    el("div", { class: "bar" }, picker, el("datalist", { id: "metrics" }, names.map(name => el("option", { value: name }))),
      el("label", {}, "by ", choice(["step", "tokens", "seconds"], kind, value => set({ x: value }))),
      el("label", {}, "mean over ", choice([1, 5, 10, 25], smooth, value => set({ smooth: value })), " steps"),
      el("span", { class: "key" }, members.map(([label, runs]) => el("span", {}, dot(colorOf(label)), label,
        runs.length > 1 ? ` (${runs.length} runs: mean ± standard deviation)` : "")))),
    el("div", { class: "charts", "data-columns": columns }, panels, members.map(([label, runs]) => phases(label, runs[0], size, kind))));
  if (!names.length) put(el("p", { class: "quiet" }, "These runs have no metrics yet."));
  if (marks.length) put(el("h2", {}, `${marks.length} alarms and events`), el("div", { class: "wide" }, el("table", {},
    el("tr", {}, ["step", "run", "name", "what"].map(name => el("th", {}, name))),
    marks.slice(-200).reverse().map(mark => el("tr", {}, el("td", {}, el("a", { href: link("rollouts", { step: mark.step, run: mark.run }) }, mark.step)),
      el("td", {}, shortRun(mark.run)), el("td", {}, mark.name), el("td", {}, mark.text))))));
}
const choice = (values, value, change, words = {}) => el("select", { onchange: event => change(event.target.value) },
  values.map(found => el("option", { value: found, selected: String(found) === String(value) }, words[found] ?? found)));

function phases(label, run, width, kind) {
  const { steps, columns } = run.metrics, whole = columns["time/step_s"], places = axis(run, kind);
  const rows = steps.map((_, i) => i).filter(i => whole && places && whole[i] !== null);
  if (!rows.length) return null;
  let low = rows.map(() => 0);
  const lines = [...PHASES, "rest"].map((phase, p) => {
    const spent = rows.map((i, k) => phase === "rest" ? Math.max(0, whole[i] - low[k]) : (columns[`time/${phase}_s`] || [])[i] || 0);
    const line = { name: phase, x: rows.map(i => places[i]), step: rows.map(i => steps[i]), low, color: COLORS[(p + (p > 4 ? 1 : 0)) % COLORS.length] };
    line.high = low = low.map((base, k) => base + spent[k]);
    return line;
  });
  const figure = chart(`seconds by phase${S.labels.length > 1 || S.runs.length > 1 ? ", " + (shortRun(run.place) || label) : ""}`, lines,
    { width, unit: kind, stacked: true, pick: openStep });
  figure.append(el("p", { class: "key" }, lines.map(line => el("span", {}, dot(line.color), line.name))));
  return figure;
}

// ---- rollouts: filters and list ---------------------------------------------------------------------------------

const FILTERS = ["run", "kind", "step", "source", "uid", "status", "error", "stop", "kept", "why", "low", "high", "text", "sample", "calls"];

function passes(query, hits) {
  const f = Object.fromEntries(FILTERS.map(name => [name, query.get(name) || ""]));
  const uid = f.uid.toLowerCase(), low = f.low === "" ? -Infinity : Number(f.low), high = f.high === "" ? Infinity : Number(f.high);
  return block => {
    const { columns, names, problems } = block, letter = f.error && String.fromCharCode(97 + block.outcomes.indexOf(f.error));
    const index = name => f[name] && names.indexOf(f[name]);
    const status = index("status"), stop = index("stop"), why = index("why");
    const fits = problems.map(([id, source, prompt]) => (!f.source || source === f.source)
      && (!uid || id.toLowerCase().includes(uid) || prompt.toLowerCase().includes(uid)));
    const found = hits && new Set(hits[block.run] && hits[block.run][block.name]);
    return i => fits[columns.problem[i]] && (f.status === "" || columns.status[i] === status) && (f.stop === "" || columns.stop[i] === stop)
      && (f.why === "" || columns.why[i] === why)
      && (f.kept === "" || columns.kept[i] === (f.kept === "yes" ? 1 : 0)) && (!letter || columns.calls[i].includes(letter))
      && (f.calls !== "failed" || columns.tool_errors[i] > 0) && (f.sample === "" || columns.sample[i] === Number(f.sample))
      && (f.low === "" && f.high === "" || (columns.reward[i] !== null && columns.reward[i] >= low && columns.reward[i] <= high))
      && (!found || found.has(i));
  };
}
function stepsOf(words) {
  const found = words.match(/^\s*(\d+)\s*(?:[-–]\s*(\d+))?\s*$/);
  return found ? step => step >= Number(found[1]) && step <= Number(found[2] ?? found[1]) : () => true;
}

async function rollouts(query, turn) {
  const kind = query.get("kind") || "step", flat = query.get("view") === "flat", within = stepsOf(query.get("step") || "");
  const blocks = blocksOf(kind, query.get("run") || "").filter(block => within(block.step));
  const count = el("span", { class: "count", role: "status" }), holder = el("div", {});
  put(filterBar(query, kind, blocks), count, holder);
  let hits = null;
  if (query.get("text")) {
    hits = {};
    for (const run of S.runs) {
      const names = blocks.filter(block => block.run === run.place).map(block => block.name);
      for (let at = 0; at < names.length; at += 32) {
        count.textContent = `searching, ${at} of ${names.length} steps` + (shortRun(run.place) && ` of ${shortRun(run.place)}`);
        const found = await ask("search", { run: run.place, text: query.get("text"), blocks: names.slice(at, at + 32).join() });
        hits[run.place] = { ...hits[run.place], ...found };
        if (turn !== turns) return;
      }
    }
  }
  const check = passes(query, hits), items = [];
  let rows = 0, total = 0;
  for (const block of blocks) {
    const fits = check(block);
    total += block.count;
    if (flat) for (let i = 0; i < block.count; i++) { if (fits(i)) { items.push({ block, i }); rows++; } }
    if (!flat) for (const found of block.groups) {
      const fit = found.rows.filter(fits);
      if (fit.length) items.push({ found, fit: fit.length === found.rows.length ? null : new Set(fit) });
      rows += fit.length;
    }
  }
  count.textContent = `${rows.toLocaleString("en")} of ${total.toLocaleString("en")} rollouts` + (flat ? "" : ` in ${items.length.toLocaleString("en")} groups`);
  const order = ORDERS[query.get("sort")];
  if (order) items.sort((a, b) => order(b) - order(a));
  holder.append(listLegend(kind, blocks, flat));
  add(holder, leftOut(blocks));
  if (!items.length) holder.append(nothing(kind, blocks));
  else holder.append(virtual(items, flat ? rolloutRow : groupRow));
}

// What a list is sorted by, largest first: of a group, or of the rollout of a flat list.
const rowsOf = item => item.found ? item.found.rows : [item.i], columnsOf = item => (item.found || item).block.columns;
const ORDERS = {
  spread: item => { const paid = rowsOf(item).map(i => columnsOf(item).reward[i]).filter(value => value !== null); return paid.length ? Math.max(...paid) - Math.min(...paid) : -1; },
  failed: item => { const columns = columnsOf(item), sum = name => rowsOf(item).reduce((total, i) => total + columns[name][i], 0); return sum("tool_calls") ? sum("tool_errors") / sum("tool_calls") : -1; },
};
function listLegend(kind, blocks, flat) {
  const statuses = new Set(), letters = new Map();
  for (const block of blocks) {
    for (const s of block.columns.status) statuses.add(block.names[s]);
    for (const c of new Set(block.columns.calls.join(""))) if (c !== " ") letters.set(c, block.outcomes[c.charCodeAt(0) - 97]);
  }
  return keyOf([...statuses], flat ? [...new Set(letters.values())] : [], kind === "step");  // groups show no calls
}

// Lines of the log that cannot be read, such as a cut one.
function leftOut(blocks) {
  const damaged = blocks.filter(block => block.unreadable);
  const where = damaged.slice(0, 5).map(block => `step ${block.step}${shortRun(block.run) && ` of ${shortRun(block.run)}`}, line ${block.unreadable.slice(0, 5).join(" ")}${block.unreadable.length > 5 ? " …" : ""}`);
  return damaged.length > 0 && el("p", { class: "note" }, `Lines of the log that cannot be read are left out: ${where.join("; ")}${damaged.length > 5 ? "; …" : ""}.`);
}

function nothing(kind, blocks) {
  const every = blocksOf(kind, "").map(block => block.step).sort((a, b) => a - b), statuses = {};
  for (const block of blocks.length ? blocks : blocksOf(kind, "")) for (const s of block.columns.status) statuses[block.names[s]] = (statuses[block.names[s]] || 0) + 1;
  const steps = every.length > 20 ? [...every.slice(0, 10), "…", ...every.slice(-9)] : every;
  return el("div", { class: "quiet" }, el("p", {}, "No rollout matches."),
    el("p", {}, `Steps in the log: ${steps.join(", ") || "none; runs keep trajectories with log.traces above 0"}`),
    el("p", {}, "Verdicts: " + (Object.entries(statuses).map(([name, n]) => `${name} ${n}`).join(", ") || "none")));
}

function filterBar(query, kind, blocks) {
  const set = (name, value) => {
    const next = new URLSearchParams(query);
    value === "" ? next.delete(name) : next.set(name, value);
    location.hash = "#/rollouts?" + next;
  };
  const all = blocksOf(kind, ""), used = column => [...new Set(all.flatMap(block => [...new Set(block.columns[column])].map(at => block.names[at])))].sort();
  const sources = [...new Set(all.flatMap(block => block.problems.map(problem => problem[1])))].sort();
  const kinds = [...new Set(all.flatMap(block => [...new Set(block.columns.calls.join(""))].filter(c => c !== " ").map(c => block.outcomes[c.charCodeAt(0) - 97])))].filter(bad).sort();
  const pick = (name, label, values, words = {}) => el("label", {}, label + " ", choice(["", ...values], query.get(name) || "", value => set(name, value), { "": "any", ...words }));
  const write = (name, label, size, type = "text") => el("label", {}, label + " ", el("input", { name, type, size, step: "any", value: query.get(name) || "", onchange: event => set(name, event.target.value.trim()) }));
  const active = FILTERS.filter(name => query.get(name)).length;
  const open = document.body.clientWidth > 700 || query.get("bar") === "open";
  return el("details", { class: "bar filters", open }, el("summary", {}, active ? `${active} filters` : "filters"), el("div", { class: "fields" },
    S.runs.length > 1 && pick("run", "run", S.runs.map(run => run.place), Object.fromEntries(S.runs.map(run => [run.place, shortRun(run.place)]))),
    el("label", {}, "of ", choice(["step", "eval"], kind, value => set("kind", value), { step: "training", eval: "evaluations" })),
    write("step", "steps", 7), pick("source", "source", sources), write("uid", "problem", 14), pick("status", "verdict", used("status")),
    pick("error", "call that ended in", kinds), pick("calls", "calls", ["failed"]), pick("stop", "stopped by", used("stop")), pick("kept", "kept", ["yes", "no"]),
    pick("why", "reason", used("why")), el("span", {}, write("low", "reward from", 4, "number"), " ", write("high", "to", 4, "number")),
    write("text", "text", 16, "search"), write("sample", "sample", 3),
    el("label", {}, "sorted by ", choice(["", "spread", "failed"], query.get("sort") || "", value => set("sort", value), { "": "step", spread: "spread of reward", failed: "failing calls" })),
    el("label", {}, "list of ", choice(["", "flat"], query.get("view") || "", value => set("view", value), { "": "groups", flat: "rollouts" })),
    active > 0 && el("a", { href: "#/rollouts" }, "clear")));
}

function square(block, i, faint) {
  const status = text(block, "status", i), kept = block.columns.kept[i];
  return el("i", { class: `sq v-${status}${kept || block.kind === "eval" ? "" : " dropped"}${faint ? " faint" : ""}`,
    title: `sample ${block.columns.sample[i]}: ${status}, ${text(block, "why", i)}` });
}
function groupRow({ found, fit }) {
  const { block, rows } = found, [uid, source, prompt] = block.problems[found.problem], { columns } = block;
  const scored = rows.filter(i => columns.reward[i] !== null), mean = scored.reduce((sum, i) => sum + columns.reward[i], 0) / (scored.length || 1);
  const kept = rows.filter(i => columns.kept[i]).length;
  return el("a", { class: "item", href: link("group", { g: groupId(found) }) },
    el("span", { class: "where" }, `${block.step}`, shortRun(found.run) && el("small", {}, shortRun(found.run))),
    el("span", { class: "title" }, prompt || uid, el("small", {}, source)),
    el("span", { class: "squares" }, rows.slice(0, 64).map(i => square(block, i, fit && !fit.has(i))), rows.length > 64 && `+${rows.length - 64}`),
    el("span", { class: "stat" }, `reward ${number(mean, 2)}`, block.kind === "step" && el("small", {}, `${kept} of ${rows.length} kept`)));
}
function rolloutRow({ block, i }) {
  const { columns } = block, [uid, source, prompt] = block.problems[columns.problem[i]];
  return el("a", { class: "item", href: link("group", { g: [block.run, block.name, block.of[i]].join("."), a: idOf(block, i) }) },
    el("span", { class: "where" }, `${block.step}`, shortRun(block.run) && el("small", {}, shortRun(block.run))),
    el("span", { class: "title" }, square(block, i), " ", prompt || uid, el("small", {}, `${source} · sample ${columns.sample[i]}`)),
    el("span", { class: "squares" }, dots(block, i), ` ${columns.tokens[i]} tokens`),
    el("span", { class: "stat" }, `reward ${number(columns.reward[i], 2)}`, el("small", {}, text(block, "why", i))));
}
const dots = (block, i) => outcomes(block, i).map(kind => kind === " " ? el("i", { class: "gap" })
  : el("i", { class: look(kind), title: kind.replaceAll("_", " ") }));

// A list of which only the visible rows are elements.
function virtual(items, render) {
  const height = document.body.clientWidth > 700 ? 44 : 74, inner = el("div", { class: "inner" }), list = el("div", { class: "list", tabindex: 0, "aria-label": `${items.length} entries` }, inner);
  inner.style.height = Math.min(items.length * height, 3e7) + "px";
  const shown = new Map();
  let waiting = false;
  const draw = () => {
    waiting = false;
    const from = Math.max(0, Math.floor(list.scrollTop / height) - 8), to = Math.min(items.length, from + Math.ceil(list.clientHeight / height) + 16);
    for (const [k, node] of shown) if (k < from || k >= to) { node.remove(); shown.delete(k); }
    for (let k = from; k < to; k++) if (!shown.has(k)) {
      const node = render(items[k]);
      node.style.top = k * height + "px";
      node.style.height = height + "px";
      node.dataset.k = k;
      shown.set(k, node);
      inner.insertBefore(node, [...inner.children].find(other => Number(other.dataset.k) > k) || null);
    }
  };
  list.addEventListener("scroll", () => {
    S.scroll = list.scrollTop;
    if (!waiting) { waiting = true; requestAnimationFrame(draw); }
  });
  requestAnimationFrame(() => { if (S.keep) list.scrollTop = S.scroll || 0; S.keep = false; draw(); });
  list.addEventListener("keydown", event => {
    const way = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key], at = Number(document.activeElement.dataset.k ?? -1);
    if (!way) return;
    event.preventDefault();
    const next = shown.get(at < 0 ? Math.ceil(list.scrollTop / height) : at + way);
    if (next) { next.focus({ preventScroll: true }); next.scrollIntoView({ block: "nearest" }); }
  });
  return list;
}

// ---- a group ----------------------------------------------------------------------------------------------------

async function group(query, turn) {
  const found = findGroup(query.get("g")), other = query.get("with") && findGroup(query.get("with"));
  if (!found) return missing("This group is not in the log.");
  const { block } = found, problem = block.problems[found.problem], neighbours = block.groups;
  const go = way => neighbours[found.g + way] && link("group", { g: groupId(neighbours[found.g + way]) });
  S.previous = go(-1);
  S.next = go(1);
  const others = S.runs.flatMap(run => [...run.blocks.values()]).filter(b => b !== block).flatMap(b => b.groups.filter(g => b.problems[g.problem][0] === problem[0]))
    .sort((a, b) => (a.run !== found.run) - (b.run !== found.run) || a.run - b.run || a.block.step - b.block.step);
  const picked = [query.get("a"), query.get("b")].filter(Boolean);
  const change = changes => { const next = new URLSearchParams(query); for (const [name, value] of Object.entries(changes)) value ? next.set(name, value) : next.delete(name); return "#/group?" + next; };
  const toggle = id => {
    const next = picked.includes(id) ? picked.filter(p => p !== id) : picked.length < 2 ? [...picked, id] : [picked[0], id];
    location.hash = change({ a: next[0], b: next[1] });
  };
  put(
    el("nav", { class: "crumbs" }, el("a", { href: link("rollouts", { step: block.step, kind: block.kind === "eval" ? "eval" : "" }) }, `${block.kind === "eval" ? "evaluation at step" : "step"} ${block.step}`),
      ` · group ${found.g + 1} of ${neighbours.length} `, go(-1) && el("a", { href: go(-1) }, "← previous"), " ", go(1) && el("a", { href: go(1) }, "next →")),
    el("h1", { class: "prompt" }, problem[2]),
    el("p", { class: "facts" }, el("span", {}, problem[0]), el("span", {}, problem[1]), el("span", {}, `reference answer: ${problem[3]}`)),
    others.length > 0 && el("label", { class: "facts" }, "the same problem beside it: ", choice(["", ...others.map(groupId)], other ? groupId(other) : "",
      id => { location.hash = change({ with: id, b: "" }); }, { "": "none", ...Object.fromEntries(others.map(g => [groupId(g),
        [shortRun(g.run), g.block.kind === "eval" ? "evaluation" : "step", g.block.step].filter(x => x !== "").join(" ")])) })),
    grid(found, picked, toggle), other && grid(other, picked, toggle));
  const detail = el("section", { id: "detail" });
  put(detail);
  if (!picked.length) return void detail.append(el("p", { class: "quiet" }, "A rollout opens below with a click; a second one opens beside it, with their difference."));
  const shown = await Promise.all(picked.map(fetchTrajectory));
  if (turn !== turns) return;
  detail.append(shown.length > 1 ? pair(shown, picked, query) : trajectory(shown[0], picked[0], query));
}

function grid(found, picked, toggle) {
  const { block, rows } = found, { columns } = block, longest = Math.max(...rows.map(i => columns.tokens[i]), 1);
  const reasons = {}, dropped = rows.filter(i => !columns.kept[i]);
  for (const i of dropped) reasons[text(block, "why", i)] = (reasons[text(block, "why", i)] || 0) + 1;
  const said = block.kind === "eval" ? `${rows.length} rollouts of an evaluation`
    : [`${rows.length - dropped.length} of ${rows.length} kept`, ...Object.entries(reasons).map(([why, n]) => `${n} dropped: ${why.replaceAll("_", " ")}`)].join(" · ");
  return el("section", {}, el("p", { class: "facts" }, el("b", {}, [shortRun(found.run), `step ${block.step}`].filter(Boolean).join(", ")), el("span", {}, said)),
    el("div", { class: "cards" }, rows.map(i => card(block, i, picked.indexOf(idOf(block, i)), longest, toggle))), legend(block, rows));
}
function card(block, i, place, longest, toggle) {
  const { columns } = block, status = text(block, "status", i), kept = columns.kept[i], penalties = columns.penalties[i];
  const length = el("i", { class: "length" });
  length.style.width = columns.tokens[i] / longest * 100 + "%";
  const advantage = columns.advantage[i], condition = text(block, "condition", i);
  return el("button", { class: `card e-${status}${kept || block.kind === "eval" ? "" : " dropped"}${place >= 0 ? " picked" : ""}`, "aria-pressed": place >= 0, onclick: () => toggle(idOf(block, i)) },
    el("span", { class: "row" }, el("b", {}, `#${columns.sample[i]}`), place >= 0 && el("em", {}, "AB"[place]), el("span", { class: "verdict" }, status.replace("_", " "))),
    el("span", { class: "row" }, block.kind === "eval" ? `reward ${number(columns.reward[i], 2)}` : el("span", {}, kept ? "kept" : "dropped", text(block, "why", i) !== "kept" && `: ${text(block, "why", i)}`),
      advantage !== null && el("span", { class: advantage < 0 ? "minus" : "plus", title: "advantage, mean over its sampled tokens" }, signed(advantage))),
    el("span", { class: "row" }, el("span", { class: "calls" }, dots(block, i), !columns.calls[i].trim() && el("small", {}, "no call")), penalties && status === "correct" && penalties[0] > 0
      && el("span", { class: "pen", title: `penalties: total ${penalties[0]}, error ${penalties[1]}, format ${penalties[2]}` }, `p ${number(penalties[0], 2)}`)),
    el("span", { class: "row reply" }, text(block, "answer", i) ? el("span", { title: "the answer that was given" }, `= ${text(block, "answer", i)}`) : el("small", {}, "no answer")),
    el("span", { class: "bar-of" }, length), el("span", { class: "row" }, el("small", {}, `${columns.tokens[i]} tokens`), el("small", {}, `${columns.turns[i]} turns`), condition && el("small", {}, condition)));
}
function legend(block, rows) {
  const statuses = [...new Set(rows.map(i => text(block, "status", i)))], kinds = [...new Set(rows.flatMap(i => outcomes(block, i)))].filter(k => k !== " ");
  const key = keyOf(statuses, kinds, block.kind === "step");
  const { penalties, advantage } = block.columns, ranked = i => text(block, "status", i) === "correct" && penalties[i] && penalties[i][0] > 0;
  add(key, [block.kind === "step" && rows.some(ranked) && el("span", {}, "p: penalty that successes are ranked by"),
    rows.some(i => advantage[i] !== null) && el("span", {}, "±: advantage")]);
  return key;
}
function keyOf(statuses, kinds, step) {
  return el("p", { class: "key" }, statuses.map(s => el("span", {}, el("i", { class: "sq v-" + s }), s.replace("_", " "))), step && el("span", {}, el("i", { class: "sq v-correct dropped" }), "dropped"),
    kinds.map(k => el("span", {}, el("i", { class: look(k) }), "call: " + k.replaceAll("_", " "))));
}

// ---- a trajectory -----------------------------------------------------------------------------------------------

const fetchTrajectory = id => { const [run, kind, step, row] = id.split("."); return ask("trajectory", { run, block: kind + "." + step, row }); };
const missing = words => void put(el("p", { class: "quiet" }, words), el("p", {}, el("a", { href: "#/rollouts" }, "all rollouts")));
function decode(encoded, Kind) { return new Kind(Uint8Array.from(atob(encoded), c => c.charCodeAt(0)).buffer); }

async function single(query, turn) {
  const id = query.get("id") || "", found = parse(id);
  const shown = await fetchTrajectory(id);
  if (turn !== turns) return;
  put(el("nav", { class: "crumbs" }, found && el("a", { href: link("group", { g: [found.block.run, found.block.name, found.block.of[found.place]].join("."), a: id }) }, "its group")), trajectory(shown, id, query));
}
async function two(query, turn) {
  const ids = [query.get("a") || "", query.get("b") || ""], shown = await Promise.all(ids.map(fetchTrajectory));
  if (turn === turns) put(pair(shown, ids, query));
}

function trajectory(shown, id, query, from = 0) {
  const by = query.get("by") || "turns", verdict = shown.verdict, names = [["turns", "turns"], ["mask", "tokens by who wrote them"], ["logprob", "log-prob"], ["advantage", "advantage"], ["version", "policy version"], ["ratio", "ratio"], ["entropy", "entropy"]];
  const has = name => ["turns", "mask"].includes(name) || name in shown.arrays;
  const body = el("div", { class: "body" }), buttons = el("div", { class: "bar modes", role: "tablist" });
  const show = name => {
    const lacks = names.filter(([n]) => !has(n)).map(([n]) => n);
    body.replaceChildren(name === "turns" ? turnsView(shown) : tokensView(shown, has(name) ? name : "mask", from));
    if (lacks.length && name !== "turns") body.append(el("p", { class: "quiet" }, `Not logged for this rollout: ${lacks.join(", ")}.`));
    for (const button of buttons.children) button.setAttribute("aria-selected", button.dataset.by === name);
  };
  for (const [name, label] of names) buttons.append(el("button", { role: "tab", "data-by": name, disabled: !has(name), title: has(name) ? null : "not in the log", onclick: () => { keep("by", name); show(name); } }, label));
  show(has(by) ? by : "turns");
  return el("article", { class: "trajectory" },
    el("h2", {}, `sample ${shown.sample}`, verdict && el("span", { class: "verdict v-text-" + verdict.status }, verdict.status.replace("_", " ")), el("a", { class: "perma", href: link("t", { id, by: by === "turns" ? "" : by }) }, "link")),
    el("p", { class: "facts" }, el("span", {}, `step ${shown.step}`), el("span", {}, shown.kept ? "kept" : "not kept", shown.why !== "kept" && ` (${shown.why})`), el("span", {}, `stopped by ${shown.stop}`), el("span", {}, `${number(shown.seconds, 2)} s`),
      shown.temperature !== null && el("span", {}, `temperature ${shown.temperature}`), shown.condition && el("span", {}, `condition ${shown.condition}`)),
    shown.faults.map(fault => el("p", { class: "fault" }, fault)), shown.fault && failure(shown.fault), buttons, body, scorer(shown));
}
// What failed outside the policy: a line, and the traceback of the first of its kind below it.
function failure(text) {
  const [line, ...rest] = text.split("\n");
  return el("details", { class: "error", open: true }, el("summary", {}, line), rest.length > 0 && el("pre", {}, rest.join("\n")));
}
// The address keeps a choice without drawing the page again.
function keep(name, value) {
  const [page, query] = location.hash.slice(2).split("?"), next = new URLSearchParams(query);
  value === "turns" ? next.delete(name) : next.set(name, value);
  history.replaceState(null, "", "#/" + page + "?" + next);
}

function turnsView(shown) {
  const prompt = shown.segments.filter(s => s.kind === "prompt").map(s => s.text).join(""), long = prompt.length > 700;
  return el("div", {},
    el("details", { class: "block given", open: !long }, el("summary", {}, `prompt, ${shown.prompt_length} tokens`), el("pre", {}, prompt)),
    shown.turns.map((turn, n) => el("section", { class: "turn" }, el("p", { class: "note" }, `turn ${n + 1} · ${turn.end - turn.start} tokens`, turn.reward ? ` · paid ${number(turn.reward)}` : ""), turnText(turn),
      turn.reply && el("div", { class: "block given" }, el("p", { class: "note" }, "reply"), el("pre", {}, turn.reply)))));
}
// The text of a turn, with every call as a block of code and its result below.
function turnText(turn) {
  const parts = [];
  let rest = turn.text;
  (turn.calls || []).forEach((call, k) => {
    const at = call.raw ? rest.indexOf(call.raw) : -1;
    if (at > 0) parts.push(el("pre", { class: "said" }, rest.slice(0, at)));
    if (at >= 0) rest = rest.slice(at + call.raw.length);
    parts.push(callBlock(call, (turn.results || [])[k]));
  });
  if (rest) parts.push(el("pre", { class: "said" }, rest));
  return parts;
}
function callBlock(call, result) {
  const source = call.arguments && Object.keys(call.arguments).length === 1 ? Object.values(call.arguments)[0] : null;
  const words = typeof source === "string" ? source : call.arguments && Object.keys(call.arguments).length ? JSON.stringify(call.arguments, null, 1) : call.raw;
  const kind = result ? result.kind : "not_run", style = kind === "ok" ? "ok" : kind === "not_run" ? "idle" : bad(kind) ? "bad" : "infra";
  return el("div", { class: "block called " + style }, el("p", { class: "note" }, el("i", { class: look(kind) }), call.name || "call", el("b", {}, kind.replaceAll("_", " ")), result && `${number(result.wall_ms || 0, 0)} ms`, call.message), el("pre", {}, python(words)), result && outcome(result));
}
// What came back: printed text as it is, an error folded to its last line.
function outcome(result) {
  const printed = [result.stdout, result.stderr, result.echo].filter(Boolean).join("\n"), last = [result.error_type, result.error_message].filter(Boolean).join(": ");
  const seen = result.shown || result.observation;
  const rest = [result.traceback && el("pre", {}, result.traceback), seen && [el("p", { class: "note" }, "what the policy saw"), el("pre", {}, seen)]];
  return [printed && el("pre", { class: "output" }, printed),
    last || result.traceback ? el("details", { class: "error" }, el("summary", {}, last.trim().split("\n").pop() || result.kind), rest)
      : seen && seen.trim() !== printed.trim() && el("details", {}, el("summary", {}, "what the policy saw"), el("pre", {}, seen))];
}
const WORDS = "and as assert async await break class continue def del elif else except finally for from global if import in is lambda nonlocal not or pass raise return try while with yield True False None match case";
const PYTHON = new RegExp("(#[^\\n]*)|(\"\"\"[^]*?(?:\"\"\"|$)|'''[^]*?(?:'''|$)|\"(?:\\\\.|[^\"\\\\\\n])*\"?|'(?:\\\\.|[^'\\\\\\n])*'?)|\\b(\\d[\\w.]*)|\\b(" + WORDS.replaceAll(" ", "|") + ")\\b", "g");
function python(source) {
  const parts = [];
  let place = 0;
  for (const found of source.matchAll(PYTHON)) {
    parts.push(source.slice(place, found.index), el("span", { class: ["h-note", "h-text", "h-number", "h-word"][found.slice(1).findIndex(Boolean)] }, found[0]));
    place = found.index + found[0].length;
  }
  return [...parts, source.slice(place)];
}

// With `from`, the tokens before it are folded: two rollouts are equal up to there.
function tokensView(shown, by, from = 0) {
  const tokens = decode(shown.arrays.tokens, Int32Array), version = decode(shown.arrays.version, Int32Array);
  const arrays = Object.fromEntries(Object.entries(shown.arrays).filter(([n]) => !["tokens", "version"].includes(n)).map(([n, code]) => [n, decode(code, Float32Array)]));
  const written = [...new Set(version)].filter(v => v >= 0).sort((a, b) => a - b), scale = by === "ratio" ? Math.log(1.2) : by in arrays ? arrays[by].reduce((m, v) => Math.max(m, Math.abs(v)), 1e-9) : 1;
  const readout = el("output", { class: "readout fixed" }, "Point at a token to read its numbers."), box = el("div", { class: "tokens" }), folded = [];
  const change = by === "ratio" ? i => Math.log(arrays.ratio[i]) : i => arrays[by][i];
  const shade = i => by === "logprob" ? 1 - Math.exp(arrays.logprob[i]) : Math.min(1, Math.abs(change(i)) / scale);
  const bare = !Object.keys(shown.pieces).length;
  for (let i = 0; i < tokens.length; i++) {
    const mine = version[i] >= 0, piece = shown.pieces[tokens[i]];
    const node = el("span", { class: mine ? "mine" : "given" }, piece === undefined ? `⟨${tokens[i]}⟩` : piece.replaceAll("\n", "↵\n"));
    node.dataset.i = i;
    if (mine && by === "version") node.style.background = COLORS[written.indexOf(version[i]) % COLORS.length] + "55";
    else if (mine && by !== "mask") {
      node.classList.add(["advantage", "ratio"].includes(by) && change(i) > 0 ? "up" : "down");
      node.style.setProperty("--share", Math.round(shade(i) * 100) + "%");
    }
    if (i < from) folded.push(node);
    else box.append(node);
  }
  if (from) {
    const hidden = el("span", { class: "folded", hidden: true }, folded);
    box.prepend(el("button", { class: "fold", onclick: event => { hidden.hidden = !hidden.hidden; event.target.setAttribute("aria-expanded", !hidden.hidden); }, "aria-expanded": false }, `${from} equal tokens`), hidden);
  }
  box.addEventListener("pointerover", event => {
    const i = Number(event.target.closest("[data-i]")?.dataset.i ?? -1);
    if (i < 0) return;
    const words = [`token ${i}`, `id ${tokens[i]}`];
    if (version[i] < 0) words.push("given, not trained on");
    else words.push(`log-prob ${arrays.logprob[i].toFixed(4)}`, `p ${Math.exp(arrays.logprob[i]).toFixed(4)}`, ...["ratio", "entropy"].filter(n => n in arrays).map(n => `${n} ${arrays[n][i].toFixed(4)}`), ...(arrays.advantage ? [`advantage ${signed(arrays.advantage[i])}`] : []), `parameters of step ${version[i]}`);
    readout.textContent = words.join(" · ");
  });
  const note = { mask: "Marked tokens were sampled from the policy and are trained on; the others were given.", logprob: "The stronger the shade, the less likely the token was when it was sampled.", advantage: "Green: raised; red: lowered; the shade is the size.", version: "A color for each step whose parameters sampled the token.", ratio: "Probability before the update over that when it was sampled. Green: above 1; red: below; the full shade is a factor of 1.2.", entropy: "The stronger the shade, the larger the entropy at the token, in nats, under the parameters before the update." }[by];
  return el("div", {}, el("p", { class: "note" }, note, bare && " The log holds no text of single tokens (it was written by an older version), so ids are shown."), box, readout);
}

function scorer(shown) {
  const verdict = shown.verdict, rows = [];
  const put = (name, value) => value !== null && value !== undefined && value !== "" && rows.push(el("tr", {}, el("th", {}, name), el("td", {}, value)));
  put("reference answer", shown.problem.answer);
  if (verdict) {
    put("answer that was read", verdict.answer === null ? "none" : verdict.answer);
    put("verdict", verdict.status);
    put("reward", number(verdict.reward));
    put("answer blocks", `${verdict.answers}, tags ${verdict.well_formed ? "in order" : "not in order"}`);
    put("calls", `${verdict.tool_errors} of ${verdict.tool_calls} failed`);
    for (const [name, value] of Object.entries(verdict.channels)) put(name, number(value));
    if (verdict.turn_rewards.length) put("reward by turn", verdict.turn_rewards.map(v => number(v)).join(", "));
  } else put("verdict", "not scored: " + shown.why);
  if (verdict && verdict.status === "correct")  // failures are not ranked
    for (const [name, value] of Object.entries(shown.penalties)) put(`penalty, ${name}`, number(value));
  if (shown.paid !== null) put("paid by the environment", number(shown.paid));
  for (const [name, value] of Object.entries(shown.problem.extra)) put(`problem, ${name}`, value);
  return el("details", { class: "scorer", open: true }, el("summary", {}, "what the scorer saw"), el("table", {}, rows));
}

function pair(shown, ids, query) {
  const [a, b] = shown.map(t => decode(t.arrays.tokens, Int32Array)), same = shown.map(t => t.prompt_length);
  let equal = 0;
  while (equal < Math.min(a.length, b.length) && a[equal] === b[equal]) equal++;
  const begun = Math.max(0, equal - Math.max(...same)), texts = shown.map(t => t.segments.filter(s => s.kind !== "prompt").map(s => s.text).join(""));
  const words = equal >= Math.max(a.length, b.length) ? "The two are equal, token by token." : equal < Math.min(...same) ? "Their prompts differ."
    : `The first ${begun} tokens after the prompt are equal.`;
  const [left, right] = difference(...texts);
  return el("div", {}, el("details", { class: "block", open: true }, el("summary", {}, "difference"), el("p", { class: "note" }, words, " ", el("a", { href: link("pair", { a: ids[0], b: ids[1] }) }, "link")),
    el("div", { class: "pair" }, el("pre", { class: "said" }, left), el("pre", { class: "said" }, right))),
    el("div", { class: "pair" }, shown.map((t, i) => trajectory(t, ids[i], query, equal < Math.max(a.length, b.length) ? equal : 0))));
}
// Longest common subsequence of words; of lines where there are too many words; else only the common ends.
function difference(one, two) {
  for (const cut of [/\s+|\w+|[^\w\s]/g, /[^\n]*\n|[^\n]+$/g]) {
    const a = one.match(cut) || [], b = two.match(cut) || [];
    let start = 0, end = 0;
    while (start < a.length && start < b.length && a[start] === b[start]) start++;
    while (end < a.length - start && end < b.length - start && a.at(-1 - end) === b.at(-1 - end)) end++;
    const n = a.length - start - end, m = b.length - start - end;
    if (n * m > 4e6 && cut.source[0] === "\\") continue;
    const wide = m + 1, table = n * m > 4e6 ? null : new Uint16Array((n + 1) * wide), keptA = new Set(), keptB = new Set();
    if (table) {
      for (let i = n - 1; i >= 0; i--) for (let j = m - 1; j >= 0; j--) table[i * wide + j] = a[start + i] === b[start + j] ? table[(i + 1) * wide + j + 1] + 1 : Math.max(table[(i + 1) * wide + j], table[i * wide + j + 1]);
      for (let i = 0, j = 0; i < n && j < m;) {
        if (a[start + i] === b[start + j]) { keptA.add(start + i++); keptB.add(start + j++); }
        else if (table[(i + 1) * wide + j] >= table[i * wide + j + 1]) i++; else j++;
      }
    }
    const draw = (parts, kept, style) => {
      const found = [];
      for (let i = 0; i < parts.length;) {
        const stays = k => k < start || k >= parts.length - end || kept.has(k), here = stays(i);
        let next = i + 1;
        while (next < parts.length && stays(next) === here) next++;
        const words = parts.slice(i, next).join("");
        found.push(here ? words : el("mark", { class: style }, words));
        i = next;
      }
      return found;
    };
    return [draw(a, keptA, "gone"), draw(b, keptB, "new")];
  }
}

// ---- evaluations ------------------------------------------------------------------------------------------------

async function evaluations(query, turn) {
  const found = await ask("evaluations", {});
  if (turn !== turns) return;
  if (!found.rows.length) return missing("These runs kept no rollouts of evaluations.");
  const sources = [...new Set(found.rows.map(row => row.source))], width = main.clientWidth - 4;
  const columns = width < 700 ? 1 : width < 1150 ? 2 : 3, size = Math.floor((width - (columns - 1) * 18) / columns);
  const charts = sources.map(source => {
    const lines = S.runs.map(run => {
      const rows = found.rows.filter(row => row.source === source && row.run === run.place).sort((a, b) => a.step - b.step);
      return rows.length && { x: rows.map(r => r.step), mean: rows.map(r => 100 * r.mean), low: rows.map(r => 100 * r.low), high: rows.map(r => 100 * r.high), step: rows.map(r => r.step), bars: true, shift: 4 * (run.place - (S.runs.length - 1) / 2), color: colorOf(run.label) };
    }).filter(Boolean);
    return chart(source, lines, { width: size, pick: step => { location.hash = link("rollouts", { kind: "eval", step, source: source === "all" ? "" : source }); } });
  });
  const share = value => (100 * value).toFixed(1), gap = value => value === null ? "–" : (value < 0 ? "−" : "+") + Math.abs(100 * value).toFixed(1);
  const name = (run, step) => [shortRun(run), `step ${step}`].filter(Boolean).join(", ");
  put(el("p", { class: "note" }, "Accuracy in percent, mean over problems; bars and ranges are 95% intervals by a bootstrap over problems."), leftOut(blocksOf("eval", "")),
    el("div", { class: "charts", "data-columns": columns }, charts),
    found.differences.length > 0 && el("h2", {}, "Differences on the problems of both"), found.differences.length > 0 && el("div", { class: "wide" }, el("table", {},
      el("tr", {}, ["", "less", "difference", "95%", "problems", "both solve", "only the first", "only the second", "neither"].map(n => el("th", {}, n))),
      found.differences.map(d => el("tr", {}, [name(d.run, d.step), name(d.against_run, d.against_step), gap(d.mean), `${gap(d.low)} to ${gap(d.high)}`, d.problems, d.both, d.first, d.second, d.neither].map(v => el("td", {}, v)))))),
    el("h2", {}, "Every evaluation"), el("div", { class: "wide" }, el("table", {}, el("tr", {}, ["run", "step", "source", "problems", "accuracy", "95%"].map(n => el("th", {}, n))),
      found.rows.map(r => el("tr", {}, [shortRun(r.run) || "–", el("a", { href: link("rollouts", { kind: "eval", run: r.run, step: r.step, source: r.source === "all" ? "" : r.source }) }, r.step), r.source, r.problems, share(r.mean), `${share(r.low)} – ${share(r.high)}`].map(v => el("td", {}, v)))))));
}

// ---- frame ------------------------------------------------------------------------------------------------------

const PAGES = { curves, rollouts, group, t: single, pair: two, evals: evaluations };
let turns = 0;

async function draw() {
  const [page, words] = (location.hash.slice(2) || "curves").split("?"), turn = ++turns;
  S.page = PAGES[page] ? page : "curves";
  S.previous = S.next = null;
  header();
  main.replaceChildren();
  try {
    await PAGES[S.page](new URLSearchParams(words || ""), turn);
  } catch (error) {
    if (turn === turns) missing(String(error.message || error));
  }
  document.body.dataset.ready = location.hash;
}

function header() {
  const here = { group: "rollouts", t: "rollouts", pair: "rollouts" }[S.page] || S.page;
  const tab = (page, label) => el("a", { href: "#/" + page, class: here === page ? "on" : "", "aria-current": here === page && "page" }, label);
  const held = S.runs.flatMap(run => [...run.blocks.values()]).reduce((sum, block) => sum + block.count, 0), steps = S.runs.map(run => run.metrics.steps.at(-1) ?? 0);
  top.replaceChildren(el("b", { class: "brand" }, "grpo-roc view"), el("nav", {}, tab("curves", "Curves"), tab("rollouts", "Rollouts"), tab("evals", "Evaluations")),
    el("span", { class: "runs" }, S.runs.map(run => el("span", { title: run.name }, S.runs.length > 1 && dot(colorOf(run.label)), S.runs.length > 1 ? shortRun(run.place) : run.name))),
    el("span", { class: "live" }, S.broken || `step ${Math.max(0, ...steps)} · ${held.toLocaleString("en")} rollouts` + (DATA ? "" : " · live")),
    el("button", { class: "small", onclick: theme, title: "dark or light (d)" }, "◐"), el("button", { class: "small", onclick: help, title: "keys (?)" }, "?"));
}
function theme() {
  const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("grpo-roc-theme", root.dataset.theme); } catch { /* a page from a file may have no storage */ }
}
function help() {
  const box = el("dialog", {}, el("h2", {}, "Keys"), el("table", {}, [["1 2 3", "curves, rollouts, evaluations"], ["/", "search in text"], ["j k", "next and previous group, or row of a list"], ["Tab, Enter", "move, open"], ["← →", "along a curve"],
    ["d", "dark or light"], ["Esc", "back"], ["?", "this"]].map(([keys, what]) => el("tr", {}, el("th", {}, keys), el("td", {}, what)))), el("form", { method: "dialog" }, el("button", { onclick: event => { event.preventDefault(); box.close(); } }, "close")));
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
}
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || document.querySelector("dialog[open]")) return;
  const pages = { 1: "#/curves", 2: "#/rollouts", 3: "#/evals" };
  if (pages[event.key]) location.hash = pages[event.key];
  else if (event.key === "j" && S.next) location.hash = S.next;
  else if (event.key === "k" && S.previous) location.hash = S.previous;
  else if (event.key === "j" && S.page === "rollouts" && !document.activeElement.closest(".list")) document.querySelector(".list a")?.focus();
  else if (event.key === "d") theme();
  else if (event.key === "?") help();
  else if (event.key === "Escape") history.back();
  else if (event.key === "/") {
    if (S.page !== "rollouts") location.hash = "#/rollouts?bar=open";
    setTimeout(() => { const bar = document.querySelector(".filters"); if (bar) bar.open = true; document.querySelector("input[name=text]")?.focus(); }, 50);
  } else return;
  event.preventDefault();
});
async function follow() {
  if (!document.hidden) {
    const before = S.broken;
    let changed = false;
    try {
      changed = await refresh();
      S.broken = "";
    } catch (error) { S.broken = "no answer; the server ended, or the run is gone"; }
    if (changed && ["curves", "rollouts"].includes(S.page) && !/^(INPUT|SELECT)$/.test(document.activeElement.tagName)) { S.keep = true; await draw(); }
    else if (changed || before !== S.broken) header();
  }
  setTimeout(follow, 2000);
}
let resized;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => { S.keep = true; draw(); }, 150); });
addEventListener("hashchange", draw);
(async () => {
  try { const kept = localStorage.getItem("grpo-roc-theme"); if (kept) document.documentElement.dataset.theme = kept; } catch { /* no storage */ }
  if (DATA && DATA.start && !location.hash) history.replaceState(null, "", DATA.start);
  try { await refresh(); } catch (error) { S.broken = String(error.message || error); }
  await draw();
  document.body.dataset.opened = Math.round(performance.now());
  if (!DATA) setTimeout(follow, 2000);
})();

})();
