// The frames with their curves, and the line of time with what happened.

let charts = [];
const listeners = {
  point: (x, from) => charts.forEach((chart) => chart.show(x, chart === from)),
  zoom: (range) => change({ zoom: range ? range.map((end) => end.toPrecision(6)).join("..") : "" }),
};

function drawCharts() {
  charts.forEach((chart) => chart.draw());
}

function redrawCurves() {
  charts = charts.filter((chart) => chart instanceof Timeline);
  document.getElementById("curves").replaceWith(curves());
  drawCharts();
}

function curves() {
  const frames = new Map();
  for (const { run } of visible()) {
    for (const frame of run.frames) {
      const known = frames.get(frame.name) || frame;
      frames.set(frame.name, { ...frame, log: frame.log || known.log, share: frame.share && known.share });
    }
  }
  const word = state.find.trim().toLowerCase();
  const all = [...frames.values()].filter(({ name }) => name.toLowerCase().includes(word));
  const constant = all.filter(({ name }) => isConstant(name));
  const drawn = all.filter((frame) => !constant.includes(frame));
  const [learned, machine] = [drawn.filter((frame) => !frame.machine), drawn.filter((frame) => frame.machine)];
  const make = (height) => (frame) => {
    const chart = new Chart(frame, seriesOf(frame.name), several() ? [] : troubles(), axisSettings, height, listeners);
    charts.push(chart);
    return chart.node;
  };
  const same = constant.map(({ name }) => element("span", {}, `${name} ${shown(constantIn(name)[0])}`));
  return element(
    "section",
    { id: "curves" },
    element("div", { class: "frames lead" }, learned.slice(0, 3).map(make(210))),
    element("div", { class: "frames" }, [...learned.slice(3), ...machine].map(make(132))),
    same.length ? element("p", { class: "dim constant" }, "the same throughout: ", same) : null,
    all.length ? null : element("p", { class: "dim" }, `no chart is called “${state.find}”`),
  );
}

// The values of a frame that is constant in a run, undefined where it is not, over the runs that have it.
const constantIn = (name) => [
  ...new Set(runs.filter((run) => run.frames.some((frame) => frame.name === name)).map((run) => run.constant[name])),
];
const isConstant = (name) => constantIn(name).length === 1 && constantIn(name)[0] !== undefined;

const KINDS = { memory_gib: "now", peak_memory_gib: "peak" };
const OTHERS = ["eval", "eval2", "eval3"]; // colours of evaluations
const EXACT = ["learning_rate", "memory_gib", "bad_steps"]; // frames of which nothing is noise

function seriesOf(frame) {
  const found = [];
  for (const { run, k, unit } of visible()) {
    // Side by side, one curve of a kind is enough: of memory its peak, of several temperatures the first.
    const isDropped = (name) => several() && (name === "memory_gib" || /_t[\d.]+$/.test(name));
    const mine = run.curves.filter((curve) => curve.frame === frame && !isDropped(curve.name));
    let others = 0;
    for (const curve of mine) {
      const hot = /_t([\d.]+)$/.exec(curve.name);
      const kind = curve.eval ? `eval${hot ? ` at ${hot[1]}` : ""}` : (KINDS[curve.name] ?? (curve.machine ? "" : "train"));
      const isOther = curve.eval || curve.name === "peak_memory_gib";
      const own = isOther ? OTHERS[others++ % OTHERS.length] : "train";
      found.push({
        ...curve,
        exact: EXACT.includes(frame),
        title: (several() ? `${run.name}: ` : "") + curve.name,
        label: several() ? `${run.name} ${kind}` : kind,
        colour: several() ? colourOf(k) : own,
        steps: curve.x,
        x: curve.x.map(unit),
      });
    }
  }
  return found;
}

// --- what happened ----------------------------------------------------------------------------------------------------

const TROUBLE = ["memory", "spike", "bad", "not saved"];
const isTrouble = (event) => TROUBLE.includes(event.kind);

function troubles() {
  const unit = unitOf(runs[0]);
  const marked = runs[0].events.filter((event) => isTrouble(event) || event.kind === "resumed");
  return marked.slice(0, 60).map((event) => ({
    x: unit(event.step),
    kind: isTrouble(event) ? "trouble" : "resumed",
    text: `${event.kind} at step ${event.step}: ${event.text}`,
  }));
}

const LANES = [
  ["run", ["started", "resumed", "stopped", "died", "finished"]],
  ["evaluated", ["evaluated"]],
  ["saved", ["saved"]],
  ["best", ["best"]],
  ["trouble", TROUBLE],
];
const GLYPHS = { started: "▶", resumed: "▶", stopped: "■", finished: "●", evaluated: "❘", saved: "▪", best: "★" };

// A strip under the curves' axis: a lane for each kind of thing that happened.
class Timeline {
  constructor() {
    this.svg = element("svg:svg", { class: "timeline", role: "img", "aria-label": "what happened, over the run" });
    const evaluated = runs[0].curves.filter((curve) => curve.eval).flatMap((curve) => curve.x);
    const events = [...runs[0].events, ...[...new Set(evaluated)].map((step) => ({ kind: "evaluated", step }))];
    const lanes = LANES.map(([name, kinds]) => [name, events.filter(({ kind }) => kinds.includes(kind))]);
    this.lanes = lanes.filter(([, found]) => found.length);
  }

  draw() {
    const width = Math.max(260, this.svg.getBoundingClientRect().width || 600);
    const [from, to] = domain();
    const [unit, left, right] = [unitOf(runs[0]), 60, width - 12];
    this.X = (x) => left + ((x - from) / (to - from || 1)) * (right - left);
    const drawn = this.lanes.flatMap(([name, events], row) => {
      const y = 14 + 20 * row;
      const inside = events.filter(({ step }) => unit(step) >= from && unit(step) <= to);
      const glyphs = inside.map((event) => {
        const text = describeEvent(event);
        const attributes = {
          class: `glyph ${isTrouble(event) ? "trouble" : event.kind}`,
          x: this.X(unit(event.step)),
          y: y + 4,
        };
        return element("svg:text", attributes, GLYPHS[event.kind] || "▲", element("svg:title", {}, text));
      });
      return [
        element("svg:text", { class: "tick", x: 0, y: y + 4 }, name),
        element("svg:line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
        ...glyphs,
      ];
    });
    const height = 10 + 20 * this.lanes.length;
    this.svg.setAttribute("height", height);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.cursor = element("svg:line", { class: "cursor-line", y1: 2, y2: height - 2, visibility: "hidden" });
    this.svg.replaceChildren(...drawn, this.cursor);
  }

  show(x) {
    this.cursor.setAttribute("visibility", x === null ? "hidden" : "visible");
    if (x !== null) for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, this.X(x));
  }
}

const describeEvent = (event) =>
  [`step ${shown(event.step)}`, event.kind, event.text, event.time && when(event.time)].filter(Boolean).join(" · ");

function happened() {
  const timeline = new Timeline();
  charts.push(timeline);
  const { events, happened: count } = runs[0];
  const rows = events.map((event) => ({
    class: isTrouble(event) ? "trouble" : "",
    cells: [event.step, event.kind, event.text || "", event.time ? dim(when(event.time)) : ""],
  }));
  const trouble = events.filter(isTrouble).length;
  const entries = count > rows.length ? `${rows.length} of ${count} entries` : `${rows.length} entries`;
  const summary = element("summary", {}, trouble ? `${entries}, ${trouble} of trouble` : entries);
  const list = element("details", {}, summary, element("div", { class: "scroll" }, table(null, rows)));
  return element("section", { id: "happened" }, timeline.svg, list);
}
