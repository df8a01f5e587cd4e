// The page: what a run, or several, left behind. Everything that comes from the data becomes text of a node, never markup.

let { runs, compared } = JSON.parse(document.getElementById("data").textContent);
const several = () => runs.length > 1;
const colourOf = (k) => `run${k % 8}`;

// --- switches, which the address keeps --------------------------------------------------------------------------------

const DEFAULTS = { x: "steps", y: "auto", smooth: "0.35", theme: "auto", zoom: "", show: "all", score: "", prompt: "0", rollout: "-1", settings: "changed", hide: "" };
const state = { ...DEFAULTS };

function readAddress() {
  Object.assign(state, DEFAULTS);
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) if (name in DEFAULTS) state[name] = value;
}

function change(values, redraw = update) {
  Object.assign(state, values);
  const kept = Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]);
  const address = kept.length ? `#${new URLSearchParams(kept)}` : "#";
  try { history.replaceState(null, "", address); } catch { location.hash = address; }
  redraw();
}

// A row of buttons of which one is pressed.
function choice(name, options, redraw) {
  const buttons = options.map(([value, label, title]) => element("button", {
    type: "button", title, "data-switch": `${name}=${value}`, "aria-pressed": String(state[name] === value),
    onclick: () => change({ [name]: value, ...(name === "x" ? { zoom: "" } : {}) }, redraw),
  }, label));
  return element("span", { class: "choice", role: "group", "aria-label": name }, buttons);
}

// --- the horizontal axis ----------------------------------------------------------------------------------------------

// Steps in the unit that was chosen. Tokens and seconds are known at some steps; what lies between is interpolated.
function unitOf(run) {
  if (state.x === "steps") return (step) => step;
  const column = run.axis[state.x === "tokens" ? "tokens" : "seconds"];
  const known = run.axis.step.map((step, i) => [step, column[i]]).filter(([, value]) => value !== null);
  if (known.length && known[0][0] > 0) known.unshift([0, 0]);
  const [xs, ys] = [known.map(([step]) => step), known.map(([, value]) => value)];
  return (step) => interpolate(xs, ys, step);
}

const knows = (column) => runs.every((run) => run.axis[column].some((value) => value !== null));

function timeUnit(span) {
  return span < 180 ? [1, "s"] : span < 7200 ? [60, "min"] : [3600, "h"];
}

function tickLabels(domain, count) {
  const [size, name] = state.x === "time" ? timeUnit(domain[1]) : [1, state.x === "tokens" ? "tokens" : "steps"];
  const found = ticks(domain[0] / size, domain[1] / size, count, false);
  return found.map((value, i) => ({ at: value * size, text: shown(value) + (i === found.length - 1 ? ` ${name}` : "") }));
}

function place(x) {
  if (state.x === "steps") return `step ${shown(Math.round(x))}`;
  if (state.x === "tokens") return `${shown(x)} tokens`;
  const [size, name] = timeUnit(x);
  return `${shown(+(x / size).toPrecision(3))} ${name}`;
}

function fullDomain() {
  const ends = visible().flatMap(({ run, unit }) => [...run.x.map((steps) => steps.at(-1)), run.step].filter((step) => step !== undefined).map(unit));
  return [0, Math.max(...ends, state.x === "steps" ? 1 : 1e-9)];
}

function domain() {
  const zoom = state.zoom.split("..").map(Number);
  return zoom.length === 2 && zoom[1] > zoom[0] ? zoom : fullDomain();
}

function visible() {
  const hidden = new Set(state.hide.split(",").filter(Boolean));
  const all = runs.map((run, k) => ({ run, k, unit: unitOf(run) }));
  const left = all.filter(({ k }) => !hidden.has(String(k)));
  return left.length ? left : all;
}

const axisSettings = () => ({ named: !several(), domain: domain(), scale: state.y, smooth: Number(state.smooth), tick: tickLabels, unit: place });

// --- the top ----------------------------------------------------------------------------------------------------------

const STATES = { running: "running", finished: "finished", stopped: "stopped", unknown: "" };

function silence(run) {
  const seconds = Date.now() / 1000 - run.written;
  return run.state === "running" && seconds > 900 ? `no news for ${duration(seconds)}` : "";
}

function top_() {
  const theme = choice("theme", [["auto", "auto"], ["light", "light"], ["dark", "dark"]]);
  if (several()) {
    return element("header", {}, element("div", { class: "title" }, element("h1", {}, `${runs.length} runs compared`), theme), runsTable());
  }
  const run = runs[0];
  const model = (run.about.find(([name]) => name === "model") || [])[1];
  return element("header", {},
    element("div", { class: "title" },
      element("h1", {}, run.name),
      element("span", { class: `state ${run.state}` }, STATES[run.state], silence(run) && ` · ${silence(run)}`),
      element("span", { class: "dim" }, [run.script, model, `written ${when(run.written)}`].filter(Boolean).join(" · ")),
      theme),
    element("div", { class: "figures" }, keyFigures(run).map(({ name, before, after }) =>
      element("div", { class: "figure" }, element("span", { class: "dim" }, name), element("strong", {}, shown(after)),
        before === undefined ? null : element("span", { class: "from" }, `from ${shown(before)}`))),
      element("dl", { class: "facts" }, facts(run).map(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]))));
}

