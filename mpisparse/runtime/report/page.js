// The page: what the reader chose, the controls for it, and the charts, which share their cursor and their zoom.
"use strict";

const page = {
  data: JSON.parse(document.getElementById("data").textContent),
  view: { hidden: new Set(), grouped: true, smoothing: 0, zoom: {} },
  plots: new Map(),
  pointer: null, // the plot under it

  // The shown range of an axis.
  range(axis) {
    return this.view.zoom[axis] || this.data.axes[axis].range;
  },

  // The place of a line in the order of colours: its group's, if runs are grouped.
  place(line) {
    return this.view.grouped ? this.data.runs[line.run].group : line.run;
  },

  // Show a part of an axis in all charts along it; null shows the whole.
  zoomed(axis, range) {
    this.view.zoom[axis] = range;
    const [min, max] = this.range(axis);
    for (const plot of this.plots.values()) if (plot.chart.along === axis) plot.u.setScale("x", { min, max });
    document.getElementById("whole").disabled = !Object.values(this.view.zoom).some(Boolean);
  },

  hovered(plot) {
    this.pointer = plot;
    if (!plot) for (const other of this.plots.values()) other.u.setCursor({ left: -10, top: -10 });
  },

  // Move the cursors of all other charts to the same moment.
  cursorMoved(plot) {
    if (plot !== this.pointer || plot.u.cursor.left < 0) return;
    const x = plot.u.posToVal(plot.u.cursor.left, "x");
    for (const other of this.plots.values()) {
      if (other === plot) continue;
      const place = this.moment(plot, x, other.chart.along);
      const inside = place !== null && place >= other.u.scales.x.min && place <= other.u.scales.x.max;
      const left = inside ? other.u.valToPos(place, "x") : -10;
      other.u.setCursor({ left, top: inside ? other.u.over.clientHeight / 2 : -10 });
    }
  },

  // A place on a chart's axis, on another axis: where the chart's first run was at that moment.
  moment(plot, x, axis) {
    if (plot.chart.along === axis) return x;
    const run = plot.lines.length ? plot.lines[0].run : 0;
    const table = this.data.runs[run].tables.steps;
    if (!table) return null;
    const rows = table[`x.${axis}`].flatMap((v, i) => (v === null || table[`x.${plot.chart.along}`][i] === null ? [] : [i]));
    const line = { x: rows.map((i) => table[`x.${plot.chart.along}`][i]), y: rows.map((i) => table[`x.${axis}`][i]) };
    return line.x.length ? at(line, [x])[0] : null;
  },

  // Draw everything again as the reader chose it.
  redraw() {
    showColours();
    for (const plot of this.plots.values()) plot.build();
    drawBars();
  },
};

