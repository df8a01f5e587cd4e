// The sections in their order, and how a page of a run that goes on renews itself.

const one = () => !several();
const SECTIONS = [
  ["verdicts", "verdicts", () => several() && compared.trial, () => verdictSection()], // tools/trial.js
  ["rates", "rates", () => several() && compared.rates.length, ratesSection],
  ["happened", "events", () => one() && runs[0].events.length, happened],
  ["curves", "curves", () => runs.some((run) => run.curves.length), curves],
  ["differing", "settings", several, differingSection],
  ["regression", "suite", () => one() && runs[0].regression, regressionSection],
  ["samples", "samples", () => runs.every((run) => run.samples), samplesSection],
  ["completions", "completions", () => one() && runs[0].completions, completionsSection],
  ["data", "data", () => one() && runs[0].data, dataSection],
  ["machine", "machine", () => one() && (runs[0].memory || runs[0].about.length), machineSection],
  ["settings", "settings", () => one() && runs[0].settings.length, settingsSection],
];
const presentSections = () => SECTIONS.filter(([, , isThere]) => isThere());

const sectionLinks = () =>
  presentSections().map(([id, name]) =>
    button(name, () => document.getElementById(id).scrollIntoView({ behavior: "smooth" })),
  );

// A section; where a file of the run was damaged, the others stand all the same.
function drawn([id, title, , make]) {
  try {
    return make();
  } catch (error) {
    return section(id, title, `cannot be drawn: ${error.message}`);
  }
}

function update() {
  document.documentElement.dataset.theme = state.theme;
  charts = [];
  const page = document.getElementById("page");
  const isEmpty = !runs.some((run) => run.curves.length);
  const written = `written ${when(Math.max(...runs.map((run) => run.written)))}`;
  const folder = several() ? "" : `${runs[0].folder} · `;
  page.replaceChildren(
    head(),
    switches(),
    isEmpty ? element("p", { class: "empty" }, "Nothing has been logged yet.") : "",
    ...presentSections().map(drawn),
    element("footer", {}, folder, written, live() && ", renews itself", " · drag in a chart to look closer · Plainloop"),
  );
  page.dataset.drawn = "yes";
  drawCharts();
}

// --- a run that goes on -----------------------------------------------------------------------------------------------

// The page is loaded again in a frame of its own, which hands over its data and draws nothing: the switches, the place and
// what is selected stay as they are. It ends with the run.
const RENEW = 10000;
const live = () => one() && runs[0].state === "running";

function renew() {
  if (!live()) return;
  const src = `${location.href.split(/[?#]/)[0]}?data=${Date.now()}`;
  const frame = element("iframe", { hidden: true, title: "newer data", src });
  const done = () => {
    window.removeEventListener("message", take);
    frame.remove();
    setTimeout(renew, RENEW);
  };
  const limit = setTimeout(done, 8000);
  function take(event) {
    if (event.source !== frame.contentWindow || !event.data?.runs) return;
    clearTimeout(limit);
    const isNew = event.data.runs[0].written !== runs[0].written;
    if (isNew && !String(getSelection()) && document.activeElement?.type !== "search") replaceData(event.data);
    done();
  }
  window.addEventListener("message", take);
  document.body.append(frame);
}

function replaceData(data) {
  const lists = () => [...document.querySelectorAll(".list, .scroll")];
  const places = lists().map((node) => node.scrollTop);
  const isOpen = document.querySelector("details")?.open;
  ({ runs, compared } = data);
  update();
  if (isOpen) document.querySelector("details").open = true;
  lists().forEach((node, i) => node.scrollTo(0, places[i] || 0));
}

if (location.search.startsWith("?data") && window.parent !== window) {
  window.parent.postMessage({ runs, compared }, "*");
} else {
  const start = () => {
    readAddress();
    update();
  };
  start();
  window.addEventListener("hashchange", start);
  let width = innerWidth;
  window.addEventListener("resize", () => {
    if (innerWidth !== width) drawCharts();
    width = innerWidth;
  });
  setTimeout(renew, RENEW);
}