// What was evaluated, before and after, in the order of the frames; without evaluations, what was trained.
function keyFigures(run, most = 4) {
  const found = [];
  for (const frame of run.frames) {
    const name = `eval_${frame.name}`;
    if (!frame.machine && name in run.after) found.push({ name: frame.name, before: run.before[name], after: run.after[name] });
  }
  if (!found.length) {
    for (const curve of run.curves) {
      const machine = run.frames.find((frame) => frame.name === curve.frame)?.machine;
      if (!machine) found.push({ name: curve.frame, before: curve.y[0], after: curve.y.at(-1) });
    }
  }
  return found.slice(0, most);
}

function facts(run) {
  const speed = run.seconds && run.tokens ? `${shown(run.tokens / run.seconds)} / s` : null;
  const found = [
    ["steps", run.steps && run.steps !== run.step ? `${shown(run.step)} of ${shown(run.steps)}` : shown(run.step)],
    ["tokens", run.tokens ? `${shown(run.tokens)}${speed ? `, ${speed}` : ""}` : null],
    ["time", run.seconds ? duration(run.seconds) : null],
    ["left", run.state === "running" && run.steps > run.step && run.step && run.seconds ? `about ${duration(((run.steps - run.step) * run.seconds) / run.step)}` : null],
    ["memory", run.memory?.peak ? `${gib(run.memory.peak)} at most` : null],
    ["best", run.best?.step ? `${run.best.metric.replace("eval_", "")} ${shown(run.best.value)}, step ${shown(run.best.step)}` : null],
  ];
  return found.filter(([, value]) => value);
}

const gib = (value) => (value >= 1 ? `${shown(+value.toPrecision(3))} GiB` : `${shown(+(value * 1024).toPrecision(3))} MiB`);
const when = (seconds) => new Date(seconds * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });

function runsTable() {
  const names = [...new Set(runs.flatMap((run) => keyFigures(run, 6).map((figure) => figure.name)))].slice(0, 7);
  const head = ["run", ...names, "steps", "tokens", "time"].map((name, i) => element("th", { class: i ? "number" : "" }, name));
  const rows = runs.map((run, k) => {
    const figures = Object.fromEntries(keyFigures(run, 99).map((figure) => [figure.name, figure]));
    return element("tr", {},
      element("td", {}, runButton(run, k), element("span", { class: "dim" }, ` ${["finished", "unknown"].includes(run.state) ? "" : run.state}`)),
      names.map((name) => element("td", { class: "number" }, figures[name] ? shown(figures[name].after) : "–")),
      element("td", { class: "number" }, shown(run.step)), element("td", { class: "number" }, shown(run.tokens)), element("td", { class: "number" }, duration(run.seconds)));
  });
  return element("div", { class: "wide" }, element("table", { class: "runs" }, element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows)));
}

// The name of a run in its colour; to press it hides the run's curves, or shows them again.
function runButton(run, k) {
  const hidden = new Set(state.hide.split(",").filter(Boolean));
  const shows = !hidden.delete(String(k));
  if (shows) hidden.add(String(k));
  return element("button", { type: "button", class: "run", style: `--colour: var(--${colourOf(k)})`, title: `show or hide ${run.name}`, "aria-pressed": String(shows), onclick: () => change({ hide: [...hidden].join(",") }) }, element("i", {}), run.name);
}

function switches() {
  const smooth = element("input", {
    type: "range", min: "0", max: "1", step: "0.05", value: state.smooth, "aria-label": "smoothing",
    oninput: (event) => change({ smooth: event.target.value }, () => { amount.textContent = state.smooth; drawCharts(); }),
  });
  const amount = element("output", {}, state.smooth);
  const axes = [["steps", "steps"], ["tokens", "tokens"], ["time", "hours"]].filter(([value]) => value === "steps" || knows(value === "tokens" ? "tokens" : "seconds"));
  return element("nav", { class: "switches" },
    choice("x", axes), choice("y", [["auto", "auto"], ["linear", "linear"], ["log", "log"]]),
    element("label", {}, "smoothing", smooth, amount),
    state.zoom ? element("button", { type: "button", class: "plain", onclick: () => change({ zoom: "" }) }, "whole run") : element("span", { class: "hint" }, "drag in a frame to look closer"),
    several() ? element("span", { class: "chips" }, runs.map((run, k) => runButton(run, k))) : element("span", { class: "anchors" }, sectionLinks()));
}

// --- sections ---------------------------------------------------------------------------------------------------------

function section(id, title, aside, ...content) {
  return element("section", { id }, element("h2", {}, title, aside ? element("small", {}, aside) : null), content);
}

function sectionLinks() {
  return [...SECTIONS].filter(([, , has]) => has()).map(([id, name]) => element("button", { type: "button", class: "plain", onclick: () => document.getElementById(id)?.scrollIntoView({ behavior: "smooth" }) }, name));
}

