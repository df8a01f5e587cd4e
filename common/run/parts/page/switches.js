// The page: what a run, or several, left behind. Everything that comes from the data becomes text of a node, never markup.

let { runs, compared } = JSON.parse(document.getElementById("data").textContent);
const several = () => runs.length > 1;
const colourOf = (k) => `run${k % 8}`;

// --- switches, which the address keeps --------------------------------------------------------------------------------

const DEFAULTS = {
  x: "steps",
  y: "auto",
  smooth: "0.35",
  find: "",
  theme: "auto",
  zoom: "",
  show: "all",
  score: "",
  prompt: "0",
  rollout: "-1",
  settings: "changed",
  hide: "",
};
const state = { ...DEFAULTS };

function readAddress() {
  Object.assign(state, DEFAULTS);
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) if (name in DEFAULTS) state[name] = value;
}

function change(values, redraw = update) {
  Object.assign(state, values);
  const kept = Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]);
  const address = `#${new URLSearchParams(kept)}`;
  try {
    history.replaceState(null, "", address);
  } catch {
    location.hash = address;
  }
  redraw();
}

// A row of buttons of which one is pressed. options: [value, label].
function choice(name, options, redraw) {
  const buttons = options.map(([value, label = value]) =>
    button(label, () => change({ [name]: value, ...(name === "x" ? { zoom: "" } : {}) }, redraw), {
      class: null,
      "data-switch": `${name}=${value}`,
      "aria-pressed": String(state[name] === value),
    }),
  );
  return element("span", { class: "choice", role: "group", "aria-label": name }, buttons);
}

// --- the horizontal axis ----------------------------------------------------------------------------------------------

const epochOf = (run) => run.data?.plan?.steps_per_epoch;
// What an axis may show: value and label of the switch, and whether all runs have it.
const AXES = [
  ["steps", "steps", () => true],
  ["epochs", "epochs", () => runs.every(epochOf)],
  ["tokens", "tokens", () => runs.every((run) => run.axis.num_tokens)],
  ["time", "hours", () => runs.every((run) => run.axis.seconds)],
];

// Steps in the unit that was chosen. Tokens and seconds are known at some steps; what lies between is interpolated.
function unitOf(run) {
  if (state.x === "steps") return (step) => step;
  if (state.x === "epochs") return (step) => step / epochOf(run);
  const known = [...(run.axis[state.x === "tokens" ? "num_tokens" : "seconds"] || [])];
  if (known.length && known[0][0] > 0) known.unshift([0, 0]);
  const [xs, ys] = [0, 1].map((column) => known.map((pair) => pair[column]));
  return (step) => interpolate(xs, ys, step);
}

// The size and the name of the unit in which the axis is labelled.
function unitFor(span) {
  if (state.x !== "time") return [1, state.x];
  return span < 180 ? [1, "s"] : span < 7200 ? [60, "min"] : [3600, "h"];
}

function tickLabels(domain, count) {
  const [size, name] = unitFor(domain[1]);
  const found = ticks(domain[0] / size, domain[1] / size, count, false);
  return found.map((value, i) => ({ at: value * size, text: shown(value) + (i === found.length - 1 ? ` ${name}` : "") }));
}

function place(x) {
  if (state.x === "steps") return `step ${shown(Math.round(x))}`;
  const [size, name] = unitFor(x);
  return `${shown(+(x / size).toPrecision(3))} ${name}`;
}

function domain() {
  const zoom = state.zoom.split("..").map(Number);
  if (zoom.length === 2 && zoom[1] > zoom[0]) return zoom;
  const ends = visible().flatMap(({ run, unit }) => [...run.curves.map(({ x }) => x.at(-1)), run.step].map(unit));
  return [0, Math.max(...ends, state.x === "steps" ? 1 : 1e-9)];
}

const hiddenRuns = () => new Set(state.hide.split(",").filter(Boolean));

function visible() {
  const all = runs.map((run, k) => ({ run, k, unit: unitOf(run) }));
  const left = all.filter(({ k }) => !hiddenRuns().has(String(k)));
  return left.length ? left : all;
}

const axisSettings = () => ({
  named: !several(),
  domain: domain(),
  scale: state.y,
  smooth: Number(state.smooth),
  tick: tickLabels,
  unit: place,
});

function switches() {
  const amount = element("output", {}, state.smooth);
  const smooth = element("input", {
    type: "range",
    min: "0",
    max: "1",
    step: "0.05",
    value: state.smooth,
    "aria-label": "smoothing",
    oninput: (event) => {
      amount.replaceChildren(event.target.value);
      change({ smooth: event.target.value }, drawCharts);
    },
  });
  const find = element("input", {
    type: "search",
    placeholder: "find a chart",
    value: state.find,
    "aria-label": "find a chart",
    oninput: (event) => change({ find: event.target.value }, redrawCurves),
  });
  const axes = AXES.filter(([, , isKnown]) => isKnown());
  return element(
    "nav",
    { class: "switches" },
    choice("x", axes),
    choice("y", [["auto"], ["linear"], ["log"]]),
    element("label", {}, "smoothing", smooth, amount),
    find,
    state.zoom ? button("whole run", () => change({ zoom: "" })) : null,
    element("span", { class: "anchors" }, several() ? runs.map(runButton) : sectionLinks()),
  );
}
