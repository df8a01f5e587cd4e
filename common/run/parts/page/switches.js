// The page: what a run, or several, left behind. Everything that comes from the data becomes text of a node, never markup.

let { runs, compared } = JSON.parse(document.getElementById("data").textContent);
const several = () => runs.length > 1;
const colourOf = (k) => `run${k % 8}`;

// --- switches, which the address keeps --------------------------------------------------------------------------------

const DEFAULTS = {
  x: "steps",
  y: "auto",
  smooth: "0.35",
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
  const address = kept.length ? `#${new URLSearchParams(kept)}` : "#";
  try {
    history.replaceState(null, "", address);
  } catch {
    location.hash = address;
  }
  redraw();
}

// A row of buttons of which one is pressed.
function choice(name, options, redraw) {
  const buttons = options.map(([value, label, title]) =>
    element(
      "button",
      {
        type: "button",
        title,
        "data-switch": `${name}=${value}`,
        "aria-pressed": String(state[name] === value),
        onclick: () => change({ [name]: value, ...(name === "x" ? { zoom: "" } : {}) }, redraw),
      },
      label,
    ),
  );
  return element("span", { class: "choice", role: "group", "aria-label": name }, buttons);
}

// --- the horizontal axis ----------------------------------------------------------------------------------------------

// Steps in the unit that was chosen. Tokens and seconds are known at some steps; what lies between is interpolated.
function unitOf(run) {
  if (state.x === "steps") return (step) => step;
  const known = [...(run.axis[state.x === "tokens" ? "num_tokens" : "seconds"] || [])];
  if (known.length && known[0][0] > 0) known.unshift([0, 0]);
  const [xs, ys] = [known.map(([step]) => step), known.map(([, value]) => value)];
  return (step) => interpolate(xs, ys, step);
}

const knows = (column) => runs.every((run) => run.axis[column]);

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
  const ends = visible().flatMap(({ run, unit }) =>
    [...run.curves.map(({ x }) => x.at(-1)), run.step].filter((step) => step !== undefined).map(unit),
  );
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

const axisSettings = () => ({
  named: !several(),
  domain: domain(),
  scale: state.y,
  smooth: Number(state.smooth),
  tick: tickLabels,
  unit: place,
});