let charts = [];
const listeners = {
  point: (x, from) => charts.forEach((chart) => chart.show(x, chart === from)),
  zoom: (range) => change({ zoom: range ? range.map((end) => end.toPrecision(6)).join("..") : "" }),
};

function drawCharts() {
  charts.forEach((chart) => chart.draw());
}

function curves() {
  const frames = new Map();
  for (const { run } of visible()) for (const frame of run.frames) frames.set(frame.name, { ...frame, log: frame.log || frames.get(frame.name)?.log });
  const all = [...frames.values()];
  const lead = all.filter((frame) => !frame.machine).slice(0, 3);
  const rest = all.filter((frame) => !lead.includes(frame));
  const more = [...rest.filter((frame) => !frame.machine), ...rest.filter((frame) => frame.machine)];
  const make = (height) => (frame) => {
    const chart = new Chart(frame, seriesOf(frame.name), several() ? [] : troubles(), axisSettings, height, listeners);
    charts.push(chart);
    return chart.node;
  };
  const constant = Object.entries(several() ? {} : runs[0].constant);
  return element("section", { id: "curves" },
    element("div", { class: "frames lead" }, lead.map(make(210))),
    element("div", { class: "frames" }, more.map(make(132))),
    constant.length ? element("p", { class: "dim constant" }, "the same throughout: ", constant.map(([name, value]) => element("span", {}, `${name} ${shown(value)}`))) : null);
}

function seriesOf(frame) {
  const found = [];
  for (const { run, k, unit } of visible()) {
    // Side by side, one curve of a kind is enough: of memory its peak, of several temperatures the first.
    const dropped = (name) => several() && (name === "memory_gib" || /_t[\d.]+$/.test(name));
    const mine = run.curves.filter((curve) => curve.frame === frame && !dropped(curve.name));
    const both = mine.some((curve) => curve.eval) && mine.some((curve) => !curve.eval);
    let evaluations = 0;
    for (const curve of mine) {
      const hot = /_t([\d.]+)$/.exec(curve.name);
      const kind = curve.eval ? `eval${hot ? ` at ${hot[1]}` : ""}` : KINDS[curve.name] ?? (curve.machine ? "" : "train");
      const single = curve.eval || curve.name === "peak_memory_gib" ? ["eval", "eval2", "eval3"][evaluations++ % 3] : "train";
      found.push({
        ...curve, exact: EXACT.includes(frame), title: (several() ? `${run.name}: ` : "") + curve.name + (curve.missing ? ` (${curve.missing} values were no finite numbers)` : ""),
        label: several() ? run.name + (both && curve.eval ? " eval" : "") + (hot ? ` at ${hot[1]}` : "") : kind,
        colour: several() ? colourOf(k) : single, x: run.x[curve.x].map(unit),
      });
    }
  }
  return found;
}

const KINDS = { memory_gib: "now", peak_memory_gib: "peak" };
const EXACT = ["learning_rate", "memory_gib", "bad_steps"];  // frames of which nothing is noise
const TROUBLE = ["memory", "spike", "bad", "not saved"];

function troubles() {
  const unit = unitOf(runs[0]);
  return runs[0].events.filter((event) => [...TROUBLE, "resumed"].includes(event.kind)).slice(0, 60)
    .map((event) => ({ x: unit(event.step), kind: event.kind === "resumed" ? "resumed" : "trouble", text: `${event.kind} at step ${event.step}: ${event.text}` }));
}

// --- what happened ----------------------------------------------------------------------------------------------------

const LANES = [["run", ["started", "resumed", "stopped", "finished"]], ["saved", ["saved"]], ["best", ["best"]], ["trouble", TROUBLE]];
const GLYPHS = {
  started: "M-3.5 -4.5 L4.5 0 L-3.5 4.5Z", resumed: "M-3.5 -4.5 L4.5 0 L-3.5 4.5Z", stopped: "M-4 -4H4V4H-4Z", finished: "M0 -5A5 5 0 1 1 -.01 -5Z",
  saved: "M-3 -3H3V3H-3Z", best: "M0 -5.5 L1.6 -1.7 L5.5 -1.5 L2.5 1 L3.5 5 L0 2.8 L-3.5 5 L-2.5 1 L-5.5 -1.5 L-1.6 -1.7Z",
};

// A strip under the curves' axis: a lane for each kind of thing that happened.
class Timeline {
  constructor() {
    this.svg = element("svg:svg", { class: "timeline", role: "img", "aria-label": "what happened, over the run" });
    this.text = element("span", { class: "dim" });
    this.run = runs[0];
  }

