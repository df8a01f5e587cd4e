// Samples: the same prompt over the evaluations, or side by side in several runs, with what is new marked.

// The words of `after`, each with whether it is new since `before`: those outside of a longest common subsequence.
function changedWords(before, after) {
  const words = (text) => text.match(/\s+|\p{L}+|\p{N}+|[^\s\p{L}\p{N}]/gu) || [];
  const [a, b] = [words(before), words(after)];
  if (a.length * b.length > 600000) return b.map((word) => [word, false]);
  const width = b.length + 1;
  const common = new Uint16Array((a.length + 1) * width); // words that a[i..] and b[j..] share
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      const [here, below] = [i * width + j, (i + 1) * width + j];
      common[here] = a[i] === b[j] ? common[below + 1] + 1 : Math.max(common[below], common[here + 1]);
    }
  }
  const found = [];
  let i = 0;
  b.forEach((word, j) => {
    while (i < a.length && a[i] !== word && common[(i + 1) * width + j] >= common[i * width + j + 1]) i++;
    const isKept = i < a.length && a[i] === word;
    found.push([word, !isKept]);
    if (isKept) i++;
  });
  return found;
}

function marked(before, after) {
  if (before === null || before === undefined) return after;
  const parts = [];
  for (const [word, isNew] of changedWords(before, after)) {
    if (parts.length && (parts.at(-1)[1] === isNew || !word.trim())) parts.at(-1)[0] += word;
    else parts.push([word, isNew]);
  }
  return parts.map(([text, isNew]) => (isNew ? element("mark", {}, text) : text));
}

// The texts of a prompt over the evaluations, with 0 (as before) spelled out.
function texts(prompt) {
  let before = null;
  return prompt.texts.map((text) => {
    if (text !== 0) before = text ?? before;
    return text === null ? null : before;
  });
}

// The samples of a run, the score that is shown, and a function from its values to 0 (the worst) to 1.
function samplesOf(run) {
  const { samples } = run;
  const { names } = samples;
  const score = names.includes(state.score) ? state.score : names.find((name) => name !== "reward") || names[0];
  const values = samples.prompts.flatMap((prompt) => prompt.scores[score] || []).filter((value) => value !== null);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const level = (value) => {
    if (value === null || value === undefined) return null;
    return high > low ? (value - low) / (high - low) : Number(value > 0);
  };
  return { samples, score, level };
}

function square(level, title) {
  if (level === null) return element("i", { class: "square none", title });
  return element("i", { class: "square", style: `--level: ${Math.round(level * 100)}%`, title });
}

const samplesSection = () => (several() ? samplesSideBySide() : samplesOverTime());

function redrawSamples() {
  const scrolled = document.querySelector("#samples .list").scrollTop;
  document.getElementById("samples").replaceWith(samplesSection());
  document.querySelector("#samples .list").scrollTop = scrolled;
}

// A list of prompts, and what one of them was answered. rows: {prompt, number, squares}; filters: [name, label, test].
function browser(title, aside, controls, rows, filters, detail) {
  const [, , test] = filters.find(([name]) => name === state.show) || filters[0];
  const kept = rows.filter(test);
  const open = kept.find((row) => String(row.number) === state.prompt) || kept[0];
  const list = kept.map((row) => {
    const squares = element("span", { class: "squares" }, row.squares);
    const parts = [squares, element("span", { class: "text" }, row.prompt.prompt)];
    const attributes = { class: "prompt", "aria-pressed": String(row === open) };
    return button(parts, () => change({ prompt: String(row.number) }, redrawSamples), attributes);
  });
  const options = filters.map(([name, label, isIn]) => [name, `${label} ${rows.filter(isIn).length}`]);
  return section(
    "samples",
    title,
    aside,
    element("div", { class: "controls" }, choice("show", options, redrawSamples), controls),
    element(
      "div",
      { class: "browser" },
      element("div", { class: "list" }, list),
      element("div", { class: "detail" }, open ? [asked(open.prompt), detail(open)] : dim("none")),
    ),
  );
}

const asked = ({ prompt, temperature }) =>
  element("p", { class: "asked" }, prompt, temperature ? dim(` at temperature ${temperature}`) : null);

