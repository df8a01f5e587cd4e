// The sections in their order, and how a page of a run that goes on renews itself.

const one = () => !several();
const SECTIONS = [
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
  const sections = SECTIONS.filter(([, , has]) => has()).map(drawn);
  const empty = runs.some((run) => run.curves.length)
    ? null
    : element("p", { class: "empty" }, "Nothing has been logged yet.");
  document
    .getElementById("page")
    .replaceChildren(
      top_(),
      switches(),
      ...(empty ? [empty] : []),
      ...sections,
      element(
        "footer",
        {},
        several() ? "" : `${runs[0].folder} · `,
        live() ? `renews itself every ${RENEW / 1000} s` : `written ${when(Math.max(...runs.map((run) => run.written)))}`,
        " · Plainloop",
      ),
    );
  document.getElementById("page").dataset.drawn = "yes";
  drawCharts();
}

// --- a run that goes on -----------------------------------------------------------------------------------------------

// The page is loaded again in a frame of its own, which hands over its data and draws nothing: the switches, the place and
// what is selected stay as they are. It ends with the run.
const RENEW = 10000;
const live = () => one() && runs[0].state === "running";

function renew() {
  if (!live()) return;
  const frame = element("iframe", {
    hidden: true,
    title: "newer data",
    src: `${location.href.split(/[?#]/)[0]}?data=${Date.now()}`,
  });
  const done = () => {
    window.removeEventListener("message", take);
    frame.remove();
    setTimeout(renew, RENEW);
  };
  const limit = setTimeout(done, 8000);
  function take(event) {
    if (event.source !== frame.contentWindow || !event.data?.runs) return;
    clearTimeout(limit);
    if (event.data.runs[0].written !== runs[0].written && !String(getSelection())) {
      ({ runs, compared } = event.data);
      const places = [...document.querySelectorAll(".list, .scroll")].map((node) => node.scrollTop);
      const open = document.querySelector("details")?.open;
      update();
      document.querySelectorAll(".list, .scroll").forEach((node, i) => {
        node.scrollTop = places[i] || 0;
      });
      if (open) document.querySelector("details").open = true;
    }
    done();
  }
  window.addEventListener("message", take);
  document.body.append(frame);
}

if (location.search.startsWith("?data") && window.parent !== window) {
  window.parent.postMessage({ runs, compared }, "*");
} else {
  readAddress();
  update();
  window.addEventListener("hashchange", () => {
    readAddress();
    update();
  });
  let width = innerWidth;
  window.addEventListener("resize", () => {
    if (innerWidth !== width) {
      width = innerWidth;
      drawCharts();
    }
  });
  setTimeout(renew, RENEW);
}
