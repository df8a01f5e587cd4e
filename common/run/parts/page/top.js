// The top of the page: the name, the state, the figures that matter; of several runs, a table of them.

const STATES = { running: "running", finished: "finished", stopped: "stopped", died: "died", killed: "killed", unknown: "" };

function silence(run) {
  const seconds = Date.now() / 1000 - (run.news || run.written);
  return run.state === "running" && seconds > 900 ? `no news for ${duration(seconds)}` : "";
}

function top_() {
  const theme = choice("theme", [
    ["auto", "auto"],
    ["light", "light"],
    ["dark", "dark"],
  ]);
  if (several()) {
    return element(
      "header",
      {},
      element("div", { class: "title" }, element("h1", {}, `${runs.length} runs compared`), theme),
      runsTable(),
    );
  }
  const run = runs[0];
  const model = (run.about.find(([name]) => name === "model") || [])[1];
  return element(
    "header",
    {},
    element(
      "div",
      { class: "title" },
      element("h1", {}, run.name),
      element("span", { class: `state ${run.state}` }, STATES[run.state], silence(run) && ` · ${silence(run)}`),
      element("span", { class: "dim" }, [run.script, model, `written ${when(run.written)}`].filter(Boolean).join(" · ")),
      theme,
    ),
    element(
      "div",
      { class: "figures" },
      keyFigures(run).map(({ name, before, after }) =>
        element(
          "div",
          { class: "figure" },
          element("span", { class: "dim" }, name),
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

// What was evaluated, before and after, in the order of the frames; without evaluations, what was trained.
function keyFigures(run, most = 4) {
  const found = [];
  for (const frame of run.frames) {
    const name = `eval_${frame.name}`;
    if (!frame.machine && !isConstant(frame.name) && name in run.after)
      found.push({ name: frame.name, before: run.before[name], after: run.after[name] });
  }
  if (!found.length) {
    for (const curve of run.curves) {
      const machine = run.frames.find((frame) => frame.name === curve.frame)?.machine;
      if (!machine && !isConstant(curve.frame)) found.push({ name: curve.frame, before: curve.y[0], after: curve.y.at(-1) });
    }
  }
  return found.slice(0, most);
}

function facts(run) {
  const speed = run.seconds && run.tokens ? `${shown(run.tokens / run.seconds)} / s` : null;
  const found = [
    ["steps", run.steps && run.steps !== run.step ? `${shown(run.step)} of ${shown(run.steps)}` : shown(run.step)],
    ["tokens", run.tokens ? `${shown(run.tokens)}${speed ? `, ${speed}` : ""}` : null],
    ["time", run.seconds ? duration(run.seconds) : null],
    [
      "left",
      run.state === "running" && run.steps > run.step && run.step && run.seconds
        ? `about ${duration(((run.steps - run.step) * run.seconds) / run.step)}`
        : null,
    ],
    ["memory", run.memory?.peak ? `${gib(run.memory.peak)} at most` : null],
    [
      "best",
      run.best?.step
        ? `${run.best.metric.replace("eval_", "")} ${shown(run.best.value)}, step ${shown(run.best.step)}`
        : null,
    ],
  ];
  return found.filter(([, value]) => value);
}

const gib = (value) => (value >= 1 ? `${shown(+value.toPrecision(3))} GiB` : `${shown(+(value * 1024).toPrecision(3))} MiB`);
const when = (seconds) => new Date(seconds * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });

function runsTable() {
  const names = [...new Set(runs.flatMap((run) => keyFigures(run, 6).map((figure) => figure.name)))].slice(0, 7);
  const head = ["run", ...names, "steps", "tokens", "time"].map((name, i) =>
    element("th", { class: i ? "number" : "" }, name),
  );
  const rows = runs.map((run, k) => {
    const figures = Object.fromEntries(keyFigures(run, 99).map((figure) => [figure.name, figure]));
    return element(
      "tr",
      {},
      element(
        "td",
        {},
        runButton(run, k),
        element("span", { class: "dim" }, ` ${["finished", "unknown"].includes(run.state) ? "" : run.state}`),
      ),
      names.map((name) => element("td", { class: "number" }, figures[name] ? shown(figures[name].after) : "–")),
      element("td", { class: "number" }, shown(run.step)),
      element("td", { class: "number" }, shown(run.tokens)),
      element("td", { class: "number" }, duration(run.seconds)),
    );
  });
  return element(
    "div",
    { class: "wide" },
    element("table", { class: "runs" }, element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows)),
  );
}

// The name of a run in its colour; to press it hides the run's curves, or shows them again.
function runButton(run, k) {
  const hidden = new Set(state.hide.split(",").filter(Boolean));
  const shows = !hidden.delete(String(k));
  if (shows) hidden.add(String(k));
  return element(
    "button",
    {
      type: "button",
      class: "run",
      style: `--colour: var(--${colourOf(k)})`,
      title: `show or hide ${run.name}`,
      "aria-pressed": String(shows),
      onclick: () => change({ hide: [...hidden].join(",") }),
    },
    element("i", {}),
    run.name,
  );
}

function switches() {
  const smooth = element("input", {
    type: "range",
    min: "0",
    max: "1",
    step: "0.05",
    value: state.smooth,
    "aria-label": "smoothing",
    oninput: (event) =>
      change({ smooth: event.target.value }, () => {
        amount.textContent = state.smooth;
        drawCharts();
      }),
  });
  const amount = element("output", {}, state.smooth);
  const axes = [
    ["steps", "steps"],
    ["tokens", "tokens"],
    ["time", "hours"],
  ].filter(([value]) => value === "steps" || knows(value === "tokens" ? "num_tokens" : "seconds"));
  return element(
    "nav",
    { class: "switches" },
    choice("x", axes),
    choice("y", [
      ["auto", "auto"],
      ["linear", "linear"],
      ["log", "log"],
    ]),
    element("label", {}, "smoothing", smooth, amount),
    state.zoom
      ? element("button", { type: "button", class: "plain", onclick: () => change({ zoom: "" }) }, "whole run")
      : element("span", { class: "hint" }, "drag in a frame to look closer"),
    several()
      ? element(
          "span",
          { class: "chips" },
          runs.map((run, k) => runButton(run, k)),
        )
      : element("span", { class: "anchors" }, sectionLinks()),
  );
}
