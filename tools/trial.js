// What trial.html has beyond a comparison of runs: the verdicts, and of each side the diff and all metrics.

const { trial } = compared ?? {};

document.head.append(
  element(
    "style",
    {},
    `.verdicts { width: auto; }
     .verdicts td { white-space: nowrap; vertical-align: middle; padding-right: 18px; }
     .word { font-weight: 600; }
     .word.better { color: var(--good); }
     .word.worse, .word.failed { color: var(--bad); }
     .effect .zero { stroke: var(--dim); stroke-dasharray: 2 2; }
     .effect .range { stroke: currentColor; stroke-width: 2.5; stroke-linecap: round; opacity: 0.45; }
     .effect .seed { fill: var(--paper); stroke: currentColor; stroke-width: 1.5; }
     .effect .mean { fill: currentColor; }
     .side { margin-top: 12px; }
     .side summary { cursor: pointer; font-size: 13px; }
     .side pre { margin: 8px 0; padding: 8px 12px; background: var(--card); border: 1px solid var(--rule);
       border-radius: 8px; overflow-x: auto; max-height: 420px; }
     .side .added { color: var(--good); }
     .side .removed { color: var(--bad); }
     .side .place { color: var(--faint); }`,
  ),
);

const signed = (value) => (value > 0 ? "+" : value < 0 ? "−" : "") + shown(Math.abs(+value.toPrecision(3)));
const meanOf = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const bySeed = (row) => row.side.map((value, k) => value - row.parent[k]);
const chanceOf = (row) => (row.p === null ? "–" : row.p < 0.001 ? "p < 0.001" : `p = ${row.p.toFixed(3)}`);
const wordOf = (word) => element("span", { class: `word ${word.replaceAll(" ", "-")}` }, word);

// The difference of each seed as a ring, their mean as a dot, and its interval as a bar, around a line at 0.
function effect(row, most) {
  const [width, height] = [280, 22];
  const X = (value) => width / 2 + (Math.max(-1, Math.min(1, value / most)) * (width - 16)) / 2;
  const y = height / 2;
  const seeds = bySeed(row).map((value, k) =>
    element(
      "svg:circle",
      { class: "seed", cx: X(value), cy: y, r: 3.5 },
      element("svg:title", {}, `${shown(row.parent[k])} → ${shown(row.side[k])}`),
    ),
  );
  const range = row.interval && element("svg:line", { class: "range", x1: X(row.interval[0]), x2: X(row.interval[1]), y1: y, y2: y });
  return element(
    "svg:svg",
    { class: "effect", width, height },
    element("svg:line", { class: "grid", x1: 8, x2: width - 8, y1: y, y2: y }),
    element("svg:line", { class: "zero", x1: X(0), x2: X(0), y1: 1, y2: height - 1 }),
    range,
    seeds,
    element("svg:circle", { class: "mean", cx: X(row.difference), cy: y, r: 4 }),
  );
}

// Room for all seeds, and for intervals up to three times as wide.
function reach(rows) {
  const furthest = (values) => Math.max(0, ...values.map(Math.abs));
  const seeds = furthest(rows.flatMap(bySeed));
  return Math.min(furthest(rows.flatMap((row) => row.interval ?? [])) || Infinity, 3 * seeds) || seeds || 1;
}

function verdictSection() {
  const rows = trial.sides.filter((side) => side.metrics.length).map((side) => side.metrics[0]);
  const most = Math.max(reach(rows), ...rows.flatMap(bySeed).map(Math.abs));
  const better = trial.higher_is_better ? "higher" : "lower";
  const lines = trial.sides.map((side) => {
    const k = runs.findIndex((run) => run.name === side.name);
    const name = element("td", { style: k < 0 ? null : `color: var(--${colourOf(k)}); font-weight: 600` }, side.name);
    const [row] = side.metrics;
    if (!row) return element("tr", {}, name, element("td", {}, wordOf("failed")), element("td", { colspan: 5 }, side.failed));
    return element(
      "tr",
      {},
      name,
      element("td", {}, wordOf(side.verdict)),
      element("td", { class: "number" }, `${shown(meanOf(row.parent))} → ${shown(meanOf(row.side))}`),
      element("td", { class: "number" }, signed(row.difference)),
      element("td", { style: k < 0 ? null : `color: var(--${colourOf(k)})` }, effect(row, most)),
      element("td", { class: "dim" }, chanceOf(row)),
      element("td", { class: "dim" }, side.needs.replace(/^; /, "")),
    );
  });
  return section(
    "verdicts",
    `Verdict on ${trial.metric}`,
    `${better} is better · against ${trial.parent.name} · ${trial.asked} · ring: a seed, dot: their mean, bar: its 95 % interval`,
    element("div", { class: "wide" }, element("table", { class: "verdicts" }, element("tbody", {}, lines))),
    trial.sides.filter((side) => side.metrics.length).map(sideDetails),
  );
}

function sideDetails(side, k) {
  const kinds = { "+": "added", "-": "removed", "@": "place" };
  const diff = side.diff.map((line) => element("span", { class: kinds[line[0]] ?? "" }, `${line}\n`));
  const metrics = side.metrics.map((row) => {
    return element(
      "tr",
      {},
      element("td", {}, row.metric),
      element("td", {}, wordOf(row.word)),
      element("td", { class: "number" }, `${shown(meanOf(row.parent))} → ${shown(meanOf(row.side))}`),
      element("td", { class: "number" }, signed(row.difference)),
      element("td", { style: `color: var(--${colourOf(1 + k)})` }, effect(row, reach([row]))),
      element("td", { class: "dim" }, chanceOf(row)),
    );
  });
  return element(
    "details",
    { class: "side", open: trial.sides.length === 1 },
    element("summary", {}, `${side.name}: diff and all metrics`),
    element("p", { class: "dim" }, side.command),
    side.diff.length ? element("pre", {}, diff) : null,
    element("div", { class: "wide" }, element("table", { class: "verdicts" }, element("tbody", {}, metrics))),
  );
}
