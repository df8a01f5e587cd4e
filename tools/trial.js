// What trial.html has beyond a comparison of runs: the verdicts, and of each side its diff and all metrics.

const STYLE = `
  .verdicts { width: auto; }
  .verdicts td { white-space: nowrap; vertical-align: middle; padding-right: 18px; }
  .verdicts td:last-child { white-space: normal; }
  .word.better { color: var(--good); }
  .word.worse, .word.failed { color: var(--bad); }
  .effect .zero { stroke: var(--dim); stroke-dasharray: 2 2; }
  .effect .range { stroke: currentColor; stroke-width: 2.5; stroke-linecap: round; opacity: 0.45; }
  .effect .seed { fill: var(--paper); stroke: currentColor; stroke-width: 1.5; }
  .effect .mean { fill: currentColor; }
  .side { margin-top: 12px; font-size: 13px; }
  .side summary { cursor: pointer; }
  .side pre {
    margin: 8px 0; padding: 8px 12px; background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
    overflow: auto; max-height: 420px;
  }
  .side .added { color: var(--good); }
  .side .removed { color: var(--bad); }
  .side .place { color: var(--faint); }`;
const MARKS = { "+": "added", "-": "removed", "@": "place" };

const { trial } = compared;
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const bySeed = (row) => row.side.map((value, k) => value - row.parent[k]);
const largest = (values) => Math.max(0, ...values.map(Math.abs));
const inColour = (name, ...content) => {
  const k = runs.findIndex((run) => run.name === name);
  return element("span", { style: k < 0 ? null : `color: var(--${colourOf(k)})` }, content);
};

// The difference of each seed as a ring, their mean as a dot, its interval as a bar; the dashes are at 0, the ends at most.
function effect(row, most) {
  const X = (value) => 140 + 132 * Math.max(-1, Math.min(1, value / most));
  const line = (kind, from, to, y1 = 11, y2 = 11) => element("svg:line", { class: kind, x1: from, x2: to, y1, y2 });
  const seeds = bySeed(row).map((value, k) => {
    const title = element("svg:title", {}, `${shown(row.parent[k])} → ${shown(row.side[k])}`);
    return element("svg:circle", { class: "seed", cx: X(value), cy: 11, r: 3.5 }, title);
  });
  return element(
    "svg:svg",
    { class: "effect", width: 280, height: 22 },
    line("grid", 8, 272),
    line("zero", 140, 140, 1, 21),
    row.interval && line("range", X(row.interval[0]), X(row.interval[1])),
    seeds,
    element("svg:circle", { class: "mean", cx: X(row.difference), cy: 11, r: 4 }),
  );
}

// Room for every seed, and for intervals up to three times as wide.
function room(rows) {
  const seeds = largest(rows.flatMap(bySeed));
  const intervals = largest(rows.flatMap((row) => row.interval ?? []));
  return Math.max(seeds, Math.min(intervals, 3 * seeds)) || 1;
}

function cellsOf(name, row, most) {
  const { p, word } = row;
  const sign = row.difference > 0 ? "+" : row.difference < 0 ? "−" : "";
  const chance = p === null ? "" : p < 0.001 ? "p < 0.001" : `p = ${p.toFixed(3)}`;
  return [
    element("b", { class: `word ${word}` }, word),
    figure(`${shown(mean(row.parent))} → ${shown(mean(row.side))}`),
    figure(sign + shown(Math.abs(+row.difference.toPrecision(3)))),
    inColour(name, effect(row, most)),
    dim(chance),
  ];
}

function verdictSection() {
  const compared_ = trial.sides.filter(({ metrics }) => metrics.length);
  const most = room(compared_.map(({ metrics }) => metrics[0]));
  const rows = trial.sides.map(({ name, metrics, because }) => {
    const title = element("b", {}, inColour(name, name));
    const failed = [element("b", { class: "word failed" }, "failed"), "", "", "", ""];
    const cells = metrics.length ? cellsOf(name, metrics[0], most) : failed;
    return [title, ...cells, dim(because.replace(/^; /, ""))];
  });
  const better = trial.higher_is_better ? "higher" : "lower";
  const aside = `${better} is better · ${trial.asked} · ring: a seed, dot: their mean, bar: its 95 % interval`;
  const style = element("style", {}, STYLE);
  const details = compared_.map(sideDetails);
  return section("verdicts", `Verdict on ${trial.metric}`, aside, style, table(null, rows, "verdicts"), details);
}

function sideDetails({ name, command, diff, metrics }) {
  const lines = diff.map((line) => element("span", { class: MARKS[line[0]] }, `${line}\n`));
  const rows = metrics.map((row) => [row.metric, ...cellsOf(name, row, room([row]))]);
  return element(
    "details",
    { class: "side", open: trial.sides.length === 1 },
    element("summary", {}, `${name}: diff and all metrics`),
    element("p", {}, dim(command)),
    diff.length ? element("pre", {}, lines) : null,
    table(null, rows, "verdicts"),
  );
}