  draw() {
    const width = Math.max(260, this.svg.getBoundingClientRect().width || 600);
    const [from, to] = domain(), unit = unitOf(this.run), left = 60, right = 12;
    const evaluated = [...new Set(this.run.curves.filter((curve) => curve.eval).flatMap((curve) => this.run.x[curve.x]))];
    const lanes = LANES.map(([name, kinds]) => [name, this.run.events.filter((event) => kinds.includes(event.kind))]).filter(([, events]) => events.length);
    if (evaluated.length) lanes.splice(lanes.length && lanes[0][0] === "run" ? 1 : 0, 0, ["evaluated", evaluated.map((step) => ({ kind: "evaluated", step, text: "" }))]);
    const X = (x) => left + ((x - from) / (to - from || 1)) * (width - left - right);
    const drawn = [];
    lanes.forEach(([name, events], row) => {
      const y = 14 + 20 * row;
      drawn.push(element("svg:text", { class: "tick", x: 0, y: y + 4 }, name), element("svg:line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y }));
      for (const event of events) {
        const x = unit(event.step);
        if (x < from || x > to) continue;
        const text = describeEvent(event);
        const attributes = { class: `glyph ${TROUBLE.includes(event.kind) ? "trouble" : event.kind.replace(" ", "-")}`, transform: `translate(${X(x).toFixed(1)} ${y})`, onpointerenter: () => { this.text.textContent = text; } };
        drawn.push(element("svg:g", attributes, element("svg:path", { d: GLYPHS[event.kind] || (event.kind === "evaluated" ? "M0 -3.5V3.5" : "M0 -5 L5 4 L-5 4Z") }), element("svg:title", {}, text)));
      }
    });
    const height = 10 + 20 * lanes.length;
    this.svg.setAttribute("height", height);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.cursor = element("svg:line", { class: "cursor-line", y1: 2, y2: height - 2, visibility: "hidden" });
    this.svg.replaceChildren(...drawn, this.cursor);
    this.X = X;
  }

  show(x) {
    if (!this.cursor) return;
    this.cursor.setAttribute("visibility", x === null ? "hidden" : "visible");
    if (x !== null) for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, this.X(x));
  }
}

const describeEvent = (event) => `step ${shown(event.step)} · ${event.kind}${event.text ? ` · ${event.text}` : ""}${event.time ? ` · ${when(event.time)}` : ""}`;

function happened() {
  const timeline = new Timeline();
  charts.push(timeline);
  const rows = runs[0].events.map((event) => element("tr", { class: TROUBLE.includes(event.kind) ? "trouble" : "" },
    element("td", { class: "number" }, shown(event.step)), element("td", {}, event.kind), element("td", {}, event.text || ""), element("td", { class: "dim" }, event.time ? when(event.time) : "")));
  const trouble = runs[0].events.filter((event) => TROUBLE.includes(event.kind)).length;
  const { happened: count } = runs[0];
  const summary = `${count > rows.length ? `${rows.length} of ${count}` : rows.length} entries${trouble ? `, ${trouble} of trouble` : ""}`;
  return section("happened", "What happened", null, timeline.svg, element("details", {}, element("summary", {}, summary, timeline.text),
    element("div", { class: "scroll" }, element("table", {}, element("tbody", {}, rows)))));
}

// --- samples ----------------------------------------------------------------------------------------------------------

// The words of `after`, each with whether it is new since `before`.
function changedWords(before, after) {
  const words = (text) => text.match(/\s+|\p{L}+|\p{N}+|[^\s\p{L}\p{N}]/gu) || [];
  const [a, b] = [words(before), words(after)];
  if (a.length * b.length > 600000) return b.map((word) => [word, false]);
  const width = b.length + 1, table = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      table[i * width + j] = a[i] === b[j] ? table[(i + 1) * width + j + 1] + 1 : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
    }
  }
  const found = [];
  for (let i = 0, j = 0; j < b.length;) {
    if (i < a.length && a[i] === b[j]) { found.push([b[j++], false]); i++; }
    else if (i < a.length && table[(i + 1) * width + j] >= table[i * width + j + 1]) i++;
    else found.push([b[j++], true]);
  }
  return found;
}

function marked(before, after) {
  if (before === null || before === undefined) return after;
  const parts = [];
  for (const [word, fresh] of changedWords(before, after)) {
    if (parts.length && (parts.at(-1)[1] === fresh || !word.trim())) parts.at(-1)[0] += word; else parts.push([word, fresh]);
  }
  return parts.map(([text, fresh]) => (fresh ? element("mark", {}, text) : text));
}

// The texts of a prompt over the evaluations, with 0 (as before) spelled out.
function texts(prompt) {
  let before = null;
  return prompt.texts.map((text) => { if (text !== 0) before = text ?? before; return text === null ? null : before; });
}

function samplesOf(run) {
  const { samples } = run;
  const score = samples.names.includes(state.score) ? state.score : samples.names.find((name) => name !== "reward") || samples.names[0];
  const values = samples.prompts.flatMap((prompt) => prompt.scores[score] || []).filter((value) => value !== null && value !== undefined);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const level = (value) => (value === null || value === undefined ? null : high > low ? (value - low) / (high - low) : value > 0 ? 1 : 0);
  return { samples, score, level };
}

function square(level, title) {
  return element("i", { class: level === null ? "square none" : "square", style: level === null ? null : `--level: ${Math.round(level * 100)}%`, title });
}

function samplesSection() {
  return several() ? samplesSideBySide() : samplesOverTime();
}

