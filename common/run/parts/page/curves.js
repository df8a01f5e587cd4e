// The frames with their curves, and the line of time with what happened.

function section(id, title, aside, ...content) {
  return element("section", { id }, element("h2", {}, title, aside ? element("small", {}, aside) : null), content);
}

function sectionLinks() {
  return [...SECTIONS]
    .filter(([, , has]) => has())
    .map(([id, name]) =>
      element(
        "button",
        {
          type: "button",
          class: "plain",
          onclick: () => document.getElementById(id)?.scrollIntoView({ behavior: "smooth" }),
        },
        name,
      ),
    );
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
  for (const { run } of visible())
    for (const frame of run.frames) frames.set(frame.name, { ...frame, log: frame.log || frames.get(frame.name)?.log });
  const constant = [...frames.keys()].filter(isConstant);
  const all = [...frames.values()].filter((frame) => !constant.includes(frame.name));
  const lead = all.filter((frame) => !frame.machine).slice(0, 3);
  const rest = all.filter((frame) => !lead.includes(frame));
  const more = [...rest.filter((frame) => !frame.machine), ...rest.filter((frame) => frame.machine)];
  const make = (height) => (frame) => {
    const chart = new Chart(frame, seriesOf(frame.name), several() ? [] : troubles(), axisSettings, height, listeners);
    charts.push(chart);
    return chart.node;
  };
  return element(
    "section",
    { id: "curves" },
    element("div", { class: "frames lead" }, lead.map(make(210))),
    element("div", { class: "frames" }, more.map(make(132))),
    constant.length
      ? element(
          "p",
          { class: "dim constant" },
          "the same throughout: ",
          constant.map((name) => element("span", {}, `${name} ${shown(constantIn(name)[0])}`)),
        )
      : null,
  );
}

// The values of a frame that is constant in a run, undefined where it is not, over the runs that have it.
const constantIn = (name) => [
  ...new Set(runs.filter((run) => run.frames.some((frame) => frame.name === name)).map((run) => run.constant[name])),
];
const isConstant = (name) => constantIn(name).length === 1 && constantIn(name)[0] !== undefined;

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
      const kind = curve.eval ? `eval${hot ? ` at ${hot[1]}` : ""}` : (KINDS[curve.name] ?? (curve.machine ? "" : "train"));
      const single =
        curve.eval || curve.name === "peak_memory_gib" ? ["eval", "eval2", "eval3"][evaluations++ % 3] : "train";
      found.push({
        ...curve,
        exact: EXACT.includes(frame),
        title: (several() ? `${run.name}: ` : "") + curve.name,
        label: several() ? run.name + (both && curve.eval ? " eval" : "") + (hot ? ` at ${hot[1]}` : "") : kind,
        colour: several() ? colourOf(k) : single,
        x: curve.x.map(unit),
      });
    }
  }
  return found;
}

const KINDS = { memory_gib: "now", peak_memory_gib: "peak" };
const EXACT = ["learning_rate", "memory_gib", "bad_steps"]; // frames of which nothing is noise
const TROUBLE = ["memory", "spike", "bad", "not saved"];

function troubles() {
  const unit = unitOf(runs[0]);
  return runs[0].events
    .filter((event) => [...TROUBLE, "resumed"].includes(event.kind))
    .slice(0, 60)
    .map((event) => ({
      x: unit(event.step),
      kind: event.kind === "resumed" ? "resumed" : "trouble",
      text: `${event.kind} at step ${event.step}: ${event.text}`,
    }));
}

// --- what happened ----------------------------------------------------------------------------------------------------

const LANES = [
  ["run", ["started", "resumed", "stopped", "died", "finished"]],
  ["saved", ["saved"]],
  ["best", ["best"]],
  ["trouble", TROUBLE],
];
const GLYPHS = {
  started: "M-3.5 -4.5 L4.5 0 L-3.5 4.5Z",
  resumed: "M-3.5 -4.5 L4.5 0 L-3.5 4.5Z",
  stopped: "M-4 -4H4V4H-4Z",
  finished: "M0 -5A5 5 0 1 1 -.01 -5Z",
  saved: "M-3 -3H3V3H-3Z",
  best: "M0 -5.5 L1.6 -1.7 L5.5 -1.5 L2.5 1 L3.5 5 L0 2.8 L-3.5 5 L-2.5 1 L-5.5 -1.5 L-1.6 -1.7Z",
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
    const [from, to] = domain(),
      unit = unitOf(this.run),
      left = 60,
      right = 12;
    const evaluated = [...new Set(this.run.curves.filter((curve) => curve.eval).flatMap((curve) => curve.x))];
    const lanes = LANES.map(([name, kinds]) => [name, this.run.events.filter((event) => kinds.includes(event.kind))]).filter(
      ([, events]) => events.length,
    );
    if (evaluated.length)
      lanes.splice(lanes.length && lanes[0][0] === "run" ? 1 : 0, 0, [
        "evaluated",
        evaluated.map((step) => ({ kind: "evaluated", step, text: "" })),
      ]);
    const X = (x) => left + ((x - from) / (to - from || 1)) * (width - left - right);
    const drawn = [];
    lanes.forEach(([name, events], row) => {
      const y = 14 + 20 * row;
      drawn.push(
        element("svg:text", { class: "tick", x: 0, y: y + 4 }, name),
        element("svg:line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y }),
      );
      for (const event of events) {
        const x = unit(event.step);
        if (x < from || x > to) continue;
        const text = describeEvent(event);
        const attributes = {
          class: `glyph ${TROUBLE.includes(event.kind) ? "trouble" : event.kind.replace(" ", "-")}`,
          transform: `translate(${X(x).toFixed(1)} ${y})`,
          onpointerenter: () => {
            this.text.textContent = text;
          },
        };
        drawn.push(
          element(
            "svg:g",
            attributes,
            element("svg:path", {
              d: GLYPHS[event.kind] || (event.kind === "evaluated" ? "M0 -3.5V3.5" : "M0 -5 L5 4 L-5 4Z"),
            }),
            element("svg:title", {}, text),
          ),
        );
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

const describeEvent = (event) =>
  [`step ${shown(event.step)}`, event.kind, event.text, event.time && when(event.time)].filter(Boolean).join(" · ");

function happened() {
  const timeline = new Timeline();
  charts.push(timeline);
  const rows = runs[0].events.map((event) =>
    element(
      "tr",
      { class: TROUBLE.includes(event.kind) ? "trouble" : "" },
      element("td", { class: "number" }, shown(event.step)),
      element("td", {}, event.kind),
      element("td", {}, event.text || ""),
      element("td", { class: "dim" }, event.time ? when(event.time) : ""),
    ),
  );
  const trouble = runs[0].events.filter((event) => TROUBLE.includes(event.kind)).length;
  const { happened: count } = runs[0];
  const entries = count > rows.length ? `${rows.length} of ${count} entries` : `${rows.length} entries`;
  const summary = trouble ? `${entries}, ${trouble} of trouble` : entries;
  return section(
    "happened",
    "What happened",
    null,
    timeline.svg,
    element(
      "details",
      {},
      element("summary", {}, summary, timeline.text),
      element("div", { class: "scroll" }, element("table", {}, element("tbody", {}, rows))),
    ),
  );
}
