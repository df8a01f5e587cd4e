// Data, memory, the machine, settings.

function dataSection() {
  const { sources, eval_sources, lengths, packing, plan, example, batched_as, marked: parts } = runs[0].data;
  const about = [
    plan &&
      `${shown(plan.steps)} steps of ${shown(plan.examples_per_step)} ${batched_as}s, ` +
        `about ${shown(plan.tokens_per_step)} tokens each`,
    plan?.steps_per_epoch && `an epoch is ${shown(plan.steps_per_epoch)} steps`,
    packing &&
      `packed into ${shown(packing.rows)} rows of up to ${shown(packing.max_length)} tokens, ` +
        `${percent(packing.utilisation)} full`,
  ];
  const columns = [lengths && lengthsOf(lengths, example), parts?.length && firstExample(parts, example)];
  return section(
    "data",
    "Data",
    about.filter(Boolean).join(" · "),
    sourcesTable(sources || [], eval_sources || []),
    element("div", { class: "columns" }, columns.filter(Boolean)),
  );
}

function sourcesTable(trained, heldOut) {
  const cells = ({ source, path, columns, rows, examples, tokens, trained_tokens, share }, note) => [
    element("span", { title: path }, source, note),
    dim((columns || []).join(", ")),
    rows,
    examples,
    tokens,
    trained_tokens === undefined ? null : figure(percent(trained_tokens / Math.max(1, tokens))),
    share === undefined || share === null ? null : figure(percent(share)),
  ];
  const all = [...trained.map((source) => cells(source)), ...heldOut.map((source) => cells(source, dim(", held out")))];
  const notes = [...trained, ...heldOut].flatMap(({ dropped, noted }) => [
    ...reasons("left out", dropped),
    ...reasons("noted", noted),
  ]);
  return [table(["source", "columns", "rows", "used", "tokens", "trained", "share"], all), notes];
}

function reasons(word, found) {
  return Object.entries(found || {}).map(([reason, { count, first }]) =>
    element("p", { class: "trouble" }, `${word}: ${shown(count)}, ${reason} (${(first || []).join(", ")})`),
  );
}

function lengthsOf(lengths, example) {
  const most = Math.max(...lengths.histogram.map(([, , count]) => count));
  const bars = lengths.histogram.map(([low, high, count]) =>
    bar(low === high ? shown(low) : `${shown(low)}–${shown(high)}`, count / most, shown(count)),
  );
  const quantiles = ["min", "p50", "p90", "p99", "max", "mean"].map((name) => `${name} ${shown(lengths[name])}`);
  const title = element("h3", {}, `tokens of a ${example}`);
  return element("div", {}, title, bars, element("p", { class: "dim" }, quantiles.join(" · ")));
}

function bar(label, level, value) {
  const filled = element("i", { style: `--level: ${100 * level}%` });
  return element("div", { class: "bar" }, figure(label), filled, dim(value));
}

function firstExample(sides, example) {
  const isMarked = sides.some(({ parts }) => parts.some(([, isTrained]) => isTrained));
  const note = isMarked ? element("small", {}, "what is trained is marked") : null;
  const texts = sides.map(({ side, parts }) => {
    const text = parts.map(([part, isTrained]) => (isTrained ? element("mark", {}, part) : part));
    return element("div", { class: "example" }, side ? element("h3", {}, side) : null, element("pre", {}, text));
  });
  return element("div", {}, element("h3", {}, `the first ${example}`, note), texts);
}

function machineSection() {
  const { memory, about } = runs[0];
  const used = memory && [
    bar("memory", memory.peak / (memory.limit || memory.peak), gib(memory.peak)),
    memory.limit ? element("p", { class: "dim" }, `at most, of ${gib(memory.limit)}`) : null,
  ];
  const parts = element("div", { class: "columns" }, element("div", {}, used), table(null, about, "settings"));
  return section("machine", "Memory and machine", null, parts);
}

function settingsSection() {
  const [{ settings, command }] = runs;
  const redraw = () => document.getElementById("settings").replaceWith(settingsSection());
  const isShown = ([, , isDefault]) => state.settings === "all" || !isDefault;
  const groups = settings.map(({ group, rows }) => {
    const kept = rows.filter(isShown);
    const lines = kept.map(([name, value, isDefault]) => ({ cells: [name, value], class: isDefault && "dim" }));
    if (!lines.length) return null;
    return element("div", { class: "group" }, element("h3", {}, group), table(null, lines, "settings"));
  });
  const options = [["changed", "other than the defaults"], ["all"]];
  return section(
    "settings",
    "Settings",
    null,
    element("div", { class: "controls" }, choice("settings", options, redraw)),
    element("div", { class: "settings-groups" }, groups),
    command ? element("div", { class: "command" }, dim("again:"), element("code", {}, command)) : null,
  );
}