function browser(id, title, aside, controls, rows, filters, detail) {
  const filter = filters.find(([name]) => name === state.show) || filters[0];
  const kept = rows.filter(filter[2]);
  const open = kept.find((row) => String(row.number) === state.prompt) || kept[0];
  const list = kept.map((row) => element("button", { type: "button", class: "prompt", "aria-pressed": String(row === open), onclick: () => change({ prompt: String(row.number) }, redrawSamples) },
    element("span", { class: "squares" }, row.squares), element("span", { class: "text" }, row.prompt.prompt)));
  const chosen = filters.map(([name, label, test]) => [name, `${label} ${rows.filter(test).length}`]);
  if (filter[0] !== state.show) state.show = filter[0];
  return section(id, title, aside, element("div", { class: "controls" }, choice("show", chosen, redrawSamples), controls),
    element("div", { class: "browser" }, element("div", { class: "list" }, list), element("div", { class: "detail" }, open ? detail(open) : element("p", { class: "dim" }, "none"))));
}

function redrawSamples() {
  const old = document.getElementById("samples");
  const scrolled = old.querySelector(".list").scrollTop;
  old.replaceWith(samplesSection());
  document.querySelector("#samples .list").scrollTop = scrolled;
}

function samplesOverTime() {
  const { samples, score, level } = samplesOf(runs[0]);
  const rows = samples.prompts.map((prompt, number) => {
    const all = texts(prompt), scores = (prompt.scores[score] || []).map(level);
    return { prompt, number, all, scores, squares: scores.map((value, i) => square(value, `step ${samples.steps[i]}: ${shown(prompt.scores[score][i])}`)) };
  });
  const [first, last] = [(row) => row.scores[0] ?? 0, (row) => row.scores.at(-1) ?? 0];
  const filters = [["all", "all", () => true], ["changed", "changed", (row) => new Set(row.all.filter((text) => text !== null)).size > 1]];
  if (score) filters.push(["better", "better", (row) => last(row) > first(row)], ["worse", "worse", (row) => last(row) < first(row)], ["low", "low at the end", (row) => last(row) < 0.5]);
  const scoreChoice = samples.names.length > 1 ? choice("score", samples.names.map((name) => [name, name]), redrawSamples) : null;
  if (score && samples.names.length > 1) state.score = score;
  const detail = (row) => {
    const parts = [element("p", { class: "asked" }, row.prompt.prompt, temperature(row.prompt))];
    let before = null, since = null;
    row.all.forEach((text, i) => {
      const again = text !== null && text === before;
      if (again && i < row.all.length - 1) { since ??= samples.steps[i]; return; }
      since = null;
      parts.push(element("div", { class: "answer" },
        element("div", { class: "dim" }, `step ${shown(samples.steps[i])}`, scoresAt(row.prompt, i), again ? element("span", {}, "unchanged") : null),
        element("p", {}, text === null ? "–" : marked(before, text))));
      before = text ?? before;
    });
    return parts;
  };
  const aside = samples.of > samples.prompts.length ? `the first ${samples.prompts.length} of ${samples.of} prompts` : `${samples.of} prompts, at ${samples.steps.length} evaluations; what is new is marked`;
  return browser("samples", "Samples", aside, scoreChoice, rows, filters, detail);
}

const temperature = (prompt) => (prompt.temperature ? element("span", { class: "dim" }, ` at temperature ${prompt.temperature}`) : null);
const scoresAt = (prompt, i) => Object.entries(prompt.scores).map(([name, values]) => element("span", {}, `${name} ${shown(values[i])}`));

function samplesSideBySide() {
  const sides = runs.map((run, k) => ({ run, k, ...samplesOf(run) }));
  const key = (prompt) => JSON.stringify([prompt.prompt, prompt.temperature]);
  const tables = sides.map(({ samples }) => new Map(samples.prompts.map((prompt) => [key(prompt), prompt])));
  const shared = sides[0].samples.prompts.filter((prompt) => tables.every((table) => table.has(key(prompt))));
  const { score } = sides[0];
  const rows = shared.map((prompt, number) => {
    const mine = tables.map((table) => table.get(key(prompt)));
    const scores = mine.map((found, k) => sides[k].level((found.scores[score] || []).at(-1)));
    return { prompt, number, mine, scores, finals: mine.map((found) => texts(found).at(-1)), squares: scores.map((value, k) => square(value, runs[k].name)) };
  });
  const filters = [["all", "all", () => true], ["differ", "differ", (row) => new Set(row.finals).size > 1]];
  if (score) {
    filters.push(["first", `better in ${runs[0].name}`, (row) => row.scores.slice(1).some((value) => value < row.scores[0])]);
    filters.push(["others", several() && runs.length === 2 ? `better in ${runs[1].name}` : "better in another", (row) => row.scores.slice(1).some((value) => value > row.scores[0])]);
  }
  const detail = (row) => [element("p", { class: "asked" }, row.prompt.prompt, temperature(row.prompt)),
    element("div", { class: "sides" }, row.finals.map((text, k) => element("div", { class: "answer", style: `--colour: var(--${colourOf(k)})` },
      element("div", { class: "dim" }, element("b", {}, runs[k].name), scoresAt(row.mine[k], row.mine[k].texts.length - 1)), element("p", {}, k ? marked(row.finals[0], text ?? "–") : text ?? "–"))))];
  return browser("samples", "Samples side by side", `${shared.length} prompts that all runs were given, at their last evaluations; marked: other than in ${runs[0].name}`, null, rows, filters, detail);
}

