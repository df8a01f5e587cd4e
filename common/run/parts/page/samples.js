// Samples: the same prompt over the evaluations, or side by side in several runs, with what is new marked.

// The words of `after`, each with whether it is new since `before`.
function changedWords(before, after) {
  const words = (text) => text.match(/\s+|\p{L}+|\p{N}+|[^\s\p{L}\p{N}]/gu) || [];
  const [a, b] = [words(before), words(after)];
  if (a.length * b.length > 600000) return b.map((word) => [word, false]);
  const width = b.length + 1,
    table = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      table[i * width + j] =
        a[i] === b[j] ? table[(i + 1) * width + j + 1] + 1 : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
    }
  }
  const found = [];
  for (let i = 0, j = 0; j < b.length;) {
    if (i < a.length && a[i] === b[j]) {
      found.push([b[j++], false]);
      i++;
    } else if (i < a.length && table[(i + 1) * width + j] >= table[i * width + j + 1]) i++;
    else found.push([b[j++], true]);
  }
  return found;
}

function marked(before, after) {
  if (before === null || before === undefined) return after;
  const parts = [];
  for (const [word, fresh] of changedWords(before, after)) {
    if (parts.length && (parts.at(-1)[1] === fresh || !word.trim())) parts.at(-1)[0] += word;
    else parts.push([word, fresh]);
  }
  return parts.map(([text, fresh]) => (fresh ? element("mark", {}, text) : text));
}

// The texts of a prompt over the evaluations, with 0 (as before) spelled out.
function texts(prompt) {
  let before = null;
  return prompt.texts.map((text) => {
    if (text !== 0) before = text ?? before;
    return text === null ? null : before;
  });
}

function samplesOf(run) {
  const { samples } = run;
  const score = samples.names.includes(state.score)
    ? state.score
    : samples.names.find((name) => name !== "reward") || samples.names[0];
  const values = samples.prompts
    .flatMap((prompt) => prompt.scores[score] || [])
    .filter((value) => value !== null && value !== undefined);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const level = (value) =>
    value === null || value === undefined ? null : high > low ? (value - low) / (high - low) : value > 0 ? 1 : 0;
  return { samples, score, level };
}

function square(level, title) {
  return element("i", {
    class: level === null ? "square none" : "square",
    style: level === null ? null : `--level: ${Math.round(level * 100)}%`,
    title,
  });
}

function samplesSection() {
  return several() ? samplesSideBySide() : samplesOverTime();
}

function browser(id, title, aside, controls, rows, filters, detail) {
  const filter = filters.find(([name]) => name === state.show) || filters[0];
  const kept = rows.filter(filter[2]);
  const open = kept.find((row) => String(row.number) === state.prompt) || kept[0];
  const list = kept.map((row) =>
    element(
      "button",
      {
        type: "button",
        class: "prompt",
        "aria-pressed": String(row === open),
        onclick: () => change({ prompt: String(row.number) }, redrawSamples),
      },
      element("span", { class: "squares" }, row.squares),
      element("span", { class: "text" }, row.prompt.prompt),
    ),
  );
  const chosen = filters.map(([name, label, test]) => [name, `${label} ${rows.filter(test).length}`]);
  if (filter[0] !== state.show) state.show = filter[0];
  return section(
    id,
    title,
    aside,
    element("div", { class: "controls" }, choice("show", chosen, redrawSamples), controls),
    element(
      "div",
      { class: "browser" },
      element("div", { class: "list" }, list),
      element("div", { class: "detail" }, open ? detail(open) : element("p", { class: "dim" }, "none")),
    ),
  );
}

function redrawSamples() {
  const old = document.getElementById("samples");
  const scrolled = old.querySelector(".list").scrollTop;
  old.replaceWith(samplesSection());
  document.querySelector("#samples .list").scrollTop = scrolled;
}

