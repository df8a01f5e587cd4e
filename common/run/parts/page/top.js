// The top of the page: the name, the state, the figures that matter; of several runs, a table of them.

function silence(run) {
  const seconds = Date.now() / 1000 - (run.news || run.written);
  return run.state === "running" && seconds > 900 ? ` · no news for ${duration(seconds)}` : "";
}

function head() {
  const theme = choice("theme", [["auto"], ["light"], ["dark"]]);
  if (several()) {
    const title = element("div", { class: "title" }, element("h1", {}, compared.title ?? `${runs.length} runs compared`), theme);
    return element("header", {}, title, compared.trial ? null : runsTable());
  }
  const run = runs[0];
  const model = (run.about.find(([name]) => name === "model") || [])[1];
  const state = run.state === "unknown" ? null : element("span", { class: `state ${run.state}` }, run.state, silence(run));
  const words = [run.script, model, `written ${when(run.written)}`].filter(Boolean);
  const figures = keyFigures(run).slice(0, 4);
  return element(
    "header",
    {},
    element("div", { class: "title" }, element("h1", {}, run.name), state, dim(words.join(" · ")), theme),
    element(
      "div",
      { class: "figures" },
      figures.map(({ frame, before, after }) =>
        element(
          "div",
          { class: "figure" },
          dim(frame),
          element("strong", {}, shown(after)),
          before === undefined ? null : element("span", { class: "from" }, `from ${shown(before)}`),
        ),
      ),
      element(
        "dl",
        { class: "facts" },
        facts(run).map(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]),
      ),
    ),
  );
}

// First and last value of the evaluations, in the order of the frames; without any, of what was trained.
function keyFigures(run) {
  const drawn = run.frames.filter((frame) => !frame.machine && !isConstant(frame.name)).map((frame) => frame.name);
  const all = drawn.map((frame) => run.curves.filter((curve) => curve.frame === frame));
  const firsts = (kind) => all.map((curves) => curves.find((curve) => curve.eval === kind)).filter(Boolean);
  const found = firsts(true).length ? firsts(true) : firsts(false);
  return found.map((curve) => ({
    frame: curve.frame,
    column: curve.eval ? `eval ${curve.frame}` : curve.frame,
    before: run.before[curve.name] ?? curve.y[0],
    after: run.after[curve.name] ?? curve.y.at(-1),
  }));
}

function facts(run) {
  const { step, steps, seconds, tokens, best } = run;
  const speed = seconds ? `, ${shown(tokens / seconds)} / s` : "";
  const isGoing = run.state === "running" && step && steps > step && seconds;
  const found = [
    ["steps", steps && steps !== step ? `${shown(step)} of ${shown(steps)}` : shown(step)],
    ["tokens", tokens && shown(tokens) + speed],
    ["time", seconds && duration(seconds)],
    ["left", isGoing && `about ${duration(((steps - step) * seconds) / step)}`],
    ["memory", run.memory?.peak && `${gib(run.memory.peak)} at most`],
    ["best", best?.step && `${best.metric.replace("eval_", "")} ${shown(best.value)}, step ${shown(best.step)}`],
  ];
  return found.filter(([, value]) => value);
}

// A column holds one metric, as evaluated or as trained: those that several runs have, if there are any.
function runsTable() {
  const found = runs.map((run) => new Map(keyFigures(run).map(({ column, after }) => [column, after])));
  const all = [...new Set(found.flatMap((values) => [...values.keys()]))];
  const owners = (name) => found.filter((values) => values.has(name)).length;
  const shared = all.filter((name) => owners(name) > 1);
  const kept = (shared.length ? shared : all).slice(0, 7);
  const rows = runs.map((run, k) => {
    const state = ["finished", "unknown"].includes(run.state) ? null : dim(` ${run.state}`);
    const values = kept.map((name) => found[k].get(name));
    const name = element("span", {}, runButton(run, k), state);
    return [name, ...values, run.step, run.tokens, figure(duration(run.seconds) ?? "–")];
  });
  return table(["run", ...kept, "steps", "tokens", "time"], rows, "runs");
}

// The name of a run in its colour; to press it hides the run's curves, or shows them again.
function runButton(run, k) {
  const hidden = hiddenRuns();
  const shows = !hidden.delete(String(k));
  if (shows) hidden.add(String(k));
  return button([element("i", {}), run.name], () => change({ hide: [...hidden].join(",") }), {
    class: "run",
    style: `--colour: var(--${colourOf(k)})`,
    title: `show or hide ${run.name}`,
    "aria-pressed": String(shows),
  });
}