// --- completions of GRPO ----------------------------------------------------------------------------------------------

function completionsSection() {
  const { completions } = runs[0];
  const at = Math.min(completions.length - 1, state.rollout === "-1" ? completions.length - 1 : Number(state.rollout));
  const rollout = completions[at];
  const all = completions.flatMap((found) => found.rewards);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const redraw = () => { const old = document.getElementById("completions"); old.replaceWith(completionsSection()); };
  const go = (k) => change({ rollout: String(Math.min(completions.length - 1, Math.max(0, k))) }, redraw);
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / (values.length || 1);
  const groups = rollout.groups.map((group) => element("div", { class: "group" },
    element("p", { class: "asked" }, group.prompt),
    group.rows.map((row) => element("div", { class: "completion", title: Object.entries(row.rewards).map(([name, value]) => `${name} ${shown(value)}`).join("\n") },
      element("span", { class: "reward" }, shown(row.reward), element("i", { style: `--level: ${Math.round((100 * ((row.reward ?? low) - low)) / (high - low || 1))}%` })),
      element("p", {}, row.text, row.cut ? element("span", { class: "cut" }, "cut") : null),
      element("span", { class: "advantage" }, row.advantage ? `${row.advantage > 0 ? "+" : "−"}${Math.abs(row.advantage).toFixed(2)}` : "0")))));
  return section("completions", "Completions and their rewards", `${completions.length} of the rollouts; three of a rollout's groups: the first, and those whose rewards differ most`,
    element("div", { class: "controls" },
      element("button", { type: "button", class: "plain", onclick: () => go(at - 1) }, "‹"), rewardMap(completions, at, low, high, go), element("button", { type: "button", class: "plain", onclick: () => go(at + 1) }, "›"),
      element("span", {}, element("b", {}, `step ${shown(rollout.step)}`), ` · mean reward ${shown(mean(rollout.rewards))} of ${rollout.count} completions`)),
    element("div", { class: "groups" }, groups));
}

// How the rewards of each rollout are spread: a column of cells each, the darker the more completions.
function rewardMap(completions, at, low, high, go) {
  const bins = 12, cell = 5, wide = Math.max(5, Math.min(16, Math.floor(420 / completions.length)));
  const drawn = completions.map((rollout, k) => {
    const counts = new Array(bins).fill(0);
    for (const reward of rollout.rewards) counts[Math.min(bins - 1, Math.floor(((reward - low) / (high - low || 1)) * bins))]++;
    const most = Math.max(...counts, 1);
    return element("svg:g", { class: k === at ? "column current" : "column", onclick: () => go(k) }, element("svg:title", {}, `step ${rollout.step}`),
      element("svg:rect", { class: "back", x: k * wide, y: 0, width: wide, height: bins * cell }),
      counts.map((count, bin) => count ? element("svg:rect", { x: k * wide + 0.5, y: (bins - 1 - bin) * cell + 0.5, width: wide - 1, height: cell - 1, "fill-opacity": (0.15 + 0.85 * (count / most)).toFixed(2) }) : null));
  });
  return element("svg:svg", { class: "map", width: completions.length * wide, height: bins * cell, role: "img", "aria-label": `rewards from ${shown(low)} to ${shown(high)}, by rollout` }, drawn);
}

// --- a suite of prompts that are tested -------------------------------------------------------------------------------

function regressionSection() {
  const evaluations = runs[0].regression, last = evaluations.at(-1), first = evaluations[0];
  const rate = (group) => (group && group.total ? group.passed / group.total : null);
  const rows = Object.entries(last.groups).map(([name, group]) => element("tr", {},
    element("td", {}, name), element("td", { class: "number" }, `${shown(group.passed)} of ${shown(group.total)}`), element("td", { class: "number" }, percent(rate(group))),
    element("td", { class: "number dim" }, evaluations.length > 1 ? `from ${percent(rate(first.groups[name]))}` : ""),
    element("td", {}, element("span", { class: "squares" }, evaluations.slice(-24).map((found) => square(rate(found.groups[name]), `step ${found.step}: ${percent(rate(found.groups[name]))}`))))));
  return section("regression", "Regression suite", `step ${shown(last.step)}`, element("div", { class: "columns" },
    element("table", {}, element("tbody", {}, rows)),
    last.turned.length ? element("div", {}, element("h3", {}, "turned since the time before"), element("ul", { class: "lines" }, last.turned.map((line) => element("li", {}, line)))) : null));
}

const percent = (share) => (share === null || share === undefined ? "–" : `${trimmed((100 * share).toPrecision(3))} %`);

// --- data, memory, settings -------------------------------------------------------------------------------------------

