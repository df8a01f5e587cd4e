// What a comparison has beyond its runs: rates with tests of their difference, settings that differ.

function ratesSection() {
  const chance = (p) => (p < 0.001 ? "p < 0.001" : `p = ${p.toFixed(3)}`);
  const rows = compared.rates.flatMap(({ name, runs: found }) => {
    const first = found.findIndex(Boolean);
    return found.map((row, k) => {
      if (!row) return null;
      const rate = row.passed / Math.max(1, row.of);
      const test = row.test ? dim(`${row.test}: ${row.gained} gained, ${row.lost} lost`) : "";
      const p = row.p === undefined ? "" : row.p < 0.05 ? element("b", {}, chance(row.p)) : dim(chance(row.p));
      const cells = [k === first ? name : "", runs[k].name, figure(`${row.passed} of ${row.of}`), figure(percent(rate))];
      return { class: k === first ? "first" : "", cells: [...cells, whisker(rate, row.interval, k), p, test] };
    });
  });
  const aside =
    "at the last evaluation, with intervals of 95 % (Wilson); p: how often chance alone would set a run so far " +
    `from ${runs[0].name}, two-sided, for each test by itself`;
  return section("rates", "Rates", aside, table(null, rows.filter(Boolean), "rates"));
}

function whisker(rate, [low, high], k) {
  const X = (share) => 4 + 172 * share;
  return element(
    "svg:svg",
    { class: "whisker", width: 180, height: 16, style: `color: var(--${colourOf(k)})` },
    element("svg:line", { class: "grid", x1: 4, x2: 176, y1: 8, y2: 8 }),
    element("svg:line", { x1: X(low), x2: X(high), y1: 8, y2: 8 }),
    element("svg:circle", { cx: X(rate), cy: 8, r: 4 }),
  );
}

function differingSection() {
  const names = runs.map((run, k) => element("span", { style: `color: var(--${colourOf(k)})` }, run.name));
  const rows = compared.settings.map(([name, values]) => [name, ...values.map((value) => (value === "" ? null : value))]);
  return section("differing", "Settings that differ", rows.length ? null : "none", table(["setting", ...names], rows, "settings"));
}
