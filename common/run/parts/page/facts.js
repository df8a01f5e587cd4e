// Data, memory, the machine, settings.

function dataSection() {
  const { data } = runs[0];
  const table = (sources, title) =>
    sources && sources.length
      ? [
          element(
            "thead",
            {},
            element(
              "tr",
              {},
              [title, "columns", "rows", "used", "tokens", "trained", "share"].map((name, i) =>
                element("th", { class: i > 1 ? "number" : "" }, name),
              ),
            ),
          ),
          element(
            "tbody",
            {},
            sources.map((source) => [
              element(
                "tr",
                {},
                element("td", { title: source.path }, source.source),
                element("td", { class: "dim" }, (source.columns || []).join(", ")),
                [source.rows, source.examples, source.tokens].map((count) =>
                  element("td", { class: "number" }, shown(count)),
                ),
                element(
                  "td",
                  { class: "number" },
                  source.trained_tokens === undefined ? "–" : percent(source.trained_tokens / Math.max(1, source.tokens)),
                ),
                element("td", { class: "number" }, percent(source.share)),
              ),
              [
                ["left out", source.dropped],
                ["noted", source.noted],
              ].flatMap(([word, reasons]) =>
                Object.entries(reasons || {}).map(([reason, found]) =>
                  element(
                    "tr",
                    { class: "trouble" },
                    element(
                      "td",
                      { colspan: 7 },
                      `${word}: ${shown(found.count)}, ${reason} (${(found.first || []).join(", ")})`,
                    ),
                  ),
                ),
              ),
            ]),
          ),
        ]
      : null;
  const { lengths, packing, plan } = data;
  const most = lengths ? Math.max(...lengths.histogram.map(([, , count]) => count)) : 1;
  const bars =
    lengths &&
    lengths.histogram.map(([low, high, count]) =>
      element(
        "div",
        { class: "bar" },
        element("span", { class: "number" }, low === high ? shown(low) : `${shown(low)}–${shown(high)}`),
        element("i", { style: `--level: ${(100 * count) / most}%` }),
        element("span", { class: "number dim" }, shown(count)),
      ),
    );
  const example = (data.marked || []).map(({ side, parts }) =>
    element(
      "div",
      { class: "example" },
      side ? element("h3", {}, side) : null,
      element(
        "pre",
        {},
        parts.map(([text, trained]) => (trained ? element("mark", {}, text) : text)),
      ),
    ),
  );
  const rest = [
    plan &&
      `${shown(plan.steps)} steps of ${shown(plan.examples_per_step)} ${data.batched_as}s, ` +
        `about ${shown(plan.tokens_per_step)} tokens each`,
    plan && plan.steps_per_epoch && `an epoch is ${shown(plan.steps_per_epoch)} steps`,
    packing &&
      `packed into ${shown(packing.rows)} rows of up to ${shown(packing.max_length)} tokens, ` +
        `${percent(packing.utilisation)} full`,
  ];
  return section(
    "data",
    "Data",
    rest.filter(Boolean).join(" · "),
    element(
      "div",
      { class: "wide" },
      element("table", {}, table(data.sources, "source"), table(data.eval_sources, "held out")),
    ),
    element(
      "div",
      { class: "columns" },
      lengths
        ? element(
            "div",
            {},
            element("h3", {}, `tokens of a ${data.example}`),
            bars,
            element(
              "p",
              { class: "dim" },
              ["min", "p50", "p90", "p99", "max"].map((name) => `${name} ${shown(lengths[name])}`).join(" · "),
              ` · mean ${shown(lengths.mean)}`,
            ),
          )
        : null,
      example.length
        ? element(
            "div",
            {},
            element(
              "h3",
              {},
              `the first ${data.example}`,
              data.marked.some(({ parts }) => parts.some(([, trained]) => trained))
                ? element("small", {}, "what is trained is marked")
                : null,
            ),
            example,
          )
        : null,
    ),
  );
}

function machineSection() {
  const about = element(
    "table",
    { class: "settings" },
    element(
      "tbody",
      {},
      runs[0].about.map(([name, value]) => element("tr", {}, element("td", {}, name), element("td", {}, value))),
    ),
  );
  return section(
    "machine",
    "Memory and machine",
    null,
    element("div", { class: "columns" }, runs[0].memory ? memory() : null, about),
  );
}

function memory() {
  const { peak, limit } = runs[0].memory;
  return element(
    "div",
    { class: "bars" },
    element(
      "div",
      { class: "bar measured" },
      element("span", {}, "memory, at most"),
      element("i", { style: `--level: ${(100 * peak) / (limit || peak)}%` }),
      element("span", { class: "number" }, gib(peak)),
    ),
    limit ? element("p", { class: "dim" }, `there are ${gib(limit)}`) : null,
  );
}

function settingsSection() {
  const [run] = runs;
  const all = state.settings === "all";
  const groups = run.settings
    .map(({ group, rows }) => [group, rows.filter(([, , unchanged]) => all || !unchanged)])
    .filter(([, rows]) => rows.length);
  const redraw = () => document.getElementById("settings").replaceWith(settingsSection());
  const table = (title, rows) =>
    element(
      "div",
      { class: "group" },
      element("h3", {}, title),
      element(
        "table",
        { class: "settings" },
        element(
          "tbody",
          {},
          rows.map(([name, value, unchanged]) =>
            element("tr", { class: unchanged ? "dim" : "" }, element("td", {}, name), element("td", {}, value)),
          ),
        ),
      ),
    );
  return section(
    "settings",
    "Settings",
    null,
    element(
      "div",
      { class: "controls" },
      choice(
        "settings",
        [
          ["changed", "other than the defaults"],
          ["all", "all"],
        ],
        redraw,
      ),
    ),
    element(
      "div",
      { class: "settings-groups" },
      groups.map(([group, rows]) => table(group, rows)),
    ),
    run.command
      ? element("div", { class: "command" }, element("span", { class: "dim" }, "again:"), element("code", {}, run.command))
      : null,
  );
}