function dataSection() {
  const { data } = runs[0];
  const table = (sources, title) => sources && sources.length ? [element("thead", {}, element("tr", {}, [title, "format", "rows", "used", "tokens", "trained", "share"].map((name, i) => element("th", { class: i > 1 ? "number" : "" }, name)))),
    element("tbody", {}, sources.map((source) => [element("tr", {}, element("td", { title: source.path }, source.source), element("td", { class: "dim" }, source.format),
      [source.rows, source.examples, source.tokens].map((count) => element("td", { class: "number" }, shown(count))),
      element("td", { class: "number" }, source.trained_tokens === undefined ? "–" : percent(source.trained_tokens / Math.max(1, source.tokens))), element("td", { class: "number" }, percent(source.share))),
      Object.entries(source.dropped || {}).map(([reason, found]) => element("tr", { class: "trouble" }, element("td", { colspan: 7 }, `left out: ${shown(found.count)}, ${reason} (${(found.first || []).join(", ")})`)))]))] : null;
  const { lengths, packing, plan } = data;
  const most = lengths ? Math.max(...lengths.histogram.map(([, , count]) => count)) : 1;
  const bars = lengths && lengths.histogram.map(([low, high, count]) => element("div", { class: "bar" }, element("span", { class: "number" }, low === high ? shown(low) : `${shown(low)}–${shown(high)}`), element("i", { style: `--level: ${(100 * count) / most}%` }), element("span", { class: "number dim" }, shown(count))));
  const example = (data.marked || []).map(({ side, parts }) => element("div", { class: "example" }, side ? element("h3", {}, side) : null, element("pre", {}, parts.map(([text, trained]) => (trained ? element("mark", {}, text) : text)))));
  const rest = [
    plan && `${shown(plan.steps)} steps of ${shown(plan.examples_per_step)} ${data.batched_as}s, about ${shown(plan.tokens_per_step)} tokens each`,
    plan && plan.steps_per_epoch && `an epoch is ${shown(plan.steps_per_epoch)} steps`,
    packing && `packed into ${shown(packing.rows)} rows of up to ${shown(packing.max_length)} tokens, ${percent(packing.utilisation)} full`,
  ];
  return section("data", "Data", rest.filter(Boolean).join(" · "),
    element("div", { class: "wide" }, element("table", {}, table(data.sources, "source"), table(data.eval_sources, "held out"))),
    element("div", { class: "columns" },
      lengths ? element("div", {}, element("h3", {}, `tokens of a ${data.example}`), bars, element("p", { class: "dim" }, ["min", "p50", "p90", "p99", "max"].map((name) => `${name} ${shown(lengths[name])}`).join(" · "), ` · mean ${shown(lengths.mean)}`)) : null,
      example.length ? element("div", {}, element("h3", {}, `the first ${data.example}`, data.marked.some(({ parts }) => parts.some(([, trained]) => trained)) ? element("small", {}, "what is trained is marked") : null), example) : null));
}

function machineSection() {
  const about = element("table", { class: "settings" }, element("tbody", {}, runs[0].about.map(([name, value]) => element("tr", {}, element("td", {}, name), element("td", {}, value)))));
  return section("machine", "Memory and machine", null, element("div", { class: "columns" }, runs[0].memory ? memory() : null, about));
}

function memory() {
  const { parts, peak, limit } = runs[0].memory;
  const entries = Object.entries(parts).filter(([name, value]) => name !== "total" && value > 0).sort((a, b) => b[1] - a[1]);
  const rows = [...entries.map(([name, value]) => [name, value, "part"]), ["needed, estimated", parts.total, "sum"], ["used at most, measured", peak, "sum measured"]].filter(([, value]) => value);
  const most = Math.max(...rows.map(([, value]) => value));
  return element("div", { class: "bars" }, rows.map(([name, value, kind]) => element("div", { class: `bar ${kind}` }, element("span", {}, name), element("i", { style: `--level: ${(100 * value) / most}%` }), element("span", { class: "number" }, gib(value)))),
    limit ? element("p", { class: "dim" }, `there are ${gib(limit)}`) : null);
}

function settingsSection() {
  const [run] = runs;
  const all = state.settings === "all";
  const groups = run.settings.map(({ group, rows }) => [group, rows.filter(([, , unchanged]) => all || !unchanged)]).filter(([, rows]) => rows.length);
  const redraw = () => document.getElementById("settings").replaceWith(settingsSection());
  const table = (title, rows) => element("div", { class: "group" }, element("h3", {}, title), element("table", { class: "settings" }, element("tbody", {}, rows.map(([name, value, unchanged]) => element("tr", { class: unchanged ? "dim" : "" }, element("td", {}, name), element("td", {}, value))))));
  return section("settings", "Settings", null, element("div", { class: "controls" }, choice("settings", [["changed", "other than the defaults"], ["all", "all"]], redraw)),
    element("div", { class: "settings-groups" }, groups.map(([group, rows]) => table(group, rows))),
    run.command ? element("div", { class: "command" }, element("span", { class: "dim" }, "again:"), element("code", {}, run.command)) : null);
}

// --- comparing --------------------------------------------------------------------------------------------------------