// An answer below a line about it.
function answer(line, text, style) {
  return element("div", { class: "answer", style }, element("div", { class: "dim" }, line), element("p", {}, text ?? "–"));
}

const scoresAt = (prompt, i) =>
  Object.entries(prompt.scores).map(([name, values]) => element("span", {}, `${name} ${shown(values.at(i))}`));

function samplesOverTime() {
  const { samples, score, level } = samplesOf(runs[0]);
  const { names, prompts, steps } = samples;
  const rows = prompts.map((prompt, number) => {
    const values = prompt.scores[score] || [];
    const squares = values.map((value, i) => square(level(value), `step ${steps[i]}: ${shown(value)}`));
    return { prompt, number, squares, all: texts(prompt), scores: values.map(level) };
  });
  const first = (row) => row.scores[0] ?? 0;
  const last = (row) => row.scores.at(-1) ?? 0;
  const filters = [
    ["all", "all", () => true],
    ["changed", "changed", (row) => new Set(row.all.filter((text) => text !== null)).size > 1],
  ];
  const byScore = [
    ["better", "better", (row) => last(row) > first(row)],
    ["worse", "worse", (row) => last(row) < first(row)],
    ["low", "low at the end", (row) => last(row) < 0.5],
  ];
  const shownFilters = score ? [...filters, ...byScore] : filters;
  if (names.length > 1) state.score = score;
  const options = names.map((name) => [name]);
  // each evaluation whose answer is another one, and the last
  const detail = ({ prompt, all }) =>
    steps.map((step, i) => {
      const before = all.slice(0, i).findLast((text) => text !== null);
      const isSame = all[i] !== null && all[i] === before;
      if (isSame && i < steps.length - 1) return null;
      const line = [`step ${shown(step)}`, scoresAt(prompt, i), isSame ? element("span", {}, "unchanged") : null];
      return answer(line, all[i] === null ? null : marked(before, all[i]));
    });
  const aside =
    samples.of > prompts.length
      ? `the first ${prompts.length} of ${samples.of} prompts`
      : `${samples.of} prompts, at ${steps.length} evaluations; what is new is marked`;
  return browser("Samples", aside, names.length > 1 && choice("score", options, redrawSamples), rows, shownFilters, detail);
}

function samplesSideBySide() {
  const sides = runs.map(samplesOf);
  const key = (prompt) => JSON.stringify([prompt.prompt, prompt.temperature]);
  const tables = sides.map(({ samples }) => new Map(samples.prompts.map((prompt) => [key(prompt), prompt])));
  const shared = sides[0].samples.prompts.filter((prompt) => tables.every((known) => known.has(key(prompt))));
  const { score } = sides[0];
  const rows = shared.map((prompt, number) => {
    const mine = tables.map((known) => known.get(key(prompt)));
    const scores = mine.map((found, k) => sides[k].level(found.scores[score]?.at(-1)));
    const squares = scores.map((value, k) => square(value, runs[k].name));
    return { prompt, number, squares, mine, scores, finals: mine.map((found) => texts(found).at(-1)) };
  });
  const filters = [
    ["all", "all", () => true],
    ["differ", "differ", (row) => new Set(row.finals).size > 1],
  ];
  const second = runs.length === 2 ? runs[1].name : "another";
  const byScore = [
    ["first", `better in ${runs[0].name}`, ({ scores }) => scores.some((value) => value < scores[0])],
    ["others", `better in ${second}`, ({ scores }) => scores.some((value) => value > scores[0])],
  ];
  const detail = ({ finals, mine }) => {
    const answers = finals.map((text, k) => {
      const line = [element("b", {}, runs[k].name), scoresAt(mine[k], -1)];
      return answer(line, k && text !== null ? marked(finals[0], text) : text, `--colour: var(--${colourOf(k)})`);
    });
    return element("div", { class: "sides" }, answers);
  };
  const aside = `${shared.length} prompts of all runs, at their last evaluations; marked: other than in ${runs[0].name}`;
  return browser("Samples side by side", aside, null, rows, score ? [...filters, ...byScore] : filters, detail);
}
