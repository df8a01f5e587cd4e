// What GRPO sampled, with its rewards; and a suite of prompts that are tested.

function completionsSection() {
  const { completions } = runs[0];
  const at = Math.min(completions.length - 1, state.rollout === "-1" ? completions.length - 1 : Number(state.rollout));
  const rollout = completions[at];
  const all = completions.flatMap((found) => found.rewards);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const redraw = () => {
    const old = document.getElementById("completions");
    old.replaceWith(completionsSection());
  };
  const go = (k) => change({ rollout: String(Math.min(completions.length - 1, Math.max(0, k))) }, redraw);
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / (values.length || 1);
  const groups = rollout.groups.map((group) =>
    element(
      "div",
      { class: "group" },
      element("p", { class: "asked" }, group.prompt),
      group.rows.map((row) =>
        element(
          "div",
          {
            class: "completion",
            title: Object.entries(row.rewards)
              .map(([name, value]) => `${name} ${shown(value)}`)
              .join("\n"),
          },
          element(
            "span",
            { class: "reward" },
            shown(row.reward),
            element("i", { style: `--level: ${Math.round((100 * ((row.reward ?? low) - low)) / (high - low || 1))}%` }),
          ),
          element("p", {}, row.text, row.cut ? element("span", { class: "cut" }, "cut") : null),
          element(
            "span",
            { class: "advantage" },
            row.advantage ? `${row.advantage > 0 ? "+" : "−"}${Math.abs(row.advantage).toFixed(2)}` : "0",
          ),
        ),
      ),
    ),
  );
  return section(
    "completions",
    "Completions and their rewards",
    `${completions.length} of the rollouts; three of a rollout's groups: the first, and those whose rewards differ most`,
    element(
      "div",
      { class: "controls" },
      element("button", { type: "button", class: "plain", onclick: () => go(at - 1) }, "‹"),
      rewardMap(completions, at, low, high, go),
      element("button", { type: "button", class: "plain", onclick: () => go(at + 1) }, "›"),
      element(
        "span",
        {},
        element("b", {}, `step ${shown(rollout.step)}`),
        ` · mean reward ${shown(mean(rollout.rewards))} of ${rollout.count} completions`,
      ),
    ),
    element("div", { class: "groups" }, groups),
  );
}

// How the rewards of each rollout are spread: a column of cells each, the darker the more completions.
function rewardMap(completions, at, low, high, go) {
  const bins = 12,
    cell = 5,
    wide = Math.max(5, Math.min(16, Math.floor(420 / completions.length)));
  const drawn = completions.map((rollout, k) => {
    const counts = new Array(bins).fill(0);
    for (const reward of rollout.rewards)
      counts[Math.min(bins - 1, Math.floor(((reward - low) / (high - low || 1)) * bins))]++;
    const most = Math.max(...counts, 1);
    return element(
      "svg:g",
      { class: k === at ? "column current" : "column", onclick: () => go(k) },
      element("svg:title", {}, `step ${rollout.step}`),
      element("svg:rect", { class: "back", x: k * wide, y: 0, width: wide, height: bins * cell }),
      counts.map((count, bin) =>
        count
          ? element("svg:rect", {
              x: k * wide + 0.5,
              y: (bins - 1 - bin) * cell + 0.5,
              width: wide - 1,
              height: cell - 1,
              "fill-opacity": (0.15 + 0.85 * (count / most)).toFixed(2),
            })
          : null,
      ),
    );
  });
  return element(
    "svg:svg",
    {
      class: "map",
      width: completions.length * wide,
      height: bins * cell,
      role: "img",
      "aria-label": `rewards from ${shown(low)} to ${shown(high)}, by rollout`,
    },
    drawn,
  );
}

// --- a suite of prompts that are tested -------------------------------------------------------------------------------

function regressionSection() {
  const evaluations = runs[0].regression,
    last = evaluations.at(-1),
    first = evaluations[0];
  const rate = (group) => (group && group.total ? group.passed / group.total : null);
  const rows = Object.entries(last.groups).map(([name, group]) =>
    element(
      "tr",
      {},
      element("td", {}, name),
      element("td", { class: "number" }, `${shown(group.passed)} of ${shown(group.total)}`),
      element("td", { class: "number" }, percent(rate(group))),
      element("td", { class: "number dim" }, evaluations.length > 1 ? `from ${percent(rate(first.groups[name]))}` : ""),
      element(
        "td",
        {},
        element(
          "span",
          { class: "squares" },
          evaluations
            .slice(-24)
            .map((found) => square(rate(found.groups[name]), `step ${found.step}: ${percent(rate(found.groups[name]))}`)),
        ),
      ),
    ),
  );
  return section(
    "regression",
    "Regression suite",
    `step ${shown(last.step)}`,
    element(
      "div",
      { class: "columns" },
      element("table", {}, element("tbody", {}, rows)),
      element("div", {}, listOf("turned", last.turned), listOf("not passed", last.failed)),
    ),
  );
}

function listOf(title, lines) {
  const items = lines.map((line) => element("li", {}, line));
  return lines.length ? [element("h3", {}, title), element("ul", { class: "lines scroll" }, items)] : null;
}

const percent = (share) => (share === null || share === undefined ? "–" : `${trimmed((100 * share).toPrecision(3))} %`);