// The style of each run: its colour, and whether it is shown.
function showColours() {
  const sheet = document.getElementById("runs") || document.head.appendChild(element("style", { id: "runs" }));
  sheet.textContent = page.data.runs.map((run, i) => {
    const place = page.place({ run: i }) % COLOURS;
    return `.r${i} { --c: var(--c${place}) } ${page.view.hidden.has(i) ? `main .r${i} { display: none }` : ""}`;
  }).join("\n");
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function button(label, title, action, pressed) {
  const made = element("button", { type: "button", title, textContent: label });
  if (pressed !== undefined) made.setAttribute("aria-pressed", pressed);
  made.addEventListener("click", () => action(made));
  return made;
}

// Buttons of a figure: log scale, CSV, larger.
function addButtons(figure, plot) {
  const mark = figure.dataset.chart;
  const buttons = element("span", { className: "buttons" });
  if (plot?.chart.shape === "lines") {
    const log = button("log", "logarithmic scale", () => {
      plot.log = !plot.log;
      log.setAttribute("aria-pressed", plot.log);
      plot.build();
    }, plot.log);
    buttons.append(log);
  }
  buttons.append(button("CSV", "download what this chart shows", () => download(`${mark}.csv`, csv(shownRows(mark)))));
  if (plot) buttons.append(button("⤢", "larger or smaller", () => figure.classList.toggle("large")));
  figure.querySelector("figcaption").prepend(buttons);
}

// Fill the figures; `old` plots are used again where they show the same chart.
function fillFigures(old = new Map()) {
  page.plots = new Map();
  for (const figure of document.querySelectorAll("main figure[data-chart]")) {
    const mark = figure.dataset.chart;
    if (mark !== "phases") {
      const place = figure.querySelector(".plot");
      const known = old.get(mark);
      if (known) place.replaceWith(known.element);
      page.plots.set(mark, known || new Plot(page, mark, place));
      known?.update();
      old.delete(mark);
    }
    addButtons(figure, page.plots.get(mark));
  }
  for (const plot of old.values()) plot.destroy();
}

// What can be shown and hidden: runs, or groups of those that differ only by their seed.
function legend() {
  const list = element("nav", { id: "legend" });
  list.setAttribute("aria-label", "Runs");
  const { runs: all, groups } = page.data;
  const members = (group) => all.flatMap((run, i) => (run.group === group ? [i] : []));
  const entries = page.view.grouped ? groups.map((name, g) => [name, members(g)]) : all.map((run, i) => [run.name, [i]]);
  for (const [name, runs] of entries) {
    const box = element("input", { type: "checkbox", checked: runs.some((i) => !page.view.hidden.has(i)) });
    box.addEventListener("change", () => {
      for (const i of runs) page.view.hidden[box.checked ? "delete" : "add"](i);
      page.redraw();
    });
    const dash = MORE_DASHES[Math.floor(page.place({ run: runs[0] }) / COLOURS) % MORE_DASHES.length];
    const key = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const path = key.appendChild(document.createElementNS(key.namespaceURI, "path"));
    path.setAttribute("d", "M1 4H21");
    if (dash) path.setAttribute("stroke-dasharray", dash.join(" "));
    const shown = element("span", { textContent: name });
    list.append(element("label", { className: `r${runs[0]}`, title: name }, box, key, shown));
  }
  return list;
}

function smoothing() {
  const range = { type: "range", id: "smoothing", min: 0, max: 0.99, step: 0.01 };
  const slider = element("input", { ...range, value: page.view.smoothing });
  const shown = element("output", { textContent: page.view.smoothing });
  slider.addEventListener("input", () => {
    page.view.smoothing = Number(slider.value);
    shown.textContent = slider.value;
    for (const plot of page.plots.values()) if (plot.chart.shape === "lines") plot.build();
  });
  return element("label", { title: "weight of the past in a moving average; 0: none" }, "Smoothing", slider, shown);
}

function grouping() {
  const box = element("input", { type: "checkbox", id: "grouped", checked: page.view.grouped });
  box.addEventListener("change", () => {
    page.view.grouped = box.checked;
    document.getElementById("legend")?.replaceWith(legend());
    page.redraw();
  });
  const title = "runs that differ only by their seed as their mean, with a band from least to greatest";
  return element("label", { title }, box, "Group seeds");
}

function fillBar() {
  const { runs, groups, live } = page.data;
  const whole = button("Whole range", "show all steps again; a double click in a chart does it for its axis", () => {
    for (const axis of Object.keys(page.data.axes)) page.zoomed(axis, null);
  });
  whole.id = "whole";
  whole.disabled = !Object.values(page.view.zoom).some(Boolean);
  const all = button("CSV of all", "download what all charts show", () => download("report.csv", csv(allRows())));
  const controls = element("div", { id: "controls" }, smoothing());
  if (groups.length < runs.length) controls.append(grouping());
  controls.append(whole, all);
  if (live) controls.append(element("span", { id: "live", role: "status" }));
  document.getElementById("bar").replaceChildren(...(runs.length > 1 ? [legend()] : []), controls);
}

showColours();
if (page.data.runs.length || page.data.live) fillBar();
fillFigures();
drawBars();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const plot of page.plots.values()) plot.u.redraw(false);
});