function samplesOverTime() {
  const { samples, score, level } = samplesOf(runs[0]);
  const rows = samples.prompts.map((prompt, number) => {
    const all = texts(prompt),
      scores = (prompt.scores[score] || []).map(level);
    return {
      prompt,
      number,
      all,
      scores,
      squares: scores.map((value, i) => square(value, `step ${samples.steps[i]}: ${shown(prompt.scores[score][i])}`)),
    };
  });
  const [first, last] = [(row) => row.scores[0] ?? 0, (row) => row.scores.at(-1) ?? 0];
  const filters = [
    ["all", "all", () => true],
    ["changed", "changed", (row) => new Set(row.all.filter((text) => text !== null)).size > 1],
  ];
  if (score)
    filters.push(
      ["better", "better", (row) => last(row) > first(row)],
      ["worse", "worse", (row) => last(row) < first(row)],
      ["low", "low at the end", (row) => last(row) < 0.5],
    );
  const scoreChoice =
    samples.names.length > 1
      ? choice(
          "score",
          samples.names.map((name) => [name, name]),
          redrawSamples,
        )
      : null;
  if (score && samples.names.length > 1) state.score = score;
  const detail = (row) => {
    const parts = [element("p", { class: "asked" }, row.prompt.prompt, temperature(row.prompt))];
    let before = null,
      since = null;
    row.all.forEach((text, i) => {
      const again = text !== null && text === before;
      if (again && i < row.all.length - 1) {
        since ??= samples.steps[i];
        return;
      }
      since = null;
      parts.push(
        element(
          "div",
          { class: "answer" },
          element(
            "div",
            { class: "dim" },
            `step ${shown(samples.steps[i])}`,
            scoresAt(row.prompt, i),
            again ? element("span", {}, "unchanged") : null,
          ),
          element("p", {}, text === null ? "–" : marked(before, text)),
        ),
      );
      before = text ?? before;
    });
    return parts;
  };
  const aside =
    samples.of > samples.prompts.length
      ? `the first ${samples.prompts.length} of ${samples.of} prompts`
      : `${samples.of} prompts, at ${samples.steps.length} evaluations; what is new is marked`;
  return browser("samples", "Samples", aside, scoreChoice, rows, filters, detail);
}

const temperature = (prompt) =>
  prompt.temperature ? element("span", { class: "dim" }, ` at temperature ${prompt.temperature}`) : null;
const scoresAt = (prompt, i) =>
  Object.entries(prompt.scores).map(([name, values]) => element("span", {}, `${name} ${shown(values[i])}`));

function samplesSideBySide() {
  const sides = runs.map((run, k) => ({ run, k, ...samplesOf(run) }));
  const key = (prompt) => JSON.stringify([prompt.prompt, prompt.temperature]);
  const tables = sides.map(({ samples }) => new Map(samples.prompts.map((prompt) => [key(prompt), prompt])));
  const shared = sides[0].samples.prompts.filter((prompt) => tables.every((table) => table.has(key(prompt))));
  const { score } = sides[0];
  const rows = shared.map((prompt, number) => {
    const mine = tables.map((table) => table.get(key(prompt)));
    const scores = mine.map((found, k) => sides[k].level((found.scores[score] || []).at(-1)));
    return {
      prompt,
      number,
      mine,
      scores,
      finals: mine.map((found) => texts(found).at(-1)),
      squares: scores.map((value, k) => square(value, runs[k].name)),
    };
  });
  const filters = [
    ["all", "all", () => true],
    ["differ", "differ", (row) => new Set(row.finals).size > 1],
  ];
  if (score) {
    filters.push([
      "first",
      `better in ${runs[0].name}`,
      (row) => row.scores.slice(1).some((value) => value < row.scores[0]),
    ]);
    filters.push([
      "others",
      runs.length === 2 ? `better in ${runs[1].name}` : "better in another",
      (row) => row.scores.slice(1).some((value) => value > row.scores[0]),
    ]);
  }
  const detail = (row) => [
    element("p", { class: "asked" }, row.prompt.prompt, temperature(row.prompt)),
    element(
      "div",
      { class: "sides" },
      row.finals.map((text, k) =>
        element(
          "div",
          { class: "answer", style: `--colour: var(--${colourOf(k)})` },
          element(
            "div",
            { class: "dim" },
            element("b", {}, runs[k].name),
            scoresAt(row.mine[k], row.mine[k].texts.length - 1),
          ),
          element("p", {}, k ? marked(row.finals[0], text ?? "–") : (text ?? "–")),
        ),
      ),
    ),
  ];
  return browser(
    "samples",
    "Samples side by side",
    `${shared.length} prompts that all runs were given, at their last evaluations; marked: other than in ${runs[0].name}`,
    null,
    rows,
    filters,
    detail,
  );
}