function ratesSection() {
  const whisker = (row, k) => {
    const X = (share) => 4 + 172 * share;
    const [low, high] = row.interval;
    return element("svg:svg", { class: "whisker", width: 180, height: 16, style: `color: var(--${colourOf(k)})` }, element("svg:line", { class: "grid", x1: 4, x2: 176, y1: 8, y2: 8 }),
      element("svg:line", { x1: X(low), x2: X(high), y1: 8, y2: 8 }), element("svg:circle", { cx: X(row.passed / Math.max(1, row.of)), cy: 8, r: 4 }));
  };
  const chance = (p) => (p === null || p === undefined ? "" : p < 0.001 ? "p < 0.001" : `p = ${p.toFixed(3)}`);
  const rows = compared.rates.flatMap(({ name, runs: found }) => found.map((row, k) => row && element("tr", { class: k ? "" : "first" },
    element("td", {}, k && found[0] ? "" : name), element("td", {}, runs[k].name), element("td", { class: "number" }, `${row.passed} of ${row.of}`), element("td", { class: "number" }, percent(row.passed / Math.max(1, row.of))),
    element("td", {}, whisker(row, k)), element("td", { class: row.p < 0.05 ? "significant" : "dim" }, chance(row.p)),
    element("td", { class: "dim" }, row.test ? `${row.test}${row.gained === undefined ? "" : `: ${row.gained} gained, ${row.lost} lost`}` : ""))));
  return section("rates", "Rates", `at the last evaluation, with intervals of 95 % (Wilson); p: how often chance alone would set a run so far from ${runs[0].name}, two-sided, for each test by itself`,
    element("div", { class: "wide" }, element("table", { class: "rates" }, element("tbody", {}, rows))));
}

function differingSection() {
  const head = element("tr", {}, element("th", {}, "setting"), runs.map((run, k) => element("th", { style: `color: var(--${colourOf(k)})` }, run.name)));
  const rows = compared.settings.map(([name, values]) => element("tr", {}, element("td", {}, name), values.map((value) => element("td", {}, value === "" ? "–" : value))));
  return section("differing", "Settings that differ", compared.settings.length ? null : "none", element("div", { class: "wide" }, element("table", { class: "settings" }, element("thead", {}, head), element("tbody", {}, rows))));
}

// --- the whole --------------------------------------------------------------------------------------------------------

const one = () => !several();
const SECTIONS = [
  ["rates", "rates", () => several() && compared.rates.length, ratesSection],
  ["happened", "events", () => one() && runs[0].events.length, happened],
  ["curves", "curves", () => runs.some((run) => run.curves.length), curves],
  ["differing", "settings", several, differingSection],
  ["regression", "suite", () => one() && runs[0].regression, regressionSection],
  ["samples", "samples", () => runs.every((run) => run.samples), samplesSection],
  ["completions", "completions", () => one() && runs[0].completions, completionsSection],
  ["data", "data", () => one() && runs[0].data, dataSection],
  ["machine", "machine", () => one() && (runs[0].memory || runs[0].about.length), machineSection],
  ["settings", "settings", () => one() && runs[0].settings.length, settingsSection],
];

function update() {
  document.documentElement.dataset.theme = state.theme;
  charts = [];
  const sections = SECTIONS.filter(([, , has]) => has()).map(([, , , make]) => make());
  const empty = runs.some((run) => run.curves.length) ? null : element("p", { class: "empty" }, "Nothing has been logged yet.");
  document.getElementById("page").replaceChildren(top_(), switches(), ...(empty ? [empty] : []), ...sections,
    element("footer", {}, several() ? "" : `${runs[0].folder} · `, live() ? `renews itself every ${RENEW / 1000} s` : `written ${when(Math.max(...runs.map((run) => run.written)))}`, " · Plainloop"));
  document.getElementById("page").dataset.drawn = "yes";
  drawCharts();
}

// --- a run that goes on -----------------------------------------------------------------------------------------------

// The page is loaded again in a frame of its own, which hands over its data and draws nothing: the switches, the place and
// what is selected stay as they are. It ends with the run.
const RENEW = 10000;
const live = () => one() && runs[0].state === "running";

function renew() {
  if (!live()) return;
  const frame = element("iframe", { hidden: true, title: "newer data", src: `${location.href.split(/[?#]/)[0]}?data=${Date.now()}` });
  const done = () => { window.removeEventListener("message", take); frame.remove(); setTimeout(renew, RENEW); };
  const limit = setTimeout(done, 8000);
  function take(event) {
    if (event.source !== frame.contentWindow || !event.data?.runs) return;
    clearTimeout(limit);
    if (event.data.runs[0].written !== runs[0].written && !String(getSelection())) {
      ({ runs, compared } = event.data);
      const places = [...document.querySelectorAll(".list, .scroll")].map((node) => node.scrollTop);
      const open = document.querySelector("details")?.open;
      update();
      document.querySelectorAll(".list, .scroll").forEach((node, i) => { node.scrollTop = places[i] || 0; });
      if (open) document.querySelector("details").open = true;
    }
    done();
  }
  window.addEventListener("message", take);
  document.body.append(frame);
}

if (location.search.startsWith("?data") && window.parent !== window) {
  window.parent.postMessage({ runs, compared }, "*");
} else {
  readAddress();
  update();
  window.addEventListener("hashchange", () => { readAddress(); update(); });
  let width = innerWidth;
  window.addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawCharts(); } });
  setTimeout(renew, RENEW);
}
