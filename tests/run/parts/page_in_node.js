// Draws a page of report.py without a browser: node page_in_node.js report.html [#address]. Prints as JSON the text of the
// page, its charts, and whether anything was put into it as markup.

const fs = require("fs");
const vm = require("vm");

class Node {
  constructor(tag) {
    Object.assign(this, { tag, attributes: {}, children: [], dataset: {}, style: {} });
  }
  setAttribute(name, value) {
    this.attributes[name] = String(value);
  }
  get className() {
    return this.attributes.class;
  }
  append(...more) {
    this.children.push(...more);
  }
  replaceChildren(...more) {
    this.children = more;
  }
  get textContent() {
    return this.children.map((child) => (child instanceof Node ? child.textContent : String(child))).join(" ");
  }
  getBoundingClientRect() {
    return { width: 360, left: 0 };
  }
  addEventListener() {}
}

const [, , file, hash = ""] = process.argv;
const html = fs.readFileSync(file, "utf8");
const data = new Node("script");
data.append(/<script type="application\/json" id="data">(.*?)<\/script>/s.exec(html)[1]);
const nodes = { page: new Node("main"), data };
const document = {
  createElement: (tag) => new Node(tag),
  createElementNS: (_, tag) => new Node(tag),
  getElementById: (id) => nodes[id],
  documentElement: new Node("html"),
};
Object.assign(globalThis, { document, window: new Node("window"), innerWidth: 1300, setTimeout() {} });
globalThis.location = { hash, search: "", href: `file://${file}` };
vm.runInThisContext(/<script>\n"use strict";(.*)<\/script>/s.exec(html)[1]);
vm.runInThisContext(`
  const drawnCharts = charts.filter((chart) => chart.series).map((chart) => ({
    name: chart.frame.name,
    axis: chart.axis,
    curves: chart.series.map(({ title, colour, x }) => ({ title, colour, last: x.at(-1) })),
    csv: tableOf(chart),
  }));
`);
console.log(vm.runInThisContext(`JSON.stringify({ text: document.getElementById("page").textContent, charts: drawnCharts })`));
