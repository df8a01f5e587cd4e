// What GRPO sampled, with its rewards; and a suite of prompts that are tested.

function completionsSection() {
  const { completions } = runs[0];
  const last = completions.length - 1;
  const at = state.rollout === "-1" ? last : Math.min(last, Number(state.rollout));
  const rollout = completions[at];
  const all = completions.flatMap((found) => found.rewards);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const redraw = () => document.getElementById("completions").replaceWith(completionsSection());
  const go = (k) => change({ rollout: String(Math.min(last, Math.max(0, k))) }, redraw);
  const mean = rollout.rewards.reduce((sum, value) => sum + value, 0) / (rollout.rewards.length || 1);
  const about = ` · mean reward ${shown(mean)} of ${rollout.count} completions`;
  const groups = rollout.groups.map((group) =>
    element(
      "div",
      { class: "group" },
      element("p", { class: "asked" }, group.prompt),
      group.rows.map((row) => completion(row, low, high)),
    ),
  );
  return section(
    "completions",
    "Completions and their rewards",
    `${completions.length} of the rollouts; three of a rollout's groups: the first, and those whose rewards differ most`,
    element(
      "div",
      { class: "controls" },
      button("‹", () => go(at - 1)),
      rewardMap(completions, at, low, high, go),
      button("›", () => go(at + 1)),
      element("span", {}, element("b", {}, `step ${shown(rollout.step)}`), about),
    ),
    element("div", { class: "groups" }, groups),
  );
}

function completion(row, low, high) {
  const rewards = Object.entries(row.rewards).map(([name, value]) => `${name} ${shown(value)}`);
  const level = (100 * ((row.reward ?? low) - low)) / (high - low || 1);
  const advantage = row.advantage ? `${row.advantage > 0 ? "+" : "−"}${Math.abs(row.advantage).toFixed(2)}` : "0";
  return element(
    "div",
    { class: "completion", title: rewards.join("\n") },
    element("span", { class: "reward" }, shown(row.reward), element("i", { style: `--level: ${Math.round(level)}%` })),
    element("p", {}, row.text, row.cut ? element("span", { class: "cut" }, "cut") : null),
    dim(advantage),
  );
}

// How the rewards of each rollout are spread: a column of cells each, the darker the more completions.
function rewardMap(completions, at, low, high, go) {
  const [bins, cell] = [12, 5];
  const wide = Math.max(5, Math.min(16, Math.floor(420 / completions.length)));
  const [width, height] = [completions.length * wide, bins * cell];
  const columns = completions.map((rollout, k) => {
    const counts = new Array(bins).fill(0);
    for (const reward of rollout.rewards) {
      const share = (reward - low) / (high - low || 1);
      counts[Math.min(bins - 1, Math.floor(share * bins))]++;
    }
    const most = Math.max(...counts, 1);
    const cells = counts.map((count, bin) => {
      const box = { x: k * wide + 0.5, y: (bins - 1 - bin) * cell + 0.5, width: wide - 1, height: cell - 1 };
      return count ? element("svg:rect", { ...box, "fill-opacity": (0.15 + 0.85 * (count / most)).toFixed(2) }) : null;
    });
    return element(
      "svg:g",
      { class: k === at ? "column current" : "column", onclick: () => go(k) },
      element("svg:title", {}, `step ${rollout.step}`),
      element("svg:rect", { class: "back", x: k * wide, y: 0, width: wide, height }),
      cells,
    );
  });
  const label = `rewards from ${shown(low)} to ${shown(high)}, by rollout`;
  return element("svg:svg", { class: "map", width, height, role: "img", "aria-label": label }, columns);
}

// --- a suite of prompts that are tested -------------------------------------------------------------------------------

function regressionSection() {
  const evaluations = runs[0].regression;
  const [first, last] = [evaluations[0], evaluations.at(-1)];
  const rate = (group) => (group?.total ? group.passed / group.total : null);
  const rows = Object.entries(last.groups).map(([name, group]) => {
    const squares = evaluations.slice(-24).map(({ step, groups }) => {
      const share = rate(groups[name]);
      return square(share, `step ${step}: ${percent(share)}`);
    });
    const before = evaluations.length > 1 ? figure(`from ${percent(rate(first.groups[name])) ?? "–"}`) : "";
    const passed = figure(`${shown(group.passed)} of ${shown(group.total)}`);
    return [name, passed, figure(percent(rate(group)) ?? "–"), before, element("span", { class: "squares" }, squares)];
  });
  const lists = [listOf("turned", last.turned), listOf("not passed", last.failed)];
  const parts = element("div", { class: "columns" }, table(null, rows), element("div", {}, lists));
  return section("regression", "Regression suite", `step ${shown(last.step)}`, parts);
}

function listOf(title, lines) {
  const items = lines.map((line) => element("li", {}, line));
  return lines.length ? [element("h3", {}, title), element("ul", { class: "lines scroll" }, items)] : null;
}
