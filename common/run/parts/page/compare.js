// What a comparison has beyond its runs: rates with tests of their difference, settings that differ.

function ratesSection() {
  const whisker = (row, k) => {
    const X = (share) => 4 + 172 * share;
    const [low, high] = row.interval;
    return element(
      "svg:svg",
      { class: "whisker", width: 180, height: 16, style: `color: var(--${colourOf(k)})` },
      element("svg:line", { class: "grid", x1: 4, x2: 176, y1: 8, y2: 8 }),
      element("svg:line", { x1: X(low), x2: X(high), y1: 8, y2: 8 }),
      element("svg:circle", { cx: X(row.passed / Math.max(1, row.of)), cy: 8, r: 4 }),
    );
  };
  const chance = (p) => (p === null || p === undefined ? "" : p < 0.001 ? "p < 0.001" : `p = ${p.toFixed(3)}`);
  const rows = compared.rates.flatMap(({ name, runs: found }) =>
    found.map(
      (row, k) =>
        row &&
        element(
          "tr",
          { class: k ? "" : "first" },
          element("td", {}, k && found[0] ? "" : name),
          element("td", {}, runs[k].name),
          element("td", { class: "number" }, `${row.passed} of ${row.of}`),
          element("td", { class: "number" }, percent(row.passed / Math.max(1, row.of))),
          element("td", {}, whisker(row, k)),
          element("td", { class: row.p < 0.05 ? "significant" : "dim" }, chance(row.p)),
          element(
            "td",
            { class: "dim" },
            row.test ? `${row.test}${row.gained === undefined ? "" : `: ${row.gained} gained, ${row.lost} lost`}` : "",
          ),
        ),
    ),
  );
  return section(
    "rates",
    "Rates",
    "at the last evaluation, with intervals of 95 % (Wilson); p: how often chance alone would set a run so far " +
      `from ${runs[0].name}, two-sided, for each test by itself`,
    element("div", { class: "wide" }, element("table", { class: "rates" }, element("tbody", {}, rows))),
  );
}

function differingSection() {
  const head = element(
    "tr",
    {},
    element("th", {}, "setting"),
    runs.map((run, k) => element("th", { style: `color: var(--${colourOf(k)})` }, run.name)),
  );
  const rows = compared.settings.map(([name, values]) =>
    element(
      "tr",
      {},
      element("td", {}, name),
      values.map((value) => element("td", {}, value === "" ? "–" : value)),
    ),
  );
  return section(
    "differing",
    "Settings that differ",
    compared.settings.length ? null : "none",
    element(
      "div",
      { class: "wide" },
      element("table", { class: "settings" }, element("thead", {}, head), element("tbody", {}, rows)),
    ),
  );
}
